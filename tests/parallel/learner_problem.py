"""A model, its optimiser and a batch whose targets do not all count: what learners that cut it are to agree on."""

import numpy as np

from kdakit.models.config import ModelConfig
from kdakit.training.optimizer import AdamW

CONFIG = ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, attention_every=2, num_heads=1, head_dim=8)
OPTIMIZER = AdamW(steps=10, warmup=2)


def batch():
    """tokens and targets [4, 24]: of the first two rows, which are a piece, two targets; none in the last process's part of the others."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 32, (2, 4, 24))
    targets[:2, 1:23], targets[0] = -1, -100
    targets[3, 12:] = -1
    return tokens, targets


def compare(found, alone, tolerance, steps=2):
    """Two learners on the same batch, twice: losses, and after the first step the gradients, as its first moments."""
    for step in range(steps):
        losses = [learner.step(*batch()) for learner in (found, alone)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=tolerance, err_msg=f"loss of step {step}")
        moments = [learner.state().first for learner in (found, alone)]
        for name, want in moments[1].items():
            size = np.abs(want).max()
            assert size > 0, name
            np.testing.assert_allclose(moments[0][name], want, rtol=0, atol=tolerance * size, err_msg=f"{name}, step {step}")
