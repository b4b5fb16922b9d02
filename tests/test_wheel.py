"""The wheel works outside the repository: built, installed into an empty environment, README's examples run."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the checkout must not be found


def run(*command, **named) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **named)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel made from it."""
    if importlib.util.find_spec("build") is None or int(importlib.import_module("setuptools").__version__.split(".")[0]) < 77:
        pytest.skip("needs build and setuptools 77 (pip install build 'setuptools>=77')")
    out, tree = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("tree")  # a build leaves files in its tree
    for name in ("src", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, env=CLEAN)
    return out


@pytest.mark.xdist_group("wheel")
def test_the_wheel_is_pure_and_has_everything(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    wanted = ["kdakit/py.typed", "kdakit/backends/triton_gpu/tiles/sm_90.json", "kdakit/backends/cuda/csrc/c_api.cu"]
    wanted += ["kdakit/backends/cuda/csrc/include/kdakit.h", "kdakit/fla.py", "kdakit/stacks/vllm.py"]
    assert not [name for name in wanted if name not in names]
    assert not [name for name in names if name.endswith(".so") or name.startswith("tests/")]
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    for extra in ("torch", "jax", "gpu", "vllm"):
        assert f"Provides-Extra: {extra}\n" in metadata
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = archive.getnames()
    assert any(name.endswith("/csrc/prefill/prefill_f32.cu") for name in inside)


@pytest.mark.xdist_group("wheel")
def test_installed_in_an_empty_environment(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel, env=CLEAN)
    # The frameworks are those of this interpreter: path files in folders that one names are not read, so no editable kdakit is found.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", env=CLEAN).strip()
    (Path(site) / "frameworks.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    examples = run(python, ROOT / "tests" / "helpers" / "readme_examples.py", ROOT / "README.md", cwd=tmp_path, env=CLEAN)
    assert f"examples run with {site}" in examples
    kdakit = tmp_path / "empty" / "bin" / "kdakit"
    assert "kdakit" in run(kdakit, "--version", cwd=tmp_path, env=CLEAN)
    where = "from kdakit.backends.cuda.build import source_folder; print(source_folder())"
    assert run(python, "-c", where, cwd=tmp_path, env=CLEAN).strip().startswith(site)
