"""Weight files and checkpoints on bad days: mangled, hostile, a disk that is full, killed writers, two runs in one folder."""

import errno
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("safetensors")

from kdakit.cli.main import main
from kdakit.models import disk, weights
from kdakit.models.config import ModelConfig
from kdakit.models.initial import initial_weights
from kdakit.training import checkpoint
from kdakit.training.optimizer import AdamW, TrainingState

TINY = ModelConfig(vocab_size=16, hidden_size=8, num_layers=1, attention_every=0, num_heads=1, head_dim=4)
DATA = {"text": None, "sha256": "", "batch": 1, "length": 8, "seed": 0}


def a_checkpoint(step=1, seed=0):
    arrays = initial_weights(TINY, seed)
    zeros = {name: np.zeros_like(x) for name, x in arrays.items()}
    return checkpoint.Checkpoint(TINY, AdamW(steps=9), TrainingState(arrays, zeros, dict(zeros), step), dict(DATA))


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@contextmanager
def within(seconds=1.0, megabytes=100):
    tracemalloc.start()
    began = time.process_time()
    yield
    spent, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert spent < seconds and peak < megabytes << 20, (spent, peak)


# Weight files


def test_a_small_file_that_claims_a_million_layers(tmp_path):
    path = tmp_path / "m.safetensors"
    config = TINY.to_dict() | {"num_layers": 10**6}
    path.write_bytes(weights.to_bytes(initial_weights(TINY), {weights.CONFIG_KEY: json.dumps(config)}))
    with within(), pytest.raises(weights.WeightsError, match=r"must hold the \d+ parameters of the model, got \d+"):
        weights.load(path)


@pytest.mark.parametrize(
    "options", [dict(), dict(attention_every=3), dict(tie_embeddings=False, conv_bias=True), dict(use_short_conv=False)]
)
def test_parameters_are_counted_without_naming_them(options):
    config = ModelConfig(num_layers=7, **(dict(attention_every=0) | options))
    assert config.parameter_count() == len(config.parameters())


@pytest.mark.parametrize("dtype", [np.int64, bool, np.int8, np.uint16])
def test_weights_are_floats(tmp_path, dtype):
    path, arrays = tmp_path / "m.safetensors", initial_weights(TINY)
    arrays["model.norm.weight"] = np.ones(8, dtype)
    weights.write_whole(path, weights.to_bytes(arrays, {weights.CONFIG_KEY: json.dumps(TINY.to_dict())}))
    with pytest.raises(weights.WeightsError, match=r"model\.norm\.weight must be floats"):
        weights.load(path)
    with pytest.raises(TypeError, match=r"model\.norm\.weight must be floats"):
        weights.save(path, TINY, arrays)


DEEP = "[" * 50_000 + "]" * 50_000


@pytest.mark.parametrize("content", [
    safetensors(DEEP.encode()),
    safetensors({"__metadata__": {weights.CONFIG_KEY: DEEP}}),
    safetensors({"__metadata__": {weights.CONFIG_KEY: '{"num_layers": ' + "9" * 4000 + "}"}}),
    safetensors({"__metadata__": {weights.CONFIG_KEY: '{"expand_v": Infinity}'}}),
    safetensors({"__metadata__": {weights.CONFIG_KEY: '{"expand_v": "1"}'}}),
    safetensors({"__metadata__": {weights.CONFIG_KEY: '{"tie_embeddings": "no"}'}}),
    safetensors({"__metadata__": {weights.CONFIG_KEY: "[1]"}}),
    safetensors({"__metadata__": {weights.CONFIG_KEY: 5}}),
    safetensors({"__metadata__": 5}),
    safetensors({"a": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]}}),
    safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}),
    safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [float("inf"), 4]}}),
    safetensors({"a": 5}),
    safetensors(b"{}"),
    safetensors(b"[]"),
    (2**63).to_bytes(8, "little") + b"{}",
    b"\xff" * 9,
    b"",
], ids=range(18))  # fmt: skip
def test_hostile_weight_files(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with within(), pytest.raises(weights.WeightsError, match=r"m\.safetensors"):
        weights.load(path)


def test_a_file_far_larger_than_its_arrays_is_not_read(tmp_path):
    path = tmp_path / "m.safetensors"
    weights.save(path, TINY, initial_weights(TINY))
    os.truncate(path, 1 << 36)  # sparse
    with within(), pytest.raises(weights.WeightsError, match="claims"):
        weights.load(path)


def mangled(rng, data):
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        if kind == 1:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        else:  # within the header, where all claims are, and among its digits
            places = [i for i in range(min(len(changed), 4000)) if kind == 2 or chr(changed[i]).isdigit()]
            changed[rng.choice(places)] = rng.randrange(256) if kind == 2 else rng.choice(b"0123456789")
    return bytes(changed)


def test_mangled_weight_files_are_refused_or_read(tmp_path):
    """Nothing but WeightsError, whatever the bytes; what is read has the shapes that its configuration says."""
    rng, path, refused = random.Random(0), tmp_path / "m.safetensors", 0
    weights.save(path, TINY, initial_weights(TINY))
    data = path.read_bytes()
    with within(seconds=20):
        for _ in range(200):
            path.write_bytes(mangled(rng, data))
            began = time.process_time()
            try:
                config, arrays = weights.load(path)
            except weights.WeightsError:
                refused += 1
            else:
                weights.check_weights(config, arrays)
            assert time.process_time() - began < 1
    assert 100 < refused < 200


def test_mangled_checkpoints_are_refused_or_read(tmp_path):
    rng, refused = random.Random(1), 0
    checkpoint.save(tmp_path, a_checkpoint())
    whole = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with within(seconds=20):
        for _ in range(150):
            path = rng.choice(sorted(whole))
            path.write_bytes(mangled(rng, whole[path]))
            began = time.process_time()
            try:
                checkpoint.load(tmp_path)
            except checkpoint.CheckpointError:
                refused += 1
            assert time.process_time() - began < 1
            path.write_bytes(whole[path])
    assert refused > 100


@pytest.mark.parametrize("change, message", [
    (dict(step=float("inf")), "step must be an integer"), (dict(step=True), "step must be an integer"), (dict(data=[1]), "data must be"),
    (dict(curve={}), "curve a list"), (dict(files=[]), "must name"), (dict(config=[]), "does not describe"),
    (dict(files={"weights-/../../secret": {}, "moments-1": {}}), "files of its own folder"),
    (dict(config=TINY.to_dict() | {"num_layers": 10**6}), "must hold the"), (dict(optimizer={"steps": "many"}), "does not describe"),
])  # fmt: skip
def test_hostile_indices(tmp_path, change, message):
    checkpoint.save(tmp_path, a_checkpoint())
    index = tmp_path / checkpoint.INDEX
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with within(), pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(tmp_path)
    index.write_text(DEEP)
    with pytest.raises(checkpoint.CheckpointError, match="nested too deeply"):
        checkpoint.load(tmp_path)


def test_moments_have_the_shapes_of_their_weights(tmp_path):
    wrong = a_checkpoint()
    wrong.state.first["model.norm.weight"] = np.zeros(3, np.float32)
    checkpoint.save(tmp_path, wrong)
    with pytest.raises(checkpoint.CheckpointError, match=r"model.norm.weight must be \[8\], got \[3\]"):
        checkpoint.load(tmp_path)


# Writing


def test_files_have_the_mode_that_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        weights.save(tmp_path / "m.safetensors", TINY, initial_weights(TINY))
        checkpoint.save(tmp_path / "run", a_checkpoint())
    finally:
        os.umask(before)
    for path in (tmp_path / "m.safetensors", *(tmp_path / "run").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path


def test_names_are_on_the_disk_too(tmp_path, monkeypatch):
    """The folder is synced after every new name, and after the file's own bytes."""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names)))
    checkpoint.save(tmp_path, a_checkpoint())
    assert done == ["file", "name", "folder"] * 3


def test_what_killed_writers_left_goes_and_what_living_ones_write_stays(tmp_path):
    checkpoint.save(tmp_path, a_checkpoint())
    for name in (".weights-00000007.safetensors.ab12.part", ".checkpoint.json.x_1.part", "weights-00000007.safetensors"):
        (tmp_path / name).write_bytes(b"torn")
    handle, living = disk._new_part(tmp_path / "weights-00000003.safetensors")
    checkpoint.save(tmp_path, a_checkpoint(2))
    assert names(tmp_path) == sorted([living.name, "checkpoint.json", "moments-00000002.safetensors", "weights-00000002.safetensors"])
    os.close(handle)
    checkpoint.save(tmp_path, a_checkpoint(3))
    assert names(tmp_path) == ["checkpoint.json", "moments-00000003.safetensors", "weights-00000003.safetensors"]
    path = tmp_path / "m.safetensors"
    (tmp_path / ".m.safetensors.zz.part").write_bytes(b"torn")
    weights.save(path, TINY, initial_weights(TINY))
    assert not (tmp_path / ".m.safetensors.zz.part").exists()


def test_the_same_step_again_with_other_weights(tmp_path, monkeypatch):
    """Never over the files that the index names: stopped before the index, the old ones are whole."""
    checkpoint.save(tmp_path, a_checkpoint(4, seed=0))
    replace = os.replace

    def stop(source, target):
        if str(target).endswith(".json"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", stop)
        checkpoint.save(tmp_path, a_checkpoint(4, seed=1))
    old = checkpoint.load(tmp_path)
    assert (old.state.weights["model.embeddings.weight"] == initial_weights(TINY, 0)["model.embeddings.weight"]).all()
    checkpoint.save(tmp_path, a_checkpoint(4, seed=1))
    new = checkpoint.load(tmp_path)
    assert (new.state.weights["model.embeddings.weight"] == initial_weights(TINY, 1)["model.embeddings.weight"]).all()
    assert len(names(tmp_path)) == 3


@contextmanager
def largest_file(size):
    """As if the disk were full: no file grows beyond it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 3000, 8000])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path, size):
    checkpoint.save(tmp_path, a_checkpoint(1))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert max(map(len, before.values())) > 8000
    with largest_file(size), pytest.raises(OSError, match="File too large"):
        checkpoint.save(tmp_path, a_checkpoint(2))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    checkpoint.save(tmp_path, a_checkpoint(2))
    assert checkpoint.load(tmp_path).state.step == 2


SMALL = ["--layers", "1", "--hidden", "16", "--heads", "1", "--head-dim", "8", "--batch", "2", "--length", "24", "--attention-every", "0",
         "--steps", "2", "--every", "1"]  # fmt: skip


def test_training_on_a_full_disk_says_so(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    saves, write = [], weights.write_whole

    def full(path, data):
        saves.append(path)
        if len(saves) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    monkeypatch.setattr(weights, "write_whole", full)
    assert main(["train", "--out", str(tmp_path / "run"), "--framework", "torch", *SMALL]) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said and "the checkpoint before it is whole" in said and "Traceback" not in said
    assert checkpoint.load(tmp_path / "run").state.step == 1


def test_two_runs_do_not_share_a_folder(tmp_path, capsys):
    pytest.importorskip("torch")
    folder = tmp_path / "run"
    folder.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from kdakit.models.disk import only_writer\n"
         f"with only_writer({str(folder)!r}): print('mine', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout.readline() == "mine\n"
    with pytest.raises(disk.InUse, match="another process writes"):
        checkpoint.save(folder, a_checkpoint())
    assert main(["train", "--out", str(folder), "--framework", "torch", *SMALL]) == 2
    assert "another process writes" in capsys.readouterr().err and names(folder) == []
    holder.kill()  # whoever is killed holds nothing
    holder.communicate()
    with disk.only_writer(folder):
        checkpoint.save(folder, a_checkpoint())
    checkpoint.save(folder, a_checkpoint(2))
    assert checkpoint.load(folder).state.step == 2


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from test_files import a_checkpoint
from kdakit.training import checkpoint
step = checkpoint.load({folder!r}).state.step
one = a_checkpoint()
print("begun", flush=True)
while True:
    step += 1
    one.state.step = step
    checkpoint.save({folder!r}, one)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_kill_9_at_random_moments_of_a_save(tmp_path):
    """After each kill the folder holds a whole checkpoint, no older than the one before, and the next save leaves no trace of the kill."""
    rng, step = random.Random(int(os.environ.get("KDAKIT_SEED", "0"))), 1
    checkpoint.save(tmp_path, a_checkpoint())
    for _ in range(int(os.environ.get("KDAKIT_KILLS", "6"))):
        code = WRITER.format(folder=str(tmp_path), tests=os.path.dirname(__file__))
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "begun\n"
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        writer.communicate()
        found = checkpoint.load(tmp_path)
        assert found.state.step >= step
        step = found.state.step + 1
        checkpoint.save(tmp_path, a_checkpoint(step))
        assert names(tmp_path) == ["checkpoint.json", f"moments-{step:08}.safetensors", f"weights-{step:08}.safetensors"]
