"""`kdakit tpu-report`: parts that crash or hang cost themselves alone, the file is there at every moment, and it runs without a TPU."""

from __future__ import annotations

import json

import pytest

from kdakit.cli.main import main
from kdakit.measure import records, tpu_report
from kdakit.measure.tpu_report import Part


def test_parts_begin_with_the_device_and_end_with_times():
    for tiny in (False, True):
        names = [part.name for part in tpu_report.parts(tiny=tiny)]
        assert names[0] == tpu_report.DEVICE and names[-1] == "time of decode" and len(set(names)) == len(names)
        assert names.index("pools") > max(i for i, name in enumerate(names) if name.startswith(("forward", "gradients")))
        assert all("{json}" in part.words for part in tpu_report.parts(tiny=tiny))


def test_a_part_that_crashes_or_hangs_costs_itself_alone(tmp_path):
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"kind": "TPU x", "count": 4, "results": [{"ok": True}]}))
    copy = ("json.tool", str(given), "{json}")
    parts = [
        Part(tpu_report.DEVICE, copy, 1), Part("crash", ("no_module_of_this_name",), 1), Part("hang", ("http.server", "0"), 0.02),
        Part("cases", copy, 1),
    ]  # fmt: skip
    saved, told = [], []
    report = tpu_report.collect(parts, lambda r: saved.append(json.loads(json.dumps(r))), lambda row: told.append(tpu_report.verdict(row)))
    assert [len(r["results"]) + len(r["missing"]) for r in saved] == [1, 2, 3, 4] and saved[-1] == report
    assert report["machine"]["device"] == "TPU x" and [row["part"] for row in report["results"]] == ["device", "cases"]
    crash, hang = report["missing"]
    assert crash["code"] == 1 and "No module named" in crash["said"] and hang["code"] is None
    assert told[0] == "4 x TPU x" and told[1].startswith("crash ended with code 1") and told[3] == "1 of 1 right"
    assert "still running after" in told[2] and not tpu_report.ok(report)
    assert tpu_report.ok(tpu_report.collect(parts[::3], lambda r: None))
    assert [fault for fault in records.faults(report | {"commit": "x"}) if fault] == []


def test_without_a_tpu_the_interpreter_answers(tmp_path, capsys):
    pytest.importorskip("jax")
    file = tmp_path / "report.json"
    assert main(["tpu-report", "--tiny", "--part", "device", "pools", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    pools = report["results"][1]["record"]["results"]
    assert report["kind"] == "tpu_report" and report["machine"]["device"] == "cpu" and pools[0]["ok"] and pools[0]["used"]["o"] > 0
    assert f"Please send {file}" in capsys.readouterr().out


def test_usage(tmp_path, capsys):
    assert main(["tpu-report", "--part", "pool"]) == 2 and "pools" in capsys.readouterr().err
    assert main(["tpu-report", "--minutes", "0"]) == 2 and main(["tpu-report", "--json", str(tmp_path)]) == 2
    assert main(["tpu-report", "--list"]) == 0 and "pools: python -m kdakit.measure.tpu_report pools" in capsys.readouterr().out
