"""Training on sequences of different length, packed into one row: no padding, and no sequence sees another.

python examples/packed_training.py --steps 20
"""

import argparse
from itertools import pairwise

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from kdakit.models.config import ModelConfig
from kdakit.models.torch import KimiLinear, loss
from kdakit.training import text


def pack(lines: list[bytes]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens and targets [1, T], cu_seqlens [N + 1]: every line predicts its own next bytes, the last byte of a line nothing."""
    arrays = [np.frombuffer(line, np.uint8).astype(np.int64) for line in lines]
    tokens = np.concatenate(arrays)
    targets = np.concatenate([np.append(a[1:], -1) for a in arrays])
    cu_seqlens = np.cumsum([0] + [len(a) for a in arrays])
    return torch.from_numpy(tokens)[None], torch.from_numpy(targets)[None], torch.from_numpy(cu_seqlens)


def padded(lines: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same lines as rows with padding, to compare with."""
    tokens, targets, cu = pack(lines)
    rows = [slice(a, b) for a, b in pairwise(cu.tolist())]
    return pad_sequence([tokens[0, r] for r in rows], batch_first=True), pad_sequence([targets[0, r] for r in rows], True, -1)


def main(argv=None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    model = KimiLinear(ModelConfig(vocab_size=256, hidden_size=64, num_layers=2, attention_every=2, head_dim=32, num_heads=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lines = text.book(100_000).splitlines(keepends=True)[:-1]

    tokens, targets, cu_seqlens = pack(lines[:6])
    rows, row_targets = padded(lines[:6])
    gradients = []
    for value in (loss(model, tokens, targets, cu_seqlens), loss(model, rows, row_targets)):
        model.zero_grad()
        value.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    difference = ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()
    print(f"{tokens.numel()} tokens packed, {rows.numel()} padded; the gradients differ by {difference:.1e} (relative)")

    for step in range(args.steps):
        chosen = np.random.default_rng(step).choice(len(lines), 6, replace=False)
        tokens, targets, cu_seqlens = pack([lines[i] for i in chosen])
        value = loss(model, tokens, targets, cu_seqlens)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step:4}  {tokens.numel():4} tokens  loss {value.item():.3f}")
    return difference


if __name__ == "__main__":
    main()
