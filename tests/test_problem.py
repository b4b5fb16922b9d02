"""Every rule of the contract about a call's arguments, with the message that a user sees."""

import dataclasses

import numpy as np
import pytest

from kdakit.problem import (
    Arrays,
    Options,
    check_cu_seqlens,
    check_devices,
    checks_enabled,
    fold_compatibility,
    make_options,
    make_problem,
)

B, T, H, HV, K, V = 2, 6, 2, 4, 3, 5


def valid(B=B, T=T, H=H, HV=HV, K=K, V=V, **changes) -> Arrays:
    def zeros(*shape):
        return np.zeros(shape, np.float32)

    arrays = Arrays(zeros(B, T, H, K), zeros(B, T, H, K), zeros(B, T, HV, V), zeros(B, T, HV, K), zeros(B, T, HV))
    return arrays._replace(**changes)


def problem_of(arrays, op="chunk", needs_grad=False, **options):
    return make_problem(op, arrays, make_options(arrays, **options), needs_grad)


PACKED = dict(B=1, cu_seqlens=np.array([0, 2, 6]))
STATE = np.zeros((B, HV, K, V), np.float32)
GATE = dict(use_gate_in_kernel=True)

BAD = [
    ("q a list", dict(q=[1.0]), {}, TypeError, r"q must be an array, got list"),
    ("q 3-D", dict(q=np.zeros((B, T, K))), {}, ValueError, r"q must be \[B, T, H, K\], got \(2, 6, 3\)"),
    ("v 3-D", dict(v=np.zeros((B, T, V))), {}, ValueError, r"v must be \[B, T, HV, V\], got \(2, 6, 5\)"),
    ("k shape", dict(k=np.zeros((B, T, H, K + 1))), {}, ValueError, r"k must be \[B, T, H, K\] = \(2, 6, 2, 3\), got \(2, 6, 2, 4\)"),
    ("v tokens", dict(v=np.zeros((B, T + 1, HV, V))), {}, ValueError, r"v must be \[B, T, HV, V\] = .*got \(2, 7, 4, 5\)"),
    ("g heads", dict(g=np.zeros((B, T, H, K))), {}, ValueError, r"g must be \[B, T, HV, K\] = \(2, 6, 4, 3\), got \(2, 6, 2, 3\)"),
    ("beta shape", dict(beta=np.zeros((B, T, HV, 1))), {}, ValueError, r"beta must be \[B, T, HV\], got \(2, 6, 4, 1\)"),
    ("heads", dict(H=3), {}, ValueError, r"v must have a multiple of q's heads: HV % H == 0, got HV=4, H=3"),
    ("no heads", dict(H=0), {}, ValueError, r"H must be at least 1, got 0"),
    ("no channels", dict(K=0), {}, ValueError, r"K must be at least 1, got 0"),
    ("K too large", dict(K=257), {}, ValueError, r"K must be at most 256, got 257"),
    ("V too large", dict(V=300), {}, ValueError, r"V must be at most 256, got 300"),
    ("integer q", dict(q=np.zeros((B, T, H, K), np.int32)), {}, TypeError, r"q must be one of float16, .*, got int32"),
    ("mixed dtypes", dict(k=np.zeros((B, T, H, K), np.float64)), {}, TypeError, r"k must have q's dtype float32, got float64"),
    ("boolean g", dict(g=np.zeros((B, T, HV, K), bool)), {}, TypeError, r"g must be one of float16, .*, got bool"),
    ("complex beta", dict(beta=np.zeros((B, T, HV), complex)), {}, TypeError, r"beta must be one of .*, got complex128"),
    ("chunk size", {}, dict(chunk_size=48), ValueError, r"chunk_size must be one of 16, 32, 64, 128, got 48"),
    ("chunk size float", {}, dict(chunk_size=64.0), ValueError, r"chunk_size must be one of .*, got 64.0"),
    ("chunk size bool", {}, dict(chunk_size=True), ValueError, r"chunk_size must be one of .*, got True"),
    ("scale text", {}, dict(scale="1"), TypeError, r"scale must be a real number, got str"),
    ("scale array", {}, dict(scale=np.ones(2)), TypeError, r"scale must be a real number, got ndarray"),
    ("scale infinite", {}, dict(scale=float("inf")), ValueError, r"scale must be finite, got inf"),
    ("flag", {}, dict(output_final_state=2), TypeError, r"output_final_state must be True or False, got 2"),
    ("flag array", {}, dict(state_v_first=np.zeros(2)), TypeError, r"state_v_first must be True or False"),
    ("bound low", {}, GATE | dict(lower_bound=-5.1, safe_gate=True), ValueError, r"lie in \[-5, 0\) with safe_gate=True, got -5.1"),
    ("bound zero", {}, GATE | dict(lower_bound=0), ValueError, r"lower_bound must be negative, .*, got 0"),
    ("bound nan", {}, dict(lower_bound=float("nan")), ValueError, r"lower_bound must be finite, got nan"),
    ("bound text", {}, dict(lower_bound="-5"), TypeError, r"lower_bound must be a real number, got str"),
    ("no A_log", {}, GATE, ValueError, r"A_log is required with use_gate_in_kernel=True unless lower_bound .*, got None"),
    ("safe softplus", dict(A_log=np.zeros(HV)), GATE | dict(safe_gate=True), ValueError, r"safe_gate=True .* requires lower_bound in \[-5, 0\)"),
    ("A_log size", dict(A_log=np.zeros(H)), GATE, ValueError, r"A_log must hold \[HV\] = 4 elements, got \(2,\)"),
    ("A_log float", dict(A_log=0.5), GATE, TypeError, r"A_log must be an array of HV = 4 elements, got float"),
    ("A_log int", dict(A_log=np.zeros(HV, int)), GATE, TypeError, r"A_log must be one of float16"),
    ("dt_bias size", dict(A_log=np.zeros(HV), dt_bias=np.zeros(HV)), GATE, ValueError, r"dt_bias must hold \[HV \* K\] = 12 elements, got \(4,\)"),
    ("A_log unused", dict(A_log=np.zeros(HV)), {}, ValueError, r"A_log is used only with use_gate_in_kernel=True"),
    ("dt_bias unused", dict(dt_bias=np.zeros(HV * K)), {}, ValueError, r"dt_bias is used only with use_gate_in_kernel=True"),
    ("neg eigval", {}, dict(allow_neg_eigval=True), ValueError, r"allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True"),
    ("state rank", dict(initial_state=STATE[0]), {}, ValueError, r"initial_state must be \[N, HV, K, V\], got \(4, 3, 5\)"),
    ("state count", dict(initial_state=STATE[:1]), {}, ValueError, r"initial_state must be .* got \(1, 4, 3, 5\); one state for each of the N = 2"),
    ("state layout", dict(initial_state=STATE.swapaxes(2, 3)), {}, ValueError, r"that is the other layout: pass state_v_first=True"),
    ("state layout back", dict(initial_state=STATE), dict(state_v_first=True), ValueError, r"\[N, HV, V, K\] = \(2, 4, 5, 3\), .* state_v_first=False"),
    ("state dtype", dict(initial_state=STATE.astype(np.float16)), {}, TypeError, r"initial_state must be float32, got float16"),
    ("state float64", dict(initial_state=STATE.astype(np.float64)), {}, TypeError, r"initial_state must be float32, got float64"),
    ("state list", dict(initial_state=[0.0]), {}, TypeError, r"initial_state must be an array, got list"),
    ("cu batch", dict(cu_seqlens=np.array([0, 6])), {}, ValueError, r"q must have B = 1 with cu_seqlens .*, got B = 2"),
    ("cu list", dict(B=1, cu_seqlens=[0, 6]), {}, TypeError, r"cu_seqlens must be an integer array, got list"),
    ("cu dtype", dict(B=1, cu_seqlens=np.array([0.0, 6.0])), {}, TypeError, r"cu_seqlens must be int32 or int64, got float64"),
    ("cu rank", dict(B=1, cu_seqlens=np.zeros((2, 2), int)), {}, ValueError, r"cu_seqlens must be \[N \+ 1\], got \(2, 2\)"),
    ("cu empty", dict(B=1, cu_seqlens=np.array([0])), {}, ValueError, r"at least one sequence \(2 entries\), got \(1,\)"),
    ("cu copy alone", dict(B=1, cu_seqlens_cpu=np.array([0, 6])), {}, ValueError, r"cu_seqlens_cpu is the host copy of cu_seqlens"),
    ("cu copy shape", PACKED | dict(cu_seqlens_cpu=np.array([0, 6])), {}, ValueError, r"cu_seqlens_cpu must have cu_seqlens' shape \(3,\), got \(2,\)"),
    ("cu states", PACKED | dict(initial_state=STATE[:1]), {}, ValueError, r"one state for each of the N = 2 sequences"),
    ("both", PACKED | dict(segment_ids=np.zeros((1, T), int)), {}, ValueError, r"segment_ids and cu_seqlens say the same thing twice"),
    ("segment shape", dict(segment_ids=np.zeros((B, T + 1), int)), {}, ValueError, r"segment_ids must be \[B, T\] = \(2, 6\), got \(2, 7\)"),
    ("segment dtype", dict(segment_ids=np.zeros((B, T))), {}, TypeError, r"segment_ids must be int32 or int64, got float64"),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "options", "kind", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refuses(arrays, options, kind, message):
    with pytest.raises(kind, match=message):
        problem_of(valid(**arrays), **options)


def test_describes_a_call():
    problem = problem_of(valid(initial_state=STATE), output_final_state=True)
    assert (problem.B, problem.T, problem.H, problem.HV, problem.K, problem.V, problem.N) == (2, 6, 2, 4, 3, 5, 2)
    assert problem.group == 2 and problem.compute_dtype == problem.state_dtype == "float32"
    assert problem.state_shape == (2, 4, 3, 5) and problem.replace(state_v_first=True).state_shape == (2, 4, 5, 3)
    assert problem.options.scale == K**-0.5
    assert problem == problem_of(valid(initial_state=STATE), output_final_state=True)
    assert len({problem, problem.replace(T=7), problem.replace(scale=2.0)}) == 3
    assert "B2 T6 H2 HV4 K3 V5" in str(problem)


def test_options_survive_as_text():
    arrays = valid(A_log=np.zeros(HV))
    options = make_options(
        arrays, scale=0.1, use_gate_in_kernel=True, lower_bound=-2.5, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True
    )
    assert options.gate == "bounded" and options.beta == "double_sigmoid"
    assert Options.decode(options.encode()) == options
    for field in dataclasses.fields(Options):
        changed = dataclasses.replace(options, **{field.name: "changed"})
        assert Options.decode(changed.encode()) == changed, field.name


def test_parameters_of_other_shapes_are_welcome():
    """flash-linear-attention keeps A_log as [1, 1, HV, 1] in places, and dt_bias flat or per head."""
    for A_log, dt_bias in ((np.zeros((1, 1, HV, 1)), np.zeros((HV, K))), (np.zeros(HV), np.zeros(HV * K))):
        assert problem_of(valid(A_log=A_log, dt_bias=dt_bias), use_gate_in_kernel=True).has_dt_bias


def test_half_precision_states_in_the_recurrence():
    assert problem_of(valid(initial_state=STATE.astype(np.float16)), op="recurrent").state_dtype == "float16"


@pytest.mark.parametrize("lengths", [(6,), (1, 2, 3), (0, 6), (0, 0, 6, 0), (1,) * 6])
@pytest.mark.parametrize("chunk_size", [16, 32])
def test_chunk_bound_holds(lengths, chunk_size):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    problem = problem_of(valid(B=1, cu_seqlens=cu), chunk_size=chunk_size)
    assert sum(-(-n // chunk_size) for n in lengths) <= problem.chunks <= len(lengths)


@pytest.mark.parametrize("cu", [[1, 6], [0, 4, 3, 6], [0, 7, 6], [0, 6, 7]])
def test_values_of_cu_seqlens(cu):
    with pytest.raises(ValueError, match=r"cu_seqlens must start at 0, never decrease and end at most T = 6, got \["):
        check_cu_seqlens(np.array(cu), 6)
    check_cu_seqlens(np.array([0, 0, 6, 6]), 6)
    check_cu_seqlens(np.array([0, 3, 5]), 6)
    with pytest.raises(ValueError, match=r"and end at T = 6, got \[0, 5\]"):
        check_cu_seqlens(np.array([0, 5]), 6, padding=False)


def test_flags_as_others_write_them():
    for value, on in ((None, False), (0, False), (1, True), (np.True_, True)):
        assert problem_of(valid(), output_final_state=value).options.output_final_state is on


def test_gates_below_the_safe_bound():
    """The bounded gate takes any negative bound; a promise about given log-decays holds within [-5, 0) and is worth nothing beyond."""
    assert problem_of(valid(), use_gate_in_kernel=True, lower_bound=-8).options.lower_bound == -8
    assert problem_of(valid(), lower_bound=-8).options.lower_bound is None
    assert problem_of(valid(), lower_bound=-8, safe_gate=True).options.lower_bound is None
    assert problem_of(valid(), lower_bound=-5, safe_gate=True).options.lower_bound == -5


class OnDevice:
    def __init__(self, kind):
        self.device = type(
            "Device", (), {"type": kind, "__eq__": lambda a, b: a.type == b.type, "__str__": lambda a: a.type, "__hash__": None}
        )()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("v", "cuda", "v must be on q's device cpu, got cuda"),
        ("cu_seqlens", "cuda", "cu_seqlens must be on q's device cpu, got cuda; its copy on the host goes into cu_seqlens_cpu"),
        ("cu_seqlens_cpu", "cuda", r"cu_seqlens_cpu must be on the host \(cpu\), got cuda"),
    ],
)
def test_devices(name, kind, message):
    arrays = Arrays(*[OnDevice("cpu")] * 5)
    check_devices(arrays)
    with pytest.raises(ValueError, match=message):
        check_devices(arrays._replace(**{name: OnDevice(kind)}))


def test_unknown_arguments_name_the_nearest():
    with pytest.raises(TypeError, match=r"f\(\) got an unexpected keyword argument 'inital_state'; did you mean 'initial_state'\?"):
        fold_compatibility("f", ["q", "initial_state"], False, {"inital_state": 1})
    with pytest.raises(TypeError, match=r"context parallel calls live in kdakit\.parallel"):
        fold_compatibility("f", ["q"], False, {"cp_context": object()})
    assert fold_compatibility("f", ["q"], False, {"cp_context": None, "use_graph": True, "max_num_seqs": 3}) is False


def test_old_state_layout_name():
    with pytest.warns(DeprecationWarning, match="use state_v_first"):
        assert fold_compatibility("f", ["q"], False, {"transpose_state_layout": True}) is True
    with pytest.raises(ValueError, match="pass one of them, got both"):
        fold_compatibility("f", ["q"], True, {"transpose_state_layout": True})


def test_checks_can_be_switched_on(monkeypatch):
    monkeypatch.delenv("KDAKIT_CHECKS", raising=False)
    assert not checks_enabled()
    monkeypatch.setenv("KDAKIT_CHECKS", "1")
    assert checks_enabled()
