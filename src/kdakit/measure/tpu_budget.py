"""What a Pallas kernel needs by its own specification: VMEM, matrix-unit FLOPs, bytes to and from HBM. Read from its jaxpr, anywhere."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Budget(NamedTuple):
    name: str
    steps: int
    vmem_bytes: int  # blocks, twice each since copies overlap with work, and scratch, padded to tiles; temporaries are not in it
    dot_flops: int
    hbm_bytes: int


def budgets(function, arguments: tuple) -> list[Budget]:
    """One for each pallas_call of `function`, in the order of the program."""
    import jax

    return [_budget(eqn) for eqn in _equations(jax.make_jaxpr(function)(*arguments).jaxpr) if eqn.primitive.name == "pallas_call"]


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _budget(eqn) -> Budget:
    mapping, kernel = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    steps = math.prod(int(n) for n in mapping.grid)
    vmem = hbm = 0
    for block in mapping.block_mappings:
        if "any" in str(block.transformed_block_aval.memory_space).lower():  # stays in HBM; the kernel copies all of it, once
            hbm += math.prod(block.array_aval.shape) * block.array_aval.dtype.itemsize
            continue
        shape = [int(getattr(d, "block_size", d) or 1) for d in block.block_shape]
        vmem += 2 * padded_bytes(shape, block.array_aval.dtype)
        hbm += _visits(mapping.grid, block) * math.prod(shape) * block.array_aval.dtype.itemsize
    vmem += sum(padded_bytes(a.shape, a.dtype) for a in mapping.scratch_avals if "vmem" in str(a.memory_space).lower())
    return Budget(_name(eqn), steps, vmem, steps * _dot_flops(kernel), hbm)


def _name(eqn) -> str:
    given = eqn.params.get("name_and_src_info") or eqn.params.get("name")
    return str(getattr(given, "name", given))


def _visits(grid, block) -> int:
    """How often the block is copied: once per step if its index depends on the last grid axis, else once per visit of the others."""
    index = block.index_map_jaxpr.jaxpr
    used = {v for v in index.outvars if type(v).__name__ != "Literal"}
    for eqn in reversed(index.eqns):
        if used & set(eqn.outvars):
            used |= {v for v in eqn.invars if type(v).__name__ != "Literal"}
    depends = index.invars[len(grid) - 1] in used
    constant = all(type(v).__name__ == "Literal" for v in index.outvars)
    return 1 if constant else math.prod(int(n) for n in (grid if depends else grid[:-1]))


def _dot_flops(kernel) -> int:
    total = 0
    for eqn in _equations(kernel):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[d] for d in contracted)
    return total


def padded_bytes(shape, dtype: Any) -> int:
    """In VMEM the last two axes are padded to tiles of (8 * 4 / itemsize, 128), or (8, 128) where those fit and the others do not: strided
    loads of 8 bfloat16 heads step over 4 words."""
    sizes = [1, 1, *(int(d) for d in shape)]
    rows = 32 // dtype.itemsize
    rows = 8 if sizes[-2] % rows and sizes[-2] % 8 == 0 else rows
    sizes[-1], sizes[-2] = -(-sizes[-1] // 128) * 128, -(-sizes[-2] // rows) * rows
    return math.prod(sizes) * dtype.itemsize
