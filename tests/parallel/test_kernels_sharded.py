"""TPU kernels on several devices: interpreted on 8 of the host, and compiled for chips that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdakit.measure import tpu_schedule

pytest.importorskip("jax")
HERE = Path(__file__).parent
HELPERS = os.pathsep.join([str(HERE.parent / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])])
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full


def run(script: str, *words: str, **more: str) -> str:
    environment = os.environ | {"PYTHONPATH": HELPERS, "JAX_PLATFORMS": "cpu", "KDAKIT_INTERPRETER": ""} | more
    done = subprocess.run([sys.executable, HERE / script, *words], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_on_eight_devices():
    """Explicit and Auto axes, shard_map with its checks, decode, tokens, a model; up to 8 devices; each as the truth of the whole call."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    names = ["recurrence", "explicit_types", "auto_types", "manual", "partly_manual", "tokens", "model"]
    run("kernel_devices.py", *names, *["layer"] * FULL, XLA_FLAGS=flags)


@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_compiled_for_four_chips(chip):
    """By libtpu: forward, gradients and decode are kernels on each chip, and nothing but sums of parameters' gradients travels."""
    reason = tpu_schedule.missing()
    if reason:
        pytest.skip(reason)
    found = json.loads(run("kernel_chips.py", chip, ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1").splitlines()[-1])
    assert found.keys() == {"explicit", "auto, packed", "shard_map", "decode"}
    for name, program in found.items():
        assert program["kernels"] >= 1 and not program["exchanges"], (name, program)
