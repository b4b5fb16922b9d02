"""`kdakit bench --suite stacks`: flash-linear-attention's and Transformers' models with their own KDA kernels and with ours, in one run.

FLA: a model of four layers learns for 20 steps. Its own kernels run three times, once more as they are and once with the rows of every
batch in another order: how far those losses part is what rounding alone does. Transformers: the tensors that the first KDA layer of a
Kimi-Linear of four layers hands over at 8192 tokens, both implementations on the same ones; and ours on those that the layer hands over
when its convolution is ours too.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from kdakit.measure import records, suites, timing
from kdakit.measure.choices import UsageError

STEPS, WARM = 20, 5
OWN_ROWS = "kdakit, its convolution too"
RUNS = {"fla": (False, False), "fla again": (False, False), "fla, other rows": (False, True), "kdakit": (True, False)}  # enabled, permuted


def run(args) -> dict[str, Any]:
    if (reason := suites.cannot_run()) is not None:
        raise UsageError(f"--suite stacks cannot run here: {reason}")
    if unknown := set(args.entry or ()) - set(MEASURED):
        raise UsageError(f"entry must be among {', '.join(MEASURED)}, got {', '.join(sorted(unknown))}")
    rows: list[dict[str, Any]] = []
    missing: list[dict[str, Any]] = []
    for name in args.entry or MEASURED:
        if importlib.util.find_spec(name) is None:
            missing.append({"entry": name, "contestant": name, "reason": f"{name} is not installed", "absent": True})
            continue
        rows += MEASURED[name](args)
        made = records.record("stacks", {"suite": "stacks", "steps": STEPS}, rows, missing)
        if args.json:
            records.save(made, args.json)
    return records.record("stacks", {"suite": "stacks", "steps": STEPS}, rows, missing)


def train_fla(args) -> list[dict[str, Any]]:
    from kdakit import stacks

    rows = []
    for name, (enabled, permuted) in RUNS.items():
        losses, samples = steps_of_fla(enabled, permuted)
        median = timing.median(samples[WARM:])
        rows.append({"entry": "fla: a step of training", "contestant": name, "samples_ms": samples, "median_ms": median, "losses": losses})
    rows[-1]["calls"] = stacks.report()["fla"]
    return rows


def steps_of_fla(enabled: bool, permuted: bool) -> tuple[list[float], list[float]]:
    """Losses and milliseconds of STEPS steps, from the same weights and data; permuted: with the rows of every batch in another order."""
    import torch
    from fla.models import KDAConfig, KDAForCausalLM

    import kdakit

    (kdakit.enable if enabled else kdakit.disable)("fla")
    torch.manual_seed(0)
    config = KDAConfig(hidden_size=1024, num_hidden_layers=4, num_heads=8, head_dim=128, vocab_size=8192, fuse_cross_entropy=True)
    model = KDAForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(1)
    losses, samples = [], []
    for _ in range(STEPS):
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
        samples.append(1000 * (time.perf_counter() - began))
    kdakit.disable("fla")
    return losses, samples


def call_transformers(args) -> list[dict[str, Any]]:
    """Forward, and forward + backward, of the model's own call: rows as those of a suite."""
    from functools import partial

    import torch

    import kdakit
    from kdakit import stacks
    from kdakit.measure.runners import Run

    model = four_layers()
    theirs, given = caught_call(model)
    kdakit.enable("transformers")
    ours, own = caught_call(model)
    calls = {"fla": (theirs, given), "kdakit": (ours, given), OWN_ROWS: (ours, own)}

    def forward(call, arguments):
        (q, k, v, g, beta), named = arguments
        with torch.no_grad():
            call(q, k, v, g=g, beta=beta, **named)

    def training(call, arguments):
        (q, k, v, g, beta), named = arguments
        o = call(q, k, v, g=g, beta=beta, **named)[0]
        torch.autograd.grad(o, arguments[0], torch.ones_like(o))

    rows = []
    for what, function in (("forward", forward), ("forward + backward", training)):
        runs = {name: Run(partial(function, *call), gpu=True) for name, call in calls.items()}
        for name, (samples, _) in timing.on_gpu(runs, args.repeat, args.seconds).items():
            rows.append({"entry": f"transformers: {what}", "contestant": name, "samples_ms": samples, "median_ms": timing.median(samples)})
    rows[-1]["calls"] = stacks.report()["transformers"]
    return rows


def four_layers():
    import torch
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    torch.manual_seed(0)
    config = KimiLinearConfig(num_hidden_layers=4, num_local_experts=8, vocab_size=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return KimiLinearForCausalLM(config).to("cuda", torch.bfloat16)


def caught_call(model):
    """What Transformers calls now, and ((q, k, v, g, beta), the rest) of its first KDA layer at 8192 tokens."""
    import torch
    from transformers.models.kimi_linear import modeling_kimi_linear as module

    caught: list = []
    called = module.chunk_kimi_delta_attention

    def catch(*positional, **named):
        leaves = [x.detach().requires_grad_() for x in (*positional, named.pop("g"), named.pop("beta"))]
        caught.append((leaves, dict(named)))
        return called(*leaves[:3], g=leaves[3], beta=leaves[4], **named)

    module.chunk_kimi_delta_attention = catch
    ids = torch.randint(3, 4096, (1, 8192), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)  # its cache wants an attention layer
    module.chunk_kimi_delta_attention = called
    return called, caught[0]


MEASURED = {"fla": train_fla, "transformers": call_transformers}  # by entry, which is also the package's name


def tables(record: dict[str, Any]):
    """Times of both, and how far losses part."""
    every = record["results"]
    times, losses = [], {r["contestant"]: r["losses"] for r in every if "losses" in r}
    for entry in dict.fromkeys(r["entry"] for r in every):
        ms = {r["contestant"]: r["median_ms"] for r in every if r["entry"] == entry}
        ours = [name for name in ("kdakit", OWN_ROWS) if name in ms]
        times += [[entry, name, f"{ms['fla']:.2f}", f"{ms[name]:.2f}", f"{ms['fla'] / ms[name]:.2f}"] for name in ours]
    if times:
        yield "milliseconds", ["", "", "its own kernels", "kdakit", "times as fast"], times
    if losses:
        apart = {n: max(abs(x - y) for x, y in zip(found, losses["fla"], strict=True)) for n, found in losses.items() if n != "fla"}
        yield f"largest distance from fla's loss in {STEPS} steps", ["", "distance"], [[n, f"{x:.4f}"] for n, x in apart.items()]
