"""TPU kernels compiled by libtpu for four chips, none of which need be there: python kernel_chips.py CHIP. A process of its own."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kdakit.jax import chunk_kda, fused_recurrent_kda
from kdakit.measure.tpu_kernels import CHIPS
from kdakit.parallel.jax import split

OPTIONS = dict(
    use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, output_final_state=True, lower_bound=-5.0,
    safe_gate=True, backend="pallas_tpu",
)  # fmt: skip
ACROSS = re.compile(r"(all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
TOKENS, STATES = P("data", None, "model"), P("data", "model")


def mesh_of(chip, kind):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip].topology).devices[:4]
    return Mesh(np.array(devices).reshape(2, 2), ("data", "model"), axis_types=(kind,) * 2)


def arguments(mesh, T=128, packed=False):
    """Two rows, or three packed sequences; grouped value heads."""
    B, N, H, HV, K = (1, 3, 8, 16, 128) if packed else (2, 2, 8, 16, 128)
    place = lambda spec: NamedSharding(mesh, P(None, *spec[1:]) if packed and len(spec) > 1 else spec)
    array = lambda spec, *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place(spec))
    given = dict(q=array(TOKENS, B, T, H, K), k=array(TOKENS, B, T, H, K), v=array(TOKENS, B, T, HV, K), g=array(TOKENS, B, T, HV, K))
    given |= dict(beta=array(TOKENS, B, T, HV), initial_state=array(STATES, N, HV, K, K, dtype="float32"))
    given |= dict(A_log=array(P("model"), HV, dtype="float32"), dt_bias=array(P("model"), HV * K, dtype="float32"))
    return given | ({"cu_seqlens": array(P(), N + 1, dtype="int32")} if packed else {})


def training(call):
    def run(given):
        rest = {n: given[n] for n in ("cu_seqlens",) if n in given}
        total = lambda x: sum((y.astype(jnp.float32) ** 2).sum() for y in call(**x, **rest))
        return jax.value_and_grad(total)({n: x for n, x in given.items() if n not in rest})

    return run


def compiled(run, given):
    text = jax.jit(run).trace(given).lower(lowering_platforms=("tpu",)).compile().as_text()
    return {"kernels": text.count("tpu_custom_call"), "exchanges": sorted(set(ACROSS.findall(text)))}


def main(chip):
    explicit, auto = (mesh_of(chip, kind) for kind in (AxisType.Explicit, AxisType.Auto))
    chunk = lambda **given: chunk_kda(**given, **OPTIONS)
    specs = {name: x.sharding.spec for name, x in arguments(auto).items()}
    mapped = jax.shard_map(lambda given: chunk(**given), mesh=auto, in_specs=(specs,), out_specs=(TOKENS, STATES))
    found = {"explicit": compiled(training(chunk), arguments(explicit))}
    with split(batch="data", heads="model"):
        found["auto, packed"] = compiled(training(chunk), arguments(auto, packed=True))
    found["shard_map"] = compiled(lambda given: mapped(given), arguments(auto))
    found["decode"] = compiled(lambda given: fused_recurrent_kda(**given, **OPTIONS), arguments(explicit, T=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
