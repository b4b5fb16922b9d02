"""One training step at a time, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kdakit.models.config import ModelConfig
from kdakit.models.place import Place
from kdakit.models.torch import KimiLinear, cast, summed_loss
from kdakit.models.weights import as_plain_floats, check_weights
from kdakit.training.optimizer import AdamW, TrainingState, decays


class Learner:
    """A model and its AdamW. Arrays in and out are NumPy's. With a `team` every process gives the whole batch and works on its part.

    place: where to compute and in which dtype (default: float32 on the CPU). In any other dtype the model is a copy, made anew after every
    step, of float32 master weights: those are what AdamW moves and what a checkpoint holds.
    accumulate: the batch goes through the model in so many pieces, whose gradients are added up in float32.
    weights: the first ones, instead of those drawn by `seed`. build: makes the model; for a comparison with other layers.
    """

    def __init__(
        self, config: ModelConfig, optimizer: AdamW, seed: int = 0, backend: str = "auto", team: Any = None, place: Place | None = None,
        accumulate: int = 1, weights: dict[str, np.ndarray] | None = None, build: Callable[..., Any] = KimiLinear,
    ):  # fmt: skip
        self.team, self.accumulate = team, accumulate
        self.place = place or Place(torch.device("cpu"), "float32")
        self.model = build(config, seed=seed, weights=weights, backend=backend).to(self.place.device)
        self.settings, self.count = optimizer, 0
        self.computing = dict(self.model.named_parameters())
        self.named = masters(self.model, getattr(torch, self.place.dtype))
        if self.copies:
            narrow = [n for n, p in self.computing.items() if p.dtype != torch.float32]
            self.packed = pack([self.named[n] for n in narrow]), pack([self.computing[n] for n in narrow])
            rest = [n for n in self.named if n not in narrow]
            self.unpacked: tuple[list[Tensor], list[Tensor]] = [self.computing[n] for n in rest], [self.named[n] for n in rest]
        groups = [
            {"params": [p for n, p in self.named.items() if decays(n, p.ndim) == which], "weight_decay": optimizer.decay if which else 0.0}
            for which in (True, False)
        ]
        self.adam = torch.optim.AdamW(
            groups, lr=optimizer.learning_rate, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps,
            fused=self.place.device.type == "cuda",
        )  # fmt: skip

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """One update; returns the loss before it."""
        return float(self.advance(tokens, targets))

    def advance(self, tokens: np.ndarray, targets: np.ndarray) -> Tensor:
        """`step` whose loss stays on the device, so that the host runs ahead of it."""
        for group in self.adam.param_groups:
            group["lr"] = self.settings.rate(self.count)
        self.adam.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float32, device=self.place.device)
        count = counted(targets)
        for piece in zip(self._pieces(tokens), self._pieces(targets), strict=True):
            value = self._summed(*piece) / count
            value.backward()
            self._collect()
            total += value.detach()
        if self.team is not None:
            self.team.add_gradients(self.named.values())
        self._clip()
        self._move()
        self._refresh()
        self.count += 1
        return total if self.team is None else self.team.sum(total)

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        return np.split(rows, self.accumulate) if self.accumulate > 1 else [rows]

    def _collect(self) -> None:
        """Adds the gradients of the computing copy to those of the master weights."""
        if self.copies:
            made = {n: p.grad for n, p in self.computing.items() if p.grad is not None}
            for name, gradient in widened(made).items():
                master = self.named[name]
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            for p in self.computing.values():
                p.grad = None

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.named.values(), self.settings.clip)

    def _move(self) -> None:
        self.adam.step()

    @torch.no_grad()
    def _refresh(self) -> None:
        if self.copies:
            self.packed[1].copy_(self.packed[0])
            own, master = self.unpacked
            torch._foreach_copy_(own, master)

    @property
    def copies(self) -> bool:
        """Whether the model computes with copies of the master weights."""
        return self.place.dtype != "float32"

    def _tensor(self, array: np.ndarray) -> Tensor:
        made = torch.from_numpy(array)
        # From ordinary memory the copy would wait for everything that the GPU has still to do.
        return made.pin_memory().to(self.place.device, non_blocking=True) if self.place.device.type == "cuda" else made

    def _summed(self, tokens, targets) -> Tensor:
        """Over this process's part: one part may have more targets that count than another, so nobody takes a mean of means."""
        if self.team is None:
            return summed_loss(self.model, self._tensor(tokens), self._tensor(targets))
        tokens, targets = (self._tensor(self.team.part(x)) for x in (tokens, targets))
        return summed_loss(self.model, tokens, targets, context=self.team.context)

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return self.model(self._tensor(tokens))[0].float().cpu().numpy()

    @torch.no_grad()
    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        total = self._summed(tokens, targets) / counted(targets)
        return float(total if self.team is None else self.team.sum(total))

    def weights(self) -> dict[str, np.ndarray]:
        """The master weights, as `kdakit.models.weights.save` takes them."""
        return {n: p.detach().cpu().numpy().copy() for n, p in self.named.items()}

    def state(self) -> TrainingState:
        first, second = ({n: self._moment(p, key) for n, p in self.named.items()} for key in ("exp_avg", "exp_avg_sq"))
        return TrainingState(self.weights(), first, second, self.count)

    def _moment(self, parameter, key: str) -> np.ndarray:
        state = self.adam.state.get(parameter)
        return (state[key] if state else torch.zeros_like(parameter)).detach().cpu().numpy().copy()

    def load(self, state: TrainingState) -> None:
        """All of it, or nothing where a part cannot be taken."""
        check_weights(self.model.config, state.weights)
        weights = {name: torch.from_numpy(as_plain_floats(state.weights[name])) for name in self.named}
        fused = self.place.device.type == "cuda"
        moments: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for name, parameter in self.named.items():
            moments[parameter] = {
                "step": torch.tensor(float(state.step), dtype=torch.float32, device=parameter.device if fused else "cpu"),
                "exp_avg": torch.from_numpy(state.first[name].copy()).to(parameter),
                "exp_avg_sq": torch.from_numpy(state.second[name].copy()).to(parameter),
            }
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(weights[name])
        self._refresh()
        self.adam.state.update(moments)
        self.count = state.step


def masters(model: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """{name: float32 parameter} to be learned: the model's own, or copies of them where it is to compute in another dtype."""
    if dtype == torch.float32:
        return dict(model.named_parameters())
    if dtype != torch.bfloat16:
        raise ValueError(f"dtype must be float32 or bfloat16 for training, got {dtype}: gradients leave the range of float16")
    kept = {n: nn.Parameter(p.detach().float().clone()) for n, p in model.named_parameters()}
    cast(model, dtype)
    return kept


def counted(targets: np.ndarray) -> int:
    """How many targets of a batch count in its loss."""
    return int((targets >= 0).sum())


ALIGNED = 64  # numbers: where a parameter may begin in memory that it shares with others


def pack(parameters: list[nn.Parameter]) -> Tensor:
    """Moves the parameters into one piece of memory, which is returned: what happens to all of them takes one launch, not hundreds."""
    starts = [0]
    for p in parameters:
        starts.append(starts[-1] + -(-p.numel() // ALIGNED) * ALIGNED)
    whole = parameters[0].new_zeros(starts[-1], requires_grad=False)
    for p, start in zip(parameters, starts, strict=False):
        place = whole[start : start + p.numel()].view(p.shape)
        place.copy_(p.data)
        p.data = place
    return whole


def widened(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in float32, those of each dtype from one piece of memory."""
    found = {n: g for n, g in gradients.items() if g.dtype == torch.float32}
    narrow = {n: g for n, g in gradients.items() if n not in found}
    if narrow:
        whole = torch.cat([g.flatten() for g in narrow.values()]).float()
        pieces = whole.split([g.numel() for g in narrow.values()])
        found |= {n: piece.view(g.shape) for (n, g), piece in zip(narrow.items(), pieces, strict=True)}
    return found
