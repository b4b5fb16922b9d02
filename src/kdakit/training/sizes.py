"""Named sizes of a training run: the model, its batches and its learning rate. What is typed on the command line goes first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """The options of `kdakit train` that a checkpoint keeps."""

    steps: int = 400
    batch: int = 8  # sequences a step
    accumulate: int = 1  # pieces in which a batch goes through the model
    length: int = 256  # tokens a sequence
    learning_rate: float = 3e-3
    warmup: int = 30  # steps until the learning rate is there; a cosine follows
    layers: int = 4
    hidden: int = 128
    intermediate: int = 0  # width of the SwiGLU; 0: 8/3 of hidden
    heads: int = 2
    head_dim: int = 32
    attention_every: int = 4  # layers of full attention: every fourth, as in Kimi Linear; 0: none
    seed: int = 0


SIZES = {
    "small": Run(),
    # 339 M parameters, three layers of KDA to one of attention; 131,072 tokens a step.
    "340m": Run(
        steps=2000, batch=32, length=4096, learning_rate=1e-3, warmup=100, layers=24, hidden=1024, intermediate=3072, heads=8, head_dim=128
    ),
}
