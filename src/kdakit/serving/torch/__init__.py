"""Serving in PyTorch: a pool of states, changed in place.

pool = StatePool(slots=64, HV=32, K=128, V=128, device="cuda")
(slot,) = pool.allocate()
o, _ = prefill(pool, [slot], q, k, v, g, beta, cu_seqlens)       # a prompt, or a slice of one, or many packed together
o = decode(pool, slots, q, k, v, g, beta)                         # the next token of each row
o, draft = verify(pool, slots, q, k, v, g, beta)                  # up to 8 draft tokens of each row; no state changes
commit(pool, draft, accepted)                                     # keep the first accepted[n] of them
o, draft = advance(pool, draft, accepted, q, k, v, g, beta)       # that, and the next draft tokens: the states once
"""

from kdakit.serving.slots import PoolFull
from kdakit.serving.torch.calls import Draft, advance, commit, decode, verify
from kdakit.serving.torch.pool import Snapshot, StatePool
from kdakit.serving.torch.prefill import prefill

__all__ = ["Draft", "PoolFull", "Snapshot", "StatePool", "advance", "commit", "decode", "prefill", "verify"]
