"""Serving in JAX: a pool of states that calls take and return.

pool = StatePool.create(slots=64, HV=32, K=128, V=128)
(slot,), pool = pool.allocate()
o, pool, _ = prefill(pool, [slot], q, k, v, g, beta, cu_seqlens)
o, pool = decode(pool, slots, q, k, v, g, beta)
o, draft = verify(pool, slots, q, k, v, g, beta)
pool = commit(pool, draft, accepted)

kdakit.serving.jax.pages has decode for states that somebody else owns.
"""

from kdakit.serving.jax.calls import Draft, commit, decode, verify
from kdakit.serving.jax.pool import Snapshot, StatePool
from kdakit.serving.jax.prefill import prefill
from kdakit.serving.slots import PoolFull

__all__ = ["Draft", "PoolFull", "Snapshot", "StatePool", "commit", "decode", "prefill", "verify"]
