"""The C interface against hostile callers, without a GPU: random sizes, strides, pointers and options under UBSan; foreign libraries."""

import ctypes
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from kdakit import dispatch
from kdakit.backends.cuda import build, library
from kdakit.cases import CASES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ was not found")


def test_random_arguments_under_ubsan(tmp_path):
    """What is accepted fits 64 bits, by 128-bit arithmetic, and is aligned; what is refused says why; nothing is undefined on the way."""
    program = tmp_path / "fuzz"
    source = build.source_folder() / "tests" / "fuzz_arguments.cpp"
    command = [
        "g++",
        "-O1",
        "-std=c++17",
        "-DKDA_EMULATE",
        "-fsanitize=undefined",
        "-fno-sanitize-recover",
        "-o",
        str(program),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find -lubsan" in done.stderr:
        pytest.skip("this g++ has no UBSan")
    assert done.returncode == 0, done.stderr[-3000:]
    for seed in range(3):
        done = subprocess.run([program, "100000", str(seed)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        accepted, refused = (int(x.split()[1]) for x in done.stdout.split(","))
        assert accepted > 5000 and refused > 5000


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The shape checks of the XLA custom call, as a call on the CPU."""
    jax = pytest.importorskip("jax")
    target = tmp_path_factory.mktemp("shapes") / "libshapes.so"
    source = build.source_folder() / "tests" / "xla_shapes.cpp"
    command = ["g++", "-O0", "-std=c++17", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    handler = ctypes.CDLL(str(target)).kdakit_xla_shapes
    jax.ffi.register_ffi_target("kdakit_shapes", jax.ffi.pycapsule(handler), platform="cpu")

    def call(v_first=0, **changes):
        """B2 T3 H2 HV4 K5 V6, or with other shapes of some buffers."""
        given = {
            "q": (2, 3, 2, 5),
            "k": (2, 3, 2, 5),
            "v": (2, 3, 4, 6),
            "g": (2, 3, 4, 5),
            "beta": (2, 3, 4),
            "A_log": (4,),
            "dt_bias": (20,),
            "initial_state": (2, 4, 5, 6),
            "cu_seqlens": (0,),
            "o": (2, 3, 4, 6),
            "final_state": (2, 4, 5, 6),
        }
        given |= changes
        arrays = [np.zeros(shape, np.int32 if name == "cu_seqlens" else np.float32) for name, shape in given.items()]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[9:]]
        return jax.block_until_ready(jax.ffi.ffi_call("kdakit_shapes", results)(*arrays[:9], state_v_first=np.int32(v_first)))

    return call  # fmt: skip


def test_the_custom_call_looks_at_every_shape(shapes):
    """What XLA hands over is what a program says, and nobody else has checked it there."""
    states = {"initial_state": (2, 4, 6, 5), "final_state": (2, 4, 6, 5)}
    packed = {"q": (1, 3, 2, 5), "k": (1, 3, 2, 5), "v": (1, 3, 4, 6), "g": (1, 3, 4, 5), "beta": (1, 3, 4), "o": (1, 3, 4, 6)}
    shapes()
    shapes(A_log=(0,), dt_bias=(0,), initial_state=(0,))
    shapes(v_first=1, **states)
    shapes(cu_seqlens=(3,), **packed)
    wrong = {"k": (2, 3, 4, 5), "v": (2, 2, 4, 6), "g": (2, 3, 2, 5), "beta": (2, 3, 2), "o": (2, 3, 4, 5), "final_state": (1, 4, 5, 6),
             "initial_state": (2, 4, 6, 5), "A_log": (3,), "dt_bias": (4,), "q": (2, 3, 10)}  # fmt: skip
    for name, shape in wrong.items():
        with pytest.raises(Exception, match=f"kdakit: {name} must (be|hold)"):
            shapes(**{name: shape})
    with pytest.raises(Exception, match="kdakit: final_state must be"):
        shapes(cu_seqlens=(2,), **packed)  # one sequence, two states


FOREIGN = {
    "empty": "int nothing(void) { return 0; }",
    "partial": f"int kda_abi_version(void) {{ return {library.ABI_VERSION}; }} const char *kda_last_error(void) {{ return 0; }}",
    "older": "int kda_abi_version(void) { return 0; }" + "".join(f" int {n}(void) {{ return 0; }}" for n in library.FUNCTIONS[1:]),
    "text": None,
}
REASONS = {"empty": "it has no kda_abi_version", "partial": "it has no kda_status_name",
           "older": f"has ABI version 0, this package needs {library.ABI_VERSION}",
           "text": "file too short|invalid ELF header"}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_library_is_a_reason_not_a_crash(kind, tmp_path, monkeypatch):
    target = tmp_path / "libkdakit.so"
    if FOREIGN[kind] is None:
        target.write_text("not a library")
    else:
        subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(target)], input=FOREIGN[kind].encode(), check=True)
    monkeypatch.setenv(library.VARIABLE, str(target))
    reason = library.missing()
    assert reason is not None and any(text in reason for text in REASONS[kind].split("|")), reason
    monkeypatch.setattr(dispatch.load("cuda"), "_old_device", lambda device, hopper: None)
    monkeypatch.setattr(dispatch.load("triton_gpu"), "_unusable", lambda: "is not there")
    problem = replace(CASES["plain"].problem(), dtype="float32")
    with pytest.warns(RuntimeWarning, match="fell back to 'torch_native'"):
        assert dispatch.select("torch", problem, "cuda").__name__.endswith("torch_native")
