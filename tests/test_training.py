"""Training: data, schedule, the same steps in both frameworks, checkpoints that survive anything, and the commands around them."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("safetensors")

from kdakit.cli.main import main
from kdakit.models import weights
from kdakit.models.config import ModelConfig
from kdakit.training import checkpoint, text
from kdakit.training.optimizer import AdamW, decays
from kdakit.training.recall import Recall, accuracy

TINY = ModelConfig(vocab_size=256, hidden_size=16, num_layers=1, attention_every=0, num_heads=1, head_dim=8)
SMALL_RUN = [
    "--layers",
    "1",
    "--hidden",
    "16",
    "--heads",
    "1",
    "--head-dim",
    "8",
    "--batch",
    "2",
    "--length",
    "24",
    "--attention-every",
    "0",
]


def learner(framework, config=TINY, seed=0, accumulate=1, **settings):
    for package in ("torch",) if framework == "torch" else ("jax", "flax", "optax"):
        pytest.importorskip(package)
    import importlib

    return importlib.import_module(f"kdakit.training.{framework}").Learner(
        config, AdamW(**dict(steps=10, warmup=2) | settings), seed, accumulate=accumulate
    )


# Data


def test_recall_asks_for_what_was_written_last():
    task = Recall(keys=12, values=5, pairs=4, writes=3)
    tokens, targets = task.batch(np.random.default_rng(0), 50)
    assert tokens.shape == targets.shape == (50, task.length) == (50, 28) and task.vocab_size == 17
    for row, answers in zip(tokens, targets, strict=True):
        memory = {}
        for key, value in row[:24].reshape(-1, 2):
            assert key < 12 <= value
            memory[key] = value
        assert len(memory) == 4 and set(row[24:]) == set(memory) and (answers[:24] == -1).all()
        assert [memory[key] for key in row[24:]] == list(answers[24:])


def test_recall_is_drawn_anew_by_every_seed_and_checked():
    task = Recall()
    first, again, other = (task.batch(np.random.default_rng(s), 4)[0] for s in (0, 0, 1))
    assert (first == again).all() and (first != other).any()
    with pytest.raises(ValueError, match=r"pairs must lie in 1 \.\. keys = 3, got 4"):
        Recall(keys=3, pairs=4)
    with pytest.raises(ValueError, match="must be positive"):
        Recall(writes=0)


def test_accuracy_counts_questions_only():
    logits = np.eye(3)[[[0, 1, 2, 1]]]
    assert accuracy(logits, np.array([[-1, 1, 2, 0]])) == pytest.approx(2 / 3)


def test_the_book_is_the_same_every_time_and_answers_its_own_questions():
    book = text.book(20_000)
    assert book == text.book(20_000) and len(book) == 20_000 and book != text.book(20_000, seed=8)
    for line in book.decode("ascii").splitlines()[:-1]:
        where = {}
        for sentence in line.replace("? ", "! ").split(". "):
            question, _, answer = sentence.partition("! In ")
            if answer:
                assert where[question.removeprefix("Where is ")] == answer.rstrip(".")
            for thing in text.THINGS:
                for link in (" in ", " to "):
                    if f"{thing}{link}" in sentence:
                        where[thing] = sentence.split(f"{thing}{link}")[1].rstrip(".")


def test_batches_of_text():
    data, held_out = text.split(bytes(range(100)), 0.1)
    assert len(data) == 90 and list(held_out) == list(range(90, 100))
    tokens, targets = text.batch(data, np.random.default_rng(0), 3, 20)
    assert tokens.shape == (3, 20) and (targets == tokens + 1).all()
    with pytest.raises(ValueError, match="longer than the 95 bytes"):
        text.batch(data, np.random.default_rng(0), 1, 95)


# Steps


def test_schedule():
    settings = AdamW(learning_rate=1.0, steps=100, warmup=10, floor=0.1)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9 + int(np.argmax(rates[9:]))] <= 1
    assert rates[100] == pytest.approx(0.1) and rates[50] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert decays("model.layers.0.mlp.up_proj.weight", 2) and not decays("model.embeddings.weight", 2) and not decays("A_log", 1)
    with pytest.raises(ValueError, match="learning_rate must be positive, got 0"):
        AdamW(learning_rate=0)


def batches(count, seed=0):
    return [text.batch(np.frombuffer(text.book(5000), np.uint8), np.random.default_rng([seed, i]), 2, 24) for i in range(count)]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_target_counts_alike_in_pieces(framework):
    """A piece without any, and one with a few: the mean is one over the batch, not of the pieces' means."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 256, (2, 3, 7))
    targets[0], targets[1, 2:] = -1, -100
    found = [learner(framework, accumulate=n) for n in (1, 3)]
    losses = [[x.step(tokens, targets) for _ in range(2)] for x in found]
    assert np.isfinite(losses).all() and losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] == pytest.approx(learner(framework).loss(tokens, targets), rel=1e-5)


def test_both_frameworks_learn_alike_and_take_over_from_each_other():
    """Five steps here, five there; then each takes the other's state and makes a sixth."""
    ours, theirs = learner("torch", decay=0.1), learner("jax", decay=0.1)
    given = batches(6)
    for tokens, targets in given[:5]:
        assert ours.step(tokens, targets) == pytest.approx(theirs.step(tokens, targets), rel=2e-4)
    a, b = ours.state(), theirs.state()
    assert a.step == b.step == 5
    for name in a.weights:
        np.testing.assert_allclose(b.weights[name], a.weights[name], atol=2e-3 * np.abs(a.weights[name]).max())
    ours.load(b)
    theirs.load(a)
    for one in (ours, theirs):
        one.step(*given[5])
    for kind in ("weights", "first", "second"):
        for name, value in getattr(ours.state(), kind).items():
            other = getattr(theirs.state(), kind)[name]
            np.testing.assert_allclose(other, value, atol=5e-3 * np.abs(value).max() + 1e-12, err_msg=f"{kind} {name}")
    assert ours.loss(*given[0]) == pytest.approx(theirs.loss(*given[0]), rel=1e-3)
    np.testing.assert_allclose(theirs.logits(given[0][0]), ours.logits(given[0][0]), atol=5e-3)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_resumed_learner_goes_on_bit_for_bit(framework, tmp_path):
    if framework == "jax":
        pytest.importorskip("flax")
    one, given = learner(framework), batches(6)
    losses = [one.step(*pair) for pair in given[:3]]
    checkpoint.save(tmp_path, checkpoint.Checkpoint(TINY, one.settings, one.state()))
    losses += [one.step(*pair) for pair in given[3:]]
    again = learner(framework, seed=9) if framework == "torch" else one  # a second one in JAX would compile everything again
    again.load(checkpoint.load(tmp_path).state)
    assert [again.step(*pair) for pair in given[3:]] == losses[3:]


# Checkpoints


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint after three steps, and its contents."""
    one = learner("torch")
    [one.step(*pair) for pair in batches(3)]
    checkpoint.save(tmp_path / "run", checkpoint.Checkpoint(TINY, one.settings, one.state(), {"seed": 0}, [{"step": 3, "loss": 1.0}]))
    return tmp_path / "run"


def contents(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_a_checkpoint_comes_back_as_it_was(saved):
    one = learner("torch")
    [one.step(*pair) for pair in batches(3)]
    found = checkpoint.load(saved)
    assert (found.config, found.optimizer, found.state.step) == (TINY, one.settings, 3)
    assert found.data == {"seed": 0} and found.curve == [{"step": 3, "loss": 1.0}]
    for kind in ("weights", "first", "second"):
        for name, value in getattr(one.state(), kind).items():
            np.testing.assert_array_equal(getattr(found.state, kind)[name], value)


def test_saving_again_replaces_the_files(saved):
    found = checkpoint.load(saved)
    found.state.step = 4
    checkpoint.save(saved, found)
    assert sorted(contents(saved)) == ["checkpoint.json", "moments-00000004.safetensors", "weights-00000004.safetensors"]
    config, arrays = weights.load(saved / "weights-00000004.safetensors")
    assert config == TINY and set(arrays) == set(TINY.parameters())


def damage(kind, folder):
    part, index = folder / "weights-00000003.safetensors", folder / "checkpoint.json"
    data = part.read_bytes()
    if kind == "truncated":
        part.write_bytes(data[:-100])
    elif kind == "corrupted":
        part.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif kind == "missing":
        part.unlink()
    elif kind == "torn index":
        index.write_text(index.read_text()[:200])
    elif kind == "foreign index":
        index.write_text('{"architectures": ["LlamaForCausalLM"]}')
    elif kind == "no index":
        index.unlink()
    elif kind == "field gone":
        index.write_text(json.dumps({k: v for k, v in json.loads(index.read_text()).items() if k != "optimizer"}))
    elif kind == "other model":
        found = json.loads(index.read_text())
        found["config"]["hidden_size"] = 32
        index.write_text(json.dumps(found))


DAMAGES = [
    ("truncated", "weights-00000003.safetensors must have .* bytes, got .*: it is truncated"), ("corrupted", "its bytes have changed"),
    ("missing", "belongs to the checkpoint and is missing"), ("torn index", "must be JSON"), ("foreign index", "must have the format"),
    ("no index", "must be a folder with checkpoint.json"), ("field gone", "must name 'optimizer'"),
    ("other model", "does not describe a kdakit checkpoint: .* must be .*, got"),
]  # fmt: skip


@pytest.mark.parametrize("kind, message", DAMAGES)
def test_bad_checkpoints_are_refused_and_left_alone(saved, kind, message, capsys):
    damage(kind, saved)
    before = contents(saved)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(saved)
    for words in (["train", "--resume", "--out", str(saved)], ["generate", str(saved)]):
        assert main(words) == 2
        assert str(saved) in capsys.readouterr().err
    assert contents(saved) == before


# The commands


def test_train_twice_and_generate(tmp_path, capsys):
    """The same options give the same curve. Then the same text in both frameworks."""
    pytest.importorskip("torch")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(["train", "--out", str(whole), "--steps", "6", "--every", "2", *SMALL_RUN]) == 0
    assert main(["train", "--out", str(parts), "--steps", "6", "--every", "2", *SMALL_RUN, "--framework", "torch"]) == 0
    losses = lambda folder: [(row["step"], row["loss"], row["held_out"]) for row in checkpoint.load(folder).curve]
    assert losses(whole) == losses(parts)
    assert "held out" in capsys.readouterr().out
    assert main(["train", "--out", str(whole), "--steps", "6"]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err
    assert main(["train", "--out", str(whole), "--resume", "--hidden", "32"]) == 2
    assert "--hidden must be 16" in capsys.readouterr().err
    said = {}
    for framework in ("torch", "jax"):
        if framework == "jax":
            pytest.importorskip("flax")
        words = ["generate", str(whole), "--prompt", "Where is", "--tokens", "12", "--temperature", "0", "--framework", framework]
        assert main(words) == 0
        said[framework] = capsys.readouterr().out
    assert said["torch"] == said["jax"] and said["torch"].startswith("Where is") and len(said["torch"].encode()) >= 20


def spawn(folder, *words):
    command = [sys.executable, "-m", "kdakit.cli.main", "train", "--out", str(folder), "--every", "2", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_kill_9_loses_at_most_the_last_interval(tmp_path):
    """Killed without warning as soon as a second checkpoint shows; the resumed run repeats the curve of one that was left alone."""
    pytest.importorskip("torch")
    folder, options = tmp_path / "killed", ["--steps", "30", *SMALL_RUN]
    process = spawn(folder, *options)
    end = time.monotonic() + 120
    while time.monotonic() < end and not list(folder.glob("weights-0000000[4-9]*")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    found = checkpoint.load(folder)
    assert 2 <= found.state.step < 30 and found.state.step % 2 == 0
    resumed = spawn(folder, "--resume")
    said, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    assert main(["train", "--out", str(tmp_path / "whole"), "--every", "2", *options]) == 0
    curves = [[(row["step"], row["loss"]) for row in checkpoint.load(f).curve] for f in (folder, tmp_path / "whole")]
    assert [step for step, _ in curves[0]] == list(range(2, 31, 2))
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-6)


@pytest.mark.parametrize("moment", range(6))
def test_whatever_moment_a_save_is_interrupted_the_folder_is_whole(saved, monkeypatch, moment):
    """Stop at each rename and each removal of a save in turn: what is there afterwards loads, old or new."""
    found, count = checkpoint.load(saved), 0
    found.state.step = 4

    class Stopped(BaseException):
        pass

    def counting(action):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count > moment:
                raise Stopped
            return action(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counting(os.replace))
        patch.setattr(checkpoint.Path, "unlink", counting(checkpoint.Path.unlink))
        try:
            checkpoint.save(saved, found)
            complete = True
        except Stopped:
            complete = False
    assert checkpoint.load(saved).state.step == (4 if complete or moment >= 3 else 3)


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "nowhere.txt"], "the text must be a file that can be read, got: [Errno 2] No such file or directory"),
        (["train", "."], "the text must be a file that can be read, got: [Errno 21] Is a directory"),
        (["train", "--heads", "0"], "num_heads must be a positive integer, got 0"),
        (["train", "--every", "0"], "--every must be positive"),
        (["train", "--batch", "0"], "--batch must be positive"),
        (["train", "--hidden", "0"], "hidden_size must be an integer of at least 1, got 0"),
        (["train", "--steps", "0"], "steps must be positive, got 0"),
        (["train", "--seed", "-1"], "--seed must not be negative, got -1"),
        (["train", "--resume"], "must be a folder with checkpoint.json"),
        (["generate", "nowhere"], "nowhere must be a folder of kdakit train or a .safetensors file"),
        (["generate", ".", "--tokens", "0"], "--tokens at least 1"),
        (["generate", ".", "--temperature", "nan"], "--temperature at least 0, got '\\n', 400, nan"),
    ],
)
def test_mistakes_exit_with_2(words, message, capsys, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_text_that_changed_is_refused(tmp_path, capsys):
    pytest.importorskip("torch")
    source, folder = tmp_path / "text.txt", tmp_path / "run"
    source.write_bytes(text.book(3000))
    assert main(["train", str(source), "--out", str(folder), "--steps", "2", *SMALL_RUN]) == 0
    source.write_bytes(text.book(3000, seed=1))
    before = contents(folder)
    assert main(["train", "--resume", "--out", str(folder)]) == 2
    assert "has changed since" in capsys.readouterr().err and contents(folder) == before
    source.write_bytes(b"too short")
    assert main(["train", str(source), "--out", str(tmp_path / "other"), "--steps", "2", *SMALL_RUN]) == 2
    assert "the text must have at least 500 bytes for sequences of 24, got" in capsys.readouterr().err
    assert [len(text.split(b"x" * size)[1]) for size in (499, 500)] == [24, 25]  # of which a batch needs one more than its length


def test_a_run_that_diverges_keeps_its_last_checkpoint(tmp_path, capsys):
    pytest.importorskip("torch")
    words = ["--framework", "torch", "--out", str(tmp_path), "--learning-rate", "1e30", "--every", "1", "--steps", "4"]
    assert main(["train", *words, *SMALL_RUN]) == 1
    said = capsys.readouterr().err
    step = checkpoint.load(tmp_path).state.step
    assert "must be finite" in said and f"the checkpoint of step {step} stays" in said and 0 < step < 4
