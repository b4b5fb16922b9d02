"""A serving loop: prompts are prefilled in pieces beside the decoding of everybody else, and states live in a pool.

    python examples/serving.py --requests 8 --slots 3

Every turn takes up to `piece` prompt tokens of each request that still has some (packed into one row, chunk_kda), then makes one token for
all that are ready (one batch, fused_recurrent_kda). A request holds a slot of the pool while it runs; a slot is a few rows of some tensors,
and its size does not depend on the length of the text.
"""

import argparse
from collections import deque
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from kdakit.models.config import ModelConfig
from kdakit.models.generation import generate
from kdakit.models.sampling import greedy
from kdakit.models.torch import KimiLinear


@dataclass
class Request:
    prompt: list[int]
    count: int  # tokens to generate
    slot: int = -1
    done: int = 0  # prompt tokens that have been read
    made: list[int] = field(default_factory=list)


class StatePool:
    """The caches of `slots` requests as one batch; rows are taken out, used, and put back."""

    def __init__(self, model: KimiLinear, slots: int):
        self.layers = model.new_cache(slots, max_length=0)
        self.free = list(range(slots))

    def claim(self) -> int:
        slot = self.free.pop()
        for layer in self.layers:
            for part in layer:
                part[slot] = 0
        return slot

    def take(self, slots: list[int]) -> list:
        return [type(layer)(*(part[slots] for part in layer)) for layer in self.layers]

    def put(self, slots: list[int], layers: list) -> None:
        for mine, new in zip(self.layers, layers, strict=True):
            for part, rows in zip(mine, new, strict=True):
                part[slots] = rows

    def bytes_per_slot(self) -> int:
        return sum(part[0].numel() * part.element_size() for layer in self.layers for part in layer)


@torch.no_grad()
def prefill(model: KimiLinear, pool: StatePool, requests: list[Request], piece: int) -> None:
    """The next piece of every prompt, packed; a request whose prompt is read gets its first token."""
    parts = [r.prompt[r.done : r.done + piece] for r in requests]
    cu_seqlens = torch.tensor(np.cumsum([0] + [len(p) for p in parts]))
    slots = [r.slot for r in requests]
    logits, cache = model(torch.tensor([list(chain(*parts))]), cache=pool.take(slots), cu_seqlens=cu_seqlens)
    pool.put(slots, cache)
    for request, part, end in zip(requests, parts, cu_seqlens[1:], strict=True):
        request.done += len(part)
        if request.done == len(request.prompt):
            request.made.append(int(logits[0, end - 1].argmax()))


@torch.no_grad()
def decode(model: KimiLinear, pool: StatePool, requests: list[Request]) -> None:
    """One more token for each."""
    slots = [r.slot for r in requests]
    logits, cache = model(torch.tensor([[r.made[-1]] for r in requests]), cache=pool.take(slots))
    pool.put(slots, cache)
    for request, token in zip(requests, logits[:, -1].argmax(-1).tolist(), strict=True):
        request.made.append(token)


def serve(model: KimiLinear, requests: list[Request], slots: int, piece: int) -> int:
    """Run all requests to their end; the number of turns it took."""
    pool, waiting, running, turns = StatePool(model, slots), deque(requests), [], 0
    while waiting or running:
        while waiting and pool.free:
            waiting[0].slot = pool.claim()
            running.append(waiting.popleft())
        reading = [r for r in running if r.done < len(r.prompt)]
        writing = [r for r in running if r.made]
        if reading:
            prefill(model, pool, reading, piece)
        if writing:
            decode(model, pool, writing)
        for request in [r for r in running if len(r.made) >= r.count]:
            running.remove(request)
            pool.free.append(request.slot)
        turns += 1
    return turns


def main(argv=None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--piece", type=int, default=16)
    args = parser.parse_args(argv)

    model = KimiLinear(ModelConfig(vocab_size=256, hidden_size=64, num_layers=2, attention_every=0, head_dim=32, num_heads=2))
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(0, 256, rng.integers(3, 70)).tolist(), int(rng.integers(1, 12))) for _ in range(args.requests)]
    turns = serve(model, requests, args.slots, args.piece)
    same = all(r.made == [int(t[0]) for t in generate(model, np.array([r.prompt]), r.count, greedy)] for r in requests)
    tokens = sum(len(r.made) for r in requests)
    size = StatePool(model, 1).bytes_per_slot() / 1024
    print(f"{len(requests)} requests, {tokens} tokens in {turns} turns with {args.slots} slots of {size:.1f} KiB each")
    print("every answer is the one the request gets alone" if same else "an answer depends on who else was served")
    return same


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
