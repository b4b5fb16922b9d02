"""On a GPU: how long a first call takes with an empty Triton cache, and with a filled one, as JSON in $OUT (or here).

PYTHONPATH=src python benchmarks/cold_start.py            every process in turn: nothing else should run on the machine
PYTHONPATH=src python benchmarks/cold_start.py --at-once  all at once, for a look

K = V = 128, B = 1, H = 32, T = 4096, initial and final state, everything in the kernel but with a gate that is `given`. Importing torch
and kdakit and making the inputs is not counted. Later lengths must compile nothing; `later` counts what they did compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LATER = (1, 63, 64, 1000, 8192)
PROCESSES = [("bfloat16", gate, call) for call in ("training", "forward", "decode") for gate in ("bounded", "softplus", "given")]
PROCESSES += [(dtype, "softplus", call) for call in ("training", "forward") for dtype in ("float16", "float32")]


def first_call(dtype: str, gate: str, call: str) -> dict:
    """In a process of its own."""
    begin = time.perf_counter()
    import torch
    import triton

    from kdakit.torch import chunk_kda, fused_recurrent_kda

    compiled: list[tuple[str, float]] = []
    triton.knobs.compilation.listener = lambda *, src, metadata, times, cache_hit, **_: compiled.append(
        (metadata["name"], 0.0 if cache_hit else round(times.total / 1e6, 2))
    )
    options = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), gate != "given")
    options |= dict(output_final_state=True) | (dict(lower_bound=-5.0, safe_gate=True) if gate == "bounded" else {})
    options |= dict(backend="triton_gpu")  # 'auto' gives forwards to the CUDA library where that is built

    def inputs(T, H=32, K=128):
        x = [torch.randn(1, T, H, K, device="cuda") for _ in range(4)] + [torch.randn(1, T, H, device="cuda")]
        named = dict(A_log=torch.zeros(H), dt_bias=torch.zeros(H * K), initial_state=torch.zeros(1, H, K, K))
        if gate == "given":
            x[1:] = [x[1] / x[1].norm(dim=-1, keepdim=True), x[2], -x[3].abs(), x[4].sigmoid()]
            named = dict(initial_state=named["initial_state"])
        x = [p.to(getattr(torch, dtype)) for p in x]
        named = {n: p.cuda() for n, p in named.items()}
        leaves = [p.requires_grad_(call == "training") for p in (*x, *named.values())]
        return leaves, named

    def run(T):
        leaves, named = inputs(T)
        torch.cuda.synchronize()
        start = time.perf_counter()
        function = fused_recurrent_kda if call == "decode" else chunk_kda
        out = function(*leaves[:5], **named, **options)
        grads = torch.autograd.grad([x.float().sum() for x in out], leaves) if call == "training" else ()
        torch.cuda.synchronize()
        del grads  # not before: see `report`
        return time.perf_counter() - start

    inputs(64)
    torch.ones(8, device="cuda", requires_grad=True).float().sum().backward()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begin
    length = 1 if call == "decode" else 4096
    row = dict(dtype=dtype, gate=gate, call=call, before_s=round(ready, 2), first_s=round(run(length), 3))
    row |= dict(second_ms=round(run(length) * 1e3, 3), compiled=compiled[:])
    for T in LATER[:2] if call == "decode" else LATER:
        run(T)
    return row | dict(later=len(compiled) - len(row["compiled"]))


def start(job, cache):
    env = {**os.environ, "TRITON_CACHE_DIR": cache}
    return subprocess.Popen([sys.executable, __file__, *job], env=env, stdout=subprocess.PIPE, text=True)


def report(kind, process):
    text = process.communicate()[0].strip().splitlines()
    row = dict(cache=kind) | (json.loads(text[-1]) if text else {})
    if process.returncode:  # a process that ends while PyTorch's thread still lets go of gradients that nobody else holds aborts
        row |= dict(exit=process.returncode)
    print({n: x for n, x in row.items() if n != "compiled"}, row.get("compiled", ""), flush=True)
    return row


def main(at_once: bool) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("empty", "filled"):
            waiting = []
            for job in PROCESSES:
                waiting.append(start(job, f"{folder}/{'_'.join(job)}"))
                if not at_once:
                    rows.append(report(kind, waiting.pop()))
            rows += [report(kind, process) for process in waiting]
    import torch
    import triton

    out = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__, commit=os.environ.get("COMMIT", ""))
    Path(os.environ.get("OUT", "."), "gpu_cold_start.json").write_text(json.dumps(out | dict(rows=rows), indent=1))


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--at-once"]):
        main(bool(sys.argv[1:]))
    else:
        print(json.dumps(first_call(*sys.argv[1:])))
