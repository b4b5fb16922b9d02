"""The one tolerance rule.

Truth is the float64 token recurrence on the inputs as they were rounded to their dtypes. The measure is the relative RMS error. A backend
may be SLACK times as wrong as a plain implementation of the recurrence with the same arithmetic, and need not beat one rounding of the
output:

    error <= SLACK * max(error of the plain recurrence, unit roundoff of the output's dtype)

"The same arithmetic" means: sums and state in float32, and the factors of every product in the backend's operand dtype. That is float32 for
most; a backend that feeds bfloat16 or float16 inputs to a matrix unit says so (`operand_dtype`), and its plain counterpart rounds the
factors too. A float64 problem has no better truth, so its plain error is that of float32 scaled by the two roundoffs, or what rounding to
the output's dtype takes, where that is another one: of a gradient below 6e-8 float16 keeps nothing.

One run can be lucky: where a single channel survives a strong gate, or an output has two elements, its error is one draw. So the plain
error is at least the error, in float64, of activated inputs (normalised q and k, computed gates and betas, scaled values) that are off by
up to one float32 roundoff each, the worst of DRAWS draws. No implementation in float32 has them more exactly. And for an output of
fewer than NUMBERS numbers it is at least the root mean square error of as many plain runs as make NUMBERS of them, each with other
roundings: of inputs off by a roundoff, or, where factors are rounded to an operand dtype, on another grid of it (a factor that must be
rounded is divided by a random number between 1 and 2, rounded, and multiplied again). For the two numbers of a d_A_log that is what
rounding does on the whole, not what it happened to do once.

An array of zeros and two numbers is two numbers. What counts is over how many the relative RMS error averages, see `effective_count`: it is
a root of a mean of squares, each with the weight of its number's expected square. A gate's gradient of ten thousand elements, of which one
holds 99.99 %, is one number: a run that had it, by chance, right to a twentieth of what rounding does allowed a fifth of what rounding
does. An estimate from one draw becomes one from many: SLACK is as it was, and outputs that are spread out are judged as before.

SLACK is 4: one factor of two because a chunk sums the same terms in another order and grouping, one because the errors compared are those
of a single draw. It is not a knob.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kdakit import reference
from kdakit.problem import DIFFERENTIABLE, Arrays, Problem
from kdakit.rounding import UNIT_ROUNDOFF, round_to

SLACK = 4.0
DRAWS = 3
NUMBERS = 32  # of which a root mean square is known to 13 %


def error(got, truth, dtype: str = "float64") -> float:
    """||got - truth|| / ||truth||; infinite for NaN, for infinity and for anything where zero is due.

    dtype: of the output. What is beyond its range, as a gradient above 65504 is for float16, is right as its infinity."""
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    if got.shape != truth.shape:
        raise ValueError(f"got must have the truth's shape {truth.shape}, got {got.shape}")
    if dtype == "float16" and (beyond := np.isinf(near := round_to(truth, dtype))).any():
        got = np.where(beyond & (got == near), truth, got)
    if not np.isfinite(got).all():
        return float("inf")
    size = np.linalg.norm(truth)
    off = np.linalg.norm(got - truth)
    return 0.0 if off == 0 else float(off / size) if size > 0 else float("inf")


def output_dtypes(problem: Problem) -> dict[str, str]:
    """The dtype of every result, gradients by the name of their input."""
    gradients = dict.fromkeys(("q", "k", "v"), problem.dtype) | {"g": problem.gate_dtype, "beta": problem.beta_dtype}
    rest = dict.fromkeys(("A_log", "dt_bias", "initial_state", "final_state"), problem.compute_dtype)
    rest["initial_state"] = rest["final_state"] = problem.state_dtype
    return {"o": problem.dtype, "states": problem.dtype} | gradients | rest


def truths(problem: Problem, arrays: Arrays, d_o=None, d_final_state=None) -> dict[str, np.ndarray]:
    """{name: float64 array} of o, final_state, states where asked for and, given d_o, every gradient (by its input's name)."""
    return _named(problem, arrays, d_o, d_final_state, np.float64)


def plain_errors(
    problem: Problem, arrays: Arrays, truth, d_o=None, d_final_state=None, operand_dtype="float32",
    enough: Callable[[dict[str, float]], bool] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Error of the plain recurrence for each name in `truth`.

    It is the largest of several runs' errors, so it only grows from run to run: `enough` is asked after each whether what is known so far
    will do, which saves the others.
    """
    exact = operand_dtype in ("float32", "float64")
    dtypes = {} if problem.dtype == "float64" else output_dtypes(problem)
    scale = UNIT_ROUNDOFF["float64"] / UNIT_ROUNDOFF["float32"] if problem.dtype == "float64" else 1.0

    def run(einsum, disturb=None):
        named = _named(problem, arrays, d_o, d_final_state, np.float32, einsum, disturb)
        return {name: round_to(x, dtypes.get(name, "float64")) for name, x in named.items()}

    def other(seed):
        if exact:
            return run(np.einsum, _one_roundoff(problem, seed))
        return run(rounding_einsum(operand_dtype, np.random.default_rng(seed)))

    def nearby(seed):
        return _named(problem, arrays, d_o, d_final_state, np.float64, disturb=_one_roundoff(problem, seed))

    known = dict.fromkeys(truth, 0.0)
    if problem.dtype == "float64":
        kinds = output_dtypes(problem)
        known = {name: error(round_to(x, kinds[name]), x, kinds[name]) for name, x in truth.items()}
    for i in range(1 + DRAWS):
        found = nearby(i - 1) if i else run(np.einsum if exact else rounding_einsum(operand_dtype))
        known = {name: max(known[name], scale * error(found[name], truth[name], dtypes.get(name, "float64"))) for name in truth}
        if enough is not None and enough(known):
            return known
    counts = {name: effective_count(x) for name, x in truth.items()}
    few = {name: n for name, n in counts.items() if 0 < n < NUMBERS and (enough is None or _decides(enough, known, name))}
    if enough is not None and not enough({name: np.inf if name in few else e for name, e in known.items()}):
        return known  # others fail, whatever comes of these
    runs, errors = int(np.ceil(NUMBERS / min(few.values()))) if few else 0, {name: [] for name in few}
    for seed in range(runs):
        found = other(seed)
        for name in few:
            errors[name].append(error(found[name], truth[name], dtypes.get(name, "float64")))
        least = {name: scale * _root_mean_square(errors[name], runs) for name in few}
        least = {name: max(known[name], least.get(name, 0.0)) for name in truth}
        if enough is not None and enough(least):
            return least
    mean = {name: _root_mean_square(errors[name]) for name in few}
    return {name: max(known[name], scale * mean.get(name, 0.0)) for name in truth}


def effective_count(truth) -> float:
    """Over how many numbers an output's relative RMS error averages: (sum t^2)^2 / sum t^4, 0 for zeros.

    The square of that error is sum_i e_i^2 / sum_i t_i^2. With independent e_i of variances s_i^2 it varies, relative to its mean, by
    2 sum s_i^4 / (sum s_i^2)^2 (in variance), as the mean square of n equal ones does by 2 / n: so n = (sum s_i^2)^2 / sum s_i^4. Rounding
    is relative, so s_i goes as t_i. n equal numbers have n, normal ones a third of that.
    """
    sizes = np.abs(np.asarray(truth, np.float64)).ravel()
    most = sizes.max(initial=0.0)
    if most == 0 or not np.isfinite(most):
        return 0.0
    squares = np.square(sizes / most)
    return float(squares.sum() ** 2 / np.square(squares).sum())


def _decides(enough: Callable[[dict[str, float]], bool], known: dict[str, float], name: str) -> bool:
    """Whether this output is beyond what is known of it."""
    return not enough({other: e if other == name else np.inf for other, e in known.items()})


def _root_mean_square(errors: list[float], runs: int | None = None) -> float:
    """Of those that are finite: a run in which zero is not exact says nothing of one in which it is. Given the number of all `runs`, the
    least that it can come to with what is still to run."""
    finite = [e for e in errors if np.isfinite(e)]
    return float(np.sqrt(np.sum(np.square(finite)) / (runs or len(finite)))) if finite else 0.0


def rounding_einsum(operand_dtype: str, rng=None):
    """np.einsum of factors rounded to operand_dtype; given `rng`, those that must be rounded are on its grid times a random number."""

    def rounded(x):
        near = round_to(x, operand_dtype)
        if rng is None:
            return near
        by = x.dtype.type(2 ** -rng.uniform())
        return np.where(near == x, x, round_to(x * by, operand_dtype) / by)

    return lambda spec, *factors: np.einsum(spec, *map(rounded, factors))


def _one_roundoff(problem: Problem, seed: int):
    """q, k, v, log-decay and beta off by up to one float32 roundoff; a log-decay that the caller gave is exact."""
    rng = np.random.default_rng(seed)

    def disturb(x):
        q, k, v, g, beta = (a * (1 + UNIT_ROUNDOFF["float32"] * rng.uniform(-1, 1, size=a.shape)) for a in x)
        return q, k, v, x[3] if problem.options.gate == "log_decay" else g, beta

    return disturb


def tolerance(plain_error: float, dtype: str) -> float:
    return SLACK * max(plain_error, UNIT_ROUNDOFF[dtype])


def _named(problem, arrays, d_o, d_final_state, dtype, einsum=np.einsum, disturb=None):
    out = reference.forward(problem, arrays, dtype, einsum, disturb)
    named = {"o": out.o} | ({} if out.final_state is None else {"final_state": out.final_state})
    named |= {} if out.states is None else {"states": out.states}
    if d_o is not None:
        gradients = reference.backward(problem, arrays, d_o, d_final_state, dtype, einsum, disturb)
        named |= {n: getattr(gradients, n) for n in DIFFERENTIABLE if getattr(gradients, n) is not None}
    return named
