"""The sizes of a KimiDeltaAttention layer, checked once for both frameworks, and the names and shapes of its parameters.

Names and shapes are those of flash-linear-attention's layer of the same name, so that its checkpoints load as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MODES = ("auto", "chunk", "recurrent")


@dataclass(frozen=True)
class LayerSizes:
    """Everything that describes a layer but its numbers. Meaning of the fields: `KimiDeltaAttention`."""

    hidden_size: int = 2048
    expand_v: float = 1.0
    head_dim: int = 128
    num_heads: int = 16
    num_v_heads: int | None = None
    use_short_conv: bool = True
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    conv_size: int = 4
    conv_bias: bool = False
    norm_eps: float = 1e-5
    delta_rule: bool = True

    def __post_init__(self):
        for name in ("hidden_size", "head_dim", "num_heads", "conv_size"):
            _check_positive(name, getattr(self, name))
        if self.num_v_heads is not None:
            _check_positive("num_v_heads", self.num_v_heads)
            if self.num_v_heads % self.num_heads:
                raise ValueError(f"num_v_heads must be a multiple of num_heads = {self.num_heads}, got {self.num_v_heads}")
        if not math.isfinite(self.expand_v) or self.head_v_dim != self.head_dim * self.expand_v or self.head_v_dim < 1:
            raise ValueError(f"expand_v * head_dim must be a positive integer, got {self.expand_v} * {self.head_dim}")
        for name, size in (("head_dim", self.head_dim), ("expand_v * head_dim", self.head_v_dim)):
            if size > 256:
                raise ValueError(f"{name} must be at most 256, got {size}")
        if self.lower_bound is not None and not -5 <= self.lower_bound < 0:
            raise ValueError(f"lower_bound must lie in [-5, 0), got {self.lower_bound}")
        if self.safe_gate and self.lower_bound is None:
            raise ValueError("safe_gate needs lower_bound in [-5, 0), got None")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps}")

    @property
    def value_heads(self) -> int:
        return self.num_heads if self.num_v_heads is None else self.num_v_heads

    @property
    def head_v_dim(self) -> int:
        return int(self.head_dim * self.expand_v)

    @property
    def key_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.head_v_dim

    @property
    def gate_dim(self) -> int:
        """One gate for each channel of the key, in every value head."""
        return self.value_heads * self.head_dim

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """{name: shape}; the matrices are [out, in], the convolutions [channels, 1, width]."""
        hidden, rank = self.hidden_size, self.head_v_dim
        made: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (self.key_dim, hidden) for name in "qk"}
        made["v_proj.weight"] = (self.value_dim, hidden)
        if self.use_short_conv:
            for name, channels in (("q", self.key_dim), ("k", self.key_dim), ("v", self.value_dim)):
                made[f"{name}_conv1d.weight"] = (channels, 1, self.conv_size)
                if self.conv_bias:
                    made[f"{name}_conv1d.bias"] = (channels,)
        return made | {
            "f_proj.0.weight": (rank, hidden),
            "f_proj.1.weight": (self.gate_dim, rank),
            "b_proj.weight": (self.value_heads, hidden),
            "A_log": (self.value_heads,),
            "dt_bias": (self.gate_dim,),
            "g_proj.0.weight": (rank, hidden),
            "g_proj.1.weight": (self.value_dim, rank),
            "g_proj.1.bias": (self.value_dim,),
            "o_norm.weight": (rank,),
            "o_proj.weight": (hidden, self.value_dim),
        }

    def state_bytes(self, element: int = 4) -> int:
        """What one sequence keeps between two tokens: the float32 state and the windows of the convolutions."""
        windows = (self.conv_size - 1) * (2 * self.key_dim + self.value_dim) if self.use_short_conv else 0
        return 4 * self.value_heads * self.head_dim * self.head_v_dim + element * windows


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_context(context, attention_mask, cache) -> None:
    """Slices of tokens over several devices have neither padding nor a cache: pack the sequences instead."""
    for name, given in (("attention_mask", attention_mask), ("cache", cache)):
        if context is not None and given is not None:
            raise ValueError(f"{name} must be None with a context: pack sequences of different lengths with cu_seqlens")


def check_cache(sequences: int, wanted: int) -> None:
    """A cache has a row for each sequence of the call."""
    if sequences != wanted:
        raise ValueError(f"cache must have a row for each of the {wanted} sequences of this call, see new_cache({wanted}), got {sequences}")


def check_rows(shape, hidden_size: int, mask_shape, packed: bool) -> None:
    """The input of a layer: [B, T, hidden_size], a mask [B, T], or B = 1 packed with cu_seqlens; never both."""
    if len(shape) != 3 or shape[-1] != hidden_size:
        raise ValueError(f"hidden_states must be [B, T, hidden_size] with hidden_size = {hidden_size}, got {tuple(shape)}")
    if mask_shape is not None:
        if packed:
            raise ValueError("attention_mask and cu_seqlens exclude each other: packed sequences have no padding, got both")
        if tuple(mask_shape) != tuple(shape[:2]):
            raise ValueError(f"attention_mask must be [B, T] = {tuple(shape[:2])}, 1 at tokens and 0 at padding, got {tuple(mask_shape)}")
    if packed and shape[0] != 1:
        raise ValueError(f"hidden_states must have B = 1 with cu_seqlens, got B = {shape[0]}")
