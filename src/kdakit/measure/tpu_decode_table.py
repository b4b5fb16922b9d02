"""Schedules of decoding beside the time that memory needs for the same bytes, as a Markdown table."""

from __future__ import annotations

from typing import Any

from kdakit.measure.generated import markdown_table
from kdakit.measure.tpu_kernels import CHIPS, DECODING, Job

# Published, for what JAX calls a device: on a TPU7x that is one of its two cores, with half of the chip's memory bandwidth.
HBM_TB_S = {"v4": 1.228, "v5e": 0.819, "v5p": 2.765, "v6e": 1.64, "tpu7x": 3.69}
CALLS = {
    "step": "`fused_recurrent_kda`, states given away",
    "decode": "over a pool",
    "layer_decode": "a layer's step over a pool: convolutions, windows and gated norm in it",
}
HEADER = ["chip", "call", "rows", "kernel", "XLA around it", "ms at nominal clock", "MB", "memory's floor, ms", "of the floor"]


def render(found: dict[tuple[str, Job], dict[str, Any]]) -> str:
    """Calls of more than one row; '' if there are none."""
    rows = []
    for (chip, job), row in found.items():
        if job.kernel not in DECODING or job.B == 1:
            continue
        (kernel,) = row["kernels"]
        own, milliseconds = kernel["bundles_per_step"] * kernel["steps"] / 1e6, row["cycles"] / CHIPS[chip].ghz / 1e6
        floor = kernel["hbm_bytes"] / HBM_TB_S[chip] / 1e9
        sizes = f"{own:.4f}", f"{row['xla_cycles'] / 1e6:.4f}", f"{milliseconds:.4f}", f"{kernel['hbm_bytes'] / 1e6:.0f}"
        rows.append([chip, CALLS[job.kernel], str(job.B), *sizes, f"{floor:.4f}", f"{milliseconds / floor:.2f}"])
    title = "A token of each row, H32 K=V=128, bfloat16 tokens, float32 states, bounded gate; M cycles, branches counted in every step:"
    return f"{title}\n\n{markdown_table(HEADER, rows, tuple(range(2, len(HEADER))))}" if rows else ""
