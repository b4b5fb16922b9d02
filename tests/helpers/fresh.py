"""Python processes with Triton's interpreter or its compiler, forked from one that has imported torch and Triton: seconds each.

`run(*words, **variables)` is subprocess.run([sys.executable, *words], env=os.environ | variables, ..) for -c, -m and scripts. What they
fork from, one for each value of TRITON_INTERPRET, which must be known before Triton is imported, ends with the process that calls `run`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

IMPORTED = ("pytest", "torch", "triton", "kdakit.measure.checking", "kdakit.backends.triton_gpu.call", "kdakit.measure.random_problems")
LONGEST = 1800  # seconds


def run(*words, **variables: str) -> SimpleNamespace:
    """returncode (negative: a signal), stdout and stderr."""
    environment = os.environ | variables
    server = _server(environment.get("TRITON_INTERPRET", "0"))
    with tempfile.TemporaryDirectory() as folder:
        assert server.poll() is None, "what processes are forked from has ended"
        server.stdin.write(json.dumps([list(map(str, words)), environment, os.getcwd(), folder]) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "what processes are forked from has ended"
        return SimpleNamespace(returncode=int(answer), stdout=(Path(folder) / "1").read_text(), stderr=(Path(folder) / "2").read_text())


@cache
def _server(interpreted: str) -> subprocess.Popen:
    environment = os.environ | {"TRITON_INTERPRET": interpreted}
    server = subprocess.Popen([sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(lambda: (server.stdin.close(), server.wait()))
    return server


def become(words: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """This process is now `python words ..`; it does not come back."""
    for stream in (1, 2):
        os.dup2(os.open(Path(output) / str(stream), os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.alarm(LONGEST)
    path = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    del sys.path[0]  # this script's
    code = 1
    try:
        if words[0] == "-c":
            sys.path[:0] = ["", *path]
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.path[:0] = [folder, *path]
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:0] = [str(Path(words[0]).parent), *path]
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # pages that nobody counts in stay shared
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
