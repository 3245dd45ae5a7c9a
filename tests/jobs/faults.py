"""What can happen to a store: kills, crashes between any two file operations, refused operations, damaged files.

Shared by the tests and by ``make torture``. Each function does one such thing and asserts that nothing that was kept is
lost, and that the findings are, to the byte, those of an undisturbed run. Knows no torch, so that it is fast to fork.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from regard.errors import StoreError
from regard.jobs import files, store
from regard.jobs.store import Store, read_run

Jobs = dict[str, tuple[dict, dict | None]]
MANIFEST = {"identity": {"model": "m", "seed": 0}, "command": "regard audit …"}
OTHER = {"identity": {"model": "another", "seed": 0}, "command": "regard audit …"}
NASTY = ["plain", "größer 🎬", "lone \ud800 surrogate", 'quo"te\\', "line\nbreak\r\u2028", "\x00\x7f", ""]


def jobs_of(seed: int, count: int = 6) -> Jobs:
    """Jobs with what came of them: every second has arrays; texts, ids and numbers are as unpleasant as they come."""
    rng = random.Random(seed)
    made: Jobs = {}
    for number in range(count):
        values = [rng.gauss(0, 1), rng.random() * 10.0 ** rng.randint(-300, 300), math.nan, math.inf, -0.0, 5e-324]
        record = {"values": values, "texts": rng.sample(NASTY, 3), "count": rng.getrandbits(80), "none": None}
        weights = np.array([rng.random() for _ in range(rng.randint(1, 60))], np.float32)
        arrays = {"weights/ü": weights, "packed": np.frombuffer(rng.randbytes(33), np.uint8)} if number % 2 else None
        made[f"{number}-{rng.choice(NASTY)}" if number % 3 == 0 else f"job-{number}"] = (record, arrays)
    return made


def findings_of(kept: Store, jobs: Jobs) -> dict:
    """What a run finds: all records, and all of the arrays, in an order of their own."""
    return {
        job: {"record": kept.record(job), "arrays": {name: one.tolist() for name, one in kept.arrays(job).items()}}
        for job in sorted(jobs)
    }


def work(folder: Path, jobs: Jobs, *, manifest: dict = MANIFEST, resume: bool = True, told: Callable = lambda job: None) -> None:  # fmt: skip
    """Do what is left of a run, in any order; ``told`` hears of each job once it is kept."""
    with Store.open(folder, manifest, resume=resume) as kept:
        left = [job for job in jobs if job not in kept.finished]
        random.shuffle(left)
        for job in left:
            kept.add(job, *jobs[job])
            told(job)
        kept.finish(findings_of(kept, jobs), {"seconds": time.time()})


def undisturbed(folder: Path, jobs: Jobs, *, manifest: dict = MANIFEST) -> bytes:
    """The bytes of findings.json when nothing happens."""
    work(folder, jobs, manifest=manifest, resume=False)
    return (folder / "findings.json").read_bytes()


def same(kept: Store, job: str, jobs: Jobs) -> bool:
    """Whether a job is kept as it was added. JSON writes all floats so that they come back as they were."""
    record, arrays = jobs[job]
    found, held = kept.arrays(job), arrays or {}
    return json.dumps(kept.record(job)) == json.dumps(record) and (
        [(name, one.dtype, one.tobytes()) for name, one in sorted(found.items())]
        == [(name, one.dtype, one.tobytes()) for name, one in sorted(held.items())]
    )


def assert_resumes(
    folder: Path, jobs: Jobs, expected: bytes, *, kept: set[str], done: bool = False, earlier: bytes = b""
) -> list[str]:
    """Go on with a run after something happened; nothing that was kept may be lost. Returns the warnings.

    Args:
        kept: the jobs that had been kept.
        done: the run had been done.
        earlier: what had been found when it was done before, with fewer jobs.
    """
    try:
        read_run(folder)
        found = (folder / "findings.json").read_bytes()
        assert found == expected or (found == earlier and not done), "other findings than were written"
    except StoreError:
        assert not done, "a run that was done is not any more"
    with warnings_heard() as heard:
        with Store.open(folder, MANIFEST, resume=True) as opened:
            assert kept <= opened.finished, f"lost: {kept - opened.finished}"
            assert all(same(opened, job, jobs) for job in opened.finished), "a record is not what was added"
        work(folder, jobs)
    read_run(folder)
    assert (folder / "findings.json").read_bytes() == expected, "other findings than those of an undisturbed run"
    return heard


@contextmanager
def warnings_heard() -> Iterator[list[str]]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("regard").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("regard").removeHandler(handler)


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """A folder in memory, where there is such a thing: a disk takes milliseconds for each fsync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@contextmanager
def unsynced() -> Iterator[None]:
    """For faults that have nothing to do with it."""
    with mock.patch.object(os, "fsync", lambda opened: None):  # noqa: PT008, a mock is slow
        yield


# Kills


def killed(target: Callable[[Callable[[str], None]], None], lines: int, after: float) -> tuple[list[str], bool]:
    """Run something in a forked process and SIGKILL it; what it told before, and whether it was done by itself.

    Args:
        target: what runs; it may tell lines, which outlive it.
        lines: how many it tells before it is killed; so the moment does not depend on how busy the machine is.
        after: so many seconds later.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            target(lambda line: os.write(writing, json.dumps(line).encode() + b"\n") and None)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = [line for _ in range(lines) if (line := pipe.readline())]
        if len(told) == lines and after < math.inf:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        told += pipe.readlines()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0, "the process failed by itself"
    return [json.loads(line) for line in told], not os.WIFSIGNALED(status)


def kill_often(
    run: Path, jobs: int, target: Callable[[Callable[[str], None]], None], took: float, times: int, rng: random.Random
) -> tuple[set[str], int, int]:
    """Kill a run and resume it until it is done, or was killed so many times: jobs that were kept, kills, of them midway.

    Args:
        run: its folder.
        jobs: how many it has.
        target: what runs, or goes on with, the run and tells each job that is kept.
        took: seconds of an undisturbed run.
        times: kills at most.
        rng: draws the moments.
    """
    kept: set[str] = set()
    kills = midway = 0
    over = False
    while not over and kills < times:
        lines = rng.randint(0, jobs - len(kept))
        told, over = killed(target, lines, rng.uniform(0, 1.2 * took if lines == 0 else 2 * took / jobs))
        kept |= set(told)
        kills += not over
        midway += bool(kept) and not over and not (run / "done.json").exists()
    return kept, kills, midway


def kill_store(times: int, rng: random.Random) -> dict[str, int]:
    """Kill processes that write a store, so many times in all."""
    figures = {"kills": 0, "kills between the first record and done": 0, "runs": 0, "records kept": 0}
    while figures["kills"] < times:
        with fresh_folder() as folder:
            jobs = jobs_of(rng.randrange(10**9), rng.randint(3, 12))
            began = time.monotonic()
            expected = undisturbed(folder / "undisturbed", jobs)
            took, run = time.monotonic() - began, folder / "run"
            kept, kills, midway = kill_often(
                run, len(jobs), lambda tell: work(run, jobs, told=tell), took, times - figures["kills"], rng  # noqa: B023
            )  # fmt: skip
            heard = assert_resumes(run, jobs, expected, kept=kept)
            assert not heard, f"a kill leaves nothing damaged, but: {heard}"
            for name, number in zip(figures, (kills, midway, 1, len(kept)), strict=True):
                figures[name] += number
    return figures


# Crashes: a log of file operations, replayed up to any point into what a disk may then hold


class Recorder:
    """Stands in for `os` in the modules of the store: does everything, and remembers what changes the disk."""

    CHANGES = ("write", "fsync", "replace", "unlink", "mkdir", "ftruncate", "create")

    def __init__(self, *, fail_at: int = -1, error: int = errno.ENOSPC, sync: bool = False) -> None:
        self.log: list[tuple] = []
        self.paths: dict[int, str] = {}
        self.fail_at, self.error, self.sync = fail_at, error, sync

    def __getattr__(self, name: str):
        return getattr(os, name)

    def _note(self, *operation) -> None:
        self.log.append(operation)
        if len(self.log) == self.fail_at + 1:
            raise OSError(self.error, os.strerror(self.error), operation[1])

    def open(self, path, flags, mode=0o777):
        if flags & os.O_CREAT and (flags & os.O_TRUNC or not os.path.exists(path)):
            self._note("create", str(path))
        opened = os.open(path, flags, mode)
        self.paths[opened] = str(path)
        return opened

    def write(self, opened, data):
        place = os.lseek(opened, 0, os.SEEK_CUR)
        try:
            self._note("write", self.paths[opened], place, bytes(data))
        except OSError:
            os.write(opened, data[: len(data) // 2])  # a full disk takes a part
            raise
        return os.write(opened, data)

    def fsync(self, opened):
        self._note("fsync", self.paths[opened])
        if self.sync:
            os.fsync(opened)

    def replace(self, source, target):
        self._note("replace", str(source), str(target))
        os.replace(source, target)

    def unlink(self, path):
        if os.path.exists(path):
            self._note("unlink", str(path))
        os.unlink(path)

    def mkdir(self, path):
        self._note("mkdir", str(path))
        os.mkdir(path)

    def ftruncate(self, opened, length):
        self._note("ftruncate", self.paths[opened], length)
        os.ftruncate(opened, length)

    def told(self, job: str) -> None:
        """A job is kept; "" stands for the run being done."""
        self.log.append(("kept", job))

    @contextmanager
    def at_work(self) -> Iterator[Recorder]:
        with mock.patch.object(files, "os", self), mock.patch.object(store, "os", self):
            yield self


class Disk:
    """Files as they look to a process, and as they would look after a power cut."""

    MODELS = ("as it is", "nothing un-synced", "names without un-synced data", "data without un-synced names")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: dict[str, list | None] = {}  # path: [content, content when it was last synced]; None: a folder
        for path in sorted(root.rglob("*")):
            self.names[str(path)] = None if path.is_dir() else [bytearray(path.read_bytes()), path.read_bytes()]
        self.synced = dict(self.names)

    def apply(self, operation: tuple) -> None:
        kind, path, *more = operation
        if kind == "create":
            file = self.names.get(path)
            if file is None:
                self.names[path] = [bytearray(), b""]
            else:
                file[0].clear()
        elif kind == "mkdir":
            self.names[path] = None
        elif kind == "write":
            place, data = more
            content = self.names[path][0]
            content.extend(bytes(max(0, place - len(content))))
            content[place : place + len(data)] = data
        elif kind == "ftruncate":
            del self.names[path][0][more[0] :]
        elif kind == "replace":
            self.names[more[0]] = self.names.pop(path)
        elif kind == "unlink":
            del self.names[path]
        elif kind == "fsync" and self.names.get(path) is not None:
            self.names[path][1] = bytes(self.names[path][0])
        elif kind == "fsync":
            self.synced = {name: one for name, one in self.synced.items() if os.path.dirname(name) != path}
            self.synced |= {name: one for name, one in self.names.items() if os.path.dirname(name) == path}

    def lay_out(self, model: str, target: Path) -> None:
        """Write what is left into an empty folder."""
        names = self.names if model in ("as it is", "names without un-synced data") else self.synced
        for name, file in sorted(names.items()):
            path = target / Path(name).relative_to(self.root)
            if not path.parent.is_dir():
                continue  # the folder around it is lost
            if file is None:
                path.mkdir()
            else:
                path.write_bytes(file[0] if model in ("as it is", "data without un-synced names") else file[1])


def crash_everywhere(jobs: Jobs, rng: random.Random, *, prepare: Callable[[Path], set[str]] = lambda run: set()) -> dict[str, int]:  # fmt: skip
    """Crash after every file operation of a run, and within every write; ``prepare`` makes what the run finds there.

    Args:
        prepare: makes the folder as the run finds it, and returns the jobs that must outlive everything.
    """
    figures = {"operations": 0, "crashes": 0}
    with fresh_folder() as top, unsynced():
        expected = undisturbed(top / "undisturbed", jobs)
        (top / "disk").mkdir()
        safe = prepare(top / "disk" / "run")
        earlier = top / "disk" / "run" / "findings.json"
        earlier = earlier.read_bytes() if earlier.exists() else b""
        disk = Disk(top / "disk")
        recorder = Recorder()
        with recorder.at_work():
            work(top / "disk" / "run", jobs, told=recorder.told)
        recorder.told("")
        figures["operations"] = sum(operation[0] != "kept" for operation in recorder.log)

        def survives(disk: Disk, model: str, kept: set[str]) -> None:
            with tempfile.TemporaryDirectory(dir=top) as after:
                disk.lay_out(model, Path(after))
                assert_resumes(Path(after) / "run", jobs, expected, kept=kept - {""}, done="" in kept, earlier=earlier)
                figures["crashes"] += 1

        kept = set(safe)
        for operation in recorder.log:
            if operation[0] == "kept":
                kept.add(operation[1])
                continue
            if operation[0] == "write":
                _, path, place, data = operation
                for cut in {1, len(data) - 1, rng.randrange(len(data))}:
                    for torn in (data[:cut], data[:cut] + bytes(len(data) - cut), bytes(cut) + data[cut:]):
                        file = disk.names[path]
                        was = bytes(file[0])
                        disk.apply(("write", path, place, torn))
                        survives(disk, "as it is", kept)
                        file[0][:] = was
            disk.apply(operation)
            for model in Disk.MODELS:
                survives(disk, model, kept)
        for model in Disk.MODELS:
            survives(disk, model, kept)  # after all of it: done
    return figures


def damaged_start(jobs: Jobs) -> Callable[[Path], set[str]]:
    """A run that was left off with a damaged line in the middle and a torn one at the end."""

    def prepare(run: Path) -> set[str]:
        with Store.open(run, MANIFEST) as kept:
            for job in [*jobs][:4]:
                kept.add(job, *jobs[job])
        path = run / "records.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([lines[0], lines[1][:30] + b"?" + lines[1][31:], *lines[2:], b'{"checksum": "tor']))
        return {job for number, job in enumerate([*jobs][:4]) if number != 1}

    return prepare


def extended_start(jobs: Jobs) -> Callable[[Path], set[str]]:
    """A run that was done when there were fewer jobs."""

    def prepare(run: Path) -> set[str]:
        undisturbed(run, dict([*jobs.items()][:3]))
        return {*[*jobs][:3]}

    return prepare


def refuse_everywhere(jobs: Jobs, error: int) -> dict[str, int]:
    """Let the system refuse each file operation of a run in turn: a sentence, nothing lost, and then on with it."""
    figures = {"refusals": 0}
    with fresh_folder() as top, unsynced():
        expected = undisturbed(top / "undisturbed", jobs)
        while True:
            run = top / f"run{figures['refusals']}"
            recorder = Recorder(fail_at=figures["refusals"], error=error)
            kept: list[str] = []
            try:
                with recorder.at_work():
                    work(run, jobs, told=kept.append)
                return figures
            except StoreError as problem:
                said = str(problem)
            assert said.endswith("."), said
            assert "\n" not in said, said
            left = (run / "records.jsonl").read_bytes() if (run / "records.jsonl").exists() else b""
            assert left == b"" or left.endswith(b"\n"), "a torn line was left behind"
            assert not [*run.rglob(f"*{files.PARTIAL}")], "a partial file was left behind"
            assert not assert_resumes(run, jobs, expected, kept=set(kept))
            figures["refusals"] += 1


# Damage


def corrupt(run: Path, other: Path, rng: random.Random) -> str:
    """Do something to one of the files of a run; what it was. ``other`` is another run, to take files from."""
    paths = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "lock")
    path = rng.choice(paths)
    data = bytearray(path.read_bytes())
    kinds = ["flip", "flip", "set", "cut", "delete", "append", "zero", "insert", "swap"]
    kinds += ["swap lines", "double a line", "drop a line"] if path.suffix == ".jsonl" else []
    kind = rng.choice(kinds)
    place = rng.randrange(len(data)) if data else 0
    if kind == "delete":
        path.unlink()
        return f"{kind} {path.name}"
    if kind == "swap":
        beside = [one for one in paths if one != path and one.suffix == path.suffix]
        twin = other / path.relative_to(run)
        source = rng.choice([*beside, *([twin] if twin.exists() else [])] or [path])
        data[:] = source.read_bytes()
    elif kind == "append":
        data += rng.choice([b"\n", b"{}\n", bytes(data[-40:]), rng.randbytes(9), bytes(512)])
    elif kind == "insert":
        data[place:place] = rng.randbytes(rng.randint(1, 9))
    elif kind == "zero":
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    elif kind == "cut":
        del data[place:]
    elif kind in ("flip", "set") and data:
        data[place] = data[place] ^ (1 << rng.randrange(8)) if kind == "flip" else rng.randrange(256)
    elif path.suffix == ".jsonl":
        lines = bytes(data).splitlines(keepends=True)
        first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
        if kind == "swap lines":
            lines[first], lines[second] = lines[second], lines[first]
        elif kind == "double a line":
            lines.insert(second, lines[first])
        else:
            del lines[first]
        data[:] = b"".join(lines)
    path.write_bytes(data)
    return f"{kind} {path.name}"


def damage(times: int, rng: random.Random) -> dict[str, int]:
    """Damage runs that are done and runs that are not: noticed, or without any effect; never another number."""
    figures = dict.fromkeys(
        ["damages", "to runs that were done", "of these refused when read", "to runs that were not done",
         "refused when resumed", "resumed with a warning", "resumed in silence"], 0,
    )  # fmt: skip
    with fresh_folder() as top, unsynced():
        jobs = jobs_of(rng.randrange(10**9), 8)
        expected = undisturbed(top / "done", jobs)
        undisturbed(top / "other", jobs_of(rng.randrange(10**9), 8), manifest=OTHER)
        shutil.copytree(top / "done", top / "not done", ignore=shutil.ignore_patterns("done.json", "findings.json"))
        lines = (top / "done" / "records.jsonl").read_bytes().splitlines(keepends=True)
        (top / "not done" / "records.jsonl").write_bytes(b"".join(lines[:6]))
        whole = {state: contents(top / state) for state in ("done", "not done")}
        while figures["damages"] < times:
            state, run = rng.choice([*whole]), top / "run"
            shutil.copytree(top / state, run)
            what = corrupt(run, top / "other", rng)
            if contents(run) != whole[state]:
                figures["damages"] += 1
                figures[f"to runs that were {state}"] += 1
                _resume_damaged(run, state, f"{state}, {what}", jobs, expected, figures)
            shutil.rmtree(run)
    return figures


def _resume_damaged(run: Path, state: str, what: str, jobs: Jobs, expected: bytes, figures: dict[str, int]) -> None:
    try:
        read_run(run)
    except StoreError:
        figures["of these refused when read"] += state == "done"
    else:
        raise AssertionError(f"{what}: read as if nothing had happened")
    try:
        with warnings_heard() as heard:
            work(run, jobs)
    except StoreError:
        figures["refused when resumed"] += 1
        assert "manifest.json" in what, what
        return
    assert (run / "findings.json").read_bytes() == expected, f"{what}: other findings"
    read_run(run)
    figures["resumed with a warning" if heard else "resumed in silence"] += 1


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
