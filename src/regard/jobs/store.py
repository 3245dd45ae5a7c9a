"""Where a run is kept. What was added is there for good; what is damaged is noticed, and done again.

A folder holds ``manifest.json`` (written first: what is run), ``records.jsonl`` (a line for each finished job),
``arrays/`` (what is too large for a line), ``findings.json`` and ``done.json`` (written last: times, and the digests of
all the others). Every line, and each of these files, has a checksum over its content and over where it belongs, so that
no line of another run and no file under another's name passes for the right one. Knows no torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from regard.errors import StoreError
from regard.jobs.files import (
    digest,
    digest_of,
    give_lock,
    make_folder,
    plainly,
    remove,
    seal,
    sync_folder,
    take_lock,
    unseal,
    write_at,
    write_whole,
)

SCHEMA = "regard.run/1"
MANIFEST, RECORDS, ARRAYS, FINDINGS, DONE, LOCK = (
    "manifest.json", "records.jsonl", "arrays", "findings.json", "done.json", "lock",
)  # fmt: skip
SAFE = re.compile(r"[0-9a-z_-][0-9a-z_.-]{0,99}")  # also where A and a are one name

log = logging.getLogger("regard")


class _Place(NamedTuple):
    """Where the line of a record begins, how long it is, and the digest of its arrays."""

    start: int
    length: int
    arrays: str | None


class Store:
    """A run that is being written, by this process alone. Made by `Store.open`.

    Example:
        >>> import tempfile
        >>> with Store.open(tempfile.mkdtemp(), {"identity": {"model": "a"}}) as store:
        ...     store.add("one", {"value": 0.5})
        ...     store.finished, store.record("one")
        ({'one'}, {'value': 0.5})
    """

    manifest: dict[str, Any]

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock
        self._records = -1
        self._places: dict[str, _Place] = {}
        self._end = 0
        self._salt = ""

    @classmethod
    def open(cls, folder: str | Path, manifest: Mapping[str, Any], *, resume: bool = False) -> Store:
        """Begin a run in a folder, or go on with the one that is there.

        Args:
            folder: where it is kept; made if it is not there.
            manifest: what is run. `manifest["identity"]` must not change while it is resumed.
            resume: go on with the run in the folder, if there is one.
        """
        folder = Path(folder)
        with plainly(folder):
            make_folder(folder)
            store = cls(folder, take_lock(folder / LOCK))
            try:
                store.manifest = store._agree(manifest, resume)
                store._salt = digest(json.dumps(store.manifest["identity"], sort_keys=True).encode())
                make_folder(folder / ARRAYS)
                store._read()
            except BaseException:
                store.close()
                raise
            return store

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write. Nothing is lost without it."""
        if self._records >= 0:
            os.close(self._records)
            self._records = -1
        give_lock(self._lock, self.folder / LOCK)

    @property
    def finished(self) -> set[str]:
        """The ids of all jobs that were added, now or before."""
        return set(self._places)

    def add(self, job: str, record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Keep what came of a job; once this returns it stays.

        Args:
            job: its id, any text.
            record: what JSON can hold, and NaN and Inf.
            arrays: what is too large for a line of JSON, by name.
        """
        if job in self._places:
            raise StoreError(f"job={job!r} is kept already: a job is added once.")
        with plainly(self.folder):
            remove(self.folder / DONE)
            kept = None
            if arrays:
                # safetensors takes the memory as it lies, and knows nothing of strides.
                data = save({name: np.asarray(one, order="C") for name, one in arrays.items()})
                kept = digest(data)
                write_whole(_arrays_path(self.folder, job), data)
            line = self._line(len(self._places) + 1, job, record, kept)
            try:
                write_at(self._records, self._end, line)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._records, self._end)
                raise
            self._place(job, line, kept)

    def record(self, job: str) -> dict[str, Any]:
        """What was added, as JSON gives it back: the same now and after a restart."""
        place = self._places[job]
        with plainly(self.folder):
            os.lseek(self._records, place.start, os.SEEK_SET)
            line = unseal(os.read(self._records, place.length), salt=self._salt)
        if line is None:
            raise _damaged(self.folder / RECORDS)
        record: dict[str, Any] = line["record"]
        return record

    def arrays(self, job: str) -> dict[str, NDArray[Any]]:
        """The arrays that were added with a record, sorted by name."""
        kept = self._places[job].arrays
        with plainly(self.folder):
            return _load(_arrays_path(self.folder, job), kept) if kept else {}

    def finish(self, findings: Mapping[str, Any], times: Mapping[str, Any]) -> None:
        """Write what was found, and last that the run is done.

        Args:
            findings: the same bytes for the same content, so nothing in it may depend on time or on the machine.
            times: what may.
        """
        with plainly(self.folder):
            remove(self.folder / DONE)
            write_whole(self.folder / FINDINGS, json.dumps(findings).encode("ascii") + b"\n")
            files = {name: digest_of(self.folder / name) for name in (MANIFEST, RECORDS, FINDINGS)}
            arrays = {job: place.arrays for job, place in sorted(self._places.items()) if place.arrays}
            done = {"schema": SCHEMA, "times": times, "files": files, "arrays": arrays}
            write_whole(self.folder / DONE, seal(done, salt=DONE, indent=1))

    def _agree(self, manifest: Mapping[str, Any], resume: bool) -> dict[str, Any]:
        """The manifest that is there, if it is of the same run; or else the one that is given, written."""
        path, out = self.folder / MANIFEST, f"out={str(self.folder)!r}"
        there = [name for name in (MANIFEST, RECORDS, ARRAYS, FINDINGS, DONE) if (self.folder / name).exists()]
        if there and not resume:
            raise StoreError(f"{out} holds a run ({there[0]}). Go on with it by --resume, or choose another --out.")
        if MANIFEST not in there:
            given = seal({"schema": SCHEMA, **manifest}, salt=MANIFEST, indent=1)
            write_whole(path, given)
            return unseal(given, salt=MANIFEST) or {}
        stored = unseal(path.read_bytes(), salt=MANIFEST)
        if stored is None:
            raise StoreError(
                f"{path} is damaged; the records beside it are untouched. Delete it and go on with --resume: "
                "what belongs to this model, data and options is kept."
            )
        if stored["schema"] != SCHEMA:
            raise StoreError(f"{path} was written by another version of regard. Choose another --out.")
        if changed := differences(stored["identity"], json.loads(json.dumps(manifest["identity"]))):
            differ = "; ".join(changed)
            raise StoreError(f"{out} holds another run ({differ}). Give what it was begun with, or another --out.")
        return stored

    def _read(self) -> None:
        """Find the records that are whole. A torn end is dropped; a file damaged elsewhere is written anew."""
        path = self.folder / RECORDS
        self._records = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        sync_folder(self.folder)
        wrong, number, end = [], 0, 0
        with path.open("rb") as file:  # line by line: there may be more of them than memory
            for place, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._records, end)
                    os.fsync(self._records)
                    break
                start, end = end, end + len(line)
                entry, number = unseal(line, salt=self._salt), number + 1
                if entry is None:
                    wrong.append(f"line {place}")
                    continue
                arrays = _arrays_path(self.folder, entry["job"])
                whole = entry["arrays"] is None or digest_of(arrays) == entry["arrays"]
                if not whole or entry["number"] != number:  # lines that were lost or moved leave gaps in the numbers
                    wrong.append(f"line {place}" + f" (its arrays in {arrays.name})" * (not whole))
                number = entry["number"]
                if whole and entry["job"] not in self._places:
                    self._places[entry["job"]] = _Place(start, len(line), entry["arrays"])
        self._end = end
        if wrong:
            self._mend(wrong)

    def _mend(self, wrong: list[str]) -> None:
        """Set a damaged file aside and write a new one that holds what is whole."""
        path = self.folder / RECORDS
        data = path.read_bytes()
        kept = [json.loads(data[one.start : one.start + one.length]) for one in self._places.values()]
        asides = (self.folder / f"records.damaged-{number}.jsonl" for number in count(1))
        aside = next(one for one in asides if not one.exists())
        write_whole(aside, data)
        remove(self.folder / DONE)
        self._places, self._end, lines = {}, 0, []
        for number, entry in enumerate(kept, 1):
            lines.append(self._line(number, entry["job"], entry["record"], entry["arrays"]))
            self._place(entry["job"], lines[-1], entry["arrays"])
        os.close(self._records)  # Windows replaces no file that is open
        self._records = -1
        write_whole(path, b"".join(lines))
        self._records = os.open(path, os.O_RDWR)
        more = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
        log.warning(
            f"{path} was damaged at {wrong[0]}{more}: {len(kept)} whole records are kept, the others run again, "
            f"and the file as it was is {aside.name}."
        )

    def _line(self, number: int, job: str, record: Mapping[str, Any], arrays: str | None) -> bytes:
        content = {"schema": SCHEMA, "number": number, "job": job, "record": record, "arrays": arrays}
        return seal(content, salt=self._salt)

    def _place(self, job: str, line: bytes, arrays: str | None) -> None:
        """Remember the line that was written last."""
        self._places[job] = _Place(self._end, len(line), arrays)
        self._end += len(line)


@dataclass(frozen=True, eq=False)
class Run:
    """A run that is done, every file of it checked.

    Args:
        manifest: what was run.
        findings: what was found.
        times: when it began and how long it took.
        arrays: by job, the arrays that were kept with its record.
    """

    manifest: Mapping[str, Any]
    findings: Mapping[str, Any]
    times: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, NDArray[Any]]]


def read_run(folder: str | Path) -> Run:
    """Read a run that is done; refuse it if anything is missing or has changed since."""
    folder, run = Path(folder), f"run={str(folder)!r}"
    try:
        if not (folder / DONE).is_file():
            if (folder / MANIFEST).exists():
                raise StoreError(f"{run} is not done. Go on with it by --resume.")
            raise StoreError(f"{run} holds no run. Name the folder that was given as --out.")
        done = unseal((folder / DONE).read_bytes(), salt=DONE)
        if done is None:
            raise _damaged(folder / DONE)
        if done["schema"] != SCHEMA:
            raise StoreError(f"{run} was written by another version of regard. Run it again in another --out.")
        for name, kept in done["files"].items():
            if name not in (MANIFEST, RECORDS, FINDINGS) or digest_of(folder / name) != kept:
                raise _damaged(folder / name)
        arrays = {job: _load(_arrays_path(folder, job), kept) for job, kept in done["arrays"].items()}
        manifest = unseal((folder / MANIFEST).read_bytes(), salt=MANIFEST)
        return Run(manifest or {}, json.loads((folder / FINDINGS).read_bytes()), done["times"], arrays)
    except OSError as problem:
        raise StoreError(f"{run} cannot be read ({problem}).") from problem


def _arrays_path(folder: Path, job: str) -> Path:
    """An id that cannot name a file everywhere stands there by its digest."""
    name = job if SAFE.fullmatch(job) else digest(job.encode("utf-8", "surrogatepass"))
    return folder / ARRAYS / f"{name}.safetensors"


def _load(path: Path, kept: str) -> dict[str, NDArray[Any]]:
    data = path.read_bytes() if path.is_file() else b""
    if digest(data) != kept:
        raise _damaged(path)
    return dict(sorted(load(data).items()))  # safetensors gives them in another order each time


def _damaged(path: Path) -> StoreError:
    return StoreError(f"{path} is damaged or missing. Go on with --resume: what is whole is kept, the rest runs again.")


def differences(was: Any, now: Any, name: str = "") -> list[str]:
    """What changed, by name; names of what lies within another are joined by dots."""
    if isinstance(was, dict) and isinstance(now, dict):
        names = [*was, *(one for one in now if one not in was)]
        inner = [(one, was.get(one, "nothing"), now.get(one, "nothing")) for one in names]
        return [found for one, a, b in inner for found in differences(a, b, f"{name}.{one}".lstrip("."))]
    before, after = json.dumps(was), json.dumps(now)
    return [] if before == after else [f"{name}: was {before}, is {after}"]
