"""Calls that are written down for JAX: the CUDA library's among them, and what is made of these where they are carried out."""

import ctypes
import shutil

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from kdakit.backends import cuda
from kdakit.backends.cuda import calls, library, op
from kdakit.backends.triton_gpu import borrowed, call, config
from kdakit.backends.triton_gpu.ffi import program
from kdakit.backends.triton_gpu.runtime.launch import Called, note_lent
from kdakit.cases import FUSED, Case
from kdakit.measure import checking
from kdakit.problem import Arrays

BOUNDED = FUSED | {"safe_gate": True, "lower_bound": -5.0}
LARGE = Case("large", "", T=1024, H=32, HV=32, K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True, options=BOUNDED)


@pytest.fixture
def lender(monkeypatch):
    """The library, as far as a call is planned with it."""
    monkeypatch.setattr(borrowed, "lender", cuda)
    monkeypatch.setattr(library, "missing", lambda: None)
    monkeypatch.setattr(library, "workspace_size", lambda args, dtype: 1024)
    monkeypatch.setattr(op, "call_arguments", op.call_arguments.__wrapped__)


def names(run):
    """What it launches, in order: stages of the library, and names of Triton's kernels."""
    return [one.call.stage if isinstance(one, Called) else one.kernel.__name__ for one in program.trace(run)[0]]


def launched(lends: bool, **options):
    """Names of a forward's and of its backward's launches."""
    problem = LARGE.problem("bfloat16", needs_grad=True).replace(has_initial_state=False, output_final_state=False, **options)
    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
    rows, wide = [empty(1, 1024, 32, 128) for _ in range(4)], torch.float32
    arrays = Arrays(*rows, empty(1, 1024, 32), A_log=empty(32, dtype=wide), dt_bias=empty(32 * 128, dtype=wide))
    c, kept = config.chosen(problem, config.CHIPS["sm_90"]), []

    def forward():
        result, saved = call.forward(problem, arrays, c)
        kept.extend(saved)
        return [result.o, *saved]

    with borrowed.writing(lends):
        there = names(forward)
        return there, names(lambda: call.of_value_heads(problem, arrays, kept, empty(1, 1024, 32, 128), None, c))


def test_what_is_written_down_for_hopper(lender):
    forward, backward = launched(True)
    assert forward == ["prefill"]
    assert [name for name in backward if not name.endswith("_kernel")] == ["rebuild", "reverse", "gradient"]
    assert not any(name in backward for names in borrowed.REPLACED.values() for name in names)


def test_records_are_written_down_too(lender):
    forward, backward = launched(True, disable_recompute=True)
    assert forward == ["prefill"] and [name for name in backward if not name.endswith("_kernel")] == ["reverse", "gradient"]


def test_other_gpus_have_no_calls_of_the_library(lender):
    forward, backward = launched(False)
    assert all(name.endswith("_kernel") for name in (*forward, *backward))


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory):
    """launches.cpp without XLA."""
    pytest.importorskip("jax")
    from kdakit.backends.triton_gpu.ffi import handler

    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = ctypes.CDLL(str(handler.build(tmp_path_factory.mktemp("handler"))))
    library.kdakit_run_table.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip

    def run(table, buffers, stream):
        message = ctypes.create_string_buffer(200)
        words, addresses = (ctypes.c_int64 * len(table))(*table), (ctypes.c_void_p * len(buffers))(*buffers)
        library.kdakit_run_table(stream, addresses, len(buffers), words, len(table), message, 200)
        return message.value.decode()

    return run


def small_calls(lower_first: int):
    """A gradient and a forward, on tensors of a CPU; `lower` begins so many elements after its buffer does."""
    case = Case("small", "", T=8, H=1, HV=1, K=128, V=128, gate="raw", beta="logits", A_log=True, dt_bias=True, options=BOUNDED)
    arrays = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")
    problem = case.problem("bfloat16", needs_grad=True)
    lower = torch.zeros(64 * 64 + lower_first, dtype=torch.float16)[lower_first:].view(1, 1, 64, 64)
    rows = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    given = dict(lower=lower, factors=rows, states=rows, d_states=rows, r=rows, d_o=rows, d_v=rows, alone=None, d_final=None)
    written = dict(d_beta=rows, d_q=rows, d_k=rows, d_g=rows, d_A_log=rows, d_dt_bias=rows)
    gradient = op.chunk_gradient(problem, arrays, **given, **written, group=1)
    points = dict(lower=lower, solved=lower.bfloat16(), checkpoints=rows)
    return gradient, op.forward_kept(problem, arrays, config=cuda.Config("bf16", 128, 64), **points, checkpoint=8, group=1)[1]


def test_a_call_is_carried_out_as_pytorch_makes_it(lender, monkeypatch, carried_out):
    """Function by function, the arguments that it gets are those of a call by ctypes."""
    made, found = [], []
    forward_of = lambda args: bytes(args.forward.contents) if hasattr(args, "forward") else b""
    note = lambda into: lambda args, *_: into.append((bytes(args), forward_of(args)))
    for stage in ("gradient", "prefill"):
        monkeypatch.setattr(library, stage, note(made))
    monkeypatch.setattr(calls, "current_stream", lambda index: 7)
    repeats = small_calls(lower_first=8)
    kinds = {"kda_gradient_bf16": library.GradientArgs, "kda_prefill_bf16": library.PrefillArgs}
    back = {f: ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(of))(lambda p: note(found)(p.contents) or 0) for f, of in kinds.items()}
    monkeypatch.setattr(library, "address", lambda function: ctypes.cast(back[function], ctypes.c_void_p).value if function in back else 0)
    for repeat in repeats:
        tensors = [x for x in repeat[1] if x is not None]
        places = {program._storage(x): (i, 0) for i, x in enumerate(tensors)}
        buffers = [0] * len(tensors)
        for x in tensors:
            buffers[places[program._storage(x)][0]] = x.untyped_storage().data_ptr()
        assert carried_out(program._called(Called(*repeat[:2]), places), buffers, 7) == ""
    at = library.GradientArgs.forward.offset
    same = lambda args: (args[0][:at] + args[0][at + 8 :], args[1]) if args[1] else args  # but for where the forward's arguments lie
    assert len(found) == 2 and list(map(same, found)) == list(map(same, made))


def test_what_the_library_refuses_is_said(lender, monkeypatch, carried_out):
    for stage in ("gradient", "prefill"):
        monkeypatch.setattr(library, stage, lambda args, *_: None)
    why = ctypes.create_string_buffer(b"no such thing")
    refuse, reason = (
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda args: 3),
        ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(why)),
    )
    of = {"kda_last_error": reason}
    monkeypatch.setattr(library, "address", lambda function: ctypes.cast(of.get(function, refuse), ctypes.c_void_p).value)
    repeat = small_calls(lower_first=0)[1]
    places = {program._storage(x): (0, 0) for x in repeat[1] if x is not None}
    assert carried_out(program._called(Called(*repeat[:2]), places), [4096], 0) == "the CUDA library says: no such thing"


def test_a_table_that_is_not_whole_is_refused(lender, monkeypatch, carried_out):
    monkeypatch.setattr(library, "prefill", lambda args, dtype: None)
    monkeypatch.setattr(library, "gradient", lambda args: None)
    monkeypatch.setattr(library, "address", lambda function: 0)
    repeat = small_calls(lower_first=0)[0]
    places = {program._storage(x): (0, 0) for x in repeat[1] if x is not None}
    table = program._called(Called(*repeat[:2]), places)
    assert carried_out(table[:-1], [4096], 0) == carried_out(table[:5], [4096], 0) == "the table of launches ends in the middle of one"
    assert carried_out(table, [], 0) == "the table names a place that is not there"


def test_what_a_kernel_would_copy_is_not_written_down():
    """Rows that do not begin at 16 bytes, which JAX's always do."""
    with pytest.raises(NotImplementedError, match="wants a copy"):
        program.trace(lambda: [note_lent(None)])
