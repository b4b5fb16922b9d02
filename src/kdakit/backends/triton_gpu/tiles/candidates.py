"""What `kdakit bench --tune` tries for each kernel: the call that it times, what a choice may depend on, and the fields of Config."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from kdakit.backends.triton_gpu.config import Config, padded
from kdakit.problem import Problem


class Search(NamedTuple):
    mode: str  # fwd, fwdbwd or decode
    depends: tuple[str, ...]  # conditions of the row that is written
    tries: tuple[dict[str, Any], ...]


def _grid(**fields) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(fields, values, strict=True)) for values in product(*fields.values()))


SEARCHES = {
    "prepare": Search(
        "fwd", ("dtype", "form", "gate", "K_is"), _grid(prepare_warps=(4, 8), prepare_registers=(0, 128, 168), vector=(4, 8))
    ),
    "scan": Search(
        "fwd", ("dtype", "heads", "K_is", "V_is"),
        tuple(dict(block_v=v, scan_warps=w, scan_stages=s) for v, w in ((32, 4), (64, 4), (64, 8), (128, 8)) for s in (2, 3, 4)),
    ),
    "step": Search("decode", ("heads", "K_is", "V_is"), _grid(step_block_v=(8, 16, 32, 64), step_warps=(1, 2, 4))),
    "replay": Search(
        "fwdbwd", ("dtype", "K_is", "V_is"),
        tuple(dict(replay_block_v=v, replay_warps=w, replay_stages=s) for v, w in ((32, 4), (64, 4), (128, 8)) for s in (1, 2, 3)),
    ),
    "reverse": Search(
        "fwdbwd", ("dtype", "heads", "K_is", "V_is"),
        tuple(dict(reverse_block_v=v, reverse_warps=w, reverse_stages=s) for v, w in ((32, 4), (64, 4), (128, 8)) for s in (1, 2, 3)),
    ),
    "products": Search(
        "fwdbwd", ("dtype", "K_is", "V_is"),
        tuple(dict(slice_v=v, product_slice_k=k, product_warps=w, product_stages=s)
              for v in (32, 64) for k, w in ((64, 4), (128, 8)) for s in (1, 2, 3)),
    ),
    "gradient": Search("fwdbwd", ("dtype", "form", "gate", "K_is"), _grid(gradient_registers=(0, 128, 168), gradient_warps=(8,))),
    "slices": Search(
        "fwdbwd", ("dtype", "K_is"), tuple(dict(slice_k=k, slice_warps=w) for k, w in ((16, 4), (32, 2), (64, 4), (128, 4), (128, 8)))
    ),
}  # fmt: skip


def candidates(kernel: str, problem: Problem, config: Config) -> list[dict[str, Any]]:
    """What the kernel uses now, then everything else that fits K and V."""
    fields = SEARCHES[kernel].tries[0]
    now = {name: getattr(config, name) for name in fields}
    limits = dict.fromkeys(("slice_k", "product_slice_k"), padded(problem.K))
    limits |= dict.fromkeys(("block_v", "replay_block_v", "reverse_block_v", "slice_v", "step_block_v"), padded(problem.V))
    fits = [use for use in SEARCHES[kernel].tries if all(use[n] <= limit for n, limit in limits.items() if n in use)]
    return [now, *(use for use in fits if use != now)]
