"""Every TPU kernel lowers to Mosaic for every chip on any machine, within budgets of VMEM, FLOPs and bytes; with libtpu, it compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdakit.cli import tpu_budget, tpu_schedule
from kdakit.cli.tpu_kernels import CHIPS, Job, function_of, on_chip, problem_of

jax = pytest.importorskip("jax")
from kdakit.backends.pallas_tpu import tile  # noqa: E402
from kdakit.backends.pallas_tpu.launch import VMEM_LIMIT  # noqa: E402

BASE = Job("training", T=160, H=8)
# What else changes the code of a kernel, each once.
VARIANTS = [
    replace(BASE, gate="softplus"),
    replace(BASE, gate="log_decay", dtype="float32"),
    replace(BASE, sequences=3),
    replace(BASE, sequences=3, states=True),
    replace(BASE, states=True, K=64, V=128),
    replace(BASE, K=256, HV=16, gate="log_decay"),
    replace(BASE, H=3, chunk_size=32),
    replace(BASE, kernel="forward", chunk_size=128),
    replace(BASE, kernel="forward", chunk_size=16),
    replace(BASE, kernel="step", dtype="float32"),
    replace(BASE, kernel="step", gate="log_decay", sequences=1),
]


def lower(job: Job, chip: str) -> str:
    function, arguments = function_of(job)
    with on_chip(chip):
        return jax.export.export(jax.jit(function), platforms=["tpu"])(*arguments).mlir_module()


@pytest.mark.parametrize("chip", CHIPS)
def test_lowers_for_every_chip(chip):
    for job in (BASE, replace(BASE, kernel="step")):
        assert lower(job, chip).count("tpu_custom_call") == (2 if job.kernel == "training" else 1)


@pytest.mark.parametrize("job", VARIANTS, ids=str)
def test_every_variant_lowers(job):
    assert "tpu_custom_call" in lower(job, "v5e")


def test_a_primitive_that_mosaic_lacks_is_refused():
    """The lowering above would notice: it knows no sort."""
    from jax.experimental import pallas as pl

    def kernel(x, o):
        o[...] = jax.numpy.sort(x[...], axis=0)

    x = jax.ShapeDtypeStruct((8, 128), jax.numpy.float32)
    with on_chip("v5e"), pytest.raises(Exception, match=r"(?i)not implemented|unimplemented|lowering"):
        jax.export.export(jax.jit(lambda x: pl.pallas_call(kernel, out_shape=x)(x)), platforms=["tpu"])(x)


def minimal_bytes(job: Job, tensors: int) -> int:
    return tensors * job.B * job.T * job.H * job.K * 2


def test_budget_of_the_forward():
    """q, k, v, g in and o out, once each; beta beside them; nothing else but constants."""
    job = Job("forward", T=1024)
    (budget,) = tpu_budget.budgets(*function_of(job))
    assert budget.steps == 2 * 16
    assert minimal_bytes(job, 5) <= budget.hbm_bytes <= 1.05 * minimal_bytes(job, 5)
    assert budget.vmem_bytes <= 7 * 2**20
    # Per head and chunk of 64: state read and write, the solve, the pair products, 10 products of the inverse, the gates' sums.
    per_head = budget.dot_flops / (budget.steps * 16)
    useful = 2 * 64 * 128 * 128 * 3 + 2 * 64 * 64 * 128 * 4 + 2 * 10 * 64**3
    assert useful < per_head < 4 * useful, "zero blocks beside heads that share a matrix cost at most so much"


def test_budget_of_training():
    job = Job("training", T=1024)
    forward, backward = tpu_budget.budgets(*function_of(job))
    saved = job.T // 64 * job.H * (128 * 128 + 3 * 64 * 64) * 2
    assert forward.hbm_bytes <= 1.05 * minimal_bytes(job, 5) + saved
    assert backward.hbm_bytes <= 1.06 * minimal_bytes(job, 9) + saved
    assert backward.vmem_bytes <= 16 * 2**20


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_largest_heads_fit(dtype):
    """K = V = 256 in chunks of 128, forward and backward: blocks and scratch leave room for temporaries below the limit."""
    job = Job("training", "log_decay", dtype, T=256, H=8, K=256, chunk_size=128, states=True)
    for budget in tpu_budget.budgets(*function_of(job)):
        assert budget.vmem_bytes <= VMEM_LIMIT // 2, budget


def test_heads_share_matrices_only_where_they_fill_lanes():
    _, problem = problem_of(BASE)
    made = {C: tile.make_tile(problem.replace(chunk_size=C), tile.Config(heads=8)) for C in (16, 32, 64, 128)}
    assert {C: t.group for C, t in made.items()} == {16: 1, 32: 1, 64: 2, 128: 1}
    assert made[64].bounded and not tile.make_tile(problem.replace(dtype="float32"), tile.Config(heads=8)).bounded


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_with_libtpu(chip):
    reason = tpu_schedule.missing()
    if reason:
        pytest.skip(reason)
    for job in (BASE, replace(BASE, kernel="step")):
        found = tpu_schedule.schedule(job, chip)
        assert "reason" not in found, found["reason"]
        assert all(kernel["bundles_per_step"] > 0 for kernel in found["kernels"])
