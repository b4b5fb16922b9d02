"""The Triton kernels on a GPU, beyond the contract test: `make test-gpu`. Skipped, with the reason, where there is none.

Poisoned workspaces, graph capture, more than 2^31 elements, two streams, torch.compile, autocast, activation checkpointing, what compiles
when, and compute-sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import not_finite
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kdakit import torch as kt  # noqa: E402
from kdakit.cases import CASES, FUSED, Case  # noqa: E402
from kdakit.measure import checking  # noqa: E402
from kdakit.problem import DIFFERENTIABLE  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU, and Triton's compiler"
)
BOUNDED = FUSED | {"lower_bound": -5.0, "safe_gate": True, "chunk_size": 64}
MODEL = dict(H=2, HV=2, K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True, options=BOUNDED)
CASES_HERE = {
    case.name: case
    for case in (
        Case("model", "heads as models have them", T=600, **MODEL),
        Case("model_packed", "the same, packed, with empty sequences", T=300, lengths=(0, 130, 5, 165, 0), **MODEL),
        Case("model_softplus", "any gate", T=200, **MODEL | dict(options=FUSED | {"chunk_size": 64})),
        CASES["odd_sizes"],
        CASES["varlen_many"],
    )
}


def inputs(name, dtype="bfloat16", grad=False):
    """A case, its tensors and its cotangents on the GPU."""
    case = CASES_HERE[name]
    x = checking.to_torch(case.arrays(dtype), case.dtypes(dtype), "cuda")
    d_o, d_final = (torch.as_tensor(d).cuda() for d in case.cotangents(dtype))
    for field in DIFFERENTIABLE if grad else ():
        if getattr(x, field) is not None:
            getattr(x, field).requires_grad_()
    return case, x, (d_o.to(x.v.dtype), d_final.float())


def call(case, x, op="chunk"):
    return checking.call("torch", "triton_gpu", case, op)(x)


def train(case, x, cotangents):
    """Outputs and the gradients of everything."""
    out = call(case, x)
    leaves = [getattr(x, n) for n in DIFFERENTIABLE if getattr(x, n) is not None]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, leaves, cotangents)]


def same(results, others):
    return all(torch.equal(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("name", ["one", "packed", "softplus"])
def test_sequences_in_parts(name):
    """Few heads and long sequences: scanned in parts, forward and gradients against float64."""
    from kdakit.backends.triton_gpu import chip_of, config

    changes = {  # the rule wants sixteen plain runs for the one number of A_log's gradient: a minute
        "one": dict(T=2500, A_log=False), "packed": dict(T=6000, lengths=(2500, 0, 70, 3430), A_log=False),
        "softplus": dict(T=2000, options=FUSED | {"chunk_size": 64}),
    }[name]  # fmt: skip
    case = Case(f"parts_{name}", "long", **MODEL | dict(H=1, HV=1) | changes)
    problem = case.problem("bfloat16", needs_grad=True)
    chosen = config.choose(problem, chip_of("cuda"))
    if not chosen.split:
        pytest.skip("sequences are not split on this chip")
    assert config.parts(problem, chosen) > 1
    bad = [r for r in checking.check("triton_gpu", case, "bfloat16") if not r.ok]
    assert not bad, bad


@pytest.mark.parametrize("bounded", [True, False], ids=("bounded", "softplus"))
def test_rows_of_an_odd_number_of_elements(bounded):
    """Loads of two bytes: other layouts in the kernels."""
    options = BOUNDED if bounded else FUSED | {"chunk_size": 64}
    case = Case("odd_rows", "an odd K", **MODEL | dict(T=150, H=1, HV=1, K=101, V=128, A_log=not bounded, options=options))
    bad = [r for r in checking.check("triton_gpu", case, "bfloat16") if not r.ok]
    assert not bad, bad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gate_beyond_overflow(dtype):
    """The bounded gate where e^x of its input is beyond float32: no decay, not the strongest. d_g in float32: docs/numerics.md."""
    case = Case("gate_beyond", "a bounded gate with huge inputs", **MODEL | dict(T=200, gate="raw_huge"))
    rows = [r for r in checking.check("triton_gpu", case, dtype) if r.name not in ("g", "A_log", "dt_bias") or dtype != "float32"]
    assert len(rows) >= 7 and not [r for r in rows if not r.ok], rows


class Poisoned:
    """Every tensor that torch.empty makes is full of NaN and lies between borders of NaN."""

    BORDER = 1024

    def __init__(self, monkeypatch):
        self.pools = []
        self.empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.make)
        monkeypatch.setattr(torch, "empty_like", lambda x: self.make(x.shape, dtype=x.dtype, device=x.device))

    def make(self, shape, *, dtype=torch.float32, device=None):
        if device is None or torch.device(device).type != "cuda":
            return self.empty(shape, dtype=dtype, device=device)
        shape = tuple(shape)
        number = torch.Size(shape).numel()
        pool = self.empty(number + 2 * self.BORDER, dtype=dtype, device=device).fill_(float("nan"))
        self.pools.append(pool)
        return pool[self.BORDER : self.BORDER + number].view(shape)

    def intact(self):
        return all(p[: self.BORDER].isnan().all() and p[-self.BORDER :].isnan().all() for p in self.pools)


OTHER_DTYPES = [
    ("odd_sizes", "float32"),
    ("varlen_many", "float16"),
    *((n, d) for n in ("model", "model_packed") for d in ("float32", "float16")),
]


@pytest.mark.parametrize("name, dtype", [*((name, "bfloat16") for name in CASES_HERE), *OTHER_DTYPES])
def test_poisoned_workspaces(name, dtype, monkeypatch):
    """What is in a workspace before a call, or beside it, does not matter, and what is beside it stays."""
    case, x, cotangents = inputs(name, dtype, grad=True)
    want = train(case, x, cotangents)
    decoded = [o.detach() for o in call(case, x, "recurrent")]
    keeping = replace(case, initial_state=False, options=case.options | {"disable_recompute": True}), x._replace(initial_state=None)
    kept = train(*keeping, cotangents)
    with monkeypatch.context() as patch:
        memory = Poisoned(patch)
        got = train(case, x, cotangents)
        assert len(memory.pools) > 10, "the workspaces were not made by torch.empty"
        kept_again = train(*keeping, cotangents)
        again = call(case, x, "recurrent")
    assert memory.intact()
    assert same(got, want) and same(kept_again, kept) and same(again, decoded)
    memory.pools[0][0] = 0
    assert not memory.intact()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_many_calls_give_the_same_bits(dtype):
    """A race within a kernel need not show in a single call."""
    case, x, cotangents = inputs("model", dtype, grad=True)
    want = train(case, x, cotangents)
    assert all(same(train(case, x, cotangents), want) for _ in range(100))


def captured(function):
    """function() in a CUDA graph, after it has been called: () -> its results again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()

    def replay():
        for x in out:
            x.zero_()
        graph.replay()
        return out

    return replay


@pytest.mark.parametrize("op", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", ["model", "model_packed"])
def test_calls_that_come_again(name, op):
    """Later calls repeat the launches of the first one: with the bits that a first call has, for whatever tensors they get."""
    from kdakit import torch_operators

    case, x, _ = inputs(name)

    def shifted(a):
        return torch.cat([a.new_zeros(1), a.flatten()])[1:].view(a.shape)

    flipped = x._replace(q=x.q.flip(1), v=x.v.flip(1), initial_state=x.initial_state.flip(0))
    other = [flipped, x, x._replace(k=x.q), x._replace(k=x.q.clone()), flipped._replace(k=shifted(x.k)), x._replace(g=shifted(x.g))]
    other += [x._replace(v=x.v.transpose(1, 2).contiguous().transpose(1, 2)), x._replace(A_log=x.A_log.half()), flipped]
    other += [x._replace(initial_state=x.initial_state.mT.contiguous().mT)]  # copied at every call
    fresh = []
    for y in other:
        torch_operators._plans.clear()
        fresh.append([o.clone() for o in call(case, y, op)])
    torch_operators._plans.clear()
    for _ in range(2):
        for y, want in zip(other, fresh, strict=True):
            assert same(call(case, y, op), want)
    assert 5 <= len(torch_operators._plans) <= 8


@pytest.mark.parametrize("name", ["model", "model_packed"])
def test_training_that_comes_again(name):
    """Later calls repeat the launches of the first, forward and backward: with its bits, for whatever tensors and gradients they get."""
    from kdakit import torch_operators

    case, x, (d_o, d_final) = inputs(name)
    flipped = x._replace(q=x.q.flip(1), v=x.v.flip(1), initial_state=x.initial_state.flip(0))
    turned = d_o.transpose(1, 2).contiguous().transpose(1, 2)  # is copied at every call
    jobs = [(x, d_o, d_final), (flipped, d_o.flip(1), d_final), (x, turned, -d_final), (flipped, -turned, d_final)]

    def trained(y, d_o, d_final):
        leaves = y._replace(**{n: getattr(y, n).clone().requires_grad_() for n in DIFFERENTIABLE if getattr(y, n) is not None})
        return train(case, leaves, (d_o, d_final))

    fresh = []
    for job in jobs:
        torch_operators._plans.clear()
        fresh.append([o.clone() for o in trained(*job)])
    torch_operators._plans.clear()
    for _ in range(3):
        for job, want in zip(jobs, fresh, strict=True):
            assert same(trained(*job), want)
    assert len(torch_operators._plans) == 3  # a forward, and a backward for each kind of d_o


@pytest.mark.parametrize("what", ["forward", "training", "decode"])
@pytest.mark.parametrize("name", ["model", "model_packed", "model_softplus"])
def test_graph_capture(name, what):
    """A captured call computes from what its inputs, cu_seqlens included, hold when it is replayed."""
    case, x, cotangents = inputs(name, grad=what == "training")
    calls = {"forward": lambda: call(case, x), "training": lambda: train(case, x, cotangents), "decode": lambda: call(case, x, "recurrent")}
    run = calls[what]
    replay = captured(run)
    first = [o.clone() for o in replay()]
    assert same(first, run())
    with torch.no_grad():
        for field in ("q", "v", "g"):
            getattr(x, field).copy_(getattr(x, field).flip(1))
        if x.cu_seqlens is not None:
            x.cu_seqlens.copy_(torch.tensor([0, 64, 64, 191, 290, 300]))
    second = [o.clone() for o in replay()]
    assert same(second, run()) and not same(second[:1], first[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_decoding_in_place(T, dtype):
    """One launch of T tokens that moves the state on, captured: replays go on from where the last one ended."""
    from kdakit.backends.triton_gpu.runtime import launch

    case, x, _ = inputs("model")
    x = x._replace(**{n: getattr(x, n)[:, :T].contiguous() for n in ("q", "k", "v", "g", "beta")})
    options = {n: o for n, o in case.call_options.items() if n not in ("chunk_size", "safe_gate")}
    named = {n: a for n, a in x._asdict().items() if a is not None and n != "initial_state"}
    start = x.initial_state.to(dtype)

    def step(state, in_place):
        return kt.fused_recurrent_kda(**named, **options, initial_state=state, inplace_final_state=in_place, backend="triton_gpu")

    with launch.recording() as recorded:
        step(start.clone(), True)
    assert len(recorded) == 1
    mine = start.clone()
    replay = captured(lambda: step(mine, True)[:1])
    mine.copy_(start)
    for _ in range(3):
        before = mine.clone()
        (o,) = replay()
        want, after = step(before, False)  # a state in float32
        if dtype == torch.float32:
            assert torch.equal(o, want) and torch.equal(mine, after)
        else:  # another kernel's sums, rounded to what is stored
            torch.testing.assert_close(mine.float(), after, rtol=2**-8, atol=1e-6)
            torch.testing.assert_close(o, want, rtol=2**-7, atol=1e-6)
    assert not torch.equal(mine, start)


def test_more_than_2_to_the_31_elements():
    """The second row of a batch, all of it past the 2^31st element of every tensor or reaching there, has the bits that it has alone."""
    B, T, H, K = 2, 90112, 96, 128
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:
        pytest.skip("needs 100 GiB of free GPU memory")
    assert B * T * H * K > 2**31
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)

    x = [normal(B, T, H, K) for _ in range(4)] + [normal(B, T, H)]
    d_o, state = normal(B, T, H, K), normal(B, H, K, K).float()
    named = dict(A_log=torch.zeros(H, device="cuda"), dt_bias=torch.zeros(H * K, device="cuda"), **BOUNDED, output_final_state=True)

    def run(rows):
        leaves = [a[rows].detach().requires_grad_() for a in (*x, state)]
        o, final = kt.chunk_kda(*leaves[:5], initial_state=leaves[5], **named, backend="triton_gpu")
        *gradients, d_state = torch.autograd.grad((o, final), leaves, (d_o[rows], state[rows]))
        return [a[-1, -4096:].clone() for a in (o.detach(), *gradients)] + [final[-1].detach(), d_state[-1]]

    both = run(slice(0, 2))
    torch.cuda.empty_cache()
    alone = run(slice(1, 2))
    assert same(both, alone) and all(a.isfinite().all() and a.any() for a in alone)
    del both, alone
    torch.cuda.empty_cache()


def test_two_streams_and_two_threads():
    """Calls on two streams, from a thread each, disturb neither each other nor the cache of compiled kernels."""
    names = ("model", "model_packed")
    work = [inputs(name, grad=True) for name in names]
    want = [train(*w) for w in work]
    torch.cuda.synchronize()
    failed = []

    def loop(index):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(30):
                got = train(*work[index])
                stream.synchronize()
                if not same(got, want[index]):
                    failed.append(names[index])

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("name", ["model", "model_packed"])
def test_compile(name):
    case, x, cotangents = inputs(name, grad=True)
    want = train(case, x, cotangents)
    fields = [n for n, a in x._asdict().items() if a is not None]

    def public(*tensors):
        return kt.chunk_kda(**dict(zip(fields, tensors, strict=True)), **case.call_options, backend="triton_gpu")

    out = torch.compile(public, fullgraph=True)(*(getattr(x, n) for n in fields))
    leaves = [getattr(x, n) for n in DIFFERENTIABLE if getattr(x, n) is not None]
    assert same([*(o.detach() for o in out), *torch.autograd.grad(out, leaves, cotangents)], want)


def test_autocast_and_checkpointing():
    from torch.utils.checkpoint import checkpoint

    case, x, cotangents = inputs("model", grad=True)
    want = train(case, x, cotangents)
    public = checking.call("torch", "triton_gpu", case, "chunk")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert same(train(case, x, cotangents), want)
        mixed = public(x._replace(q=x.q.float()))
    assert mixed[0].dtype == torch.bfloat16 and same(mixed, want[:2])
    out = checkpoint(lambda *a: public(type(x)(*a)), *x, use_reentrant=False)
    leaves = [getattr(x, n) for n in DIFFERENTIABLE if getattr(x, n) is not None]
    assert same(torch.autograd.grad(out, leaves, cotangents), want[2:])


def test_auto_takes_these_kernels():
    """A user who names no backend gets the Triton kernels, forward and backward, for all that the contract names."""
    from kdakit import dispatch

    for name, case in CASES.items():
        for dtype in ("bfloat16", "float16", "float32"):
            problem = case.problem(dtype, needs_grad=True)
            assert dispatch.select("torch", problem, torch.device("cuda")).__name__.endswith("triton_gpu"), (name, dtype)


@pytest.mark.parametrize("name", ["model", "model_softplus"])
def test_later_lengths_compile_nothing(name):
    import triton

    def run(T):
        case = replace(CASES_HERE[name], T=T)
        x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")
        for field in DIFFERENTIABLE:
            getattr(x, field).requires_grad_()
        out = call(case, x)
        torch.autograd.grad([o.float().sum() for o in out], [getattr(x, n) for n in DIFFERENTIABLE])
        with torch.no_grad():
            call(case, x)
            call(case, x, "recurrent")

    compiled = []
    kept = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda *, metadata, **_: compiled.append(metadata["name"])
    try:
        run(200)
        run(8300)
        compiled.clear()
        for T in (1, 2, 17, 63, 64, 65, 500, 1024, 4099):
            run(T)
        assert not compiled
        triton.knobs.compilation.listener = kept
    finally:
        triton.knobs.compilation.listener = kept


@pytest.mark.parametrize("seed", range(6))
def test_what_is_not_finite_stays_where_it_is(seed):
    """NaN and infinity in any element of any input of drawn problems: no bit of another sequence or head changes, and NaN is not lost."""
    case, dtype = not_finite.draw(seed)
    run = lambda arrays, cotangents: checking.run_arrays("triton_gpu", case, dtype, arrays, cotangents)
    not_finite.check(case, dtype, run, seed)


HERE = [os.path.dirname(__file__), os.path.join(os.path.dirname(os.path.dirname(__file__)), "helpers")]  # for processes of their own
FIRST_CALLS = """
import sys, threading
sys.path[:0] = {path!r}
import torch
import test_triton_gpu as here
from dataclasses import replace

def results(n):
    case = replace(here.CASES_HERE["model"], T=1 + 37 * n, H=1 + n % 3, HV=1 + n % 3)
    x = here.checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")
    for field in here.DIFFERENTIABLE:
        getattr(x, field).requires_grad_()
    cotangents = [torch.as_tensor(d).cuda() for d in case.cotangents("bfloat16")]
    return here.train(case, x, (cotangents[0].to(x.v.dtype), cotangents[1].float()))

found, barrier = {{}}, threading.Barrier({threads})
def work(me):
    barrier.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        for n in range(me, 24, {threads}):
            found[n] = results(n)
        torch.cuda.current_stream().synchronize()
workers = [threading.Thread(target=work, args=(n,)) for n in range({threads})]
[x.start() for x in workers]; [x.join() for x in workers]
print("same", sum(here.same(found[n], results(n)) for n in range(24)))
"""


def test_first_calls_from_threads():
    """From the first call on, eight threads on streams of their own: the bits of one thread."""
    path = [*HERE, os.path.dirname(os.path.dirname(kt.__file__))]
    program = FIRST_CALLS.format(path=path, threads=8)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "same 24" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]


def test_a_first_step_compiles_before_its_backward():
    """Whatever a loss is made of, and whatever needs gradients: nothing is left to compile when the backward comes."""
    import triton

    case = replace(CASES_HERE["model"], name="first_step", K=64, V=64)
    x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cuda")
    for name in "qkv":
        getattr(x, name).requires_grad_()
    compiled, kept = [], triton.knobs.compilation.listener
    out = call(case, x)
    triton.knobs.compilation.listener = lambda *, metadata, **_: compiled.append(metadata["name"])
    try:
        torch.autograd.grad(out[0].float().sum(), (x.q, x.k, x.v), retain_graph=True)
        torch.autograd.grad([o.float().sum() for o in out], (x.q, x.k, x.v))
    finally:
        triton.knobs.compilation.listener = kept
    assert not compiled


SANITIZED = """
import sys
sys.path[:0] = {path!r}
import torch
import test_triton_gpu as here
for name in {names!r}:
    case, x, cotangents = here.inputs(name, {dtype!r}, grad=True)
    here.train(case, x, cotangents)
    here.call(case, x, "recurrent")
torch.cuda.synchronize()
print("done")
"""
PLANTED = """
import torch, triton
import triton.language as tl
import importlib.util, sys, tempfile, os
source = "import triton\\nimport triton.language as tl\\n@triton.jit\\ndef bad(p):\\n    tl.store(p + 100000000 + tl.arange(0, 32), 1.0)\\n"
path = os.path.join(tempfile.mkdtemp(), "bad_kernel.py")
open(path, "w").write(source)
spec = importlib.util.spec_from_file_location("bad_kernel", path)
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
module.bad[(1,)](torch.zeros(32, device="cuda"))
torch.cuda.synchronize()
"""


def sanitize(tool, program):
    """compute-sanitizer over a Python program; allocations are not cached, so that it knows where tensors end."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer was not found")
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []  # PyTorch asks for things that may not be there
    command = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "3", sys.executable, "-c", program]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("tool, names, dtype", [
    ("memcheck", ("model_packed", "model_softplus", "odd_sizes", "varlen_many"), "bfloat16"),
    ("memcheck", ("model_packed", "odd_sizes"), "float32"),
    ("racecheck", ("model_packed",), "bfloat16"), ("racecheck", ("model_packed",), "float32"),
])  # fmt: skip
def test_sanitizer(tool, names, dtype):
    for name in names:  # compiled before the sanitizer slows the host down
        train(*inputs(name, dtype, grad=True))
        call(*inputs(name, dtype)[:2], "recurrent")
    path = [*HERE, os.path.dirname(os.path.dirname(kt.__file__))]
    done = sanitize(tool, SANITIZED.format(path=path, names=names, dtype=dtype))
    assert done.returncode == 0 and "done" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


def test_sanitizer_sees_a_planted_error():
    done = sanitize("memcheck", PLANTED)
    assert done.returncode != 0 and "Invalid __global__ write" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
