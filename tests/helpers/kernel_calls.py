"""Small calls for kernels in an interpreter: inputs, and the truth about their results and gradients."""

import numpy as np

from kdakit import reference
from kdakit.problem import DIFFERENTIABLE, Arrays, make_options, make_problem

OPTIONS = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, output_final_state=True)
CLOSE = 2e-5  # of a norm: float32 throughout, a few dozen tokens


def inputs(seed, B=1, T=20, H=1, HV=2, K=16, V=8, lengths=None):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    given = dict(q=draw(B, T, H, K), k=draw(B, T, H, K), v=draw(B, T, HV, V), g=draw(B, T, HV, K), beta=draw(B, T, HV))
    given |= dict(A_log=draw(HV) / 4, dt_bias=draw(HV * K), initial_state=draw(B if lengths is None else len(lengths), HV, K, V))
    return given if lengths is None else given | {"cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32)}


def cotangents(given):
    """Of o and of the final state."""
    rng = np.random.default_rng(99)
    return tuple(rng.standard_normal(given[name].shape).astype(np.float32) for name in ("v", "initial_state"))


def truth(given, options=OPTIONS):
    """o, final_state and the gradients by name, in float64."""
    arrays = Arrays(**{n: x if n == "cu_seqlens" else x.astype(np.float64) for n, x in given.items()})
    problem = make_problem("recurrent", arrays, make_options(arrays, **options), needs_grad=True)
    found, (d_o, d_final) = reference.forward(problem, arrays), cotangents(given)
    gradients = reference.backward(problem, arrays, d_o.astype(np.float64), d_final.astype(np.float64))
    return {"o": found.o, "final_state": found.final_state} | {n: getattr(gradients, n) for n in DIFFERENTIABLE}


def all_of(call, options=OPTIONS):
    """A function of `given` with o, final_state and gradients, as `truth` has them; for jit, vmap and the like."""
    import jax

    def run(given, d_o, d_final):
        rest = {n: given[n] for n in ("cu_seqlens",) if n in given}
        (o, final), pull = jax.vjp(lambda x: call(**x, **rest, **options), {n: x for n, x in given.items() if n not in rest})
        return {"o": o, "final_state": final} | pull((d_o, d_final))[0]

    return run


def close(got, want, where=""):
    assert got.keys() == want.keys()
    for name, x in want.items():
        error = np.linalg.norm(np.asarray(got[name], np.float64) - x) / max(np.linalg.norm(x), 1e-30)
        assert error <= CLOSE, (where, name, error)
