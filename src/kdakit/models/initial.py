"""First weights, drawn with NumPy: the same seed gives the same model in both frameworks.

Matrices are normal with a standard deviation of 1/sqrt(in), divided by sqrt(2 * num_layers) where they write to the residual stream.
Embeddings are standard normal, or 1/sqrt(hidden_size) of that where they are the output projection too. Gates start out slow: a token takes
between 0.001 and 0.1 (times 1 to 16 for the softplus gate) off the logarithm of a channel.
"""

from __future__ import annotations

import math

import numpy as np

from kdakit.models.config import ModelConfig


def initial_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """{name: float32 array} for every parameter of the model."""
    rng = np.random.default_rng(seed)
    return {name: _draw(name, shape, config, rng).astype(np.float32) for name, shape in config.parameters().items()}


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    part = name.rsplit(".", 1)[-1]
    if part == "A_log":
        return np.zeros(shape) if config.lower_bound is not None else np.log(rng.uniform(1, 16, shape))
    if part == "dt_bias":
        dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
        if config.lower_bound is None:
            return np.log(np.expm1(dt))  # softplus(dt_bias) = dt
        fraction = dt / -config.lower_bound  # lower_bound * sigmoid(dt_bias) = -dt
        return np.log(fraction / (1 - fraction))
    if "norm" in name:
        return np.ones(shape)
    if part == "bias":
        return np.zeros(shape)
    if "conv1d" in name:
        bound = 1 / math.sqrt(shape[-1])
        return rng.uniform(-bound, bound, shape)
    if "embeddings" in name:
        return rng.normal(size=shape) * (1 / math.sqrt(shape[1]) if config.tie_embeddings else 1)
    scale = 1 / math.sqrt(shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scale /= math.sqrt(2 * config.num_layers)
    return rng.normal(size=shape) * scale
