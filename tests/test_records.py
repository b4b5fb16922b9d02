"""Every record that is kept has the one form, and a reader: a generated table, a picture or a page that names it."""

import json
import re
from pathlib import Path

import pytest

from kdakit.measure import machine, records
from kdakit.measure.choices import UsageError

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "benchmarks/results").rglob("*.json"))
GOOD = {
    "kind": "bench", "date": "2026-01-01", "command": "kdakit bench", "machine": {"cpu": "one", "device": "cpu"},
    "versions": {"kdakit": "0", "python": "3"}, "commit": "0" * 40, "settings": {}, "results": [], "missing": [],
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_record_has_the_form(path):
    record = json.loads(path.read_text())
    assert records.faults(record) == []
    assert not re.search(r"(^|[\s'\"=])/", record["command"]), "it says where a file lay"


def test_a_command_does_not_say_where_files_lay():
    typed = machine.typed(["bench", "--shape", "1x64x2x16", "--json", "/home/of/nobody/out.json", "benchmarks/a.json"])
    assert typed == "kdakit bench --shape 1x64x2x16 --json out.json benchmarks/a.json"


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"kind": "guess"}, "kind must be one of"),
        ({"commit": None}, "commit must be a str, got None"),
        ({"machine": {"cpu": "one"}}, "machine must name its device"),
        ({"versions": {}}, "versions must name kdakit"),
        ({"missing": [{"contestant": "x"}]}, "every missing row must have a reason"),
        ({"results": {}}, "results must be a list"),
    ],
)
def test_what_is_no_record_is_refused(change, fault, tmp_path):
    assert records.faults(GOOD) == [] and fault in records.faults(GOOD | change)[0]
    (tmp_path / "r.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(UsageError, match=re.escape(fault)):
        records.load(tmp_path / "r.json")


def test_every_record_has_a_reader():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    rendered = set(re.findall(r"benchmarks/results/([\w/]*)\*", (ROOT / "Makefile").read_text()))  # by whole folders

    def shown(path: Path) -> bool:
        folder = path.relative_to(ROOT / "benchmarks/results").parent.as_posix()
        return path.name in text or ("" if folder == "." else folder + "/") in rendered

    assert not [str(path.relative_to(ROOT)) for path in FILES if not shown(path)]


def test_parts_of_one_measurement_are_joined():
    """`bench --render A B --json C`: entries that ran in turn, a later one of the same name for the earlier one."""
    row = lambda entry, ms, **more: {"entry": entry, "contestant": "kdakit", "ms": ms, **more}
    head = dict(kind="model", date="2026-11-16", machine={"cpu": "x", "device": "y"}, versions={"kdakit": "1", "python": "3"}, commit="c")
    first = head | dict(command="a", settings={"steps": 2}, results=[row("train", 1), row("decode", 2, sequences=1)], missing=[])
    left = [{"entry": "curve", "contestant": "kdakit", "reason": "no time"}]
    second = head | dict(command="b", settings={"steps": 2}, missing=left, results=[row("decode", 3, sequences=8), row("train", 4)])
    made = records.joined([first, second])
    assert [(r["entry"], r["ms"]) for r in made["results"]] == [("train", 4), ("decode", 2), ("decode", 3)]
    assert made["missing"] == left and made["command"] == "a; b" and not records.faults(made)
    third = head | dict(command="c", settings={"steps": 2}, missing=[], results=[row("curve", 5)])
    assert records.joined([first, second, third])["missing"] == []
    with pytest.raises(UsageError, match="agree in settings"):
        records.joined([first, second | {"settings": {"steps": 3}}])
