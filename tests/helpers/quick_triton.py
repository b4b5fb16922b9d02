"""Triton's interpreter, quicker: most of its time goes into describing and checking what it has described and checked before.

Values are not touched: the same NumPy functions are called with the same numbers, in the same order.

Only of the version whose code this was read in; another one interprets as it comes.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np

VERSION = "3.6."
plain = SimpleNamespace()  # what was replaced by something that computes: test_triton_interpreted.py compares


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
    _leave_equal_types_alone(triton.language.semantic.TritonSemantic, tl)
    _look_for_no_overflow_that_nobody_hears_of(triton.language.semantic.TritonSemantic)
    _hand_on_once(interpreter)
    _reduce_in_rows(interpreter)
    _shift_bfloat16(interpreter, tl)


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


def _leave_equal_types_alone(semantic, tl) -> None:
    """Two tensors of one type compute in it, and one with a number of its kind; float16 and bfloat16 do not where they are divided."""
    check, cast, tensor = semantic.binary_op_type_checking_impl, semantic.cast, tl.tensor
    own = {id(x) for x in (tl.float32, tl.float64, tl.int1, tl.int32, tl.int64, tl.uint32, tl.uint64)}
    integers = {id(tl.int32), id(tl.int64)}

    def of_its_kind(number, element) -> bool:
        if element is tl.float32:
            return type(number) is float or type(number) is int
        return id(element) in integers and type(number) is int and -(2**31) <= number < 2**31

    def check_others(self, lhs, rhs, left=False, right=False, arithmetic=True, divides=False):
        if type(lhs) is tensor:
            element = lhs.dtype
            if type(rhs) is tensor:
                if element is rhs.dtype and id(element) in own:
                    return self.broadcast_impl_value(lhs, rhs)
            elif arithmetic and of_its_kind(rhs, element):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, element))
        elif type(rhs) is tensor and arithmetic and of_its_kind(lhs, rhs.dtype):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, left, right, arithmetic, divides)

    def cast_others(self, input, dst_ty, *rest, **named):
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, *rest, **named)

    semantic.binary_op_type_checking_impl, semantic.cast = check_others, cast_others


def _look_for_no_overflow_that_nobody_hears_of(semantic) -> None:
    """Every int32 result is computed in int64 too, for an assertion that is made with debug alone."""
    look = semantic.binary_op_sanitize_overflow_impl

    def look_for_debug(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            look(self, lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = look_for_debug


def _hand_on_once(interpreter) -> None:
    """A function of triton.language is called through two others, which copy its arguments by name; the second asks for `_semantic`."""
    second = interpreter.tl.core.builtin(lambda: None).__code__

    def patch(obj, name, member, builder, scope):
        semantic = interpreter.TritonSemantic(builder)
        function = member.__wrapped__ if getattr(member, "__code__", None) is second else member

        def hand_on(*args, **named):
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(obj, name, hand_on)

    interpreter._patch_attr = patch


def _reduce_in_rows(interpreter) -> None:
    """What combines two elements combines all of two slices, one slice after another as before, not one element after another."""
    plain.reduce = one_by_one = interpreter.ReduceOps.generic_reduce

    def in_rows(self, input):
        if self.axis is None or input[0].handle.data.ndim == 1:
            return one_by_one(self, input)
        slices = [[self.to_tensor(part, x.dtype) for part in np.moveaxis(x.handle.data, self.axis, 0)] for x in input]
        total, *others = zip(*slices, strict=True)
        for part in others:
            found = self.combine_fn.fn(*total, *part)
            found = found if isinstance(found, tuple) else (found,)
            total = [self.to_tensor(x.handle.data, given.dtype) for x, given in zip(found, input, strict=True)]
        ends = [x.handle.data for x in total]
        ends = [np.expand_dims(x, self.axis) for x in ends] if self.keep_dims else ends
        return [self.to_tensor(x, given.dtype) for x, given in zip(ends, input, strict=True)]

    interpreter.ReduceOps.generic_reduce = in_rows


def _shift_bfloat16(interpreter, tl) -> None:
    """bfloat16 is the upper half of a float32, unless that is subnormal: those are left to the interpreter, which has its own way."""
    plain.convert = convert = interpreter._convert_float

    def shift(input, input_dtype, output_dtype, rounding_mode):
        if rounding_mode is None and input_dtype is tl.float32 and output_dtype is tl.bfloat16:
            bits = np.ascontiguousarray(input).view(np.uint32)
            if not _subnormal(bits, 23).any():
                return (bits >> 16).astype(np.uint16)
        if rounding_mode is None and input_dtype is tl.bfloat16 and output_dtype is tl.float32:
            bits = np.ascontiguousarray(input).view(np.uint16)
            if not _subnormal(bits, 7).any():
                return bits.astype(np.uint32) << np.uint32(16)
        return convert(input, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = shift


def _subnormal(bits, width: int):
    """Exponent 0, significand not: 0 < |bits| < 2^width."""
    sizes = bits & bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)
    return sizes - bits.dtype.type(1) < bits.dtype.type((1 << width) - 1)
