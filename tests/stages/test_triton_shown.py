"""What a chip has shown, and the tile sizes: nothing ships for sm_90 that an H200 has not run. Plain Python over data."""

import json
from itertools import product

import pytest

from kdakit.backends.triton_gpu import config, shown
from kdakit.cases import Case

GATES = {
    "given": {},
    "given_bounded": {"safe_gate": True, "lower_bound": -5.0},
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0},
}
CHIP = config.CHIPS["sm_90"]


def problem(dtype, K, V, gate="softplus", l2norm=True, op="chunk", grad=True):
    options = GATES[gate] | {"use_qk_l2norm_in_kernel": l2norm, "chunk_size": 64}
    case = Case("form", "", T=1, H=1, HV=1, K=K, V=V, A_log=gate == "softplus", options=options)
    return case.problem(dtype, op, grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op, grad", [("chunk", True), ("chunk", False), ("recurrent", False)])
def test_every_problem_runs_in_forms_that_a_chip_has_shown(dtype, op, grad):
    """As it is or with wider heads: a tile size that no campaign has seen would be refused by 'auto', and by this."""
    sizes = (16, 32, 64, 128, 256)
    for K, V, gate, l2norm in product(sizes, sizes, GATES, (True, False)):
        one = problem(dtype, K, V, gate, l2norm, op, grad)
        assert shown.waits(one, CHIP) is None, (str(one), shown.missing(one, CHIP))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_usual_sizes_are_shown_as_they_are(dtype):
    for K, op, grad in product((64, 128), ("chunk", "recurrent"), (True, False)):
        for gate in ("softplus", "bounded"):
            one = problem(dtype, K, K, gate, True, op, grad and op == "chunk")
            assert not shown.missing(one, CHIP), shown.missing(one, CHIP)


def test_a_changed_tile_is_not_shown(monkeypatch):
    """The size that was wrong, and any other that nobody has run."""
    from dataclasses import replace

    one = problem("bfloat16", 64, 64)
    right = config.choose(one, CHIP)
    assert right.slice_k < 64, "Triton 3.6 multiplies joined tiles of 64 rows wrongly"
    known = shown.shown("sm_90")
    assert all(name in known for name in shown.forms(one, right))
    for changes in (dict(slice_k=64, slice_warps=4), dict(reverse_stages=7), dict(product_slice_k=16), dict(prepare_warps=2)):
        assert not all(name in known for name in shown.forms(one, replace(right, **changes))), changes


def test_other_chips_have_shown_nothing(monkeypatch):
    monkeypatch.setattr(config, "UNCHECKED", False)
    monkeypatch.setattr(config, "INTERPRETED", False)
    for name in set(config.CHIPS) - {"sm_90"}:
        assert name in shown.waits(problem("bfloat16", 128, 128), config.CHIPS[name])


def test_the_file(tmp_path):
    text = shown.dump("sm_90", ["a campaign"], {"gradient bfloat16 K64": 3, "scan float32 K16 V16": 1})
    assert json.loads(text) == {
        "chip": "sm_90", "sources": ["a campaign"], "forms": {"gradient": {"bfloat16 K64": 3}, "scan": {"float32 K16 V16": 1}},
    }  # fmt: skip
    file = shown.FOLDER / "sm_90.json"
    table = json.loads(file.read_text())
    assert file.read_text() == shown.dump(table["chip"], table["sources"], shown.shown("sm_90"))
    assert table["sources"]
