"""Kimi Delta Attention on every accelerator. Import `kdakit.torch` or `kdakit.jax`; this package alone imports neither framework."""

__version__ = "0.1.0"
