"""The native library without a GPU: it compiles, fits its budgets, and refuses what it should. What needs a GPU is in test_cuda_gpu.py."""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shutil
import subprocess
from functools import lru_cache

import c_programs
import pytest

from kdakit.backends.cuda import build, default_config, library, unsupported
from kdakit.cases import CASES, FUSED, Case

ARCHITECTURES = tuple(os.environ.get("KDAKIT_TEST_ARCH", "90a").split())
# Registers that let as many blocks run on a multiprocessor as the shared memory does: 65536 / (threads * blocks).
REGISTERS = {"intra_kernel": {"64": 128, "32": 128}, "state_kernel": {"64": 255, "32": 255}}
# Bytes moved, loads and stores together: what intra's 128 registers do not hold is touched once per 32 channels.
SPILLS = {"intra_kernel": 96, "state_kernel": 240, "prepare_kernelILi64": 0, "prepare_kernel": 40, "scan_kernel": 0, "parts_kernel": 0,
          "padding_kernel": 0, "gradient_kernel": 32, "prepare_kept_kernelILi64": 0, "prepare_kept_kernel": 24, "scan_kept_kernel": 0,
          "prepare_blocks_kernel": 0, "scan_blocks_kernel": 0, "prepare_record_kernel": 60,
          "scan_record_kernel": 88, "reverse_kernel": 0, "rebuild_kernelILi64": 24,
          "rebuild_kernel": 16}  # fmt: skip

# The bfloat16 kernels: 80 registers let three blocks of 256 threads run, or six of 128, 96 five of 128; 128 one of 512, or two of 256.
HOPPER_REGISTERS = {"prepare_kernelILi64": 96, "prepare_kernel": 80, "scan_kernel": 248, "parts_kernel": 168, "gradient_kernel": 128,
                    "prepare_kept_kernelILi64": 96, "prepare_kept_kernel": 80, "scan_kept_kernel": 248, "reverse_kernel": 255,
                    "prepare_record_kernel": 80, "scan_record_kernel": 248, "prepare_blocks_kernel": 80, "scan_blocks_kernel": 216,
                    "rebuild_kernel": 80}  # fmt: skip

pytestmark = pytest.mark.xdist_group("build")
needs_nvcc = pytest.mark.skipif(build.unbuildable() is not None, reason=build.unbuildable() or "")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The library, compiled here, and the compiler's report."""
    target = tmp_path_factory.mktemp("native") / "libkdakit.so"
    return target, build.build(target, ARCHITECTURES, jobs=os.cpu_count() or 1)


@pytest.fixture
def native(built, monkeypatch):
    monkeypatch.setenv(library.VARIABLE, str(built[0]))
    return library


def arguments(**changes):
    sizes = dict(batch=1, tokens=100, heads=2, value_heads=2, key_dim=64, value_dim=64, chunk_size=32)
    return library.PrefillArgs(**sizes | changes)


@needs_nvcc
def test_kernels_hardly_spill(built):
    usages = [u for u in built[1] if "_kernelI" in u.kernel]
    kernels = {u.kernel for u in usages}
    assert len([k for k in kernels if "intra_kernel" in k]) == 4, "four sizes"
    assert len([k for k in kernels if "state_kernel" in k]) == 11, "four sizes, two widths; three of them again for less shared memory"
    for usage in usages:
        assert usage.spills <= next(limit for name, limit in SPILLS.items() if name in usage.kernel), usage


@needs_nvcc
def test_registers_leave_room_for_the_blocks(built):
    for usage in built[1]:
        for name, limits in REGISTERS.items():
            if name in usage.kernel:
                chunk = usage.kernel.split("ELi")[2].split("E")[0]  # .. kernel<K, V, C, ..>
                assert usage.registers <= limits[chunk], usage


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_hopper_registers(built):
    found = [u for u in built[1] if "6hopper" in u.kernel]
    assert len(found) == 142, (
        "16 kinds of chunks, in training eight, for either head size; four kinds of the scan, each also in training; one of parts, "
        "eight gradients for either head size, nine of the state's gradient, twelve that make tiles again for either head size; "
        "of records ten kinds of chunks, four of the scan and four of the state's gradient; sixteen kinds of blocks, two of their scan"
    )
    for usage in found:
        limit = next(n for name, n in HOPPER_REGISTERS.items() if name in usage.kernel)
        if re.search(r"(reverse|scan|scan_kept)_kernelILi64ELi1ELi2E", usage.kernel):
            limit = 168  # two blocks of five warps share a multiprocessor
        assert usage.registers <= limit and usage.architecture == "90a", usage
        if "gradient_kernel" in usage.kernel:
            in_registers = re.search(r"GateE[12]ELb[01]ELb0E", usage.kernel)  # gates that are computed, from bfloat16
            assert usage.spills <= (0 if in_registers else 16 if "ELi64E" in usage.kernel else 32), usage
        elif "GateE2" in usage.kernel and "rebuild_kernel" not in usage.kernel:
            rare = re.search(r"14prepare_kernelILi128ELNS0_4GateE2ELb1ELb1ELb0E", usage.kernel)  # float32 gates, keys as they are given
            assert usage.spills <= (40 if rare else 16 if "record" in usage.kernel else 8), usage  # a word, stored and read once, or two


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_bf16_sizes_are_checked(native):
    half = {name: library.Tensor(None, library.BFLOAT16) for name in ("q", "k", "v", "g", "beta", "o")}
    right = half | dict(key_dim=128, value_dim=128, chunk_size=64)
    per_record = native.workspace_size(arguments(**right, tokens=1), "bf16")
    assert native.workspace_size(arguments(**right, tokens=65), "bf16") == 2 * per_record > 0
    assert native.workspace_size(arguments(**right, tokens=65, cu_seqlens=256, sequences=3), "bf16") == 4 * per_record
    small = right | dict(key_dim=64, value_dim=64, parts=3)  # of which heads of 64 have none
    assert native.workspace_size(arguments(**small, tokens=64), "bf16") == 2 * (3 * 8192 + 10 * 512 + 256)
    for changes, message in (
        (dict(key_dim=64), "unsupported: .*key_dim = value_dim = 64 or 128, got 64 and 128"),
        (dict(w=256), "unsupported: .*w and u"),
        (dict(tokens=1 << 30), "unsupported: .*fewer than 2\\^30 tokens"),
        (dict(q=library.Tensor(None, library.FLOAT32)), "q.dtype must be 1, got 0"),
        (dict(block=32), "block must be 0, 16 or 64, got 32"),
        (dict(block=16, key_dim=64, value_dim=64), "unsupported: block = 16 needs key_dim = 128 .* got key_dim = 64"),
        (dict(block=16, lower=4096), "unsupported: block = 16 needs .* nothing that is kept"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.workspace_size(arguments(**right | changes), "bf16")


def test_deterministic_calls_do_not_look_at_other_sequences():
    """The library chooses parts and blocks by how many of them there are."""
    problem = dataclasses.replace(CASES["plain"], K=128, V=128).problem("bfloat16")
    chosen = default_config(problem.replace(deterministic=True), "cpu")
    usual = default_config(problem, "cpu")
    assert (chosen.parts, chosen.block) == (1, 64) and (usual.parts, usual.block) == (0, 0)


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_what_is_kept_is_checked(native):
    """Before a device is looked for."""
    half = {name: library.Tensor(4096, library.BFLOAT16) for name in ("q", "k", "v", "g", "beta", "o")}
    sizes = half | dict(key_dim=128, value_dim=128, chunk_size=64, workspace=4096)
    sizes["workspace_size"] = native.workspace_size(arguments(**sizes), "bf16")
    right = sizes | dict(lower=4096, solved=4096, checkpoints=4096, lower_dtype=library.FLOAT16, group=4, checkpoint=8)
    for changes, message in (
        (dict(lower=None), "lower, solved and checkpoints must be given together"),
        (dict(solved=4104), "lower, solved and checkpoints must start at 16 bytes"),
        (dict(lower_dtype=1), "lower_dtype must be 2 or 0, got 1"),
        (dict(group=3), "group must be 0, 1, 2, 4 or 8, got 3"),
        (dict(checkpoint=0), "checkpoint must be at least 1, got 0"),
        (dict(gate=1, A_log=4096), "unsupported: lower, solved and checkpoints are kept for gate 0, or with l2norm, got gate 1"),
        (dict(checkpoint_float32=1), "unsupported: checkpoints are float32 with key_dim = 64, got 128"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.prefill(arguments(**right | changes), "bf16")
    with pytest.raises(library.NativeError, match="unsupported: the float32 kernels keep nothing for a backward"):
        native.workspace_size(arguments(lower=4096))


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_kept_records_are_checked(native):
    """Before a device is looked for. They have no place in the workspace."""
    half = {name: library.Tensor(4096, library.BFLOAT16, 0, 1 << 20, 128, 1024) for name in ("q", "k", "v", "g", "beta", "o")}
    sizes = half | dict(key_dim=128, value_dim=128, chunk_size=64, heads=8, value_heads=8, l2norm=1, beta_kind=1)
    assert native.workspace_size(arguments(**sizes, parts=1, record=4096), "bf16") == 0 < native.workspace_size(arguments(**sizes), "bf16")
    given = sizes | dict(beta_kind=0, parts=3)  # whose records have no parts
    assert native.workspace_size(arguments(**given, record=4096), "bf16") == 0
    right = (
        sizes | dict.fromkeys(("lower", "checkpoints", "record", "r", "factors"), 4096) | dict(lower_dtype=library.FLOAT16, checkpoint=1)
    )
    packed = "o must be packed as \\[B, T, HV, V\\] with record"
    for changes, message in (
        (dict(solved=4096), "record, r, factors, lower and checkpoints must be given together, without solved"),
        (dict(r=None), "record, r, factors, lower and checkpoints must be given together"),
        (dict(l2norm=0), "l2norm and beta_kind 1 or 2, or gate 0 and beta_kind 0, got 0, 0, 1"),
        (dict(beta_kind=0, gate=2, lower_bound=-5.0), "l2norm and beta_kind 1 or 2, or gate 0 and beta_kind 0, got 1, 2, 0"),
        (dict(initial_state=4096), "key_dim = 128, without initial_state, got 128 and a state"),
        (dict(checkpoint=8), "checkpoint = 1 and group = 0 or 1, got 8 and 0"),
        (dict(record=4112), "record must start at 128 bytes"),
        (dict(o=library.Tensor(4096, library.BFLOAT16, 0, 1 << 21, 128, 2048)), packed),
        ({}, "CUDA error"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.prefill(arguments(**right | changes), "bf16")


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_reverse_of_records_is_checked(native):
    """Before a device is looked for."""
    half = {name: library.Tensor(None, library.BFLOAT16) for name in ("q", "k", "v", "g", "beta", "o")}
    sizes = half | dict(key_dim=128, value_dim=128, chunk_size=64, beta_kind=library.BETAS["sigmoid"])
    right = dict.fromkeys(("record", "d_o", "d_states", "d_v"), 4096) | dict(k_solved_dtype=library.BFLOAT16)
    for of_forward, changes, message in (
        (dict(beta_kind=0), {}, "factors must be given with record and beta_kind = 0"),
        ({}, dict(factors=4096), "else it and alone must be NULL"),
        ({}, dict(tiles=4096), "tiles, solved and decay must be NULL with record"),
        ({}, dict(group=4), "record needs key_dim = 128 and group = 0 or 1, got 128 and 4"),
        ({}, dict(record=4112), "record must start at 128 bytes"),
        ({}, dict(d_o=None), "d_o must not be NULL"),
        ({}, {}, "CUDA error"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.reverse(library.ReverseArgs(arguments(**sizes | of_forward), **right | changes))


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_gradient_arguments_are_checked(native):
    """Before a device is looked for."""
    half = {name: library.Tensor(4096, library.BFLOAT16) for name in ("q", "k", "v", "g", "beta", "o")}
    forward = arguments(**half | dict(key_dim=128, value_dim=128, chunk_size=64))
    names = ("lower", "factors", "states", "d_states", "r", "d_o", "d_v", "d_q", "d_k", "d_g", "d_beta")
    right = dict.fromkeys(names, 4096) | dict(lower_dtype=library.FLOAT16, d_q_dtype=library.BFLOAT16)
    for changes, message in (
        (dict(lower=None), "lower must not be NULL"),
        (dict(states=4104), "states must start at 16 bytes"),
        (dict(lower_dtype=1), "lower_dtype must be 2 or 0, got 1"),
        (dict(d_q_dtype=2), "d_q_dtype must be 1 or 0, got 2"),
        (dict(group=3), "group must be 0, 1, 2, 4 or 8, got 3"),
        (dict(group=4), "group must be 0 or 1 where lower is float16"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.gradient(library.GradientArgs(forward, **right | changes))
    lost = dict(states_lost=4096, d_states_lost=4096)
    with pytest.raises(library.NativeError, match="states_lost must be NULL but with key_dim = 64, got key_dim = 128"):
        native.gradient(library.GradientArgs(forward, **right | lost))
    narrow = arguments(**half | dict(chunk_size=64))
    for alone, message in (("states_lost", "d_states_lost must not be NULL"), ("d_states_lost", "states_lost must not be NULL")):
        with pytest.raises(library.NativeError, match=message):
            native.gradient(library.GradientArgs(narrow, **right, **{alone: 4096}))
    for sizes in (dict(key_dim=64, value_dim=128), dict(key_dim=32, value_dim=32)):
        with pytest.raises(library.NativeError, match="key_dim = value_dim = 64 or 128, got"):
            native.gradient(library.GradientArgs(arguments(**half | sizes), **right))
    forward.initial_state = 4104
    with pytest.raises(library.NativeError, match="forward->initial_state must start at 16 bytes"):
        native.gradient(library.GradientArgs(forward, **right))


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_rebuild_arguments_are_checked(native):
    """Before a device is looked for."""
    half = {name: library.Tensor(4096, library.BFLOAT16) for name in ("q", "k", "v", "g", "beta", "o")}
    sizes = dict(key_dim=128, value_dim=128, chunk_size=64)
    right = dict.fromkeys(("lower", "tiles", "decay", "factors"), 4096) | dict(lower_dtype=library.FLOAT16)
    for given, changes, message in (
        ({}, dict(tiles=None), "tiles must not be NULL"),
        ({}, dict(first=4104), "first must start at 16 bytes"),
        ({}, dict(lower_dtype=1), "lower_dtype must be 2 or 0, got 1"),
        ({}, dict(group=4), "group must be 0 or 1 where lower is float16"),
        (dict(k=library.Tensor(4104, library.BFLOAT16)), {}, "forward->k must start at 16 bytes"),
        (dict(key_dim=64), {}, "key_dim = value_dim = 64 or 128, got 64 and 128"),
        ({}, dict(q_lost=4096), "q_lost must be NULL but with key_dim = 64 and lower_dtype = 0, got 128 and 2"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.rebuild(library.RebuildArgs(arguments(**half | sizes | given), **right | changes))


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
def test_reverse_arguments_are_checked(native):
    """Before a device is looked for."""
    half = {name: library.Tensor(None, library.BFLOAT16) for name in ("q", "k", "v", "g", "beta", "o")}
    forward = arguments(**half | dict(key_dim=128, value_dim=128, chunk_size=64))
    names = ("tiles", "solved", "decay", "factors", "d_o", "d_states", "d_v")
    right = dict.fromkeys(names, 4096) | dict(k_solved_dtype=library.FLOAT16)
    for changes, message in (
        (dict(tiles=None), "tiles must not be NULL"),
        (dict(d_initial=4104), "d_initial must start at 16 bytes"),
        (dict(k_solved_dtype=0), "k_solved_dtype must be 1 or 2, got 0"),
        (dict(group=3), "group must be 0, 1, 2, 4 or 8, got 3"),
        (dict(channels=32), "channels must be 0, 64 or 128, got 32"),
        (dict(d_states_lost=4096), "d_states_lost and q_lost must be NULL but with key_dim = 64, got key_dim = 128"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.reverse(library.ReverseArgs(forward, **right | changes))
    with pytest.raises(library.NativeError, match="key_dim = value_dim = 64 or 128, got 32 and 32"):
        native.reverse(library.ReverseArgs(arguments(**half | dict(key_dim=32, value_dim=32)), **right))
    with pytest.raises(library.NativeError, match="channels must be 0 or 64 with value_dim = 64, got 128"):
        native.reverse(library.ReverseArgs(arguments(**half), **right | dict(channels=128)))
    with pytest.raises(library.NativeError, match="q_lost must be NULL but with k_solved_dtype = 1, got 2"):
        native.reverse(library.ReverseArgs(arguments(**half), **right | dict(q_lost=4096)))


@needs_nvcc
@pytest.mark.skipif("90a" not in ARCHITECTURES, reason="the bfloat16 kernels are for sm_90a")
@pytest.mark.parametrize("gate, D", [("softplus", 128), ("bounded", 128), ("given", 128), ("softplus", 64)])
def test_what_another_backend_gives_to_reverse_is_complete(native, gate, D):
    """All that the library checks before it looks for a device, which it does not find here."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a device would take these tensors of a CPU")
    from kdakit.backends.cuda import op
    from kdakit.measure import checking

    options = FUSED | ({"safe_gate": True, "lower_bound": -5.0} if gate == "bounded" else {}) if gate != "given" else {}
    how = dict(gate="mild") if gate == "given" else dict(gate="raw", beta="logits", A_log=True, dt_bias=True)
    case = Case(gate, "", T=70, H=1, HV=1, K=D, V=D, options=options, **how)
    arrays = checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")
    zeros = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype)
    tiles, rows, wide, states = zeros(2, 1, 3, 64, D), zeros(1, 70, 1, D), torch.float32, zeros(2, 1, D, D)
    with pytest.raises(library.NativeError, match="CUDA error"):
        op.reverse(
            case.problem("bfloat16", needs_grad=True), arrays, tiles=tiles, k_solved=tiles, solved=zeros(2, 1, 64, 64),
            decay=zeros(2, 1, D, dtype=wide), factors=zeros(2, 1, 3, 64, dtype=wide), d_o=rows, d_final=None, d_states=states,
            d_v=zeros(1, 70, 1, D), y_lost=None, alone=None, d_initial=None, group=1, d_states_lost=states if D == 64 else None,
        )  # fmt: skip


def test_report_is_understood():
    text = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90a'
ptxas info    : Function properties for _Z1kv
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size"""
    assert build.usages(text) == [build.Usage("_Z1kv", "90a", 168, 12, 16)]
    called = "\nptxas info    : Function properties for _Z1fv\n    0 bytes stack frame, 20 bytes spill stores, 30 bytes spill loads"
    assert build.usages(text + called) == [build.Usage("_Z1kv", "90a", 168, 62, 16)]


@needs_nvcc
def test_sizes_are_checked(native):
    assert native.workspace_size(arguments()) > native.workspace_size(arguments(tokens=32)) > 0
    assert native.workspace_size(arguments(tokens=0)) == 0
    # 64 bits: more than 2^31 elements is just a larger number.
    assert native.workspace_size(arguments(tokens=1 << 26, heads=8, value_heads=8)) > 1 << 37
    for changes, message in (
        (dict(key_dim=80), r"unsupported: .*\(80, 64\)"),
        (dict(value_dim=128), r"unsupported: .*\(64, 128\)"),
        (dict(chunk_size=16), "unsupported: .*chunk_size 32 and 64, got 16"),
        (dict(chunk_size=17), "invalid argument: chunk_size must be .* got 17"),
        (dict(batch=-1), r"invalid argument: batch must lie in 0\.\.2\^40, got -1"),
        (dict(heads=2, value_heads=3), "value_heads must be a multiple of heads, got 3 and 2"),
        (dict(gate=1), "A_log is required"),
        (dict(gate=2, lower_bound=-6.0), r"lower_bound must lie in \[-5, 0\), got -6"),
        (dict(gate=7), "gate must be 0, 1 or 2, got 7"),
        (dict(batch=2, cu_seqlens=256, sequences=1), "batch must be 1 with cu_seqlens, got 2"),
        (dict(batch=1 << 20, tokens=1 << 20), "2\\^31 - 1 blocks"),
        (dict(batch=1 << 39, tokens=1 << 39), "2\\^60 elements"),
    ):
        with pytest.raises(library.NativeError, match=message):
            native.workspace_size(arguments(**changes))


@needs_nvcc
def test_structs_of_other_versions(native):
    """Shorter ones end in zeros; longer ones may not ask for what the library does not know."""

    class Newer(library.PrefillArgs):
        _fields_ = (("later", ctypes.c_int64 * 2),)

    args, wanted = arguments(gate=1), native.workspace_size(arguments())
    args.size = library.PrefillArgs.gate.offset
    assert native.workspace_size(args) == wanted
    sizes = {name: getattr(args, name) for name in ("batch", "tokens", "heads", "value_heads", "key_dim", "value_dim", "chunk_size")}
    newer = Newer(**sizes)
    newer.size = ctypes.sizeof(Newer)
    assert native.workspace_size(newer) == wanted
    newer.later[0] = 1
    with pytest.raises(library.NativeError, match=f"unsupported: args sets a field at byte {ctypes.sizeof(library.PrefillArgs)} of"):
        native.workspace_size(newer)
    for size in (0, library.PrefillArgs.scale.offset - 1, 1 << 20):
        args.size = size
        with pytest.raises(library.NativeError, match=f"args.size must be .* = {ctypes.sizeof(library.PrefillArgs)}, got {size}"):
            native.workspace_size(args)


@needs_nvcc
def test_calls_are_checked_before_the_device_is_asked(native):
    with pytest.raises(library.NativeError, match=r"invalid argument: q\.data must not be NULL"):
        native.prefill(arguments())
    given = {name: library.Tensor(4096) for name in ("q", "k", "v", "g", "beta", "o")}
    with pytest.raises(library.NativeError, match=r"workspace too small: workspace_size must be at least \d+, got 0"):
        native.prefill(arguments(**given))
    size = native.workspace_size(arguments(**given))
    with pytest.raises(library.NativeError, match="workspace must be device memory aligned to 256 bytes"):
        native.prefill(arguments(**given, workspace=64, workspace_size=size))
    with pytest.raises(library.NativeError, match="v must be aligned to 16 bytes"):
        native.prefill(arguments(**given | {"v": library.Tensor(4100)}, workspace=4096, workspace_size=size))


@needs_nvcc
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc was not found")
@pytest.mark.parametrize("mirror", [library.PrefillArgs, library.GradientArgs, library.RebuildArgs, library.ReverseArgs])
def test_header_is_c99_and_ctypes_agrees(tmp_path, mirror):
    """Every field has the same offset in C and in ctypes."""
    struct = f"kda_{mirror.__name__.removesuffix('Args').lower()}_args"
    names = [name for name, _ in mirror._fields_]
    lines = "".join(f'printf("%zu\\n", offsetof({struct}, {name}));' for name in names)
    source = tmp_path / "offsets.c"
    source.write_text(
        f'#include <stdio.h>\n#include "kdakit.h"\nint main(void) {{ {lines} printf("%zu\\n", sizeof({struct})); return 0; }}'
    )
    program = tmp_path / "offsets"
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{build.source_folder() / 'include'}"]
    subprocess.run(["gcc", *flags, str(source), "-o", str(program)], check=True)
    found = list(map(int, subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()))
    assert found == [getattr(mirror, name).offset for name in names] + [ctypes.sizeof(mirror)]


@needs_nvcc
def test_c_program(native, tmp_path):
    """Without a GPU it checks the refusals and says that it did no more."""
    for name, said in (("prefill_test", "refusals: ok"), ("prefill_bf16_test", "")):
        done = c_programs.run(c_programs.link(name, tmp_path))
        assert said in done.stdout and done.returncode in (0, 77), done.stdout + done.stderr


@needs_nvcc
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ was not found")
def test_custom_call_is_lowered(built, tmp_path):
    """libkdakit_jax.so builds beside a library of any name, and its call lands in a program for a GPU, which this machine need not have."""
    jax = pytest.importorskip("jax")
    from kdakit.backends.cuda import ffi

    target = build.build_jax(shutil.copy(built[0], tmp_path / "libmine.so"))
    assert target == tmp_path / ffi.NAME
    assert ctypes.CDLL(str(target)).kdakit_xla_prefill
    case = CASES["softplus"]
    problem = case.problem()
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), case.arrays())
    config = ffi.Config("f32", 64, 32)

    def call(arrays):
        return ffi.forward(problem, arrays, config)[0].o

    text = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET)])(
        arrays
    )
    assert text.out_avals[0].shape == (1, 100, 2, 16) and ffi.TARGET in text.mlir_module()


def test_custom_call_under_transformations(monkeypatch):
    """Shapes and dtypes of the call and its gradients under shard_map and vmap; nothing runs."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from kdakit.backends.cuda import ffi
    from kdakit.jax import chunk_kda
    from kdakit.measure import checking

    monkeypatch.setattr(ffi, "supports", lambda problem, device: None)
    case = dataclasses.replace(CASES["lower_bound"], K=128, V=128, B=2)
    x = checking.to_jax(case.arrays("bfloat16"), case.dtypes("bfloat16"))

    def call(q, k, v, g, beta, state, A_log, dt_bias):
        return chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=state, **case.call_options, backend="cuda")

    given = (*x[:5], x.initial_state, x.A_log, x.dt_bias)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.shard_map(call, mesh=mesh, in_specs=(P("rows"),) * 6 + (P(), P()), out_specs=P("rows"))
    for function in (call, rows):
        o, final = jax.eval_shape(function, *given)
        assert o.dtype == jnp.bfloat16 and o.shape == x.v.shape and final.dtype == jnp.float32
        loss = jax.grad(lambda *a, function=function: function(*a)[0].astype(jnp.float32).sum(), argnums=(0, 6))
        assert [(d.shape, d.dtype) for d in jax.eval_shape(loss, *given)] == [(x.q.shape, x.q.dtype), (x.A_log.shape, x.A_log.dtype)]
    mapped = jax.vmap(call, in_axes=(0,) * 6 + (None, None))
    o, _ = jax.eval_shape(mapped, *(y[:, None] for y in given[:6]), *given[6:])
    assert o.shape == (2, 1, *x.v.shape[1:])


def test_a_missing_library_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "nothing.so"))
    assert "kdakit build-cuda" in library.missing()
    wrong = tmp_path / "wrong.so"
    wrong.write_text("no library")
    monkeypatch.setenv(library.VARIABLE, str(wrong))
    assert str(wrong) in library.missing()


def test_refusals_name_their_reason():
    assert unsupported(CASES["plain"].problem()) is None
    for name, changes, reason in (
        ("plain", dict(dtype="float64"), "float32 or bfloat16 inputs"),
        ("plain", dict(dtype="bfloat16"), "bfloat16 with K = V = 64 or 128, got K = 32, V = 16"),
        ("plain", dict(dtype="bfloat16", K=128, V=128, beta_dtype="float16"), "gates and betas of either"),
        ("wide", {}, "up to 128"),
        ("plain", dict(return_intermediate_states=True), "intermediate states"),
    ):
        assert reason in unsupported(CASES[name].problem().replace(**changes))


def test_dispatch_knows_the_library_in_both_frameworks():
    from kdakit import dispatch

    problem = CASES["plain"].problem()
    for framework in ("torch", "jax"):
        pytest.importorskip(framework)
        with pytest.raises(ValueError, match=r"'cuda(_ffi)?' cannot run this call on cpu: needs an NVIDIA GPU"):
            dispatch.select(framework, problem, "cpu", "cuda")
    assert dispatch.differentiates(dispatch.load("cuda")) is dispatch.load("torch_native")
    assert dispatch.differentiates(dispatch.load("cuda_ffi")) is dispatch.load("xla")
    assert dispatch.differentiates(dispatch.load("xla")) is dispatch.load("xla")


@pytest.fixture
def on_hopper(monkeypatch):
    """A machine that looks like a Hopper GPU with both backends."""
    pytest.importorskip("torch")
    from kdakit.backends import cuda, triton_gpu

    monkeypatch.setattr(triton_gpu, "supports", lambda problem, device: None)
    monkeypatch.setattr(triton_gpu, "interpreted", lambda device: None)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: cuda.unsupported(problem))


def test_pools_stay_with_kernels_that_know_them(on_hopper, monkeypatch):
    """Where the faster backend would have the states copied out of a pool and back."""
    from kdakit import dispatch
    from kdakit.backends import cuda, triton_gpu

    problem = CASES["lower_bound"].problem("bfloat16").replace(B=1, N=1, T=8192, H=96, HV=96, K=128, V=128, gate_dtype="bfloat16")
    monkeypatch.setattr(cuda, "expected_us", lambda problem, device: 1.0)
    assert dispatch.select("torch", problem, "cuda") is cuda
    assert dispatch.select_pooled("torch", problem, "cuda") is triton_gpu
    assert dispatch.select_pooled("torch", problem, "cuda", "cuda") is cuda, "it was named"
    monkeypatch.setattr(triton_gpu, "supports", lambda problem, device: "not here")
    assert dispatch.select_pooled("torch", problem, "cuda") is cuda


def test_auto_takes_the_faster_backend(on_hopper, monkeypatch, caplog):
    """By the time of each, whose constants are data; the reason is a line of the log."""
    from kdakit import dispatch
    from kdakit.backends import cuda, triton_gpu

    fits = CASES["lower_bound"].problem("bfloat16").replace(B=1, N=1, T=8192, H=96, HV=96, K=128, V=128, gate_dtype="bfloat16")
    for problem, chosen in (
        (fits, cuda),
        (fits.replace(H=4, HV=4, T=65536), cuda),
        (fits.replace(H=1, HV=1, T=1 << 20), cuda),
        (fits.replace(needs_grad=True), triton_gpu),
        (fits.replace(K=64), triton_gpu),
        (CASES["plain"].problem(), triton_gpu),
        (CASES["plain"].problem("bfloat16", "recurrent").replace(K=128, V=128), triton_gpu),
    ):
        assert dispatch.select("torch", problem, "cuda") is chosen, problem
    with caplog.at_level("DEBUG", "kdakit"):
        dispatch.select("torch", fits, "cuda")
    assert re.search(r": cuda \(expected us: triton_gpu \d+, cuda \d+\)$", caplog.messages[-1]) and len(caplog.messages) == 1
    monkeypatch.setattr(cuda, "expected_us", lambda problem, device: 1e9)
    assert dispatch.select("torch", fits, "cuda") is triton_gpu
    monkeypatch.setattr(cuda, "expected_us", lambda problem, device: 1.0)
    monkeypatch.setattr(cuda, "supports", lambda problem, device: "is not there")
    assert dispatch.select("torch", fits, "cuda") is triton_gpu


def test_auto_ignores_company_where_bits_must_not_depend_on_it(on_hopper):
    from kdakit import dispatch

    fits = CASES["lower_bound"].problem("bfloat16").replace(B=1, H=4, HV=4, K=128, V=128, gate_dtype="bfloat16", deterministic=True)
    sizes = ((1, 100), (1, 1 << 20), (500, 50_000))
    chosen = {dispatch.select("torch", fits.replace(N=N, T=T, varlen="cu_seqlens"), "cuda") for N, T in sizes}
    assert len(chosen) == 1


RECORDS = build.source_folder().parent / "benchmarks" / "results" / "gpu"
FORWARDS = "fwd", "graph"


@pytest.mark.parametrize("which, least", [("*_float32", 2), ("*_suite", 25)])
def test_auto_agrees_with_recorded_suites(which, least, on_hopper):
    """At every shape of which a record has both backends' forward, the newest if there are several, what 'auto' takes is within 5 % of the
    faster one."""
    from kdakit import dispatch
    from kdakit.measure.suites import SUITES
    from kdakit.measure.tuning import problem_of

    newest: dict[tuple[str, str], dict[str, float]] = {}
    for path in sorted((RECORDS / "suite").glob(f"{which}.json")):
        record, here = json.loads(path.read_text()), {}
        for row in record["results"]:
            if row["mode"] in FORWARDS:
                here.setdefault((record["settings"]["suite"], row["entry"]), {})[row["contestant"]] = row["median_ms"]
        newest |= here
    both = {key: ms for key, ms in newest.items() if {"triton_gpu", "cuda"} <= ms.keys() and key[1] in SUITES[key[0]]}
    assert len(both) >= least
    for (suite, name), ms in both.items():
        module = dispatch.select("torch", problem_of(SUITES[suite][name].job), "cuda")
        taken = ms[module.__name__.rpartition(".")[2]]
        assert taken <= 1.05 * min(ms["triton_gpu"], ms["cuda"]), (name, ms)


def test_auto_agrees_with_64_channels_that_were_timed(on_hopper):
    """Of every number of heads and gate what 'auto' takes is the faster; of few heads, which only Triton cuts into parts, Triton's."""
    from kdakit import dispatch
    from kdakit.backends import cuda, triton_gpu
    from kdakit.cases import Shape
    from kdakit.measure.contestants import Job
    from kdakit.measure.tuning import problem_of

    def taken(T, H, gate):
        return dispatch.select("torch", problem_of(Job(Shape(1, T, H, 64), "graph", "bfloat16", gate)), "cuda")

    rows = json.loads((RECORDS / "trials" / "2026-11-17_h200_cuda_64.json").read_text())["results"]
    timed = [row for row in rows if row["part"] == "forward" and row["K"] == 64]
    assert len(timed) == 12
    for row in timed:
        assert taken(8192, row["H"], row["gate"]) is (cuda if row["cuda"] < row["triton"] else triton_gpu), row
    assert taken(65536, 4, "bounded") is triton_gpu


def test_bench_names_peers_alone(capsys):
    """A peer without ours, and the reason where it cannot run."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: FLA would tune itself for minutes")
    from kdakit.cli.main import main

    assert main(["bench", "--backend", "flash_kda", "--shape", "1x64x1x16", "--mode", "fwd", "--repeat", "1"]) == 1
    assert "flash_kda did not run" in capsys.readouterr().out


def test_calls_alike_share_all_but_their_addresses(monkeypatch):
    """What the library would be given: the strides and addresses of this call's tensors, copied only where rows are not aligned."""
    torch = pytest.importorskip("torch")
    from kdakit.backends import cuda
    from kdakit.backends.cuda import op
    from kdakit.measure import checking

    given = []
    monkeypatch.setattr(op, "_enqueue", lambda args, like, dtype: given.append(args))
    monkeypatch.setattr(library, "workspace_size", lambda args, dtype: 1024 * args.tokens)
    monkeypatch.setattr(op, "call_arguments", lru_cache(op.call_arguments.__wrapped__))  # other tests do not find these sizes
    case = dataclasses.replace(CASES["varlen_fused"], K=128, V=128)
    problem, config = case.problem("bfloat16"), cuda.Config("bf16", 128, 64)
    first, second = (checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu") for _ in range(2))
    keys = torch.cat([second.q, second.k], -1)
    apart = second._replace(q=keys[..., :128], k=keys[..., 128:])
    odd = second._replace(q=torch.cat([second.q, second.q[..., :1]], -1)[..., 1:])
    for x in (first, second, apart, odd):
        op.forward(problem, x, config)
    for x, args in zip((first, second, apart), given, strict=False):
        for name in ("q", "k", "v", "g", "beta"):
            y, tensor = getattr(x, name), getattr(args, name)
            assert (tensor.data, tensor.batch_stride, tensor.token_stride, tensor.head_stride) == (y.data_ptr(), *y.stride()[:3])
            assert tensor.dtype == (library.BFLOAT16 if y.dtype == torch.bfloat16 else library.FLOAT32)
        for name in ("A_log", "dt_bias", "initial_state", "cu_seqlens"):
            y = getattr(x, name)
            assert getattr(args, name) == (None if y is None else y.data_ptr())
        assert (args.batch, args.tokens, args.heads, args.value_heads) == (problem.B, problem.T, problem.H, problem.HV)
        assert args.sequences == problem.N and args.workspace_size == 1024 * problem.T and args.size == ctypes.sizeof(args)
    assert given[3].q.data not in (odd.q.data_ptr(), second.q.data_ptr()) and given[3].q.token_stride == 128 * problem.H
    small = CASES["plain"]  # K = 32, V = 16 in kernels of 64
    x = checking.to_torch(small.arrays(), small.dtypes(), "cpu")
    o, final, _ = op.forward(small.problem(), x, cuda.Config("f32", 64, 32))
    assert o.shape == x.v.shape and final.shape == x.initial_state.shape and given[-1].q.token_stride == 64 * small.H


def test_a_call_that_comes_again_has_its_own_addresses(monkeypatch):
    """Repeated, a call gives the library what it would give it anew, and what it took of the allocator back to it."""
    torch = pytest.importorskip("torch")
    from kdakit import torch_memory
    from kdakit.backends import cuda
    from kdakit.backends.cuda import calls, op, repeat
    from kdakit.measure import checking

    given, taken = [], []
    monkeypatch.setattr(library, "workspace_size", lambda args, dtype: 1024 * args.tokens)
    monkeypatch.setattr(library, "prefill", lambda args, dtype: given.append((type(args).from_buffer_copy(args), dtype)))
    monkeypatch.setattr(op, "call_arguments", lru_cache(op.call_arguments.__wrapped__))
    monkeypatch.setattr(op, "on_device", lambda index: contextlib.nullcontext())
    for module in (calls, op, repeat):
        monkeypatch.setattr(module, "current_stream", lambda index: 7)
    monkeypatch.setattr(torch_memory, "take", lambda size, stream: taken.append((size, stream)) or 4096)
    monkeypatch.setattr(torch_memory, "give_back", lambda address: taken.append(address))
    case = dataclasses.replace(CASES["varlen_fused"], K=128, V=128)
    problem, config = case.problem("bfloat16").replace(output_final_state=True), cuda.Config("bf16", 128, 64)
    new = lambda: checking.to_torch(case.arrays("bfloat16"), case.dtypes("bfloat16"), "cpu")
    pointers = [n for n, kind in library.PrefillArgs._fields_ if kind in (library.Tensor, ctypes.c_void_p)]

    def facts(args, x, result):
        """All fields, with names in place of addresses."""
        names = {y.data_ptr(): n for n, y in (x._asdict() | result._asdict()).items() if y is not None}
        whose = lambda value: names.get(value.data if isinstance(value, library.Tensor) else value)
        fields = {n: whose(getattr(args, n)) if n in pointers else getattr(args, n) for n, _ in args._fields_}
        strides = {n: bytes(getattr(args, n))[8:] for n in calls.TENSORS}
        return fields, strides, args.stream

    first, second = new(), new()
    result, anew = repeat.planned(problem, first, config)
    again = anew(second)
    assert taken == [(1024 * problem.T, 7), 4096] and given[1][0].workspace == 4096 and given[1][1] == "bf16"
    assert facts(given[0][0], first, result) == facts(given[1][0], second, again)
    assert [x.shape for x in again[:2]] == [x.shape for x in result[:2]] and given[1][0].q.data == second.q.data_ptr()
    odd = first._replace(q=torch.cat([first.q, first.q[..., :1]], -1)[..., 1:])
    repeat.planned(problem, odd, config)[1](odd)
    assert len(taken) == 2 and given[3][0].q.data != odd.q.data_ptr(), "copied, every time"


def test_operators_know_their_shapes():
    """The fake kernels: what torch.compile sees."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    import kdakit.backends.cuda.op  # noqa: F401

    with FakeTensorMode():
        q, beta = torch.empty(2, 3, 100, 64, device="cuda"), torch.empty(2, 3, 100, device="cuda")
        o, w, u, final = torch.ops.kdakit.prefill(q, q, q, q, beta, 32)
        assert (o.shape, w.shape, u.shape, final.shape) == ((2, 3, 100, 64), (2, 3, 4, 32, 64), (2, 3, 4, 32, 64), (2, 3, 64, 64))
        assert [x.shape for x in torch.ops.kda_prefill.forward(q, q, q, q, beta, 64)] == [o.shape, (2, 3, 2, 64, 64), (2, 3, 2, 64, 64)]
        with pytest.raises(ValueError, match="chunk_size must be 32 or 64, got 16"):
            torch.ops.kdakit.prefill(q, q, q, q, beta, 16)
        with pytest.raises(ValueError, match=r"beta must be \(2, 3, 100\), got \(2, 100, 3\)"):
            torch.ops.kdakit.prefill(q, q, q, q, beta.transpose(1, 2), 32)
        with pytest.raises(TypeError, match="g must be float32"):
            torch.ops.kdakit.prefill(q, q, q, q.double(), beta, 32)
