"""torch.func over the public calls: right, or refused with the reason; never zeros without a word."""

import pytest

torch = pytest.importorskip("torch")

import torch.autograd.forward_ad as forward_mode  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import kdakit.torch as kt  # noqa: E402

CALLS = (kt.chunk_kda, kt.fused_recurrent_kda)
calls = pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)


def inputs(*batch, T=7, H=2, HV=4, K=4, V=3):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*batch, *shape, dtype=torch.float64, generator=generator)
    q, k, v, g, beta = draw(1, T, H, K), draw(1, T, H, K), draw(1, T, HV, V), draw(1, T, HV, K), draw(1, T, HV)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, -F.softplus(g), beta.sigmoid(), draw(1, HV, K, V)


def run(call, *x, **options):
    o, final = call(*x[:5], initial_state=x[5], output_final_state=True, **options)
    return o.sin().sum() + final.square().sum()


@calls
def test_forward_mode_is_refused(call):
    x = inputs()
    function = lambda q: call(q, *x[1:5])[0]
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*use reverse mode.*naive_chunk_kda"):
        torch.func.jvp(function, (x[0],), (torch.ones_like(x[0]),))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jacfwd(function)(x[0])
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.hessian(lambda q: function(q).sum())(x[0])
    with forward_mode.dual_level():
        dual = forward_mode.make_dual(x[0], torch.ones_like(x[0]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            function(dual)
        call(*x[:5])  # without a tangent it is an ordinary call


@pytest.mark.parametrize("naive", [kt.naive_chunk_kda, kt.naive_recurrent_kda])
def test_forward_mode_of_what_the_refusal_names(naive):
    x = inputs(HV=2)
    _, tangent = torch.func.jvp(lambda q: naive(q, *x[1:5])[0], (x[0],), (torch.ones_like(x[0]),))
    want = torch.func.jacrev(lambda q: kt.chunk_kda(q, *x[1:5])[0])(x[0]).sum((-4, -3, -2, -1))
    assert torch.allclose(tangent, want, rtol=1e-9, atol=1e-12)


@calls
def test_reverse_mode(call):
    x = [a.requires_grad_() for a in inputs()]
    want = torch.autograd.grad(run(call, *x), x)
    got = torch.func.grad(lambda *a: run(call, *a), argnums=tuple(range(6)))(*(a.detach() for a in x))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: run(call, q, *x[1:]))(q).sum())(x[0].detach())


@calls
def test_vmap(call):
    """Of all inputs, of some, packed ones in a loop; and of gradients."""
    x, one = inputs(3), inputs()
    results = torch.func.vmap(lambda *a: call(*a[:5], initial_state=a[5], output_final_state=True))(*x)
    for n in range(3):
        alone = call(*(a[n] for a in x[:5]), initial_state=x[5][n], output_final_state=True)
        assert all(torch.equal(a[n], b) for a, b in zip(results, alone, strict=True))
    moved = torch.func.vmap(lambda v: call(*one[:2], v, *one[3:5])[0], in_dims=2, out_dims=1)(x[2].movedim(0, 2))
    assert torch.equal(moved[:, 1], call(*one[:2], x[2][1], *one[3:5])[0])
    packed = torch.func.vmap(lambda v: call(*one[:2], v, *one[3:5], cu_seqlens=torch.tensor([0, 3, 7]))[0])(x[2])
    assert torch.equal(packed[2], call(*one[:2], x[2][2], *one[3:5], cu_seqlens=torch.tensor([0, 3, 7]))[0])
    with pytest.raises(ValueError, match="at least one element"):
        torch.func.vmap(lambda v: call(*one[:2], v, *one[3:5])[0])(x[2][:0])
    gradients = torch.func.vmap(torch.func.grad(lambda *a: run(call, *a), argnums=(0, 3)))(*x)
    for n in range(3):
        alone = torch.func.grad(lambda *a: run(call, *a), argnums=(0, 3))(*(a[n] for a in x))
        assert all(torch.allclose(a[n], b, rtol=1e-12) for a, b in zip(gradients, alone, strict=True))


def test_vmap_of_gates_with_parameters():
    """Gradients of parameters belong to each call of the batch."""
    x, A_log = inputs(3), torch.zeros(4, dtype=torch.float64)

    def loss(A_log, *a):
        return kt.chunk_kda(*a[:5], use_gate_in_kernel=True, A_log=A_log)[0].sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, *[0] * 6))(A_log, *x)
    for n in range(3):
        assert torch.allclose(found[n], torch.func.grad(loss)(A_log, *(a[n] for a in x)), rtol=1e-12)


@calls
@pytest.mark.parametrize("options", [{}, dict(cu_seqlens=torch.tensor([0, 3, 3, 7]))], ids=["batched", "packed"])
def test_many_cotangents_of_one_call(call, options):
    """With parameters, whose gradients belong to each cotangent. The vmap that torch.autograd still has is refused with the way out."""
    x = [a.requires_grad_() for a in (*inputs()[:5], torch.zeros(4, dtype=torch.float64))]
    o, final = call(*x[:5], A_log=x[5], use_gate_in_kernel=True, output_final_state=True, **options)
    for out in ([o], [final], [o, final]):
        many = [torch.randn(3, *a.shape, dtype=a.dtype) for a in out]
        wanted = x if o is out[0] else x[1:]  # no state depends on q
        found = torch.func.vmap(lambda *d, out=out, wanted=wanted: torch.autograd.grad(out, wanted, d, retain_graph=True))(*many)
        for n in range(3):
            alone = torch.autograd.grad(out, wanted, [d[n] for d in many], retain_graph=True)
            assert all(torch.allclose(a[n], b, rtol=1e-9, atol=1e-12) for a, b in zip(found, alone, strict=True))
    with pytest.raises(NotImplementedError, match=r"is_grads_batched.*use torch.func.vmap"):
        torch.autograd.grad(o, x[0], torch.ones(3, *o.shape, dtype=o.dtype), is_grads_batched=True)


@calls
def test_compiled_code_leaves_a_transform_to_pytorch(call):
    """A compiler would lose its derivatives."""
    x = inputs(3)
    many = torch.func.vmap(lambda q: call(q, *(a[0] for a in x[1:5]))[0])
    assert torch.equal(torch.compile(many, backend="eager")(x[0]), many(x[0]))
    torch.compiler.reset()
    one = torch.compile(torch.func.grad(lambda q: call(q, *(a[0] for a in x[1:5]))[0].sum()), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="not_compiled_under_a_transform"):
        one(x[0][0])


def test_functionalize_and_in_place():
    x = inputs()
    assert torch.equal(torch.func.functionalize(lambda q: kt.chunk_kda(q, *x[1:5])[0])(x[0]), kt.chunk_kda(*x[:5])[0])
    with pytest.raises(NotImplementedError, match="overwrites initial_state"):
        torch.func.vmap(lambda q: kt.fused_recurrent_kda(q, *x[1:5], initial_state=x[5], inplace_final_state=True)[0])(x[0][None])


def test_intermediate_states_claim_no_gradient():
    x = [a.requires_grad_() for a in inputs()]
    o, _, states = kt.chunk_kda(*x[:5], return_intermediate_states=True, chunk_size=16)
    assert o.requires_grad and not states.requires_grad
