"""What the names in a kernel's signature stand for. A launch says otherwise only where its kernel means something of its own."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kdakit.backends.triton_gpu.config import Config, Cut, by_rows, corrected, end_chunks, exact_steps, padded, read_channels, turned
from kdakit.backends.triton_gpu.runtime.launch import DTYPES
from kdakit.backends.triton_gpu.runtime.layout import Layout
from kdakit.problem import Problem


@lru_cache(maxsize=1024)
def arguments(problem: Problem, config: Config, layout: Layout) -> dict[str, Any]:
    """{name: value} of numbers and constants."""
    return sizes(problem, config) | strides(layout) | dict(ALIGN=layout.align) | activations(problem) | options(problem, config)


def sizes(problem: Problem, config: Config) -> dict[str, Any]:
    return dict(
        T=problem.T,  # tokens
        N=problem.N,  # sequences
        NT=-(-problem.T // config.chunk),  # chunks of a sequence that is not packed
        H=problem.H,
        HV=problem.HV,
        K=problem.K,
        V=problem.V,
        KP=padded(problem.K),
        KR=read_channels(problem, config),
        VP=padded(problem.V),
        C=config.chunk,  # tokens of a chunk
        HALF=config.half,  # rows of a chunk that the prepare kernel makes at a time, see device.program.row_tokens
        GROUP=1 if problem.dtype == "float32" else config.group,  # but in the prepare kernel, which then brings rows into tokens' order
        DIAGONAL=config.diagonal,
        EVERY=max(1, problem.options.chunk_size // config.chunk),  # chunks between the states that are asked for
        CHECKPOINT=config.checkpoint,  # chunks between the states that a backward starts from
    )


def strides(layout: Layout) -> dict[str, int]:
    """s_qb, s_qt, s_qh: of q from one batch row, token, head to the next, in units of ALIGN elements; those of beta in elements."""
    return {f"s_{name}{axis}": s for name, of in layout.strides.items() for axis, s in zip("bth", of, strict=False)}


def activations(problem: Problem) -> dict[str, Any]:
    o = problem.options
    return dict(
        scale=o.scale,
        lower_bound=o.lower_bound or 0.0,
        GATE=o.gate,
        BETA=o.beta,
        L2NORM=o.l2norm,
        HAS_A_LOG=problem.has_A_log,
        HAS_DT_BIAS=problem.has_dt_bias,
    )


def options(problem: Problem, config: Config) -> dict[str, Any]:
    o = problem.options
    return dict(
        VARLEN=bool(problem.varlen),
        V_FIRST=o.state_v_first,
        HAS_INITIAL=problem.has_initial_state,
        HAS_FINAL=o.output_final_state,
        HAS_STATES=o.return_intermediate_states,
        HAS_LOWER=problem.needs_grad,
        HAS_CHECKPOINTS=problem.needs_grad,
        HAS_FIRST=corrected(problem),
        HAS_LOST=config.exact_last,
        EXACT_DECAY=exact_steps(problem),  # of steps
        EXACT_SHARE=config.exact_share,
        EXACT_FINAL=config.exact_final,
        ENDS=end_chunks(problem, config),
        BOUNDED=config.bounded,
        BY_TOKEN=config.by_token,
        TURNED=turned(problem, config),
        FLOOR=config.floor,
        VECTOR=config.vector,
        PRECISION=config.precision,
        SOLVE_DTYPE=DTYPES[config.solve_dtype],
        GRADIENT_DTYPE=DTYPES[config.gradient_dtype],
        PTX=config.ptx,
        HIP=config.hip,
    )


def pages(problem: Problem, config: Config, paged: tuple[int, int, int, int] | None) -> dict[str, Any]:
    """Of states in pages: slots below FIRST and from CAPACITY on are nobody's; pages are s_page * PAGE elements apart."""
    first, capacity, stride, unit = paged or (0, 0, 0, 1)
    rows = paged is not None and by_rows(problem, config)
    return dict(PAGED=paged is not None, FIRST=first, CAPACITY=capacity, s_page=stride, PAGE=unit, BY_ROWS=rows)


def pool_states(pool: Any, cut: Cut) -> dict[str, Any]:
    """Of states in a pool of these sizes."""
    return dict(K=pool.K, V=pool.V, KP=padded(pool.K), BV=cut.block_v, V_FIRST=pool.state_v_first, FEEDBACK=pool.feedback)
