"""What docs/serving.md says was measured is what was recorded."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/serving.md").read_text(encoding="utf-8")


def test_long_run_errors():
    record = json.loads((ROOT / "benchmarks/results/gpu/2026-11-15_h200_state_bits.json").read_text())
    for row in record["rows"]:
        shown = " | ".join(f"{e:.1e}" for e in row["errors"].values())
        assert f"| {row['stored']} |" in TEXT and shown in TEXT, row


SERVING = json.loads((ROOT / "benchmarks/results/gpu/2026-11-15_h200_serving.json").read_text())["rows"]


def test_times():
    for row in SERVING:
        if row["T"] == 1:
            assert row["B"] != 32 or f"/ {row['decode']:.1f} /" in TEXT, row
        else:
            calls = [n for n in ("verify", "commit", "both", "both_cold", "advance") if n in row]
            assert calls and " | ".join(f"{row[n]:.1f}" for n in calls) in TEXT, row


def test_what_was_promised():
    """Two calls for eight guesses take at most half as long again as for four; decode is within five per cent of the plain step."""
    plain = {(r["B"], r["T"]): r for r in SERVING if r["stored"] == "torch.float32" and not r["v_first"]}
    assert plain[32, 8]["both"] <= 1.5 * plain[32, 4]["both"]
    assert all(r["decode"] <= 1.05 * r["step"] for (_, T), r in plain.items() if T == 1)
