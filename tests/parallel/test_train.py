"""`kdakit train --nproc N` makes the losses of one process, whatever the batch is cut into."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_context_torch import launch

from kdakit.cli.main import main

SIZES = {"steps": 4, "batch": 4, "length": 32, "layers": 2, "hidden": 16, "heads": 2, "head-dim": 8, "attention-every": 2, "every": 2}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
TWO, FOUR = ("--nproc", "2"), ("--nproc", "4", "--context", "2")  # a sequence in two slices; and the batch in two parts


def train(folder, *words):
    """Training and held-out losses of a run: in this process, unless it takes several."""
    words = ["train", *SMALL, "--out", str(folder), *words]
    if "--nproc" in words:
        command = [sys.executable, "-m", "kdakit.cli.main", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
    else:
        assert main(words) == 0
    curve = json.loads((folder / "checkpoint.json").read_text())["curve"]
    return [row[name] for row in curve for name in ("loss", "held_out")]


@pytest.mark.parametrize(
    ("framework", "cuts"),
    [("torch", [TWO, FOUR] if FULL else [FOUR]), ("jax", [FOUR if FULL else TWO])],
    ids=["torch", "jax"],
)
def test_many_processes_make_the_losses_of_one(tmp_path, framework, cuts):
    for package in ("safetensors", framework) + (("flax", "optax") if framework == "jax" else ()):
        pytest.importorskip(package)
    alone = train(tmp_path / "alone", "--framework", framework)
    for i, cut in enumerate(cuts):
        assert train(tmp_path / str(i), "--framework", framework, *cut) == pytest.approx(alone, rel=1e-5)


def test_pieces_of_a_batch_over_processes(tmp_path):
    """As one process makes of the whole batch: losses and gradients, where targets count here and not there."""
    pytest.importorskip("torch")
    imports = ("kdakit.models.torch", "kdakit.training.torch", "kdakit.backends.torch_native", "torch._dynamo")
    (ended,) = launch(tmp_path, (Path(__file__).with_name("learner_ranks.py"), 4), imports=imports)
    for rank, (code, err) in enumerate(ended):
        assert code == 0, (rank, err)


def test_pieces_of_a_batch_over_a_mesh():
    """The same in JAX, on four devices."""
    for package in ("flax", "optax"):
        pytest.importorskip(package)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    command = [sys.executable, Path(__file__).with_name("learner_devices.py")]
    done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, timeout=600)
    assert done.returncode == 0


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_pieces_that_cannot_be_cut_are_refused(tmp_path, capsys, framework):
    pytest.importorskip("safetensors"), pytest.importorskip(framework)
    words = ["--nproc", "4", "--context", "2", "--accumulate", "4", "--framework", framework]
    assert main(["train", *SMALL, "--out", str(tmp_path / "out"), *words]) == 2
    assert "each of the 4 pieces of the batch must be a multiple of the 2 parts it is cut into, got 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_batch_that_cannot_be_cut_is_refused(tmp_path, capsys):
    pytest.importorskip("safetensors")
    assert main(["train", *SMALL, "--out", str(tmp_path / "out"), "--nproc", "3"]) == 2
    assert "length must be a multiple of the 3 parts it is cut into, got 32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
