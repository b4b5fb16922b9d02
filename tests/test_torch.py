"""What is PyTorch's own: autograd, torch.compile, export, autocast, checkpointing, and being a drop-in for fla.ops.kda."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import kdakit.torch as kt  # noqa: E402
from kdakit import accuracy, reference, torch_operators  # noqa: E402
from kdakit.cases import CASES  # noqa: E402
from kdakit.measure import checking  # noqa: E402
from kdakit.problem import Arrays, make_options  # noqa: E402

FUSED = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True, chunk_size=32)
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def inputs(T=70, B=2, H=2, HV=4, K=16, V=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    return [normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V), normal(B, T, HV, K), normal(B, T, HV), normal(HV),
            normal(HV * K), normal(B, HV, K, V)]  # fmt: skip


def fused(*tensors, **options):
    return kt.chunk_kda(**dict(zip(NAMES, tensors, strict=True)), **FUSED | options)


def log_decay_inputs(**sizes):
    q, k, v, g, beta, *_ = (x.detach() for x in inputs(**sizes))
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid()


def gradients(function, tensors):
    o, state = function(*tensors)
    return torch.autograd.grad(o.sin().sum() + state.square().sum(), tensors)


@pytest.mark.parametrize(
    "options", [{}, {"disable_recompute": True}, {"lower_bound": -3.0, "allow_neg_eigval": True}, {"state_v_first": True}]
)
def test_gradcheck(options):
    tensors = inputs(T=9, B=1, H=1, HV=2, K=3, V=2, dtype=torch.float64)
    if options.get("state_v_first"):
        tensors[-1] = tensors[-1].detach().transpose(-1, -2).contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: fused(*a, **options | {"chunk_size": 16}), tensors)


def test_gradcheck_packed():
    q, k, v, g, beta = (x.requires_grad_() for x in log_decay_inputs(T=8, B=1, H=1, HV=1, K=2, V=2, dtype=torch.float64))
    cu = torch.tensor([0, 3, 3, 8])
    state = torch.randn(3, 1, 2, 2, dtype=torch.float64, requires_grad=True)

    def packed(*tensors):
        return kt.chunk_kda(*tensors[:5], initial_state=tensors[5], cu_seqlens=cu, output_final_state=True)

    assert torch.autograd.gradcheck(packed, (q, k, v, g, beta, state))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [{}, {"disable_recompute": True}])
def test_compile_without_graph_breaks(options, dynamic):
    compiled = torch.compile(lambda *a: fused(*a, **options), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for T in (33, 70):
        tensors = inputs(T=T)
        for want, got in zip(gradients(fused, tensors), gradients(compiled, tensors), strict=True):
            assert torch.equal(want, got)


def test_compile_reuses_one_graph_for_all_lengths():
    compilations = []

    def counting(graph, example):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *a: kt.chunk_kda(*a)[0], fullgraph=True, backend=counting, dynamic=True)
    for T in (5, 33, 70, 129):
        compiled(*log_decay_inputs(T=T))
    assert len(compilations) == 1


def test_compile_reuses_one_backward_for_all_lengths():
    """What a call keeps for it depends on the length, where that is short."""
    compilations = []

    def counting(graph, example):
        compilations.append(graph)
        return graph.forward

    call = lambda *a: kt.chunk_kda(*a)[0]
    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=counting), dynamic=True)
    for T in (70, 18, 33, 129):
        x = [a.requires_grad_() for a in log_decay_inputs(T=T)]
        want, got = (torch.autograd.grad(f(*x).sin().sum(), x) for f in (call, compiled))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert len(compilations) == 2


def test_compile_packed():
    tensors = [x.requires_grad_() for x in log_decay_inputs(B=1)]
    cu = torch.tensor([0, 10, 10, 70])

    def packed(*a):
        return kt.chunk_kda(*a, cu_seqlens=cu, output_final_state=True)

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for want, got in zip(gradients(packed, tensors), gradients(compiled, tensors), strict=True):
        assert torch.equal(want, got)
    with torch.no_grad():
        options = dict(cu_seqlens=cu, return_intermediate_states=True, chunk_size=16)
        states = torch.compile(lambda *a: kt.chunk_kda(*a, **options)[2], fullgraph=True, backend="aot_eager")(*tensors)
    assert states.shape == (1, 5, 4, 16, 24)


def test_compile_the_token_recurrence():
    tensors = log_decay_inputs(T=3)
    compiled = torch.compile(lambda *a: kt.fused_recurrent_kda(*a)[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), kt.fused_recurrent_kda(*tensors)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_final_state_in_place(dtype, layout):
    """The same numbers, in the caller's own tensor; the other inputs stay as they are."""
    *tensors, state = (x.detach() for x in inputs(T=3))
    named = dict(zip(NAMES, (*tensors, state.to(dtype)), strict=True))
    options = {n: x for n, x in FUSED.items() if n != "chunk_size"}
    o, final = kt.fused_recurrent_kda(**named, **options)
    mine = named["initial_state"].clone() if layout == "contiguous" else named["initial_state"].mT.contiguous().mT
    assert mine.is_contiguous() == (layout == "contiguous")
    before, version = {n: x.clone() for n, x in named.items()}, mine._version
    out, back = kt.fused_recurrent_kda(**named | {"initial_state": mine}, **options, inplace_final_state=True)
    assert back is mine and mine._version > version
    assert final.dtype == torch.float32
    assert torch.equal(out, o) and torch.equal(mine, final.to(dtype)) and not torch.equal(mine, before["initial_state"])
    assert all(torch.equal(named[n], x) for n, x in before.items())


def test_final_state_in_place_compiles():
    *tensors, state = (x.detach() for x in inputs(T=1))
    named = dict(zip(NAMES, tensors, strict=False))
    options = {n: x for n, x in FUSED.items() if n != "chunk_size"}

    def step(state):
        return kt.fused_recurrent_kda(**named, **options, initial_state=state, inplace_final_state=True)[0] + 0

    first, second = state.clone(), state.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(step(first), compiled(second)) and torch.equal(first, second)
    arrays = Arrays(*tensors, state)
    torch.library.opcheck(torch.ops.kdakit.step_.default, (*arrays[:10], make_options(arrays, **options).encode(), "auto"))


def test_final_state_in_place_refuses():
    *tensors, state = inputs(T=2)
    named = dict(zip(NAMES, (x.detach() for x in (*tensors, state)), strict=True))
    options = {n: x for n, x in FUSED.items() if n != "chunk_size"} | {"inplace_final_state": True}
    with pytest.raises(ValueError, match="requires initial_state, which it overwrites, got None"):
        kt.fused_recurrent_kda(**named | {"initial_state": None}, **options)
    with pytest.raises(ValueError, match="a backward would need"):
        kt.fused_recurrent_kda(**named | {"v": tensors[2]}, **options)
    with pytest.raises(TypeError, match="inplace_final_state must be True or False, got 1"):
        kt.fused_recurrent_kda(**named, **options | {"inplace_final_state": 1})
    with torch.no_grad():
        kt.fused_recurrent_kda(**named | {"v": tensors[2]}, **options)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("op", ["chunk", "recurrent"])
def test_operator_registration(op, needs_grad):
    tensors = inputs(T=20)
    options = make_options(Arrays(*tensors), **FUSED)
    if not needs_grad:
        tensors = [x.detach() for x in tensors]
    torch.library.opcheck(torch.ops.kdakit.forward.default, (*tensors, None, None, op, options.encode(), "auto", needs_grad))
    if not needs_grad:
        torch.library.opcheck(torch.ops.kdakit.inference.default, (*tensors, None, None, op, options.encode(), "auto"))


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return kt.chunk_kda(q, k, v, g, beta, output_final_state=True)

    tensors = log_decay_inputs(T=20)
    exported = torch.export.export(Layer(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(exported.module()(*tensors), Layer()(*tensors), strict=True))


def test_autocast_leaves_the_arithmetic_alone():
    """No product inside runs in bfloat16, and inputs from layers of different dtypes meet in the autocast dtype."""
    tensors = log_decay_inputs()
    want, _ = kt.chunk_kda(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = kt.chunk_kda(*tensors)
        assert torch.equal(want, got)
        q = torch.nn.Linear(16, 16)(tensors[0])
        mixed, _ = kt.chunk_kda(q, *tensors[1:])
    assert q.dtype == mixed.dtype == torch.bfloat16
    wide, _ = kt.chunk_kda(q, *tensors[1:])  # without autocast in the dtype that holds all three, and back in q's
    assert torch.equal(wide, kt.chunk_kda(q.float(), *tensors[1:])[0].bfloat16())


def test_activation_checkpointing():
    tensors = inputs()
    want = gradients(fused, tensors)
    got = gradients(lambda *a: checkpoint(fused, *a, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_gradient_of_the_final_state_alone():
    q, k, v, g, beta = (x.requires_grad_() for x in log_decay_inputs(T=20))
    _, state = kt.chunk_kda(q, k, v, g, beta, output_final_state=True)
    d_q, d_v = torch.autograd.grad(state.sum(), (q, v))
    assert (d_q == 0).all() and (d_v != 0).any()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("call", [kt.chunk_kda, kt.fused_recurrent_kda])
def test_results_may_be_changed_in_place(call, packed):
    """They are the caller's, in training too: scaled, partly reset, and cut off before the next piece."""
    x = [a.requires_grad_() for a in log_decay_inputs(B=1, T=20)]
    options = dict(output_final_state=True, cu_seqlens=torch.tensor([0, 5, 5, 20]) if packed else None)
    o, state = call(*x, **options)
    want = torch.autograd.grad((2 * o).sin().sum() + state[:, 1:].sum(), x)
    o, state = call(*x, **options)
    o.mul_(2)
    state[:, 0] = 0
    got = torch.autograd.grad(o.sin().sum() + state.sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    for given in (x, [a.detach() for a in x]):
        assert not any(a.detach_().requires_grad for a in call(*given, **options))


def test_second_derivatives_are_refused():
    q, k, v, g, beta = (x.requires_grad_() for x in log_decay_inputs(T=5))
    (d_q,) = torch.autograd.grad(kt.chunk_kda(q, k, v, g, beta)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        d_q.sum().backward()


def test_inference_mode_keeps_nothing():
    tensors = inputs(T=20)
    with torch.inference_mode():
        o, state, h = fused(*tensors, return_intermediate_states=True)
    assert not o.requires_grad and state.shape == (2, 4, 16, 24) and h.shape == (2, 1, 4, 16, 24) and h.dtype == torch.float32


@pytest.mark.parametrize("name", ["plain", "grouped", "gate_huge", "keys_identical", "no_tokens"])
@pytest.mark.parametrize("function", ["naive_recurrent_kda", "naive_chunk_kda"])
def test_naive_references(function, name):
    case = CASES[name]
    arrays = case.arrays("float64")
    truth = reference.forward(case.problem("float64"), arrays)
    tensors = [torch.from_numpy(x) for x in arrays[:5]]
    extra = {"chunk_size": 16} if "chunk" in function else {}
    o, state = getattr(kt, function)(*tensors, initial_state=torch.from_numpy(arrays.initial_state), output_final_state=True, **extra)
    assert accuracy.error(o, truth.o) < 1e-12 and accuracy.error(state, truth.final_state) < 1e-12


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_outside_equals_gate_inside(lower_bound, with_bias):
    q, k, v, g, beta, A_log, dt_bias, _ = (x.detach() for x in inputs(dtype=torch.float64))
    bias = dt_bias if with_bias else None
    outside = kt.kda_gate(g, A_log, bias, lower_bound, output_dtype=torch.float64)
    inside, _ = kt.chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias, lower_bound=lower_bound)
    assert torch.allclose(inside, kt.chunk_kda(q, k, v, outside, beta)[0], rtol=1e-12)
    assert kt.kda_gate(g.bfloat16(), A_log, bias, lower_bound).dtype == torch.float32


def test_gate_refuses():
    g = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="A_log is required"):
        kt.kda_gate(g)
    with pytest.raises(ValueError, match=r"lower_bound must be negative, got 1"):
        kt.kda_gate(g, lower_bound=1)
    with pytest.raises(ValueError, match="dt_bias must hold 12 elements"):
        kt.kda_gate(g, torch.zeros(3), torch.zeros(3))


def test_positions_of_flash_linear_attention():
    """Code that passes arguments by position keeps working."""
    chunk = ["q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
             "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound"]  # fmt: skip
    recurrent = ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
                 "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "state_v_first",
                 "cu_seqlens"]  # fmt: skip
    assert list(inspect.signature(kt.chunk_kda).parameters)[: len(chunk)] == chunk
    assert list(inspect.signature(kt.fused_recurrent_kda).parameters)[: len(recurrent)] == recurrent


def test_compatible_keywords():
    tensors = log_decay_inputs(T=5, V=16)
    for call in (kt.chunk_kda, kt.fused_recurrent_kda):
        call(*tensors, use_graph=True, max_num_seqs=4, cp_context=None)
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            call(*tensors, transpose_state_layout=True)
        with pytest.raises(ValueError, match="got both"):
            call(*tensors, state_v_first=True, transpose_state_layout=True)
        with pytest.raises(TypeError, match=r"kdakit\.parallel"):
            call(*tensors, cp_context=object())
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'cu_seqlen'; did you mean 'cu_seqlens'\?"):
            call(*tensors, cu_seqlen=None)


def test_refusals_reach_the_user():
    tensors = log_decay_inputs(T=6, B=1)
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, got ndarray"):
        kt.chunk_kda(np.zeros((1, 6, 2, 16)), *tensors[1:])
    with pytest.raises(ValueError, match=r"k must be \[B, T, H, K\]"):
        kt.chunk_kda(tensors[0], tensors[1][:, :3], *tensors[2:])
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*torch_native.*, got 'xla'"):
        kt.chunk_kda(*tensors, backend="xla")
    with pytest.raises(TypeError, match="backend must be a string"):
        kt.chunk_kda(*tensors, backend=None)
    with pytest.raises(ValueError, match=r"cu_seqlens must start at 0, never decrease and end at most T = 6, got \[0, 7, 6\]"):
        kt.chunk_kda(*tensors, cu_seqlens=torch.tensor([0, 7, 6]))
    with pytest.raises(ValueError, match="cu_seqlens_cpu must equal cu_seqlens"):
        kt.fused_recurrent_kda(*tensors, cu_seqlens=torch.tensor([0, 6]), cu_seqlens_cpu=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="v must be on q's device cpu, got meta"):
        kt.chunk_kda(*tensors[:2], tensors[2].to("meta"), *tensors[3:])
    with pytest.raises(TypeError, match=r"k must .*got float8_e4m3fn"):
        kt.chunk_kda(tensors[0], tensors[1].to(torch.float8_e4m3fn), *tensors[2:])
    with pytest.raises(ValueError, match="scale must not require a gradient"):
        kt.chunk_kda(*tensors, scale=torch.tensor(0.5, requires_grad=True))
    assert kt.chunk_kda(*tensors, scale=torch.tensor(0.5))[0].shape == tensors[2].shape


@pytest.mark.parametrize("call", [kt.chunk_kda, kt.fused_recurrent_kda])
def test_on_the_device_meta_there_are_shapes(call):
    given = [x.detach().to("meta").requires_grad_() for x in inputs()]
    options = dict(A_log=given[5], dt_bias=given[6], initial_state=given[7], use_gate_in_kernel=True, output_final_state=True)
    found = call(*given[:5], **options, backend="torch_native")
    assert [(x.device.type, x.shape) for x in found] == [("meta", given[2].shape), ("meta", given[7].shape)]
    d = torch.autograd.grad([x.sum() for x in found], given)
    assert [(x.device.type, x.shape) for x in d] == [("meta", x.shape) for x in given]
    with torch.no_grad():
        assert call(*given[:5], **options)[0].shape == given[2].shape
        assert call(given[0], given[1].bfloat16(), *given[2:5], **options)[0].dtype == torch.float32


@pytest.mark.parametrize("call", [kt.chunk_kda, kt.fused_recurrent_kda])
def test_after_no_tokens_the_final_state_is_a_copy(call):
    *x, _, _, state = (a.detach() for a in inputs(T=0))
    _, final = call(*x, initial_state=state, output_final_state=True)
    assert torch.equal(final, state) and final.data_ptr() != state.data_ptr()


def test_what_is_remembered_of_a_call_is_its_own():
    """A call like an earlier one is checked once; flags of another type that compare equal are no such call."""
    x = log_decay_inputs(T=8)
    for _ in range(2):
        kt.chunk_kda(*x, output_final_state=True, chunk_size=64)
    for wrong in (dict(output_final_state=[True]), dict(scale=[1.0])):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            kt.chunk_kda(*x, **{"output_final_state": True, "chunk_size": 64} | wrong)
    with pytest.raises(ValueError, match="chunk_size"):
        kt.chunk_kda(*x, output_final_state=True, chunk_size=64.0)
    with pytest.raises(ValueError, match="must be on q's device"):
        kt.chunk_kda(*x[:4], x[4].to("meta"), output_final_state=True, chunk_size=64)


class OnGpu:
    """As much of a tensor on a GPU as a call is recognised by."""

    is_cuda = True

    def __init__(self, x, device="cuda:0", address=0):
        self.shape, self.stride, self.dtype, self.device = x.shape, x.stride, x.dtype, torch.device(device)
        self.data_ptr = lambda: 4096 + address


def test_what_a_repeated_call_is_recognised_by(monkeypatch):
    """Two calls on a GPU are alike if nothing differs but values and addresses, and these not modulo 16."""
    monkeypatch.delenv("KDAKIT_CHECKS", raising=False)
    q = torch.zeros(1, 8, 2, 16)
    options = make_options(Arrays(*[None] * 5), output_final_state=True)
    arrays = Arrays(*(OnGpu(x) for x in (q, q, q, q, q[..., 0])), cu_seqlens=OnGpu(torch.zeros(2, dtype=torch.int32)))

    def key(*, op="chunk", options=options, backend="auto", **changes):
        return torch_operators._alike(op, arrays._replace(**changes), options, backend)

    assert key() == key(k=OnGpu(q, address=160)) and hash(key()) == hash(key(k=OnGpu(q, address=160)))
    other = [
        key(k=OnGpu(q, address=8)), key(k=OnGpu(q.transpose(1, 2).contiguous().transpose(1, 2))), key(k=OnGpu(q.bfloat16())),
        key(k=OnGpu(q[:, :4])), key(k=OnGpu(q, "cuda:1")), key(A_log=OnGpu(q)), key(dt_bias=OnGpu(q)), key(cu_seqlens=None),
        key(op="recurrent"), key(backend="triton_gpu"), key(options=make_options(arrays)),
    ]  # fmt: skip
    assert len({key(), *other}) == len(other) + 1
    assert key(cu_seqlens_cpu=torch.zeros(2)) is None and key(q=q) is None
    monkeypatch.setenv("KDAKIT_CHECKS", "1")  # then all values are looked at
    assert key() is None and key(cu_seqlens=None) is None


def test_whoever_watches_sees_the_operator():
    """A call that nobody watches runs without PyTorch's dispatcher; a mode, a transform or a tracer sees kdakit::inference."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    x = log_decay_inputs(T=8)
    want = kt.chunk_kda(*x)[0]
    with Watch():
        assert torch.equal(kt.chunk_kda(*x)[0], want)
    assert "kdakit.inference.default" in seen
    with pytest.warns():  # that it is deprecated, or that sizes are constants
        traced = torch.jit.trace(lambda q: kt.chunk_kda(q, *x[1:])[0] + 0, (x[0],), check_trace=False)
    assert "kdakit::inference" in str(traced.graph)
    assert torch.equal(traced(x[0]), want)


def test_state_in_half_precision():
    """The recurrence reads a bfloat16 state; arithmetic and the state that comes back are float32, as flash-linear-attention's."""
    case = CASES["plain"]
    tensors = checking.to_torch(case.arrays(), case.dtypes(), "cpu")
    given = {n: x for n, x in tensors._asdict().items() if x is not None}
    stored = given["initial_state"].bfloat16()
    o, state = kt.fused_recurrent_kda(**given | {"initial_state": stored}, output_final_state=True)
    want, exact = kt.fused_recurrent_kda(**given | {"initial_state": stored.float()}, output_final_state=True)
    assert torch.equal(o, want) and state.dtype == torch.float32 and torch.equal(state, exact)


def test_unseen_cu_seqlens_use_the_bound(monkeypatch):
    """Where the host cannot see cu_seqlens, as on a GPU, the number of chunks is an upper bound and the numbers are the same."""
    from kdakit.backends.torch_native import plan

    case = CASES["varlen_fused"]
    want = checking.run_case("torch_native", case)
    monkeypatch.setattr(plan, "visible_cu_seqlens", lambda arrays: None)
    got = checking.run_case("torch_native", case)
    assert all(np.array_equal(want[n], got[n]) for n in want)
    many = CASES["varlen_many"]
    rows = checking.compare(many.problem(), many.arrays(), checking.run_case("torch_native", many), many.cotangents())
    assert all(row.ok for row in rows)


def test_log_decay_of_minus_infinity_is_a_reset():
    q, k, v, g, beta = log_decay_inputs(T=50, B=1)
    g = g.clone()
    g[:, 20] = -torch.inf
    tensors = [x.requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = kt.chunk_kda(*tensors)
    tail, _ = kt.chunk_kda(*(x[:, 20:] for x in (q, k, v, g, beta)))
    assert torch.allclose(o[:, 20:], tail, atol=1e-6)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(o.sum(), tensors))
