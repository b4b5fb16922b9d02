"""KDA as a PyTorch layer, with the parameters of flash-linear-attention's KimiDeltaAttention.

layer = KimiDeltaAttention(hidden_size=256, head_dim=64, num_heads=4)
o, _ = layer(x)                                          # x [B, T, 256]
o, cache = layer(prompt, cache=layer.new_cache(B))       # a cache goes in, the next one comes out
o, cache = layer(token, cache=cache)                     # token [B, 1, 256]
"""

from kdakit.layers.torch.attention import FullAttention, KeyValueCache
from kdakit.layers.torch.delta import DeltaCache, KimiDeltaAttention
from kdakit.layers.torch.rows import Rows

__all__ = ["DeltaCache", "FullAttention", "KeyValueCache", "KimiDeltaAttention", "Rows"]
