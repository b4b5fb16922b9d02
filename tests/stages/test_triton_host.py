"""The host side of the Triton backend, without a GPU: what a launch is found by, what it hands over, what a first call imports."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import pkgutil
import sys
import threading
import types
from concurrent.futures import Future

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kdakit import torch_memory  # noqa: E402
from kdakit.backends import cuda, triton_gpu  # noqa: E402
from kdakit.backends.cuda import library  # noqa: E402
from kdakit.backends.triton_gpu import borrowed, call, kernels  # noqa: E402
from kdakit.backends.triton_gpu.arguments import arguments  # noqa: E402
from kdakit.backends.triton_gpu.kernels.step import step_kernel  # noqa: E402
from kdakit.backends.triton_gpu.runtime import launch, precompile  # noqa: E402
from kdakit.backends.triton_gpu.runtime import layout as layouts  # noqa: E402
from kdakit.backends.triton_gpu.runtime import repeat as repeats  # noqa: E402
from kdakit.backends.triton_gpu.runtime.kernel import parameters  # noqa: E402
from kdakit.cases import CASES, FUSED, Case  # noqa: E402
from kdakit.measure import checking  # noqa: E402

CASE = CASES["lower_bound"]
PROBLEM = CASE.problem("bfloat16").replace(op="recurrent")


def tensors():
    return checking.to_torch(CASE.arrays("bfloat16"), CASE.dtypes("bfloat16"), "cpu")


def moved(x, elements):
    """The same values, so many elements behind the beginning of their memory."""
    return torch.cat([x.new_zeros(elements), x.flatten()])[elements:].view(x.shape)


FILES = [importlib.import_module(f"{kernels.__name__}.{x.name}") for x in pkgutil.iter_modules(kernels.__path__)]
KERNELS = {name: x for file in FILES for name, x in vars(file).items() if name.endswith("_kernel")}


def launch_functions():
    """All functions that make a Launch, beside the kernels."""
    return [f for file in FILES for name, f in vars(file).items() if name.startswith("launch")]


def forget():
    for made in launch_functions():
        made.cache_clear()


@pytest.fixture
def watched(monkeypatch):
    """In place of Triton: `compiled` holds what had to be compiled, `started` what the compiled kernels were given. In place of a GPU's
    allocator and stream: tensors, in `taken` until they are given back, and `stream`."""
    seen = types.SimpleNamespace(compiled=[], started=[], taken={}, stream=7)

    def start(kernel, grid, args, values, stream=seen.stream):
        assert stream == seen.stream
        seen.started.append((kernel, grid, [*args, *values]))

    def take(size, stream):
        assert stream == seen.stream and size > 0
        made = torch.empty(size, dtype=torch.uint8)
        seen.taken[made.data_ptr()] = made
        return made.data_ptr()

    def compile_and_launch(kernel, grid, args, constants, **options):
        seen.compiled.append((args, constants))
        return kernel

    monkeypatch.setattr(launch, "launch", compile_and_launch)
    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "current_stream", lambda x: seen.stream)
    monkeypatch.setattr(torch_memory, "take", take)
    monkeypatch.setattr(torch_memory, "give_back", lambda address: seen.taken.pop(address))
    forget()

    def step(arrays, problem=PROBLEM):
        """(kernels compiled, kernels found) by a call."""
        before = len(seen.compiled), len(seen.started)
        call.step(problem, arrays, triton_gpu.default_config(problem, "cpu"))
        return len(seen.compiled) - before[0], len(seen.started) - before[1]

    seen.step = step
    yield seen
    assert not seen.taken
    forget()  # launches hold what this fixture compiled


def test_a_launch_is_found_by_what_triton_specialises_on(watched):
    x = tensors()
    assert watched.step(x) == (1, 0)
    assert watched.step(x) == watched.step(x._replace(q=x.q.clone())) == (0, 1)
    other = [
        x._replace(q=moved(x.q, 1)),  # not at a multiple of 16 bytes
        x._replace(A_log=moved(x.A_log, 1)),
        x._replace(A_log=x.A_log.half()),
        x._replace(q=x.q.transpose(1, 2).contiguous().transpose(1, 2)),  # the same sizes, other strides
        x._replace(beta=x.beta.repeat_interleave(2, 1)[:, ::2]),
    ]
    for y in other:
        assert watched.step(y) == (1, 0)
        assert watched.step(y) == (0, 1)
    for changes in (dict(scale=0.3), dict(lower_bound=-4.0), dict(state_v_first=True, needs_grad=True)):
        assert watched.step(x, PROBLEM.replace(**changes)) == (1, 0)
    assert watched.step(x) == (0, 1)


def test_a_launch_hands_over_what_the_kernel_names(watched):
    """Found again, a kernel gets addresses in place of tensors and otherwise what it was compiled with, in the order of its parameters."""
    x = tensors()
    watched.step(x)
    watched.step(x)
    (args, constants), (kernel, grid, given) = watched.compiled[0], watched.started[0]
    assert kernel is step_kernel and grid == PROBLEM.N * PROBLEM.HV * -(-PROBLEM.V // constants["BV"])
    assert len(given) == len(step_kernel.arg_names)
    named, first = dict(zip(step_kernel.arg_names, given, strict=True)), dict(zip(step_kernel.arg_names, args, strict=False))
    fresh = ("p_o", "p_final")
    for name, value in (first | constants).items():
        if name not in fresh:
            assert named[name] == (value.data_ptr() if isinstance(value, torch.Tensor) else value), name
    assert named["p_q"] == x.q.data_ptr() and named["p_cu_seqlens"] is None and named["T"] == PROBLEM.T


@pytest.mark.parametrize("name", KERNELS)
def test_tensors_come_first_then_numbers_then_constants(name):
    """So a launch finds everything by name; numbers are not specialised."""
    kernel = KERNELS[name]
    found = parameters(kernel.fn)
    assert [*(f"p_{x}" for x in found.tensors), *found.numbers, *found.constants] == list(kernel.arg_names)
    assert not [x for x in (*found.numbers, *found.constants) if x.startswith("p_")] and found.tensors and found.constants


def test_a_launch_holds_names_to_the_kernel():
    problem, layout = PROBLEM, layouts.views(tensors()).layout
    config = triton_gpu.default_config(problem, "cpu")
    values = arguments(problem, config, layout) | dict(BV=16)
    made = launch.Launch(step_kernel, 1, values)
    named = dict.fromkeys(made.names, None)
    assert list(made.in_order(dict(reversed(named.items())))) == list(made.names)
    for wrong in (named | {"typo": None}, dict.fromkeys(made.names[1:])):
        with pytest.raises(TypeError, match="step_kernel takes the tensors q, k, "):
            made(**wrong)
    with pytest.raises(TypeError, match="step_kernel has parameters without a value: BV"):
        launch.Launch(step_kernel, 1, {n: x for n, x in values.items() if n != "BV"})


@pytest.mark.parametrize("target", (("cuda", 90, 32), ("hip", "gfx942", 64)))
def test_a_product_and_a_sum_are_one_instruction_whatever_triton_does_unasked(target, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    problem, layout = PROBLEM, layouts.views(tensors()).layout
    values = arguments(problem, triton_gpu.default_config(problem, "cpu"), layout) | dict(BV=16)
    with launch.tracing() as traced:
        made = launch.Launch(step_kernel, 1, values, num_warps=4)
        made(**dict.fromkeys(made.names))
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    backend = make_backend(GPUTarget(*target))
    assert backend.parse_options(dict(traced[0].options)).enable_fp_fusion
    assert not backend.parse_options(dict(num_warps=4)).enable_fp_fusion, "nothing to ask for"


def roles(watched, given, made):
    """Of all that kernels were started with: grids, numbers, and whose address an address is; scratch by the order in which it is met."""
    names = {
        x.data_ptr(): f"{name} {which}" for which, named in (("in", given), ("out", made)) for name, x in named.items() if x is not None
    }
    scratch: dict[int, int] = {}
    out = []
    for kernel, grid, given in watched.started:
        pointers = [name for name in kernel.arg_names if name.startswith("p_")]
        whose = [None if a is None else names.get(a) or scratch.setdefault(a, len(scratch)) for a in given[: len(pointers)]]
        out.append((kernel.__name__, grid, whose, given[len(pointers) :]))
    return out


@pytest.mark.parametrize("op, in_place", [("chunk", False), ("recurrent", False), ("recurrent", True)])
def test_a_plan_repeats_the_launches(op, in_place, watched):
    problem, first = PROBLEM.replace(op=op), tensors()
    config = triton_gpu.default_config(problem, "cpu")
    for _ in range(2):  # compiled by the first, found by the second
        watched.started.clear()
        result, repeat = call.planned(problem, first, config, first.initial_state if in_place else None)
    want = roles(watched, first._asdict(), result._asdict())
    assert len(want) == (2 if op == "chunk" else 1)
    again = tensors()
    watched.started.clear()
    result = repeat(again)
    assert roles(watched, again._asdict(), result._asdict()) == want
    assert (result.final_state is again.initial_state) == in_place
    assert not repeat.begins and repeat.shared % 4 == 0 and len(repeat.offsets) == (0 if op == "recurrent" else 4)


@pytest.mark.parametrize("large", [repeats.LARGE, 4096])
def test_a_plan_repeats_a_forward_and_its_backward(large, watched, monkeypatch):
    """In scratch memory of their own, in which views of one tensor share a place."""
    monkeypatch.setattr(repeats, "LARGE", large)
    kept, empty = [], torch.empty  # tensors are told apart by their addresses, which memory that is given back would share
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: kept.append(empty(*shape, **how)) or kept[-1])
    problem = PROBLEM.replace(op="chunk", needs_grad=True, output_final_state=True)
    config = triton_gpu.default_config(problem, "cpu")
    d_o, d_final = tensors().v, torch.zeros(problem.state_shape)

    def ahead_of(planned, given, names):
        for _ in range(2):  # compiled by the first, found by the second
            watched.started.clear()
            made, repeat = planned()
        return made, repeat, roles(watched, given, names(made))

    def forward_names(made):
        return dict(enumerate([*made[0][:2], *made[1]]))

    x = tensors()
    made, repeat, want = ahead_of(lambda: call.planned(problem, x, config), x._asdict(), forward_names)
    assert want[0][0].startswith("prepare") and len(want) == 2
    again = tensors()
    watched.started.clear()
    assert roles(watched, again._asdict(), forward_names(repeat(again))) == want

    def given(y, saved, d_o, d_final):
        return y._asdict() | {f"saved {i}": s for i, s in enumerate(saved)} | {"d_o": d_o, "d_final": d_final}

    saved = made[1]
    planned = lambda: call.planned_backward(problem, x, saved, d_o, d_final, config)
    _grads, repeat, want = ahead_of(planned, given(x, saved, d_o, d_final), lambda made: made._asdict())
    kernels = ["rebuild_normed", "reverse", "replay", "restore", "products", "gradient", "sums"]
    assert [name for name, *_ in want] == [f"{name}_kernel" for name in kernels]
    others = [s.clone() for s in saved], d_o.clone(), d_final.clone()
    watched.started.clear()
    grads = repeat((*again, *others[0], *others[1:]))
    assert roles(watched, given(again, *others), grads._asdict()) == want
    assert [g.shape for g in grads[:8]] == [a.shape for a in again[:8]]
    assert (sum(map(len, repeat.begins.values())) > 3) == (large == 4096)


GIVEN = Case("given", "log-decays", T=70, H=1, HV=1, K=128, V=128)


@pytest.fixture
def lent(monkeypatch):
    """Structs that the CUDA library got, which lends its kernels and runs none of them."""
    got = []
    monkeypatch.setattr(borrowed, "lender", cuda)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: cuda.unsupported(problem))
    for variable in borrowed.VARIABLES.values():
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(library, "workspace_size", lambda args, dtype: 512)
    monkeypatch.setattr(library, "prefill", lambda args, dtype: got.append(args))
    for stage in ("rebuild", "reverse", "gradient"):
        monkeypatch.setattr(library, stage, got.append)
    return got


def addresses(args, named):
    """{field: whose address it has} of a struct of the library."""
    names = {x.data_ptr(): name for name, x in named.items() if x is not None}
    fields = [(name, getattr(args, name)) for name, *_ in args._fields_ if name != "forward"]
    fields += (
        [(f"forward {n}", getattr(args.forward.contents, n)) for n, *_ in library.PrefillArgs._fields_] if hasattr(args, "forward") else []
    )
    values = [(name, x.data if isinstance(x, library.Tensor) else x) for name, x in fields]
    return {name: names[x] for name, x in values if x in names}


def test_a_plan_repeats_what_is_borrowed(watched, lent, monkeypatch):
    """Another backend's launch gets the addresses of the tensors of a later call, and of nothing that is there no more."""
    kept, empty = [], torch.empty  # as above
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: kept.append(empty(*shape, **how)) or kept[-1])
    new = lambda: checking.to_torch(GIVEN.arrays("bfloat16"), GIVEN.dtypes("bfloat16"), "cpu")
    problem, x, y = GIVEN.problem("bfloat16", needs_grad=True).replace(output_final_state=True), new(), new()
    config = triton_gpu.default_config(problem, "cpu")

    def made_by(named, run):
        lent.clear()
        made = run()
        assert len(lent) == 1
        return made, addresses(lent[0], named | {f"made {i}": m for i, m in enumerate([*made[0][:2], *made[1]])})

    made, repeat = call.planned(problem, x, config)
    assert not watched.compiled, "one launch, not Triton's"
    first = made_by(x._asdict(), lambda: call.planned(problem, x, config)[0])[1]
    (_, saved), second = made_by(y._asdict(), lambda: repeat(y))
    assert first == second and {"q", "k", "v", "g", "beta"} < {*first} and first["lower"] == "made 2" and first["checkpoints"] == "made 4"
    assert lent[0].group == 4 and lent[0].checkpoint == config.checkpoint and lent[0].workspace not in (None, 0)

    d_o, d_final = y.v.clone(), torch.zeros(problem.state_shape)

    def grads_by(z, saved, run):
        lent.clear()
        grads = run()
        named = z._asdict() | {f"saved {i}": s for i, s in enumerate(saved)} | {f"d_{n}": g for n, g in grads._asdict().items()}
        assert [type(args) for args in lent] == [library.RebuildArgs, library.ReverseArgs, library.GradientArgs]
        return [addresses(args, named | {"d_o": d_o, "d_final": d_final}) for args in lent]

    _, repeat = call.planned_backward(problem, x, made[1], d_o, d_final, config)
    first = grads_by(x, made[1], lambda: call.planned_backward(problem, x, made[1], d_o, d_final, config)[0])
    second = grads_by(y, saved, lambda: repeat((*y, *saved, d_o, d_final)))
    assert first == second
    rebuilt, reversed_, second = second
    assert rebuilt["forward k"] == "k" and rebuilt["lower"] == "saved 0" and reversed_["d_o"] == "d_o" and reversed_["d_v"] == "d_v"
    assert second["d_q"] == "d_q" and second["forward k"] == "k" and second["forward v"] == second["d_v"] == "d_v"
    assert second["lower"] == "saved 0" and second["d_final"] == "d_final" and second["forward initial_state"] == "initial_state"

    moved_q = x._replace(q=moved(x.q, 1))
    assert call.planned(problem, moved_q, config)[1] is None, "copied first"


@pytest.mark.parametrize("whose", ["records", "tiles and another's kernels", "tiles"])
def test_a_plan_repeats_a_backward_that_makes_nothing_again(whose, watched, lent, monkeypatch):
    """Nothing reads v where the forward kept states and r, nor all that was kept: it need not be given to a launch."""
    records = whose == "records"
    case = dataclasses.replace(GIVEN, gate="raw", beta="logits", A_log=True, dt_bias=True, options=FUSED | {"disable_recompute": True})
    if whose == "tiles":
        monkeypatch.setattr(borrowed, "lender", None)
    elif not records:
        monkeypatch.setenv(borrowed.VARIABLES["forward"], "0")
    problem = case.problem("bfloat16", needs_grad=True).replace(has_initial_state=False, output_final_state=False)
    new = lambda: checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")._replace(initial_state=None)
    x, config = new(), triton_gpu.default_config(problem, "cpu")
    assert config.keeps_states and borrowed.records(problem, config, torch.device("cpu")) == records
    for _ in range(2):  # compiled by the first, found by the second
        (_, saved), forward_again = call.planned(problem, x, config)
        grads, repeat = call.planned_backward(problem, x, saved, x.v.clone(), None, config)
    assert forward_again is not None and repeat is not None
    lent.clear()
    y = new()
    again = repeat((*y, *saved, y.v.clone(), None))
    assert [type(args) for args in lent] == ([library.ReverseArgs, library.GradientArgs] if whose != "tiles" else [])
    assert [None if z is None else z.shape for z in again] == [None if z is None else z.shape for z in grads]


FUSED_GATE = dict(gate="raw", beta="logits", A_log=True, dt_bias=True, options=FUSED)
TRAINED = {
    "softplus": FUSED_GATE,
    "bounded": FUSED_GATE | {"options": FUSED | {"safe_gate": True, "lower_bound": -5.0}},
    "log-decays given": {},
    "value heads that share a key": FUSED_GATE | {"HV": 2},
    "the same with log-decays given": {"HV": 2},
    "packed": FUSED_GATE | {"lengths": (30, 40)},
    "64 channels": FUSED_GATE | {"K": 64, "V": 64},
    "96 channels": FUSED_GATE | {"K": 96, "V": 96},
    "256 channels": FUSED_GATE | {"K": 256, "V": 256},
}


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("name", TRAINED)
def test_steps_are_planned(name, states, lends, watched, lent, monkeypatch):
    """Forward and backward: without a plan the host takes 2 ms for them, more than most kernels do."""
    if not lends:
        monkeypatch.setattr(borrowed, "lender", None)
    case = dataclasses.replace(GIVEN, **TRAINED[name])
    problem, x = case.problem("bfloat16", needs_grad=True), checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")
    if not states:
        problem, x = problem.replace(has_initial_state=False, output_final_state=False), x._replace(initial_state=None)
    config, d_final = triton_gpu.default_config(problem, "cpu"), torch.zeros(problem.state_shape) if states else None
    if states:
        problem = problem.replace(output_final_state=True)
    for _ in range(2):  # compiled by the first, found by the second
        (_, saved), forward_again = call.planned(problem, x, config)
        grads, backward_again = call.planned_backward(problem, x, saved, x.v.clone(), d_final, config)
    assert forward_again is not None and backward_again is not None
    again = backward_again((*x, *saved, x.v.clone(), d_final))
    assert [(g.shape, g.dtype) for g in again[:5]] == [(g.shape, g.dtype) for g in grads[:5]] == [(y.shape, y.dtype) for y in x[:5]]


@pytest.mark.parametrize("lends", [True, False])
def test_steps_of_a_sum_are_planned(lends, watched, lent, monkeypatch):
    """The cotangents of o.sum() and state.sum() are one number, seen everywhere: copied first, each time."""
    if not lends:
        monkeypatch.setattr(borrowed, "lender", None)
    problem = GIVEN.problem("bfloat16", needs_grad=True).replace(output_final_state=True)
    x = checking.to_torch(GIVEN.arrays("bfloat16"), GIVEN.dtypes("bfloat16"), "cpu")
    config = triton_gpu.default_config(problem, "cpu")
    d_o, d_final = torch.ones((), dtype=x.v.dtype).expand(x.v.shape), torch.ones(()).expand(problem.state_shape)
    for _ in range(2):  # compiled by the first, found by the second
        saved = call.planned(problem, x, config)[0][1]
        grads, repeat = call.planned_backward(problem, x, saved, d_o, d_final, config)
    assert repeat is not None
    watched.started.clear()
    lent.clear()
    again = repeat((*x, *saved, d_o, d_final))
    assert [g if g is None else (g.shape, g.dtype) for g in again] == [g if g is None else (g.shape, g.dtype) for g in grads]
    assert watched.started and bool(lent) == lends
    for one in (d_o, d_final):  # whoever reads them, reads all of their elements
        assert all(one.data_ptr() not in given for _, _, given in watched.started)
        assert not any(addresses(args, {"cotangent": one}) for args in lent)


def test_a_plan_widens_parameters_for_who_lends(watched, lent, monkeypatch):
    """A layer in bfloat16 has its gate's parameters so; the library takes float32."""
    case = dataclasses.replace(GIVEN, gate="raw", beta="logits", A_log=True, dt_bias=True, options=FUSED)

    def new():
        x = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")
        return x._replace(A_log=x.A_log.bfloat16(), dt_bias=x.dt_bias.bfloat16())

    problem, x, y = case.problem("bfloat16", needs_grad=True), new(), new()
    config = triton_gpu.default_config(problem, "cpu")
    for _ in range(2):  # compiled by the first, found by the second
        (_, saved), forward_again = call.planned(problem, x, config)
        grads, repeat = call.planned_backward(problem, x, saved, x.v.clone(), None, config)
    lent.clear()
    seen = lambda args: lent.append([widened(args, n) for n in ("A_log", "dt_bias")])
    monkeypatch.setattr(library, "prefill", lambda args, dtype: seen(args))
    for stage, got in (("rebuild", seen), ("reverse", lambda args: None), ("gradient", seen)):
        monkeypatch.setattr(library, stage, lambda args, got=got: got(args.forward.contents))
    forward_again(y)
    repeat((*y, *saved, x.v.clone(), None))
    assert lent == [[y.A_log[0].item(), y.dt_bias[0].item()]] * 3
    assert [grads.A_log.dtype, grads.dt_bias.dtype] == [torch.bfloat16] * 2


def widened(args, name):
    """The float32 number that a field points to."""
    return ctypes.cast(getattr(args, name), ctypes.POINTER(ctypes.c_float))[0]


def test_no_plan_where_something_is_copied_or_unclear(watched):
    x, config = tensors(), triton_gpu.default_config(PROBLEM, "cpu")
    for y in (x._replace(k=x.q), x._replace(q=x.q.mT.contiguous().mT), x._replace(initial_state=x.initial_state.mT.contiguous().mT)):
        for _ in range(2):
            assert call.planned(PROBLEM, y, config)[1] is None


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter has no hooks")
def test_hooks_are_called_where_there_are_any(monkeypatch):
    ran = []
    compiled = types.SimpleNamespace(
        run=lambda *args: ran.append(args), function="function", packed_metadata="packed",
        launch_metadata=lambda grid, stream, *args: (grid, stream, args),
    )  # fmt: skip
    driver = types.SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 10 + device)
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=driver))
    hooks = triton.knobs.runtime
    assert not (hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
    launch.start(compiled, 7, (1, 2), (3,))
    assert ran.pop() == (7, 1, 1, 13, "function", "packed", None, None, None, 1, 2, 3)
    hooks.launch_exit_hook.add(print)
    try:
        launch.start(compiled, 7, (1, 2), (3,))
    finally:
        hooks.launch_exit_hook.remove(print)
    about = ((7, 1, 1), 13, (1, 2, 3))
    assert ran.pop() == (7, 1, 1, 13, "function", "packed", about, hooks.launch_enter_hook, hooks.launch_exit_hook, 1, 2, 3)
    launch.start(compiled, 0, (1, 2), (3,))
    assert not ran


@pytest.mark.skipif(launch.INTERPRETED, reason="the interpreter launches nothing")
@pytest.mark.skipif(launch.LAUNCHER is None, reason="another Triton, whose launchers are called as they are")
def test_a_kernel_without_scratch_memory_is_launched_as_triton_would(monkeypatch):
    """The C function gets from `start` what Triton's launcher gives it, which is called where scratch memory is wanted."""
    ran = []
    run = object.__new__(launch.LAUNCHER)
    vars(run).update(
        num_ctas=1, launch=lambda *args: ran.append(args), launch_cooperative_grid=False, launch_pdl=True, global_scratch_size=0,
        global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
    )  # fmt: skip
    compiled = types.SimpleNamespace(run=run, function="function", packed_metadata="packed")
    launch.start(compiled, (7, 2, 1), (1, 2), (3,), 13)
    run(7, 2, 1, 13, "function", "packed", None, None, None, 1, 2, 3)
    assert len(ran) == 2 and ran[0] == ran[1]
    monkeypatch.setattr(launch.LAUNCHER, "__call__", lambda self, *args: ran.append("called"))
    run.global_scratch_size = 16
    launch.start(compiled, (7, 2, 1), (1, 2), (3,), 13)
    assert ran.pop() == "called"


@pytest.mark.parametrize("name", ["lower_bound", "grouped"])
def test_looking_ahead_does_without_sympy(name, monkeypatch):
    """PyTorch imports it, which takes seconds, for some operations on tensors without memory."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    case = CASES[name]
    problem = case.problem("bfloat16", needs_grad=True)
    arrays = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")
    assert len(call.launches(problem, arrays, triton_gpu.default_config(problem, "cpu"))) >= 7


def test_triton_is_hashed_while_others_run_python(monkeypatch):
    """The thread asks for the interpreter's lock hundreds of times: with the usual 5 ms each it would take seconds."""
    from triton.runtime import cache

    precompile.hash_triton().join()  # another test may have started it
    usual, seen = sys.getswitchinterval(), []

    def key():
        seen.append(sys.getswitchinterval())
        raise OSError("cannot read")

    monkeypatch.setattr(cache, "triton_key", key)
    monkeypatch.setattr("threading.excepthook", lambda args: seen.append(args.exc_type))
    precompile._hash_triton.__wrapped__().join()
    assert seen[0] < usual / 10 and seen[1] is OSError
    assert sys.getswitchinterval() == usual


class Source:
    """In place of what Triton compiles: makes its IR in Python."""

    def __init__(self, name, busy):
        self.name, self.busy = name, busy

    def make_ir(self):
        self.busy.append(self.name)
        assert not threading.Event().wait(0.02) and self.busy[-1] == self.name  # nobody else came in between


def test_launchers_are_made_beside_kernels_which_run_python_in_turn(monkeypatch):
    busy, launched = [], {name: threading.Event() for name in "abc"}

    def launcher(src, metadata):
        assert not metadata.tensordesc_meta and metadata.num_ctas == 0 and metadata.warp_size == 64
        launched[src.name].set()

    def kernel(src):
        def compile_kernel():
            assert launched[src.name].wait(10)  # not after the kernel
            src.make_ir()
            return src.name

        return compile_kernel

    driver = types.SimpleNamespace(launcher_cls=launcher, get_current_target=lambda: types.SimpleNamespace(warp_size=64))
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=driver))
    with precompile.Compilers(6) as pool:
        kernels = [pool.submit(kernel(Source(name, busy))) for name in "abc"]
    assert [x.result() for x in kernels] == list("abc") and sorted(busy) == list("abc")
    with precompile.Compilers(1) as pool:  # a Triton that hands over something else, and a compilation that fails
        assert pool.submit(lambda: 7).result() == 7
        assert isinstance(pool.submit(lambda: 1 / 0).exception(), ZeroDivisionError)


def test_triton_hands_over_the_source_of_a_kernel(monkeypatch):
    """What `Compilers` looks for: the rest works without it, slower."""
    from triton.runtime import driver
    from triton_offline import offline_driver

    from kdakit.backends.triton_gpu import config as configs

    chip, seen = configs.CHIPS["sm_90"], []
    on_paper = offline_driver(chip)
    on_paper.get_current_device = lambda: 77  # what is kept per device is not found by other tests

    class Pool:
        def submit(self, compile_kernel):
            seen.append(precompile.source(compile_kernel))
            failed = Future()
            failed.set_exception(RuntimeError("not compiled"))
            return failed

    problem = CASE.problem("bfloat16", needs_grad=True)
    wanted = call.launches(problem, tensors(), configs.choose(problem, chip))
    monkeypatch.setattr(driver, "_active", on_paper)
    with triton.AsyncCompileMode(Pool(), ignore_errors=True):
        precompile.compile_each(wanted)
    names = [src.name for src in seen]
    assert set(names) == {kernel.__name__ for kernel, *_ in wanted}
    assert all(callable(src.make_ir) and src.signature for src in seen)
    assert names[0].startswith("gradient") and names[1].startswith("prepare")
