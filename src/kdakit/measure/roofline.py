"""The least a KDA call must move and multiply, and how long a chip would need for that.

Bytes: every input once, every output once; e is the size of an element of q, k, v, g and beta (4 for a ready-made log-decay), states are
float32. Per token, with HV = H and per head:

    forward      q, k, v, g, beta read, o written                                        (3 K + 2 V + 1) e
    backward     the same inputs and d_o read, d_q, d_k, d_v, d_g, d_beta written        (6 K + 3 V + 2) e
    states       K V 4 bytes each, if the job has them: initial and final; backward: d_final and d_initial as well

Multiplications and additions of the chunk form with chunks of C = 64, per chunk and head:

    A_qk, A_kk      4 C^2 K            k and q against the state, update     6 C K V
    w, u            2 C^2 (K + V)      A_qk v_new                            2 C^2 V

and of the token recurrence 7 K V (decay, read, write, read). A backward has two products for each one of the forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

CHUNK = 64


class Chip(NamedTuple):
    """Peaks from data sheets: bytes/s of memory, dense FLOP/s of the matrix units."""

    bytes_per_s: float
    half: float  # bfloat16 and float16
    tf32: float


# By a part of the name that the driver gives; the first that is found counts.
CHIPS = {
    "H200": Chip(4.8e12, 989e12, 494e12),
    "H100 PCIe": Chip(2.0e12, 756e12, 378e12),
    "H100": Chip(3.35e12, 989e12, 494e12),
    "GH200": Chip(4.0e12, 989e12, 494e12),
    "B200": Chip(8.0e12, 2250e12, 1125e12),
    "A100": Chip(2.04e12, 312e12, 156e12),
    "L40S": Chip(0.864e12, 362e12, 183e12),
    "RTX 4090": Chip(1.008e12, 165e12, 83e12),
    "MI300X": Chip(5.3e12, 1307e12, 654e12),
}


def chip(name: str) -> Chip | None:
    return next((c for part, c in CHIPS.items() if part in name), None)


def least_bytes(job: Any) -> int:
    s, e = job.shape, {"float64": 8, "float32": 4}.get(job.dtype, 2)
    gate = max(e, 4) if job.gate == "log_decay" else e
    sequences = len(s.lengths) if s.lengths and job.mode != "decode" else s.B
    rows = job.tokens * s.H
    forward = rows * (4 * s.K * e + s.K * gate + e)
    states = 2 * sequences * s.H * s.K * s.K * 4 if job.states else 0
    if not job.trains:
        return forward + states
    return forward + rows * (7 * s.K * e + 2 * s.K * gate + 2 * e) + 2 * states


def least_flops(job: Any) -> int:
    s = job.shape
    if job.mode == "decode":
        return 7 * job.tokens * s.H * s.K * s.K
    forward = job.tokens * s.H * (10 * CHUNK * s.K + 6 * s.K * s.K)
    return 3 * forward if job.trains else forward


def compare(job: Any, median_ms: float, device: str) -> dict[str, float]:
    """What a measured time means: bytes/s and FLOP/s that were needed, and the share of the chip's least time."""
    size, flops = least_bytes(job), least_flops(job)
    found = {"least_bytes": size, "least_flops": flops, "bytes_per_s": 1000 * size / median_ms, "flops_per_s": 1000 * flops / median_ms}
    peak = chip(device)
    if peak is None:
        return found
    matrix = peak.half if job.dtype in ("bfloat16", "float16") else peak.tf32
    floor = 1000 * max(size / peak.bytes_per_s, flops / matrix if job.mode != "decode" else 0.0)
    return found | {"bandwidth_share": found["bytes_per_s"] / peak.bytes_per_s, "floor_ms": floor, "floor_share": floor / median_ms}
