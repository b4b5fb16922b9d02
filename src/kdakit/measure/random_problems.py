"""Random problems over the whole contract: a number is a problem.

    draw(number) -> Drawn        a Case with its dtypes, the call, and how its tensors lie in memory

Even numbers are drawn freely. Odd ones share programs: a compiler for GPUs takes seconds for a new *form* (head sizes, dtypes, options) and
nothing for a new length, so PER_FORM numbers in a row are one form: three sizes of V, and for each the CALLS, on other lengths, heads,
packings, gates and values. Forms of one *family* also share the programs that no gate enters. A round of all FORMS has every padded K,
every gate and every call, with few, some and many heads, in each dtype; two seeds in a row also have every padded V with them.

`numbers(seed, count)` are those of a campaign; two seeds have none in common. Seeds from MORE on draw what those before them do not, which
records name: tokens behind the last sequence, and a gradient of the final state that is not packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from kdakit.cases import Case
from kdakit.problem import Arrays, Problem, make_options, make_problem

SIZES = (16, 32, 64, 128, 256)  # padded head sizes
VALUES = ((64, 128, 256), (16, 32, 128))  # padded V of a form, by seed
CALLS = tuple(zip(("gradient",) * 5 + ("forward",) * 3 + ("step",), ("few", "some", "many") * 3, strict=True))  # and heads, of each V
PER_FORM = len(VALUES[0]) * len(CALLS)
SEED = 10**6  # numbers of a seed, of either kind
MORE = 1000
GATES = ("given", "given_bounded", "softplus", "bounded")
CROWDS = ("few", "some", "many")
STATE_ELEMENTS = 800_000  # tokens * heads * K * V: what a truth may cost, but for a few
LAYOUTS = ("plain", "plain", "heads_first", "wide", "strided_tokens", "offset", "strided_channels", "reversed")


@dataclass(frozen=True)
class Form:
    """What decides which kernels are compiled, but for sizes and options that the family draws."""

    dtype: str
    K: int  # padded
    gate: str  # one of GATES
    l2norm: bool | None  # None: the form draws it; bfloat16 has kernels of its own for it

    @property
    def family(self) -> tuple[str, int, str]:
        """Forms whose kernels over states are alike: in bfloat16 these know how a gate or normalised keys let them order tokens."""
        if self.dtype != "bfloat16":
            return self.dtype, self.K, "all"
        if self.l2norm and self.K <= 128:
            return self.dtype, self.K, "normed"
        return self.dtype, self.K, "bounded" if self.gate in ("given_bounded", "bounded") else "any"


def _forms() -> list[Form]:
    made = [Form("bfloat16", K, gate, norm) for K in SIZES for gate in GATES for norm in ((True, False) if K <= 128 else (None,))]
    return made + [Form(dtype, K, gate, None) for dtype in ("float32", "float16") for K in SIZES for gate in GATES]


FORMS = _forms()


@dataclass(frozen=True)
class Drawn(Case):
    """A problem that was drawn; `changes` are what `repeat` must change in the number's own."""

    number: int = 0
    dtype: str = "float32"
    call: str = "gradient"  # "forward", "gradient": chunk_kda; "step", "step_gradient": fused_recurrent_kda
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    state_dtype: str = "float32"
    index_dtype: str = "int64"
    host_lengths: bool = False  # cu_seqlens_cpu is given
    layouts: tuple[str, ...] = ("plain",) * 7  # of q, k, v, g, beta, initial_state, d_o
    final_layout: str = "plain"  # of d_final_state
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def padding(self) -> int:
        """Tokens behind the last sequence."""
        return self.T - sum(self.lengths) if self.lengths else 0

    @property
    def op(self) -> str:
        return "recurrent" if self.call.startswith("step") else "chunk"

    @property
    def grad(self) -> bool:
        return self.call.endswith("gradient")

    def arrays(self, dtype: str = "", seed: int = 0) -> Arrays:
        made = super().arrays(self.dtype, seed)
        return made._replace(cu_seqlens_cpu=made.cu_seqlens if self.host_lengths else None)

    def dtypes(self, dtype: str = "") -> Arrays:
        wide = "float64" if self.dtype == "float64" else "float32"
        ints = self.index_dtype
        return Arrays(*(self.dtype,) * 3, self.gate_dtype, self.beta_dtype, wide, wide, self.state_dtype, ints, ints, "int32")

    def problem(self, dtype: str = "", op: str = "", needs_grad: bool | None = None) -> Problem:
        """From shapes alone: nothing is drawn."""
        B, T, HV, d = self.B, self.T, self.HV, self.dtypes()
        N, _, state = self.problem_sizes
        shapes = [(B, T, self.H, self.K)] * 2 + [(B, T, HV, self.V), (B, T, HV, self.K), (B, T, HV)]
        shapes += [(HV,) if self.A_log else None, (HV * self.K,) if self.dt_bias else None, state if self.initial_state else None]
        arrays = Arrays(*(None if s is None else np.broadcast_to(0.0, s) for s in shapes))
        if self.lengths:
            arrays = arrays._replace(cu_seqlens=np.broadcast_to(0, N + 1))
        made = make_problem(self.op, arrays, make_options(arrays, **self.call_options), self.grad)
        return made.replace(dtype=self.dtype, gate_dtype=d.g, beta_dtype=d.beta, state_dtype=d.initial_state)

    def cotangents(self, dtype: str = "", seed: int = 1):
        return super().cotangents(self.dtype, seed)

    @property
    def label(self) -> str:
        """The one word that `kdakit verify --problem` takes."""
        changed = ",".join(f"{name}={'/'.join(map(str, x)) if isinstance(x, tuple) else x}" for name, x in self.changes)
        return f"{self.number}:{changed}" if changed else str(self.number)

    def changed(self, **changes: Any) -> Drawn:
        """The same draws with other sizes or options; an option that is None is left out."""
        own = {f.name for f in fields(Drawn)}
        options = {n: x for n, x in (self.options | {n: x for n, x in changes.items() if n not in own}).items() if x is not None}
        kept = tuple(sorted((dict(self.changes) | changes).items()))
        return replace(self, options=options, changes=kept, **{n: x for n, x in changes.items() if n in own})

    def __str__(self) -> str:
        return f"{self.label}: {self.call} {self.problem()}"


def draw(number: int) -> Drawn:
    """The problem of a number."""
    if number < 0:
        raise ValueError(f"a problem's number must not be negative, got {number}")
    seed, index = divmod(number // 2, SEED)
    if number % 2:
        turn, place = divmod(index // PER_FORM, len(FORMS))
        i = int(_order(seed, turn)[place])
        form, variant = FORMS[i], index % PER_FORM
        families = list(dict.fromkeys(f.family for f in FORMS))
        family = families.index(form.family)
        rngs = [np.random.default_rng(x) for x in ([1, seed, turn, family], [2, seed, turn, i], [3, number])]
        V, (call, crowd) = VALUES[(seed + turn) % 2][variant // len(CALLS)], CALLS[variant % len(CALLS)]
    else:
        rng = np.random.default_rng([0, number])
        form, V = FORMS[rng.integers(len(FORMS))], int(rng.choice(SIZES))
        if rng.random() < 0.1:
            form = replace(form, dtype="float64")
        rngs, call, crowd = [rng] * 3, CALLS[rng.integers(len(CALLS))][0], str(rng.choice(CROWDS, p=(0.9, 0.05, 0.05)))
    drawn = _drawn(number, form, V, call, crowd, *rngs)
    return drawn if seed < MORE else _with_more(drawn, np.random.default_rng([5, number]))


@lru_cache(maxsize=64)
def _order(seed: int, turn: int) -> np.ndarray:
    return np.random.default_rng([4, seed, turn]).permutation(len(FORMS))


def form_of(label: str) -> tuple[Any, Any]:
    """(form, family) of a problem whose number shares programs; others are alone."""
    text, _, changes = label.partition(":")
    number = int(text)
    if number % 2 == 0:
        return (label,), (label,)
    seed, index = divmod(number // 2, SEED)
    turn, place = divmod(index // PER_FORM, len(FORMS))
    i = int(_order(seed, turn)[place])
    return (seed, turn, i, changes), (seed, turn, *FORMS[i].family, changes)


def numbers(seed: int, count: int | None = None, shared: bool = False, wanted=lambda drawn: True) -> Iterator[int]:
    """The first `count` numbers of a seed whose problems are wanted, without end if it is None."""
    every = (2 * (seed * SEED + index) + shared for index in range(SEED))
    return itertools.islice((n for n in every if wanted(draw(n))), count)


def with_changes(drawn: Iterable[int], changes: list[str]) -> Iterator[str]:
    """Labels of numbers with changes NAME=VALUE[/VALUE..], of whose values they have one each in turn."""
    turns = [[f"{name}={value}" for value in values.split("/")] for name, _, values in (text.partition("=") for text in changes)]
    for i, number in enumerate(drawn):
        changed = ",".join(values[i % len(values)] for values in turns)
        yield parse(f"{number}:{changed}").label if changed else str(number)


def parse(text: str) -> Drawn:
    """What `Drawn.label` wrote."""
    number, _, rest = text.partition(":")
    parts = [part.partition("=") for part in rest.split(",") if part]
    if not number.isdecimal() or not all(name and equals for name, equals, _ in parts):
        raise ValueError(f"a problem must be NUMBER or NUMBER:name=value,.., got {text!r}")
    drawn = draw(int(number))
    return drawn.changed(**{name: _value(drawn, name, x) for name, _, x in parts}) if parts else drawn


def _value(drawn: Drawn, name: str, text: str) -> Any:
    known = {f.name: getattr(drawn, f.name) for f in fields(Drawn)}
    if name in ("lengths", "layouts"):
        return tuple(int(x) if name == "lengths" else x for x in text.split("/") if x)
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    like = known.get(name, 1)
    try:
        return text if isinstance(like, str) else int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise ValueError(f"{name} of a problem must be a number, None, True or False, got {text!r}") from None


def _size(rng, padded: int, even: bool) -> int:
    """A head size that is padded to this: a multiple of 16, or an odd one. Kernels read rows of the one in pieces of 16 bytes and more, and
    of the other element by element, which is another program."""
    least = 1 if padded == SIZES[0] else padded // 2 + 1
    if even:
        return int(rng.choice([padded, padded, *range(-(-least // 16) * 16, padded + 1, 16)]))
    return int(rng.choice([padded - 1, 2 * rng.integers(least // 2, padded // 2) + 1]))


def _drawn(number: int, form: Form, V_padded: int, call: str, crowd: str, family, own_form, own) -> Drawn:
    """From three generators: what a family has in common, what a form has, what is this problem's own."""
    even, alike = bool(family.random() < 0.5), family.random() < 0.5
    sizes = {padded: _size(family, padded, even) for padded in SIZES}
    K = _size(family, form.K, even)
    V = K if V_padded == form.K and alike else sizes[V_padded]
    if number % 2 == 0 and own.random() < 0.5:  # nothing is shared: any sizes
        K, V = (int(own.integers(padded // 2 + 1, padded + 1)) for padded in (form.K, V_padded))
    options, fixed = _family_options(form, family)
    gate_options, gate_fields = _gate(form, own_form, own)
    options |= gate_options
    if own.random() < 0.5:
        options["scale"] = float(own.choice([1.0, 0.7, -0.5, own.uniform(0.05, 2)]))
    if call == "gradient" and own.random() < (0.1 if number % 2 == 0 or V_padded <= 32 else 0.0):
        call = "step_gradient"
    if call in ("forward", "gradient") and own.random() < 0.15:
        options["disable_recompute"] = True
    if call == "forward" and own.random() < 0.15:
        options["return_intermediate_states"] = True
    if own.random() < 0.5:
        options["chunk_size"] = int(own.choice([16, 32, 64, 128]))
    packed = fixed.pop("packed")
    sizes_of = _packed if packed else _batched
    wide = "float64" if form.dtype == "float64" else "float32"
    state = str(own_form.choice([wide, "bfloat16", "float16"])) if call == "step" and form.dtype != "float64" else wide
    return Drawn(
        name=f"drawn{number}", why="drawn", number=number, dtype=form.dtype, call=call, K=K, V=V, options=options, state_dtype=state,
        keys=str(own.choice(["random", "identical", "parallel"], p=(0.6, 0.15, 0.25))), **fixed, **gate_fields,
        **sizes_of(own, call, crowd, K, V),
    )  # fmt: skip


def _family_options(form: Form, rng) -> tuple[dict[str, Any], dict[str, Any]]:
    wide = "float64" if form.dtype == "float64" else "float32"
    sigmoid, packed = bool(rng.random() < 0.5), bool(rng.random() < 0.4)
    options: dict[str, Any] = {"output_final_state": bool(rng.random() < 0.7)}
    options |= {"state_v_first": True} if rng.random() < 0.3 else {}
    options |= {"use_beta_sigmoid_in_kernel": True} if sigmoid else {}
    options |= {"allow_neg_eigval": True} if sigmoid and rng.random() < 0.3 else {}
    odd = rng.random() < 0.3  # how the tensors lie decides how the kernels may read them: one way for a family
    layouts = tuple(str(rng.choice(LAYOUTS)) if odd else "plain" for _ in range(7))
    beta_dtype = str(rng.choice(["bfloat16", "float16"] if rng.random() < 0.1 else [form.dtype, wide]))
    return options, dict(
        packed=packed, initial_state=bool(rng.random() < 0.7), index_dtype=str(rng.choice(["int32", "int64"])),
        host_lengths=packed and bool(rng.random() < 0.3), layouts=layouts, beta_dtype=beta_dtype,
        beta=str(rng.choice(["logits", "logits_high"] if sigmoid else ["uniform", "one", "up_to_two", "some_zero"])),
    )  # fmt: skip


def _gate(form: Form, rng, own) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and fields of a gate: its form is `rng`'s, its values are the problem's own."""
    wide = "float64" if form.dtype == "float64" else "float32"
    normalised = bool(rng.random() < 0.5) if form.l2norm is None else form.l2norm
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True} if normalised else {}
    dtype = str(rng.choice([form.dtype, wide, wide]))
    if rng.random() < 0.1:
        dtype = str(rng.choice(["bfloat16", "float16"]))
    if form.gate == "given":
        kinds = ["mild", "zero", "slow", "bounded", "strong", "huge", "resets", "spikes", "channels", "channels"]
        kinds = [kind for kind in kinds if dtype != "float16" or kind != "huge"]
        return options, dict(gate=str(own.choice(kinds)), gate_dtype=dtype)
    if form.gate == "given_bounded":
        kinds = ["bounded", "slow", "zero", "bounded_channels"]
        return options | {"safe_gate": True, "lower_bound": -5.0}, dict(gate=str(own.choice(kinds)), gate_dtype=dtype)
    options["use_gate_in_kernel"] = True
    fields_ = dict(A_log=True, dt_bias=bool(rng.random() < 0.6), gate_dtype=dtype)
    fields_["gate"] = str(own.choice(["raw", "raw_slow", "raw_huge", "raw_channels"]))
    if form.gate == "bounded":
        options["lower_bound"] = float(own.choice([-5.0, -2.5, own.uniform(-5, -0.01)]))
        options |= {"safe_gate": True} if rng.random() < 0.5 else {}
        fields_["A_log"] = bool(rng.random() < 0.7)
    return options, fields_


def _with_more(drawn: Drawn, rng) -> Drawn:
    padding = int(rng.choice([1, 15, 16, 63, 64, rng.integers(2, 200)])) if rng.random() < 0.4 else 0
    layout = str(rng.choice(LAYOUTS))
    if drawn.lengths:
        drawn = replace(drawn, T=drawn.T + padding)
    return replace(drawn, final_layout=layout) if drawn.grad and drawn.call_options["output_final_state"] else drawn


def _tokens(rng, call: str, cost: int) -> int:
    """Tokens of a sequence whose states have `cost` elements a token."""
    kind = rng.random()
    if call == "step" and kind < 0.6:
        return int(rng.integers(1, 5))
    if kind < 0.05:
        return int(rng.integers(0, 3))
    if kind < 0.3:
        T = int(rng.choice([16, 32, 64, 128])) * int(rng.integers(1, 4)) + int(rng.integers(-1, 2))
    elif kind < 0.93:
        T = int(rng.integers(3, 201))
    else:
        T = int(rng.integers(201, 1500))
    return min(T, max(66, STATE_ELEMENTS // cost)) if rng.random() < 0.99 else T


def _heads(rng, K: int, V: int) -> tuple[int, int]:
    """H and HV: few, and fewer where states are large."""
    most = max(2, 3 * STATE_ELEMENTS // (66 * K * V))
    H = int(rng.choice([n for n in (1, 2, 3) if n <= most]))
    return H, H * int(rng.choice([n for n in (1, 1, 2, 3) if H * n <= most]))


def _sequences(rng, crowd: str, V: int, HV: int) -> int:
    """So many that sequences times heads, twice for V > 128, are few, some (34 to 66) or many for a chip of 132 processors."""
    if crowd == "few":
        return 0
    rows = int(rng.integers(34, 67)) if crowd == "some" else int(rng.integers(67, 90))
    return -(-rows // (HV * (2 if V > 128 else 1)))


def _batched(rng, call: str, crowd: str, K: int, V: int) -> dict[str, Any]:
    H, HV = _heads(rng, K, V)
    most = max(1, 3 * STATE_ELEMENTS // (66 * K * V * HV))
    B = _sequences(rng, crowd, V, HV) or int(rng.choice([n for n in (1, 1, 2, 3) if n <= most]))
    T = _tokens(rng, call, B * HV * K * V)
    if crowd != "few":
        T = min(T, max(3, 2 * STATE_ELEMENTS // (B * HV * K * V)))
    return dict(B=B, T=T, H=H, HV=HV)


def _packed(rng, call: str, crowd: str, K: int, V: int) -> dict[str, Any]:
    """Sequences of all lengths, empty ones among them."""
    H, HV = _heads(rng, K, V)
    N = _sequences(rng, crowd, V, HV) or int(rng.integers(1, 7))
    lengths = []
    for i in range(N):
        short = int(rng.choice([0, 0, 1, 2, 3]))
        lengths.append(_tokens(rng, call, 3 * HV * K * V) // (1 if i < 2 else 3) if i < 3 or crowd == "few" else short)
    rng.shuffle(lengths)
    return dict(B=1, T=int(sum(lengths)), H=H, HV=HV, lengths=tuple(int(n) for n in lengths))
