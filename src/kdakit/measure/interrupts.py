"""Ctrl-C and worker processes: a terminal sends it to all of them, and the one that started the others ends them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Processes that are started meanwhile never hear Ctrl-C, so none fills the terminal with where it was. Here it waits until the end."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which a process that is started inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
