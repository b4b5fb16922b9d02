"""Layers around the KDA operator, in PyTorch (`kdakit.layers.torch`) and in Flax NNX (`kdakit.layers.jax`), on the same parameters."""
