"""KDA without its delta rule, to compare with: the state adds what is written and corrects nothing.

    S_t = Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

In chunks, in plain JAX. Decays are sums of the gates between two tokens: exact under any gate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kdakit.gates import L2_EPSILON

CHUNK = 8


def gated_linear_attention(q, k, v, g, beta, initial_state=None):
    """q, k [B, T, H, K], normalised here; v [B, T, HV, V]; g [B, T, HV, K] log-decay; beta [B, T, HV]. -> o, state [B, HV, K, V]."""
    dtype, T, C = v.dtype, v.shape[1], max(1, min(CHUNK, v.shape[1]))
    q, k, v, g, beta = _chunks(q, k, v, g, beta, C)  # [B, HV, NT, C, ..] in float32 at least
    S = jnp.zeros((*v.shape[:2], k.shape[-1], v.shape[-1]), v.dtype) if initial_state is None else initial_state.astype(v.dtype)
    i, j = np.indices((C, C))
    after = jnp.where((i > j)[..., None], g[..., :, None, :], 0)  # at (m, j): the gates after j
    decays = jnp.exp(jnp.where((i >= j)[..., None], jnp.cumsum(after, -3), -jnp.inf))  # [B, HV, NT, i, j, K]
    A_qk = jnp.einsum("...ik,...jk,...ijk->...ij", q, k, decays)
    v = v * beta[..., None]
    from_start = jnp.exp(jnp.cumsum(g, -2))
    written = (k * decays[..., -1, :, :]).mT @ v  # [B, HV, NT, K, V]

    def chunk(S, x):
        decay, added = x
        return decay[..., None] * S + added, S

    S, states = jax.lax.scan(chunk, S, (jnp.moveaxis(from_start[..., -1, :], 2, 0), jnp.moveaxis(written, 2, 0)))
    o = A_qk @ v + (q * from_start) @ jnp.moveaxis(states, 0, 2)
    o = o.reshape(*o.shape[:2], -1, o.shape[-1])[:, :, :T]
    return jnp.swapaxes(o, 1, 2).astype(dtype), S


def _chunks(q, k, v, g, beta, C):
    wide = jnp.promote_types(v.dtype, jnp.float32)
    q, k, v, g, beta = (x.astype(wide) for x in (q, k, v, g, beta))
    q, k = (x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + L2_EPSILON) for x in (q, k))
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q * q.shape[-1] ** -0.5, k))

    def chunks(x):
        x = jnp.swapaxes(jnp.pad(x, ((0, 0), (0, -x.shape[1] % C), (0, 0), (0, 0))), 1, 2)
        return x.reshape(*x.shape[:2], -1, C, x.shape[-1])

    q, k, v, g, beta = map(chunks, (q, k, v, g, beta[..., None]))
    return q, k, v, g, beta[..., 0]
