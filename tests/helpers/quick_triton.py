"""Triton's interpreter, quicker: half of its time goes into describing shapes that it has described before. Values are not touched.

Only of the version whose code this was read in; another one interprets as it comes.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

VERSION = "3.6."


def hasten() -> None:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith(VERSION) or getattr(interpreter, "hastened", False):
        return
    interpreter.hastened = True
    _patch_once_a_launch(interpreter, tl)
    _name_dtypes_once(interpreter)
    _type_tuples_when_asked(tl.core)
    _describe_shapes_once(tl.core)
    _leave_equal_shapes_alone(triton.language.semantic.TritonSemantic)


def _patch_once_a_launch(interpreter, tl) -> None:
    """The functions of triton.language are replaced anew at every call of a jitted helper."""
    patch, launched = interpreter._patch_lang, []

    def patch_once(function):
        if launched:
            return interpreter._LangPatchScope()  # nothing changed, nothing to restore
        scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        launched.append(scope.restore)
        scope.restore = lambda: launched.pop()()
        return scope

    interpreter._patch_lang = patch_once


def _name_dtypes_once(interpreter) -> None:
    """A table of all dtypes is made for every look into it."""
    look, known = interpreter._get_np_dtype, {}

    def look_once(dtype):
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = look(dtype)
        return found

    interpreter._get_np_dtype = look_once


def _type_tuples_when_asked(core) -> None:
    """Every shape is a tuple, whose type nobody asks for."""
    field = core.tuple.__getattr__

    def init(self, args, type=None):
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def missing(self, name):
        if name == "type":
            self.type = core._type_for_tuple_values(self.values)
            return self.type
        return field(self, name)

    core.tuple.__init__, core.tuple.__getattr__ = init, missing


def _describe_shapes_once(core) -> None:
    check = core.block_type.__init__

    @cache
    def described(*sizes):
        """Its numbers, how many elements, its text, and both as tensors have them."""
        block = core.block_type.__new__(core.block_type)
        check(block, core.float32, list(sizes))
        return block.shape, block.numel, str(block.shape), core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(block.numel)

    known = {}

    def init_block(self, element_ty, shape):
        sizes = (*shape,)
        if sizes not in known:
            known[sizes] = described(*core._unwrap_shape(shape))
        self.element_ty, self.described = element_ty, known[sizes]
        self.shape, self.numel, text = self.described[:3]
        self.name = f"<{text}, {element_ty}>"

    scalar = core.tuple([]), core.constexpr(1)

    def init_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.described[3:] if type.is_block() else scalar

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor


def _leave_equal_shapes_alone(semantic) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_others(self, left, right):
        a, b = left.type, right.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_others
