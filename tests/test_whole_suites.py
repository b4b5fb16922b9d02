"""The suites of whole layers, models and servers: entries by name, tables of what they found. Timing needs a GPU; the rest runs here."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from kdakit.measure import records, step_profile, whole_layers, whole_models, whole_serving
from kdakit.measure.choices import UsageError
from kdakit.models import place

SERVED = whole_serving.Settings(size="small", sequences=(1, 3), prompt=20, steps=2, lengths=(64,), generated=4)
MODEL = whole_models.Settings(size="small", length=16, curve=2)


def cpu(*_):
    return place.find("torch", "cpu", "float32")


@pytest.fixture
def on_a_cpu(monkeypatch, tmp_path):
    """A function: a suite run here, and the record that it kept."""
    find = place.find
    monkeypatch.setattr(place, "find", lambda framework, *_: find(framework, "cpu", "float32"))
    monkeypatch.setattr(whole_serving, "_kernels", lambda call: (call(), 1.0)[1])
    monkeypatch.setattr(whole_serving, "Settings", lambda: SERVED)

    def run(suite, *entries):
        path = str(tmp_path / "record.json")
        made = suite.run(SimpleNamespace(entry=list(entries), json=path, model_steps=None, curve=None))
        assert records.load(path)["results"] == made["results"]
        return made

    return run


def test_serving_by_entries(on_a_cpu):
    made = on_a_cpu(whole_serving, "engine n3", "first token", "decode n3", "generate", "memory")
    assert [r["entry"] for r in made["results"]] == ["engine", "first token", "decode", "generate", "memory"], "in the order asked for"
    engine, first, decode, generate, _ = made["results"]
    assert len(engine["samples_ms"]) == 2 and engine["sequences"] == 3
    assert first["very_first_ms"] == first["samples_ms"][0] and decode["following_ms"] > 0
    assert generate["graph_tokens_per_s"] > 0 and generate["plain_tokens_per_s"] > 0
    titles = [title for title, *_ in whole_serving.tables(made)]
    assert len(titles) == 4 and "first token of 20" in titles[0]
    with pytest.raises(UsageError, match="entry must be among first token, decode n1"):
        on_a_cpu(whole_serving, "decode n2")


def test_a_record_without_following_steps_still_has_its_table():
    row = dict(entry="decode", sequences=1, median_ms=2.0, p99_ms=3.0, kernels_ms=1.0, tokens_per_s=500.0)
    made = {"settings": vars(SERVED) | {"dtype": "bfloat16"}, "results": [row, {"entry": "first token", "ms": 5.0}]}
    ((_, header, rows),) = whole_serving.tables(made)
    assert rows == [["1", "2.00", "3.00", "1.00", "2.00", "500"]] and len(header) == 6


def test_curves_begin_alike_and_part_by_rounding():
    entries = whole_models.entries(MODEL, cpu())
    assert list(entries) == ["train kdakit", "train fla", "curve kdakit", "curve fla", "curve kdakit, other rounding",
                             "curve fla, other rounding", "profile kdakit", "profile fla"]  # fmt: skip
    rows = [entries[name]() for name in ("curve kdakit", "curve kdakit, other rounding")]
    first, again = (r["losses"] for r in rows)
    assert len(first) == 2 and first != again and first == pytest.approx(again, abs=0.05)
    tables = list(whole_models.tables({"settings": vars(MODEL) | {"dtype": "float32"}, "results": rows}))
    assert [len(rows) for *_, rows in tables] == [2, 1]


def test_a_steps_parts_and_kernels():
    one, ticks = whole_models.learner(MODEL, cpu(), "kdakit"), itertools.count()
    given = whole_models._batch(whole_models._book(), 0, 0, 2, 16)
    parts = step_profile.by_part(one, [given, given], lambda: next(ticks), lambda a, b: b - a, lambda: None)
    blocks, attention = 4, 1
    both = lambda part, count: {part: count, part + ", backward": count}
    assert parts == {
        "embedding": 1, "embedding, backward": 1, **both("KDA", blocks - attention), **both("attention", attention), **both("MLP", blocks),
        **both("norms and residuals", 2 * blocks + 1), **both("head and loss", 1), "gradients to float32": 1, "clipping": 1, "AdamW": 1,
        "weights to bfloat16": 1,
    }  # fmt: skip
    made = step_profile.tabulated([("b", 10, 20), ("a", 0, 8), ("b", 15, 30), ("a", 28, 29)], 2)
    assert made["busy_ms"] == 0.014 and made["idle_ms"] == 0.001 and made["launches"] == 2
    assert made["kernels"] == [{"kernel": "b", "ms": 0.0125, "launches": 1}, {"kernel": "a", "ms": 0.0045, "launches": 1}]
    row = {"entry": "profile", "contestant": "kdakit", "step_ms": 1.0, "host_ms": 2.0, "parts_ms": parts, **made}
    (_, _, shown), (_, _, longest) = whole_models.tables({"settings": vars(MODEL) | {"dtype": "float32"}, "results": [row]})
    assert shown[:2] == [["step", "1.0"], ["host until the call returns", "2.0"]] and longest[0] == ["b", "0.01", "1"]


def test_entries_of_the_layer():
    names = list(whole_layers.entries(whole_layers.Settings()))
    wanted = {"train h16 t8192", "train h64 t8192", "train h32 t1024", "train h32 t32768", "decode n1 t1", "decode n32 t1", "decode n1 t4"}
    assert wanted <= set(names)
