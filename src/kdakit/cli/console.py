"""Where output goes: results on stdout, progress on stderr."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPE_WIDTH = 140


def output() -> Console:
    """stdout; wide enough for the tables where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


def silent() -> Console:
    """Nowhere: for processes that another one speaks for."""
    return Console(quiet=True)


def progress(shown: bool = True) -> Progress:
    """A bar on stderr that vanishes when done, and stays silent where nobody watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not (shown and sys.stderr.isatty()))


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made
