"""A training step in PyTorch.

python examples/train_torch.py --steps 50
python examples/train_torch.py --checkpoint-activations --compile
"""

import argparse

import numpy as np
import torch

from kdakit.models.config import ModelConfig
from kdakit.models.torch import KimiLinear, loss
from kdakit.training import text


def main(argv=None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint-activations", action="store_true", help="less memory, more arithmetic")
    parser.add_argument("--compile", action="store_true", help="torch.compile; needs a C++ compiler on a CPU")
    args = parser.parse_args(argv)

    # Three KDA layers, then one of full attention: the mix of Kimi Linear.
    config = ModelConfig(vocab_size=256, hidden_size=64, num_layers=4, attention_every=4, head_dim=32, num_heads=2)
    model = KimiLinear(config, checkpoint_activations=args.checkpoint_activations)
    forward = torch.compile(model, fullgraph=True) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    data, _ = text.split(text.book(100_000))
    losses = []
    for step in range(args.steps):
        tokens, targets = (torch.from_numpy(x) for x in text.batch(data, np.random.default_rng(step), 4, 128))
        value = loss(forward, tokens, targets)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
