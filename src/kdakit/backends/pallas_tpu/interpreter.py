"""Kernels without a TPU, in one of two interpreters.

Pallas' own turns a kernel into XLA operations: quick, and without effects, so that a call can be mapped, split over devices, checkpointed
as on a TPU. The TPU interpreter simulates memories, copies and semaphores, fills with NaN what nobody has written, and stops at an index
outside an array; its callbacks forbid `jax.checkpoint` and calls on several devices. KDAKIT_INTERPRETER=tpu asks for it.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from kdakit.backends.pallas_tpu.tile import Config
from kdakit.mesh_axes import all_varying, result_like, vary


def interpret_mode(config: Config):
    """The argument `interpret` of a pallas_call."""
    if not config.interpret:
        return False
    if config.race_seed is not None:
        return pltpu.InterpretParams(
            detect_races=True, random_seed=config.race_seed, uninitialized_memory="nan",
            dma_execution_mode="eager" if config.eager_dma else "on_wait",
        )  # fmt: skip
    return pltpu.InterpretParams() if os.environ.get("KDAKIT_INTERPRETER") == "tpu" else True


def varying_call(make, results: list, arrays: list, config: Config) -> list:
    """make(shapes of results, `interpret`)(*arrays), a pallas_call: results vary over the mesh axes over which any of the arrays does."""
    axes, mode = all_varying(arrays), interpret_mode(config)
    arrays = [vary(x, axes) for x in arrays]
    call = make([result_like(np.zeros(()) if mode is True else arrays[0], x.shape, x.dtype) for x in results], mode)
    return [vary(x, axes) for x in apart(call, results, *arrays)] if mode is True else call(*arrays)


def apart(call, results: list, *arrays) -> list:
    """call(*arrays), of shapes and dtypes as `results`, interpreted when the program is lowered, where arrays know nothing of mesh axes.

    Inside shard_map the interpreter's own loops would mix arrays that vary over mesh axes with indices that do not, which JAX refuses.
    """
    return _interpreted.bind(*arrays, call=call, results=tuple((x.shape, jax.numpy.dtype(x.dtype)) for x in results))


_interpreted: Any = Primitive("kdakit_interpreted")
_interpreted.multiple_results = True
_interpreted.def_impl(lambda *arrays, call, results: call(*arrays))
_interpreted.def_abstract_eval(lambda *_, call, results: [jax.core.ShapedArray(*x) for x in results])


def _lower(ctx, *values, call, results):
    plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    return mlir.lower_fun(call, multiple_results=True)(ctx.replace(avals_in=plain), *values)


mlir.register_lowering(_interpreted, _lower)
