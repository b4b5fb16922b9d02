"""What a serving call is given, checked against its pool: one place for both frameworks."""

from __future__ import annotations

import difflib
import numbers
from dataclasses import dataclass
from typing import Any

from kdakit.problem import Arrays, Problem, make_options, make_problem

OPTIONS = (
    "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16", "float64", "int8")
MAX_DRAFTS = 8
SCALE_GROUP = 32  # value channels of one key channel that share a scale in 8-bit storage


@dataclass(frozen=True)
class PoolSizes:
    """What a pool holds per slot."""

    HV: int
    K: int
    V: int
    dtype: str = "float32"  # of the stored states; arithmetic is float32, or float64 for float64
    state_v_first: bool = False  # stored as [V, K]
    feedback: bool = False  # 8-bit storage keeps what rounding left, in 8 bits more, and adds it back

    def __post_init__(self):
        for name in ("HV", "K", "V"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if self.feedback and self.dtype != "int8":
            raise ValueError(f"feedback=True is for dtype int8, got {self.dtype}")

    @property
    def compute_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def scale_group(self) -> int:
        return SCALE_GROUP

    @property
    def groups(self) -> int:
        """Scales per key channel."""
        return -(-self.V // SCALE_GROUP)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.HV, self.V, self.K) if self.state_v_first else (self.HV, self.K, self.V)

    def bytes(self) -> int:
        """Of one slot's state."""
        element = {"float64": 8, "float32": 4, "int8": 2 if self.feedback else 1}.get(self.dtype, 2)
        scales = self.HV * self.K * self.groups * 4 if self.dtype == "int8" else 0
        return self.HV * self.K * self.V * element + scales


def describe(call: str, op: str, sizes: PoolSizes, arrays: Arrays, rows: int, options: dict[str, Any], **more: Any) -> Problem:
    """The Problem of a serving call, in which every row has a state in the pool."""
    for name in options:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"options are {', '.join(OPTIONS)}"
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; {hint}")
    problem = make_problem(op, arrays, make_options(arrays, output_final_state=True, **options, **more))
    for name in ("HV", "K", "V"):
        if getattr(problem, name) != getattr(sizes, name):
            raise ValueError(f"{name} must be the pool's {getattr(sizes, name)}, got {getattr(problem, name)}")
    if (problem.dtype == "float64") != (sizes.dtype == "float64"):
        raise TypeError(f"q must be float64 exactly where the pool is, got q {problem.dtype} and a pool of {sizes.dtype}")
    if rows != problem.N:
        raise ValueError(f"slots must name one slot for each of the {problem.N} sequences, got {rows}")
    return problem.replace(has_initial_state=True)


def check_drafts(T: int) -> None:
    if not 1 <= T <= MAX_DRAFTS:
        raise ValueError(f"q must hold 1 .. {MAX_DRAFTS} draft tokens a row, got {T}")


def check_accepted(accepted: Any, rows: int, T: int) -> list[int]:
    listed: list[Any] = list(accepted)
    if len(listed) != rows:
        raise ValueError(f"accepted must hold one number for each of the {rows} rows, got {len(listed)}")
    for n in listed:
        if isinstance(n, bool) or not isinstance(n, numbers.Integral):
            raise TypeError(f"accepted must be integers, got {n!r}")
        if not 0 <= int(n) <= T:
            raise ValueError(f"accepted must be 0 .. {T}, the number of drafts, got {n}")
    return [int(n) for n in listed]


def check_checkpoints(checkpoints: Any, lengths: list[int]) -> list[list[int]]:
    """For each sequence the positions, ascending, after which its state is wanted: position p is the state after p tokens."""
    listed: list[list[Any]] = [list(own) for own in checkpoints]
    if len(listed) != len(lengths):
        raise ValueError(f"checkpoints must hold one list for each of the {len(lengths)} sequences, got {len(listed)}")
    for n, (own, length) in enumerate(zip(listed, lengths, strict=True)):
        for p in own:
            if isinstance(p, bool) or not isinstance(p, numbers.Integral) or not 0 <= int(p) <= length:
                raise ValueError(f"checkpoints[{n}] must be positions 0 .. {length}, got {p!r}")
        if own != sorted(set(own)):
            raise ValueError(f"checkpoints[{n}] must ascend without repeats, got {own}")
    return [[int(p) for p in own] for own in listed]
