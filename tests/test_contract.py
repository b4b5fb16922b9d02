"""The contract, for every backend: backends x cases x {forward, gradients, packed, hand-off, causality, layouts, memory, determinism}.

A new backend appears here by its entry in dispatch.BACKENDS. What it cannot run is skipped with its own reason. Where every size and dtype
is another program to compile, a chosen part of some products runs, in which each value of each factor occurs; KDAKIT_FULL=1 (`make
test-full`) runs them whole.
"""

import os
import types
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from kdakit import accuracy, dispatch, reference
from kdakit.cases import CASES, SEGMENT_CASES, Case
from kdakit.measure import checking
from kdakit.problem import DIFFERENTIABLE

FULL = os.environ.get("KDAKIT_FULL") == "1"
BACKENDS = dispatch.names()
TORCH = dispatch.names("torch")
ALL = CASES | SEGMENT_CASES
# Half precision changes how inputs and outputs are rounded, not what is computed between: a few cases of each kind tell. In the last three
# little averages out: float32 gradients there show every rounding that the plain recurrence does without.
FEW = ["plain", "gate_huge", "gate_resets", "keys_identical", "identical_two", "lower_bound", "softplus", "softplus_huge", "varlen_fused",
       "grouped", "one_token", "whole_chunks", "wide"]  # fmt: skip
# float16 has bfloat16's programs with another cast: given and computed gates, the extremes of its range, packed sequences.
FLOAT16 = ["gate_huge", "varlen_fused"]
# Where a case is a program to compile: those that differ from another in sizes, a scale or values alone.
ALIKE = ["short", "tall", "scaled", "chunk64", "gate_bounded", "gate_zero", "no_state", "lower_bound_bare", "segments_fused"]
# And numbers of heads, channels and tokens, which a dtype does not change, are left to float32; so is softplus, which varlen_fused has.
SIZES = ["softplus_huge", "grouped", "one_token", "whole_chunks", "wide", "softplus"]
# The same kernels again, which take an interpreter long: packed as varlen, a batch as grouped, gates as softplus_huge and
# lower_bound_saturated, and what test_disable_recompute_gives_the_same_numbers compares.
SLOW = ["varlen_many", "plain", "softplus", "lower_bound", "keep"]
# With one head in an interpreter, which compiles every head; the others have several.
ONE_HEAD = ["varlen", "varlen_no_state", "segments", "chunk16", "chunk128", "lower_bound_saturated", "whole_chunks", "no_final",
            "odd_sizes", "v_first"]  # fmt: skip


BOUNDED = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True, "lower_bound": -2.5}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def skip_unless_able(backend, case, dtype="float32", op="chunk", grad=False):
    reason = checking.refusal(backend, case, dtype, op, grad)
    if reason:
        pytest.skip(f"{backend}: {reason}")


def skip_in_interpreters(backend, unless):
    """An interpreter compiles a large program for every new size: it takes a part of what differs in sizes only."""
    if checking.interpreted(backend) and not unless and not FULL:
        pytest.skip(f"{backend}: an interpreter takes a part of these")


def skip_where_compiled(backend, unless):
    """JAX compiles a program for every new size and dtype."""
    if checking.framework_of(backend) == "jax" and not unless and not FULL:
        pytest.skip(f"{backend}: takes a part of these, a program each")


def in_few_heads(backend, name):
    """The case, with one head where an interpreter would compile another."""
    alone = name in ONE_HEAD and checking.interpreted(backend) and not FULL
    return replace(ALL[name], H=1, HV=1) if alone else ALL[name]


def assert_within(rows):
    bad = [f"{r.name}: error {r.error:.2e}, plain {r.plain:.2e}, allowed {r.tolerance:.2e}" for r in rows if not r.ok]
    assert not bad, "; ".join(bad)


def forward(backend, case, arrays, dtype="float32", op="chunk"):
    return checking.run_arrays(backend, case, dtype, arrays, op=op)


def test_every_name_of_the_contract_is_there(backend):
    pytest.importorskip(checking.framework_of(backend))
    module = dispatch.load(backend)
    assert all(hasattr(module, name) for name in dispatch.CONTRACT)
    assert module.gradients is None or (module.backward is None and module.gradients in dispatch.names())


def test_a_backend_without_a_required_name_is_refused():
    module = types.ModuleType("half_a_backend")
    with pytest.raises(AttributeError, match=r"half_a_backend must define supports: \(problem, device\)"):
        dispatch.complete(module)


@pytest.mark.parametrize("name", ALL)
def test_forward_and_gradients(backend, name):
    skip_where_compiled(backend, unless=name not in ALIKE)
    skip_in_interpreters(backend, unless=name not in SLOW)
    skip_unless_able(backend, ALL[name], grad=True)
    assert_within(checking.check(backend, in_few_heads(backend, name)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", FEW)
def test_other_dtypes(backend, name, dtype):
    skip_where_compiled(backend, unless=name in FLOAT16 if dtype == "float16" else name not in SIZES)
    skip_where_compiled(backend, unless=(name, dtype) != ("lower_bound", "float64"))  # given gates and computed ones are enough of it
    # A bounded gate in bfloat16: test_pallas_tpu.py has it for two heads side by side, test_triton_interpreted.py too.
    skip_in_interpreters(backend, unless=name == "gate_huge" if dtype == "float16" else name not in ("plain", "lower_bound"))
    skip_unless_able(backend, CASES[name], dtype, grad=True)
    assert_within(checking.check(backend, CASES[name], dtype))


@pytest.mark.parametrize(
    "name", ["plain", "one_token", "no_tokens", "gate_huge", "v_first", "lower_bound", "varlen", "varlen_many", "segments"]
)
def test_token_recurrence(backend, name):
    skip_in_interpreters(backend, unless=name not in SLOW[:2])
    skip_unless_able(backend, ALL[name], op="recurrent")
    assert_within(checking.check(backend, in_few_heads(backend, name), op="recurrent", grad=False))


@pytest.mark.parametrize("name", ["softplus", "varlen_fused"])
def test_gradients_of_the_token_recurrence(backend, name):
    skip_in_interpreters(backend, unless=name == "varlen_fused")
    skip_unless_able(backend, CASES[name], op="recurrent", grad=True)
    assert_within(checking.check(backend, CASES[name], op="recurrent"))


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
@pytest.mark.parametrize("at", [1, 32, 45])
@pytest.mark.parametrize("name", ["plain", "gate_resets", "v_first"])
def test_hand_off(backend, name, at, op):
    """Split anywhere, hand the state over, and be as close to the truth as in one piece."""
    case = in_few_heads(backend, name)
    skip_in_interpreters(backend, unless=at == 45 and (name, op) in (("v_first", "chunk"), ("plain", "recurrent")))
    skip_where_compiled(backend, unless=name == "plain" or at == 45)
    skip_unless_able(backend, case, op=op)
    arrays, o = case.arrays(), []
    state = arrays.initial_state
    for part in (slice(0, at), slice(at, case.T)):
        piece = arrays._replace(**{n: getattr(arrays, n)[:, part] for n in ("q", "k", "v", "g", "beta")}, initial_state=state)
        out = forward(backend, replace(case, T=part.stop - part.start), piece, op=op)
        o.append(out["o"])
        state = out["final_state"]
    results = {"o": np.concatenate(o, 1), "final_state": state}
    assert_within(checking.compare(case.problem(), arrays, results))


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", ["plain", "gate_spikes", "softplus", "varlen"])
def test_prefix_causality(backend, name, op):
    """Changing tokens from t on, to anything, changes no bit of the output before t."""
    case = in_few_heads(backend, name)
    skip_in_interpreters(backend, unless=(name, op) in (("gate_spikes", "chunk"), ("varlen", "chunk"), ("plain", "recurrent")))
    skip_unless_able(backend, case, op=op)
    if op == "recurrent" and checking.interpreted(backend) and not FULL:
        case = replace(case, T=60)  # token by token; what is shown is the same
    arrays, other = case.arrays(), case.arrays(seed=1)
    before = forward(backend, case, arrays, op=op)["o"]
    for at in (17, 50) if checking.interpreted(backend) and not FULL else (1, 17, 32, 50, case.T - 1):
        mixed = {n: np.concatenate([getattr(arrays, n)[:, :at], 3 * getattr(other, n)[:, at:]], 1) for n in ("q", "k", "v", "g", "beta")}
        after = forward(backend, case, arrays._replace(**mixed), op=op)["o"]
        assert np.array_equal(before[:, :at], after[:, :at]), f"tokens from {at} on changed the output before them"
        assert not np.array_equal(before[:, at:], after[:, at:])


@pytest.mark.parametrize("name", ["softplus_huge", "varlen", "gate_huge"])
def test_same_call_same_bits(backend, name):
    case = in_few_heads(backend, name)
    skip_unless_able(backend, case, grad=True)
    first, second = (checking.run_case(backend, case) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[n], second[n]) for n in first)


@pytest.fixture
def fused_as_for_users(backend, monkeypatch):
    """XLA with its fusion emitters, which conftest.py does without: only they give two different programs the same bits."""
    if checking.framework_of(backend) != "jax" or checking.interpreted(backend):
        yield
        return
    if "fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        monkeypatch.setattr(checking, "COMPILER_OPTIONS", {"xla_cpu_use_fusion_emitters": True})
    monkeypatch.setattr(checking, "_jax_functions", lru_cache(checking._jax_functions.__wrapped__))  # and other tests find theirs again
    yield


@pytest.mark.parametrize("name", ["plain", "varlen_fused", "lower_bound"])
def test_disable_recompute_gives_the_same_numbers(backend, name, fused_as_for_users):
    case = CASES[name]
    skip_where_compiled(backend, unless=name == "varlen_fused")
    skip_unless_able(backend, case, grad=True)
    keep = replace(case, options=case.options | {"disable_recompute": True})
    first, second = checking.run_case(backend, case), checking.run_case(backend, keep)
    if checking.interpreted(backend):  # two programs to the interpreter's compiler, which may round a * b + c once in one of them
        assert all(accuracy.error(first[n], second[n]) <= 1e-7 for n in first)
    else:
        assert all(np.array_equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
def test_state_layouts_hold_the_same_numbers(backend, op):
    case = CASES["plain"]
    skip_in_interpreters(backend, unless=op == "chunk")
    skip_unless_able(backend, case, op=op)
    arrays = case.arrays()
    k_first = forward(backend, case, arrays, op=op)
    flipped = arrays._replace(initial_state=arrays.initial_state.swapaxes(-1, -2))
    v_first = forward(backend, replace(case, options={"state_v_first": True}), flipped, op=op)
    v_first["final_state"] = v_first["final_state"].swapaxes(-1, -2)
    if backend == "triton_gpu" and op == "recurrent" and not checking.interpreted(backend):
        # On a GPU a token's sums over K run in the order in which the state lies: the same numbers, to the rule.
        assert_within(checking.compare(case.problem(op=op), arrays, v_first))
    else:
        assert all(np.array_equal(k_first[name], v_first[name]) for name in ("o", "final_state"))


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
def test_empty_sequences_keep_their_state(backend, op):
    case = in_few_heads(backend, "varlen")
    skip_unless_able(backend, case, op=op)
    arrays = case.arrays()
    final = forward(backend, case, arrays, op=op)["final_state"]
    empty = [n for n, length in enumerate(case.lengths) if length == 0]
    assert np.array_equal(final[empty], arrays.initial_state[empty])
    nothing = Case("nothing", "only empty sequences", T=0, lengths=(0, 0))
    arrays = nothing.arrays()
    out = forward(backend, nothing, arrays, op=op)
    assert out["o"].shape == (1, 0, 2, 16) and np.array_equal(out["final_state"], arrays.initial_state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gate_with_no_state_before_it_has_no_gradient(backend, dtype):
    """Sequences of one token: exactly zero, since a relative error knows no small number beside it."""
    options = BOUNDED | {"allow_neg_eigval": True}
    case = Case("alone", "", B=4, T=1, H=1, HV=1, K=64, keys="identical", gate="raw", beta="logits_high", dt_bias=True,
                initial_state=False, options=options)  # fmt: skip
    skip_unless_able(backend, case, dtype, grad=True)
    found = checking.run_case(backend, case, dtype)
    assert not found["g"].any() and not found["dt_bias"].any()


@pytest.mark.parametrize("l2norm", [False, True], ids=("plain", "normed"))
def test_a_state_that_is_forgotten_at_once_has_no_gradient(backend, l2norm):
    case = Case("reset", "", T=3, H=1, HV=1, K=64, options={"use_qk_l2norm_in_kernel": l2norm})
    skip_unless_able(backend, case, "bfloat16", grad=True)
    arrays = case.arrays("bfloat16")
    arrays.g[:, 0] = -3000.0
    found = checking.run_arrays(backend, case, "bfloat16", arrays, case.cotangents("bfloat16"))
    assert not found["initial_state"].any()


def test_no_batch(backend):
    case = Case("no_batch", "B = 0", B=0, T=20)
    skip_unless_able(backend, case, grad=True)
    results = checking.run_case(backend, case)
    assert results["o"].shape == (0, 20, 2, 16) and results["final_state"].shape == (0, 2, 32, 16)


@pytest.mark.parametrize("name", ["plain", "v_first", "varlen", "grouped"])
def test_intermediate_states(backend, name):
    case = in_few_heads(backend, name)
    case = replace(case, options=case.options | {"return_intermediate_states": True})
    skip_in_interpreters(backend, unless=name in ("v_first", "varlen"))
    skip_unless_able(backend, case)
    arrays = case.arrays()
    truth = reference.forward(case.problem(), arrays).states
    got = checking.run_arrays(backend, case, "float32", arrays)["states"]
    assert got.shape[1] >= truth.shape[1], "chunks are missing"
    assert accuracy.error(got[:, : truth.shape[1]], truth) <= accuracy.tolerance(1e-7, "float32")


def test_integer_widths_of_cu_seqlens_agree(backend):
    case = in_few_heads(backend, "varlen")
    skip_unless_able(backend, case)
    arrays = case.arrays()
    wide = forward(backend, case, arrays)
    narrow = forward(backend, case, arrays._replace(cu_seqlens=arrays.cu_seqlens.astype(np.int32)))
    assert all(np.array_equal(wide[n], narrow[n]) for n in wide)


@pytest.mark.parametrize("seed", range(12))
def test_drawn_problems(backend, seed):
    """Sizes, options and packings nobody picked by hand."""
    skip_in_interpreters(backend, unless=seed in (1, 3, 11))  # packed and not, gates given and computed, chunks of 16, 64 and 128
    skip_where_compiled(backend, unless=seed in (0, 1, 3, 11))  # and chunks of 32, a bounded gate
    rng = np.random.default_rng(seed)
    H, group = rng.integers(1, 4), rng.integers(1, 3)
    fused = bool(rng.integers(2))
    lengths = tuple(rng.integers(0, 60, size=rng.integers(1, 6)).tolist()) if rng.integers(2) else ()
    options = {
        "chunk_size": int(rng.choice([16, 32, 64, 128])),
        "state_v_first": bool(rng.integers(2)),
        "scale": float(rng.uniform(0.1, 2)),
    }
    if fused:
        options |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        options |= {"allow_neg_eigval": bool(rng.integers(2))}
        options |= {"lower_bound": float(rng.uniform(-5, -0.1))} if rng.integers(2) else {}
    gate = rng.choice(["raw", "raw_huge"]) if fused else rng.choice(["mild", "huge", "resets", "spikes", "zero", "strong"])
    case = Case(
        f"drawn{seed}", "drawn", B=1 if lengths else int(rng.integers(1, 4)), T=sum(lengths) if lengths else int(rng.integers(0, 150)),
        H=int(H), HV=int(H * group), K=int(rng.integers(1, 70)), V=int(rng.integers(1, 70)), gate=str(gate),
        keys=str(rng.choice(["random", "parallel"])),
        beta="logits" if fused else str(rng.choice(["uniform", "one", "up_to_two"])), lengths=lengths, initial_state=bool(rng.integers(2)),
        A_log=fused, dt_bias=fused and bool(rng.integers(2)), options=options,
    )  # fmt: skip
    skip_unless_able(backend, case, grad=True)
    assert_within(checking.check(backend, case))


# What follows is about memory that a caller can see, which only torch tensors have.


def torch_call(backend, case, tensors, op="chunk"):
    return checking.call("torch", backend, case, op)(tensors)


def tensors_of(case, dtype="float32"):
    return checking.to_torch(case.arrays(dtype), case.dtypes(dtype), checking.default_device("torch"))


def same(results, others):
    import torch

    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", ["softplus", "varlen"])
@pytest.mark.parametrize("backend", TORCH)
def test_strided_inputs(backend, name, op):
    """[B, H, T, K] storage seen as [B, T, H, K], every second channel of a wider tensor, a state seen through a transpose."""
    import torch

    case = CASES[name]
    skip_unless_able(backend, case, op=op)
    tensors = tensors_of(case)
    want = torch_call(backend, case, tensors, op)
    strided = tensors._replace(
        q=tensors.q.transpose(1, 2).contiguous().transpose(1, 2),
        k=torch.stack([tensors.k, torch.full_like(tensors.k, torch.nan)], -1).flatten(-2)[..., ::2],
        v=torch.cat([tensors.v, torch.full_like(tensors.v, torch.nan)], 2)[:, :, : case.HV],
        g=tensors.g.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        initial_state=tensors.initial_state.transpose(-1, -2).contiguous().transpose(-1, -2),
    )
    assert not any(x.is_contiguous() for x in (strided.q, strided.k, strided.v, strided.g, strided.initial_state))
    assert same(torch_call(backend, case, strided, op), want)


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", ["odd_sizes", "softplus", "varlen_fused", "grouped"])
@pytest.mark.parametrize("backend", TORCH)
def test_memory_around_the_tensors(backend, name, op):
    """Inputs lie in the middle of poisoned memory: NaN read from it would show, and nothing there, nor in the inputs, may change."""
    import torch

    case = CASES[name]
    skip_unless_able(backend, case, op=op)
    tensors = tensors_of(case)
    want = torch_call(backend, case, tensors, op)
    pools, placed = [], []
    for x in tensors:
        if x is None:
            placed.append(None)
            continue
        poison = float("nan") if x.is_floating_point() else 10**6
        pool = torch.full((x.numel() + 512,), poison, dtype=x.dtype, device=x.device)
        view = pool[256 : 256 + x.numel()].view(x.shape)
        view.copy_(x)
        pools.append((pool, pool.clone()))
        placed.append(view.requires_grad_(op == "chunk" and x.is_floating_point()))
    results = torch_call(backend, case, type(tensors)(*placed), op)
    if op == "chunk":
        sum(x.sum() for x in results if x is not None).backward()
        grads = [placed[i].grad for i, n in enumerate(type(tensors)._fields) if n in DIFFERENTIABLE and placed[i] is not None]
        assert all(torch.isfinite(x).all() for x in grads)
    assert same([None if x is None else x.detach() for x in results], want)
    assert all(np.array_equal(a.detach().cpu().numpy(), b.cpu().numpy(), equal_nan=True) for a, b in pools)
