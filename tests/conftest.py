"""Compile quickly, interpret quickly, compute the same: most of the suite's time would be LLVM optimising XLA programs that run once.

test_jax.py verifies a few cases with the default flags in a process of its own. Set XLA_FLAGS yourself to test with others.
"""

import gc
import hashlib
import importlib.metadata
import importlib.util
import os
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdakit.measure import checking

FLAGS = "--xla_backend_optimization_level=0"
if importlib.util.find_spec("jax") and importlib.metadata.version("jax").startswith("0.10."):  # XLA aborts at a flag that it does not know
    FLAGS += " --xla_cpu_use_fusion_emitters=false"  # compiles twice as fast
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("KDAKIT_INTERPRETER", "tpu")  # TPU kernels: memory that nobody has written is NaN, an index outside an array an error


@pytest.fixture(autouse=True, scope="session")
def one_patch_a_launch():
    """Triton's interpreter replaces the functions of triton.language anew at every call of a jitted helper: a third of its time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # not the interpreter of Triton 3.6
        return
    patch, launched = interpreter._patch_lang, []

    def patch_once(function):
        if launched:
            return interpreter._LangPatchScope()  # nothing changed, nothing to restore
        scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        launched.append(scope.restore)
        scope.restore = lambda: launched.pop()()
        return scope

    interpreter._patch_lang = patch_once


def pytest_configure(config):
    if "KDAKIT_TRUTHS" not in os.environ:  # else this is a worker, or a process that a test has started
        folder = tempfile.TemporaryDirectory(prefix="kdakit_truths_")
        os.environ["KDAKIT_TRUTHS"] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.fixture(autouse=True, scope="session")
def one_truth_a_session():
    """The truth of a problem and its plain recurrence's errors, once for all backends and workers: files, by what they are made of."""
    expect = checking.expect

    def kept(*given, **named):
        key = hashlib.sha256(pickle.dumps((given, sorted(named.items())))).hexdigest()
        file = Path(os.environ["KDAKIT_TRUTHS"]) / key
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(expect(*given, **named)))
            part.replace(file)
        return pickle.loads(file.read_bytes())

    checking.expect = kept


# They take longest, most of them in processes of their own: begun first, none of them is what the other worker waits for at the end.
LONG = ("test_demo_shows", "test_in_the_interpreter", "test_kernels_compile", "in_its_interpreter", "make_the_losses_of_one",
        "test_the_model_cut", "test_bench_over_ranks", "test_sanitizer", "test_the_default_compiler_flags", "test_kill_9")  # fmt: skip


def pytest_collection_finish():
    """What is imported by now stays: garbage is looked for in what came later, and less often, which saves a tenth of tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 20)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not any(name in item.name for name in LONG))
