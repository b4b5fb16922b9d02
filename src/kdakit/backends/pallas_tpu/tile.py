"""What one grid step works on: sizes, arithmetic and options, all static, so that a kernel is a function of a `Tile` and its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdakit.problem import Problem

BLOCK = 16  # tokens per block inside a chunk; every chunk size is a multiple
LANES = 128


@dataclass(frozen=True)
class Config:
    heads: int  # value heads per grid step
    interpret: bool = False  # run in the TPU interpreter on the CPU
    race_seed: int | None = None  # interpreter: detect races, with this seed for the order of parallel grid steps
    eager_dma: bool = True  # interpreter: copies happen when they are started, or else when they are waited for
    chunk: int = 128  # tokens per chunk at most, where the call's own chunks are nobody's business but the kernels'
    backward_heads: int = 0  # value heads per grid step of the backward; 0: as many as the forward's

    @property
    def of_backward(self) -> Config:
        return replace(self, heads=self.backward_heads or self.heads)


@dataclass(frozen=True)
class Tile:
    C: int  # tokens per chunk
    K: int  # a multiple of 128, as all arrays are padded to it
    V: int
    heads: int  # per grid step
    dtype: str  # of q, k, v and o
    operand: str  # factors of products: "bfloat16", or "float32" at full precision
    bounded: bool  # the gate's bound and the operand's precision allow exp(-sum) over a block of 16
    ragged: bool  # some steps hold tokens that are not theirs
    segments: bool  # a chunk may hold several segments
    packed: bool  # these are sequences, and tokens behind the last are nobody's
    tables: bool  # packed: steps come from tables, one sequence each
    state_v_first: bool
    gate: str
    lower_bound: float | None
    l2norm: bool
    beta: str
    scale: float
    layout: str = "tokens"  # of blocks of tokens, see `heads`
    strided: bool = True  # heads are read by strided loads; the TPU interpreter knows none
    centred: bool = False  # pairs inside runs of 8 are referred to the run's middle, with gates that are not below `gate.STRONGEST`

    @property
    def group(self) -> int:
        """Heads whose [C, C] matrices lie side by side in 128 lanes."""
        return 2 if self.C == 64 and self.heads % 2 == 0 else 1

    @property
    def base_2(self) -> bool:
        """Whether the kernels for chunks hold this gate in base 2: where they compute it, and bfloat16 operands follow."""
        return self.gate != "log_decay" and self.operand == "bfloat16"

    @property
    def blocks(self) -> int:
        return self.C // BLOCK

    @property
    def pieces(self) -> int:
        """bfloat16 pieces in which sums of float32 take their terms: 3 hold all 24 bits."""
        return 3 if self.operand == "float32" else 2

    @property
    def levels(self) -> tuple[int, ...]:
        """Run lengths inside a block at which pairs of tokens part, where each is a product of its own; none if the gate is bounded."""
        return () if self.bounded else (8,) if self.centred else (8, 4, 2, 1)

    @property
    def summed_levels(self) -> tuple[int, ...]:
        """Levels whose exponents are sums of more than one gate."""
        return tuple(s for s in self.levels if s > 1)


def kernel_dtype(problem: Problem) -> str:
    """TPUs have no float16 arithmetic: such inputs are widened before the kernels."""
    return "float32" if problem.dtype == "float16" else problem.dtype


def packed_with_states(problem: Problem) -> bool:
    """Whether sequences of a packed call have states of their own, so that each needs its own steps."""
    o = problem.options
    return problem.varlen == "cu_seqlens" and (problem.has_initial_state or o.output_final_state or o.return_intermediate_states)


def steps_hold_sequences(problem: Problem) -> bool:
    """Whether a packed call with states can do with a step per chunk (`packed`): nobody asks for the states between."""
    return packed_with_states(problem) and not problem.needs_grad and not problem.options.return_intermediate_states


def padded(size: int) -> int:
    return -(-size // LANES) * LANES


def chunk_length(problem: Problem, config: Config) -> int:
    """No longer than T needs, but for the block size."""
    o = problem.options
    most = o.chunk_size if o.return_intermediate_states else min(o.chunk_size, config.chunk)
    return min(most, max(BLOCK, 1 << max(problem.T - 1, 0).bit_length()))


def token_layout(problem: Problem, heads: int) -> str:
    """How blocks of [B, T, HV, K] arrays lie, if a step takes so many heads: as XLA keeps the arrays (`heads`)."""
    if problem.HV % 8 == 0 or heads % 8 == 0:
        return "tokens"
    if problem.HV in (2, 4) and heads == problem.HV:
        whole = padded(problem.K) == padded(problem.V) == LANES and problem.T % (8 // problem.HV) == 0
        return "merged" if whole else "tokens"
    return "heads"


def make_tile(problem: Problem, config: Config, tokens: int | None = None) -> Tile:
    """`tokens`: per grid step; the chunk length if None."""
    o = problem.options
    C = chunk_length(problem, config) if tokens is None else tokens
    dtype = kernel_dtype(problem)
    narrow = dtype == "bfloat16"
    bounded = narrow and o.lower_bound is not None and -o.lower_bound * BLOCK <= 80
    tables = problem.varlen == "cu_seqlens" if tokens is not None else packed_with_states(problem) and not steps_hold_sequences(problem)
    return Tile(
        C=C, K=padded(problem.K), V=padded(problem.V), heads=config.heads, dtype=dtype,
        operand="bfloat16" if narrow else "float32",
        bounded=bounded,
        ragged=tables or problem.T % C != 0, segments=bool(problem.varlen) and not tables,
        packed=problem.varlen == "cu_seqlens" and not tables, tables=tables,
        state_v_first=o.state_v_first, gate=o.gate, lower_bound=o.lower_bound, l2norm=o.l2norm, beta=o.beta, scale=o.scale,
        layout=token_layout(problem, config.heads) if tokens is None else "tokens", strided=not config.interpret,
        centred=narrow and not bounded,
    )  # fmt: skip
