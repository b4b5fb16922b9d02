"""A training step in JAX: a Flax NNX model, optax, one compiled function.

python examples/train_jax.py --steps 50
"""

import argparse

import numpy as np
import optax
from flax import nnx

from kdakit.models.config import ModelConfig
from kdakit.models.jax import KimiLinear, loss
from kdakit.training import text


def main(argv=None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args(argv)

    # Three KDA layers, then one of full attention: the mix of Kimi Linear.
    config = ModelConfig(vocab_size=256, hidden_size=64, num_layers=args.layers, attention_every=4, head_dim=32, num_heads=2)
    model = KimiLinear(config)
    recipe = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, recipe, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens, targets):
        value, gradients = nnx.value_and_grad(loss)(model, tokens, targets)
        optimizer.update(model, gradients)
        return value

    data, _ = text.split(text.book(100_000))
    losses = []
    for i in range(args.steps):
        tokens, targets = text.batch(data, np.random.default_rng(i), 4, 128)
        losses.append(float(step(model, optimizer, tokens.astype(np.int32), targets.astype(np.int32))))
        if i % 10 == 0 or i == args.steps - 1:
            print(f"step {i:4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
