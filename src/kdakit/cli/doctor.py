"""What is installed, which devices are there, and which backend can run which problem, or why not.

Every probe is isolated: whatever is broken on a machine becomes a line of the report.
"""

from __future__ import annotations

import importlib
import json
import platform
from typing import Any

from kdakit.cli.broken import broken_once, remember
from kdakit.measure.choices import UsageError
from kdakit.measure.machine import FAILED, attempt, failure

OK = "yes"


def add_arguments(parser) -> None:
    parser.add_argument("--shape", metavar="SHAPE", help="which backend 'auto' takes for BxTxHxK, and why; with the four below")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="default: bfloat16")
    parser.add_argument("--gate", default="log_decay", choices=("log_decay", "softplus", "bounded"), help="default: log_decay")
    parser.add_argument("--mode", default="fwd", choices=("fwd", "fwdbwd", "decode"), help="default: fwd")
    parser.add_argument("--device", help="of PyTorch, such as cpu or cuda:1 (default: the first GPU, else the CPU); JAX takes its first")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the support table as Markdown")
    parser.add_argument("--table", metavar="FILE", nargs="+", default=[], help="rewrite the support and contract tables of Markdown files")


def run(args) -> int:
    if args.shape is None and args.device is not None:
        raise UsageError("--device goes with --shape: the tables are of every device")
    if args.shape and args.json:
        raise UsageError("--json is of the tables: leave it out, or --shape")
    if args.markdown or args.table:
        for path in args.table:
            write_tables(path)
        if args.markdown:
            print(support_markdown())
        return 0
    if args.shape:
        print("\n".join(choices(args)))
        return 0
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2, default=str))
    else:
        show(report)
    return 0


def choices(args) -> list[str]:
    """Of each framework that is installed: what 'auto' takes for this shape, and why not those before it."""
    from kdakit import dispatch
    from kdakit.measure.contestants import Job, parse_shape

    job = Job(parse_shape(args.shape), args.mode, args.dtype, args.gate)
    shape = job.shape
    try:
        problem = job.tiny().problem(args.dtype, op=job.op, needs_grad=args.mode == "fwdbwd")  # arrays of that length are not needed
    except ValueError as wrong:
        raise UsageError(f"--shape {args.shape}: {wrong}") from wrong
    problem = problem.replace(B=shape.B, T=1 if args.mode == "decode" else shape.T, N=len(shape.lengths) or shape.B)
    lines = [str(problem)]
    for framework, device in (("torch", attempt(_torch_device, args.device)), ("jax", attempt(_jax_device))):
        if isinstance(device, str):  # why there is none
            lines.append(f"{framework}: {device}")
            continue
        choice = attempt(dispatch.explain, framework, problem, device)
        if isinstance(choice, str):  # such as a device that is not there
            lines.append(f"{framework} on {device}: {choice}")
            continue
        lines.append(f"{framework} on {device}: {choice.name or 'nobody'}{choice.times}")
        lines += [f"    not {refusal}" for refusal in choice.refusals]
    return lines


def _torch_device(name: str | None) -> Any:
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _jax_device() -> Any:
    import jax

    return jax.devices()[0]


def write_tables(path: str) -> None:
    """Rewrite those generated sections of a Markdown file that this command knows."""
    from kdakit.measure import generated

    known = {"support": support_markdown, "contract": contract_markdown}
    found = [name for name in generated.sections(path) if name in known]
    if not found:
        raise UsageError(f"{path} must have a section '<!-- generated: NAME -->' of {', '.join(known)}, and has none")
    for name in found:
        generated.write(path, name, known[name]())
        print(f"wrote the {name} table of {path}")


def contract_markdown() -> str:
    """The names that a backend has, from dispatch.CONTRACT."""
    from kdakit.dispatch import CONTRACT, REQUIRED
    from kdakit.measure.generated import markdown_table

    rows = [[f"`{name}`", f"`{entry.form}`".replace("|", "\\|"), "yes" if entry.default is REQUIRED else "", entry.meaning]
            for name, entry in CONTRACT.items()]  # fmt: skip
    return markdown_table(["name", "form", "required", "meaning"], rows)


def examine() -> dict[str, Any]:
    """The whole report as plain data."""
    with broken_once():
        return {
            "system": {"python": platform.python_version(), "platform": platform.platform(), "cpu": attempt(_cpu)},
            "packages": attempt(_packages),
            "devices": {name: attempt(probe) for name, probe in (("torch", _torch_devices), ("jax", _jax_devices))},
            "support": attempt(support),
            "stacks": attempt(_stacks),
            "training": attempt(training),
            "shown": attempt(_shown),
        }


def _shown() -> dict[str, str]:
    """What random problems have shown on this machine's kind of GPU; without one, on an H200's."""
    from kdakit.backends.triton_gpu import shown
    from kdakit.backends.triton_gpu.config import chip_of

    chip = chip_of("cuda")
    return {f"triton_gpu on {chip.name}, {name}": told for name, told in shown.summary(chip).items()}


def _stacks() -> dict[str, dict[str, Any]]:
    """What other stacks have asked of kdakit, in this process and in the last one that wrote KDAKIT_COUNTS."""
    from kdakit import stacks

    return stacks.report()


def _cpu() -> str:
    from kdakit.measure import machine

    return f"{machine.cpu_model()}, {machine.cores()} cores, {machine.memory_gib()} GiB"


def _packages() -> list[dict[str, str]]:
    from kdakit.measure import machine

    return [{"name": name, "for": purpose, "state": attempt(_package_state, name)} for name, purpose in machine.PACKAGES.items()]


def _package_state(name: str) -> str:
    """The version; an installed package that does not import says why."""
    from kdakit.measure import machine

    version = machine.version(name)
    if version is None:
        return "not installed"
    if name in ("numpy", "torch", "jax", "triton"):
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as problem:
            remember(name, problem)
            return f"{version}, but importing it {failure(problem)}"
    return version


def _torch_devices() -> list[str]:
    import torch

    found = [f"cpu ({torch.get_num_threads()} threads)"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return found


def _jax_devices() -> list[str]:
    import jax

    return [f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()]


def problems() -> dict[str, Any]:
    """{label: Problem}: one of every kind that a backend might refuse."""
    from kdakit.cases import CASES, SEGMENT_CASES, SHAPES, Shape

    made = {
        "forward": CASES["plain"].problem(),
        "forward + backward": CASES["plain"].problem(needs_grad=True),
        "token recurrence (decode)": CASES["one_token"].problem(op="recurrent"),
    }
    for dtype in ("bfloat16", "float16", "float64"):
        made[f"{dtype}, gradients"] = CASES["plain"].problem(dtype, needs_grad=True)
    for label, name in (
        ("log-decays to -3000", "gate_huge"), ("softplus gate in the kernel", "softplus"), ("bounded gate in the kernel", "lower_bound"),
        ("grouped value heads", "grouped"), ("K = V = 256", "wide"), ("odd K and V", "odd_sizes"), ("[V, K] states", "v_first"),
        ("chunk size 16", "chunk16"), ("chunk size 128", "chunk128"), ("packed sequences (cu_seqlens)", "varlen"),
    ):  # fmt: skip
        made[label + ", gradients"] = CASES[name].problem(needs_grad=True)
    made["segment_ids, gradients"] = SEGMENT_CASES["segments"].problem(needs_grad=True)
    for name in ("cpu", "h96"):
        size = SHAPES[name]
        # One token is enough to describe the call; no array of the real length is drawn.
        problem = Shape(size.B, 1, size.H, size.K).case().problem("bfloat16", needs_grad=True).replace(T=size.T)
        made[f"bench shape {name}: B{size.B} T{size.T} H{size.H} K{size.K}, bfloat16, gradients"] = problem
    return made


def support(device: str | None = None) -> dict[str, dict[str, str]]:
    """{backend: {problem: 'yes' or why not}} on this machine's default device, or on 'cpu'."""
    from kdakit import dispatch

    table = {}
    wanted = problems()
    for backend in dispatch.BACKENDS:
        where = attempt(_device, backend.framework, device)
        table[backend.name] = {label: attempt(_answer, backend, problem, where) for label, problem in wanted.items()}
    return table


def training() -> dict[str, str]:
    """{GPU: the backend that 'auto' trains with there in PyTorch, and why none before it}."""
    import torch

    from kdakit import dispatch

    problem = problems()["bfloat16, gradients"]
    found = {}
    for n in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", n)
        found[f"cuda:{n} ({torch.cuda.get_device_name(n)})"] = attempt(_training_backend, dispatch, problem, device)
    return found


def _training_backend(dispatch, problem, device) -> str:
    refusals = []
    for name in dispatch.names("torch"):
        reason = dispatch.supports(name, problem, device) or dispatch.load(name).interpreted(device)
        if reason is None:
            slow = ", which is slow there" if name in dispatch.SLOW else ""
            return f"{name}{slow}" + (f", because {'; '.join(refusals)}" if refusals else "")
        refusals.append(f"{name}: {reason}")
    return f"none: {'; '.join(refusals)}"


def _device(framework: str, device: str | None) -> Any:
    from kdakit.measure import checking

    if device is None:
        return checking.default_device(framework)
    return importlib.import_module("torch").device(device) if framework == "torch" else device


def _answer(backend, problem, where) -> str:
    from kdakit import dispatch

    if str(where).startswith(FAILED):
        return where
    if problem.varlen == "segment_ids" and backend.framework != "jax":
        return f"kdakit.{backend.framework} takes no segment_ids"
    return dispatch.supports(backend.name, problem, where) or OK


# What each backend is for. Where no GPU can be asked, `triton_gpu` and `triton_ffi` answer as on an H200 (sm_90).
OWN_DEVICE = {
    "triton_gpu": "a GPU", "cuda": "an NVIDIA GPU", "torch_native": "any device", "pallas_tpu": "a TPU",
    "triton_ffi": "a GPU", "cuda_ffi": "an NVIDIA GPU", "xla": "any device",
}  # fmt: skip


def support_markdown() -> str:
    """Problems down, backends across, each on the device it is for: the table of docs/backends.md."""
    from kdakit import dispatch
    from kdakit.measure.generated import markdown_table

    table = {b.name: {label: attempt(_own_answer, b, problem) for label, problem in problems().items()} for b in dispatch.BACKENDS}
    rows, reasons = numbered(table)
    drawn = markdown_table(["", *(f"`{name}` on {OWN_DEVICE.get(name, 'a CPU')}" for name in table)], rows)
    borrowed = [
        f"Gradients of `{name}` are computed by `{dispatch.load(name).gradients}`." for name in table if dispatch.load(name).gradients
    ]
    return "\n".join([drawn, "", *(f"{n}. {reason}" for n, reason in enumerate(reasons, 1)), "", " ".join(borrowed)])


def _own_answer(backend, problem) -> str:
    """`_answer` on the backend's own device, whether or not there is one here."""
    from kdakit import dispatch

    module, where = dispatch.load(backend.name), {"triton_gpu": "cuda", "triton_ffi": "gpu", "pallas_tpu": "tpu"}.get(backend.name, "cpu")
    if OWN_DEVICE.get(backend.name) != "an NVIDIA GPU" or (problem.op == "recurrent" and module.step is None):
        device = _device(backend.framework, where)
        answer = _answer(backend, problem, device)
        return OK if answer == module.unshown(problem, device) else answer  # what a chip has shown so far is that chip's own table
    return module.unsupported(problem) or OK


def numbered(table: dict[str, dict[str, str]]) -> tuple[list[list[str]], list[str]]:
    """[problem, 'yes' or 'no (n)' of each backend], and the n-th reasons: many backends leave no room for sentences between them."""
    reasons: dict[str, int] = {OK: 0}
    rows = []
    for label in next(iter(table.values()), {}):
        given = [reasons.setdefault(answers[label], len(reasons)) for answers in table.values()]
        rows.append([label, *(f"no ({n})" if n else OK for n in given)])
    return rows, list(reasons)[1:]


def show(report: dict[str, Any]) -> None:
    try:
        _show(report)
    except (Exception, SystemExit) as problem:
        print(f"The tables cannot be drawn ({failure(problem)}); the plain report:")
        print(json.dumps(report, indent=2, default=str))


def _show(report: dict[str, Any]) -> None:
    from rich.markup import escape

    from kdakit.cli import console

    out = console.output()
    for name, value in report["system"].items():
        out.print(f"[bold]{name:9}[/bold] {value}")
    out.print()
    packages = report["packages"]
    if isinstance(packages, str):
        out.print(f"packages {packages}", markup=False)
    else:
        shown = console.table("Packages", "package", "version", "needed for")
        for row in packages:
            shown.add_row(row["name"], escape(row["state"]), row["for"])
        out.print(shown)
    shown = console.table("Devices", "framework", "devices")
    for framework, found in report["devices"].items():
        shown.add_row(framework, escape(found if isinstance(found, str) else "\n".join(found)))
    out.print(shown)
    _show_support(out, report["support"])
    if isinstance(report["training"], str):
        out.print(f"training {report['training']}", markup=False)
    else:
        for gpu, backend in report["training"].items():
            out.print(f"training on {gpu}: {backend}", markup=False)
    _show_stacks(out, report["stacks"])
    found = report["shown"]
    for name, told in found.items() if isinstance(found, dict) else {"shown": found}.items():
        out.print(f"{name}: {told}", markup=False)


def _show_support(out, table) -> None:
    from rich.markup import escape

    from kdakit.cli import console

    if isinstance(table, str):
        out.print(f"support {table}", markup=False)
        return
    shown = console.table("Which backend can run which problem here", "problem", *table)
    rows, reasons = numbered(table)
    for row in rows:
        shown.add_row(*(f"[green]{OK}[/green]" if cell == OK else escape(cell) for cell in row))
    out.print(shown)
    for n, reason in enumerate(reasons, 1):
        out.print(f"({n}) {escape(reason)}")


def _show_stacks(out, found) -> None:
    from rich.markup import escape

    from kdakit.cli import console

    if isinstance(found, str):
        out.print(f"stacks {found}", markup=False)
        return
    shown = console.table("Other stacks on kdakit (kdakit.enable; counts of a process: KDAKIT_COUNTS=FILE)", "stack", "enabled", "calls")
    earlier = found.pop("earlier process", {})
    rows = [(stack, str(entry["enabled"]), entry) for stack, entry in found.items()]
    rows += [(stack, "in the process that wrote KDAKIT_COUNTS", entry) for stack, entry in earlier.items()]
    for stack, enabled, entry in rows:
        lines = [f"{n} x {name} taken" for name, n in entry["taken"].items()]
        lines += [f"{n} x passed on: {why}" for why, n in entry["passed on"].items()]
        shown.add_row(stack, escape(enabled), escape("\n".join(lines)))
    out.print(shown)
