"""One model learning recall, in a process of its own: a line of JSON for every measurement. Started by `kdakit demo`."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kdakit.models import place
from kdakit.models.config import ModelConfig
from kdakit.training.optimizer import AdamW
from kdakit.training.recall import Recall, accuracy

HELD_OUT = 1_000_000  # where the random streams of the measurements begin


@dataclass(frozen=True)
class Race:
    """The task, the model and its training: the same for both models but for the delta rule."""

    keys: int = 128  # more than the two layers have room for side by side
    values: int = 32
    pairs: int = 7
    writes: int = 4
    warm_pairs: int = 3  # shorter sequences for the first `warm_share` of the steps
    warm_share: float = 0.35
    steps: int = 500
    batch: int = 32
    learning_rate: float = 1e-2
    hidden_size: int = 64
    head_dim: int = 32
    measure_every: int = 25
    seed: int = 0

    def task(self) -> Recall:
        return Recall(self.keys, self.values, self.pairs, self.writes)

    def config(self, delta_rule: bool) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.task().vocab_size, hidden_size=self.hidden_size, num_layers=2, intermediate_size=2 * self.hidden_size,
            attention_every=0, tie_embeddings=False, head_dim=self.head_dim, num_heads=1, safe_gate=True, lower_bound=-5.0,
            delta_rule=delta_rule,
        )  # fmt: skip


def learn(race: Race, framework: str, delta_rule: bool, report, device: str | None = None) -> Any:
    """Train, in float32; report({'step', 'loss', 'accuracy'}) on the way. Returns the learner."""
    task, warm = race.task(), race.task().with_pairs(race.warm_pairs)
    optimizer = AdamW(learning_rate=race.learning_rate, steps=race.steps)
    where = place.find(framework, device, "float32")
    learner = importlib.import_module(f"kdakit.training.{framework}").Learner(race.config(delta_rule), optimizer, race.seed, place=where)
    tokens, targets = task.batch(np.random.default_rng([race.seed, HELD_OUT]), 128)
    for step in range(1, race.steps + 1):
        now = warm if step <= race.warm_share * race.steps else task
        loss = learner.step(*now.batch(np.random.default_rng([race.seed, step]), race.batch))
        if step % race.measure_every == 0 or step == race.steps:
            report({"step": step, "loss": loss, "accuracy": accuracy(learner.logits(tokens), targets)})
    return learner


def command(race: Race, framework: str, delta_rule: bool, weights: str, device: str | None = None) -> list[str]:
    spec = {"race": asdict(race), "framework": framework, "delta_rule": delta_rule, "weights": weights, "device": device}
    return [sys.executable, "-m", "kdakit.cli.recall_worker", json.dumps(spec)]


def main(spec: dict[str, Any]) -> None:
    from kdakit.models import weights

    race = Race(**spec["race"])
    learner = learn(race, spec["framework"], spec["delta_rule"], lambda row: print(json.dumps(row), flush=True), spec["device"])
    weights.save(spec["weights"], race.config(spec["delta_rule"]), learner.weights())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
