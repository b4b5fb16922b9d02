"""JAX on NVIDIA GPUs: heads that its Triton kernels take as wider ones, or in float32. `xla` computes here in the kernels' place."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")
pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from kdakit import dispatch
from kdakit.backends import xla
from kdakit.backends.cuda import library
from kdakit.backends.triton_gpu import config as configs
from kdakit.backends.triton_gpu import ffi, widened
from kdakit.backends.triton_gpu.ffi import call
from kdakit.cases import FUSED, Case
from kdakit.jax import chunk_kda
from kdakit.measure import checking

NARROW = Case("narrow", "", T=40, H=1, HV=2, K=12, V=9, gate="raw", beta="logits", A_log=True, dt_bias=True,
              options=FUSED | {"state_v_first": True})  # fmt: skip
GIVEN = Case("given", "", T=70, H=2, HV=2, K=31, V=20, lengths=(30, 0, 40))


@pytest.fixture
def seen(monkeypatch):
    """The problems that reach the kernels, which are computed by `xla`."""
    problems = []

    def by_xla(name):
        def run(problem, arrays, *rest):
            problems.append(problem)
            assert (arrays.q.shape[3], arrays.v.shape[3], str(arrays.q.dtype)) == (problem.K, problem.V, problem.dtype)
            return getattr(xla, name)(problem, arrays, *rest[:-1], xla.default_config(problem, "cpu"))

        return run

    for name in ("forward", "backward", "step"):
        monkeypatch.setattr(call, name, by_xla(name))
    monkeypatch.setattr(dispatch.load("triton_ffi"), "supports", lambda problem, device: None)
    return problems


@pytest.mark.parametrize("case", [NARROW, GIVEN], ids=lambda case: case.name)
def test_small_heads_train_in_float32(case, seen):
    """As in PyTorch: bfloat16 keeps too little of what so few channels hold."""
    problem = case.problem("bfloat16", needs_grad=True)
    config = ffi.default_config(problem, "gpu")
    assert config == widened.config_for(problem, configs.CHIPS["sm_90"]) and config.wide_dtype == "float32"
    assert ffi.unshown(problem, "gpu") is None
    rows = checking.check("triton_ffi", case, "bfloat16", grad=True)
    assert all(row.ok for row in rows), rows
    assert seen and {p.dtype for p in seen if p.needs_grad} == {"float32"}
    assert ffi.default_config(problem.replace(needs_grad=False), "gpu").wide_dtype == "", "only gradients want it"


def test_steps_of_small_heads_train_in_float32(seen):
    rows = checking.check("triton_ffi", NARROW, "bfloat16", op="recurrent", grad=True)
    assert all(row.ok for row in rows), rows
    assert {p.op for p in seen if p.dtype == "float32"} == {"recurrent", "chunk"}


def test_sizes_that_wait_run_as_wider_ones(seen, only_shown):
    problem = NARROW.problem("float32", needs_grad=True)
    only_shown(*(NARROW.problem("float32", op=op, needs_grad=op == "chunk").replace(K=32, V=32) for op in ("chunk", "recurrent")))
    config = ffi.default_config(problem, "gpu")
    assert (config.wide_K, config.wide_V) == (32, 32)
    assert ffi.unshown(problem, "gpu") is None and ffi.unshown(problem.replace(K=40), "gpu") is not None
    assert all(row.ok for row in checking.check("triton_ffi", NARROW, "float32"))
    assert all(row.ok for row in checking.check("triton_ffi", NARROW, "float32", op="recurrent", grad=False))
    assert {(p.K, p.V) for p in seen} == {(32, 32)}


def test_mapped_and_compiled(seen):
    """vmap and jit of such a gradient: that of each call."""
    x = jax.random.normal(jax.random.key(0), (3, 4, 1, 10, 1, 8), jnp.bfloat16)
    beta = jax.nn.sigmoid(x[:, 0, ..., 0])

    def loss(x, beta):
        q, k, v, g = x
        o, _ = chunk_kda(q, k, v, -jnp.exp(g), beta, use_qk_l2norm_in_kernel=True, backend="triton_ffi")
        return (o.astype(jnp.float32) ** 2).sum()

    each = jnp.stack([jax.grad(loss)(*one) for one in zip(x, beta, strict=True)])
    mapped = jax.jit(jax.vmap(jax.grad(loss)))(x, beta)
    assert mapped.dtype == jnp.bfloat16 and bool((jnp.abs(mapped - each).astype(jnp.float32) <= 2e-2 * jnp.abs(each).max()).all())


def test_where_the_compiled_call_is_kept(monkeypatch, tmp_path):
    """Where nothing can be written the backend says so, and `auto` goes on; an empty variable is none, a home is not needed."""
    from kdakit.backends.triton_gpu.ffi import handler

    monkeypatch.setattr(handler, "compiler", lambda: "g++")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDAKIT_CACHE_DIR", str(tmp_path / "file" / "x"))
    assert "set KDAKIT_CACHE_DIR" in handler.unbuildable()
    monkeypatch.setenv("KDAKIT_CACHE_DIR", str(tmp_path / "new" / "x"))
    assert handler.unbuildable() is None and not (tmp_path / "new").exists()
    monkeypatch.delenv("KDAKIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert handler.folder() == tmp_path / ".cache" / "kdakit"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without a home
    assert "set KDAKIT_CACHE_DIR" in handler.unbuildable()
    assert not library.path().exists() or library.path() == library.PLACE
