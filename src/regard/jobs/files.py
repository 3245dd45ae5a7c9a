"""Files that a crash, a full disk or a flipped bit cannot change unnoticed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regard.errors import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SEALED = re.compile(rb'\{"checksum": "([0-9a-f]{64})", (.*)', re.DOTALL)
PARTIAL = ".partial"  # what a file is called until all of it is there
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_locks: set[int] = set()


def digest(data: bytes) -> str:
    """The SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_of(path: Path) -> str | None:
    """The SHA-256 of a file, however large; None if it is not there."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(content: Mapping[str, Any], *, salt: str = "", indent: int | None = None) -> bytes:
    """A line of JSON (or several, indented) that begins with the checksum of ``salt`` and all that follows.

    Escapes keep it ASCII, so that a lone surrogate can be written too; NaN and Inf are written as Python reads them.
    """
    body = json.dumps(content, indent=indent).encode("ascii")
    return b'{"checksum": "%s", %s\n' % (digest(salt.encode() + body).encode(), body[1:])


def unseal(data: bytes, *, salt: str = "") -> dict[str, Any] | None:
    """What `seal` was given; None if anything about it, or the salt, has changed."""
    found = SEALED.fullmatch(data)
    if not found or not found[2].endswith(b"\n"):
        return None
    body = b"{" + found[2][:-1]
    content: dict[str, Any] | None = json.loads(body) if digest(salt.encode() + body).encode() == found[1] else None
    return content


@contextmanager
def plainly(folder: Path) -> Iterator[None]:
    """Say what the system refused in one sentence, with the next step."""
    try:
        yield
    except OSError as problem:
        why = (problem.strerror or str(problem)) + (f": {problem.filename}" if problem.filename else "")
        if problem.errno in FULL:
            said = f"the disk is full ({why}). Free some space and go on with --resume: what was finished is kept."
        elif isinstance(problem, (FileExistsError, NotADirectoryError)):
            said = f"a file is where a folder should be ({why}). Choose another --out."
        elif isinstance(problem, PermissionError) or problem.errno == errno.EROFS:
            said = f"it cannot be written ({why}). Choose another --out, or change who may write there."
        else:
            said = f"the system refused ({why}). What was finished is kept: go on with --resume once that is settled."
        raise StoreError(f"out={str(folder)!r}: {said}") from problem


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, to stay."""
    for level in reversed([folder, *folder.parents]):
        if not level.is_dir():
            os.mkdir(level)
            sync_folder(level.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were made, changed or removed in a folder stay so."""
    if os.name == "nt":  # has no such thing, and needs none
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or, whatever happens, as it was before."""
    partial = path.with_name(path.name + PARTIAL)
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            write_at(opened, 0, data)
        finally:
            os.close(opened)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    sync_folder(path.parent)


def write_at(opened: int, place: int, data: bytes) -> None:
    """Write at a place of an open file, all of it and to stay."""
    os.lseek(opened, place, os.SEEK_SET)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(opened, rest) :]
    os.fsync(opened)


def remove(path: Path) -> None:
    """Remove a file, to stay; nothing if it is not there."""
    with suppress(FileNotFoundError):
        os.unlink(path)
        sync_folder(path.parent)


def take_lock(path: Path) -> int:
    """Take the lock of a folder, or refuse. The system gives it up when the process ends, however it ends.

    Without `fcntl.flock` (Windows) the file itself is the lock: it is there as long as somebody writes, and after a
    crash it has to be deleted by hand.
    """
    flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if fcntl is None else 0)
    by_hand = f" If nobody does, delete {path}." if fcntl is None else ""
    refusal = f"out={str(path.parent)!r}: another process writes there. Wait for it, or choose another --out.{by_hand}"
    try:
        opened = os.open(path, flags, 0o666)
    except FileExistsError:
        raise StoreError(refusal) from None
    try:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise StoreError(refusal) from None
    except BaseException:
        os.close(opened)
        raise
    _locks.add(opened)
    return opened


def give_lock(opened: int, path: Path) -> None:
    """Give a lock up."""
    if opened in _locks:
        _locks.discard(opened)
        os.close(opened)
        if fcntl is None:
            with suppress(OSError):
                os.unlink(path)


def _forget_locks() -> None:
    for opened in _locks:
        os.close(opened)
    _locks.clear()


# A forked worker would hold the lock for as long as it lives, also when the process that took it is dead.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
