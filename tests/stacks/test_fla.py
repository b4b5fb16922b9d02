"""kdakit as a backend of flash-linear-attention, on a CPU: which calls are taken, which go on, and that nothing happens unasked."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import kdakit
from kdakit import stacks
from kdakit.stacks import counts

pytest.importorskip("fla", reason="needs flash-linear-attention")
SOURCE = str(Path(kdakit.__file__).parent.parent)


def alone(code: str, **environment: str) -> str:
    """What `code` prints in a process of its own."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, *sys.path])} | environment
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.fixture
def enabled():
    kdakit.enable("fla")
    counts.reset()
    yield
    kdakit.disable("fla")
    counts.reset()


def inputs(T=37, H=2, K=16, V=8, **options):
    torch.manual_seed(0)
    return dict(
        q=torch.randn(1, T, H, K), k=torch.randn(1, T, H, K), v=torch.randn(1, T, H, V), g=torch.randn(1, T, H, K),
        beta=torch.rand(1, T, H), A_log=torch.randn(H), dt_bias=torch.randn(H * K), use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True, output_final_state=True,
    ) | options  # fmt: skip


def test_calls_are_taken(enabled):
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.kda.gate import fused_kda_gate

    from kdakit.torch import chunk_kda as ours

    x = inputs()
    x["q"].requires_grad_()
    (o, final), (want, want_final) = chunk_kda(**x), ours(**x)
    assert torch.equal(o, want) and torch.equal(final, want_final)
    assert torch.equal(torch.autograd.grad(o.sum(), x["q"])[0], torch.autograd.grad(want.sum(), x["q"])[0])
    o, final = fused_recurrent_kda(**x)
    assert not o.requires_grad
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    assert fused_kda_gate(x["g"], x["A_log"], x["dt_bias"]).max() < 0
    taken = stacks.report()["fla"]["taken"]
    assert taken == {"chunk_kda": 1, "fused_recurrent_kda": 1, "fused_kda_gate": 1}


def test_positions_are_those_of_fla(enabled):
    """FLA's 15th argument is disable_recompute, ours A_log."""
    from fla.ops.kda import chunk_kda

    x = inputs(use_gate_in_kernel=False)
    tensors = x["q"], x["k"], x["v"], -x["g"].abs(), x["beta"]
    o, final = chunk_kda(*tensors, 0.5, None, True, True, False, False, False, False, None, True, unknown="ignored, as FLA does")
    want, want_final = kdakit_call(*tensors, scale=0.5, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o, want) and torch.equal(final, want_final)


def kdakit_call(*args, **named):
    from kdakit.torch import chunk_kda

    return chunk_kda(*args, **named)


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (dict(chunk_size=16), ValueError, "FLA refuses chunk_size=16"),
        (dict(allow_neg_eigval=True), ValueError, "allow_neg_eigval=True requires"),
        (dict(return_intermediate_states=True), Exception, "inference mode"),
        (dict(beta=torch.rand(1, 37, 3)), Exception, "beta must be"),
    ],
)
def test_what_fla_refuses_goes_to_fla(enabled, change, error, reason):
    from fla.ops.kda import chunk_kda

    with pytest.raises(error):
        chunk_kda(**inputs(**change))
    (passed,) = stacks.report()["fla"]["passed on"]
    assert reason in passed


def test_pools_and_context_parallel_calls_go_to_fla(enabled):
    from kdakit.stacks import fla as adapter

    x = inputs()
    assert "context parallel" in adapter._chunk_refusal(**x, cp_context=object())
    assert "pools" in adapter._recurrent_refusal(**x, ssm_state_indices=torch.zeros(1, dtype=torch.int32))
    assert adapter._recurrent_refusal(**x | dict(beta=torch.rand(1, 37, 2, 8))) == "beta per value channel is FLA's alone"


def test_switches_and_counts_that_survive_their_process(tmp_path):
    """On a CPU FLA itself has nothing: a call that goes to it fails."""
    code = (
        "import kdakit.fla, torch, json, os\n"
        "from fla.ops.kda import chunk_kda\n"
        "from fla.ops.kda.gate import fused_kda_gate\n"
        "x = [torch.rand(1, 8, 1, 16) for _ in range(3)]\n"
        "def call():\n"
        "    try: chunk_kda(*x, -x[0], x[0][..., 0])\n"
        "    except Exception: return 'fla'\n"
        "    return 'kdakit'\n"
        "found = [call()]; kdakit.disable('fla'); found.append(call()); kdakit.enable('fla'); found.append(call())\n"
        "fused_kda_gate(torch.ones(1, 2, 1, 4), torch.zeros(1))\n"
        "os.environ['KDAKIT_FLA'] = '0'; found.append(call())\n"
        "print(json.dumps(found))"
    )
    file = tmp_path / "counts.json"
    assert json.loads(alone(code, KDAKIT_COUNTS=str(file))) == ["kdakit", "fla", "kdakit", "fla"]
    assert json.loads(file.read_text())["fla"]["taken"] == {"chunk_kda": 2, "fused_kda_gate": 1}


def test_nothing_happens_unasked():
    """Installing kdakit, importing it and calling its kernels leave FLA and Transformers as they are."""
    code = (
        "import sys, kdakit, kdakit.torch, torch\n"
        "x = [torch.rand(1, 8, 1, 16) for _ in range(3)]\n"
        "kdakit.torch.chunk_kda(*x, -x[0], x[0][..., 0])\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('fla', 'transformers', 'vllm', 'sglang')]\n"
        "import fla.ops.kda.chunk as chunk, fla.backends as backends\n"
        "names = [n for r in (*backends._function_registries.values(), *backends._operation_registries.values()) for n in r._backends]\n"
        "assert 'kdakit' not in names, names\n"
        "assert not any(m.startswith('kdakit.stacks') for m in sys.modules)\n"
    )
    alone(code)


def test_the_registry_of_fla_05(tmp_path):
    """FLA 0.5.2 from its wheel, in a process of its own."""
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        pytest.skip("FLA 0.5.2 itself does not import with Triton 3.9: it tunes one kernel by an argument that the kernel does not have")
    wheels = [Path(p) for p in os.environ.get("KDAKIT_TEST_WHEELS", "").split(os.pathsep) if p]
    found = [w for folder in wheels for w in folder.glob("fla_core-0.5*.whl")]
    if not found:
        pytest.skip("needs fla_core-0.5's wheel in a folder of KDAKIT_TEST_WHEELS (pip download --no-deps fla-core==0.5.2)")
    zipfile.ZipFile(found[0]).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import kdakit.fla, fla, torch; from kdakit import stacks\n"
        "assert fla.__version__.startswith('0.5'), fla.__version__\n"
        "from fla.ops.kda import chunk_kda\n"
        "x = [torch.rand(1, 8, 1, 16) for _ in range(3)]\n"
        "chunk_kda(*x, -x[0], x[0][..., 0])\n"
        "print(stacks.report()['fla']['taken'])"
    )
    assert alone(code).strip() == "{'chunk_kda': 1}"


def test_unknown_stacks_name_the_nearest():
    with pytest.raises(ValueError, match=r"stack must be one of fla, .*, got 'flaa'; did you mean 'fla'\?"):
        kdakit.enable("flaa")
