"""Campaigns of random problems: workers that may crash or hang, a command that repeats what failed, tables of what was shown."""

import json
import os
import signal
import time

import pytest
from pretended import pretend

from kdakit.cli.main import main
from kdakit.measure import campaign
from kdakit.measure.random_problems import MORE, PER_FORM, draw, numbers

pytest.importorskip("torch")


def test_a_crash_is_a_result(monkeypatch):
    monkeypatch.setattr(campaign, "HANGS", 3.0)
    found = {int(v.label) // 2: v for v in campaign.search(numbers(0, 10), "torch_native", None, 2, judge=pretend)}
    assert set(found) == set(range(10)), "every problem has its verdict"
    assert {n for n, v in found.items() if not v.ok} == {3, 5, 7, 8}
    assert "exit code 139" in found[3].complaint and "nothing came" in found[5].complaint and found[7].deadly


def test_time_runs_out(monkeypatch):
    begun = time.monotonic()
    found = list(campaign.search([10, 12, 16], "torch_native", None, 1, minutes=0.05, judge=pretend))
    assert time.monotonic() - begun < 50 and len(found) < 3, "one of them would take a minute"


def test_workers_do_not_hear_ctrl_c():
    """A terminal sends it to all processes; each would say where it was."""
    worker = campaign.Worker(pretend, "torch_native", None)
    for number in (0, 2):
        os.kill(worker.process.pid, signal.SIGINT)
        worker.give(str(number))
        assert worker.wait().ok
    worker.stop()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_what_time_may_end_is_a_sample():
    """Else the widest heads of one dtype would be all that is tried."""
    drawn = list(numbers(1, 40 * PER_FORM, shared=True))
    of = lambda queue: [(d.dtype, d.K > 64) for d in (draw(int(labels[0])) for labels in queue.forms.values())]
    ranked, sampled = of(campaign.Queue(drawn)), of(campaign.Queue(drawn, as_drawn=True))
    assert sorted(ranked) == sorted(sampled) and len(ranked) == 40
    assert {*ranked[:6]} == {("bfloat16", True)}
    assert len({*sampled[:12]}) > 3


def test_forms_of_a_family_wait_for_its_first():
    queue = campaign.Queue(numbers(1, 27 * 76, shared=True))
    first = queue.next_form()
    family = queue.family[first]
    queue.forms.pop(first)
    second = queue.next_form()
    assert queue.family[second] != family
    queue.warm.add(family)
    assert any(queue.family[form] == family for form in queue.forms)
    assert queue.left() == sum(map(len, queue.forms.values()))


def test_the_command(tmp_path, capsys, monkeypatch):
    """`kdakit verify --random`, its JSON, and `--problem` for one of its numbers."""
    file = tmp_path / "random.json"
    words = ["verify", "--random", "6", "--seed", "41", "--backend", "torch_native", "--workers", "2", "--dtype", "bfloat16"]
    assert main([*words, "--json", str(file)]) == 0
    assert "All 6 right." in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["failed"] == 0 and len(record["results"]) == 6 and all(r["dtype"] == "bfloat16" for r in record["results"])
    assert sum(record["right"].values()) == 6
    label = record["results"][0]["label"]
    assert main(["verify", "--problem", label, f"{label}:T=3,lengths=", "--backend", "torch_native"]) == 0
    assert capsys.readouterr().out.count("within tolerance") == 2


def test_every_problem_with_something_else(tmp_path, capsys):
    """Values in turn, in labels that repeat the problems."""
    file = tmp_path / "random.json"
    words = ["verify", "--random", "4", "--backend", "torch_native", "--workers", "1", "--with", "K=3/20", "T=9", "lengths="]
    assert main([*words, "--json", str(file)]) == 0
    assert "All 4 right." in capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    labels = [f"{n}:K={K},T=9,lengths=" for n, K in zip(numbers(MORE, 4), (3, 20, 3, 20), strict=True)]
    assert sorted(r["label"] for r in results) == sorted(labels) and {r["K"] for r in results} == {3, 20}
