"""Context parallel calls on 8 host devices, in a process of their own: python devices.py OUT JOBS. A job is {"size", "case", "dtype"} or,
with "lengths", the case with its tokens packed so; with "slices", as many tokens on each device, the other slots being NaN. With
"injected", [seed, i], something in it is not finite: see not_finite.py."""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import not_finite
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kdakit.cases import CASES, SEGMENT_CASES
from kdakit.measure.checking import jax_precision, to_jax
from kdakit.parallel.jax import chunk_kda, previous_tokens, sharded_chunk_kda
from kdakit.problem import DIFFERENTIABLE

EVERY_CASE = CASES | SEGMENT_CASES
_kept = {}


def function(mesh, options, key):
    """The jitted call with its gradients; kept, since sequences change values only."""

    def run(inputs, rest, seeds):
        def forward(inputs):
            o, final_state = sharded_chunk_kda(mesh, context="context")(**inputs, **rest, **options)
            return {"o": o} | ({} if final_state is None else {"final_state": final_state})

        out, pullback = jax.vjp(forward, inputs)
        return out | pullback({n: seeds[n].astype(x.dtype) for n, x in out.items()})[0]

    return _kept.setdefault(key, jax.jit(run))


def uneven_function(mesh, options, key):
    """The same with devices that hold other numbers of tokens, up to all T: `lengths` [devices] and `source`, the token of each slot."""
    tokens, whole = P(None, "context"), P()

    def run(inputs, rest, seeds, lengths, source):
        spread = lambda x: jnp.take(x, source, axis=1, mode="fill", fill_value=jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else -7)
        along = {n for n in inputs if n in ("q", "k", "v", "g", "beta")} | ({"segment_ids"} & rest.keys())

        def local(given, length):
            o, final_state = chunk_kda(**given, axis_name="context", length=length[0], **options)
            return o, None if final_state is None else jax.lax.psum(final_state, "context")

        def forward(inputs):
            given = {n: spread(x) if n in along else x for n, x in (inputs | rest).items()}
            specs = {n: tokens if n in along else whole for n in given}
            states = whole if options.get("output_final_state") else None
            o, final_state = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("context")), out_specs=(tokens, states))(given, lengths)
            slots = jnp.argsort(source, stable=True)[: inputs["q"].shape[1]]  # empty slots name a token behind the last
            return {"o": o[:, slots]} | ({} if final_state is None else {"final_state": final_state})

        out, pullback = jax.vjp(forward, inputs)
        return out | pullback({n: seeds[n].astype(x.dtype) for n, x in out.items()})[0]

    return _kept.setdefault(("uneven", *key), jax.jit(run))


def slots_of(slices, T):
    """The token in each of the T slots of each device, T where there is none."""
    begins = np.cumsum([0, *slices[:-1]])
    return np.concatenate([np.where(np.arange(T) < n, begin + np.arange(T), T) for begin, n in zip(begins, slices, strict=True)])


def run(job):
    case, dtype = EVERY_CASE[job["case"]], job["dtype"]
    case = replace(case, lengths=tuple(job.get("lengths", case.lengths)))
    mesh = Mesh(np.array(jax.devices()[: job["size"]]), ("context",))
    given, cotangents = not_finite.given(case, dtype, job.get("injected"))
    arrays = to_jax(given, case.dtypes(dtype))
    if job["case"] == "varlen_many":  # in int32, other cases in int64 where there is one: a program each
        arrays = arrays._replace(cu_seqlens=arrays.cu_seqlens.astype(jnp.int32))
    rest = {n: x for n, x in arrays._asdict().items() if x is not None}
    inputs = {n: rest.pop(n) for n in DIFFERENTIABLE if n in rest}
    options = {n: x for n, x in case.call_options.items() if n != "return_intermediate_states"}
    seeds = {n: jnp.asarray(x) for n, x in zip(("o", "final_state"), cotangents, strict=True)}
    if "slices" in job:
        extra = jnp.asarray(job["slices"]), jnp.asarray(slots_of(job["slices"], case.T))
        call = uneven_function(mesh, options, (job["case"], dtype, job["size"]))
        return {n: np.asarray(x).astype(np.float64) for n, x in call(inputs, rest, seeds, *extra).items()}
    call = function(mesh, options, (job["case"], dtype, job["size"]))
    if job.get("text"):
        call = call.lower(inputs, rest, seeds).compile()
    results = {n: np.asarray(x).astype(np.float64) for n, x in call(inputs, rest, seeds).items()}
    return results | ({"text": call.as_text()} if job.get("text") else {})


def halo(size, count, eager=False):
    """The tokens before each slice of 0, 1, .. 15, in the order of the devices; and the gradient of their weighted sum."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("context",))
    tokens = jnp.arange(16.0)[None, :, None]
    before = jax.shard_map(
        lambda x: previous_tokens(x, count, "context"), mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context")
    )
    weights = jnp.arange(1.0, 1 + size * count)[None, :, None]
    before, gradient = (f if eager else jax.jit(f) for f in (before, jax.grad(lambda x: (before(x) * weights).sum())))
    return np.asarray(before(tokens))[0, :, 0], np.asarray(gradient(tokens))[0, :, 0]


def uneven_halo(slices, count):
    """As halo, of slices with so many tokens in 16 slots."""
    mesh = Mesh(np.array(jax.devices()[: len(slices)]), ("context",))
    tokens = jnp.arange(16.0)[None, :, None]
    before = jax.shard_map(
        lambda x, n: previous_tokens(x, count, "context", n[0]),
        mesh=mesh, in_specs=(P(None, "context"), P("context")), out_specs=P(None, "context"),
    )  # fmt: skip
    spread = lambda x: jnp.take(x, slots_of(slices, 16), axis=1, mode="fill", fill_value=jnp.nan)
    call = lambda x: before(spread(x), jnp.asarray(slices))
    weights = jnp.arange(1.0, 1 + len(slices) * count)[None, :, None]
    gradient = jax.jit(jax.grad(lambda x: (call(x) * weights).sum()))
    return np.asarray(jax.jit(call)(tokens))[0, :, 0], np.asarray(gradient(tokens))[0, :, 0]


def main(out, jobs):
    results = [halo(4, 3, eager=True), halo(8, 5), uneven_halo([1, 0, 9, 2, 0, 4], 4)]
    for job in jobs:
        with jax_precision(job["dtype"]):
            results.append(run(job))
    with open(out, "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
