"""Every TPU kernel lowers to Mosaic for every chip on any machine, within budgets of VMEM, FLOPs and bytes; with libtpu, it compiles."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kdakit.measure import tpu_budget, tpu_schedule
from kdakit.measure.tpu_kernels import CHIPS, Job, function_for, function_of, on_chip, problem_of

jax = pytest.importorskip("jax")
from kdakit.backends.pallas_tpu import tile  # noqa: E402
from kdakit.backends.pallas_tpu.chip import this_chip  # noqa: E402

FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
BASE = Job("training", T=160, H=8)  # heads by strided loads
FEW = replace(BASE, H=2)
# Every kernel and dtype, and whatever else changes the code of a kernel, each once.
JOBS = [
    BASE,
    replace(BASE, dtype="float32", gate="softplus"),
    replace(FEW, gate="softplus"),
    replace(FEW, gate="log_decay", dtype="float32", disable_recompute=True),
    replace(FEW, dtype="float16"),
    replace(FEW, sequences=3),
    replace(FEW, sequences=3, states=True, disable_recompute=True),
    replace(FEW, states=True, K=64, V=128),
    replace(FEW, K=256, HV=4, gate="log_decay"),
    replace(FEW, H=3, chunk_size=32),
    replace(FEW, H=6, kernel="forward"),
    replace(FEW, H=4, sequences=3, states=True),
    replace(FEW, kernel="forward", chunk_size=128),
    replace(BASE, kernel="forward", sequences=3, states=True),
    replace(FEW, kernel="forward", sequences=3, states=True, dtype="float32", gate="softplus", chunk_size=32),
    replace(FEW, kernel="forward", chunk_size=16, dtype="float32"),
    replace(BASE, kernel="step"),
    replace(BASE, kernel="step", dtype="float32"),
    replace(FEW, kernel="step", gate="log_decay", sequences=1),
    replace(FEW, kernel="decode", B=2, states=True, K=20, V=136),
    replace(BASE, kernel="layer_decode", B=2, HV=16),
    replace(BASE, kernel="delta_rule"),
    replace(FEW, kernel="delta_rule", dtype="float32", V=64),
]
OPTIONS = [  # that a Job does not have
    {"state_v_first": True, "beta": "double_sigmoid"},
    {"return_intermediate_states": True, "l2norm": False, "beta": "given"},
]


def lowers(function, arguments, calls: int, chips=CHIPS) -> None:
    """Traced once; lowered under the eyes of each chip."""
    traced = jax.jit(function).trace(*arguments)
    for chip in chips:
        with on_chip(chip):
            assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == calls, chip


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_lowers_for_every_chip(job):
    """Every other chip in turn, unless KDAKIT_FULL=1 (make test-full): the first job, the timed one, for all."""
    chips = list(CHIPS) if job == BASE else in_turn(JOBS.index(job))
    lowers(*function_of(job), calls=2 if job.kernel in ("training", "delta_rule") else 1, chips=chips)


def in_turn(first: int) -> list[str]:
    """Every other chip, as above."""
    return list(CHIPS) if FULL else list(CHIPS)[first % 2 :: 2]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_options_lower_for_every_chip(options):
    arrays, problem = problem_of(replace(FEW, sequences=3, states=True))
    if problem.options.state_v_first != options.get("state_v_first", False):
        arrays = arrays._replace(initial_state=jax.ShapeDtypeStruct(problem.replace(state_v_first=True).state_shape, "float32"))
    lowers(*function_for("training", arrays, problem.replace(**options)), calls=2, chips=in_turn(OPTIONS.index(options)))


def test_segment_ids_lower_for_every_chip():
    arrays, problem = problem_of(FEW)
    arrays = arrays._replace(segment_ids=jax.ShapeDtypeStruct((1, FEW.T), "int32"))
    lowers(*function_for("training", arrays, problem.replace(varlen="segment_ids")), calls=2, chips=in_turn(1))


def test_drafts_lower_for_every_chip():
    """verify, which writes nothing, and commit, both over a pool; a page for each drafted token; verify with a layer around it."""
    from kdakit.backends.pallas_tpu import pool

    arrays, problem = problem_of(replace(FEW, kernel="step", B=2, gate="log_decay"))
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
    more = lambda x: array(2, 4, *x.shape[2:], dtype=x.dtype)
    arrays, problem = arrays._replace(initial_state=None, **{n: more(getattr(arrays, n)) for n in "qkvg"}), problem.replace(T=4)
    arrays = arrays._replace(beta=array(2, 4, 2, dtype="bfloat16"))
    states, row, config, each = array(8, 2, 128, 128), array(2, dtype="int32"), tile.Config(heads=2), array(2, 4, 2, 128)
    drafted = pool.Rows(row, array(2, 4, dtype="int32"))
    lowers(lambda *x: pool.decode(problem, *x, config), (arrays, states, drafted), calls=1, chips=in_turn(0))
    lowers(lambda *x: pool.verify(problem, *x, config), (arrays, states, row), calls=1, chips=in_turn(1))
    lowers(lambda *x: pool.commit(problem, *x, config), (each, each, each, states, row, row), calls=1)
    windows, taps = ({n: array(*lead, 2, 128) for n in "qkv"} for lead in ((8, 3), (4,)))
    layer = lambda windows, taps, gate, weight: pool.Layer(windows, taps, None, gate, weight, 1e-5)
    drafted = lambda arrays, states, row, *around: pool.verify(problem, arrays, states, row, config, layer(*around))
    lowers(drafted, (arrays, states, row, windows, taps, arrays.v, array(128)), calls=1, chips=in_turn(0))


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
    assert budget.steps == 16
    assert minimal_bytes(job, 5) <= budget.hbm_bytes <= 1.05 * minimal_bytes(job, 5)
    assert budget.vmem_bytes <= 12 * 2**20
    # Per head and chunk of 64: state read and write, the solve, the pair products, 10 products of the inverse, the gates' sums.
    per_head = budget.dot_flops / (budget.steps * 32)
    useful = 2 * 64 * 128 * 128 * 3 + 2 * 64 * 64 * 128 * 4 + 2 * 10 * 64**3
    assert useful < per_head < 4 * useful, "zero blocks beside heads that share a matrix cost at most so much"


def test_budget_of_training():
    """Beside its inputs and outputs the backward reads what the forward saved, once: states and matrices, or also r and v_new."""
    flops = {}
    for more in (False, True):
        job = Job("training", T=1024, H=16, disable_recompute=more)  # as many as a step of the backward takes
        forward, backward = tpu_budget.budgets(*function_of(job))
        saved = job.T // 64 * job.H * (128 * 128 + 3 * 64 * 64 + 2 * 64 * 128 * more) * 2
        assert minimal_bytes(job, 5) + saved <= forward.hbm_bytes <= 1.05 * minimal_bytes(job, 5) + saved
        assert minimal_bytes(job, 9) + saved <= backward.hbm_bytes <= 1.06 * minimal_bytes(job, 9) + saved
        assert backward.vmem_bytes <= 16 * 2**20
        flops[more] = backward.dot_flops / (backward.steps * 16)
    # Per head and chunk of 64: 6 products with a state, 8 of or with [64, 64] matrices; besides, the pairs' and the gates' sums.
    useful = 2 * 64 * 128 * 128 * 6 + 2 * 64 * 64 * 128 * 8
    assert useful < flops[False] < 4 * useful
    # No product with the state for r, none with the inverse for v_new, which two heads share, half of it zeros.
    assert flops[False] - flops[True] == 2 * 64 * 128 * 128 + 2 * 2 * 64 * 64 * 128


def test_budgets_of_decode_and_delta_rule():
    """States in and out, once each; chunks' arrays too."""
    (step,) = tpu_budget.budgets(*function_of(Job("step", B=4)))
    states = 4 * 32 * 128 * 128 * 4
    assert 2 * states <= step.hbm_bytes <= 1.05 * 2 * states and step.vmem_bytes <= 9 * 2**20
    assert step.dot_flops == 4 * 32 * 2 * 128 * 48 * 384, "the columns of 5 pieces of 8 heads, three times 128 lanes wide"
    (decode,), (layer,) = (tpu_budget.budgets(*function_of(Job(kernel, B=4))) for kernel in ("decode", "layer_decode"))
    around = 3 * 32 * 128 * 4 * (2 * 4 * 3 + 4) + 4 * 32 * 128 * 2 + 128 * 4  # windows in and out, taps; the output's gate; the norm
    assert decode == step and layer.hbm_bytes == decode.hbm_bytes + around
    forward, backward = tpu_budget.budgets(*function_of(job := Job("delta_rule", T=1024)))
    states = job.T // 64 * job.H * 128 * 128 * 4
    assert forward.hbm_bytes <= 1.1 * (minimal_bytes(job, 4) + states)
    assert backward.hbm_bytes <= 1.1 * (minimal_bytes(job, 7) + 2 * states)
    assert forward.dot_flops == job.T * job.H * 2 * 2 * 128 * 128 and backward.dot_flops == 2 * forward.dot_flops


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_largest_heads_fit(dtype):
    """K = V = 256 in chunks of 128, forward and backward: blocks and scratch leave room for temporaries below the limit."""
    job = Job("training", "log_decay", dtype, T=256, H=8, K=256, chunk_size=128, states=True)
    for chip in ("tpu7x", "v6e") if FULL else ("tpu7x",):  # which has half of the other's
        with on_chip(chip):
            for budget in tpu_budget.budgets(*function_of(job)):
                assert budget.vmem_bytes <= 0.6 * this_chip().vmem_limit, (chip, budget)


def test_no_kernel_asks_for_more_vmem_than_its_chip_has():
    limits = {}
    for chip in CHIPS:
        with on_chip(chip):
            limits[chip] = this_chip().vmem_limit / 2**20
    assert limits == {"v4": 16, "v5e": 100, "v5p": 50, "v6e": 100, "tpu7x": 50} and this_chip().vmem_limit == 50 * 2**20


def test_a_small_vmem_takes_fewer_heads():
    from kdakit.backends.pallas_tpu import default_config

    _, problem = problem_of(Job("training"))
    found = {}
    for chip in CHIPS:
        with on_chip(chip):
            config = default_config(problem, "tpu")
        found[chip] = config.heads, config.of_backward.heads
    assert found == {"v4": (8, 8)} | dict.fromkeys(("v5e", "v5p", "v6e", "tpu7x"), (32, 16))
    assert default_config(problem_of(Job("step"))[1], "cpu").heads == 16


def test_heads_of_a_step():
    """Of the numbers that divide all heads the largest, in multiples of 8 where XLA keeps 8 together, else in pairs."""
    from kdakit.backends.pallas_tpu import heads_of_step

    taken = {HV: heads_of_step(problem_of(Job("forward", H=HV))[1], 32) for HV in (1, 3, 4, 12, 20, 24, 32, 33, 36, 40, 48, 64, 96)}
    assert taken == {1: 1, 3: 3, 4: 4, 12: 12, 20: 20, 24: 24, 32: 32, 33: 11, 36: 18, 40: 8, 48: 24, 64: 32, 96: 32}


def test_both_cores_of_a_device_have_blocks():
    """A v5p's two cores share the parallel axes of a grid: a block of heads for each, unless rows do it."""
    from kdakit.backends.pallas_tpu import heads_of_step

    heads = lambda **job: heads_of_step(problem_of(Job("forward", **job))[1], 32, cores=2)
    assert [heads(), heads(B=2), heads(H=24), heads(H=8), heads(H=12)] == [16, 32, 8, 8, 6]


def test_a_small_vmem_takes_shorter_chunks_of_what_is_large():
    from kdakit.backends.pallas_tpu import default_config

    jobs = {Job("training"): 64, Job("training", dtype="float32"): 32, Job("training", K=256): 32, Job("forward", K=256): 64}
    jobs[Job("forward", K=256, sequences=3, states=True)] = 32
    for job, want in jobs.items():
        _, problem = problem_of(job)
        for chip, length in {"v4": want, "v6e": 64}.items():
            with on_chip(chip):
                made = tile.make_tile(problem, default_config(problem, "tpu"))
            assert length == made.C, (job, chip)
    with on_chip("v4"):  # whoever asks for the states before chunks asks for those of their own length
        problem = problem_of(Job("training", dtype="float32"))[1].replace(return_intermediate_states=True)
        assert tile.make_tile(problem, default_config(problem, "tpu")).C == 64


def test_budget_of_packed_sequences_with_states():
    """As at a fixed length, and each state in and out once: states are no blocks."""
    job = Job("forward", T=1024, sequences=4, states=True)
    (budget,) = tpu_budget.budgets(*function_of(job))
    states = 2 * 4 * 32 * 128 * 128 * 4
    assert budget.steps == 16 and minimal_bytes(job, 5) + states <= budget.hbm_bytes <= 1.05 * minimal_bytes(job, 5) + states
    assert budget.vmem_bytes <= 20 * 2**20


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
    for job in (BASE, replace(BASE, kernel="step"), replace(BASE, kernel="delta_rule")):
        found = tpu_schedule.schedule(job, chip)
        assert "reason" not in found, found["reason"]
        assert all(kernel["bundles_per_step"] > 0 for kernel in found["kernels"])
