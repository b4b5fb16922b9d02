"""What a GPU has shown to be right: a JSON file per chip, written by `kdakit verify --random N --backend triton_gpu --record`.

A *form* is one kernel as it is compiled for a kind of problem: dtype, padded head sizes, kind of gate, and the tile sizes that `config` has
chosen. A problem's forms are those of all its launches; it has been shown where random problems with each of them were right on the chip.
Tile sizes are part of a form's name, so a size that is changed in `tiles` waits until a GPU has shown it. Lengths, numbers of heads,
strides and options that only mask or skip are not part of it: the random problems have them all.

Another version of Triton makes other machine code. What a chip has shown of that is in a further file, `CHIP_triton_VERSION.json`; other
forms of the first file run as well, with a warning, and no form does of which a problem went wrong: its count is 0.
"""

from __future__ import annotations

import importlib
import itertools
import json
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kdakit.backends.triton_gpu import arithmetic, config
from kdakit.backends.triton_gpu.config import Chip, Config, bounded, padded
from kdakit.problem import Options, Problem

FOLDER = Path(__file__).parent
LEAST = 1  # problems that must have been right
WRONG = 10.0  # times the accuracy rule: a form with such an error waits; what is beyond the rule by less is named in the file


def gate_kind(problem: Problem) -> str:
    """given, given_bounded (its caller promises at least lower_bound), softplus or bounded."""
    kind = {"log_decay": "given"}.get(problem.options.gate, problem.options.gate)
    return "given_bounded" if kind == "given" and bounded(problem) else kind


def forms(problem: Problem, c: Config) -> tuple[str, ...]:
    """Names of the kernels that the problem launches."""
    if problem.op == "recurrent":
        of_gate = _name("step", problem, "K", gate_kind(problem))
        of_values = _name("step", problem, "KV", c.step_block_v, f"w{c.step_warps}")
        return of_gate, of_values, *(_chunk_forms(problem, c) if problem.needs_grad else ())
    return _chunk_forms(problem, c)


def _chunk_forms(problem: Problem, c: Config) -> tuple[str, ...]:
    keys, use = "normed" if c.normed else "plain", "keeping" if c.keep else "training" if problem.needs_grad else "alone"
    gate, limit, order = gate_kind(problem), f"r{c.registers}", f"C{c.chunk}/{c.half}/{c.group} {c.precision}"
    whole = "staged" if c.staged else "halves" if c.in_halves else "scan"
    scan = ("parts", c.block_v, c.part_block, c.part_warps) if c.split else (whole, c.block_v)
    states = ("states",) if c.keeps_states else ()
    read = () if (channels := config.read_channels(problem, c)) == padded(problem.K) else (channels,)
    halves = ("halves",) if c.in_halves else ()
    # States in two parts; bfloat16's were shown under one name, whether they have them or not.
    parts = ("two",) if problem.needs_grad and problem.dtype == "float16" and config.exact_decay(problem) else ()
    made = [
        _name("prepare", problem, "K", gate, keys, order, c.solve_dtype, use, f"w{c.prepare_warps}", f"r{c.prepare_registers}", c.vector),
        _name("scan", problem, "KV", keys, order, use, *states, *parts, *read, *scan, f"w{c.scan_warps}", f"s{c.scan_stages}", limit),
    ]
    if not problem.needs_grad:
        return tuple(made)
    slices = (c.slice_k, f"w{c.slice_warps}", limit)
    turned = ("turned",) if config.turned(problem, c) else ()
    joint = ("joint", *(() if c.gradient_warps == 8 else (f"w{c.gradient_warps}",)), f"r{c.gradient_registers}")
    if not c.keep:
        rebuilt = () if c.normed else (*slices[:2], f"r{c.rebuild_registers or c.registers}")
        made += [_name("rebuild", problem, "K", gate, keys, order, c.solve_dtype, *read, *rebuilt)]
    if not c.keeps_states:
        replayed = c.replay_block_v, f"w{c.replay_warps}", f"s{c.replay_stages}"
        made += [_name("replay", problem, "KV", order, c.solve_dtype, *parts, *halves, *read, *replayed, limit)]
    return (
        *made,
        _name("reverse", problem, "KV", order, c.solve_dtype, *parts, *halves, *read, c.reverse_block_v, f"w{c.reverse_warps}",
              f"s{c.reverse_stages}", limit),
        _name("products", problem, "KV", order, c.solve_dtype, "joint" if c.by_token else "split", *turned, *parts, *read, c.slice_v,
              c.product_slice_k, f"w{c.product_warps}", f"s{c.product_stages}", limit),
        _name("gradient", problem, "K", gate, *read, *(joint if c.by_token else (keys, order, *slices))),
    )  # fmt: skip


def _name(kernel: str, problem: Problem, sizes: str, *facts: Any) -> str:
    K, V = f"K{padded(problem.K)}", f"V{padded(problem.V)}"
    return " ".join(map(str, (kernel, problem.dtype, K, *((V,) if "V" in sizes else ()), *facts)))


def missing(problem: Problem, chip: Chip) -> tuple[str, ...]:
    """Those of the problem's forms that the chip has not shown, for any number of sequences and heads: the answer for a model must not
    change with its batch."""
    return _missing(problem.replace(B=1, T=1, N=1, H=1, HV=1, varlen=""), chip)


def sequences(chip: Chip) -> tuple[int, ...]:
    """Numbers of sequences of one head with which `config` chooses whatever it may choose: alone, few, some, many."""
    return 1, 3, chip.processors // 6, chip.processors // 3, chip.processors


def as_compiled_here(problem: Problem, chip: Chip) -> bool:
    """Whether the chip has shown all of the problem's forms as the Triton that is here compiles them."""
    return not _missing(problem.replace(B=1, T=1, N=1, H=1, HV=1, varlen=""), chip, True)


@lru_cache(maxsize=4096)
def _missing(problem: Problem, chip: Chip, as_here: bool = False) -> tuple[str, ...]:
    known = own(chip.name) if as_here else shown(chip.name)
    crowds = [problem.replace(B=n, N=n) for n in sequences(chip)]
    found = dict.fromkeys(name for crowd in crowds for name in forms(crowd, settled(crowd, chip)))
    return tuple(name for name in found if known.get(name, 0) < LEAST)


def settled(problem: Problem, chip: Chip) -> Config:
    """What `config.choose` says, but for two things that the chip has not shown: a scan in parts, there sequences are scanned whole; and
    kernels that keep tiles or states, where these are made again."""
    c, known = keeping_if_shown(config.choose(problem, chip), problem, chip), shown(chip.name)
    if c.split and known and not all(known.get(name, 0) >= LEAST for name in forms(problem, c) if name.startswith("scan")):
        return replace(c, split=False)
    return c


def keeping_if_shown(c: Config, problem: Problem, chip: Chip) -> Config:
    """c, which keeps states, or tiles alone, only if the chip has shown the kernels for that, with any number of sequences and heads: how
    many tensors a forward keeps must not change with its batch."""
    if not c.keep or config.UNCHECKED or config.INTERPRETED:
        return c
    return replace(c, **dict(_keeping(problem.replace(B=1, T=1, N=1, H=1, HV=1, varlen=""), chip)))


KEEPING = (), (("checkpoint", Config.checkpoint),), (("keep", False), ("checkpoint", Config.checkpoint))  # states and tiles, tiles, nothing


@lru_cache(maxsize=4096)
def _keeping(problem: Problem, chip: Chip) -> tuple[tuple[str, int], ...]:
    """What is to be changed in the Config of such a problem, of which all is kept."""

    def known(crowd: Problem, c: Config) -> bool:
        return all(shown(chip.name).get(name, 0) >= LEAST for name in forms(crowd, c) if " keeping " in name)

    crowds = [problem.replace(B=n, N=n) for n in sequences(chip)]
    for changes in KEEPING[:-1]:
        chosen = [(crowd, replace(config.choose(crowd, chip), **dict(changes))) for crowd in crowds]
        if all(known(crowd, c) or known(crowd, replace(c, split=False)) for crowd, c in chosen):
            return changes
    return KEEPING[-1]


def wider(problem: Problem, chip: Chip) -> tuple[int, int]:
    """The least padding, of K and of V, with which the problem's forms have all been shown; (0, 0): there is none."""
    sizes = (16, 32, 64, 128, 256)
    pairs = [(K, V) for K in sizes for V in sizes if padded(problem.K) <= K and padded(problem.V) <= V]
    shown_ones = [pair for pair in pairs if not missing(problem.replace(K=pair[0], V=pair[1]), chip)]
    return min(shown_ones, key=lambda pair: (pair[0] * pair[1], pair[0]), default=(0, 0))


def waits(problem: Problem, chip: Chip) -> str | None:
    """Why the problem is not for this chip yet; None: what it launches has been shown, as it is or with wider heads, or nobody asks."""
    if config.UNCHECKED or config.INTERPRETED:
        return None
    if not shown(chip.name):
        return _without_a_table(problem, chip)
    absent = missing(problem, chip)
    K, V = wider(problem, chip) if absent else (problem.K, problem.V)
    if K:
        if not as_compiled_here(problem.replace(K=K, V=V), chip):
            warn_of_another_compiler(chip.name)
        return None
    call = "gradients" if problem.needs_grad else "a step" if problem.op == "recurrent" else "a forward"
    return (f"{call} like this has not been compared with float64 on {chip.name} ({len(absent)} of its kernels, the first: {absent[0]}); "
            "KDAKIT_UNCHECKED=1 allows it")  # fmt: skip


# Chips whose named cases (`make gpu-cases`) have been compared with float64: enough until they have a table.
COMPARED = ("sm_90",)


def _without_a_table(problem: Problem, chip: Chip) -> str | None:
    """`waits` on a chip that no campaign has been recorded for: gradients, where not even the named cases have been compared, and those of
    a given beta in half precision, whose kernels have changed since they were."""
    if not problem.needs_grad:
        return None
    if chip.name in COMPARED:
        changed = problem.options.beta == "given" and problem.dtype != "float32"
        return (
            f"{problem.dtype} gradients of a given beta wait for a campaign on {chip.name}; KDAKIT_UNCHECKED=1 allows them"
            if changed
            else None
        )
    return f"gradients on {chip.name} have not been compared with float64 on such a GPU; KDAKIT_UNCHECKED=1 allows them"


@lru_cache
def shown(chip: str) -> dict[str, int]:
    """{form: problems that were right} of a chip; empty where none has been tried."""
    return counted(read(FOLDER / f"{chip}.json")) | own(chip)


@lru_cache
def own(chip: str) -> dict[str, int]:
    """Those as the Triton that is here compiles them; all where there is none."""
    return counted(read(file_of(chip, here) if (here := compiler()) else FOLDER / f"{chip}.json"))


@lru_cache
def warn_of_another_compiler(chip: str) -> None:
    """Once: the same kernels, but other machine code, which no chip has shown."""
    if (reason := another_compiler(chip)) is not None:
        advice = "`kdakit verify --backend triton_gpu --random 200` compares them here"
        warnings.warn(f"kdakit: {reason}; {advice}", RuntimeWarning, stacklevel=2)


def another_compiler(chip: str) -> str | None:
    """What is to be said of the Triton that is here; None: the chip has shown what it compiles."""
    known, here = read(FOLDER / f"{chip}.json")["triton"], compiler()
    if not known or not here or alike(here, known):
        return None
    few = f", {len(own(chip))} of {len(shown(chip))} kinds of kernel as this one does" if own(chip) else ""
    return f"kernels have been compared with float64 on {chip} as Triton {', '.join(known)} compiles them, here is Triton {here}{few}"


def compiler() -> str:
    """The version of Triton that is here, under whatever name it was installed; '' without one."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return ""


def alike(version: str, known: list[str]) -> bool:
    """Whether one of them is the same but for its patch."""
    minor = lambda x: x.split(".")[:2]
    return any(minor(version) == minor(x) for x in known)


def file_of(chip: str, version: str, folder: Path | None = None) -> Path:
    """Where it is written what the chip has shown of kernels that this version of Triton compiled."""
    first = (folder or FOLDER) / f"{chip}.json"
    if not first.exists() or alike(version, read(first)["triton"]):
        return first
    return first.parent / f"{chip}_triton_{'.'.join(version.split('.')[:2])}.json"


def read(file: Path) -> dict[str, Any]:
    """A table; an empty one where there is no file."""
    return json.loads(file.read_text()) if file.exists() else {"triton": [], "sources": [], "exceeded": {}, "forms": {}}


def counted(table: dict[str, Any]) -> dict[str, int]:
    """{form: problems that were right} of a table."""
    return {f"{kernel} {rest}": count for kernel, found in table["forms"].items() for rest, count in found.items()}


def dump(chip: str, triton: list[str], sources: list[str], beyond: dict[str, str], counts: dict[str, int]) -> str:
    """A chip's file: a line per problem that exceeded the rule, and per form, by kernel."""
    kernels: dict[str, list[str]] = {}
    for name in sorted(counts):
        kernel, _, rest = name.partition(" ")
        kernels.setdefault(kernel, []).append(f"   {json.dumps(rest)}: {counts[name]}")
    parts = [f'  "{kernel}": {{\n' + ",\n".join(lines) + "\n  }" for kernel, lines in kernels.items()]
    named = ",\n".join(f"  {json.dumps(label)}: {json.dumps(beyond[label])}" for label in sorted(beyond))
    head = [
        f' "chip": {json.dumps(chip)},',
        f' "triton": {json.dumps(triton)},',
        f' "sources": {json.dumps(sources, indent=2)},',
        f' "exceeded": {{\n{named}\n }},',
        ' "forms": {',
    ]
    return "\n".join(["{", *head, ",\n".join(parts), " }", "}"]) + "\n"


def summary(chip: Chip) -> dict[str, str]:
    """{dtype and call: how many kinds of problem (padded K and V, gate, normalised keys) run as they are, with wider heads, or wait}."""
    if not shown(chip.name):
        named = "the named cases have been compared with float64" if chip.name in COMPARED else "gradients wait for KDAKIT_UNCHECKED=1"
        return {"every call": f"no campaign of random problems has been recorded for such a chip; {named}"}
    sizes, told = (16, 32, 64, 128, 256), {}
    for dtype, call in itertools.product(("bfloat16", "float16", "float32"), ("forward", "gradients", "step")):
        kinds = [arithmetic.as_computed(_kind(dtype, call, *of)) for of in itertools.product(sizes, sizes, GATES, (True, False))]
        absent = [kind for kind in kinds if missing(kind, chip)]
        wait = sum(wider(kind, chip) == (0, 0) for kind in absent)
        told[f"{dtype} {call}"] = (
            f"of {len(kinds)} kinds of problem {len(kinds) - len(absent)} as they are, {len(absent) - wait} with wider heads, {wait} wait"
        )
    if (reason := another_compiler(chip.name)) is not None:
        told["compiler"] = reason
    if beyond := read(FOLDER / f"{chip.name}.json")["exceeded"]:
        told["random problems"] = f"{len(beyond)} were beyond the accuracy rule, by less than {WRONG:g} times: {', '.join(beyond.values())}"
    return told


# As a caller asks for them: (gate, lower_bound, safe_gate).
GATES = (("log_decay", None, False), ("log_decay", -5.0, True), ("softplus", None, False), ("bounded", -5.0, False))


def _kind(dtype: str, call: str, K: int, V: int, gate: tuple[str, float | None, bool], l2norm: bool) -> Problem:
    options = Options(scale=K**-0.5, **dict(zip(("gate", "lower_bound", "safe_gate"), gate, strict=True)), l2norm=l2norm)
    return Problem(
        op="recurrent" if call == "step" else "chunk", B=1, T=1, H=1, HV=1, K=K, V=V, N=1, dtype=dtype, gate_dtype=dtype, beta_dtype=dtype,
        state_dtype="float32", varlen="", has_A_log=gate[0] == "softplus", has_dt_bias=False, has_initial_state=False,
        needs_grad=call == "gradients", options=options,
    )  # fmt: skip
