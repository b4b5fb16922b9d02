"""The TPU backend's kernels at a chosen shape, as functions of ShapeDtypeStructs: what `kdakit compile` and the tests lower and compile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kdakit.cases import Shape


@dataclass(frozen=True)
class Chip:
    topology: str  # its name for libtpu
    kind: str  # JAX's device kind
    ghz: float  # nominal; v6e and tpu7x from peak FLOP/s, tpu7x also from published kernel times
    hbm_gbs: float  # nominal GB/s of one core: half of a tpu7x's, which has two that are devices of their own


CHIPS = {
    "v4": Chip("v4:2x2x1", "TPU v4", 1.05, 1228),
    "v5e": Chip("v5e:2x2", "TPU v5e", 1.5, 819),
    "v5p": Chip("v5p:2x2x1", "TPU v5p", 1.75, 2765),
    "v6e": Chip("v6e:2x2", "TPU v6e", 1.75, 1640),
    "tpu7x": Chip("tpu7x:2x2x1", "TPU7x", 2.0, 3690),
}

KERNELS = ("forward", "training", "step", "delta_rule", "decode", "layer_decode")
DECODING = ("step", "decode", "layer_decode")  # one token of each sequence
GATES = ("bounded", "softplus", "log_decay")


@dataclass(frozen=True)
class Job:
    """One call to compile: `training` is forward and backward, `step` one token of each sequence, `delta_rule` that stage alone; `decode`
    a token of B rows over a pool, `layer_decode` with the layer's convolutions and norm around it."""

    kernel: str
    gate: str = "bounded"
    dtype: str = "bfloat16"
    B: int = 1
    T: int = 8192
    H: int = 32
    HV: int = 0  # 0: H
    K: int = 128
    V: int = 0  # 0: K
    sequences: int = 0  # packed into T
    states: bool = False  # initial and final states
    chunk_size: int = 64
    disable_recompute: bool = False
    heads: int = 0  # a grid step; 0: as many as the backend would take

    @classmethod
    def of(cls, shape: Shape, **rest) -> Job:
        return cls(B=shape.B, T=shape.T, H=shape.H, K=shape.K, sequences=len(shape.lengths), **rest)

    def __str__(self) -> str:
        size = f"B{self.B} T{self.T} H{self.H} K{self.K}"
        extras = [f"{self.sequences} sequences"] * bool(self.sequences) + ["states"] * self.states
        extras += [f"chunks of {self.chunk_size}"] * (self.chunk_size != 64)
        extras += ["no recomputation"] * self.disable_recompute + [f"{self.heads} heads a step"] * bool(self.heads)
        gate = [] if self.kernel == "delta_rule" else [f"{self.gate} gate"]
        return ", ".join([f"{self.kernel} {size}", self.dtype, *gate, *extras])


def problem_of(job: Job):
    """The job's arrays as ShapeDtypeStructs, and its Problem."""
    import jax
    import jax.numpy as jnp

    from kdakit.problem import Arrays, make_options, make_problem

    def array(*shape, dtype=job.dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    recurrent, fused = job.kernel in DECODING, job.gate != "log_decay"
    B, T, H, K = job.B, 1 if recurrent else job.T, job.H, job.K
    HV, V = job.HV or H, job.V or K
    N = job.sequences or B
    arrays = Arrays(
        q=array(B, T, H, K), k=array(B, T, H, K), v=array(B, T, HV, V), g=array(B, T, HV, K, dtype=job.dtype if fused else "float32"),
        beta=array(B, T, HV),
        A_log=array(HV, dtype="float32") if fused else None, dt_bias=array(HV * K, dtype="float32") if fused else None,
        initial_state=array(N, HV, K, V, dtype="float32") if job.states or recurrent else None,
        cu_seqlens=array(N + 1, dtype="int32") if job.sequences else None,
    )  # fmt: skip
    bounded = job.gate == "bounded"
    options = make_options(
        arrays, use_qk_l2norm_in_kernel=fused, use_gate_in_kernel=fused, use_beta_sigmoid_in_kernel=fused, chunk_size=job.chunk_size,
        lower_bound=-5.0 if bounded else None, safe_gate=bounded, output_final_state=job.states or recurrent,
        disable_recompute=job.disable_recompute,
    )  # fmt: skip
    return arrays, make_problem("recurrent" if recurrent else "chunk", arrays, options, needs_grad=job.kernel == "training")


def function_of(job: Job) -> tuple[Any, tuple]:
    """A function and its arguments' ShapeDtypeStructs."""
    if job.kernel in ("decode", "layer_decode"):
        return _pooled(job)
    return _delta_rule(job) if job.kernel == "delta_rule" else function_for(job.kernel, *problem_of(job), job.heads)


def function_for(kernel: str, arrays, problem, heads: int = 0) -> tuple[Any, tuple]:
    """The same for a problem of one's own."""
    from kdakit.backends import pallas_tpu

    config = pallas_tpu.default_config(problem, "tpu")
    if heads:
        config = replace(config, heads=heads, backward_heads=heads)
    if kernel == "step":
        return (lambda arrays: pallas_tpu.step(problem, arrays, config)), (arrays,)
    if kernel == "forward":
        return (lambda arrays: pallas_tpu.forward(problem, arrays, config)[0]), (arrays,)

    def training(arrays, d_o, d_final_state):
        result, saved = pallas_tpu.forward(problem, arrays, config)
        return result, pallas_tpu.backward(problem, arrays, saved, d_o, d_final_state, config)

    return training, (arrays, arrays.v, arrays.initial_state)


def _delta_rule(job: Job) -> tuple[Any, tuple]:
    """The stage, forward and backward."""
    import jax

    from kdakit.backends.pallas_tpu.delta_rule import delta_rule
    from kdakit.backends.pallas_tpu.tile import Config

    def array(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct((*shape,), dtype)

    chunks, HV, C, K, V = -(-job.T // job.chunk_size), job.HV or job.H, job.chunk_size, job.K, job.V or job.K
    keys, values = (array(chunks, job.B, HV, C, size, dtype=job.dtype) for size in (K, V))
    given = keys, values, keys, array(chunks, job.B, HV, K), array(job.B, HV, V, K)

    def both(given, cotangents):
        results, pullback = jax.vjp(lambda *x: delta_rule(*x, Config(heads=min(HV, 8))), *given)
        return results, pullback(cotangents)

    return both, (given, (array(chunks, job.B, HV, V, K), values, array(job.B, HV, V, K)))


TAPS = 4  # of a layer's convolutions


def _pooled(job: Job) -> tuple[Any, tuple]:
    """Decoding over a pool of float32 states, or of bfloat16 ones where `job.states`."""
    import jax

    from kdakit.backends import pallas_tpu
    from kdakit.backends.pallas_tpu import pool

    arrays, problem = problem_of(job)
    p, pages, config = problem, job.B, pallas_tpu.default_config(problem, "tpu")
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
    rows = pool.Rows(array(p.B, dtype="int32"), array(p.B, dtype="int32"))
    states = array(pages, p.HV, p.K, p.V, dtype="bfloat16" if job.states else "float32")
    arrays = arrays._replace(initial_state=None)
    if job.kernel == "decode":
        return (lambda arrays, states, rows: pool.decode(problem, arrays, states, rows, config)), (arrays, states, rows)
    sizes = {"q": (p.H, p.K), "k": (p.H, p.K), "v": (p.HV, p.V)}
    windows, taps = ({n: array(*lead, *size) for n, size in sizes.items()} for lead in ((pages, TAPS - 1), (TAPS,)))
    around = windows, taps, array(p.B, p.T, p.HV, p.V, dtype=job.dtype), array(p.V)

    def layer_decode(arrays, states, rows, windows, taps, gate, weight):
        return pool.decode(problem, arrays, states, rows, config, pool.Layer(windows, taps, None, gate, weight, 1e-5))

    return layer_decode, (arrays, states, rows, *around)


def given_away(job: Job) -> tuple[int, ...]:
    """Arguments whose memory the call's results take, as far as they can: states and pools."""
    return {"step": (0,), "decode": (1,), "layer_decode": (1, 3)}.get(job.kernel, ())


def on_chip(chip: str):
    """A context in which Pallas lowers for `chip`, whatever machine this is."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind=CHIPS[chip].kind, num_cores=1, platform="tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
