"""From a call's arrays to blocks: padding, the grid, and which block each step sees."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kdakit.backends.pallas_tpu.chip import this_chip
from kdakit.backends.pallas_tpu.gate import member_matrix
from kdakit.backends.pallas_tpu.interpreter import varying_call
from kdakit.backends.pallas_tpu.sequences import Chunks, Table, chunk_starts, make_chunks, make_table, offsets, packed_ids, segment_rows
from kdakit.backends.pallas_tpu.tile import Config, Tile, make_tile, padded, steps_hold_sequences
from kdakit.problem import Arrays, Problem


class Operand(NamedTuple):
    """An input (array) or output (its ShapeDtypeStruct) of a kernel, and how it is cut into blocks."""

    value: Any
    block: tuple | None  # None: it stays in HBM
    index: Any = None  # (batch, head block, step, chunk, sequence) -> block indices
    restore: Any = None  # of an output: from the kernel's layout to the caller's; None: they are the same
    parts: int = 1  # of an input: blocks of so many parts of the third axis, each with a ref of its own (`heads.read_heads`)

    def split(self) -> list[Operand]:
        """An operand for each part, all of one array."""
        return [self] if self.parts == 1 else [self._replace(block=self._block(), index=self._index(n), parts=1) for n in range(self.parts)]

    def _block(self) -> tuple:
        return (*self.block[:2], self.block[2] // self.parts, *self.block[3:])

    def _index(self, n: int):
        def index(*place):
            first, second, third, *rest = self.index(*place)
            return first, second, third * self.parts + n, *rest

        return index


class Launch(NamedTuple):
    problem: Problem
    tile: Tile
    config: Config
    table: Table | Chunks | None
    grid: tuple[int, int, int]


def make_launch(problem: Problem, arrays: Arrays, config: Config, tokens: int | None = None) -> Launch:
    tile = make_tile(problem, config, tokens)
    table, steps = None, -(-problem.T // tile.C)
    if tile.tables:
        cu = offsets(arrays.cu_seqlens, problem.T)
        edges = chunk_starts(problem, cu) if problem.options.return_intermediate_states else None
        table = make_table(cu, problem.T, tile.C, edges)
        steps = table.block.shape[0]
    elif steps_hold_sequences(problem):
        table = make_chunks(offsets(arrays.cu_seqlens, problem.T), problem.T, tile.C)
    return Launch(problem, tile, config, table, (problem.B, -(-problem.HV // tile.heads), steps))


def token_operand(launch: Launch, value) -> Operand:
    """[B, T, HV, K], or its ShapeDtypeStruct, in the layout of the tile's blocks."""
    t, (B, T, HV, width) = launch.tile, value.shape
    if t.layout == "heads":
        index = lambda b, h, s, chunk, sequence: (b, h, chunk, 0)
        return Operand(_turned(value), (1, t.heads, t.C, width), index, _turned)
    if t.layout == "merged":
        index = lambda b, h, s, chunk, sequence: (b, chunk, 0, 0)
        merged = _reshaped(value, (B, T * HV // 8, 8, width))
        return Operand(merged, (1, t.C * HV // 8, 8, width), index, lambda x: x.reshape(value.shape))
    return Operand(value, (1, t.C, t.heads, width), lambda b, h, s, chunk, sequence: (b, chunk, h, 0))


def input_operand(launch: Launch, value) -> Operand:
    """The same of an input; of more than 16 heads, 8 by 8: a strided load has 8 sublanes, and reaches fewer tokens if they lie apart."""
    t, found = launch.tile, token_operand(launch, value)
    apart = t.layout == "tokens" and t.heads > 16 and t.heads % 8 == 0 and value.dtype == jnp.bfloat16
    return found._replace(parts=t.heads // 8) if apart else found


def _turned(x):
    """[B, T, HV, K] <-> [B, HV, T, K], or its ShapeDtypeStruct; where XLA keeps the array head by head, nothing is moved."""
    B, T, HV, width = x.shape
    return shape_of((B, HV, T, width), x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.swapaxes(1, 2)


def _reshaped(x, shape):
    return shape_of(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)


def row_operand(launch: Launch, value) -> Operand:
    """[B, chunks, HV, C]."""
    t = launch.tile
    return Operand(value, (1, 1, t.heads, t.C), lambda b, h, s, chunk, sequence: (b, chunk, h, 0))


def state_operand(launch: Launch, value) -> Operand:
    """[N, HV, .., ..]."""
    return Operand(value, (1, launch.tile.heads, *value.shape[2:]), lambda b, h, s, chunk, sequence: (sequence, h, 0, 0))


def step_operand(launch: Launch, value, heads: int) -> Operand:
    """[B, steps, heads, ..]: what each step saves."""
    rest = value.shape[3:]
    return Operand(value, (1, 1, heads, *rest), lambda b, h, s, chunk, sequence: (b, s, h, *(0 for _ in rest)))


def input_operands(launch: Launch, arrays: Arrays) -> dict[str, Operand]:
    """The call's arrays as the kernels take them: heads repeated, lanes filled up, float16 widened, beta as rows."""
    p, t = launch.problem, launch.tile
    q, k = (lanes(jnp.repeat(x, p.group, axis=2) if p.group > 1 else x) for x in arrays[:2])
    found = {name: input_operand(launch, x) for name, x in zip("qkvg", (q, k, lanes(arrays.v), lanes(arrays.g)), strict=True)}
    found["beta"] = row_operand(launch, token_rows(t, arrays.beta))
    if t.gate != "log_decay":
        found["gate"] = Operand(gate_rows(p, t, arrays), (t.heads, 2, t.K), lambda b, h, s, chunk, sequence: (h, 0, 0))
    found["members"] = constant(jnp.asarray(member_matrix(t), jnp.bfloat16))
    if t.segments and launch.table is None:
        cu = offsets(arrays.cu_seqlens, p.T) if t.packed else None
        rows = segment_rows(arrays.segment_ids, t.C) if cu is None else segment_rows(packed_ids(cu, p.T), t.C, cu[-1])
        found["segments"] = Operand(rows, (1, 1, 2, t.C), lambda b, h, s, chunk, sequence: (b, chunk, 0, 0))
    if arrays.initial_state is not None:
        found["initial"] = state_operand(launch, pad_state(t, arrays.initial_state))
    return found


def whole_operand(launch: Launch, value) -> Operand:
    """[N, HV, .., ..] in HBM, or its ShapeDtypeStruct, with heads made up to whole blocks: the kernel copies what it wants."""
    heads = launch.grid[1] * launch.tile.heads
    shape = (value.shape[0], heads, *value.shape[2:])
    if isinstance(value, jax.ShapeDtypeStruct):
        return Operand(shape_of(shape, value.dtype), None)
    value = value.astype(jnp.float32)
    return Operand(value if value.shape == shape else jnp.pad(value, ((0, 0), (0, heads - value.shape[1]), (0, 0), (0, 0))), None)


def constant(value) -> Operand:
    return Operand(value, value.shape, lambda b, h, s, chunk, sequence: (0,) * value.ndim)


def token_rows(tile: Tile, x):
    """[B, T, HV] -> [B, chunks, HV, C] float32."""
    B, T, HV = x.shape
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -T % tile.C), (0, 0)))
    return x.reshape(B, -1, tile.C, HV).swapaxes(2, 3)


def from_token_rows(x, T: int):
    """[B, chunks, HV, C] -> [B, T, HV]."""
    x = x.swapaxes(2, 3)
    return x.reshape(x.shape[0], -1, x.shape[3])[:, :T]


def gate_rows(problem: Problem, tile: Tile, arrays: Arrays):
    """[HV, 2, K] float32: exp(A_log), or 1, and dt_bias, or 0."""
    HV, K = problem.HV, problem.K
    a = jnp.ones((HV, K), jnp.float32)
    if arrays.A_log is not None:
        a = a * jnp.exp(arrays.A_log.astype(jnp.float32)).reshape(HV, 1)
    bias = jnp.zeros((HV, K), jnp.float32) if arrays.dt_bias is None else arrays.dt_bias.astype(jnp.float32).reshape(HV, K)
    return lanes(jnp.stack([a, bias], 1))


def pad_state(tile: Tile, state):
    """float16 widened, rows and columns made up to whole lanes."""
    state = state.astype(jnp.float32) if state.dtype == jnp.float16 else state
    rows, columns = (tile.V, tile.K) if tile.state_v_first else (tile.K, tile.V)
    missing = (rows - state.shape[-2], columns - state.shape[-1])
    return state if missing == (0, 0) else jnp.pad(state, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))


def lanes(x):
    """float16 widened and the last axis made up to whole lanes."""
    x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x
    missing = padded(x.shape[-1]) - x.shape[-1]
    return x if missing == 0 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def run(launch: Launch, kernel, name: str, inputs: dict, outputs: dict, scratch: list, reverse: bool = False, aliases=None) -> dict:
    """One pallas_call; results by name. `reverse`: steps from last to first."""
    steps = launch.grid[2]

    def spec(operand: Operand):
        def index(b, h, s, *table):
            s = steps - 1 - s if reverse else s
            return operand.index(b, h, s, table[0][s] if by_visit else s, table[3][s] if by_visit else b)

        return pl.BlockSpec(memory_space=pl.ANY) if operand.block is None else pl.BlockSpec(operand.block, index)

    by_visit, table = isinstance(launch.table, Table), () if launch.table is None else tuple(launch.table)
    names, given = (list(inputs), list(outputs)), {n: x.split() for n, x in inputs.items()}
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(table), grid=launch.grid, in_specs=[spec(x) for part in given.values() for x in part],
        out_specs=[spec(x) for x in outputs.values()], scratch_shapes=scratch,
    )  # fmt: skip
    bound = partial(_bound, kernel, names, [len(part) for part in given.values()], type(launch.table), len(table))
    arrays, results = [*table, *(x.value for part in given.values() for x in part)], [x.value for x in outputs.values()]
    place = lambda name: len(table) + sum(len(given[n]) for n in names[0][: names[0].index(name)])
    make = lambda shapes, mode: pl.pallas_call(
        bound, name=name, grid_spec=grid_spec, out_shape=shapes,
        input_output_aliases={place(i): names[1].index(o) for i, o in (aliases or {}).items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=this_chip().vmem_limit
        ),
        interpret=mode,
    )  # fmt: skip
    found = varying_call(make, results, arrays, launch.config)
    return {n: x if o.restore is None else o.restore(x) for (n, o), x in zip(outputs.items(), found, strict=True)}


def _bound(kernel, names, parts: list[int], kind, tables: int, *refs):
    """kernel(table, inputs, outputs, scratch), the refs by name; a tuple of them for an input in parts."""
    refs = iter(refs)
    take = lambda count: tuple(islice(refs, count))
    table = kind(*take(tables)) if tables else None
    inputs = {name: take(count) if count > 1 else next(refs) for name, count in zip(names[0], parts, strict=True)}
    outputs = dict(zip(names[1], take(len(names[1])), strict=True))
    kernel(table, inputs, outputs, tuple(refs))


def shape_of(value_shape, dtype):
    return jax.ShapeDtypeStruct(value_shape, jnp.dtype(dtype))
