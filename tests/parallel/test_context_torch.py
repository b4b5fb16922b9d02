"""Context parallel calls as real processes over gloo: every case, cut at random places, equals the uncut truth."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import not_finite
import numpy as np
import pytest

from kdakit.cases import CASES
from kdakit.measure import checking
from kdakit.parallel.exchange import scan_bytes

RANKS = Path(__file__).parent / "ranks.py"
HELPERS = os.pathsep.join([str(RANKS.parents[1] / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])])
SIZES = (1, 2, 3, 4, 8)


def launch(tmp, *jobs, timeout=300, imports=()):
    """Groups of processes: a job is (script, size, argument, ..); for each, the ranks' (exit code, stderr). See forked.py."""
    listed = []
    for i, (script, size, *arguments) in enumerate(jobs):
        (tmp / f"job{i}").mkdir()
        listed.append([str(script), size, str(tmp / f"job{i}"), timeout, *map(str, arguments)])
    (tmp / "forked.json").write_text(json.dumps(listed))
    command = [sys.executable, RANKS.with_name("forked.py"), tmp / "forked.json", "kdakit.parallel.torch", *imports]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": HELPERS})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def random_cuts(rng, T, size):
    """Anywhere, with empty slices among them."""
    return sorted(rng.integers(0, T + 1, size=size - 1).tolist())


SPOILS = len(list(not_finite.injections(CASES["varlen"])))


def make_jobs():
    rng = np.random.default_rng(8)
    jobs = []
    for i, (name, case) in enumerate(CASES.items()):
        for j, dtype in enumerate(("float64", "float32")):
            size = SIZES[(i + 2 * j) % len(SIZES)]
            jobs.append({"size": size, "case": name, "dtype": dtype, "cuts": random_cuts(rng, case.T, size)})
    packed = [name for name, case in CASES.items() if case.lengths]
    for _ in range(20):
        name, size = packed[rng.integers(len(packed))], int(rng.choice(SIZES[1:]))
        jobs.append({"size": size, "case": name, "dtype": "float64", "cuts": random_cuts(rng, CASES[name].T, size)})
    jobs += [jobs[-1], {"size": 4, "case": "plain", "dtype": "bfloat16", "cuts": [10, 40, 90]}]
    return jobs


JOBS = make_jobs()
AGAIN = len(JOBS) - 2
# Packed sequences that meet on a rank between two others: 5 to 37 and 38 to 102 of 137 tokens. First each cut without injection.
CUT = [{"size": n, "case": "varlen", "dtype": "float64", "cuts": cuts} for n, cuts in ((3, [20, 80]), (8, [10, 20, 34, 50, 60, 90, 120]))]
SPOILED = [job | {"injected": [i, i]} for job in CUT for i in range(SPOILS)]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("ranks")
    (tmp / "jobs").write_text(json.dumps(JOBS + CUT + SPOILED))
    (ended,) = launch(
        tmp, (RANKS, max(SIZES), tmp / "out", tmp / "jobs"), imports=("kdakit.backends.torch_native", "kdakit.measure.checking")
    )
    for rank, (code, err) in enumerate(ended):
        assert code == 0, f"rank {rank}: {err}"
    return pickle.loads((tmp / "out").read_bytes())


def joined(everyone):
    """One result from those of the ranks: tokens follow each other, everything else is a sum."""
    tokens = ("o", "q", "k", "v", "g", "beta")
    return {n: np.concatenate([r[n] for r in everyone], 1) if n in tokens else sum(r[n] for r in everyone) for n in everyone[0]}


@pytest.mark.parametrize("index", range(len(JOBS)), ids=["-".join(map(str, (j["case"], j["dtype"], j["size"]))) for j in JOBS])
def test_equals_one_rank(collected, index):
    job = JOBS[index]
    case, dtype = CASES[job["case"]], job["dtype"]
    problem, arrays, cotangents = case.problem(dtype, needs_grad=True), case.arrays(dtype), case.cotangents(dtype)
    problem = problem.replace(return_intermediate_states=False)
    for row in checking.compare_quickly(problem, arrays, joined(collected[index]), cotangents):
        assert row.ok and (dtype != "float64" or row.error < 1e-10), (job, row)


def test_repeats_bit_for_bit(collected):
    assert JOBS[AGAIN] == JOBS[AGAIN - 1]
    for first, second in zip(collected[AGAIN - 1], collected[AGAIN], strict=True):
        assert all((first[name] == second[name]).all() for name in first if name != "sent")


def test_traffic_is_the_formula_and_knows_no_length(collected):
    """Forward and backward each send one map from every rank to the next, and one at every doubling of the distance."""
    for job, everyone in zip(JOBS, collected, strict=False):
        case, n = CASES[job["case"]], job["size"]
        rows, itemsize = (1 if case.lengths else case.B), 8 if job["dtype"] == "float64" else 4
        messages = (n - 1) + sum(n - 1 - d for d in (1, 2, 4) if d < n - 1)
        assert sum(r["sent"] for r in everyone) == 2 * messages * rows * case.HV * case.K * (case.K + case.V) * itemsize
        assert max(r["sent"] for r in everyone) <= 2 * scan_bytes(n, rows, case.HV, case.K, case.V, itemsize)


def test_what_is_not_finite_stays_in_its_sequence(collected):
    """NaN and infinity in every input and cotangent change no bit of another sequence, and a NaN reaches its own on all ranks."""
    clean, spoiled = collected[len(JOBS) :][: len(CUT)], collected[len(JOBS) + len(CUT) :]
    wrong = []
    for job, everyone in zip(SPOILED, spoiled, strict=True):
        case = CASES[job["case"]]
        before, found = joined(clean[CUT.index({n: job[n] for n in CUT[0]})]), joined(everyone)
        assert before.pop("sent") == found.pop("sent")
        injected = not_finite.injection(case, job["dtype"], *job["injected"])
        wrong += [f"{job}, {injected.label}: {x}" for x in not_finite.leaks(case, before, found, injected)]
        wrong += [f"{job}, {injected.label}: {x}" for x in not_finite.gaps(case, found, injected)]
    assert not wrong, "\n".join(wrong)


REFUSAL = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
import kdakit.parallel.torch as parallel
rank, size, store, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
K = 32 if what == "disagree" and rank == 1 else 16
q, v = torch.randn(1, 40, 2, K), torch.randn(1, 40, 2, 16)
g, beta = -torch.rand(1, 40, 2, K), torch.rand(1, 40, 2).to(torch.int64 if what == "refuse" and rank == 1 else torch.float32)
group = dist.new_group(timeout=timedelta(seconds=5))
for turn in range(3):
    if rank == 1 and turn == 1 and what in ("die", "hang"):
        time.sleep(15 if what == "hang" else 0)
        os._exit(9)
    begin = time.time()
    given = None if what == "no_tensor" and rank == 1 else q
    backend = "torch_native" if what == "backend" and rank == 1 else "auto"
    try:
        if what == "dtype":
            parallel.all_tokens(q.half() if rank == 1 else q, group)
        if what == "unreadable":
            cu = torch.tensor([0, 3 * q.shape[1]])
            given, q, v, g, beta, cu = (x.to("meta") if rank == 1 else x for x in (q, q, v, g, beta, cu))
            parallel.chunk_kda(given, q, v, g, beta, group=group, cu_seqlens=cu)
        parallel.chunk_kda(given, q, v, g, beta, group=group, backend=backend)
    except Exception:
        assert time.time() - begin < 10, "raised too late"
        raise
"""


REFUSALS = {
    "disagree": ["K must be the same on every rank of the group, got [16, 32, 16]"] * 3,
    "refuse": ["refused on rank 1", "beta must be one of", "refused on rank 1"],
    "no_tensor": ["refused on rank 1", "q must be a torch.Tensor, got NoneType", "refused on rank 1"],
    "backend": ["options must be the same on every rank"] * 3,
    "dtype": ["dtype must be the same on every rank"] * 3,
    "unreadable": ["refused on rank 1", "meta", "refused on rank 1"],  # by an error of another kind than a check's
    "die": [None, "", None],
    "hang": [None, "", None],
}


@pytest.fixture(scope="module")
def few_ranks(tmp_path_factory):
    """{what they do: their ends}, forked from one process."""
    tmp = tmp_path_factory.mktemp("few")
    (tmp / "refusal.py").write_text(REFUSAL)
    (tmp / "halo.py").write_text(HALO)
    (tmp / "changed.py").write_text(CHANGED)
    jobs = {what: (tmp / "refusal.py", 3, what) for what in REFUSALS} | {"halo": (tmp / "halo.py", 4), "changed": (tmp / "changed.py", 3)}
    return dict(zip(jobs, launch(tmp, *jobs.values(), timeout=120), strict=True))


@pytest.mark.parametrize("what", REFUSALS)
def test_every_rank_raises(few_ranks, what):
    """A rank that disagrees, refuses, dies or hangs in the middle of the others' call: an error on all of them within the timeout."""
    for rank, ((code, err), message) in enumerate(zip(few_ranks[what], REFUSALS[what], strict=True)):
        assert code > 0, (rank, code, err)  # below 0: it had to be killed
        assert message is None or message in err, (rank, err)
        assert message is not None or ("Error" in err and "raised too late" not in err), (rank, err)


HALO = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from kdakit.parallel.torch import previous_tokens
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
torch.manual_seed(0)
cuts = [0, 5, 5, 6, 12]
x, weight, d = torch.randn(2, 12, 3), torch.randn(3, 1, 4), torch.randn(2, 12, 3)
convolve = lambda x: torch.nn.functional.conv1d(x.mT, weight, groups=3).mT
whole = x.clone().requires_grad_()
y = convolve(torch.cat([torch.zeros(2, 3, 3), whole], 1))
(y * d).sum().backward()
mine = slice(cuts[rank], cuts[rank + 1])
part = x[:, mine].clone().requires_grad_()
before = previous_tokens(part, 3)
out = convolve(torch.cat([before, part], 1)) if part.shape[1] else before[:, :0]
(out * d[:, mine]).sum().backward()
torch.testing.assert_close(out, y[:, mine])
torch.testing.assert_close(part.grad, whole.grad[:, mine])
"""


def test_a_convolution_reads_over_the_border(few_ranks):
    """Slices of 5, 0, 1 and 6 tokens, a window of four: outputs and gradients equal those of the whole."""
    for rank, (code, err) in enumerate(few_ranks["halo"]):
        assert code == 0, (rank, err)


CHANGED = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
import kdakit.parallel.torch as parallel
rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
group = [dist.new_group([r]) for r in range(size)][rank]  # a rank alone, which cuts nothing

def check(call, inputs, outputs):
    found = call()
    want = torch.autograd.grad(sum((2 * x[:, 1:]).sin().sum() for x in outputs(found)), inputs, allow_unused=True)
    for x in outputs(found := call()):
        x.mul_(2)
        x[:, 0] = 0
    got = torch.autograd.grad(sum(x.sin().sum() for x in outputs(found)), inputs, allow_unused=True)
    for a, b in zip(want, got, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert not any(x.detach_().requires_grad for x in outputs(call()))
    with torch.no_grad():
        kept = [x.clone() for x in inputs]
        for x in outputs(call()):
            x.detach_().fill_(7)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))

for seed, (K, V, cu, v_first, own) in enumerate([
    (8, 6, None, False, None), (8, 6, None, True, None), (1, 6, None, True, None), (8, 6, [0, 3, 3, 25, 30, 36], False, None),
    (8, 6, [0, 3, 3, 25, 30, 36], True, None), (8, 6, [0, 12, 24, 36], False, None), (8, 6, [0, 5, 12], False, group),
    (8, 6, None, False, group),
]):
    torch.manual_seed(seed)
    q, k, v, g, beta = (torch.randn(1, 12, 2, n) for n in (K, K, V, K, 1))
    x = [a.requires_grad_() for a in (q, k, v, -g.exp(), beta[..., 0].sigmoid())]
    state = torch.randn(1 if cu is None else len(cu) - 1, 2, *((V, K) if v_first else (K, V))).requires_grad_()
    options = dict(group=own, state_v_first=v_first, output_final_state=True, cu_seqlens=None if cu is None else torch.tensor(cu))
    check(lambda: parallel.chunk_kda(*x, initial_state=state, **options), [*x, state], lambda found: found)
x = torch.randn(2, 5, 3).requires_grad_()
check(lambda: parallel.previous_tokens(x, 4), [x], lambda found: [found])
check(lambda: parallel.all_tokens(x), [x], lambda found: [found])
"""


def test_results_may_be_changed_in_place(few_ranks):
    """As those of `kdakit.torch`: they are the caller's, in training too, and may be cut off before the next piece."""
    for rank, (code, err) in enumerate(few_ranks["changed"]):
        assert code == 0, (rank, err)


def test_the_model_cut_over_context_heads_and_data(tmp_path):
    """Eight ranks as 2 x 2 x 2, then 1 x 4 x 2 with packed sequences: loss and every gradient equal those of one process."""
    imports = ("kdakit.backends.triton_gpu", "kdakit.models.torch", "torch._dynamo", "torch.distributed.tensor.parallel")
    imports += ("kdakit.backends.torch_native", "kdakit.parallel.heads", "numpy.testing")
    (ended,) = launch(tmp_path, (RANKS.with_name("model_ranks.py"), 8), imports=imports)
    for rank, (code, err) in enumerate(ended):
        assert code == 0, (rank, err)
