"""KDA as a Flax NNX layer, with the parameters of flash-linear-attention's KimiDeltaAttention, in its layout.

layer = KimiDeltaAttention(hidden_size=256, head_dim=64, num_heads=4, rngs=nnx.Rngs(0))
o, _ = layer(x)                                          # x [B, T, 256]
o, cache = layer(prompt, cache=layer.new_cache(B))       # a cache goes in, the next one comes out
o, cache = layer(token, cache=cache)                     # token [B, 1, 256]
"""

from kdakit.layers.jax.attention import FullAttention, KeyValueCache
from kdakit.layers.jax.delta import DeltaCache, KimiDeltaAttention
from kdakit.layers.jax.linear import Linear
from kdakit.layers.jax.rows import Rows

__all__ = ["DeltaCache", "FullAttention", "KeyValueCache", "KimiDeltaAttention", "Linear", "Rows"]
