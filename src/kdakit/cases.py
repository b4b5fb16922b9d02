"""Named problems, the single source for the contract test, `kdakit verify`, `kdakit bench` and the docs.

A case is small enough for an interpreter and hard in one stated way. Its values are drawn in NumPy and rounded to the dtypes they will be
passed in, so that every backend, and the truth, sees the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from kdakit.gates import l2norm
from kdakit.problem import Arrays, Problem, make_options, make_problem
from kdakit.rounding import round_to

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Case:
    name: str
    why: str
    B: int = 1
    T: int = 100
    H: int = 2
    HV: int = 2
    K: int = 32
    V: int = 16
    gate: str = "mild"  # a key of GATES
    keys: str = "random"  # a key of KEYS
    beta: str = "uniform"  # a key of BETAS
    lengths: tuple[int, ...] = ()  # cu_seqlens as lengths
    segments: tuple[tuple[int, ...], ...] = ()  # segment_ids as lengths, a tuple per row
    initial_state: bool = True
    A_log: bool = False
    dt_bias: bool = False
    wide_beta: bool = False  # float32 beta beside half precision
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def arrays(self, dtype: str = "float32", seed: int = 0) -> Arrays:
        """float64 arrays whose values are exact in the dtypes of `self.dtypes(dtype)`."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        B, T, H, HV, K, V = self.B, self.T, self.H, self.HV, self.K, self.V
        q, k = rng.normal(size=(2, B, T, H, K))
        k = KEYS[self.keys](rng, k)
        values = Arrays(
            q=q if self.options.get("use_qk_l2norm_in_kernel") else l2norm(q),
            k=k if self.options.get("use_qk_l2norm_in_kernel") else l2norm(k),
            v=rng.normal(size=(B, T, HV, V)),
            g=GATES[self.gate](rng, (B, T, HV, K)),
            beta=BETAS[self.beta](rng, (B, T, HV)),
            A_log=np.log(rng.uniform(1, 16, size=HV)) if self.A_log else None,
            dt_bias=rng.normal(size=HV * K) if self.dt_bias else None,
            initial_state=rng.normal(size=self.problem_sizes[2]) if self.initial_state else None,
            cu_seqlens=np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64) if self.lengths else None,
            segment_ids=np.array([np.repeat(np.arange(len(s)), s) for s in self.segments], np.int32) if self.segments else None,
        )
        dtypes = self.dtypes(dtype)
        return Arrays(*(round_to(x, d) if x is not None and "int" not in d else x for x, d in zip(values, dtypes, strict=True)))

    def dtypes(self, dtype: str = "float32") -> Arrays:
        """The dtype each array is passed in: log-decays and parameters stay float32 beside half precision, as models keep them."""
        wide = "float64" if dtype == "float64" else "float32"
        raw = self.options.get("use_gate_in_kernel", False)
        beta = wide if self.wide_beta else dtype
        return Arrays(dtype, dtype, dtype, dtype if raw else wide, beta, wide, wide, wide, "int64", "int64", "int32")

    @property
    def problem_sizes(self):
        N = len(self.lengths) if self.lengths else self.B
        state = (self.V, self.K) if self.options.get("state_v_first") else (self.K, self.V)
        return N, (self.B, self.T, self.HV, self.V), (N, self.HV, *state)

    def problem(self, dtype: str = "float32", op: str = "chunk", needs_grad: bool = False) -> Problem:
        return _problem(self, dtype, op, needs_grad)

    @property
    def call_options(self) -> dict[str, Any]:
        """Keyword arguments of the public call beside the arrays."""
        return {"output_final_state": True, "chunk_size": 32} | self.options

    def cotangents(self, dtype: str = "float32", seed: int = 1):
        """d_o and d_final_state, rounded like o and final_state."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        _, o, state = self.problem_sizes
        wide = self.dtypes(dtype).initial_state
        return round_to(rng.normal(size=o), dtype), round_to(rng.normal(size=state), wide)


@lru_cache(maxsize=1024)  # of a problem's arrays only the sizes count, and drawing them takes longer than anything else here
def _problem(case: Case, dtype: str, op: str, needs_grad: bool) -> Problem:
    arrays = case.arrays("float64")
    problem = make_problem(op, arrays, make_options(arrays, **case.call_options), needs_grad)
    d = case.dtypes(dtype)
    return problem.replace(dtype=dtype, gate_dtype=d.g, beta_dtype=d.beta, state_dtype=d.initial_state)


def _sometimes(rng, base, rows, low):
    return np.where(rng.uniform(size=(*base.shape[:2], 1, 1)) < rows, low, base)


def _mild(rng, shape):
    return -np.logaddexp(0, -rng.normal(1, 1.5, size=shape))


def _by_channel(*kinds):
    """Each channel of each head has gates of another kind."""

    def draw(rng, shape):
        which = rng.integers(len(kinds), size=shape[2:])
        return np.choose(which, [GATES[kind](rng, shape) for kind in kinds])

    return draw


GATES = {
    "mild": _mild,
    "zero": lambda rng, shape: np.zeros(shape),
    "slow": lambda rng, shape: -1e-4 * rng.uniform(size=shape),
    "bounded": lambda rng, shape: rng.uniform(-5, 0, size=shape),
    "strong": lambda rng, shape: rng.uniform(-25, -15, size=shape),
    "huge": lambda rng, shape: -np.exp(rng.uniform(np.log(1e-3), np.log(3000), size=shape)),
    "resets": lambda rng, shape: _sometimes(rng, _mild(rng, shape), 0.08, -3000.0),
    "spikes": lambda rng, shape: np.where(rng.uniform(size=shape) < 0.05, rng.choice([-60.0, -2661.0], size=shape), _mild(rng, shape)),
    "raw": lambda rng, shape: rng.normal(size=shape),
    "raw_slow": lambda rng, shape: rng.normal(-9, 1, size=shape),
    "raw_huge": lambda rng, shape: rng.normal(0, 60, size=shape),
    "channels": _by_channel("mild", "zero", "slow", "strong", "spikes", "bounded"),
    "bounded_channels": _by_channel("bounded", "slow", "zero"),
    "raw_channels": _by_channel("raw", "raw_slow", "raw_huge"),
}

KEYS = {
    "random": lambda rng, k: k,
    "identical": lambda rng, k: np.broadcast_to(k[:, :1], k.shape),
    "parallel": lambda rng, k: k[:, :1] + 0.1 * k,
}

BETAS = {
    "uniform": lambda rng, shape: rng.uniform(size=shape),
    "one": lambda rng, shape: np.ones(shape),
    "up_to_two": lambda rng, shape: rng.uniform(0, 2, size=shape),
    "some_zero": lambda rng, shape: rng.uniform(size=shape) * rng.choice([0.0, 1e-30, 1e-3, 1.0, 1.0, 1.0], size=shape),
    "logits": lambda rng, shape: rng.normal(size=shape),
    "logits_high": lambda rng, shape: rng.normal(6, 1, size=shape),
}

FUSED = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}

CASES = {
    case.name: case
    for case in (
        Case("plain", "random inputs, a ragged last chunk", B=2),
        Case("whole_chunks", "T a multiple of the chunk, K = V", T=64, K=16),
        Case("one_token", "a single token", T=1),
        Case("no_tokens", "T = 0: the final state is the initial one", T=0),
        Case("short", "T below every chunk size", T=13, options={"chunk_size": 64}),
        Case("no_state", "no initial state", initial_state=False),
        Case("no_final", "the final state is not asked for", options={"output_final_state": False}),
        Case("odd_sizes", "head sizes that fill no tile", T=70, K=20, V=37),
        Case("wide", "the largest head sizes", T=40, H=1, HV=1, K=256, V=256),
        Case("tall", "K < V", T=70, K=16, V=64),
        Case("grouped", "two value heads per key head", HV=4, B=2, T=50),
        Case("v_first", "[V, K] states with K != V", options={"state_v_first": True}),
        Case("chunk16", "chunk size 16", options={"chunk_size": 16}),
        Case("chunk64", "chunk size 64", T=150, options={"chunk_size": 64}),
        Case("chunk128", "chunk size 128", T=200, options={"chunk_size": 128}),
        Case("scaled", "a scale of the caller's", options={"scale": 0.7}),
        Case("keep", "disable_recompute", options={"disable_recompute": True}),
        Case("gate_zero", "no decay at all", gate="zero"),
        Case("gate_slow", "almost no decay", gate="slow"),
        Case("gate_bounded", "log-decays in [-5, 0), promised by safe_gate", gate="bounded", options={"safe_gate": True}),
        Case("gate_strong", "every gate forgets: gradients of g are tiny and must not drown", gate="strong"),
        Case("gate_huge", "log-decays from -1e-3 to -3000", gate="huge"),
        Case("gate_resets", "hard resets inside chunks", gate="resets"),
        Case("gate_spikes", "single channels spike beside mild decay", gate="spikes"),
        Case("keys_identical", "identical keys, beta = 1, no decay", gate="zero", keys="identical", beta="one"),
        Case("keys_parallel", "nearly parallel keys, beta = 1, no decay", gate="zero", keys="parallel", beta="one"),
        Case("beta_two", "beta up to 2", beta="up_to_two", gate="slow"),
        Case("beta_zero", "betas of 0 and nearly 0, which have gradients too", beta="some_zero"),
        Case("identical_two", "identical keys, beta up to 2", gate="slow", keys="identical", beta="up_to_two"),
        Case("softplus", "everything in the kernel, softplus gate", gate="raw", beta="logits", A_log=True, dt_bias=True, options=FUSED),
        Case("softplus_huge", "softplus gate with huge inputs", gate="raw_huge", beta="logits", A_log=True, dt_bias=True, HV=4,
             options=FUSED),
        Case("lower_bound", "everything in the kernel, bounded gate", gate="raw", beta="logits", A_log=True, dt_bias=True,
             options=FUSED | {"lower_bound": -5.0, "safe_gate": True}),
        Case("lower_bound_saturated", "bounded gate, nearly all saturated: the few that are not have tiny gradients", T=80, gate="raw_huge",
             beta="logits", A_log=True, dt_bias=True, options=FUSED | {"lower_bound": -5.0}),
        Case("lower_bound_bare", "bounded gate without A_log, dt_bias or safe_gate; beta to 2", gate="raw", beta="logits",
             options=FUSED | {"lower_bound": -2.5, "allow_neg_eigval": True}),
        Case("varlen", "packed sequences: empty, tiny, ragged", T=137, lengths=(0, 5, 32, 0, 1, 64, 35, 0)),
        Case("varlen_many", "more sequences than chunks", T=40, lengths=(1, 2, 3) * 6 + (4,), HV=4),
        Case("varlen_fused", "packed, everything in the kernel", T=90, lengths=(33, 57), gate="raw", beta="logits", A_log=True,
             dt_bias=True, options=FUSED | {"state_v_first": True}),
        Case("varlen_no_state", "packed, no initial state", T=70, lengths=(0, 48, 22), initial_state=False),
    )
}  # fmt: skip

# Only frontends that take segment_ids run these.
SEGMENT_CASES = {
    case.name: case
    for case in (
        Case("segments", "segment_ids: resets inside and at the edges of chunks", B=2, T=96, segments=((5, 27, 32, 1, 31), (96,))),
        Case("segments_fused", "segment_ids, everything in the kernel", T=50, segments=((20, 30),), gate="raw", beta="logits",
             A_log=True, options=FUSED),
    )
}  # fmt: skip


# Head sizes as models have them, past a checkpoint, grouped, with heads enough to fill a chip: minutes on a CPU.
_BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True, "chunk_size": 64}
_MODEL = dict(K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True)
MODEL_CASES = {
    case.name: case
    for case in (
        Case("model_long", "K = V = 128, scanned in parts", T=2500, H=1, HV=1, options=_BOUNDED, **_MODEL),
        Case("model_many", "K = V = 128, many heads", T=130, H=70, HV=70, options=_BOUNDED, **_MODEL),
        Case("model", "K = V = 128, bounded", T=600, options=_BOUNDED, **_MODEL),
        Case("model_softplus", "K = V = 128, softplus", T=600, options=FUSED, **_MODEL),
        Case("model_grouped", "K = V = 128, packed, grouped", T=300, HV=4, lengths=(0, 130, 5, 165), options=_BOUNDED, **_MODEL),
    )
}


@dataclass(frozen=True)
class Shape:
    """A shape to time: everything in the kernel, initial and final state, K = V."""

    B: int
    T: int
    H: int
    K: int = 128
    lengths: tuple[int, ...] = ()

    def case(self, name: str = "bench", bounded: bool = True) -> Case:
        options = FUSED | {"chunk_size": 64} | ({"lower_bound": -5.0, "safe_gate": True} if bounded else {})
        return Case(name, "a timed shape", B=self.B, T=self.T, H=self.H, HV=self.H, K=self.K, V=self.K, gate="raw", beta="logits",
                    lengths=self.lengths, A_log=True, dt_bias=True, options=options)  # fmt: skip


SHAPES = {
    "tiny": Shape(1, 512, 2, 64),
    "cpu": Shape(1, 2048, 4),
    "cpu_long": Shape(1, 8192, 4),
    "h16": Shape(1, 8192, 16),
    "h32": Shape(1, 8192, 32),
    "h64": Shape(1, 8192, 64),
    "h96": Shape(1, 8192, 96),
    "varlen96": Shape(1, 8192, 96, lengths=(1024,) * 8),
    "long64": Shape(2, 16384, 64),
}
