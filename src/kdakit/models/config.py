"""The description of a model: one frozen dataclass for both frameworks, and the names and shapes of its parameters."""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from kdakit.layers.sizes import LayerSizes


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: blocks of (RMSNorm, mixer, RMSNorm, SwiGLU). The mixer is KDA, or full attention in every n-th layer.

    vocab_size, hidden_size, num_layers: the usual. intermediate_size: the SwiGLU's width; None: 8/3 hidden_size, in 16s.
    attention_every: n; layers n, 2n, .. are full attention without position encoding (Kimi Linear: 4). 0: KDA everywhere.
    num_attention_heads, num_kv_heads: heads of the full-attention layers (num_heads, and as many, if None).
    tie_embeddings: the output projection is the embedding. The other fields are those of KimiDeltaAttention.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 4
    intermediate_size: int | None = None
    attention_every: int = 4
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    tie_embeddings: bool = True
    head_dim: int = 32
    num_heads: int = 4
    num_v_heads: int | None = None
    expand_v: float = 1.0
    use_short_conv: bool = True
    conv_size: int = 4
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    norm_eps: float = 1e-5
    delta_rule: bool = True

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers"):
            _check_integer(name, getattr(self, name), 1)
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise ValueError(f"{field.name} must be True or False, got {getattr(self, field.name)!r}")
        for name in ("intermediate_size", "num_attention_heads", "num_kv_heads"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1)
        _check_integer("attention_every", self.attention_every, 0)
        self.layer_sizes()
        if self.attention_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads must divide the {self.attention_heads} attention heads, got {self.kv_heads}")

    @property
    def attention_heads(self) -> int:
        return self.num_heads if self.num_attention_heads is None else self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.attention_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_size(self) -> int:
        return -(-8 * self.hidden_size // 48) * 16 if self.intermediate_size is None else self.intermediate_size

    def layer_options(self) -> dict[str, Any]:
        """The arguments of KimiDeltaAttention."""
        return {f.name: getattr(self, f.name) for f in fields(LayerSizes)}

    def layer_sizes(self) -> LayerSizes:
        return LayerSizes(**self.layer_options())

    def is_attention(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, is full attention."""
        return self.attention_every > 0 and (layer + 1) % self.attention_every == 0

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of everything a weights file holds."""
        hidden, width = self.hidden_size, self.mlp_size
        made: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            mixer = self._attention_parameters() if self.is_attention(i) else self.layer_sizes().parameters()
            block = {"attn_norm.weight": (hidden,)} | {f"attn.{name}": shape for name, shape in mixer.items()}
            block |= {"mlp_norm.weight": (hidden,), "mlp.gate_proj.weight": (width, hidden), "mlp.up_proj.weight": (width, hidden)}
            block["mlp.down_proj.weight"] = (hidden, width)
            made |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
        made["model.norm.weight"] = (hidden,)
        return made if self.tie_embeddings else made | {"lm_head.weight": (self.vocab_size, hidden)}

    def parameter_count(self) -> int:
        """How many arrays `parameters` names, without naming them."""
        attention = self.num_layers // self.attention_every if self.attention_every else 0
        mixers = attention * 4 + (self.num_layers - attention) * len(self.layer_sizes().parameters())
        return mixers + 5 * self.num_layers + 2 + (not self.tie_embeddings)

    def _attention_parameters(self) -> dict[str, tuple[int, ...]]:
        hidden, queries, keys = self.hidden_size, self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        return {f"{name}_proj.weight": shape for name, shape in shapes.items()}

    def cache_bytes(self, length: int, element: int = 4) -> int:
        """What generation keeps of one sequence of `length` tokens: constant for a KDA layer, growing for full attention."""
        attention = sum(self.is_attention(i) for i in range(self.num_layers))
        growing = 2 * length * self.kv_heads * self.head_dim * element
        return (self.num_layers - attention) * self.layer_sizes().state_bytes(element) + attention * growing

    def flops_per_token(self, length: int) -> int:
        """Multiplications and additions of a forward pass, a token of sequences of `length`; a backward takes twice as many.

        2 for every weight of a matrix; attention's scores and sums over the tokens before, length / 2 of them on average; of KDA what the
        token recurrence needs, decay, read, write and read: 7 K V a head.
        """
        matrices = sum(math.prod(shape) for name, shape in self.parameters().items() if len(shape) == 2 and "embeddings" not in name)
        head = self.vocab_size * self.hidden_size if self.tie_embeddings else 0
        attention = sum(self.is_attention(i) for i in range(self.num_layers))
        sizes = self.layer_sizes()
        states = 7 * sizes.value_heads * sizes.head_dim * sizes.head_v_dim
        scores = 4 * self.attention_heads * self.head_dim * (length // 2)
        return 2 * (matrices + head) + (self.num_layers - attention) * states + attention * scores

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(given: dict[str, Any]) -> ModelConfig:
        known = [f.name for f in fields(ModelConfig)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ValueError(f"a model has no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return ModelConfig(**given)


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
