"""A Kimi-Linear style language model in PyTorch: KDA layers, full attention in every n-th, RMSNorm, SwiGLU, tied embeddings.

model = KimiLinear(ModelConfig(vocab_size=256))
logits, _ = model(tokens)                                                  # [B, T] -> [B, T, vocab_size]
logits, cache = model(prompt, cache=model.new_cache(B, max_length=1000))   # prefill, in one piece or several
logits, cache = model(token, cache=cache)                                  # one token of each sequence
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kdakit.layers.sizes import check_context
from kdakit.layers.torch import FullAttention, KimiDeltaAttention, Rows
from kdakit.layers.torch.fused.residual import feed_forward
from kdakit.layers.torch.fused.swiglu import swiglu
from kdakit.layers.torch.norm import RMSNorm
from kdakit.models.captured import CapturedSteps, Moved
from kdakit.models.config import ModelConfig
from kdakit.models.initial import initial_weights
from kdakit.models.place import kept_float32
from kdakit.models.weights import as_plain_floats, check_tokens, check_weights


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = feed_forward(self, x)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x))) if found is None else found


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the last sum is left to the norm that follows, which takes both."""

    def __init__(self, config: ModelConfig, layer: int, backend: str):
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn: FullAttention | KimiDeltaAttention = (
            FullAttention(config.hidden_size, config.attention_heads, config.head_dim, config.kv_heads)
            if config.is_attention(layer)
            else KimiDeltaAttention(**config.layer_options(), backend=backend)
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size)

    def forward(self, x: Tensor, made: Tensor | None, rows: Rows, cache):
        """made: what the block before adds to x. Returns x, what this one adds to it, and the cache."""
        normed, x = self.attn_norm.carried(x, made)
        mixed, cache = self.attn.mix(normed, rows, cache)
        normed, x = self.mlp_norm.carried(x, mixed)
        return x, self.mlp(normed), cache


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, backend: str):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i, backend) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class KimiLinear(nn.Module):
    """The language model. The same seed gives the same weights as in kdakit.models.jax.

    checkpoint_activations: keep only each block's input for the backward, and compute the rest again. weights: instead of the seed's.
    """

    def __init__(
        self, config: ModelConfig, seed: int = 0, checkpoint_activations: bool = False, backend: str = "auto",
        weights: dict[str, np.ndarray] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.checkpoint_activations = config, checkpoint_activations
        self._steps = CapturedSteps()
        with torch.device("meta"):  # PyTorch's own first weights, which are not wanted, take seconds
            self.model = Decoder(config, backend)
            if not config.tie_embeddings:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to_empty(device=torch.get_default_device())
        self.load_weights(initial_weights(config, seed) if weights is None else weights)

    def new_cache(self, batch_size: int, max_length: int) -> list:
        """One entry a layer, for sequences of up to max_length tokens; only full-attention layers grow with it."""
        return [block.attn.new_cache(batch_size, max_length) for block in self.blocks()]

    def blocks(self) -> list[Block]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, cache: list | None = None, cu_seqlens: Tensor | None = None,
        context: Any = None, in_place: bool = False,
    ) -> tuple[Tensor, list | None]:  # fmt: skip
        """tokens [B, T]; attention_mask [B, T], 0 at padding, wherever it is; or packed sequences, B = 1 with cu_seqlens [N + 1].

        context: a kdakit.parallel.torch.Context, where tokens is one rank's slice of those that cu_seqlens counts.
        in_place: the given cache may be overwritten by the next one.
        Returns logits [B, T, vocab_size], zero at padding, and the next cache where one was given.
        """
        check_context(context, attention_mask, cache)
        check_tokens(tokens.shape, None if attention_mask is None else attention_mask.shape, cu_seqlens is not None)
        rows = Rows(cu_seqlens=cu_seqlens, context=context) if attention_mask is None else Rows.from_mask(attention_mask)
        rows = rows._replace(in_place=in_place)
        x, made = self.model.embeddings(rows.arrange(tokens)), None
        following = []
        for i, block in enumerate(self.blocks()):
            state = None if cache is None else cache[i]
            if self.checkpoint_activations and torch.is_grad_enabled():
                x, made, state = checkpoint(block, x, made, rows, state, use_reentrant=False)
            else:
                x, made, state = block(x, made, rows, state)
            following.append(state)
        x, _ = self.model.norm.carried(x, made)
        head = self.model.embeddings.weight if self.config.tie_embeddings else self.lm_head.weight
        return rows.restore(F.linear(x, head)), None if cache is None else following

    def weights(self) -> dict[str, np.ndarray]:
        """{name: array} as `kdakit.models.weights.save` and the JAX model take them: copies, which learning on does not change."""
        return {name: value.detach().to("cpu", torch.float32, copy=True).numpy() for name, value in self.state_dict().items()}

    def load_weights(self, weights: dict[str, np.ndarray]) -> None:
        """All of them, or none where one cannot be taken."""
        check_weights(self.config, weights)
        own = self.state_dict()
        given = {name: torch.from_numpy(as_plain_floats(weights[name])) for name in own}
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(given[name])

    def inference(self, graph: bool = True, in_place: bool = False):
        """call(tokens [B, T], cache) -> (logits [B, T, vocab_size], cache), with NumPy arrays and without gradients.

        graph: a step of one token a sequence uses the cache up: go on with the one that comes back. On a CUDA device it is captured once
        for each size of cache and replayed. in_place: calls of more tokens use it up too, and need no room for a second one.
        """
        device = self.model.embeddings.weight.device

        @torch.no_grad()
        def call(tokens: np.ndarray, cache: list):
            given = torch.as_tensor(tokens, device=device)
            step = graph and given.shape[1] == 1
            if step and device.type == "cuda":
                logits, cache = self._steps(self, given, cache)
            else:
                held = isinstance(cache, Moved)  # by a captured step, whose memory the next sequence overwrites
                logits, cache = self(given, cache=cache, in_place=step or (in_place and not held))
            return logits.float().cpu().numpy(), cache

        return call


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model's parameters in `dtype`, in place, but for those that stay float32."""
    for name, parameter in model.named_parameters():
        if not kept_float32(name) or dtype == torch.float64:
            parameter.data = parameter.data.to(dtype)
    return model


def loss(model: nn.Module, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, context: Any = None) -> Tensor:
    """Mean cross-entropy of targets [B, T] under the model's logits; targets below 0 do not count. With a context: of this slice."""
    return _cross_entropy(model, tokens, targets, cu_seqlens, context, "mean")


def summed_loss(model: nn.Module, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, context: Any = None) -> Tensor:
    """The sum that `loss` is the mean of: those of several slices add up."""
    return _cross_entropy(model, tokens, targets, cu_seqlens, context, "sum")


def _cross_entropy(model, tokens, targets, cu_seqlens, context, reduction):
    logits, _ = model(tokens, cu_seqlens=cu_seqlens, context=context)
    counted = targets.flatten().long().clamp(min=-1)
    return F.cross_entropy(logits.flatten(0, 1).float(), counted, ignore_index=-1, reduction=reduction)
