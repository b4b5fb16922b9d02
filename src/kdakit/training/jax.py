"""One training step at a time, in JAX with optax; compiled once for each shape of a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from kdakit.models.config import ModelConfig
from kdakit.models.jax import KimiLinear, summed_loss
from kdakit.models.place import Place
from kdakit.parallel.jax import Context
from kdakit.training.optimizer import AdamW, TrainingState, decays


class Learner:
    """A model and its AdamW. Arrays in and out are NumPy's. With a `mesh` batches are cut over its axes `data` and `context`.

    place: where to compute and in which dtype (default: float32 on JAX's first device); weights and moments are float32.
    accumulate: the batch goes through the model in so many pieces, whose gradients are added up. weights: the first ones, for the seed's.
    """

    def __init__(
        self, config: ModelConfig, optimizer: AdamW, seed: int = 0, backend: str = "auto", mesh: Any = None, place: Place | None = None,
        accumulate: int = 1, weights: dict[str, np.ndarray] | None = None,
    ):  # fmt: skip
        dtype = None if place is None else place.dtype
        graph, state = nnx.split(KimiLinear(config, seed=seed, backend=backend, dtype=dtype, weights=weights))
        if place is not None and mesh is None:
            state = jax.device_put(state, place.device)
        self.graph, self.settings, self.count = graph, optimizer, 0
        self.parameters = state
        names = {n: decays(n, x.ndim) for n, x in _named(state).items()}
        self.chain = optax.chain(
            optax.clip_by_global_norm(optimizer.clip),
            optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.eps),
            optax.add_decayed_weights(optimizer.decay, mask=_like(state, names)),
        )
        self.moments = self.chain.init(state)

        summed = _whole_sum(graph) if mesh is None else _cut_sum(graph, mesh)

        def update(parameters, moments, tokens, targets, rate):
            measure = lambda *piece: summed(*piece) / _counted(targets)
            value, gradients = _added(jax.value_and_grad(measure), accumulate, parameters, tokens, targets)
            updates, moments = self.chain.update(gradients, moments, parameters)
            return jax.tree.map(lambda p, u: p - rate * u, parameters, updates), moments, value

        self._update = jax.jit(update, donate_argnums=(0, 1))
        self._logits = jax.jit(lambda parameters, tokens: nnx.merge(graph, parameters)(tokens)[0])
        self._loss = jax.jit(lambda parameters, tokens, targets: summed(parameters, tokens, targets) / _counted(targets))

    @property
    def model(self) -> KimiLinear:
        return nnx.merge(self.graph, self.parameters)

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """One update; returns the loss before it."""
        return float(self.advance(tokens, targets))

    def advance(self, tokens: np.ndarray, targets: np.ndarray) -> jax.Array:
        """`step` whose loss stays on the device, so that the host runs ahead of it."""
        rate = np.float32(self.settings.rate(self.count))
        given = (np.asarray(tokens, np.int32), np.asarray(targets, np.int32))
        self.parameters, self.moments, value = self._update(self.parameters, self.moments, *given, rate)
        self.count += 1
        return value

    def weights(self) -> dict[str, np.ndarray]:
        return {n: np.array(x) for n, x in _named(self.parameters).items()}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(self._logits(self.parameters, np.asarray(tokens, np.int32)))

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        return float(self._loss(self.parameters, np.asarray(tokens, np.int32), np.asarray(targets, np.int32)))

    def state(self) -> TrainingState:
        adam = self.moments[1]
        weights, first, second = ({n: np.array(x) for n, x in _named(tree).items()} for tree in (self.parameters, adam.mu, adam.nu))
        return TrainingState(weights, first, second, self.count)

    def load(self, state: TrainingState) -> None:
        model = self.model
        model.load_weights(state.weights)
        self.parameters, self.count = nnx.split(model)[1], state.step
        first, second = (_like(self.parameters, {n: jnp.asarray(x) for n, x in m.items()}) for m in (state.first, state.second))
        clip, adam, decay = self.moments
        self.moments = (clip, adam._replace(count=jnp.asarray(state.step, jnp.int32), mu=first, nu=second), decay)


def _added(measure, pieces: int, parameters, tokens, targets):
    """Value and gradients of a batch [B, T], the sum over `pieces` of its rows, one after the other."""
    if pieces == 1:
        return measure(parameters, tokens, targets)
    cut = lambda x: x.reshape(pieces, -1, x.shape[1])

    def add(total, piece):
        return jax.tree.map(jnp.add, total, measure(parameters, *piece)), None

    nothing = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), parameters))
    return lax.scan(add, nothing, (cut(tokens), cut(targets)))[0]


def _counted(targets):
    """How many targets of a batch count in its loss. One part may have more of them than another, so nobody takes a mean of means."""
    return (targets >= 0).sum().astype(jnp.float32)


def _whole_sum(graph):
    return lambda parameters, tokens, targets: summed_loss(nnx.merge(graph, parameters), tokens, targets)


def _cut_sum(graph, mesh):
    """The same of a batch [B, T] cut over the mesh, rows over `data`, tokens over `context`."""
    axes = ("data", "context")

    def part(parameters, tokens, targets):
        return lax.psum(summed_loss(nnx.merge(graph, parameters), tokens, targets, context=Context("context")), axes)

    return jax.shard_map(part, mesh=mesh, in_specs=(P(), P(*axes), P(*axes)), out_specs=P())


def _named(state) -> dict:
    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(state)}


def _like(state, values: dict):
    """A tree like `state` with values by name."""
    return nnx.from_flat_state([(path, value.replace(values[".".join(map(str, path))])) for path, value in nnx.to_flat_state(state)])
