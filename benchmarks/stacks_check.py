"""kdakit inside other stacks, on a GPU: what changes in numbers and in time.

    python benchmarks/stacks_check.py fla --out FILE             FLA's KDAForCausalLM trains 20 steps with its own kernels and with ours
    python benchmarks/stacks_check.py transformers --out FILE    the KDA calls of a 4-layer Kimi-Linear, FLA's and ours

Needs flash-linear-attention and Transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import kdakit
from kdakit import stacks


def train(steps: int, enable: bool, permuted: bool) -> tuple[list[float], list[float]]:
    """Losses and seconds of `steps` steps, from the same weights and data; permuted: with the rows of every batch in another order, which
    changes nothing but the rounding."""
    from fla.models import KDAConfig, KDAForCausalLM

    (kdakit.enable if enable else kdakit.disable)("fla")
    torch.manual_seed(0)
    config = KDAConfig(hidden_size=1024, num_hidden_layers=4, num_heads=8, head_dim=128, vocab_size=8192, fuse_cross_entropy=True)
    model = KDAForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        start = torch.randint(0, 8192, (4, 1), generator=generator)
        ids = (start + torch.arange(4096) * torch.randint(1, 9, (4, 1), generator=generator)) % 8192  # something to learn
        ids = (ids.flip(0) if permuted else ids).cuda()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def fla(found: dict) -> None:
    runs = {"fla": (False, False), "fla again": (False, False), "fla, rows in another order": (False, True), "kdakit": (True, False)}
    made = {}
    for name, (enable, permuted) in runs.items():
        losses, seconds = train(20, enable, permuted)
        made[name] = losses
        found[name] = {"losses": losses, "step ms": 1e3 * statistics.median(seconds[5:])}
        print(name, found[name], flush=True)
    apart = lambda a, b: max(abs(x - y) for x, y in zip(made[a], made[b], strict=True))
    found["band: fla to fla"] = apart("fla", "fla again")
    found["band: fla to fla, rows in another order"] = apart("fla", "fla, rows in another order")
    found["kdakit to fla"] = apart("kdakit", "fla")
    found["step time, fla / kdakit"] = found["fla"]["step ms"] / found["kdakit"]["step ms"]
    found["calls"] = stacks.report()["fla"]


def timed(call, repeats: int = 20) -> float:
    """Median milliseconds on the GPU."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events)


def transformers(found: dict) -> None:
    """The tensors that the model's first KDA layer hands to chunk_kda at T = 8192, real head sizes; both backends on the same tensors."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    torch.manual_seed(0)
    config = KimiLinearConfig(num_hidden_layers=4, num_local_experts=8, vocab_size=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = KimiLinearForCausalLM(config).to("cuda", torch.bfloat16)
    ids = torch.randint(3, 4096, (1, 8192), device="cuda")
    caught: list = []
    theirs = module.chunk_kimi_delta_attention

    def catch(*args, **named):
        caught.append((args, named))
        return theirs(*args, **named)

    module.chunk_kimi_delta_attention = catch
    with torch.no_grad():
        plain = model(input_ids=ids).logits
    module.chunk_kimi_delta_attention = theirs
    kdakit.enable("transformers")
    with torch.no_grad():
        fast = model(input_ids=ids).logits
    found["logits, largest difference of"] = [float((plain - fast).abs().max()), float(plain.abs().max())]
    ours = module.chunk_kimi_delta_attention
    args, named = caught[0]
    found["call"] = {str(i): [list(x.shape), str(x.dtype), list(x.stride())] for i, x in enumerate((*args, named["g"], named["beta"]))}
    leaves = [x.detach().requires_grad_() for x in (*args, named.pop("g"), named.pop("beta"))]
    d_o = torch.randn_like(leaves[2])

    def forward(call):
        with torch.no_grad():
            q, k, v, g, beta = leaves
            call(q, k, v, g=g, beta=beta, **named)

    def training(call):
        q, k, v, g, beta = leaves
        torch.autograd.grad(call(q, k, v, g=g, beta=beta, **named)[0], leaves, d_o)

    for name, run in (("forward", forward), ("training", training)):
        times = {who: timed(lambda: run(call)) for who, call in (("fla", theirs), ("kdakit", ours))}  # noqa: B023 - called at once
        found[name] = times | {"fla / kdakit": times["fla"] / times["kdakit"]}
        print(name, found[name], flush=True)
    found["calls"] = stacks.report()["transformers"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stack", choices=("fla", "transformers"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "kdakit": kdakit.__version__}
    try:
        {"fla": fla, "transformers": transformers}[args.stack](found)
    finally:
        args.out.write_text(json.dumps(found, indent=1))
        print(json.dumps({k: v for k, v in found.items() if k != "call"}, indent=1)[-4000:])


if __name__ == "__main__":
    main()
