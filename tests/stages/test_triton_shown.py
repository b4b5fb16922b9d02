"""What a chip has shown, and the tile sizes: nothing ships for sm_90 that an H200 has not run. Plain Python over data."""

import contextlib
import json
import warnings
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

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


def problem(dtype, K, V, gate="softplus", l2norm=True, op="chunk", grad=True, given_beta=False):
    options = GATES[gate] | {"use_qk_l2norm_in_kernel": l2norm, "chunk_size": 64, "use_beta_sigmoid_in_kernel": not given_beta}
    case = Case("form", "", T=1, H=1, HV=1, K=K, V=V, A_log=gate == "softplus", options=options)
    return case.problem(dtype, op, grad)


def every_kind():
    """Problems of every dtype, padded K and V, gate and call; and of 192 channels, of which kernels in halves read no more."""
    sizes, calls = (16, 32, 64, 128, 256), (("chunk", True), ("chunk", False), ("recurrent", False))
    for dtype, K, V, gate, l2norm in product(("bfloat16", "float16", "float32"), (*sizes, 192), sizes, GATES, (True, False)):
        for op, grad in calls:
            yield problem(dtype, K, V, gate, l2norm, op, grad)


def test_what_the_table_holds_can_run():
    """No form is in it that the present tile sizes do not lead to, whatever chunks the states are asked for between, with gates of float16
    too, for which bfloat16 has a form of its own, and with tiles that are kept, and states or not."""
    known = set(shown.shown("sm_90"))
    kinds = [(one, n) for one in every_kind() for n in shown.sequences(CHIP)]
    found = {name for one, n in kinds for name in shown.forms(one.replace(B=n, N=n), config.choose(one.replace(B=n, N=n), CHIP))}
    for one, n in kinds if known - found else ():
        between = ({"return_intermediate_states": True, "chunk_size": C} for C in (16, 32))
        keeping = {"disable_recompute": True, "has_initial_state": False}
        for changes in ({"state_v_first": True}, {"gate_dtype": "float16"}, keeping, *between):
            other = one.replace(B=n, N=n, **changes)
            chosen = config.choose(other, CHIP)
            found.update(shown.forms(other, chosen), shown.forms(other, replace(chosen, checkpoint=config.Config.checkpoint)))
    assert known and known <= found


def test_a_changed_tile_waits(monkeypatch):
    """With a table: any size that nobody has run."""
    one = problem("bfloat16", 64, 64, "softplus")
    right = config.choose(one, CHIP)
    known = dict.fromkeys(shown.forms(one, right), 1)
    for changes in (dict(slice_k=32, slice_warps=4), dict(reverse_stages=7), dict(product_slice_k=16), dict(scan_warps=1)):
        assert not known.keys() >= set(shown.forms(one, replace(right, **changes))), changes


def test_a_scan_in_parts_that_waits_is_a_whole_one(monkeypatch):
    monkeypatch.setattr(config, "UNCHECKED", False)
    monkeypatch.setattr(config, "INTERPRETED", False)
    one = problem("bfloat16", 128, 128, grad=False)
    usual = config.choose(one, CHIP)
    crowds = [one.replace(B=n, N=n) for n in shown.sequences(CHIP)]
    known = {name: 1 for crowd in crowds for name in shown.forms(crowd, config.choose(crowd, CHIP))}
    parts = [name for name in known if " parts " in name]
    monkeypatch.setattr(shown, "shown", lambda chip: known)
    assert usual.split and parts and shown.settled(one, CHIP) == usual and shown.waits(one, CHIP) is None
    for name in parts:
        del known[name]
    shown._missing.cache_clear()
    assert shown.settled(one, CHIP) == replace(usual, split=False) and shown.missing(one, CHIP) == ()
    shown._missing.cache_clear()


def test_tiles_and_states_are_kept_by_kernels_that_were_shown(monkeypatch):
    """Until then they are made again, with kernels that were: for every number of sequences, since a forward keeps as many tensors for
    each. Tiles may be kept without states. A scan in parts may be a whole one."""
    monkeypatch.setattr(config, "UNCHECKED", False)
    monkeypatch.setattr(config, "INTERPRETED", False)
    one = problem("bfloat16", 128, 128, "bounded").replace(disable_recompute=True, has_initial_state=False)
    usual = config.choose(one, CHIP)
    without_states, without = {"checkpoint": config.Config.checkpoint}, {"keep": False, "checkpoint": config.Config.checkpoint}

    def forms(**changes):
        return {name for x in crowds(one) for name in shown.forms(x, replace(config.choose(x, CHIP), **changes))}

    made_again, tiles, states = forms(**without), forms(**without_states), forms()
    known = dict.fromkeys(made_again | tiles | states, 1)
    monkeypatch.setattr(shown, "shown", lambda chip: known)

    def settled():
        shown._missing.cache_clear(), shown._keeping.cache_clear()
        assert shown.missing(one, CHIP) == () and shown.waits(one, CHIP) is None
        return shown.settled(one, CHIP)

    def waits_for(names, changes):
        for name in [name for name in sorted(names) if " parts " not in name]:
            del known[name]
            assert settled() == replace(usual, **changes) == shown.keeping_if_shown(usual, one, CHIP)
            known[name] = 1

    assert usual.keeps_states and settled() == usual and shown.keeping_if_shown(usual, one, CHIP) == usual
    assert {name.split()[0] for name in tiles - made_again} == {"prepare", "scan"} and {x.split()[0] for x in states - tiles} == {"scan"}
    assert all(" keeping " in name for name in (tiles | states) - made_again) and all(" keeping states " in name for name in states - tiles)
    assert {name.split()[0] for name in made_again - states} == {"prepare", "scan", "rebuild", "replay"}
    waits_for(states - tiles, without_states)
    waits_for(tiles & states - made_again, without)
    for name in states - tiles:
        del known[name]
    waits_for(tiles - made_again, without)
    shown._missing.cache_clear(), shown._keeping.cache_clear()


def crowds(one):
    return [one.replace(B=n, N=n) for n in shown.sequences(CHIP)]


def test_chips_without_a_table(monkeypatch):
    monkeypatch.setattr(config, "UNCHECKED", False)
    monkeypatch.setattr(config, "INTERPRETED", False)
    monkeypatch.setattr(shown, "shown", lambda chip: {})
    for name in config.CHIPS:
        waits = shown.waits(problem("bfloat16", 128, 128), config.CHIPS[name])
        assert waits is None if name == "sm_90" else f"gradients on {name} have not been compared" in waits
        assert shown.waits(problem("bfloat16", 128, 128, grad=False), config.CHIPS[name]) is None


def test_gradients_of_a_given_beta_wait_without_a_table(monkeypatch):
    """Their kernels are newer than what the named cases have shown; float32's are not."""
    monkeypatch.setattr(config, "UNCHECKED", False)
    monkeypatch.setattr(config, "INTERPRETED", False)
    monkeypatch.setattr(shown, "shown", lambda chip: {})
    for dtype, waits in (("bfloat16", True), ("float16", True), ("float32", False)):
        assert (shown.waits(problem(dtype, 128, 128, given_beta=True), CHIP) is not None) == waits
        assert shown.waits(problem(dtype, 128, 128, given_beta=True, grad=False), CHIP) is None


def test_the_file(tmp_path):
    text = shown.dump("sm_90", ["3.6.0"], ["a campaign"], {"17": "g 1.20"}, {"gradient bfloat16 K64": 3, "scan float32 K16 V16": 1})
    assert json.loads(text) == {
        "chip": "sm_90", "triton": ["3.6.0"], "sources": ["a campaign"], "exceeded": {"17": "g 1.20"},
        "forms": {"gradient": {"bfloat16 K64": 3}, "scan": {"float32 K16 V16": 1}},
    }  # fmt: skip
    (tmp_path / "sm_90.json").write_text(text)
    other = shown.dump("sm_90", ["99.1.0"], [], {}, {"gradient bfloat16 K64": 0, "step float32 K16": 2})
    (tmp_path / "sm_90_triton_99.1.json").write_text(other)
    with another_compiler("3.6.3", tmp_path):
        assert shown.shown("sm_90") == shown.own("sm_90") == {"gradient bfloat16 K64": 3, "scan float32 K16 V16": 1}
    with another_compiler("99.1.2", tmp_path):  # which went wrong with the one and has shown another
        assert shown.own("sm_90") == {"gradient bfloat16 K64": 0, "step float32 K16": 2}
        assert shown.shown("sm_90") == {"scan float32 K16 V16": 1} | shown.own("sm_90")
    with another_compiler("99.2.0", tmp_path):
        assert shown.own("sm_90") == {} and len(shown.shown("sm_90")) == 2


@contextlib.contextmanager
def another_compiler(version, folder=shown.FOLDER):
    remembered = shown.shown, shown.own, shown._missing, shown.warn_of_another_compiler
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shown, "compiler", lambda: version)
        patched.setattr(shown, "FOLDER", folder)
        for function in remembered:
            function.cache_clear()
        yield
    for function in remembered:
        function.cache_clear()


def test_another_compiler_is_said_once(monkeypatch):
    """Its machine code is another: calls run, with one warning, and `kdakit doctor` says so. A patch release counts as the same; and there
    is no warning of what the chip has shown as the other one compiles it."""
    monkeypatch.setattr(config, "UNCHECKED", False)
    monkeypatch.setattr(config, "INTERPRETED", False)
    one, less = problem("bfloat16", 64, 64, grad=True), problem("float16", 40, 72, op="recurrent", grad=False)
    for version, of_one, of_less in (("3.6.1", 0, 0), ("3.9.1", 0, 1), ("99.1.0", 1, 1)):
        with another_compiler(version), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert shown.waits(one, CHIP) is shown.waits(one, CHIP) is None and len(caught) == of_one
            assert shown.waits(less, CHIP) is None and len(caught) == of_less
            assert ("compiler" in shown.summary(CHIP)) == bool(of_less)
    assert "as Triton 3.6.0 compiles them, here is Triton 99.1.0; `kdakit verify" in str(caught[0].message)


def test_problems_that_launch_what_the_table_lacks(monkeypatch):
    """Each adds a kernel that fewer than three have tried, and the three of each are found."""
    from kdakit.backends.triton_gpu import unsupported
    from kdakit.backends.triton_gpu.arithmetic import as_computed
    from kdakit.cli import random_search
    from kdakit.measure.choices import UsageError
    from kdakit.measure.random_problems import parse

    monkeypatch.setattr(config, "UNCHECKED", True)
    monkeypatch.setattr(config, "chip_of", lambda device: CHIP)
    known = {name: 7 for name in shown.shown("sm_90") if not name.startswith("products float16")}
    monkeypatch.setattr(shown, "own", lambda chip: known)

    def forms(label):
        exact = as_computed(parse(label).problem())
        return set(shown.forms(exact, config.choose(exact, CHIP)))

    tried = [label for label in map(str, range(1, 4000, 2)) if unsupported(parse(label).problem(), CHIP) is None]
    found = list(random_search.unshown(tried, None))
    lacking = Counter(name for n in tried for name in forms(n) if name not in known)
    taken = Counter(name for n in found for name in forms(n))
    args = SimpleNamespace(unshown=True, dtype=None, no_grad=False, seed=0, random=1, device="cpu")
    with pytest.raises(UsageError, match="--unshown looks for Triton's kernels on a GPU"):
        random_search.wanted(args, "torch_native")
    assert lacking and len(found) < len(tried) / 10 and all(forms(n) - set(known) for n in found)
    assert all(taken[name] >= min(count, 3) for name, count in lacking.items())


def test_what_a_campaign_takes_out(tmp_path, monkeypatch, capsys):
    """A problem a little beyond the rule is named; forms of one that went wrong, by its numbers or otherwise, wait."""
    from kdakit.cli import random_search
    from kdakit.measure.trial import Verdict

    def verdict(label, form, ok=True, inexact=False, **used):
        return Verdict(label, "", "triton_gpu", "bfloat16", "gradient", 64, 64, ok, used=used, forms=(f"scan {form}",), inexact=inexact)

    monkeypatch.setattr(config, "chip_of", lambda device: CHIP)
    found = [
        verdict("1", "a", g=0.5), verdict("2", "a", False, True, g=1.25, k=0.5),
        verdict("3", "b"), verdict("4", "b", False, True, g=30.0),
        verdict("5", "c"), verdict("6", "c", False, g=0.5),
    ]  # fmt: skip
    random_search.record(SimpleNamespace(device="cuda", record=tmp_path, random=6, seed=1), "triton_gpu", found)
    table = json.loads((tmp_path / "sm_90.json").read_text())
    assert table["forms"] == {"scan": {"a": 1, "b": 0, "c": 0}} and table["exceeded"] == {"2": "bfloat16 gradient K64 V64: g 1.25"}
    assert "3 right, 3 not" in table["sources"][0] and "2 taken out" in capsys.readouterr().out
    random_search.record(SimpleNamespace(device="cuda", record=tmp_path, random=1, seed=1), "triton_gpu", [verdict("2", "a", g=0.25)])
    table = json.loads((tmp_path / "sm_90.json").read_text())
    assert table["forms"] == {"scan": {"a": 2, "b": 0, "c": 0}} and table["exceeded"] == {}
    kept = (tmp_path / "sm_90.json").read_text()
    monkeypatch.setattr(shown, "compiler", lambda: "99.1.0")
    random_search.record(SimpleNamespace(device="cuda", record=tmp_path, random=1, seed=1), "triton_gpu", [verdict("7", "d")])
    other = json.loads((tmp_path / "sm_90_triton_99.1.json").read_text())
    assert other["triton"] == ["99.1.0"] and other["forms"] == {"scan": {"d": 1}} and (tmp_path / "sm_90.json").read_text() == kept
