"""Files that are there whole or not at all, and folders with one writer."""

from __future__ import annotations

import errno
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks on this system: files are whole all the same, what a killed process left stays
    fcntl = None  # type: ignore[assignment]


class InUse(OSError):
    """Another process writes there."""


def write_whole(path: str | Path, data: bytes) -> None:
    """Into a new file, onto the disk, then under its name: whoever looks sees the old file or the new one, never a part.

    The file gets the mode that any new file gets. What earlier writers of this path left when they were killed goes.
    """
    path = Path(path)
    remove_parts(path.parent, glob.escape(path.name))
    handle, part = _new_part(path)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(part, path)  # while it is locked: nobody takes it for an orphan
        if fcntl is None:  # such a system moves no file that is open
            os.replace(part, path)
        sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _new_part(path: Path) -> tuple[int, Path]:
    """A file beside `path` that is ours: locked while we live."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        if _lock(handle) and os.fstat(handle).st_nlink:  # else somebody took it for an orphan before it was locked
            return handle, part
        os.close(handle)


def remove_parts(folder: Path, pattern: str) -> None:
    """Parts of files of such names whose writers are gone."""
    for part in folder.glob(f".{pattern}.*.part"):
        try:
            handle = os.open(part, os.O_RDONLY)
        except OSError:
            continue  # gone meanwhile, or not ours
        try:
            if fcntl is not None and _lock(handle):
                part.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Whether it is ours now. The lock goes with the process, however it ends. Where there are no locks it always is."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return problem.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def sync_folder(folder: Path) -> None:
    """New names onto the disk: a file that is there and whole could otherwise have no name after a power failure."""
    if fcntl is None:  # such a system opens no folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has nothing to sync there
            raise
    finally:
        os.close(handle)


_held: set[Path] = set()  # folders of this process


@contextmanager
def only_writer(folder: str | Path) -> Iterator[None]:
    """Nobody else writes into the folder meanwhile; InUse where somebody does. The process that has it may ask again."""
    folder = Path(folder).resolve()
    if folder in _held:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not _lock(handle):
            raise InUse(errno.EWOULDBLOCK, "another process writes its checkpoints there: wait for it, or use another folder", str(folder))
        _held.add(folder)
        yield
    finally:
        _held.discard(folder)
        os.close(handle)
