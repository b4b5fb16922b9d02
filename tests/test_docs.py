"""The documentation is true: its code runs, its tables are those the commands write, its site builds."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from kdakit import dispatch, reference
from kdakit.cases import CASES
from kdakit.cli import doctor
from kdakit.cli.main import COMMANDS
from kdakit.dispatch import Backend
from kdakit.measure import checking, generated, records, results, tpu_table

ROOT = Path(__file__).parents[1]


def code_blocks(path):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def needs(code):
    for framework in ("torch", "jax"):
        if re.search(rf"^import {framework}\b", code, re.MULTILINE):
            pytest.importorskip(framework)


@pytest.mark.parametrize(
    "path, index",
    [
        ("README.md", 0),
        ("README.md", 1),
        ("docs/index.md", 0),
        ("docs/pytorch.md", 0),
        ("docs/pytorch.md", 1),
        ("docs/pytorch.md", 2),
        ("docs/jax.md", 0),
        ("docs/api.md", 0),
        ("docs/model.md", 0),
        ("docs/model.md", 1),
        ("docs/serving.md", 0),
        ("docs/serving.md", 1),
    ],
)
def test_examples_run(path, index, tmp_path, monkeypatch):
    code = code_blocks(path)[index]
    needs(code)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{path}[{index}]", "exec"), {})


def test_the_page_that_says_why_a_backend_was_chosen_prints_it():
    """In a process of its own: pytest's handlers would show what a user's program drops."""
    pytest.importorskip("torch")
    (code,) = code_blocks("docs/troubleshooting.md")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    told = next(line for line in (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").splitlines() if "DEBUG:kdakit" in line)
    if "on cpu: torch_native" in done.stderr:
        assert told.strip().removesuffix(", ..") in done.stderr
    assert "DEBUG:kdakit:chunk B1 T64 H2 K32 V32" in done.stderr


def test_every_command_has_a_section():
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"## kdakit {name}\n" not in text]


def test_a_release_is_built_with_addresses():
    """By the script that test_readme_works_outside_the_repository is about."""
    assert "python .ci/release.py" in (ROOT / ".github/workflows/release.yml").read_text()


def test_readme_examples_are_short():
    assert all(len(code.splitlines()) <= 8 for code in code_blocks("README.md"))


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md"])


def prose(path):
    """(number, line) of what is neither a table, nor code, nor made by a command."""
    text = path.read_text(encoding="utf-8")
    blank = lambda found: "\n" * found.group(0).count("\n")
    text = re.sub(r"^```.*?^```|<!-- generated.*?<!-- end generated", blank, text, flags=re.DOTALL | re.MULTILINE)
    return [(n, line) for n, line in enumerate(text.splitlines(), 1) if not line.startswith(("|", "    "))]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_lines_are_wrapped(path):
    assert not [n for n, line in prose(path) if len(line) > 120 and " " in line.strip()]


@pytest.mark.parametrize("path", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_words_that_readers_know(path):
    """Draft tokens, implementation, peak memory, per call."""
    unclear = re.compile(r"guessed token|contestant|extra MiB|extra memory|a call's share|Beyond one device", re.IGNORECASE)
    assert not [(n, line) for n, line in prose(path) if unclear.search(re.sub("`[^`]*`", "", line))]


def test_rows_of_a_table_can_be_written_alone():
    table = lambda *rows: "### float32\n\n| case | o |\n| --- | --: |\n" + "\n".join(f"| `{n}` | {x} |" for n, x in rows)
    assert generated.merged(table(("a", 1), ("b", 2)), table(("b", 3), ("c", 4))) == table(("a", 1), ("b", 3), ("c", 4))
    other = table(("a", 5)).replace("| o |", "| final_state |")
    assert generated.merged(table(("a", 1), ("b", 2)), other) == other, "other columns"


def test_no_merge_is_left_half_done():
    files = [*PAGES, *ROOT.glob("*.yml"), *ROOT.glob("*.toml"), *(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    mark = re.compile("^(" + "<" * 7 + " |" + ">" * 7 + " )", re.MULTILINE)
    assert not [str(path) for path in files if mark.search(path.read_text(encoding="utf-8"))]


def test_performance_is_a_page_not_a_book():
    assert len((ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_chunk_backward_of_the_math_page_is_that_of_the_recurrence():
    (code,) = code_blocks("docs/math.md")
    space = {}
    exec(compile(code, "docs/math.md", "exec"), space)
    rng = np.random.default_rng(0)
    C, K, V = 9, 5, 4
    q, k = rng.normal(size=(2, C, K))
    v, d_o = rng.normal(size=(2, C, V))
    g, beta = -rng.exponential(size=(C, K)), rng.uniform(0, 2, size=C)
    S, d_S_next = rng.normal(size=(2, K, V))
    tokens = [tuple(np.asarray(a[t])[None, None] for a in (q, k, v, g, beta)) for t in range(C)]
    before, state = [], S[None, None]
    for token in tokens:
        before.append(state)
        state, _ = reference.step(state, *token)
    d_state, rows = d_S_next[None, None], []
    for t in reversed(range(C)):
        d_state, *grads = reference.step_backward(before[t], *tokens[t], d_state, d_o[t][None, None])
        rows.insert(0, [d[0, 0] for d in grads])
    want = [d_state[0, 0], *(np.array(column) for column in zip(*rows, strict=True))]
    for got, expected in zip(space["chunk_backward"](q, k, v, g, beta, S, d_o, d_S_next), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


@pytest.fixture
def my_backend(monkeypatch):
    """The backend of docs/adding-a-backend.md, registered."""
    pytest.importorskip("torch")
    (code,) = code_blocks("docs/adding-a-backend.md")
    module = types.ModuleType("my_backend")
    exec(compile(code, "my_backend.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_backend", module)
    entry = Backend("my_backend", "torch", "my_backend", "the NumPy definition")
    monkeypatch.setattr(dispatch, "BACKENDS", (*dispatch.BACKENDS, entry))
    return "my_backend"


@pytest.mark.parametrize("case", ["short", "one_token", "no_tokens", "no_final", "v_first", "varlen_many", "softplus"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documented_backend_passes(my_backend, case, dtype):
    assert checking.refusal(my_backend, CASES[case], dtype, grad=True) is None
    for row in checking.check(my_backend, CASES[case], dtype):
        assert row.ok, row


def test_documented_backend_refuses_with_its_reason(my_backend):
    import torch

    from kdakit.torch import chunk_kda

    x = torch.zeros(1, 5000, 1, 1)
    with pytest.raises(ValueError, match="loop over tokens"):
        chunk_kda(x, x, x, x, x[..., 0], backend=my_backend)
    assert "loop over tokens" in doctor.support()[my_backend]["bench shape h96: B1 T8192 H96 K128, bfloat16, gradients"]


def test_support_table_is_current():
    torch = pytest.importorskip("torch")
    pytest.importorskip("jax")
    pytest.importorskip("triton")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the table is that of an H200, and this GPU answers for itself")
    assert generated.read(ROOT / "docs/backends.md", "support") == doctor.support_markdown(), "run: kdakit doctor --table docs/backends.md"


def test_contract_table_is_current():
    path = "docs/adding-a-backend.md"
    assert generated.read(ROOT / path, "contract") == doctor.contract_markdown(), f"run: kdakit doctor --table {path}"


def test_error_table_has_every_case_and_backend():
    table = generated.read(ROOT / "docs/numerics.md", "errors")
    missing = [name for name in CASES if f"`{name}`" not in table]
    assert not missing, f"run: make tables (no {missing})"
    for name in ("torch_native", "xla"):  # made on a machine without a GPU
        assert f"{name}: o" in table


@pytest.mark.parametrize(
    "page, section, files",
    [
        ("README.md", "speed", "gpu/suite/*.json"),
        ("docs/performance.md", "gpu", "gpu/suite/*.json"),
        ("docs/performance.md", "cpu", "*.json"),
        ("docs/performance.md", "first_calls", "gpu/first_calls/*.json"),
        ("docs/serving.md", "pool", "gpu/pool/*_pool.json"),
        ("docs/serving.md", "state_bits", "gpu/pool/*_state_bits.json"),
        ("docs/distributed.md", "ranks", "ranks/*.json"),
        ("docs/train-and-serve.md", "whole", "gpu/whole/*.json"),
    ],
)
def test_measurements_are_those_recorded(page, section, files):
    found = [records.load(path) for path in sorted((ROOT / "benchmarks/results").glob(files))]
    assert (found or section == "whole") and generated.read(ROOT / page, section) == results.section(section, found), "run: make tables"


def test_schedule_tables_are_the_records():
    files = [str(file) for file in sorted((ROOT / "benchmarks/results/tpu").glob("*.json"))]
    assert generated.read(ROOT / "docs/tpu.md", "schedule") == tpu_table.render(files), "run: make tables"


def test_the_demo_is_described_as_recorded():
    (path,) = (ROOT / "benchmarks/results/demo").glob("*_cpu_*.json")
    curves = {row["contestant"]: row["curve"] for row in json.loads(path.read_text())["results"]}
    kda, plain = (curves[name][-1]["accuracy"] for name in ("KDA", "no delta rule"))
    assert f"| {100 * kda:.1f} % | {100 * plain:.1f} % |" in (ROOT / "docs/model.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"gets {100 * kda:.0f} % right on a recall task, one that only adds {100 * plain:.0f} %" in readme


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_argument_is_documented(framework):
    pytest.importorskip(framework)
    module = importlib.import_module(f"kdakit.{framework}")
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    for name in ("chunk_kda", "fused_recurrent_kda", "naive_recurrent_kda", "naive_chunk_kda", "kda_gate"):
        assert f"## {name}" in text or f", {name}" in text
    for call in (module.chunk_kda, module.fused_recurrent_kda):
        for argument, parameter in inspect.signature(call).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert f"`{argument}`" in text, f"docs/api.md says nothing about {argument}"


def test_links_between_repository_files_resolve():
    for path in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_anchors_of_the_readme_exist():
    for page, anchor in re.findall(r"\]\((docs/[\w/-]+\.md)#([\w-]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings], f"{page}#{anchor}"


def test_readme_works_outside_the_repository():
    """What a release puts on PyPI has no relative link or picture left, and every project.urls entry that it promises."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    text = release.with_addresses((ROOT / "README.md").read_text(encoding="utf-8"), "https://github.com/OWNER/kdakit", "1.0")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and all(target.startswith("https://") for target in targets)
    assert "](https://raw.githubusercontent.com/OWNER/kdakit/v1.0/docs/h200.png)" in text
    assert "](https://github.com/OWNER/kdakit/blob/v1.0/docs/install.md)" in text
    assert "[project.urls]\n" in (ROOT / "pyproject.toml").read_text()


def test_site_builds_without_warnings(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install 'kdakit[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "math" / "index.html").exists()
