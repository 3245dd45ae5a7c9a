"""What is added is there for good; what cannot be is said in one sentence."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from faults import MANIFEST, NASTY, Recorder, assert_resumes, findings_of, fresh_folder, jobs_of, undisturbed, work

from regard.errors import StoreError
from regard.jobs import files
from regard.jobs.store import Store, read_run


@pytest.fixture
def run():
    with fresh_folder() as folder:
        yield folder / "runs" / "one"


def one_sentence(problem) -> str:
    text = str(problem.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def test_records_come_back_as_they_were(run):
    record = {
        "floats": [0.1, 1e-310, -0.0, 1.7976931348623157e308, math.nan, math.inf, -math.inf], "texts": NASTY,
        "big": 2**80, "tuple": (1, 2), "nested": {"": {"\ud800": None}}, 3: True,
    }  # fmt: skip
    ids = ["plain", "A", "a", "../../escaped", "größe 🎬", "\ud800", "", "x" * 300, "nul\0", "lock", "manifest.json"]
    with Store.open(run, MANIFEST) as kept:
        for job in ids:
            kept.add(job, record, {"job": np.frombuffer(job.encode("utf-8", "surrogatepass") + b".", np.uint8)})
        first = {job: json.dumps(kept.record(job)) for job in ids}
    with Store.open(run, MANIFEST, resume=True) as kept:
        assert kept.finished == set(ids)
        assert {job: json.dumps(kept.record(job)) for job in ids} == first
        assert first["plain"] == json.dumps(record)
        assert kept.record("a")["nested"] == {"": {"\ud800": None}}
        for job in ids:
            assert kept.arrays(job)["job"].tobytes() == job.encode("utf-8", "surrogatepass") + b"."
    assert sorted(path.name for path in run.parent.iterdir()) == ["one"]


def test_a_record_that_is_changed_after_it_was_read_stays_as_it_was(run):
    with Store.open(run, MANIFEST) as kept:
        kept.add("one", {"list": [1]})
        kept.record("one")["list"].append(2)
        assert kept.record("one") == {"list": [1]}
        with pytest.raises(StoreError, match="job='one' is kept already"):
            kept.add("one", {"list": [3]})


def test_arrays_come_back_as_they_were(run):
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "strided": grid[:, ::2], "transposed": grid.T, "fortran": np.asfortranarray(grid), "reversed": grid[::-1],
        "big-endian": grid.astype(">f8"), "scalar": np.array(3.5), "empty": np.zeros((0, 4)), "bool": grid > 3,
        "half": grid.astype(np.float16), "bytes": np.frombuffer(b"\0\xff", np.uint8), "nan": np.array([math.nan, -0.0]),
    }  # fmt: skip
    with Store.open(run, MANIFEST) as kept:
        kept.add("one", {}, arrays)
        kept.add("none", {})
        assert kept.arrays("none") == {}
        found = kept.arrays("one")
        assert [*found] == sorted(arrays)  # safetensors alone has no order
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype.newbyteorder("<"), name
            assert found[name].shape == array.shape, name
            np.testing.assert_array_equal(found[name], array)
        kept.finish({"all": 1.5}, {"seconds": 2})
    done = read_run(run)
    assert (done.findings, done.times, done.manifest["identity"]) == (
        {"all": 1.5},
        {"seconds": 2},
        MANIFEST["identity"],
    )
    np.testing.assert_array_equal(done.arrays["one"]["transposed"], grid.T)


def test_the_same_findings_are_the_same_bytes(run):
    jobs = jobs_of(3)
    assert undisturbed(run / "a", jobs) == undisturbed(run / "b", jobs)
    assert undisturbed(run / "c", jobs_of(4)) != undisturbed(run / "d", jobs_of(5))
    assert {path.name for path in (run / "a").iterdir()} == {
        "manifest.json", "records.jsonl", "arrays", "findings.json", "done.json", "lock",
    }  # fmt: skip


def test_lines_are_json_and_say_their_schema(run):
    with Store.open(run, MANIFEST) as kept:
        kept.add("one", {"value": math.nan})
    (line,) = [json.loads(line) for line in (run / "records.jsonl").read_text("ascii").splitlines()]
    assert (line["schema"], line["job"], line["number"], len(line["checksum"])) == ("regard.run/1", "one", 1, 64)
    manifest = json.loads((run / "manifest.json").read_text("ascii"))
    assert (manifest["schema"], manifest["command"]) == ("regard.run/1", "regard audit …")


def test_a_folder_that_holds_a_run_is_not_written_over(run):
    with Store.open(run, MANIFEST) as kept:
        kept.add("one", {})
    with pytest.raises(
        StoreError, match="holds a run .manifest.json.. Go on with it by --resume, or choose another --out"
    ) as problem:
        Store.open(run, MANIFEST)
    one_sentence(problem)
    with Store.open(run, MANIFEST, resume=True) as kept:
        assert kept.finished == {"one"}


def test_resume_begins_where_there_is_nothing(run):
    with Store.open(run, MANIFEST, resume=True) as kept:
        assert kept.finished == set()
    run.with_name("two").mkdir()
    (run.with_name("two") / "notes.txt").write_text("mine")
    with Store.open(run.with_name("two"), MANIFEST, resume=True) as kept:
        kept.add("one", {})


def test_resume_refuses_another_run_and_says_the_difference(run):
    was = {"model": {"weights": "abc", "kind": "text"}, "limit": 200, "methods": ["raw"], "gone": True}
    now = {"model": {"weights": "abd", "kind": "text"}, "limit": 500, "methods": ["raw"], "new": None}
    Store.open(run, {"identity": was, "command": "a"}).close()
    before = (run / "manifest.json").read_bytes()
    with pytest.raises(StoreError) as problem:
        Store.open(run, {"identity": now, "command": "b"}, resume=True)
    said = 'holds another run (model.weights: was "abc", is "abd"; limit: was 200, is 500; gone: was true, is "nothing"; new: was "nothing", is null)'
    assert said in one_sentence(problem)
    assert (run / "manifest.json").read_bytes() == before
    with Store.open(run, {"identity": was, "command": "b"}, resume=True) as kept:  # what is no part of it may change
        assert kept.manifest["command"] == "a"


def test_a_torn_last_record_is_dropped_in_silence(run, caplog):
    jobs = jobs_of(0)
    expected = undisturbed(run.with_name("two"), jobs)
    with Store.open(run, MANIFEST) as kept:
        for job in [*jobs][:3]:
            kept.add(job, *jobs[job])
    path = run / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with Store.open(run, MANIFEST, resume=True) as kept:
        assert kept.finished == {*[*jobs][:2]}
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    assert not assert_resumes(run, jobs, expected, kept={*[*jobs][:2]})
    assert not caplog.records


@pytest.mark.parametrize("what", ["flip", "drop", "double", "swap", "foreign", "arrays lost", "arrays swapped"])
def test_a_damaged_record_is_told_and_done_again_and_the_others_are_kept(what, run, caplog):
    jobs = jobs_of(0)
    expected = undisturbed(run.with_name("two"), jobs)
    with Store.open(run, MANIFEST) as kept:
        for job in [*jobs][:5]:
            kept.add(job, *jobs[job])
    with Store.open(run.with_name("three"), {"identity": {"model": "another"}}) as kept:
        for job in [*jobs][:5]:
            kept.add(job, {"values": "of another model"}, jobs[job][1])
    path = run / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    ids = [*jobs]
    lost = {ids[1]}
    if what == "flip":
        lines[1] = lines[1].replace(b"NaN", b"1.0", 1)
    elif what == "drop":
        del lines[1]
    elif what == "double":
        lines.insert(3, lines[1])
        lost = set()
    elif what == "swap":
        lines[1], lines[2] = lines[2], lines[1]
        lost = set()
    elif what == "foreign":
        lines[1] = (run.with_name("three") / "records.jsonl").read_bytes().splitlines(keepends=True)[1]
    elif what == "arrays lost":
        (run / "arrays" / "job-1.safetensors").unlink()
    else:
        mine = run / "arrays" / "job-1.safetensors"
        (other,) = (one for one in mine.parent.iterdir() if one != mine)
        mine.write_bytes(other.read_bytes())
    damaged = b"".join(lines)
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "regard"), Store.open(run, MANIFEST, resume=True) as kept:
        assert kept.finished == {*ids[:5]} - lost
    (warning,) = [record.getMessage() for record in caplog.records]
    place = (
        "line 2 (its arrays in job-1.safetensors)" if "arrays" in what else "line 4" if what == "double" else "line 2"
    )
    assert warning.startswith(f"{path} was damaged at {place}")
    assert "\n" not in warning
    assert (run / "records.damaged-1.jsonl").read_bytes() == damaged
    assert not assert_resumes(run, jobs, expected, kept={*ids[:5]} - lost)  # all is well from here on


def test_a_damaged_manifest_is_told_and_what_belongs_to_the_run_can_be_kept(run):
    jobs = jobs_of(0)
    expected = undisturbed(run, jobs)
    path = run / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    for call in (lambda: Store.open(run, MANIFEST, resume=True), lambda: read_run(run)):
        with pytest.raises(StoreError, match=r"manifest.json is damaged") as problem:
            call()
        one_sentence(problem)
    path.unlink()
    assert not assert_resumes(run, jobs, expected, kept={*jobs})


def test_another_schema_is_refused(run, monkeypatch):
    monkeypatch.setattr("regard.jobs.store.SCHEMA", "regard.run/0")
    undisturbed(run, jobs_of(0))
    monkeypatch.undo()
    for call in (lambda: Store.open(run, MANIFEST, resume=True), lambda: read_run(run)):
        with pytest.raises(StoreError, match="was written by another version of regard"):
            call()


def test_a_run_that_is_not_done_cannot_be_read(run):
    with pytest.raises(StoreError, match="holds no run"):
        read_run(run)
    with Store.open(run, MANIFEST) as kept:
        kept.add("one", {})
    with pytest.raises(StoreError, match="is not done. Go on with it by --resume") as problem:
        read_run(run)
    one_sentence(problem)
    with Store.open(run, MANIFEST, resume=True) as kept:
        kept.finish({"found": 1}, {})
        assert read_run(run).findings == {"found": 1}
        kept.add("two", {})  # it is not done any more
        with pytest.raises(StoreError, match="is not done"):
            read_run(run)


def test_reading_what_may_not_be_read(run, monkeypatch):
    undisturbed(run, jobs_of(0))

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(StoreError, match="cannot be read .*Permission denied"):
        read_run(run)


def test_two_writers(run):
    with Store.open(run, MANIFEST):
        with pytest.raises(
            StoreError, match="another process writes there. Wait for it, or choose another --out"
        ) as problem:
            Store.open(run, MANIFEST, resume=True)
        one_sentence(problem)
    Store.open(run, MANIFEST, resume=True).close()


def test_the_lock_of_a_dead_process_is_nobodys_even_if_its_workers_live_on(run):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        Store.open(run, MANIFEST)
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writing, str(worker).encode())
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(reading, 20))
    with pytest.raises(StoreError, match="another process writes there"):
        Store.open(run, MANIFEST, resume=True)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(worker, 0)  # it lives
    Store.open(run, MANIFEST, resume=True).close()
    os.kill(worker, signal.SIGKILL)
    os.close(reading)
    os.close(writing)


def test_where_there_is_no_flock_the_file_is_the_lock(run, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with Store.open(run, MANIFEST), pytest.raises(StoreError, match="another process .* If nobody does, delete .*lock"):
        Store.open(run, MANIFEST, resume=True)
    assert not (run / "lock").exists()
    Store.open(run, MANIFEST, resume=True).close()


def test_the_folder_is_a_file(run):
    run.parent.mkdir()
    run.write_text("mine")
    for folder in (run, run / "below"):
        with pytest.raises(StoreError, match="a file is where a folder should be .* Choose another --out") as problem:
            Store.open(folder, MANIFEST)
        one_sentence(problem)
    assert run.read_text() == "mine"


@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_folder_that_cannot_be_written(refusal, run):
    run.mkdir(parents=True)
    with (
        Recorder(fail_at=0, error=refusal).at_work(),
        pytest.raises(StoreError, match="it cannot be written") as problem,
    ):
        Store.open(run, MANIFEST)
    assert os.strerror(refusal) in one_sentence(problem)
    assert [*run.iterdir()] == []


def test_a_full_disk(run):
    """A limit of the system on how large a file may get, in a process of its own."""
    jobs = jobs_of(0, 30)
    expected = undisturbed(run.with_name("two"), jobs)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
            work(run, jobs, told=lambda job: os.write(writing, json.dumps(job).encode() + b"\n"))
        except StoreError as problem:
            os.write(writing, json.dumps({"problem": str(problem)}).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        *kept, last = [json.loads(line) for line in pipe]
    assert "the disk is full (File too large" in last["problem"]
    assert "go on with --resume: what was finished is kept." in last["problem"]
    left = (run / "records.jsonl").read_bytes()
    assert len(kept) == left.count(b"\n") > 2
    assert left.endswith(b"\n")
    assert not assert_resumes(run, jobs, expected, kept={*kept})


def test_an_interrupt_within_a_write_leaves_no_torn_line(run, monkeypatch):
    with Store.open(run, MANIFEST) as kept:
        kept.add("one", {"value": 1})
        written = os.write

        def interrupted(opened, data):
            written(opened, data[:20])
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept.add("two", {"value": 2})
        monkeypatch.undo()
        kept.add("three", {"value": 3})
        assert findings_of(kept, {"one": ({}, None), "three": ({}, None)})["three"]["record"] == {"value": 3}
    with Store.open(run, MANIFEST, resume=True) as kept:
        assert kept.finished == {"one", "three"}


def test_what_json_cannot_hold_is_not_kept(run):
    with Store.open(run, MANIFEST) as kept:
        with pytest.raises(TypeError):
            kept.add("one", {"value": object()})
        assert kept.finished == set()
        kept.add("one", {"value": 1})


def test_torch_is_not_imported():
    code = "import sys, regard.jobs.store; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
