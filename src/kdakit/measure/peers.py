"""Other implementations to measure against, where they are installed.

    fla         flash-linear-attention: on a GPU its Triton kernels, elsewhere its readable references
    flash_kda   FlashKDA: a CUTLASS forward for Hopper and newer
    cudnn, cudnn_g32, flash_kda_vllm        see hopper_peers.py

`find` gives one as a function with the signature of `kdakit.torch`'s calls, or raises Unavailable with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from kdakit.cases import Case
from kdakit.measure import checking, hopper_peers
from kdakit.measure.hopper_peers import Absent, Unavailable
from kdakit.problem import Arrays

PEERS = ("fla", "flash_kda", "cudnn", "cudnn_g32", "flash_kda_vllm")


def find(name: str, case: Case, dtype: str, op: str, grad: bool) -> Callable[[Arrays], Any]:
    """call(arrays) -> (o, final_state)."""
    on_gpu = checking.default_device("torch").type == "cuda"
    if name == "flash_kda":
        return _flash_kda(case, dtype, op, grad, on_gpu)
    if name in ("cudnn", "cudnn_g32"):
        return _hopper(hopper_peers.cudnn_refusal(case, dtype, op, grad), on_gpu, lambda: hopper_peers.cudnn(case, name == "cudnn_g32"))
    if name == "flash_kda_vllm":
        return _hopper(flash_kda_refusal(case, dtype, op, grad), on_gpu, lambda: hopper_peers.flash_kda_vllm(case))
    return _fla_kernels(case, op) if on_gpu else _fla_references(case, op)


def _hopper(reason: str | None, on_gpu: bool, make: Callable[[], Callable[[Arrays], Any]]) -> Callable[[Arrays], Any]:
    if reason is not None or not on_gpu:
        raise Unavailable(reason or "its kernels need a GPU")
    return make()


def versions() -> dict[str, str]:
    """Of the peers that have been imported, installed or not."""
    found = {"fla-core": sys.modules.get("fla"), "flash_kda": sys.modules.get("flash_kda")}
    return {
        name: getattr(module, "__version__", "unversioned") for name, module in found.items() if module is not None
    } | hopper_peers.versions()


def load_fla() -> ModuleType:
    """FLA's readable references, loaded from their file: importing fla.ops.kda itself needs Triton and a GPU."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise Absent("fla is not installed: pip install fla-core")
    path = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    if not path.is_file():
        raise Absent("the installed fla has no ops/kda/naive.py: pip install 'fla-core>=0.5'")
    spec = importlib.util.spec_from_file_location("fla_kda_naive", path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as problem:
        raise Absent(f"its naive.py cannot be imported: {problem}") from problem
    return module


def _fla_references(case: Case, op: str):
    """naive_chunk_kda with autograd; naive_recurrent_kda for decode."""
    module = load_fla()
    if case.options.get("use_gate_in_kernel"):
        raise Unavailable("its references take log-decays: use --gate log_decay")
    if case.lengths:
        raise Unavailable("its references take no packed sequences")
    if op == "chunk" and case.T % 64:
        raise Unavailable(f"naive_chunk_kda needs T to be a multiple of 64, got {case.T}")
    reference = module.naive_recurrent_kda if op == "recurrent" else module.naive_chunk_kda

    def call(x: Arrays):
        return reference(x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True)

    return call


def _fla_kernels(case: Case, op: str):
    """fla.ops.kda. Its first call tunes itself: minutes, unless Triton's cache holds the result."""
    if importlib.util.find_spec("fla") is None:
        raise Absent("fla is not installed: pip install fla-core")
    os.environ.setdefault("FLA_FLASH_KDA", "0")  # else it hands calls to FlashKDA, which is a contestant of its own
    try:
        kernels = importlib.import_module("fla.ops.kda")
    except ImportError as problem:
        raise Absent(f"fla.ops.kda cannot be imported: {problem}") from problem
    function = getattr(kernels, checking.CALLS[op])
    takes = {*inspect.signature(function).parameters, "A_log", "dt_bias"} | ({"chunk_size"} if op == "chunk" else set())
    options = {n: x for n, x in case.call_options.items() if n in takes}

    def call(x: Arrays):
        return function(**{n: a for n, a in x._asdict().items() if a is not None}, **options)

    return call


def _flash_kda(case: Case, dtype: str, op: str, grad: bool, on_gpu: bool):
    """flash_kda.fwd, whose states are [N, H, V, K]; the initial ones are turned before anything is timed."""
    reason = flash_kda_refusal(case, dtype, op, grad)
    if reason is not None:
        raise Unavailable(reason)
    if not on_gpu:
        raise Unavailable("its kernels need a GPU")
    if importlib.util.find_spec("flash_kda") is None:
        raise Absent("flash_kda is not installed")
    try:
        kernels = importlib.import_module("flash_kda")
    except ImportError as problem:
        raise Absent(f"flash_kda cannot be imported: {problem}") from problem
    import torch

    turned: dict[int, Any] = {}

    def call(x: Arrays):
        if id(x.initial_state) not in turned:
            turned[id(x.initial_state)] = x.initial_state.mT.contiguous()
        initial = turned[id(x.initial_state)]
        o, final = torch.empty_like(x.v), torch.empty_like(initial)
        bias = x.dt_bias.view(case.HV, case.K)
        kernels.fwd(
            x.q, x.k, x.v, x.g, x.beta, case.options.get("scale", case.K**-0.5), o, x.A_log, bias, case.options["lower_bound"],
            initial_state=initial, final_state=final, cu_seqlens=x.cu_seqlens,
        )  # fmt: skip
        return o, final.mT

    return call


def flash_kda_refusal(case: Case, dtype: str, op: str = "chunk", grad: bool = False) -> str | None:
    """What FlashKDA's README rules out; None: it can."""
    if op != "chunk":
        return "it has no decode"
    if grad:
        return "it has no backward"
    if dtype != "bfloat16":
        return f"it takes bfloat16, not {dtype}"
    if (case.K, case.V) != (128, 128) or case.H != case.HV:
        return f"it takes K = V = 128 and no grouped heads, got K = {case.K}, V = {case.V}, {case.HV} value heads of {case.H}"
    o = case.options
    inside = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
    if not all(o.get(n) for n in inside) or o.get("lower_bound") is None:
        return "it takes raw inputs with a bounded gate: use --gate bounded"
    if o.get("allow_neg_eigval") or o.get("state_v_first") or not (case.A_log and case.dt_bias and case.initial_state):
        return "it takes beta below 1, A_log, dt_bias and [K, V] states as its other contestants do"
    return None


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Triton kernels of others take the first of their configurations that runs, instead of minutes to find the fastest.

    Triton's cache on disk is left alone. For errors, which do not depend on the speed; a process that times must not use it.
    """
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner

    look_up, bench, failed = Autotuner.check_disk_cache, Autotuner._bench, [float("inf")] * 3
    done: set[int] = set()

    def without_disk(self, key, configs, benchmark):
        done.discard(id(self))
        benchmark()
        return False

    def first_that_runs(self, *args, config, **options):
        if id(self) in done:
            return failed
        values = {**self.nargs, **options, **config.all_kwargs()}
        self.pre_hook(values)
        try:
            self.fn.run(*args, **options, **config.all_kwargs())
        except Exception:
            return failed
        self.post_hook(values, exception=None)
        done.add(id(self))
        return [0.0] * 3

    Autotuner.check_disk_cache, Autotuner._bench = without_disk, first_that_runs
    try:
        yield
    finally:
        Autotuner.check_disk_cache, Autotuner._bench = look_up, bench
