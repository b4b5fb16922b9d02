"""A small Kimi-Linear style language model, in PyTorch (`kdakit.models.torch`) and in JAX (`kdakit.models.jax`), on the same weights."""
