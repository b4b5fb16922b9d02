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


def test_times():
    record = json.loads((ROOT / "benchmarks/results/gpu/2026-11-15_h200_serving.json").read_text())
    for row in record["rows"]:
        if row["T"] > 1:
            assert " | ".join(f"{row[n]:.1f}" for n in ("verify", "commit", "advance")) in TEXT, row
        elif row["B"] == 32:
            assert f"/ {row['decode']:.1f} /" in TEXT, row
