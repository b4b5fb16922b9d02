"""Hugging Face Transformers' Kimi-Linear on kdakit against its plain PyTorch path: see kimi_linear.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def report(*given: str) -> dict:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    run = subprocess.run([sys.executable, ROOT / "tests" / "helpers" / "kimi_linear.py", *given], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@needs_transformers
def test_equal_to_the_plain_path():
    found = report("cpu", "float32", "hide-fla")
    calls, total = found.pop("calls"), found.pop("logits sum")
    assert calls["taken"]["chunk_kda"] and calls["taken"]["fused_recurrent_kda"] and not calls["passed on"]
    assert found.pop("greedy tokens") == 0 and found.pop("after disable") == 0
    assert max(found.values()) < 1e-5, found
    if importlib.util.find_spec("fla"):  # there, on a CPU, Transformers alone cannot run
        assert abs(report("cpu", "float32")["logits sum"] - total) < 1e-5 * total


@needs_transformers
def test_switched_off_by_the_environment():
    code = "import kdakit; from kdakit import stacks; kdakit.enable('transformers'); print(stacks.report()['transformers']['enabled'])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "KDAKIT_TRANSFORMERS": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "no: KDAKIT_TRANSFORMERS=0"
