"""Ctrl-C and worker processes: a terminal sends it to all of them, and the one that started the others ends them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Processes that are started meanwhile never hear Ctrl-C, so none fills the terminal with where it was. Here it waits until the end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which the first process would start, letting the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a process that is started inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
