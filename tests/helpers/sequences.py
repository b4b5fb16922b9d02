"""What the serving tests share: pools of both frameworks behind one face, and sequences that remember everything they were given."""

from __future__ import annotations

import numpy as np

from kdakit.measure import checking
from kdakit.problem import Arrays, make_options, make_problem
from kdakit.rounding import round_to

H, HV, K, V = 1, 2, 8, 5
ROWS, PACKED = 6, 96  # of every JAX call
OPTIONS = {"use_qk_l2norm_in_kernel": True}
TOKENS = ("q", "k", "v", "g", "beta")


def tokens(rng, rows, count, H=H, HV=HV, K=K, V=V):
    """Random tokens, exact in float32; gates from none to a reset."""
    q, k = rng.normal(size=(2, rows, count, H, K))
    mild = -np.exp(rng.uniform(np.log(1e-3), np.log(3), size=(rows, count, HV, K)))
    strength = rng.choice([0.0, 1.0, 1.0, 30.0, 3000.0], size=(rows, count, 1, 1), p=[0.2, 0.3, 0.4, 0.05, 0.05])
    x = dict(q=q, k=k, v=rng.normal(size=(rows, count, HV, V)), g=mild * strength, beta=rng.uniform(size=(rows, count, HV)))
    return {name: round_to(a, "float32") for name, a in x.items()}


def pieces(x, rows=slice(None), span=slice(None)):
    return {name: a[rows, span] for name, a in x.items()}


class Sequence:
    """Everything one sequence has seen and given."""

    def __init__(self, other=None):
        self.x = None if other is None else other.x
        self.o = None if other is None else other.o

    def extend(self, x, o):
        """x [T, ..] by name, o [T, HV, V]."""
        self.x = x if self.x is None else {n: np.concatenate([self.x[n], x[n]]) for n in TOKENS}
        self.o = o if self.o is None else np.concatenate([self.o, o])

    def check(self, state, options=None):
        """Outputs and state against the float64 recurrence over the whole history, by the accuracy rule."""
        if self.x is None:
            assert not state.any(), "a new slot is not empty"
            return
        arrays = Arrays(**{n: self.x[n][None] for n in TOKENS})
        made = make_options(arrays, output_final_state=True, **(OPTIONS if options is None else options))
        problem = make_problem("recurrent", arrays, made).replace(
            dtype="float32", gate_dtype="float32", beta_dtype="float32", state_dtype="float32"
        )
        rows = checking.compare_quickly(problem, arrays, {"o": self.o[None], "final_state": state[None]})
        assert all(row.ok for row in rows), rows


class TorchPool:
    """kdakit.serving.torch in NumPy's terms."""

    def __init__(self, slots, backend, sizes=(HV, K, V), **options):
        import torch

        from kdakit.serving import torch as serving

        self.torch, self.serving, self.backend = torch, serving, backend
        dtype = getattr(torch, options.pop("dtype", "float32"))
        self.device = options.get("device", "cpu")
        self.pool = serving.StatePool(slots, *sizes, dtype=dtype, **options)
        for name in ("allocate", "free", "fork", "snapshot", "restore"):
            setattr(self, name, getattr(self.pool, name))

    @property
    def free_slots(self):
        return self.pool.free_slots

    def state(self, slot):
        return self.pool.states([slot])[0].double().cpu().numpy()

    def bytes_of(self, slot):
        return [x[slot].cpu().clone() for x in self.pool.tensors()]

    def slots(self, slots, on_device):
        return self.torch.tensor(slots, dtype=self.torch.int64, device=self.device) if on_device else slots

    def _tensors(self, x):
        return {n: self.torch.from_numpy(np.ascontiguousarray(a)).float().to(self.device) for n, a in x.items()}

    def decode(self, slots, x, on_device=False, **options):
        given = OPTIONS | options
        return self.serving.decode(self.pool, self.slots(slots, on_device), **self._tensors(x), backend=self.backend, **given).cpu().numpy()

    def verify(self, slots, x, on_device=False, **options):
        given = OPTIONS | options
        where = self.slots(slots, on_device)
        o, draft = self.serving.verify(self.pool, where, **self._tensors(x), backend=self.backend, **given)
        if on_device:
            where.add_(1).remainder_(self.pool.capacity)  # the buffer is the caller's again: the draft may not look at it
        return o.cpu().numpy(), draft

    def commit(self, draft, accepted, on_device=False):
        self.serving.commit(self.pool, draft, self.slots(accepted, on_device))

    def advance(self, draft, accepted, x, on_device=False):
        more = self._tensors(x)
        o, draft = self.serving.advance(self.pool, draft, self.slots(accepted, on_device), **more, backend=self.backend, **OPTIONS)
        return o.cpu().numpy(), draft

    def prefill(self, slots, x, lengths, checkpoints=None, on_device=False, deterministic=False, backend="torch_native"):
        """x [1, sum of lengths, ..]."""
        cu = self.torch.tensor(np.cumsum([0, *lengths]))
        more = {} if self.device == "cpu" else {"cu_seqlens_cpu": cu}
        o, made = self.serving.prefill(
            self.pool, self.slots(slots, on_device), **self._tensors(x), cu_seqlens=cu.to(self.device), **more, checkpoints=checkpoints,
            chunk_size=16, deterministic=deterministic, backend=backend, **OPTIONS,
        )  # fmt: skip
        return o.cpu().numpy(), made


class JaxPool:
    """kdakit.serving.jax behind the same face."""

    def __init__(self, slots, backend, sizes=(HV, K, V), **options):
        import jax.numpy as jnp

        from kdakit.serving import jax as serving

        self.jnp, self.serving, self.backend = jnp, serving, backend
        self.pool = serving.StatePool.create(slots, *sizes, **options)

    @property
    def free_slots(self):
        return self.pool.free_slots

    def allocate(self, count):
        slots, self.pool = self.pool.allocate(count)
        return slots

    def fork(self, slot):
        slots, self.pool = self.pool.fork(slot)
        return slots

    def free(self, slots):
        self.pool = self.pool.free(slots)

    def snapshot(self, slots):
        return self.pool.snapshot(slots)

    def restore(self, slots, snapshot):
        self.pool = self.pool.restore(slots, snapshot)

    def state(self, slot):
        return np.asarray(self.pool.states([slot])[0], np.float64)

    def slots(self, slots, on_device):
        return self.jnp.array(slots, self.jnp.int32) if on_device else slots

    def _arrays(self, x):
        return {n: self.jnp.asarray(a, self.jnp.float32) for n, a in x.items()}

    def _padded(self, slots, x, on_device):
        """Always ROWS rows, as a server would: one program however many sequences there are."""
        more = ROWS - len(slots)
        x = {n: np.pad(a, [(0, more)] + [(0, 0)] * (a.ndim - 1)) for n, a in x.items()}
        return self.slots([*slots, *[-1] * more], on_device), self._arrays(x)

    def decode(self, slots, x, on_device=False, **options):
        given, x = self._padded(slots, x, on_device)
        o, self.pool = self.serving.decode(self.pool, given, **x, backend=self.backend, **(OPTIONS | options))
        return np.asarray(o)[: len(slots)]

    def verify(self, slots, x, on_device=False, **options):
        given, x = self._padded(slots, x, on_device)
        o, draft = self.serving.verify(self.pool, given, **x, backend=self.backend, **(OPTIONS | options))
        return np.asarray(o)[: len(slots)], draft

    def commit(self, draft, accepted, on_device=False):
        accepted = [*accepted, *[0] * (ROWS - len(accepted))]
        self.pool = self.serving.commit(self.pool, draft, self.slots(accepted, on_device))

    def prefill(self, slots, x, lengths, checkpoints=None, on_device=False, deterministic=False):
        T, more = sum(lengths), ROWS - len(slots)
        x = {n: np.pad(a, [(0, 0), (0, PACKED - T)] + [(0, 0)] * (a.ndim - 2)) for n, a in x.items()}
        wanted = None if checkpoints is None else [*checkpoints, *[[]] * more]
        edges = np.cumsum([0, *lengths, *[0] * (more - 1), PACKED - T])
        o, self.pool, made = self.serving.prefill(
            self.pool, self.slots([*slots, *[-1] * more], on_device), **self._arrays(x), cu_seqlens=self.jnp.array(edges, self.jnp.int32),
            checkpoints=wanted, chunk_size=16, deterministic=deterministic, backend=self.backend, **OPTIONS,
        )  # fmt: skip
        return np.asarray(o)[:, :T], made
