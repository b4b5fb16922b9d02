"""Entry point of the `kdakit` command: one module per subcommand, imported lightly so that --help stays fast."""

from __future__ import annotations

import argparse
import io
import os
import sys

from kdakit import __version__
from kdakit.cli import bench, build_cuda, compile, demo, doctor, generate, tpu_report, train, verify
from kdakit.measure.choices import UsageError

COMMANDS = {
    "doctor": doctor, "verify": verify, "bench": bench, "compile": compile, "demo": demo, "train": train, "generate": generate,
    "build-cuda": build_cuda, "tpu-report": tpu_report,
}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kdakit", description="Kimi Delta Attention: what runs here, is it right, is it fast.")
    parser.add_argument("--version", action="version", version=f"kdakit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = module.__doc__.splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    return parser


def main(argv: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal has no character for ends no command
    args = build_parser().parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    try:
        code = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except UsageError as problem:
        print(f"kdakit {args.command}: {problem}", file=sys.stderr)
        return 2
    except FloatingPointError as problem:  # weights or losses that are no numbers any more
        print(f"kdakit {args.command}: {problem}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # who read has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        raise  # another pipe: that of a process which is gone
    except OSError as problem:
        if problem.errno is None or isinstance(problem, ConnectionError):  # a library that cannot be loaded, a process that is gone
            raise
        print(f"kdakit {args.command}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
