"""Groups of ranks, forked from a process that has imported what they all need: python forked.py JOBS MODULE .., JOBS being a JSON file.

A job is [SCRIPT, SIZE, FOLDER, TIMEOUT, ARGUMENT, ...]: SIZE processes of the script with RANK SIZE STORE and the arguments as theirs. Jobs
run one after another. Prints a JSON list of [exit code, stderr] for each, a rank each; the code of one that was killed is negative.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path


def become(script, rank, size, folder, arguments):
    """This process is now one rank; it does not come back."""
    error = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(error, 2)
    os.dup2(error, 1)
    sys.argv = [script, str(rank), str(size), str(folder / "store"), *arguments]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stderr.flush()
    os._exit(code)


def run(script, size, folder, timeout, *arguments):
    """[exit code, stderr] of every rank."""
    folder, codes = Path(folder), [None] * size
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            become(script, rank, size, folder, arguments)
    end = time.monotonic() + timeout
    while None in codes:
        for rank in (r for r in range(size) if codes[r] is None):
            ended, status = os.waitpid(ranks[rank], os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(ranks[rank], signal.SIGKILL)
        time.sleep(0.01)
    return [(code, (folder / f"stderr{rank}").read_text()) for rank, code in enumerate(codes)]


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    print(json.dumps([run(*job) for job in json.loads(Path(sys.argv[1]).read_text())]))
