"""`kdakit bench --suite first_calls`: how long a first call takes with an empty Triton cache, and with a filled one.

K = V = 128, B = 1, H = 32, T = 4096, initial and final state, everything in the kernel but with a gate that is `given`; every process in
turn. `training` differentiates everything, `qkv` the sum of the outputs by q, k and v alone. Importing torch and kdakit and making the
inputs is not counted. Later lengths must compile nothing; `later` counts what they did.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from kdakit.measure import records, suites
from kdakit.measure.choices import UsageError

LATER = (1, 63, 64, 1000, 8192)
PROCESSES = [("bfloat16", gate, call) for call in ("training", "forward", "decode") for gate in ("bounded", "softplus", "given")]
PROCESSES += [(dtype, "softplus", call) for call in ("training", "forward") for dtype in ("float16", "float32")]
PROCESSES += [("bfloat16", gate, "qkv") for gate in ("bounded", "softplus", "given")]


def run(args) -> dict[str, Any]:
    if (reason := suites.cannot_run()) is not None:
        raise UsageError(f"--suite first_calls cannot run here: {reason}")
    rows: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "filled"):
            for job in PROCESSES:
                about = {"entry": " ".join(job), "contestant": f"{cache} cache"}
                got = in_a_process(job, f"{folder}/{'_'.join(job)}")
                (missing if "reason" in got else rows).append(about | got)
                made = records.record("first_calls", {"suite": "first_calls"}, rows, missing)
                if args.json:
                    records.save(made, args.json)
    return made


def in_a_process(job: tuple[str, str, str], cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kdakit.measure.first_calls", *job]
    done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if not lines:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return {"reason": f"its process ended with code {done.returncode}: {last}"}
    return json.loads(lines[-1]) | ({"exit": done.returncode} if done.returncode else {})


def first_call(dtype: str, gate: str, call: str) -> dict[str, Any]:
    """Seconds of the first call of this process, and what was compiled for it."""
    begin = time.perf_counter()
    import torch
    import triton

    compiled: list[tuple[str, float]] = []
    triton.knobs.compilation.listener = lambda *, src, metadata, times, cache_hit, **_: compiled.append(
        (metadata["name"], 0.0 if cache_hit else round(times.total / 1e6, 2))
    )
    one = OneCall(dtype, gate, call)
    one.inputs(64)
    torch.ones(8, device="cuda", requires_grad=True).float().sum().backward()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    length = 1 if call == "decode" else 4096
    row: dict[str, Any] = {"before_s": round(ready, 2), "first_s": round(one.seconds(length), 3)}
    row |= {"second_ms": round(one.seconds(length) * 1e3, 3), "compiled": compiled[:]}
    for T in LATER[:2] if call == "decode" else LATER:
        one.seconds(T)
    return row | {"later": len(compiled) - len(row["compiled"])}


class OneCall:
    """A public call of any length."""

    def __init__(self, dtype: str, gate: str, call: str):
        self.dtype, self.gate, self.call = dtype, gate, call
        self.options = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), gate != "given")
        self.options |= {"output_final_state": True, "backend": "triton_gpu"}  # 'auto' may take the CUDA library where that is built
        self.options |= {"lower_bound": -5.0, "safe_gate": True} if gate == "bounded" else {}

    def inputs(self, T: int, H: int = 32, K: int = 128):
        """(every input, the named ones among them)."""
        import torch

        x = [torch.randn(1, T, H, K, device="cuda") for _ in range(4)] + [torch.randn(1, T, H, device="cuda")]
        named = {"A_log": torch.zeros(H), "dt_bias": torch.zeros(H * K), "initial_state": torch.zeros(1, H, K, K)}
        if self.gate == "given":
            x[1:] = [x[1] / x[1].norm(dim=-1, keepdim=True), x[2], -x[3].abs(), x[4].sigmoid()]
            named = {"initial_state": named["initial_state"]}
        x = [p.to(getattr(torch, self.dtype)) for p in x]
        named = {n: p.cuda() for n, p in named.items()}
        differentiated = {"training": 8, "qkv": 3}.get(self.call, 0)
        return [p.requires_grad_(i < differentiated) for i, p in enumerate((*x, *named.values()))], named

    def seconds(self, T: int) -> float:
        import torch

        from kdakit.torch import chunk_kda, fused_recurrent_kda

        leaves, named = self.inputs(T)
        torch.cuda.synchronize()
        start = time.perf_counter()
        function = fused_recurrent_kda if self.call == "decode" else chunk_kda
        out = function(*leaves[:5], **named, **self.options)
        leaves = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad([x.float().sum() for x in out[: 1 if self.call == "qkv" else 2]], leaves) if leaves else ()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        # Not before the GPU is done: a process that ends while PyTorch's thread still lets go of gradients may abort.
        del grads
        return taken


def tables(record: dict[str, Any]):
    found = {(r["entry"], r["contestant"]): r for r in record["results"]}
    rows = []
    for entry in dict.fromkeys(r["entry"] for r in record["results"]):
        empty, filled = (found.get((entry, f"{cache} cache")) for cache in ("empty", "filled"))
        slowest = max(empty["compiled"], key=lambda k: k[1], default=["–", 0.0]) if empty else ["–", 0.0]
        seconds = [f"{r['first_s']:.1f}" if r else "–" for r in (empty, filled)]
        rows.append([entry, *seconds, f"{slowest[0]}, {slowest[1]:.1f} s", str(empty["later"]) if empty else "–"])
    yield "seconds of the first call", ["", "empty cache", "filled cache", "slowest kernel to compile", "compiled for other lengths"], rows


if __name__ == "__main__":
    print(json.dumps(first_call(*sys.argv[1:])))
