"""The README's table of speed, from whatever a suite's record holds: absent peers, new ones, those that are faster, errors that are not."""

import pytest

from kdakit.measure import results, speed
from kdakit.measure.choices import UsageError
from kdakit.measure.suites import SUITES


def record(times, date="2026-01-02", suite="gpu", **versions):
    """`times` of (entry, contestant): milliseconds, or with an error of o behind them."""
    rows = []
    for (entry, contestant), found in times.items():
        ms, *error = found if isinstance(found, tuple) else (found,)
        rows.append({"entry": entry, "contestant": contestant, "median_ms": ms} | ({"error_o": error[0]} if error else {}))
    return {
        "kind": "suite", "date": date, "command": "kdakit bench", "machine": {"cpu": "one", "device": "NVIDIA H200"},
        "versions": {"kdakit": "0", "python": "3"} | versions, "commit": "c" * 40, "settings": {"suite": suite}, "results": rows,
        "missing": [],
    }  # fmt: skip


def table(*records):
    """(header, {first cell: the others}, note)"""
    lines, note = results.section("speed", list(records)).split("\n\n")
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    return header[1:], {first: others for first, *others in rows}, " ".join(note.split())


def test_everybody_who_took_part_has_a_column():
    versions = {"torch": "2.11.0", "triton": "3.6.0", "fla-core": "0.6.0", "vllm": "unversioned", "nvidia-cudnn-frontend": "1.32.0"}
    times = {
        ("fwd h96", "triton_gpu"): (0.75, 3.5e-3), ("fwd h96", "cuda"): (0.5, 3.0e-3), ("fwd h96", "fla"): (2.0, 4.3e-3),
        ("fwd h96", "flash_kda"): (1.5, 6.2e-3), ("fwd h96", "flash_kda_vllm"): (1.25, 6.2e-3), ("fwd h96", "cudnn"): (0.8, 5.0e-3),
        ("fwd h96", "cudnn_g32"): (0.6, 5.1e-3), ("fwd h96", "newcomer"): 1.0, ("decode b32", "triton_gpu"): (0.04, 1.7e-3),
        ("fwdbwd h96 given", "triton_gpu"): (4.0, 3.5e-3), ("fwdbwd h96 given", "cudnn"): (3.0, 5.0e-3),
        ("fwdbwd h32 given", "triton_gpu"): (2.0, None), ("fwdbwd h32", "fla"): 5.0,
    }  # fmt: skip
    header, rows, note = table(record(times, **versions))
    assert header == ["kdakit", "FLA 0.6.0", "FlashKDA", "vLLM's FlashKDA", "cuDNN 1.32.0", "newcomer"]
    assert rows["forward, 8192 tokens, 96 heads"] == [
        "**0.500** (3.0e-3)", "2.000 (4.3e-3), 4.0x", "1.500 (6.2e-3), 3.0x", "1.250 (6.2e-3), 2.5x", "0.600 (5.1e-3), 1.2x", "1.000, 2.0x"
    ], "the faster of our two and of cuDNN's two"  # fmt: skip
    given = rows["forward + backward, 96 heads, log-decays given in float32"]
    assert given == ["4.000 (3.5e-3)", "–", "–", "–", "**3.000** (5.0e-3), 0.8x", "–"], "who is faster than we is bold"
    assert rows["forward + backward, 32 heads, log-decays given in float32"][0] == "**2.000** (not finite)"
    assert rows["one token for 32 sequences, 32 heads"][0] == "**0.0400** (1.7e-3)"
    assert "forward + backward, 32 heads" not in rows, "where we have no time there is nothing to compare"
    assert "One NVIDIA H200" in note and "torch 2.11.0, triton 3.6.0, commit cccccccccccc" in note


def test_a_record_of_ours_alone_without_versions():
    header, rows, _ = table(record({("fwd h64", "cuda"): 0.5}))
    assert header == ["kdakit"] and list(rows.values()) == [["**0.500**"]]


def test_the_newest_suite_that_timed_us_counts():
    mine = {("fwd h96", "triton_gpu"): 0.75}
    old, new = record(mine), record({("fwd h96", "triton_gpu"): 0.5}, date="2026-02-01")
    later = [record({("eager h2", "fla"): 1.0}, date="2026-03-01"), record(mine, date="2026-03-01", suite="cuda")]
    for order in ([old, new, *later], [*later, new, old]):
        assert table(*order)[1]["forward, 8192 tokens, 96 heads"] == ["**0.500**"]
    again = record({("fwd h96", "triton_gpu"): 0.25}, date="2026-02-01")
    assert table(new, again)[1]["forward, 8192 tokens, 96 heads"] == ["**0.250**"], "of two of one day the last"
    with pytest.raises(UsageError, match="kdakit bench --suite gpu"):
        results.section("speed", later)


def test_a_row_comes_from_the_newest_suite_that_has_it():
    old = record({("fwdbwd h96", "triton_gpu"): 4.0, ("fwdbwd h96", "fla"): 12.0, ("fwd h96", "cuda"): 1.0}, date="2026-01-01")
    new = record({("fwd h96", "cuda"): 0.5, ("fwd h96", "cudnn"): 1.0}, date="2026-02-01")
    header, rows, note = table(old, new)
    assert header == ["kdakit", "FLA", "cuDNN"] and rows["forward, 8192 tokens, 96 heads"] == ["**0.500**", "–", "1.000, 2.0x"]
    assert rows["forward + backward, 96 heads (2026-01-01)"] == ["**4.000**", "12.000, 3.0x", "–"]
    assert note.index("2026-02-01") < note.index("2026-01-01")


def test_rows_of_another_day_than_most_say_so():
    most = record({("fwd h96", "cuda"): 1.0, ("fwd h64", "cuda"): 1.0}, date="2026-01-01")
    _, rows, note = table(most, record({("fwdbwd h96", "triton_gpu"): 4.0}, date="2026-02-01"))
    assert list(rows) == ["forward, 8192 tokens, 96 heads", "forward, 8192 tokens, 64 heads", "forward + backward, 96 heads (2026-02-01)"]
    assert "Of 2026-01-01 unless a row says otherwise: 2026-02-01, " in note


def test_jobs_that_a_newer_record_has_are_left_out():
    """Of any suite that has the job; what is no suite stays, in the order it was given in."""
    old = record({("fwd h96", "cuda"): 1.0, ("fwd h64", "cuda"): 1.0}, date="2026-01-01", suite="cuda")
    gone = {"entry": "fwd h96", "contestant": "fla", "reason": "it is not installed"}
    new = record({("fwd h96", "cuda"): 0.5}, date="2026-02-01") | {"missing": [gone]}
    other = {"kind": "bench", "date": "2026-01-01", "results": []}
    again = record({("fwd h64", "cuda"): 1.0}, date="2025-12-01")
    kept = results.current([old | {"missing": [gone]}, other, new, again])
    assert [[r["entry"] for r in record["results"]] for record in kept] == [["fwd h64"], [], ["fwd h96"]]
    assert [record.get("missing") for record in kept] == [[], None, [gone]]


def test_every_row_is_an_entry_of_the_suite():
    assert set(speed.ENTRIES) <= set(SUITES["gpu"])
    timed = {name for entry in SUITES["gpu"].values() for name in entry.contestants}
    assert timed <= set(speed.NAMES) and {name for names in speed.COLUMNS.values() for name in names} <= timed


def test_who_was_absent_is_said_once():
    gone = [{"contestant": "flash_kda", "entry": f"fwd h{n}", "reason": "it is not installed"} for n in (16, 32, 64)]
    other = {"contestant": "cudnn", "entry": "fwd h96", "reason": "it has no softplus gate"}
    assert results.absences([*gone, other]) == [
        "flash_kda did not run 3 jobs: it is not installed.", "cudnn did not run fwd h96: it has no softplus gate."
    ]  # fmt: skip
