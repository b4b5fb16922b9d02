"""Compile quickly, interpret quickly, compute the same: most of the suite's time would be LLVM optimising XLA programs that run once.

test_jax.py verifies a few cases with the default flags in a process of its own. Set XLA_FLAGS yourself to test with others.
"""

import dataclasses
import gc
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import tempfile
from pathlib import Path

import pytest

from kdakit import accuracy
from kdakit.measure import checking

FLAGS = "--xla_backend_optimization_level=0"
if importlib.util.find_spec("jax") and importlib.metadata.version("jax").startswith("0.10."):  # XLA aborts at a flag that it does not know
    FLAGS += " --xla_cpu_use_fusion_emitters=false"  # compiles twice as fast
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"  # a program stays in one piece, where there is one core to compile it
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # a quarter of the time to lower a TPU kernel; the code is the same
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # a tenth of a compiler's time; the code is the same
os.environ.setdefault("MLIR_DISABLE_MULTITHREADING", "1")  # Triton's compiler, on one core
os.environ.setdefault("KDAKIT_INTERPRETER", "tpu")  # TPU kernels: memory that nobody has written is NaN, an index outside an array an error


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    if os.environ.get("TRITON_INTERPRET") == "1":
        import quick_triton

        quick_triton.hasten()


def pytest_configure(config):
    if "KDAKIT_SESSION" not in os.environ:  # else this is a worker, or a process that a test has started
        folder = tempfile.TemporaryDirectory(prefix="kdakit_session_")
        os.environ["KDAKIT_SESSION"] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.fixture(autouse=True, scope="session")
def one_truth_a_session():
    """The truth of a problem and its plain recurrence's errors, once for all backends and workers: files, by what they are made of."""

    def kept(function):
        def found(*given, **named):
            key = hashlib.sha256(pickle.dumps((function.__name__, given, sorted(named.items())))).hexdigest()
            file = Path(os.environ["KDAKIT_SESSION"]) / key
            if not file.exists():
                part = file.with_suffix(f".{os.getpid()}")
                part.write_bytes(pickle.dumps(function(*given, **named)))
                part.replace(file)
            return pickle.loads(file.read_bytes())

        return found

    checking.expect, accuracy.truths = kept(checking.expect), kept(accuracy.truths)


@pytest.fixture(autouse=True, scope="session")
def quick_verdicts():
    """Comparisons run no more of the plain recurrence than a pass needs; the verdict is the same, see test_random_problems.py."""
    compare = checking.compare

    def quickly(problem, arrays, results, cotangents=None, operand_dtype="float32", expected=None):
        if expected is not None:
            return compare(problem, arrays, results, cotangents, operand_dtype, expected)
        return checking.compare_quickly(problem, arrays, results, cotangents, operand_dtype)

    checking.compare = quickly


@pytest.fixture
def cuda_config(monkeypatch):
    """cuda_config(parts=2, ..): calls of backend `cuda` with these fields of its Config in place of its own choice."""
    from kdakit import torch_operators
    from kdakit.backends import cuda

    choose = cuda.default_config

    def change(**fields):
        monkeypatch.setattr(cuda, "default_config", lambda problem, device: dataclasses.replace(choose(problem, device), **fields))
        torch_operators._plans.clear()

    yield change
    torch_operators._plans.clear()


# They take longest, most of them in processes of their own: begun first, none of them is what the other worker waits for at the end.
LONG = ("test_demo_shows", "test_in_the_interpreter", "test_kernels_compile", "in_its_interpreter", "make_the_losses_of_one",
        "test_the_model_cut", "test_bench_over_ranks", "test_sanitizer", "test_the_default_compiler_flags", "test_kill_9",
        "test_pieces_of_a_batch")  # fmt: skip


def pytest_collection_finish():
    """What is imported by now stays: garbage is looked for in what came later, and less often, which saves a tenth of tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 20)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not any(name in item.name for name in LONG))


@pytest.fixture
def only_shown(monkeypatch):
    """only_shown(problem, ..): these, of any number of sequences, are all that an sm_90 has shown."""
    from kdakit.backends.triton_gpu import config, shown, widened

    def forget():
        shown._missing.cache_clear()
        widened.config_for.cache_clear()

    def only(*problems):
        chip = config.CHIPS["sm_90"]
        crowds = [problem.replace(H=1, HV=1, B=n, N=n) for problem in problems for n in shown.sequences(chip)]
        known = {name: 1 for crowd in crowds for name in shown.forms(crowd, config.choose(crowd, chip))}
        monkeypatch.setattr(shown, "shown", lambda chip: known)
        monkeypatch.setattr(config, "INTERPRETED", False)
        forget()

    yield only
    forget()
