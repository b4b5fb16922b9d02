"""Who may import whom, and how large a room may grow."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kdakit"
FILES = sorted(SOURCE.rglob("*.py"))

# What each part may import of the library, by the first names that match; backends also import their own package.
DEFINITION = {"problem", "rounding", "gates", "reference"}
ALLOWED = {
    "problem": set(),
    "rounding": set(),
    "gates": set(),
    "reference": {"problem", "gates"},
    "chunked": {"problem", "reference"},
    "cases": {"problem", "gates", "rounding"},
    "accuracy": {"problem", "reference", "rounding"},
    "dispatch": {"problem"},
    "torch": {"problem", "torch_gates", "torch_operators", "torch_transforms", "torch_uncompiled"},
    "torch_gates": set(),
    "torch_memory": set(),
    "torch_operators": {"problem", "dispatch", "values"},
    "torch_transforms": {"problem", "torch_operators"},
    "torch_uncompiled": set(),
    "jax": {"problem", "dispatch", "gates", "jax_mapped", "jax_sharding", "mesh_axes", "quarantine", "values"},
    "jax_mapped": {"problem"},
    "jax_sharding": {"problem"},
    "mesh_axes": set(),
    "quarantine": {"problem", "reference"},
    "values": {"problem"},
    "backends": DEFINITION | {"chunked", "mesh_axes", "torch_memory"},
    "layers": {"torch", "torch_operators", "jax", "layers", "gates", "backends"},
    "models": {"layers", "models"},
    "training": {"models", "parallel", "training"},
    "parallel": {"problem", "torch", "torch_operators", "jax", "jax_sharding", "layers", "parallel"},
    "serving": {"problem", "dispatch", "torch", "torch_operators", "jax", "layers", "models", "serving"},
    "measure": None,  # anything but the command line
    "stacks": {"problem", "dispatch", "torch", "jax", "layers", "serving", "stacks"},
    "fla": {"__version__"},
    "cli": None,  # anything
    "__main__": {"cli"},
}
# The rooms of backends/triton_gpu and which of the others each may import, from the ground up; the contract on top opens any of them.
TRITON = "kdakit.backends.triton_gpu"
TRITON_ROOMS = {
    "runtime": set(),
    "tiles": set(),
    "config": {"runtime", "tiles"},
    "tiles.candidates": {"config"},
    "times": {"config"},
    "arithmetic": {"config"},
    "shown": {"config", "arithmetic"},
    "borrowed": {"config"},
    "arguments": {"config", "runtime"},
    "device": set(),
    "kernels": {"device", "arguments", "config", "runtime"},
    "host": {"kernels", "config", "tiles", "runtime", "borrowed"},
    "call": {"host", "config", "runtime"},
    "widened": {"call", "shown", "config", "arithmetic"},
    "ffi": {"call", "config", "runtime", "times", "widened", "borrowed", "contract"},
}
# They need no Triton themselves, so they import rooms that do when they are called.
WITHOUT_TRITON = ("triton_gpu/__init__.py", "triton_gpu/widened.py", "ffi/__init__.py")


def imports_of(path: Path) -> set[str]:
    """Dotted kdakit modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "kdakit"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kdakit":
            base = node.module
            found |= {f"{base}.{alias.name}" if (SOURCE.parent / base.replace(".", "/")).is_dir() else base for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: relative imports hide who imports whom; write them out")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_arrows(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    part = parts[0]
    if part == "__init__":
        assert not imports_of(path), "the package itself imports nothing"
        return
    allowed = ALLOWED[part]
    if allowed is None:
        return
    for name in imports_of(path):
        target = name.split(".")[1:] or ["__version__"]
        if part == "backends" and target[0] == "backends":
            assert target[1] == parts[1], f"backend {parts[1]} imports {name}: backends do not import each other"
        else:
            assert target[0] in allowed, f"{'/'.join(parts)} imports {name}, allowed: {', '.join(sorted(allowed)) or 'nothing'}"


def triton_room(module: str) -> str:
    names = module.removeprefix(TRITON).split(".")[1:]
    return "tiles.candidates" if names[-1:] == ["candidates"] else names[0] if names else "contract"


@pytest.mark.parametrize("path", sorted((SOURCE / "backends" / "triton_gpu").rglob("*.py")), ids=lambda p: "/".join(p.parts[-2:]))
def test_rooms_of_triton(path):
    """Each knows those below it alone; kernels do not know each other; only the contract, which needs no Triton, opens a room late."""
    module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    room = triton_room(module)
    if room == "contract":
        return
    for name in imports_of(path):
        if name.startswith(TRITON):
            other = triton_room(name)
            assert other in TRITON_ROOMS[room] | {room}, f"{room} imports {name}"
            assert room != "kernels" or other != "kernels", f"{path.name} imports {name}: what two kernels call lives in device"
    late = [x.lineno for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.FunctionDef)
            for x in ast.walk(f) if isinstance(x, ast.ImportFrom) and (x.module or "").startswith("kdakit")]  # fmt: skip
    assert not late or str(path).endswith(WITHOUT_TRITON), f"{path}:{late}: an import inside a function hides an arrow"


def test_triton_rooms_are_listed_from_the_ground_up():
    order = list(TRITON_ROOMS)
    assert all(order.index(below) < order.index(room) for room, others in TRITON_ROOMS.items() for below in others - {"contract"})


@pytest.mark.parametrize(
    "path", [p for p in FILES if "cli" not in p.parts and p.stem != "__main__"], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_nobody_imports_the_command_line(path):
    assert not [name for name in imports_of(path) if name.startswith("kdakit.cli")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_stay_small(path):
    assert len(path.read_text().splitlines()) <= 400


NATIVE = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".c", ".cpp"))


@pytest.mark.parametrize("path", NATIVE, ids=lambda p: p.name)
def test_lines_of_native_code_fit(path):
    long = [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 140]
    assert not long, f"{path.name}:{long}: lines have up to 140 characters"


def test_the_map_of_native_code_names_every_kernel_file():
    text = (ROOT / "csrc" / "README.md").read_text()
    kernels = {path.name for path in NATIVE if path.parent.name == "prefill" and path.suffix in (".cu", ".cuh")}
    assert kernels and not {name for name in kernels if name not in text}


def gate_formulas() -> set[str]:
    """The files that multiply by lower_bound: those with the bounded gate in them."""

    def is_bound(x: ast.AST) -> bool:
        return getattr(x, "id", getattr(x, "attr", None)) == "lower_bound"

    python = {path for path in FILES for x in ast.walk(ast.parse(path.read_text()))
              if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mult) and (is_bound(x.left) or is_bound(x.right))}  # fmt: skip
    product = re.compile(r"^[^/]*(lower_bound \* |\* lower_bound\b)", re.MULTILINE)
    return {str(path.relative_to(ROOT)) for path in python | {path for path in NATIVE if product.search(path.read_text())}}


def test_contributing_names_every_file_with_the_formula_of_a_gate():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("**The gates.**")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`([\w/]+\.(?:py|cuh))`", text))
    found = gate_formulas()
    assert len(found) == len(listed) <= 9, (sorted(found), sorted(listed))
    assert all(any(path.endswith("/" + name) or path == name for path in found) for name in listed), listed


def test_no_assert_on_user_input():
    for path in FILES:
        bare = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
        assert not bare, f"{path}:{bare}: raise ValueError or TypeError instead"


def test_memory_of_kernels_has_a_dtype_of_its_own():
    """Not PyTorch's default, which programs set to bfloat16 for their models: scratch and states would be rounded to it."""

    def takes_the_default(call: ast.AST) -> bool:
        made = isinstance(call, ast.Call) and ast.unparse(call.func) in ("torch.empty", "torch.zeros", "torch.ones")
        return made and not {keyword.arg for keyword in call.keywords} & {"dtype", None}

    rooms = [path for path in FILES if {"backends", "serving", "fused"} & set(path.relative_to(SOURCE).parts)]
    found = [f"{path.name}:{x.lineno}" for path in rooms for x in ast.walk(ast.parse(path.read_text())) if takes_the_default(x)]
    assert len(rooms) > 100 and not found, found


def test_optional_names_of_a_backend_have_defaults():
    """dispatch.CONTRACT gives them: nobody else asks a backend what it has."""
    asked = re.compile(r"hasattr\([\w.()]*(module|backend)\b")
    found = [f"{path.name}:{n}" for path in FILES if "stacks" not in path.parts
             for n, line in enumerate(path.read_text().splitlines(), 1) if asked.search(line)]  # fmt: skip
    assert len(found) == 1 and found[0].startswith("dispatch.py"), found


def test_import_is_light():
    """`import kdakit` takes under 0.2 s and brings neither framework; the definition needs only NumPy."""
    code = (
        "import time; t = time.perf_counter(); import kdakit; t = time.perf_counter() - t;"
        "import sys; import kdakit.reference, kdakit.dispatch;"
        "print(t, [m for m in ('jax', 'torch', 'triton', 'rich', 'matplotlib') if m in sys.modules])"
    )
    seconds, loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split(" ", 1)
    assert float(seconds) < 0.2 and loaded.strip() == "[]"


def test_the_torch_calls_leave_the_compiler_alone():
    """torch.compile's own modules take seconds to import; whoever compiles has them."""
    pytest.importorskip("torch")
    code = "import sys, kdakit.torch; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
