"""A call whose batch and heads lie on several devices: each device runs its part, and nothing travels.

No compiler can split a kernel that it does not know, so a call on a mesh becomes a shard_map. Which mesh axes split what is read from the
arrays' types (axes of the kind Explicit, which `jax.make_mesh` makes) or, outside of jit, from where the arrays are. Axes of the kind Auto
tell nothing while a program is traced: there the caller says it.

    with split(batch="data", heads="model"):
        step = jax.jit(train_step)(...)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kdakit.problem import Arrays, Problem

Axes = tuple[str, ...]


class Split(NamedTuple):
    """Mesh axes over which a call is split."""

    batch: Axes
    heads: Axes
    mesh: Any = None


# Part of what jit looks up its programs by, so that one traced outside is not taken inside.
_said: Any = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None


@contextlib.contextmanager
def split(batch: str | Axes | None = None, heads: str | Axes | None = None, mesh: Any = None) -> Iterator[None]:
    """Calls inside split their batch over the mesh axes `batch` and their heads over `heads`, one name or several.

    It is read where a call is traced: put it around the call, the layer, or the first call of the jitted function. The mesh is the one of
    the call's arrays, or that of `jax.set_mesh`, unless given. An axis that does not divide B, or the heads, splits nothing there; packed
    sequences have no batch to split. Inside shard_map it says nothing.
    """
    if _said is None:
        raise NotImplementedError(f"split needs jax >= 0.8, got {jax.__version__}: use jax.shard_map")
    with _said(Split(_names(batch), _names(heads), mesh)):
        yield


def _names(axes: Any) -> Axes:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def over_mesh(problem: Problem, arrays: Arrays, call):
    """call(problem, arrays), by each device on its own part where the arrays lie on a mesh. `call` returns o, final_state, states."""
    found = _found(arrays)
    if found is None:
        return call(problem, arrays)
    mesh, batch, heads = found.mesh, found.batch, found.heads
    size = lambda axes: math.prod(mesh.shape[axis] for axis in axes)
    batch = batch if problem.varlen != "cu_seqlens" and problem.B % size(batch) == 0 else ()
    heads = heads if _heads_fit(problem, size(heads)) else ()
    shared = size(heads) > problem.H  # several devices have value heads of one q and k
    specs, results = _specs(batch, heads, shared)

    def local(arrays: Arrays):
        if shared:
            own = lax.axis_index(heads) * problem.H // size(heads)
            arrays = arrays._replace(**{n: lax.dynamic_slice_in_dim(getattr(arrays, n), own, 1, 2) for n in "qk"})
        (B, _, H, _), HV = arrays.q.shape, arrays.v.shape[2]
        N = problem.N if problem.varlen == "cu_seqlens" else B
        return call(problem.replace(B=B, H=H, HV=HV, N=N), arrays)

    arrays = arrays._replace(A_log=_shaped(arrays.A_log, (problem.HV,)), dt_bias=_shaped(arrays.dt_bias, (problem.HV, problem.K)))
    given = Arrays(*(None if x is None else spec for x, spec in zip(arrays, specs, strict=True)))
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        pairs = zip(arrays, given, strict=True)
        arrays = Arrays(*(None if x is None else jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in pairs))
    o = problem.options
    wanted = (results[0], results[1] if o.output_final_state else None, results[2] if o.return_intermediate_states else None)
    return jax.shard_map(local, mesh=mesh, in_specs=(given,), out_specs=wanted)(arrays)


def unsplit(arrays: Arrays) -> str | None:
    """Why a kernel cannot run where the arrays lie, since nobody has said how they are split; None: it can."""
    mesh = _mesh(arrays)
    if mesh is None or _found(arrays) is not None:
        return None
    manual = _manual_axes()
    free = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in manual and mesh.shape[axis] > 1}
    if not free:
        return None
    if manual:
        return f"it is inside a shard_map that leaves the axes {free} to jit, and no compiler splits its kernels: make them manual too"
    return (
        f"the arrays lie on a mesh of {free} devices, and no compiler splits its kernels: say which axes split batch and heads, with "
        f"`with kdakit.parallel.jax.split(batch=.., heads=..)`, or call it inside shard_map"
    )


def _found(arrays: Arrays) -> Split | None:
    """How the call is to be split; None: not at all, because there is one device or a shard_map around, or because nobody knows."""
    mesh, said = _mesh(arrays), None if _said is None else _said.value
    if said is not None and said.mesh is not None:
        mesh = said.mesh
    if mesh is None or mesh.size == 1 or _manual_axes():
        return None
    if said is not None:
        return said._replace(mesh=mesh)
    batch, heads = _read(arrays)
    if batch or heads or all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return Split(batch, heads, mesh)
    return None


def _mesh(arrays: Arrays) -> Any:
    """The mesh of the call's arrays, or the one that is set; None where there is none."""
    around = jax.sharding.get_abstract_mesh()
    if not around.empty:
        return around
    for x in arrays:
        if x is not None:
            place = _sharding(x)
            if isinstance(place, NamedSharding) and not place.mesh.empty and place.mesh.size > 1:
                return place.mesh
    return None


def _sharding(x: Any) -> Any:
    """Where a concrete array is; of a traced one what its type tells."""
    return jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)


def _read(arrays: Arrays) -> tuple[Axes, Axes]:
    """The axes that split batch and heads, as the arrays tell."""
    places = [(x, 0, 2) for x in (arrays.v, arrays.g, arrays.beta, arrays.q, arrays.k)] + [(arrays.initial_state, 0, 1)]
    found: list[Axes] = [(), ()]
    for x, *dims in places:
        place = None if x is None else _sharding(x)
        if isinstance(place, NamedSharding):
            spec = tuple(place.spec) + (None,) * x.ndim
            found = [axes or _names(spec[dim]) for axes, dim in zip(found, dims, strict=True)]
    return found[0], found[1]


def _manual_axes() -> frozenset:
    """Those of the shard_map around the call."""
    around = jax.sharding.get_abstract_mesh()
    return frozenset() if around.empty else frozenset(around.manual_axes)


def _heads_fit(problem: Problem, devices: int) -> bool:
    """Each device gets whole heads: of q and k too, or the value heads of one."""
    return problem.HV % devices == 0 and (problem.H % devices == 0 or devices % problem.H == 0)


def _shaped(x: Any, shape: tuple[int, ...]) -> Any:
    return x if x is None or x.shape == shape else x.reshape(shape)


def _specs(batch: Axes, heads: Axes, shared: bool) -> tuple[Arrays, tuple]:
    """The call's arrays and its results."""
    b, h = batch or None, heads or None
    tokens, keys, states = P(b, None, h), P(b, None, None if shared else h), P(b, h)
    arrays = Arrays(keys, keys, tokens, tokens, tokens, P(h), P(h), states, P(), P(), P(b))
    return arrays, (tokens, states, P(b, None, h))
