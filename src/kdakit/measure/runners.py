"""One call, ready to be timed: forward, forward + backward or a decoding step, in PyTorch or JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdakit.cases import Case
from kdakit.measure import checking
from kdakit.measure.peers import Unavailable
from kdakit.problem import DIFFERENTIABLE, Arrays

GRAPH_CALLS = 20  # decoding steps in one CUDA graph
EAGER_CALLS = 20  # forwards in a row


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Run:
    """`call` starts `calls` calls and returns (o, final_state) of the last; `wait` returns when they have ended."""

    call: Callable[[], Any]
    wait: Callable[[], Any] = _nothing
    gpu: bool = False  # timed by the GPU's own clock
    calls: int = 1

    def __call__(self):
        out = self.call()
        self.wait()
        return out


def torch_run(function, tensors, cotangents, mode: str) -> Run:
    """`function(tensors)` is the public call. On a GPU decode, 'graph' and 'train' are CUDA graphs. 'eager': by the host's clock."""
    import torch

    gpu = tensors.q.device.type == "cuda"
    wait = torch.cuda.synchronize if gpu else _nothing
    if mode in ("fwdbwd", "train"):
        inputs = [x.requires_grad_() for x in (getattr(tensors, n) for n in DIFFERENTIABLE) if x is not None]

        def forward_backward():
            outputs = [x for x in function(tensors) if x is not None]
            torch.autograd.grad(outputs, inputs, cotangents[: len(outputs)])
            return tuple(x.detach() for x in outputs)

        return in_graph(forward_backward, 1) if gpu and mode == "train" else Run(forward_backward, wait, gpu)

    def forward():
        with torch.no_grad():
            return function(tensors)

    if gpu and mode in ("decode", "graph"):
        return in_graph(forward, GRAPH_CALLS if mode == "decode" else 1)
    if mode == "eager":
        return Run(lambda: [forward() for _ in range(EAGER_CALLS)][-1], wait, calls=EAGER_CALLS)
    return Run(forward, wait, gpu)


def in_graph(call, calls: int = GRAPH_CALLS) -> Run:
    """`calls` calls captured once, so that what is timed is the GPU's work and not the host's."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = call()

    def replay(kept=call):  # the graph reads the call's tensors: they must live as long as it
        graph.replay()
        return out

    return Run(replay, torch.cuda.synchronize, True, calls)


def over_heads(case: Case, devices: int):
    """Two functions that cut the heads of a call's arrays, and of its cotangents, over the first devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    found = jax.devices()
    if len(found) < devices:
        raise Unavailable(f"JAX has {len(found)} devices here, too few for {devices}")
    if case.H % devices or case.HV % devices:
        raise Unavailable(f"its {case.H} and {case.HV} heads cannot be cut over {devices} devices")
    mesh = Mesh(np.array(found[:devices]), ("heads",))

    def put(x, axis):
        return x if x is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * axis, "heads")))

    def inputs(x: Arrays) -> Arrays:
        tokens = {name: put(getattr(x, name), 2) for name in ("q", "k", "v", "g", "beta")}
        return x._replace(**tokens, A_log=put(x.A_log, 0), dt_bias=put(x.dt_bias, 0), initial_state=put(x.initial_state, 1))

    return inputs, lambda seeds: (put(seeds[0], 2), put(seeds[1], 1))


def jax_run(function, arrays, dtypes, cotangents, dtype: str, place=None) -> Run:
    """Jitted, and waited for: JAX has no clock of the device to ask. `place` comes from `over_heads`."""
    import jax

    place_inputs, place_cotangents = place or (lambda x: x, lambda x: x)
    with checking.jax_precision(dtype):
        given = place_inputs(checking.to_jax(arrays, dtypes))
    names = [n for n in DIFFERENTIABLE if getattr(given, n) is not None]
    values = tuple(getattr(given, n) for n in names)

    def forward(*values):
        outputs = function(given._replace(**dict(zip(names, values, strict=True))))
        return tuple(x for x in outputs if x is not None)

    def forward_backward(seeds, *values):
        outputs, pullback = jax.vjp(forward, *values)
        return outputs, pullback(tuple(d.astype(x.dtype) for d, x in zip(seeds, outputs, strict=False)))

    step = jax.jit(forward if cotangents is None else forward_backward)
    with checking.jax_precision(dtype):
        leading = () if cotangents is None else (place_cotangents(tuple(jax.numpy.asarray(d) for d in cotangents)),)

    def run():
        with checking.jax_precision(dtype):
            out = jax.block_until_ready(step(*leading, *values))
        return out if cotangents is None else out[0]

    return Run(run)
