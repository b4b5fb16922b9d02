"""The JAX model on 8 host devices, cut over data, context and heads, equals the whole one. A process of its own."""

import os
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kdakit import accuracy
from kdakit.jax import chunk_kda
from kdakit.models.config import ModelConfig
from kdakit.models.jax import KimiLinear
from kdakit.parallel.heads import parameter_specs
from kdakit.parallel.jax import Context, sharded_chunk_kda
from kdakit.training.jax import _cut_sum, _whole_sum

FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
CONFIG = ModelConfig(vocab_size=32, hidden_size=24, num_layers=2, attention_every=2, head_dim=8, num_heads=2, num_v_heads=4)


def total(model, tokens, targets, **options):
    """The summed loss of targets that are not negative: sums of parts add up."""
    log_p = jax.nn.log_softmax(model(tokens, **options)[0])
    return -jnp.where(targets < 0, 0, jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]).sum()


def named(state):
    return {".".join(map(str, path)): value for path, value in nnx.to_flat_state(state)}


def placed(state, mesh):
    """The parameters, split over the mesh axis `heads`."""
    flat = nnx.to_flat_state(state)
    specs = parameter_specs(".".join(map(str, path)) for path, _ in flat).values()
    moved = {path: x.replace(jax.device_put(x[...], NamedSharding(mesh, spec))) for (path, x), spec in zip(flat, specs, strict=True)}
    return nnx.from_flat_state(moved)


def spread(x, slices, filler):
    """x [1, T] -> [1, devices * slots] with slices[d] tokens for device d and `filler` behind them."""
    parts = jnp.split(x, np.cumsum(slices)[:-1], 1)
    return jnp.concatenate([jnp.pad(part, [(0, 0), (0, max(slices) - part.shape[1])], constant_values=filler) for part in parts], 1)


@cache
def made():
    graph, state = nnx.split(KimiLinear(CONFIG, seed=3))
    return graph, jax.tree.map(lambda x: x.astype(jnp.float64), state)


@jax.jit
@jax.value_and_grad
def whole(state, tokens, targets, cu_seqlens):
    return total(nnx.merge(made()[0], state), tokens, targets, cu_seqlens=cu_seqlens)


def compare(mesh, rows, tokens, targets, slices=None, **options):
    """Whole, packed also where rows are sequences, and cut: evenly, or into `slices` of so many tokens."""
    graph, state = made()

    def cut(state, tokens, targets):
        def part(state, tokens, targets):
            length = None if slices is None else jnp.asarray(slices)[lax.axis_index("context")]
            value = total(nnx.merge(graph, state), tokens, targets, context=Context("context", length), **options)
            return lax.psum(value, [axis for axis in rows if axis])

        manual = jax.shard_map(part, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P(), axis_names={"data", "context"})
        if slices is not None:
            tokens, targets = spread(tokens, slices, 3), spread(targets, slices, -1)
        return manual(state, tokens, targets)

    B, T = tokens.shape
    cu_seqlens = options.get("cu_seqlens", jnp.arange(0, B * T + 1, T))
    cu_seqlens = jnp.pad(cu_seqlens, (0, 6 - len(cu_seqlens)), mode="edge")  # one program for all
    want, want_gradients = whole(state, tokens.reshape(1, -1), targets.reshape(1, -1), cu_seqlens)
    value, gradients = jax.jit(jax.value_and_grad(cut))(placed(state, mesh), tokens, targets)
    np.testing.assert_allclose(value, want, rtol=1e-8)  # dot_product_attention takes its softmax in float32
    want_gradients = named(want_gradients)
    for name, gradient in named(gradients).items():
        assert accuracy.error(gradient[...], want_gradients[name][...]) < 1e-6, name


def compare_losses(mesh, tokens, targets):
    """A learner's loss where most targets do not count: none in one part, in others as many as there may be."""
    graph, state = made()
    targets = targets.at[0].set(-1).at[:2, :12].set(-1)
    found, want = (jax.jit(measure)(state, tokens, targets) for measure in (_cut_sum(graph, mesh), _whole_sum(graph)))
    np.testing.assert_allclose(found, want, rtol=1e-6)


def compare_calls(*cuts):
    """The operator on whole arrays, cut over a mesh as axes say, with states and parameters: value and gradients of the plain call."""
    rng = np.random.default_rng(1)
    q, k, v, g = (jnp.asarray(rng.normal(size=(2, 32, heads, width))) for heads, width in ((2, 16), (2, 16), (4, 8), (4, 16)))
    beta, weight = jnp.asarray(rng.normal(size=(2, 32, 4))), jnp.asarray(rng.normal(size=v.shape))
    rest = {name: jnp.asarray(rng.normal(size=size)) for name, size in (("initial_state", (2, 4, 16, 8)), ("A_log", 4), ("dt_bias", 64))}
    options = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)

    def measured(call):
        def value(inputs, rest):
            o, final_state = call(*inputs, **rest, **options)
            return (o * weight).sum() + final_state.sum()

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))((q, k, v, g, beta), rest)

    want = measured(chunk_kda)
    for mesh, axes in cuts:
        got = measured(sharded_chunk_kda(mesh, **axes))
        for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            assert accuracy.error(y, x) < 1e-12, axes


def main():
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    tokens, targets = (jnp.asarray(rng.integers(0, 32, (4, 24))) for _ in range(2))
    axes = ("data", "context", "heads")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    compare(mesh, P("data", "context"), tokens, targets)
    compare_losses(mesh, tokens, targets)
    everywhere = dict(batch="data", context="context", heads="heads")
    # test_jax.py has batch and heads without a context
    compare_calls((mesh, everywhere), *([(mesh, dict(batch="data", heads="heads"))] if FULL else []))
    mesh = jax.make_mesh((1, 4, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    cu_seqlens = jnp.asarray([0, 22, 23, 23, 50, 96])
    line = tokens.reshape(1, -1), targets.reshape(1, -1)
    compare(mesh, P(None, "context"), *line, cu_seqlens=cu_seqlens, slices=[21, 0, 40, 35])
    if FULL:  # devices.py has these of the operator alone
        compare(mesh, P(None, "context"), *line, cu_seqlens=cu_seqlens)
        compare(mesh, P(None, "context"), *line, slices=[2, 60, 1, 33])


if __name__ == "__main__":
    main()
