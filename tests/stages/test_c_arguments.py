"""The C interface against hostile callers, without a GPU: random sizes, strides, pointers and options under UBSan; foreign libraries."""

import shutil
import subprocess
from dataclasses import replace

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


FOREIGN = {
    "empty": "int nothing(void) { return 0; }",
    "partial": "int kda_abi_version(void) { return 1; } const char *kda_last_error(void) { return 0; }",
    "older": "int kda_abi_version(void) { return 0; }" + "".join(f" int {n}(void) {{ return 0; }}" for n in library.FUNCTIONS[1:]),
    "text": None,
}
REASONS = {"empty": "it has no kda_abi_version", "partial": "it has no kda_status_name", "older": "has ABI version 0, this package needs 1",
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
