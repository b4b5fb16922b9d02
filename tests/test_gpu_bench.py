"""What `kdakit bench` does on a GPU, as far as a CPU can tell: clocks, rooflines, peers, suites, errors and tuning."""

from __future__ import annotations

import json
import sys
import time
import types
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kdakit import accuracy, reference  # noqa: E402
from kdakit.backends.triton_gpu import config as configs  # noqa: E402
from kdakit.backends.triton_gpu import tiles  # noqa: E402
from kdakit.backends.triton_gpu.tiles.candidates import SEARCHES, candidates  # noqa: E402
from kdakit.cases import CASES, FUSED, SHAPES, Case, Shape  # noqa: E402
from kdakit.cli import (  # noqa: E402
    bench,
)
from kdakit.cli.main import main  # noqa: E402
from kdakit.measure import (  # noqa: E402
    checking,
    contestants,
    errors,
    gpu_results,
    hopper_peers,
    inputs,
    peers,
    plots,
    race,
    records,
    regimes,
    results,
    roofline,
    runners,
    suites,
    timing,
    tuning,
)
from kdakit.measure.choices import UsageError  # noqa: E402
from kdakit.measure.contestants import Job  # noqa: E402
from kdakit.measure.runners import Run  # noqa: E402

CPU = torch.device("cpu")


# clocks


class Clock:
    """A GPU that works one call after the other, 2 ms each; the host waits for nothing."""

    def __init__(self, log):
        self.log, self.now = log, 0.0

    def flush(self):
        self.log.append("flush")

    def mark(self):
        self.now += 1.0
        return self.now

    def between(self, start, end):
        return end - start

    def wait(self):
        self.log.append("wait")


def test_gpu_contestants_take_turns_behind_an_empty_cache():
    log: list[str] = []
    runs = {"a": Run(lambda: log.append("a"), gpu=True), "b": Run(lambda: log.append("b"), gpu=True, calls=4)}
    found = timing.on_gpu(runs, repeat=5, seconds=60, clock=Clock(log))
    turn = ["flush", "a", "flush", "b"]
    assert log == [*turn, "wait", *turn, "wait", *turn * 5, "wait"], "nobody waits between two turns"
    assert found["a"][0] == [1.0] * 5 and found["b"][0] == [0.25] * 5, "a graph of four calls counts a quarter"
    assert len(found["a"][1]) == 5 and all(host >= 0 for host in found["a"][1])


def test_calls_in_a_row_share_the_time():
    """On the host's clock too: of four naps of 5 ms each takes 5 ms."""
    run = Run(lambda: [time.sleep(0.005) for _ in range(4)], calls=4)
    taken = timing.interleaved({"a": run}, repeat=3, seconds=10)["a"]
    assert 5 <= min(taken) < 15
    eager = contestants.prepare("torch_native", Job(Shape(1, 8, 1, 16), "eager"))
    assert eager.calls == runners.EAGER_CALLS and eager()[0].shape == (1, 8, 1, 16)


def test_gpu_repetitions_keep_to_the_budget():
    found = timing.on_gpu({"a": Run(lambda: None, gpu=True)}, repeat=1000, seconds=1e-9, clock=Clock([]))
    assert len(found["a"][0]) == 3


# rooflines


def test_least_work_of_the_shapes_that_are_timed():
    """1282 bytes a token and head, 128 KiB of states a head, 11.5 MFLOP a chunk."""
    job = Job(SHAPES["h96"], "fwd", "bfloat16")
    assert roofline.least_bytes(job) == 8192 * 96 * 1282 + 96 * 2 * 128 * 128 * 4
    assert roofline.least_flops(job) * 64 == 8192 * 96 * 11534336
    packed = Job(SHAPES["varlen96"], "fwd", "bfloat16")
    assert roofline.least_bytes(packed) - roofline.least_bytes(job) == 7 * 96 * 2 * 128 * 128 * 4
    training = replace(job, mode="fwdbwd")
    assert roofline.least_bytes(training) == 8192 * 96 * (1282 + 2308) + 96 * 4 * 128 * 128 * 4
    assert roofline.least_flops(training) == 3 * roofline.least_flops(job)
    decode = Job(Shape(32, 1, 32), "decode", "bfloat16")
    assert roofline.least_bytes(decode) == 32 * 32 * (1282 + 2 * 128 * 128 * 4)
    assert roofline.least_bytes(replace(job, gate="log_decay")) - roofline.least_bytes(job) == 8192 * 96 * 256


def test_a_step_without_states():
    """As a trainer takes it: no initial state, no final one, and neither is counted."""
    job = Job(Shape(1, 64, 2, 16), "train", "float32", states=False, disable_recompute=True)
    options = job.case().call_options
    assert options["disable_recompute"] and not options["output_final_state"] and not job.case().initial_state
    assert roofline.least_bytes(replace(job, states=True)) - roofline.least_bytes(job) == 2 * 4 * 16 * 16 * 4
    rows, missing = race.run(["torch_native", "xla"], job, 1, 1.0, with_errors=True)
    assert not missing and [row["contestant"] for row in rows] == ["torch_native", "xla"]
    for row in rows:
        assert row["disable_recompute"] and row["states"] is False and row["error_o"] < 1e-5 and "error_state" not in row


def test_a_time_means_something_on_a_known_chip_only():
    job = Job(SHAPES["h96"], "fwd", "bfloat16")
    found = roofline.compare(job, 1.0, "NVIDIA H200")
    assert found["floor_ms"] == pytest.approx(1000 * roofline.least_bytes(job) / 4.8e12)
    assert found["floor_share"] == pytest.approx(found["bandwidth_share"])
    assert "floor_ms" not in roofline.compare(job, 1.0, "a chip of tomorrow")
    assert roofline.compare(replace(job, dtype="float32"), 1.0, "NVIDIA H200")["floor_ms"] > found["floor_ms"]


# inputs


@pytest.mark.parametrize("gate", ["bounded", "log_decay"])
def test_inputs_drawn_on_a_device_are_of_the_same_kind(gate):
    case = Job(Shape(1, 40, 3, 16, (30, 10)), "fwd", "bfloat16", gate).case()
    drawn, usual = inputs.drawn(case, "bfloat16", CPU), checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), CPU)
    for name, a, b in zip(drawn._fields, drawn, usual, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or (a.shape, a.dtype) == (b.shape, b.dtype), name
    again = inputs.drawn(case, "bfloat16", CPU)
    assert all(a is None or torch.equal(a, b) for a, b in zip(drawn, again, strict=True)), "every contestant gets the same"
    if gate == "log_decay":
        assert (drawn.g <= 0).all() and (drawn.beta > 0).all() and torch.allclose(drawn.k.float().norm(dim=-1), torch.ones(1), atol=0.01)


def test_a_few_heads_have_the_truth_of_the_whole():
    job = Job(Shape(1, 70, 5, 16), "fwd", "float32")
    case = job.case()
    o, state = inputs.picked_truth(job)
    whole = reference.forward(case.problem("float32"), case.arrays("float32"))
    picked = inputs.picked(whole)
    assert list(inputs.heads(5)) == [0, 2, 4]
    assert accuracy.error(o, picked[0]) < 1e-12 and accuracy.error(state, picked[1]) < 1e-12


def test_bench_holds_results_against_float64(capsys):
    args = ["bench", "--backend", "torch_native", "--shape", "1x64x2x16", "--mode", "fwd", "decode", "--repeat", "1", "--accuracy"]
    assert main(args) == 0
    assert "error of o" in capsys.readouterr().out
    rows, _ = race.run(["torch_native"], Job(Shape(1, 64, 2, 16)), 1, 1.0, with_errors=True)
    assert 0 < rows[0]["error_o"] < 1e-6 and 0 < rows[0]["error_state"] < 1e-6


# peers


@pytest.mark.parametrize(
    "changes, dtype, op, grad, reason",
    [
        ({}, "float32", "chunk", False, "bfloat16, not float32"),
        ({}, "bfloat16", "recurrent", False, "no decode"),
        ({}, "bfloat16", "chunk", True, "no backward"),
        (dict(K=64), "bfloat16", "chunk", False, "K = V = 128"),
        (dict(H=1), "bfloat16", "chunk", False, "grouped"),
        (dict(options=FUSED), "bfloat16", "chunk", False, "bounded gate"),
        (dict(dt_bias=False), "bfloat16", "chunk", False, "dt_bias"),
    ],
)
def test_flash_kda_says_what_it_cannot_do(changes, dtype, op, grad, reason):
    case = replace(SHAPES["h16"].case(), T=64, H=2, HV=2)
    assert peers.flash_kda_refusal(case, "bfloat16") is None
    assert reason in peers.flash_kda_refusal(replace(case, **changes), dtype, op, grad)


def test_flash_kda_gets_what_its_interface_asks_for(monkeypatch):
    """A stand-in with its signature: [N, H, V, K] states, dt_bias [H, K], results in place."""
    from kdakit.torch import chunk_kda

    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None):
        assert dt_bias.shape == (2, 128) and initial_state.is_contiguous() and scale == 128**-0.5
        o, final = chunk_kda(
            q, k, v, g, beta, scale, initial_state, True, A_log=A_log, dt_bias=dt_bias.reshape(-1), lower_bound=lower_bound,
            cu_seqlens=cu_seqlens, state_v_first=True, **FUSED,
        )  # fmt: skip
        out.copy_(o)
        final_state.copy_(final)

    stand_in = types.ModuleType("flash_kda")
    stand_in.fwd, stand_in.__spec__ = fwd, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flash_kda", stand_in)
    case = replace(SHAPES["h16"].case(), T=70, H=2, HV=2, lengths=(30, 40))
    call = peers._flash_kda(case, "bfloat16", "chunk", False, on_gpu=True)
    x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), CPU)
    o, state = call(x)
    want = chunk_kda(**{n: a for n, a in x._asdict().items() if a is not None}, **case.call_options)
    assert torch.equal(o, want[0]) and torch.allclose(state, want[1], rtol=1e-5, atol=1e-5)


def test_untuned_kernels_take_the_first_configuration_that_runs():
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    kept = autotuner.Autotuner._bench

    def run(*args, fits, **options):
        if not fits:
            raise ValueError("out of shared memory")

    hooks = dict(pre_hook=lambda values: None, post_hook=lambda values, exception: None)
    tuner = types.SimpleNamespace(fn=types.SimpleNamespace(run=run), nargs={}, **hooks)
    tries = [types.SimpleNamespace(all_kwargs=lambda fits=fits: {"fits": fits}) for fits in (False, True, True)]
    timings: list[float] = []
    with peers.untuned():
        look = lambda: timings.extend(autotuner.Autotuner._bench(tuner, config=c)[0] for c in tries)
        assert autotuner.Autotuner.check_disk_cache(tuner, ("key",), tries, look) is False
    assert timings == [float("inf"), 0.0, float("inf")] and autotuner.Autotuner._bench is kept


# suites


def suite_record(name, ms):
    entries = suites.SUITES[name]
    one = lambda ms: dict(median_ms=ms, extra_mib=100.0 * ms, flops_per_s=1e12 / ms)
    rows = [dict(entry=e, contestant=c) | one(ms(e, c)) for e in entries for c in entries[e].contestants]
    return dict(kind="suite", settings=dict(suite=name), results=rows, missing=[])


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_aim_can_be_judged(name):
    judged = suites.judge(suite_record(name, lambda entry, contestant: 1.0))
    assert len(judged) == len(suites.AIMS[name]) and all(value == 1.0 for _, _, _, value, _ in judged)
    assert not any(met for _, kind, limit, _, met in judged if kind == "at least" and limit > 1)
    assert all(value is None and met is None for *_, value, met in suites.judge(dict(settings=dict(suite=name), results=[])))


def test_aims_know_which_way_is_better():
    ours = lambda entry, contestant: {"fla": 4.0, "flash_kda": 2.0}.get(contestant, 0.9)
    met = {text: ok for text, _, _, _, ok in suites.judge(suite_record("gpu", ours))}
    assert met["fwd h96: triton_gpu, times as fast as fla"] and met["fwdbwd h96: triton_gpu, peak memory as a share of fla's"]
    assert not met["decode b1: triton_gpu, ms"]
    [(title, header, rows), (_, _, aims)] = gpu_results.suite_tables(suite_record("gpu", ours))
    first = dict(zip(header, rows[0], strict=True))
    assert title == "suite gpu" and (first["x fla"], first["x flash_kda"]) == ("4.44", "2.22")
    assert len(aims) == len(suites.AIMS["gpu"]) and ["no"] in [row[-1:] for row in aims]


@pytest.mark.parametrize(
    "changes, reason", [(dict(gate="bounded"), "log-decays"), (dict(mode="fwdbwd"), "forward alone"), (dict(chunk_size=16), "chunks of 16")]
)
def test_the_prefill_operator_says_what_it_takes(changes, reason):
    with pytest.raises(contestants.Unavailable, match=reason):
        contestants.prepare("cuda_prefill", Job(Shape(1, 64, 1, 64), **dict(gate="log_decay") | changes))


def test_the_prefill_operator_is_timed_like_a_call(monkeypatch):
    """[B, T, H, K] in and out; inside, tensors are turned once."""
    from kdakit.backends.cuda import op

    given = []

    def operator(q, k, v, g, beta, chunk_size, scale, initial_state):
        given.append(q)
        return v, None, None, initial_state

    monkeypatch.setattr(op, "prefill", operator)
    monkeypatch.setattr(contestants.checking, "refusal", lambda *_: None)
    job = Job(Shape(1, 8, 2, 64), gate="log_decay", chunk_size=32)
    run = contestants.prepare("cuda_prefill", job)
    for _ in range(2):
        o, final_state = run()
    assert o.shape == (1, 8, 2, 64) and final_state.shape == (1, 2, 64, 64)
    assert given[0].shape == (1, 2, 8, 64) and given[0].is_contiguous() and given[0] is given[1]


def test_a_suite_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    record = suite_record("gpu", lambda entry, contestant: 1.0) | dict(machine=dict(device="a GPU"), date="today")
    plots.save(record, str(tmp_path / "suite.png"))
    assert (tmp_path / "suite.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="there is a table"):
        plots.save(record | dict(kind="errors"), str(tmp_path / "errors.png"))


@pytest.mark.parametrize("regime", regimes.REGIMES)
def test_regimes_reach_inputs_and_truth(regime):
    """The gates' parameters are the regime's, the rest of the inputs is the same, and the truth is that of these inputs."""
    pytest.importorskip("torch")
    job = Job(Shape(1, 8, 2, 16), "graph", "float32", regime=regime)
    plain, drawn = (inputs.arrays(job.case(), job.dtype, r) for r in ("", regime))
    A_log, dt_bias = regimes.parameters(regime, 2, 16)
    assert (drawn.A_log == A_log).all() and (drawn.dt_bias == dt_bias).all() and (drawn.g == plain.g).all()
    if inputs.gpu() is None:
        o = reference.kda(**{n: x for n, x in drawn._asdict().items() if x is not None}, **job.case().call_options)[0]
        assert np.allclose(inputs.picked_truth(job)[0], o[:, :, [0, 1]])
    decays = -5 / (1 + np.exp(-np.exp(A_log)[:, None] * (dt_bias.reshape(2, 16))))
    assert decays.mean() < -2 if regime != "fla" else decays.mean() > -1


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(K=64), "K = V = 128"),
        (dict(options=FUSED), "no softplus gate"),
        (dict(initial_state=False), "initial"),
        (dict(HV=4), "grouped"),
    ],
)
def test_what_cudnn_does_not_take(changes, reason):
    case = Shape(1, 8, 2).case()
    assert hopper_peers.cudnn_refusal(case, "bfloat16") is None and hopper_peers.cudnn_refusal(case, "bfloat16", grad=True) is None
    assert reason in hopper_peers.cudnn_refusal(replace(case, **changes), "bfloat16")
    assert "decode" in hopper_peers.cudnn_refusal(case, "bfloat16", "recurrent") and "float32" in hopper_peers.cudnn_refusal(
        case, "float32"
    )


def test_peers_that_are_not_installed_say_so(monkeypatch):
    case = Shape(1, 8, 2).case()
    monkeypatch.setattr(peers.checking, "default_device", lambda framework: type("", (), {"type": "cuda"}))
    monkeypatch.setattr(hopper_peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hopper_peers.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    hopper_peers._load_vllm.cache_clear()
    for name, remedy in (("cudnn", "nvidia-cudnn-frontend"), ("cudnn_g32", "nvidia-cudnn-frontend"), ("flash_kda_vllm", "vllm>=0.32")):
        with pytest.raises(peers.Unavailable, match=remedy):
            peers.find(name, case, "bfloat16", "chunk", False)


def test_a_suite_where_nothing_runs_says_why(tmp_path, capsys, monkeypatch):
    if inputs.gpu() is not None:
        pytest.skip("there is a GPU: it would run")
    monkeypatch.setattr(suites, "cannot_run", lambda: None)
    path = tmp_path / "suite.json"
    assert main(["bench", "--suite", "gpu", "--entry", "eager h2", "--repeat", "1", "--json", str(path)]) == 1
    assert "flash_kda did not run forward, call after call, 512 tokens, 2 heads of 128: its kernels need a GPU" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["missing"]) == 6


@pytest.mark.parametrize(
    "words, message",
    [(["--suite", "gup"], "did you mean 'gpu'?"), (["--suite", "gpu", "--entry", "fwd h97"], "fwd h96"), (["--tune"], "needs a GPU")],
)
def test_mistakes_are_named(words, message, capsys):
    if inputs.gpu() is not None and words == ["--tune"]:
        pytest.skip("there is a GPU: it would tune")
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


# errors


def test_errors_of_everybody_on_the_same_inputs(monkeypatch, tmp_path, capsys):
    easy = Case("easy", "random inputs", T=64, K=16, options={"chunk_size": 64})
    monkeypatch.setattr(errors, "CASES", {"easy": easy})

    def find(name, case, dtype, op, grad):
        if name == "flash_kda" and grad:
            raise peers.Unavailable("it has no backward")
        ours = checking.call("torch", "torch_native", case, op)
        return ours if name == "flash_kda" else lambda x: tuple(y * float("nan") for y in ours(x))

    monkeypatch.setattr(peers, "find", find)
    path = tmp_path / "e.json"
    assert main(["bench", "--errors", "--backend", "torch_native", "fla", "flash_kda", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "easy: worst gradient" in out and "not finite" in out
    record = json.loads(path.read_text())
    rows = {r["contestant"]: r for r in record["results"]}
    assert rows["torch_native"]["gradient"] < 1e-5 and set(rows["torch_native"]["gradients"]) >= {"q", "k", "v", "g", "beta"}
    assert rows["fla"]["o"] is None and rows["flash_kda"]["no_gradient"] == "it has no backward" and rows["flash_kda"]["o"] < 1e-5
    assert results.markdown([record]).count("not finite") == 3


def test_errors_over_draws():
    draws = [{"o": 3.0, "final_state": 1.0, "gradient": 9.0, "gradients": {"q": 9.0, "A_log": 1.0}},
             {"o": 4.0, "final_state": 1.0, "gradient": 7.0, "gradients": {"q": 1.0, "A_log": 7.0}}]  # fmt: skip
    got = errors.mean(draws)
    assert got["o"] == pytest.approx(12.5**0.5) and got["gradients"] == pytest.approx({"q": 41**0.5, "A_log": 5.0})
    assert got["gradient"] == got["gradients"]["q"]
    draws[1]["gradients"]["q"] = draws[1]["o"] = None
    assert errors.mean(draws)["gradient"] is None and errors.mean(draws)["o"] is None
    assert errors.mean([{"reason": "no"}] * 2) == {"reason": "no"} and errors.mean(draws[:1]) == draws[0]
    ahead = [{"o": x, "final_state": x, "no_gradient": "forward only"} for x in (3.0, 4.0)]
    assert errors.mean(ahead)["o"] == pytest.approx(12.5**0.5) and errors.mean(ahead)["no_gradient"] == "forward only"


def test_cases_of_errors_are_as_hard_as_they_say():
    """Gates, betas and keys after activation."""
    seen = {}
    for name in ("keys_parallel", "forgets_little", "softplus_huge", "resets"):
        case = replace(errors.CASES[name], T=64)
        seen[name] = reference.activate(case.problem("bfloat16"), case.arrays("bfloat16"), np.float64)
    _, k, _, _, beta = seen["keys_parallel"]
    assert beta.min() > 0.9 and np.einsum("bhk,bhk->bh", k[:, 3], k[:, 40]).min() > 0.9
    assert seen["forgets_little"][3].min() > -0.3 and seen["forgets_little"][3].mean() > -0.01
    assert seen["softplus_huge"][3].min() < -2000 and seen["resets"][3].min() == -3000


# tile sizes


def problems():
    """One of every kind that a row can ask about."""
    model = SHAPES["h16"].case()
    made = {gate: replace(case, T=1).problem("bfloat16") for gate, case in (("bounded", model), ("any", SHAPES["h16"].case(bounded=False)))}
    made["plain"] = CASES["plain"].problem("float32")
    sizes = product(("float32", "bfloat16", "float16"), (16, 32, 64, 128, 256), (16, 128, 256), (1, 2, 40, 400))
    for problem, (dtype, K, V, H) in product(made.values(), sizes):
        yield problem.replace(dtype=dtype, K=K, V=V, H=H, HV=H, N=1)


@pytest.mark.parametrize("chip", sorted(path.stem for path in tiles.FOLDER.glob("*.json")))
def test_every_row_of_a_chip_is_well_formed_and_reached(chip, monkeypatch):
    text = (tiles.FOLDER / f"{chip}.json").read_text()
    table = json.loads(text)
    assert tiles.dump(table) == text and table["chip"] == chip and table["source"]
    known = {f.name for f in fields(configs.Config)}
    reached: dict[str, set[int]] = {kernel: set() for kernel in table["tiles"]}
    for problem in problems():
        config = configs.choose(problem, configs.CHIPS[chip])
        found = configs.facts(problem, configs.CHIPS[chip], config.normed)
        found |= {"K_is": found["K"], "V_is": found["V"]}
        for kernel, rows in table["tiles"].items():
            reached[kernel].add(next(i for i, row in enumerate(rows) if tiles.holds(row["when"], found)))
    for kernel, rows in table["tiles"].items():
        assert rows[-1]["when"] == {} and reached[kernel] == set(range(len(rows))), f"a row of {kernel} is never used: {reached[kernel]}"
        for row in rows:
            assert set(row) <= {"when", "use", "why", "ms", "was"} and set(row["when"]) <= set(tiles.CONDITIONS), row
            assert set(row["use"]) == set(rows[0]["use"]) <= known, row


def test_every_chip_has_tiles_and_unknown_ones_a_fallback():
    problem = next(problems())
    for name, chip in configs.CHIPS.items():
        assert configs.choose(problem, chip).block_v > 0, name
    assert {"sm_80", "sm_89", "sm_90", "sm_100", "gfx942"} <= {path.stem for path in tiles.FOLDER.glob("*.json")}


# tuning


def tuned(measure, verify=lambda job, use: None, kernels=("scan",), jobs=None):
    chip = configs.CHIPS["sm_90"]
    jobs = jobs or [Job(SHAPES["h96"], "fwd", "bfloat16")]
    return tuning.search(jobs, list(kernels), chip, tiles.load("sm_90"), measure, verify)


def narrow_is_fast(job, changes):
    return [{32: 1.0, 64: 2.0}.get(use.get("block_v"), 3.0) + use["scan_stages"] / 100 for use in changes]


def test_the_fastest_right_candidate_becomes_a_row(monkeypatch, tmp_path):
    shipped = json.dumps(tiles.load("sm_90"))
    table, tried = tuned(narrow_is_fast, lambda job, use: "wrong: o" if use == dict(block_v=32, scan_warps=4, scan_stages=2) else None)
    best = table["tiles"]["scan"][0]
    assert best["use"] == dict(block_v=32, scan_warps=4, scan_stages=3), "the very fastest is wrong, so the next one"
    assert best["when"] == dict(dtype="bfloat16", heads="many", K_is=128, V_is=128) and best["ms"] == 1.03 and best["was"] == 3.03
    assert [r["verdict"] for r in tried].count("taken") == 1 and "wrong: o" in [r["verdict"] for r in tried]
    assert json.dumps(tiles.load("sm_90")) == shipped, "the shipped table is left alone"
    (tmp_path / "sm_90.json").write_text(tiles.dump(table))
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    caches = tiles.load, tiles.pick
    [cache.cache_clear() for cache in caches]
    try:
        problem = tuning.problem_of(Job(SHAPES["h96"], "fwd", "bfloat16"))
        chosen = configs.choose(problem, configs.CHIPS["sm_90"])
        assert (chosen.block_v, chosen.scan_stages) == (32, 3)
        assert configs.choose(problem.replace(K=64), configs.CHIPS["sm_90"]).block_v == 128, "other head sizes keep theirs"
    finally:
        [cache.cache_clear() for cache in caches]


def test_a_small_gain_changes_nothing():
    table, tried = tuned(lambda job, changes: [1.0 if i == 0 else 0.985 for i in range(len(changes))])
    assert table["tiles"] == tiles.load("sm_90")["tiles"] and tried[0]["verdict"] == "in use"


def test_what_is_in_use_may_be_wrong():
    table, tried = tuned(narrow_is_fast, lambda job, use: "raised OutOfResources" if use["block_v"] == 128 else None)
    assert table["tiles"]["scan"][0]["use"]["block_v"] == 32 and "was" not in table["tiles"]["scan"][0]
    assert tried[0]["ms"] is None
    nothing, tried = tuned(narrow_is_fast, lambda job, use: "wrong")
    assert nothing["tiles"] == tiles.load("sm_90")["tiles"] and all(r["verdict"] == "wrong" for r in tried)


def test_each_kind_is_tuned_once_and_keeps_what_was_found():
    """The second kernel of a call is timed with what the first has found; a second job of the same kind is not timed again."""
    asked = []

    def measure(job, changes):
        asked.append((job.shape.H, changes[0]))
        return [2.0] + [1.0] * (len(changes) - 1)

    jobs = [Job(Shape(1, 8192, H), "fwdbwd", "bfloat16") for H in (96, 80)]
    table, _ = tuned(measure, kernels=("replay", "reverse"), jobs=jobs)
    assert [H for H, _ in asked] == [96, 96]
    found = table["tiles"]["replay"][0]["use"]
    assert asked[1][1].items() >= found.items()
    assert table["tiles"]["reverse"][0]["when"]["heads"] == "many"


@pytest.mark.parametrize("kernel", SEARCHES)
def test_candidates_fit_and_begin_with_what_is_in_use(kernel):
    problem = tuning.problem_of(Job(Shape(1, 64, 8, 32), SEARCHES[kernel].mode, "bfloat16"))
    config = configs.choose(problem, configs.CHIPS["sm_90"])
    uses = candidates(kernel, problem, config)
    assert uses[0] == {name: getattr(config, name) for name in uses[0]} and uses[0] not in uses[1:]
    assert all(x <= 32 for use in uses[1:] for name, x in use.items() if "block" in name or "slice" in name)
    assert set(uses[0]) == set(tiles.load("sm_90")["tiles"][kernel][-1]["use"]), "a row and a candidate set the same fields"


def test_tuning_is_shown(capsys):
    _, tried = tuned(narrow_is_fast)
    record = records.record("tune", {"chip": "sm_90"}, tried, [])
    bench.show(record)
    out = capsys.readouterr().out
    assert "tile sizes of sm_90" in out and "taken" in out and "in use" in out


@pytest.mark.parametrize("ms, shown", [(0.0374, "37.4 us"), (0.667, "0.667 ms"), (85.63, "85.6 ms"), (3939.3, "3.94 s")])
def test_times_in_units_that_people_read(ms, shown):
    assert plots.duration(ms) == shown


def test_a_chart_has_at_most_six_panels(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    record = suite_record("gpu", lambda entry, contestant: 1.0) | dict(machine=dict(device="a GPU"), date="today")
    figure = plots._bars(plt, record)
    assert sum(panel.get_visible() for panel in figure.axes) == 6
    plt.close(figure)


def test_constants_of_times_are_found_again():
    """Calls that take what other constants say: the fit finds times within 3 %, and leaves rows alone that describe too few calls."""
    from kdakit.backends.cuda import times
    from kdakit.measure import time_fit

    rows = times.load("sm_90")
    calls = [tuning.problem_of(Job(shape, "graph", "bfloat16")) for shape in suites.REGIME_SHAPES.values()]
    mine = times.row_of(calls[0], rows)
    true = mine["use"] | {"prepare": 1.7 * mine["use"]["prepare"], "chain": 0.6 * mine["use"]["chain"]}
    found = time_fit.refit(rows, [(p, times.microseconds(p, true)) for p in calls], times.row_of, times.microseconds)
    use = times.row_of(calls[0], found)["use"]
    assert all(abs(times.microseconds(p, use) / times.microseconds(p, true) - 1) < 0.03 for p in calls)
    assert [new for new, old in zip(found, rows, strict=True) if old is not mine] == [old for old in rows if old is not mine]
    assert json.loads(time_fit.dump({"chip": "sm_90", "source": "", "rows": found}))["rows"] == found
