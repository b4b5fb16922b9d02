"""Many requests through the engine with faults, cancellations and bad requests among them: every surviving answer as alone, no slot lost.

    python tests/serving/soak.py --requests 10000        # minutes; the test suite runs it in short
    python tests/serving/soak.py --requests 10000 --slots 64 --device cuda --dtype float32 --json FILE

Every so many turns one call somewhere under the turn raises, before it has done anything or after all. One request in a hundred cannot be
served at all, and its every step raises: it ends with that error, whoever was beside it. Bad requests are refused at submit.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import faults
import torch
from faults import VOCABULARY, Alone, Calls, Injected, small_model

from kdakit.serving.engine import Engine, Request
from kdakit.serving.torch.model import ServedModel

CURSE = [39] * 4  # the beginning of prompts that cannot be served; no other prompt holds a 39


class Cursed(Exception):
    """What a request that cannot be served raises."""


class Choosy(ServedModel):
    """Cannot read some prompts."""

    def prefill(self, slots, tokens, checkpoints):
        if any(list(own[:4]) == CURSE for own in tokens):
            raise Cursed
        return super().prefill(slots, tokens, checkpoints)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """With openings that several share, and phrases said three times."""
    openings = [[rng.randrange(VOCABULARY - 1) for _ in range(length)] for length in (4, 9, 16)]
    own = [[rng.randrange(VOCABULARY - 1) for _ in range(rng.choice([1, 2, 5, 9]))] for _ in range(count)]
    return [(rng.choice(openings) if rng.random() < 0.6 else []) + x * rng.choice([1, 1, 3]) for x in own]


def good_request(rng: random.Random, texts: list[list[int]]) -> Request:
    prompt = rng.choice(texts)
    return Request(CURSE + prompt if rng.random() < 0.01 else list(prompt), rng.choice([1, 2, 3, 5, 12]))


def bad_request(rng: random.Random, submitted: list[Request]) -> Request:
    kinds = [Request([1.0, 2], 3), Request([1, -1], 3), Request([], 3), Request([VOCABULARY], 1), Request([1], 0), Request([1], 1.5),
             Request([True], 1), Request("text", 1), Request([2**70], 1), Request([None], 1), Request({1: 2}, 1)]  # fmt: skip
    return rng.choice(kinds + submitted[-3:])


class Soak:
    def __init__(self, args):
        self.args, self.rng = args, random.Random(args.seed)
        self.model = small_model().to(args.device, getattr(torch, args.dtype))
        self.alone = Alone(self.model, 12)
        self.engine = Engine(Choosy(self.model, args.slots), piece=12, guesses=args.guesses, entries=args.cached, block=4)
        texts = prompts(self.rng, 20 + args.requests // 10)
        self.left = [good_request(self.rng, texts) for _ in range(args.requests)]
        self.requests = list(self.left)
        self.submitted: list[Request] = []
        self.turns = self.raised = self.refused = self.inside = 0

    def arrive(self):
        for _ in range(min(len(self.left), self.rng.randrange(self.args.slots // 2 + 2))):
            if self.rng.random() < 0.05:
                try:
                    self.engine.submit(bad_request(self.rng, self.submitted))
                except (TypeError, ValueError):
                    self.refused += 1
                else:
                    raise AssertionError("a bad request was taken")
            self.submitted.append(self.left.pop())
            self.engine.submit(self.submitted[-1])

    def turn(self) -> bool:
        """One in so many with a fault, somewhere among the calls that a turn of late has made."""
        self.turns += 1
        kind = self.turns % self.args.every
        if kind == 1:
            with Calls() as calls:
                busy = self.engine.turn()
            self.inside = calls.seen
            return busy
        if kind != 2:
            return self.engine.turn()
        with Calls(self.rng.randrange(1, self.inside + 2)) as calls:
            busy = self.engine.turn()
        self.raised += calls.seen >= calls.at
        return busy

    def run(self) -> None:
        busy, said = True, time.perf_counter()
        while busy or self.left:
            if self.args.progress and time.perf_counter() - said > self.args.progress:
                said = time.perf_counter()
                print(f"{len(self.submitted)} requests, {self.turns} turns, {self.raised} faults", file=sys.stderr, flush=True)
            self.arrive()
            busy = self.turn()
            if self.engine.running and self.rng.random() < 0.03:
                self.engine.cancel(self.rng.choice([*self.engine.running, *self.engine.waiting]))


def main(argv=None) -> Soak:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--guesses", type=int, default=3)
    parser.add_argument("--cached", type=int, default=24)
    parser.add_argument("--every", type=int, default=100, help="turns from a fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--progress", type=float, default=0, help="seconds from a line on stderr to the next; 0: none")
    parser.add_argument("--json", help="where to write down what was seen")
    soak = Soak(parser.parse_args(argv))
    torch.set_num_threads(1)
    began = time.perf_counter()
    soak.run()
    served, counts = time.perf_counter() - began, soak.engine.counts
    faults.check(soak.engine, soak.requests, soak.alone, soak.args.slots)
    for request in soak.requests:
        cursed = list(request.prompt[:4]) == CURSE
        assert request.cancelled or isinstance(request.error, (Cursed, Injected) if cursed else (Injected, type(None))), request.error
    innocent = sum(isinstance(r.error, Injected) for r in soak.requests)
    said = (
        f"{len(soak.requests)} requests in {soak.turns} turns and {served:.0f} s: {counts.finished} finished, all answers as alone; "
        f"{counts.cancelled} cancelled, {counts.failed} ended with an error ({innocent} of them with an injected one), "
        f"{soak.refused} bad ones refused; {soak.raised} faults injected, {counts.faults} steps raised; "
        f"{counts.accepted} of {counts.guessed} guesses right, {counts.hits:.0%} of prompts from the cache; no slot lost"
    )
    print(said)
    if soak.args.json:
        Path(soak.args.json).write_text(json.dumps({"settings": vars(soak.args), "seen": said, "counts": vars(counts)}, indent=1))
    return soak


if __name__ == "__main__":
    main()
