"""KDA over several devices: `kdakit.parallel.torch` on torch.distributed, `kdakit.parallel.jax` on shard_map."""
