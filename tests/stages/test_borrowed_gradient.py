"""The Triton backward with CUDA kernels in place of its last two launches over chunks, and of its first, without a GPU: Triton's stages in
its interpreter, the kernels thread by thread. What lies between them in memory is what both must agree about.

The interpreter must be chosen before Triton is imported: one test runs this file in a process that has it."""

import ctypes
import math
import os
from functools import partial
from types import SimpleNamespace

import emulated
import fresh
import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from kdakit import dispatch
from kdakit.backends import cuda, triton_gpu
from kdakit.backends.cuda import library, op
from kdakit.backends.triton_gpu import borrowed
from kdakit.backends.triton_gpu.config import CHIPS, choose, exact_q
from kdakit.backends.triton_gpu.runtime import launch, repeat
from kdakit.cases import FUSED, Case
from kdakit.measure import checking
from kdakit.problem import Arrays

pytestmark = emulated.needs_compiler
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = dict(T=40, H=1, HV=1, K=128, V=128)
NARROW = SIZES | dict(K=64, V=64)
COMPUTED = dict(gate="raw", beta="logits", A_log=True, dt_bias=True)
# float32 `lower` in the plain kernels' order, and betas of 0; float16 `lower` of normalised keys. Of 64 channels also a chunk more, packed
# sequences, grouped heads and [V, K] states: computed gates have states in two parts, given ones float32 states at the ends.
TRAINED = [
    Case("plain", "any gate, betas of 0", gate="huge", beta="some_zero", **SIZES),
    Case("normed", "everything in the kernel", options=FUSED | {"safe_gate": True, "lower_bound": -5.0}, **COMPUTED, **SIZES),
    Case("narrow_plain", "any gate", gate="huge", beta="logits", options={"use_beta_sigmoid_in_kernel": True, "scale": 0.1},
         **NARROW | dict(T=70)),
    Case("narrow_normed", "everything in the kernel", options=FUSED | {"safe_gate": True, "lower_bound": -5.0}, **COMPUTED, **NARROW),
    Case("narrow_packed", "softplus", lengths=(66, 0, 3), options=FUSED | {"state_v_first": True}, **COMPUTED, **NARROW | dict(T=69, HV=2)),
]  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="is what starts the others")
def test_in_the_interpreter():
    count = f"{len(TRAINED)} passed"
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, TRITON_INTERPRET="1")
    assert done.returncode == 0 and count in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def calls(monkeypatch):
    """Calls of the kernels, which run wherever they can."""
    kernels, rebuilding, calls = emulated.load("gradient"), emulated.load("rebuild"), []

    def run(args):
        calls.append((args.group, bool(args.states_lost)))
        kernels.kda_emulate_gradient_bf16(ctypes.byref(args), 1, 1)

    def rebuild(args):
        calls.append("rebuild")
        rebuilding.kda_emulate_rebuild_bf16(ctypes.byref(args), 1)

    monkeypatch.setenv(borrowed.VARIABLES["gradient"], "1")
    monkeypatch.setenv(borrowed.VARIABLES["rebuild"], "1")
    monkeypatch.setattr(library, "gradient", run)
    monkeypatch.setattr(library, "rebuild", rebuild)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: cuda.unsupported(problem))
    return calls


@pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.name)
def test_gradients(calls, case):
    problem, arrays, cotangents = case.problem("bfloat16", needs_grad=True), case.arrays("bfloat16"), case.cotangents("bfloat16")
    found = checking.run_case("triton_gpu", case, "bfloat16")
    rows = checking.compare_quickly(problem, arrays, found, cotangents, "bfloat16")
    plain = case.name.endswith("plain")
    assert calls == ["rebuild", (4 if plain else 1, case.K == 64 and not plain)]
    assert all(row.ok for row in rows), [(row.name, row.error, row.tolerance) for row in rows]


def problem_of(T=2**14, bounded=False, **changes):
    gate = {"safe_gate": True, "lower_bound": -5.0} if bounded else {}
    case = Case("drawn", "", T=1, H=1, HV=1, K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True, options=FUSED | gate)
    return case.problem("bfloat16", needs_grad=True).replace(T=T, **changes)


STAGES = "gradient", "rebuild", "reverse"


@pytest.fixture
def taken(monkeypatch):
    """A function: whether a stage of a problem's backward comes from a lender that can always run."""
    able = {borrowed.LENT[stage]: lambda problem, device: (print, None) for stage in STAGES}
    for stage in STAGES:
        monkeypatch.delenv(borrowed.VARIABLES[stage], raising=False)
    monkeypatch.setattr(borrowed, "lender", SimpleNamespace(**able, library=SimpleNamespace(missing=lambda: None)))
    lend = lambda stage: getattr(borrowed, stage)
    return lambda stage, problem: lend(stage)(problem, choose(problem, CHIPS["sm_90"]), "cuda") is print


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
@pytest.mark.parametrize("stage", STAGES)
def test_taken_where_it_is_faster(stage, taken, monkeypatch):
    taken = partial(taken, stage)
    assert taken(problem_of()) and taken(problem_of(bounded=True))
    assert not taken(problem_of(T=2**14 - 64)), "no GPU has timed fewer"
    assert not taken(problem_of(deterministic=True)), "a number of tokens would decide"
    assert not taken(problem_of(dtype="float16")), "chunks of 32"
    assert taken(problem_of(K=64, V=64))
    exact = problem_of(l2norm=False, scale=0.5)  # what rounding takes from q counts: Triton keeps it
    assert exact_q(exact) and taken(exact) == (stage == "gradient")
    assert stage != "rebuild" or taken(exact.replace(K=64, V=64)), "of 64 channels it takes them along"
    monkeypatch.setenv(borrowed.VARIABLES[stage], "1")
    assert taken(problem_of(T=64)) and taken(exact) == (stage == "gradient")
    assert taken(exact.replace(K=64, V=64))
    monkeypatch.setenv(borrowed.VARIABLES[stage], "0")
    assert not taken(problem_of())


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_64_channels(taken, monkeypatch):
    """Not where Triton keeps gradients of pairs in float32, nor float16 rows in groups."""
    narrow = partial(problem_of, K=64, V=64)
    assert taken("gradient", narrow()) and taken("gradient", narrow(bounded=True))
    monkeypatch.setenv(borrowed.VARIABLES["gradient"], "1")
    assert taken("gradient", narrow()) and taken("gradient", narrow(gate="log_decay", beta="given"))
    assert not taken("gradient", narrow(beta="double_sigmoid")) and taken("gradient", problem_of(beta="double_sigmoid"))
    assert not taken("gradient", narrow(scale=20.0)) and not taken("gradient", problem_of(scale=20.0))


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
@pytest.mark.parametrize("bounded", [False, True])
def test_computed_gates_with_strengths_that_may_be_1(taken, bounded):
    """128 channels: Triton keeps gradients of pairs in float32 where keys are not normalised."""
    plain = partial(problem_of, bounded=bounded, l2norm=False)
    assert taken("gradient", plain()) and taken("gradient", plain(gate="log_decay", beta="given"))
    assert not taken("gradient", plain(beta="given")) and not taken("gradient", plain(beta="double_sigmoid"))
    assert taken("gradient", problem_of(bounded=bounded, beta="given"))


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_where_a_plain_recurrence_rounds_next_to_nothing(taken, monkeypatch):
    """Triton's kernels: keys as they were given, a scale that is a power of two, and strengths that may be 1, or short sequences."""
    monkeypatch.setenv(borrowed.VARIABLES["gradient"], "1")
    narrow = partial(problem_of, K=64, V=64, l2norm=False, scale=0.125)
    given = partial(narrow, gate="log_decay", beta="given", gate_dtype="float32")
    assert not taken("gradient", given()) and not taken("gradient", given(K=128, V=128))
    assert taken("gradient", given(scale=0.1)) and taken("gradient", given(gate_dtype="bfloat16"))
    assert taken("gradient", given(l2norm=True)) and taken("gradient", given(beta="sigmoid"))
    assert taken("gradient", narrow(B=100, N=100, T=128)) and not taken("gradient", narrow(B=100, N=100, T=127))
    assert taken("gradient", narrow(B=100, N=100, T=127, scale=0.1))
    assert taken("gradient", narrow(B=100, N=100, T=127, has_initial_state=False))


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_who_lends(monkeypatch):
    """The CUDA library, brought by dispatch; where it is missing, Triton's kernels run, or, where it was asked for, an error does."""
    monkeypatch.delenv(borrowed.VARIABLES["gradient"], raising=False)
    assert dispatch.load("triton_gpu") is triton_gpu and borrowed.lender is cuda
    monkeypatch.setattr(cuda, "_old_device", lambda device, hopper: None)
    monkeypatch.setenv(library.VARIABLE, "/nowhere/libkdakit.so")
    problem = problem_of()
    config = choose(problem, CHIPS["sm_90"])
    assert borrowed.gradient(problem, config, "cuda") is None
    monkeypatch.setenv(borrowed.VARIABLES["gradient"], "1")
    with pytest.raises(FileNotFoundError, match="kdakit build-cuda"):
        borrowed.gradient(problem, config, "cuda")
    monkeypatch.setattr(library, "missing", lambda: None)
    assert borrowed.gradient(problem, config, "cuda") is op.chunk_gradient
    assert borrowed.gradient(problem.replace(V=64), config, "cuda") is None
    assert borrowed.gradient(problem.replace(K=64, V=64), config, "cuda") is op.chunk_gradient
    monkeypatch.setenv(borrowed.VARIABLES["reverse"], "1")
    for K, V in ((128, 128), (64, 64), (64, 128), (32, 32)):
        wanted = op.reverse if K == V >= 64 else None
        assert borrowed.reverse(problem.replace(K=K, V=V), config, "cuda") is wanted


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_what_a_caller_hands_over_may_begin_anywhere(monkeypatch):
    """d_o, d_final_state, the initial state and the gate's parameters, two or four bytes off: the library is given what begins at 16."""
    given = []
    monkeypatch.setattr(library, "gradient", given.append)
    off = lambda *shape, dtype=torch.bfloat16: torch.ones(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)
    head, state, like = (1, 64, 1, 128), (1, 1, 128, 128), dict(dtype=torch.float32)
    arrays = Arrays(*(off(*head) for _ in range(4)), off(1, 64, 1), off(1, **like), off(128, **like), off(*state, **like))
    own = torch.empty(1, 1, 64, 128)
    names = ("lower", "factors", "states", "d_states", "r", "alone", "d_beta", "d_q", "d_k", "d_g", "d_A_log", "d_dt_bias")
    mine = dict.fromkeys(names, own) | dict(d_v=own.view(head))
    op.chunk_gradient(problem_of(T=64), arrays, **mine, d_o=off(*head), d_final=off(*state, **like), group=1)
    (args,) = given
    forward = args.forward.contents
    theirs = [args.d_o, args.d_final, forward.initial_state, forward.A_log, forward.dt_bias, *(getattr(forward, n).data for n in "qkg")]
    assert all(theirs) and not any(pointer % 16 for pointer in theirs)


@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
def test_a_call_with_a_launch_that_cannot_be_repeated_has_no_plan():
    """All its tensors may have been seen in other launches: of packed sequences, the tail's kernel gets every gradient."""
    given, made = [torch.ones(4)], [torch.ones(4)]
    again = (lambda addresses: None, (given[0], made[0]), ())
    for lent, has in [(again, True), (None, False)]:
        with launch.watching() as seen:
            launch.note_lent(again)
            launch.note_lent(lent)
        assert (repeat.plan_of(given, made, seen, tuple) is not None) == has
