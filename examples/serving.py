"""A serving loop: continuous batching of a small model, with slices of prompts, drafts, a prefix cache and cancellation.

    python examples/serving.py                       # some requests, watched live
    python examples/serving.py --requests 10000      # a soak: every answer is compared with the one the request gets alone

Requests arrive at random. Some share the beginning of their prompt, as those behind one system prompt do; some are cancelled on the way.
The model has its first weights: what it says makes no sense, but it is the same in any company, to the last token. On a GPU it computes in
float32 and every step is one CUDA graph; on a CPU in float64.
"""

import argparse
import random
import time
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kdakit.models import place
from kdakit.models.config import ModelConfig
from kdakit.models.generation import generate
from kdakit.models.sampling import greedy
from kdakit.models.torch import KimiLinear, cast
from kdakit.serving.engine import Engine, Request
from kdakit.serving.torch.model import ServedModel


def small_model(where: place.Place) -> KimiLinear:
    model = KimiLinear(ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, attention_every=0, head_dim=16, num_heads=2))
    return cast(model.to(where.device), getattr(torch, where.dtype))


def random_request(rng: random.Random, openings: list[list[int]], vocabulary: int) -> Request:
    """A prompt of its own, often behind one of the openings that others use too, sometimes with a phrase said twice."""
    own = [rng.randrange(vocabulary) for _ in range(rng.choice([1, 2, 5, 9, 30]))]
    prompt = (rng.choice(openings) if rng.random() < 0.6 else []) + own * rng.choice([1, 1, 3])
    return Request(prompt, rng.choice([1, 2, 3, 5, 16]))


def alone(model: KimiLinear, request: Request) -> list[int]:
    """What the request gets with nobody beside it: its prompt in one piece, then token by token."""
    return [int(t[0]) for t in generate(model, np.array([request.prompt]), request.count, greedy)]


def table_of(engine: Engine, started: float) -> Table:
    counts, seconds = engine.counts, time.perf_counter() - started
    table = Table("waiting", "running", "finished", "cancelled", "tokens/s", "drafts accepted", "prompt from cache", "states kept")
    table.add_row(
        str(len(engine.waiting)), str(len(engine.running)), str(counts.finished), str(counts.cancelled),
        f"{(counts.made + counts.read) / seconds:.0f}", f"{counts.acceptance:.0%} of {counts.guessed}", f"{counts.hits:.0%}",
        f"{len(engine.prefixes)} (-{engine.prefixes.evicted})",
    )  # fmt: skip
    return table


def serve(engine: Engine, requests: list[Request], rng: random.Random, arrivals: int, cancel: float, console: Console) -> float:
    """All requests to their end, up to `arrivals` of them coming a turn; seconds it took."""
    started, left = time.perf_counter(), list(reversed(requests))
    with Live(table_of(engine, started), console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        busy = True
        while busy or left:
            for _ in range(min(len(left), rng.randrange(arrivals + 1))):
                engine.submit(left.pop())
            busy = engine.turn()
            if engine.running and rng.random() < cancel:
                engine.cancel(rng.choice([*engine.running, *engine.waiting]))
            live.update(table_of(engine, started))
    return time.perf_counter() - started


def main(argv=None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--piece", type=int, default=32, help="prompt tokens a turn and request")
    parser.add_argument("--guesses", type=int, default=3, help="draft tokens a turn and request")
    parser.add_argument("--cached", type=int, default=24, help="prefixes kept")
    parser.add_argument("--cancel", type=float, default=0.02, help="how often a turn ends with a cancellation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: the accelerator that is there")
    parser.add_argument("--dtype", help="default: float32 on an accelerator, float64 on a CPU")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)
    where = place.find("torch", args.device, args.dtype)
    if args.dtype is None:
        where = replace(where, dtype="float64" if where.device.type == "cpu" else "float32")
    rng, console, model = random.Random(args.seed), Console(), small_model(where)
    openings = [[rng.randrange(64) for _ in range(length)] for length in (16, 33, 48, 70)]
    requests = [random_request(rng, openings, 64) for _ in range(args.requests)]
    engine = Engine(ServedModel(model, args.slots), args.piece, args.guesses, args.cached)
    seconds = serve(engine, requests, rng, max(1, args.slots // 2), args.cancel, console)
    counts = engine.counts
    console.print(f"{counts.finished} finished, {counts.cancelled} cancelled in {counts.turns} turns and {seconds:.1f} s: "
                  f"{(counts.made + counts.read) / seconds:.0f} tokens/s, {counts.acceptance:.0%} of the drafts accepted, "
                  f"{counts.hits:.0%} of the prompt tokens from the cache")  # fmt: skip
    checked = time.perf_counter()
    wrong = sum(r.made != alone(model, r)[: len(r.made)] or not (r.cancelled or len(r.made) == r.count) for r in requests)
    leaked = engine.served.free_slots != args.slots
    console.print(f"answered one by one in {time.perf_counter() - checked:.1f} s: {len(requests) - wrong} of {len(requests)} answers are "
                  f"the same; {args.slots - engine.served.free_slots} slots lost")  # fmt: skip
    return not wrong and not leaked


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
