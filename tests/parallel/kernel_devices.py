"""TPU kernels on 8 host devices, interpreted: batch and heads split in every way that JAX knows, tokens too. A process of its own."""

import os
import re
import sys
import time

import jax
import jax.numpy as jnp
import kernel_calls as calls
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kdakit.jax import chunk_kda, fused_recurrent_kda
from kdakit.measure import checking
from kdakit.parallel.heads import parameter_specs
from kdakit.parallel.jax import sharded_chunk_kda, split

KERNELS = dict(backend="pallas_tpu")
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
QUICK = checking.quick_options()
SHORT = calls.OPTIONS | dict(chunk_size=16)
ACROSS = re.compile(r"all-gather|all-to-all|collective-permute|reduce-scatter")  # sums of a parameter's gradient are no exchange


def mesh_of(*sizes, kind=AxisType.Auto):
    return jax.make_mesh(sizes, ("data", "model")[-len(sizes) :], axis_types=(kind,) * len(sizes))


def specs_of(given, batch, heads, keys=True):
    tokens = P(batch, None, heads)
    named = dict.fromkeys(("v", "g", "beta"), tokens) | dict.fromkeys("qk", tokens if keys else P(batch))
    named |= dict(A_log=P(heads), dt_bias=P(heads), initial_state=P(batch, heads), cu_seqlens=P())
    return {name: named[name] for name in given}


def placed(given, mesh, specs):
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in given.items()}


def check(where, run, given, arguments=None, exchanges=False):
    start = time.perf_counter()
    arguments = (given if arguments is None else arguments, *calls.cotangents(given))
    compiled = jax.jit(run).lower(*arguments).compile()
    calls.close(compiled(*arguments), calls.truth(given), where)
    assert exchanges or not ACROSS.search(compiled.as_text()), f"{where}: something travels"
    print(f"{where}: {time.perf_counter() - start:.1f} s", flush=True)


def chunk(**given):
    return chunk_kda(**given, **KERNELS)


def explicit_types():
    """Axes of the kind Explicit: jit with NamedSharding, nothing more said."""
    given = calls.inputs(1, B=4, H=2, HV=4)
    mesh = mesh_of(4, 2, kind=AxisType.Explicit)
    check("explicit", calls.all_of(chunk, SHORT), given, arguments=placed(given, mesh, specs_of(given, "data", "model")))


def auto_types():
    """Axes of the kind Auto: packed sequences with padding, heads split, two value heads of one key on two devices."""
    given = calls.inputs(2, T=40, H=1, HV=2, lengths=(11, 0, 22))
    mesh = mesh_of(1, 2)
    arguments = placed(given, mesh, specs_of(given, None, "model", keys=False))
    try:
        jax.jit(calls.all_of(chunk, SHORT)).lower(arguments, *calls.cotangents(given))
    except ValueError as error:
        assert "split(batch=.., heads=..)" in str(error)
    else:
        raise AssertionError("a kernel on a mesh that nobody has explained")
    with split(batch="data", heads="model"):
        check("auto, packed", calls.all_of(chunk, SHORT), given, arguments=arguments)


def manual():
    """shard_map with its default checks, gradients of what is replicated included."""
    given = calls.inputs(3, B=2, H=2, HV=4)
    specs = specs_of(given, "data", "model") | dict(A_log=P("model"), dt_bias=P("model"))
    results = P("data", None, "model"), P("data", "model")

    def call(**given):
        local = lambda x: chunk_kda(**x, **calls.OPTIONS, chunk_size=16, **KERNELS)
        return jax.shard_map(local, mesh=mesh_of(2, 2), in_specs=(specs,), out_specs=results)(given)

    check("shard_map", calls.all_of(lambda **x: call(**{n: x[n] for n in specs}), SHORT), given)


def partly_manual():
    """shard_map over one axis, the other left to jit: no kernel can be split so; `xla` can."""
    given = calls.inputs(6, B=2, H=2, HV=4)
    specs = {name: P("data") if x.ndim > 1 else P() for name, x in given.items()}
    mesh = mesh_of(2, 2)

    def run(backend):
        local = lambda x: chunk_kda(**x, **SHORT, backend=backend)
        call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P("data"), axis_names={"data"})
        with split(heads="model"):
            return jax.jit(call).lower(placed(given, mesh, specs_of(given, "data", "model")))

    try:
        run("pallas_tpu")
    except ValueError as error:
        assert "make them manual too" in str(error)
    else:
        raise AssertionError("a kernel where some axes are manual and others are not")
    run("xla")


def recurrence():
    """The token recurrence, forward, in a mesh whose axis does not divide the batch."""
    given = calls.inputs(4, B=3, T=3, H=8, HV=8)
    mesh = mesh_of(8)
    step = jax.jit(lambda x: fused_recurrent_kda(**x, **calls.OPTIONS, **KERNELS))
    with split(batch="model"):
        whole = step(placed(given, mesh, specs_of(given, None, None)))
    with split(heads="model"):
        cut = step(placed(given, mesh, specs_of(given, None, "model")))
    assert cut[0].sharding.spec[2] == "model" and step._cache_size() == 2
    want = calls.truth(given)
    for got in (whole, cut):
        calls.close(dict(zip(("o", "final_state"), got, strict=True)), {n: want[n] for n in ("o", "final_state")}, "step")


def tokens():
    """Context parallel over the kernels: states travel, tokens do not."""
    given = calls.inputs(5, B=1, T=38, H=1, HV=2)
    call = sharded_chunk_kda(mesh_of(1, 4), context="model")
    check("context", calls.all_of(lambda **x: call(**x, **KERNELS), SHORT), given, exchanges=True)


def spread_over(mesh, state):
    """A module's parameters, split by heads over the mesh axis `model`."""
    from flax import nnx

    flat = nnx.to_flat_state(state)
    specs = parameter_specs((".".join(map(str, path)) for path, _ in flat), axis="model").values()
    moved = [(path, p.replace(jax.device_put(p[...], NamedSharding(mesh, s)))) for (path, p), s in zip(flat, specs, strict=True)]
    return nnx.from_flat_state(dict(moved))


def near(got, want, where):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= 1e-4 * np.linalg.norm(b) + 1e-9, where


def layer():
    """A layer with its parameters split by heads, its batch by rows."""
    from flax import nnx

    from kdakit.layers.jax import KimiDeltaAttention

    graph, state = nnx.split(
        KimiDeltaAttention(hidden_size=16, head_dim=8, num_heads=2, num_v_heads=4, backend="pallas_tpu", rngs=nnx.Rngs(0))
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 16)), jnp.float32)

    def loss(state, x, backend):
        made = nnx.merge(graph, state)
        made.backend = backend
        return (made(x)[0] ** 2).mean()

    want = jax.jit(jax.value_and_grad(lambda s, x: loss(s, x, "xla")))(state, x)
    mesh = mesh_of(2, 2)
    with split(batch="data", heads="model"):
        run = jax.jit(jax.value_and_grad(lambda s, x: loss(s, x, "pallas_tpu")))
        near(run(spread_over(mesh, state), jax.device_put(x, NamedSharding(mesh, P("data")))), want, "layer")


def model():
    """A whole model, its delta layers on the kernels: loss and gradients on 8 devices, the loss on 2 and 4; as `xla` has them on one."""
    from flax import nnx

    from kdakit.models.config import ModelConfig
    from kdakit.models.jax import KimiLinear

    config = ModelConfig(vocab_size=16, hidden_size=16, num_layers=2, attention_every=2, head_dim=8, num_heads=2, num_v_heads=2)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 9)))
    losses = {}
    for backend in ("xla", "pallas_tpu"):
        graph, state = nnx.split(KimiLinear(config, seed=3, backend=backend))

        def loss(state, tokens, graph=graph):
            log_p = jax.nn.log_softmax(nnx.merge(graph, state)(tokens[:, :-1])[0])
            return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()

        losses[backend] = loss
    want = jax.jit(jax.value_and_grad(losses["xla"]), compiler_options=QUICK)(state, tokens)
    for sizes in ((4, 2), *[(1, 2), (2, 2)] * FULL):
        start, mesh = time.perf_counter(), mesh_of(*sizes)
        whole = sizes == (4, 2)
        with split(batch="data", heads="model"):
            run = jax.jit(jax.value_and_grad(losses["pallas_tpu"]) if whole else losses["pallas_tpu"], compiler_options=QUICK)
            found = run(spread_over(mesh, state), jax.device_put(tokens, NamedSharding(mesh, P("data"))))
        near(found, want if whole else want[0], f"model on {sizes}")
        print(f"model on {sizes}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    assert os.environ.get("KDAKIT_INTERPRETER") != "tpu" and len(jax.devices()) == 8
    for name in sys.argv[1:]:
        globals()[name]()
