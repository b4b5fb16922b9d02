"""One training step at a time, in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kdakit.models.config import ModelConfig
from kdakit.models.torch import KimiLinear, loss
from kdakit.training.optimizer import AdamW, TrainingState, decays


class Learner:
    """A model and its AdamW. Arrays in and out are NumPy's. With a `team` every process gives the whole batch and works on its part."""

    def __init__(self, config: ModelConfig, optimizer: AdamW, seed: int = 0, backend: str = "auto", team: Any = None):
        self.team = team
        self.model = KimiLinear(config, seed=seed, backend=backend)
        self.settings, self.count = optimizer, 0
        self.named = dict(self.model.named_parameters())
        groups = [
            {"params": [p for n, p in self.named.items() if decays(n, p.ndim) == which], "weight_decay": optimizer.decay if which else 0.0}
            for which in (True, False)
        ]
        self.adam = torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """One update; returns the loss before it."""
        for group in self.adam.param_groups:
            group["lr"] = self.settings.rate(self.count)
        value = self._loss(tokens, targets)
        self.adam.zero_grad(set_to_none=True)
        value.backward()
        if self.team is not None:
            self.team.average_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.adam.step()
        self.count += 1
        return self._mean(value)

    def _loss(self, tokens, targets):
        if self.team is None:
            return loss(self.model, torch.from_numpy(tokens), torch.from_numpy(targets))
        tokens, targets = (torch.from_numpy(self.team.part(x)) for x in (tokens, targets))
        return loss(self.model, tokens, targets, context=self.team.context)

    def _mean(self, value) -> float:
        return float(value.detach() if self.team is None else self.team.mean(value.detach().clone()))

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return self.model(torch.from_numpy(tokens))[0].numpy()

    @torch.no_grad()
    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        return self._mean(self._loss(tokens, targets))

    def state(self) -> TrainingState:
        first, second = ({n: self._moment(p, key) for n, p in self.named.items()} for key in ("exp_avg", "exp_avg_sq"))
        return TrainingState({n: w.copy() for n, w in self.model.weights().items()}, first, second, self.count)

    def _moment(self, parameter, key: str) -> np.ndarray:
        state = self.adam.state.get(parameter)
        return (state[key] if state else torch.zeros_like(parameter)).detach().cpu().numpy().copy()

    def load(self, state: TrainingState) -> None:
        self.model.load_weights(state.weights)
        self.count = state.step
        for name, parameter in self.named.items():
            self.adam.state[parameter] = {
                "step": torch.tensor(float(state.step)),
                "exp_avg": torch.from_numpy(state.first[name].copy()).to(parameter),
                "exp_avg_sq": torch.from_numpy(state.second[name].copy()).to(parameter),
            }
