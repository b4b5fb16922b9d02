"""The examples run and do what they say, with short settings."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(p.stem for p in FOLDER.glob("*.py"))


def load(name, *packages):
    for package in packages:
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_in_torch():
    losses = load("train_torch", "torch").main(["--steps", "12"])
    assert losses[-1] < 0.8 * losses[0]
    again = load("train_torch", "torch").main(["--steps", "3", "--checkpoint-activations"])
    assert again == pytest.approx(losses[:3], rel=1e-5)


def test_training_in_jax():
    losses = load("train_jax", "jax", "flax", "optax").main(["--steps", "8", "--layers", "1"])
    assert losses[-1] < 0.9 * losses[0]


def test_packed_training():
    assert load("packed_training", "torch").main(["--steps", "2"]) < 1e-5


@pytest.mark.parametrize(
    "options", [["--slots", "1", "--piece", "100", "--cached", "0"], ["--slots", "4", "--piece", "7", "--cancel", "0.1"]]
)
def test_serving(options, capsys):
    """A soak in short: every answer is the one the request gets alone, and no slot is lost."""
    assert load("serving", "torch").main(["--requests", "25", *options])
    assert "25 of 25 answers are the same; 0 slots lost" in " ".join(capsys.readouterr().out.split())


def test_swapping_fla():
    assert load("swap_fla", "torch").main() < 1e-5


def test_every_example_is_listed_and_tested():
    listed, tests = (FOLDER / "README.md").read_text(), Path(__file__).read_text()
    for name in SCRIPTS:
        assert f"({name}.py)" in listed and f'load("{name}"' in tests
