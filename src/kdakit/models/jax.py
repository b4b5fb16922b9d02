"""A Kimi-Linear style language model in JAX (Flax NNX): KDA layers, full attention in every n-th, RMSNorm, SwiGLU, tied embeddings.

model = KimiLinear(ModelConfig(vocab_size=256))
logits, _ = model(tokens)                                                  # [B, T] -> [B, T, vocab_size]
logits, cache = model(prompt, cache=model.new_cache(B, max_length=1000))   # prefill, in one piece or several
logits, cache = model(token, cache=cache)                                  # one token of each sequence
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kdakit.layers.jax import FullAttention, KimiDeltaAttention, Linear, Rows
from kdakit.layers.jax.norm import RMSNorm
from kdakit.layers.sizes import check_context
from kdakit.models.config import ModelConfig
from kdakit.models.initial import initial_weights
from kdakit.models.weights import check_tokens, check_weights


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, width: int, *, rngs: nnx.Rngs):
        self.gate_proj = Linear(hidden_size, width, rngs=rngs)
        self.up_proj = Linear(hidden_size, width, rngs=rngs)
        self.down_proj = Linear(width, hidden_size, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))"""

    def __init__(self, config: ModelConfig, layer: int, backend: str, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn: FullAttention | KimiDeltaAttention = (
            FullAttention(config.hidden_size, config.attention_heads, config.head_dim, config.kv_heads, rngs=rngs)
            if config.is_attention(layer)
            else KimiDeltaAttention(**config.layer_options(), backend=backend, rngs=rngs)
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.mlp_size, rngs=rngs)

    def __call__(self, x, rows: Rows, cache):
        mixed, cache = self.attn.mix(self.attn_norm(x), rows, cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Embedding(nnx.Module):
    def __init__(self, count: int, size: int, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (count, size)))


class Decoder(nnx.Module):
    def __init__(self, config: ModelConfig, backend: str, *, rngs: nnx.Rngs):
        self.embeddings = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([Block(config, i, backend, rngs=rngs) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class KimiLinear(nnx.Module):
    """The language model. The same seed gives the same weights as in kdakit.models.torch.

    checkpoint_activations: keep only each block's input for the backward, and compute the rest again. weights: instead of the seed's.
    dtype: of activations and products, the parameters' own if None: they stay as they are, and are cast where they multiply.
    """

    def __init__(
        self, config: ModelConfig, seed: int = 0, checkpoint_activations: bool = False, backend: str = "auto", dtype: str | None = None,
        weights: dict[str, np.ndarray] | None = None,
    ):  # fmt: skip
        self.config, self.checkpoint_activations, self.dtype = config, checkpoint_activations, dtype
        rngs = nnx.Rngs(seed)
        self.model = Decoder(config, backend, rngs=rngs)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, rngs=rngs)
        self.load_weights(initial_weights(config, seed) if weights is None else weights)

    def new_cache(self, batch_size: int, max_length: int) -> list:
        """One entry a layer, for sequences of up to max_length tokens; only full-attention layers grow with it."""
        return [block.attn.new_cache(batch_size, max_length, self.dtype) for block in self.model.layers]

    def __call__(self, tokens, attention_mask=None, cache: list | None = None, cu_seqlens=None, context=None):
        """tokens [B, T]; attention_mask [B, T], 0 at padding, wherever it is; or packed sequences, B = 1 with cu_seqlens [N + 1].

        context: a kdakit.parallel.jax.Context, where tokens is one device's slice of those that cu_seqlens counts.
        Returns logits [B, T, vocab_size], zero at padding, and the next cache where one was given.
        """
        check_context(context, attention_mask, cache)
        check_tokens(tokens.shape, None if attention_mask is None else attention_mask.shape, cu_seqlens is not None)
        rows = Rows(cu_seqlens=cu_seqlens, context=context) if attention_mask is None else Rows.from_mask(attention_mask)
        embeddings = self.model.embeddings.weight[...]
        x = embeddings[rows.arrange(tokens)].astype(self.dtype or embeddings.dtype)
        run = nnx.remat(Block.__call__) if self.checkpoint_activations else Block.__call__
        following = []
        for i, block in enumerate(self.model.layers):
            x, state = run(block, x, rows, None if cache is None else cache[i])
            following.append(state)
        x = self.model.norm(x)
        logits = x @ embeddings.astype(x.dtype).T if self.config.tie_embeddings else self.lm_head(x)
        return rows.restore(logits), None if cache is None else following

    def weights(self) -> dict[str, np.ndarray]:
        """{name: array} as `kdakit.models.weights.save` and the PyTorch model take them."""
        return {name: np.asarray(value[...], np.float32) for name, value in self._named()}

    def load_weights(self, weights: dict[str, np.ndarray]) -> None:
        """All of them, or none where one cannot be taken."""
        check_weights(self.config, weights)
        given = [(value, jnp.asarray(weights[name], value[...].dtype)) for name, value in self._named()]
        for value, found in given:
            value[...] = found

    def _named(self):
        return [(".".join(map(str, path)), value) for path, value in nnx.to_flat_state(nnx.state(self, nnx.Param))]

    def inference(self, in_place: bool = True):
        """call(tokens [B, T], cache) -> (logits [B, T, vocab_size], cache), with NumPy arrays, compiled for every T.

        in_place: a call uses the cache up: go on with the one that comes back. Else there must be room for both.
        """
        graph, parameters = nnx.split(self)

        @partial(jax.jit, donate_argnums=2 if in_place else ())
        def run(parameters, tokens, cache):
            logits, cache = nnx.merge(graph, parameters)(tokens, cache=cache)
            return logits.astype(jnp.float32), cache

        def call(tokens: np.ndarray, cache: list):
            logits, cache = run(parameters, np.asarray(tokens, np.int32), cache)
            return np.asarray(logits), cache

        return call


def loss(model: KimiLinear, tokens, targets, cu_seqlens=None, context=None):
    """Mean cross-entropy of targets [B, T] under the model's logits; targets below 0 do not count. With a context: of this slice."""
    return summed_loss(model, tokens, targets, cu_seqlens, context) / (targets >= 0).sum().astype(jnp.float32)


def summed_loss(model: KimiLinear, tokens, targets, cu_seqlens=None, context=None):
    """The sum that `loss` is the mean of: those of several slices add up."""
    logits, _ = model(tokens, cu_seqlens=cu_seqlens, context=context)
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    chosen = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return -jnp.where(targets >= 0, chosen, 0).sum()
