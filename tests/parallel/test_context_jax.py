"""Context parallel calls on 8 host devices equal the uncut truth, gradients included; sequences may begin and end anywhere."""

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import not_finite
import numpy as np
import pytest

from kdakit.cases import CASES, SEGMENT_CASES
from kdakit.measure import checking

FLAGS = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
EVERY_CASE = CASES | SEGMENT_CASES
DEVICES = Path(__file__).parent / "devices.py"
HELPERS = os.pathsep.join([str(DEVICES.parents[1] / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])])
FULL = os.environ.get("KDAKIT_FULL") == "1"  # make test-full
CHOSEN = [  # every other one in float32; each a program to compile
    ("no_final", 2), (next(iter(SEGMENT_CASES)), 4), ("varlen_many", 8), ("grouped", 5), ("varlen_fused", 7),
    *([("v_first", 4), ("plain", 1), ("gate_huge", 5), ("lower_bound", 7), ("tall", 7)] if FULL else []),  # 7 divides no T
]  # fmt: skip
UNEVEN = [("varlen_fused", 8), (next(iter(SEGMENT_CASES)), 6)]
UNEVEN += [("plain", 4), ("lower_bound", 3), ("varlen_many", 5)] if FULL else []


def make_jobs():
    rng = np.random.default_rng(11)
    jobs = [{"case": name, "size": size, "dtype": ("float64", "float32")[i % 2]} for i, (name, size) in enumerate(CHOSEN)]
    T, N = CASES["varlen_many"].T, len(CASES["varlen_many"].lengths)
    for _ in range(12):
        cuts = np.sort(rng.choice(T + 1, size=N - 1))
        jobs.append({"case": "varlen_many", "size": 8, "dtype": "float64", "lengths": np.diff([0, *cuts, T]).tolist()})
    for _ in range(4):  # with padding behind the last sequence
        cuts = np.sort(rng.choice(T + 1, size=N))
        jobs.append({"case": "varlen_many", "size": 8, "dtype": "float64", "lengths": np.diff([0, *cuts]).tolist()})
    for name, size in UNEVEN:
        for _ in range(3):
            cuts = np.sort(rng.integers(0, EVERY_CASE[name].T + 1, size - 1))
            slices = np.diff([0, *cuts, EVERY_CASE[name].T]).tolist()
            jobs.append({"case": name, "size": size, "dtype": "float64", "slices": slices})
    jobs.append({"case": "v_first", "size": 4, "dtype": "bfloat16"})
    return jobs + [{"case": name, "size": 4, "dtype": "float32", "text": True} for name in ("chunk128", "gate_huge")]  # two lengths


def with_lengths(job):
    """The job's case, with its lengths where it has them."""
    case = EVERY_CASE[job["case"]]
    return replace(case, lengths=tuple(job.get("lengths", case.lengths)))


JOBS = make_jobs()
# Sequences that meet on a device between two others, with padding behind them, and segments; programs that are compiled for JOBS anyway.
WHOLE_ONES = [
    {"case": "varlen_many", "size": 8, "dtype": "float64", "lengths": [3, 0, 5, 9, 1, 6, 0, 10, 3, *[0] * 10]},
    {"case": next(iter(SEGMENT_CASES)), "size": 4, "dtype": JOBS[1]["dtype"]},
    {"case": next(iter(SEGMENT_CASES)), "size": 6, "dtype": "float64", "slices": [10, 20, 30, 0, 20, 16]},
]
SPOILED = [job | {"injected": [i, i]} for job in WHOLE_ONES for i in range(len(list(not_finite.injections(with_lengths(job)))))]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("devices")
    (tmp / "jobs").write_text(json.dumps(JOBS + WHOLE_ONES + SPOILED))
    environment = os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": HELPERS}
    done = subprocess.run([sys.executable, DEVICES, tmp / "out", tmp / "jobs"], env=environment, timeout=600)
    assert done.returncode == 0
    return pickle.loads((tmp / "out").read_bytes())


@pytest.fixture(scope="module")
def collected(everything):
    return everything[3:]


@pytest.mark.parametrize("index", range(len(JOBS)), ids=["-".join(map(str, (j["case"], j["dtype"], j["size"]))) for j in JOBS])
def test_equals_one_device(collected, index):
    job = JOBS[index]
    case, dtype = EVERY_CASE[job["case"]], job["dtype"]
    problem, arrays, cotangents = case.problem(dtype, needs_grad=True), case.arrays(dtype), case.cotangents(dtype)
    problem = problem.replace(return_intermediate_states=False)
    if "lengths" in job:
        arrays = arrays._replace(cu_seqlens=np.cumsum([0, *job["lengths"]]))
    for row in checking.compare_quickly(problem, arrays, collected[index], cotangents):
        assert row.ok and (dtype != "float64" or row.error < 1e-10), (job, row)


def test_what_is_not_finite_stays_in_its_sequence(collected):
    """NaN and infinity in every input and cotangent change no bit of another sequence, and a NaN reaches its own on all devices."""
    clean, spoiled = collected[len(JOBS) :][: len(WHOLE_ONES)], collected[len(JOBS) + len(WHOLE_ONES) :]
    wrong = []
    for job, found in zip(SPOILED, spoiled, strict=True):
        whole = {n: x for n, x in job.items() if n != "injected"}
        case, before = with_lengths(job), clean[WHOLE_ONES.index(whole)]
        injected = not_finite.injection(case, job["dtype"], *job["injected"])
        wrong += [f"{whole}, {injected.label}: {x}" for x in not_finite.leaks(case, before, found, injected)]
        wrong += [f"{whole}, {injected.label}: {x}" for x in not_finite.gaps(case, found, injected)]
    assert not wrong, "\n".join(wrong)


def test_only_maps_of_states_travel(collected):
    """The program permutes [K, K] and [K, V] per head between neighbours and gathers nothing, however long the slices."""
    texts = [r["text"] for r in collected if "text" in r]
    shapes = [sorted(re.findall(r"= (\(?f32\[[\d,]*\]).*? collective-permute", text)) for text in texts]
    assert len(texts) == 2 and shapes[0] == shapes[1] and shapes[0]
    for text in texts:
        assert "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize(
    ("index", "slices", "count"), [(0, [4] * 4, 3), (1, [2] * 8, 5), (2, [1, 0, 9, 2, 0, 4], 4)], ids=["even", "short", "uneven"]
)
def test_a_window_reads_over_the_border(everything, index, slices, count):
    """Also where it is wider than two slices: 5 tokens before slices of 2."""
    size, begins = len(slices), np.cumsum([0, *slices])
    before, gradient = everything[index]
    tokens, weights = np.concatenate([np.zeros(count), np.arange(16.0)]), np.arange(1.0, 1 + size * count).reshape(size, count)
    want, d_tokens = [], np.zeros(16 + count)
    for device in range(size):
        begin = begins[device]
        want.append(tokens[begin : begin + count])
        d_tokens[begin : begin + count] += weights[device]
    assert (before == np.concatenate(want)).all()
    assert (gradient == d_tokens[count:]).all()


WHOLE = """
import jax, numpy as np
from kdakit.jax import chunk_kda
from kdakit.parallel.jax import sharded_chunk_kda

x = np.random.default_rng(0).standard_normal((1, 7, 2, 8)).astype(np.float32)
mesh = jax.make_mesh((2, 2), ("context", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
found, want = (
    jax.jit(lambda x, f=f: f(x, x, x, -x**2, x[..., 0]**2, output_final_state=True, use_qk_l2norm_in_kernel=True))(x)
    for f in (sharded_chunk_kda(mesh, context="context", heads="heads"), chunk_kda)
)
for a, b in zip(found, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

# A_log and dt_bias as checkpoints have them; states before chunks, where no tokens are split.
gate = dict(use_gate_in_kernel=True, A_log=np.zeros((1, 1, 2, 1), np.float32), dt_bias=x[:, :1], return_intermediate_states=True)
for a, b in zip(*(f(x, x, x, x, x[..., 0]**2, **gate) for f in (sharded_chunk_kda(mesh, heads="heads"), chunk_kda)), strict=True):
    assert a is b is None or np.abs(np.asarray(a) - b).max() < 1e-5
"""


def test_whole_arrays_on_a_mesh_of_explicit_axes():
    """As jax.make_mesh makes them where nothing else is said: arrays that lie nowhere yet, and tokens that the devices do not divide."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    done = subprocess.run([sys.executable, "-c", WHOLE], env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, timeout=600)
    assert done.returncode == 0


def test_refusals():
    import jax

    from kdakit.parallel import jax as parallel

    mesh, x = jax.make_mesh((1,), ("context",)), np.zeros((1, 4, 1, 2), np.float32)
    with pytest.raises(ValueError, match="heads must be an axis of the mesh, context, got 'model'"):
        parallel.sharded_chunk_kda(mesh, heads="model")
    call, cu = parallel.sharded_chunk_kda(mesh, context="context"), np.array([0, 4])
    for name, value in (("return_intermediate_states", True), ("cu_seqlens_cpu", cu)):
        with pytest.raises(ValueError, match=f"{name}.* across devices"):
            call(x, x, x, x, x[..., 0], cu_seqlens=cu, **{name: value})


def test_the_model_cut_over_context_heads_and_data():
    """Eight devices as 2 x 2 x 2, then 1 x 4 x 2 with packed sequences, in even and uneven slices: as on one device, gradients too."""
    for package in ("flax", "optax"):
        pytest.importorskip(package)
    done = subprocess.run([sys.executable, DEVICES.with_name("model_devices.py")], env=os.environ | {"XLA_FLAGS": FLAGS}, timeout=600)
    assert done.returncode == 0
