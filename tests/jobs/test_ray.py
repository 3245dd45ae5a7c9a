"""Runs on Ray: the same bytes as here, whatever happens to those who work; nothing lost, nothing twice, no end without."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from ray_faults import (
    OTHER_VERSION,
    Bomb,
    BreaksAt,
    Lots,
    OnlyAt,
    Slow,
    Telling,
    Work,
    alive,
    cluster,
    in_place,
    outcomes,
    surroundings,
)
from typer.testing import CliRunner

import regard
from regard import lessons
from regard.audited import load_audit
from regard.cli import app
from regard.errors import InputError, NotAModel, OptionError, WorkerDied, WorkerDiffers
from regard.fingerprints import of_subject
from regard.jobs import joining
from regard.jobs.running import Afar, Failed, Runner, run
from regard.jobs.store import Store
from regard.lessons import Lab
from regard.models import toys
from regard.teaching import Lesson, Teacher

sys.path.insert(0, str(Path(__file__).parents[1] / "trials"))
import gated
from polar import of_kind

pytest.importorskip("ray", reason="Ray is not installed: pip install 'regard[ray]'")
from regard.jobs import ray as runner

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's test cluster


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture
def two(nodes):
    return nodes.exactly(2)


@pytest.fixture
def work(tmp_path):
    return lambda trouble=(), **more: Work(tmp_path / "diary", dict(trouble), **more)


def squares(numbers):
    return {number: number**2 for number in numbers}


def test_units_run_elsewhere_and_bring_what_they_need(nodes, two):
    units = [*range(6)]
    found = outcomes(surroundings, units, nodes.runner())
    homes = {one["home"] for one in found.values()}
    assert homes <= {str(home) for home in nodes.folder.glob("node-*")}
    assert all(one["cwd"] == f"{one['home']}/cwd" for one in found.values()), "the working directory is not shipped"
    assert {(one["threads"], one["omp"]) for one in found.values()} == {(1, "1")}
    more = outcomes(surroundings, units, nodes.runner(1), threads=2)
    assert {(one["threads"], one["omp"]) for one in more.values()} == {(2, "2")}


def test_generators_of_a_process_do_not_leak_from_unit_to_unit(nodes, two):
    units = [*range(8)]
    shuffled = random.Random(1).sample(units, 8)
    one, other = (outcomes(Lots(settled=True), order, nodes.runner(1)) for order in (units, shuffled))
    assert one == other
    assert len({tuple(drawn) for drawn in one.values()}) == 8
    bare = outcomes(Lots(settled=False), units, nodes.runner(1))
    assert all(here != there for here, there in zip(bare.values(), one.values(), strict=True))


def test_arrays_can_be_changed_where_they_arrive_and_here(nodes, two):
    array = np.arange(300_000.0)  # so large that Ray would share its memory
    ((_, (record, arrays)),) = run(in_place, [[("a", array)]], runner=nodes.runner(1), afar=Afar(in_place))
    assert record["value"] == array.sum() + len(array)
    arrays["array"] += 1
    assert array[0] == 0


def test_a_unit_that_raises_fails_alone(nodes, two, work):
    told = work({3: "raise", 5: "raise once"})
    found = outcomes(told, [*range(9)], nodes.runner(), chunk=3)
    failed = found.pop(3)
    assert found == squares(number for number in range(9) if number != 3)
    assert isinstance(failed, Failed)
    assert "failed 3 times" in failed.why
    assert "KeyError: 'no such thing'" in failed.why
    assert told.begun == dict.fromkeys(range(9), 1) | {3: 3, 5: 2}


def test_a_unit_that_kills_its_worker_fails_alone(nodes, two, work):
    told = work({1: "kill", 6: "kill once"})
    found = outcomes(told, [*range(10)], nodes.runner(), chunk=2)
    failed = found.pop(1)
    assert found == squares(number for number in range(10) if number != 1)
    assert isinstance(failed, Failed)
    assert told.begun[1] == 3
    assert told.begun[6] == 2
    assert max(told.begun[number] for number in range(10) if number != 1) <= 3, "no other is to blame"


def test_a_unit_that_hangs_is_given_up(nodes, two, work):
    told = work({2: "hang", 4: "hang once"})
    began = time.monotonic()
    found = outcomes(told, [*range(6)], nodes.runner(timeout=2.0))
    failed = found.pop(2)
    assert found == squares((0, 1, 3, 4, 5))
    assert "longer than 2 seconds" in failed.why
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("replaced", [True, False])
def test_a_node_that_dies_costs_no_more_than_what_it_had(nodes, two, work, replaced, capsys):
    told, units = work(seconds=0.3), [*range(30)]
    victims = iter(two[:1])

    def seen(unit):
        for node in victims if unit >= 4 else ():
            nodes.kill(node)
            if replaced:
                nodes.add()

    assert outcomes(told, units, nodes.runner(), seen=seen) == squares(units)
    again = sum(told.begun.values()) - len(units)
    assert 0 <= again <= runner.AHEAD
    assert capsys.readouterr().out == "", "results are there, and nothing that Ray has to say of nodes"


@pytest.mark.parametrize("times", [1, 100])
def test_death_as_it_begins(nodes, two, tmp_path, times):
    bomb = Bomb(tmp_path / "diary", times)
    if times == 1:
        assert outcomes(bomb, [*range(4)], nodes.runner(1)) == squares(range(4))
        return
    with pytest.raises(WorkerDied, match="died as they began"):
        outcomes(bomb, [*range(4)], nodes.runner(1))
    assert len((tmp_path / "diary").read_text()) == runner.ATTEMPTS


TEXTS = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad", "good and bad so so"] * 5
ASKED = {"methods": ["raw", "random"], "trials": ["comprehensiveness", ("permutation", {"n": 5})], "shown": 2,
         "batch_size": 8, "threads": 1, "probes": ["entropy"]}  # fmt: skip


def found_in(folder):
    return (folder / "findings.json").read_bytes()


@pytest.fixture
def saved(classifier, tokenizer, tmp_path, monkeypatch):
    """A model in a folder, named as whoever is beside it would name it."""
    classifier.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    return "saved"


def on(nodes, **more):
    return {"runner": "ray", "address": nodes.address, "workers": 2, **ASKED, **more}


@pytest.mark.parametrize("kind", ["sent", "loaded", "table", "regression"])
def test_an_audit_has_the_same_bytes_as_here(nodes, two, tmp_path, kind, tokenizer, request):
    subject, data, asked = regard.pooled(toys.decisive()), TEXTS, ASKED
    if kind == "loaded":
        subject = regard.text(request.getfixturevalue("saved"))
    elif kind != "sent":
        subject, data = of_kind(kind, tokenizer, 20)
        asked = ASKED | {"trials": ["agreement", "stability"] if kind == "table" else ["permutation"], "shown": 1}
    regard.audit(subject, data, out=tmp_path / "here", **asked)
    regard.audit(subject, data, out=tmp_path / "there", **on(nodes) | asked)
    assert found_in(tmp_path / "here") == found_in(tmp_path / "there")
    audit = load_audit(tmp_path / "there")
    assert {one.trial for _, one in audit.findings} == {
        one if isinstance(one, str) else one[0] for one in asked["trials"]
    }


def test_the_command_line_runs_on_a_cluster(nodes, two, planted_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(planted_folder.parent)
    given = ["audit", "--model", planted_folder.name, "--data", f"{planted_folder.name}/data.jsonl", "--trials",
             "permutation:n=3", "--methods", "raw", "--shown", "1", "--threads", "1", "--limit", "10", "--probes", "none"]  # fmt: skip
    there = ["--runner", "ray", "--address", nodes.address, "--workers", "2", "--timeout", "100"]
    for name, more in (("here", ["--workers", "1"]), ("there", there)):
        ended = CliRunner().invoke(app, [*given, "--out", str(tmp_path / name), *more])
        assert ended.exit_code == 0, ended.output
    assert found_in(tmp_path / "here") == found_in(tmp_path / "there")


def test_a_comparison_runs_on_a_cluster(nodes, two, planted_folder):
    given = ["compare", "--model", planted_folder, "--data", planted_folder / "data.jsonl", "--method", "rollout",
             "--json", "--threads", 1]  # fmt: skip
    there = ["--runner", "ray", "--address", nodes.address, "--workers", 2]
    one, other = (CliRunner().invoke(app, [*map(str, [*given, *more])]) for more in (["--workers", 1], there))
    assert one.exit_code == other.exit_code == 0, other.output
    assert one.stdout == other.stdout
    assert [row["method"] for row in json.loads(one.stdout)["league"]] == ["rollout", "random"]


def test_models_go_to_the_gpu_of_their_worker(nodes, saved):
    """There is none on this machine: it is asked for where Ray has one and torch has not."""
    nodes.exactly(0)
    node = nodes.add(num_gpus=1)
    try:
        for subject in (regard.text(saved), regard.pooled(toys.decisive())):
            with pytest.raises(InputError, match="cannot work for this machine: .*CUDA"):
                regard.audit(subject, TEXTS, **on(nodes, gpus_per_worker=0.5))
            with pytest.raises(InputError, match="cannot work for this machine: .*CUDA"):
                regard.compare(subject, TEXTS, methods=["raw"], batch_size=8, runner="ray", address=nodes.address,
                               gpus_per_worker=1)  # fmt: skip
    finally:
        nodes.kill(node)


def test_a_run_that_lost_its_machines_goes_on_here(nodes, two, tmp_path, monkeypatch):
    slow, kept = regard.pooled(toys.decisive(), tokenize=Slow(0.05)), []  # workers outlive their node for a moment
    add = Store.add

    def adding(store, job, *result):
        add(store, job, *result)
        kept.append(job)
        if len(kept) == 2:
            monkeypatch.setattr(runner, "PATIENCE", 3.0)
            for node in two:
                nodes.kill(node)

    monkeypatch.setattr(Store, "add", adding)
    with pytest.raises(WorkerDied, match="no machine has had room.*What was finished is kept: go on with --resume"):
        regard.audit(slow, TEXTS, out=tmp_path / "run", **on(nodes))
    assert 2 <= len(kept) < 15
    subject = regard.pooled(toys.decisive())
    regard.audit(subject, TEXTS, out=tmp_path / "run", resume=True, **ASKED)
    assert len(kept) == len({*kept}), "nothing is done twice"
    regard.audit(subject, TEXTS, out=tmp_path / "undisturbed", **ASKED)
    assert found_in(tmp_path / "run") == found_in(tmp_path / "undisturbed")


def test_a_unit_that_fails_is_reported_and_tried_again_when_resumed(nodes, two, tmp_path):
    subject = regard.pooled(toys.decisive(), tokenize=OnlyAt(os.getpid(), "plot"))  # the second text
    asked = {**ASKED, "methods": ["raw"], "trials": ["permutation"], "probes": ()}
    failed = regard.audit(subject, TEXTS, out=tmp_path / "run", runner="ray", address=nodes.address, **asked)
    whys = [one["why"] for one in failed.refused if one["trial"] == "exhibit"]
    assert len(whys) == len(failed.exhibits) == 1
    assert "failed 3 times, and goes on with --resume. The last time: KeyError: 'no such thing'" in whys[0]
    assert json.loads(found_in(tmp_path / "run"))["refused"] == [*failed.refused]
    again = regard.audit(subject, TEXTS, out=tmp_path / "run", resume=True, **asked)
    assert len(again.exhibits) == 2
    assert not [one for one in again.refused if one["trial"] == "exhibit"]


def test_other_versions_are_refused_by_name(nodes, tmp_path):
    nodes.exactly(0)
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    node = nodes.add(env={"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(WorkerDiffers, match=r'torch: was "[^"]+", is "1\.0".*Install the same'):
            outcomes(surroundings, [1], nodes.runner())
    finally:
        nodes.kill(node)


def test_another_model_or_none_at_that_path_is_refused(nodes, two, tmp_path, saved):
    subject = regard.text(saved)
    few = on(nodes, methods=["raw"], trials=["permutation"], shown=0, probes=())
    other = regard.text(saved)
    other.model.classifier.bias.data += 1
    other.model.save_pretrained(saved)
    with pytest.raises(WorkerDiffers, match=r"model\.weights: was"):
        regard.audit(subject, TEXTS, **few)
    shutil.rmtree(saved)
    with pytest.raises(NotAModel, match=r"cannot work for this machine.*does not exist"):
        regard.audit(subject, TEXTS, **few)


def test_a_node_without_room_is_said(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE", 2.0)
    nodes.exactly(0)
    node = nodes.add(memory=100 << 20)
    try:
        with pytest.raises(WorkerDied, match="no machine has had room.*memory="):
            outcomes(surroundings, [1], nodes.runner(), memory=1 << 30)
    finally:
        nodes.kill(node)


def test_models_are_trained_elsewhere_to_the_same_bits(nodes, two, tmp_path):
    data, made = gated.data(train=40, dev=10, test=10), {}
    for name, where in (("here", None), ("there", nodes.runner())):
        lab = Lab.of(gated.recipe(epochs=2), data, folder=tmp_path / name, runner=where)
        against = Lesson("adversary", 0, {"sites": "last", "factor": 0.1, "places": [0]}, lab.plain(1)[0])
        made[name] = lab.results([*lab.plain(2), against], name)
    for one, other in zip(*made.values(), strict=True):
        assert {**one.record, "seconds": 0} == {**other.record, "seconds": 0}
        assert all(np.array_equal(array, other.arrays[which]) for which, array in one.arrays.items())


@pytest.mark.parametrize("seen", [True, False])
def test_a_training_that_is_killed_goes_on_from_its_checkpoint(nodes, two, tmp_path, monkeypatch, seen):
    """On a machine that sees the folder of the run, and on one that does not."""
    data, diary = gated.data(train=32, dev=10, test=10), tmp_path / "diary"
    fit = {"epochs": 8, "patience": None, "batch_size": 32}
    recipe = regard.recipe(gated.Build(False), {**fit, "optimizer": Telling(diary, kill_at=5)})
    lab = Lab.of(recipe, data, folder=tmp_path / "there", runner=nodes.runner(1))
    nowhere = Path("/nowhere") / lab.folder.name / "checkpoints"
    if not seen:
        monkeypatch.setattr(
            lessons, "Teacher", lambda recipe, data, _, threads: Teacher(recipe, data, nowhere, threads)
        )
    (taught,) = lab.results(lab.plain(1), "killed once")
    assert len(diary.read_text().splitlines()) == 8 + 1, "four epochs were kept, and the fifth was done again"
    alone = Lab.of(regard.recipe(gated.Build(False), {**fit, "optimizer": gated.adam}), data, folder=tmp_path / "here")
    (expected,) = alone.results(alone.plain(1), "undisturbed")
    assert np.array_equal(taught.arrays["test/output"], expected.arrays["test/output"])
    left = [*tmp_path.rglob("*.safetensors"), *Path(tempfile.gettempdir()).glob(f"regard-{lab.folder.name}/*")]
    assert all(one.parent.name == "arrays" for one in left), "nothing is left of training"


def test_a_training_that_always_fails_is_refused_and_the_audit_goes_on(nodes, two, tmp_path):
    data = gated.data(train=40, dev=10, test=12)
    recipe = regard.recipe(BreaksAt(1, os.getpid()), {"epochs": 2, "patience": None, "optimizer": gated.adam})
    asked = {**ASKED, "methods": ["raw"], "trials": [("seeds", {"seeds": 2}), "permutation"], "shown": 0, "probes": ()}
    audit = regard.audit(recipe, data, out=tmp_path / "run", runner="ray", address=nodes.address, **asked)
    assert [one.trial for _, one in audit.findings] == ["permutation"]
    (refused,) = audit.refused
    assert "plain with seed 1: failed 3 times" in refused["why"]


MANY = ASKED | {"batch_size": 1}  # so many units that none of two runs is done when it is stopped
SCRIPT = """
import sys
import regard
from ray_faults import Slow
from regard.models import toys
from regard.teaching import Lesson, Teacher
from test_ray import MANY, TEXTS

if __name__ == "__main__":
    subject = regard.pooled(toys.decisive(), tokenize=Slow())
    regard.audit(subject, TEXTS, out=sys.argv[1], resume=True, runner="ray", workers=2, **MANY)
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_a_driver_that_is_killed_or_stopped_leaves_nobody_behind_and_goes_on_here(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    records, ran = tmp_path / "run" / "records.jsonl", 0
    path = os.pathsep.join([str(Path(regard.__file__).parents[1]), str(Path(__file__).parent)])
    for number in (signal.SIGKILL, signal.SIGINT):
        mark = f"REGARD_MARK={uuid4()}"
        given = {**os.environ, "PYTHONPATH": path, **dict([mark.split("=")])}
        with subprocess.Popen([sys.executable, "script.py", "run"], cwd=tmp_path, env=given, stderr=-1) as driver:
            until = time.monotonic() + 120
            while not records.exists() or len(records.read_bytes().splitlines()) < ran + 2:
                assert driver.poll() is None, driver.stderr.read().decode()[-2000:]
                assert time.monotonic() < until
                time.sleep(0.01)
            driver.send_signal(signal.SIGSTOP)  # or it might be done before all processes are looked at
            there = {what: Path(f"/proc/{one}/environ").read_text() for one, what in alive(mark).items()}
            (told,) = [given for what, given in there.items() if "raylet/raylet" in what]  # it has started a cluster
            assert "RAY_USAGE_STATS_ENABLED=0" in told
            assert "RAY_AUTH_MODE=token" in told
            assert all("--disable-frontend" in what for what in there if "dashboard.py" in what)
            driver.send_signal(number)
            driver.send_signal(signal.SIGCONT)
            driver.communicate(timeout=60)
        until = time.monotonic() + 30
        left = alive(mark)
        while any("Agent" not in one for one in left.values()):
            assert time.monotonic() < until, left
            time.sleep(0.1)
            left = alive(mark)
        assert number == signal.SIGKILL or not left
        for agent in left:  # of Ray: they hold nothing, and take a minute to notice that their cluster was killed
            os.kill(agent, signal.SIGKILL)
        ran = len(records.read_bytes().splitlines())
        assert not (tmp_path / "run" / "done.json").exists()
    subject = regard.pooled(toys.decisive())
    for name in ("run", "undisturbed"):
        regard.audit(subject, TEXTS, out=tmp_path / name, resume=True, **MANY)
    assert found_in(tmp_path / "run") == found_in(tmp_path / "undisturbed")


@pytest.fixture
def listener():
    """Something that listens, and answers as it is told."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        yield server


@pytest.mark.parametrize("says", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_where_ray_is_not(listener, says, monkeypatch):
    monkeypatch.setattr(joining, "ANSWER", 1.0)
    port = listener.getsockname()[1]
    if says is None:
        listener.close()
    elif says:
        threading.Thread(target=lambda: listener.accept()[0].sendall(says), daemon=True).start()
    began = time.monotonic()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}")[: 1 if says else 2]:
        with pytest.raises(OptionError, match=f"address='{address}' does not answer"):
            regard.audit(regard.pooled(toys.decisive()), TEXTS, runner="ray", address=address)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"runner": "spark"}, "runner='spark' is not known"),
        ({"runner": "ray", "address": "nonsense"}, "must be 'auto', 'host:port'"),
        ({"runner": "ray", "address": "auto"}, "does not answer"),
        ({"runner": "ray", "address": "no.such.host.invalid:6379"}, "does not answer"),
        ({"runner": "ray", "workers": 0}, "workers=0"),
        ({"runner": "ray", "gpus_per_worker": -1}, "gpus_per_worker=-1"),
        ({"runner": "ray", "gpus_per_worker": 2}, "gpus_per_worker=2: a worker holds the model on one GPU"),
        ({"runner": "ray", "timeout": 0}, "timeout=0"),
        ({"address": "auto"}, "address='auto' is of a cluster"),
        ({"timeout": 5}, "timeout=5 is of a cluster"),
    ],
)
def test_bad_input(given, says, tmp_path, monkeypatch):
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # the cluster of other tests is not found
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: None)
    with pytest.raises(InputError, match=says):
        regard.audit(regard.pooled(toys.decisive()), TEXTS, out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'regard\[ray\]'"):
        regard.audit(regard.pooled(toys.decisive()), TEXTS, runner="ray")


def test_a_model_that_cannot_be_sent(nodes, two):
    odd = regard.pooled(toys.decisive())
    object.__setattr__(odd, "secret", threading.Lock())
    with pytest.raises(OptionError, match="cannot be sent"):
        regard.audit(odd, TEXTS, **on(nodes))


def test_a_wrong_token_is_said(nodes, two, tmp_path):
    code = f"from regard.jobs.running import runner_of\nrunner_of('ray', workers=1, address={nodes.address!r}).open().__enter__()"
    given = {**os.environ, "PYTHONPATH": str(Path(regard.__file__).parents[1]), "RAY_AUTH_TOKEN": "f" * 64}
    ended = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert re.search("answers, but cannot be joined.*do you have its token", ended.stderr.splitlines()[-1])


def test_a_cluster_of_our_own_is_small_quiet_and_closed(caplog, monkeypatch):
    asked = []

    class Ray:
        def init(self, *where, **options):
            asked.append((where, options, os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])))

    before = dict(os.environ)
    monkeypatch.setattr(joining.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(64 << 20, 0, 64 << 20))
    joining._start(Ray(), Runner("ray", 3), 2, 10 << 20, {"log_to_driver": False})
    assert dict(os.environ) == before
    (((where,), options, mode, token),) = asked
    assert (where, mode, token) == ("local", "token", 64)
    assert options["num_cpus"] >= 6
    assert options["object_store_memory"] == 220 << 20
    assert options["include_dashboard"] is options["log_to_driver"] is False
    assert "/dev/shm has 64 MB left and Ray wants 220" in caplog.text


def test_a_subject_from_a_path_can_be_sent_and_opened_again(saved, tmp_path, monkeypatch):
    subject = regard.text(saved, special="drop")
    monkeypatch.chdir("/")
    again = pickle.loads(pickle.dumps(subject)).reopen()
    assert of_subject(again) == of_subject(subject)
    assert again.special == "drop"
    assert not hasattr(regard.text(subject.model, subject.tokenizer), "reopen"), "nobody knows where a live one is from"
