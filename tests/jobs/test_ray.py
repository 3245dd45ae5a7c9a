"""Runs on Ray: the same bytes as here, whatever happens to those who work; nothing lost, nothing twice, no end without."""

from __future__ import annotations

import json
import os
import random
import shutil
import time

import numpy as np
import pytest
from ray_faults import OTHER_VERSION, Bomb, Lots, OnlyAt, Work, cluster, in_place, outcomes, surroundings

import regard
from regard.audited import load_audit
from regard.errors import NotAModel, WorkerDied, WorkerDiffers
from regard.jobs.running import Afar, Failed, run
from regard.jobs.store import Store
from regard.models import toys

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
    assert homes == {str(nodes.folder / f"node-{number}") for number in (1, 2)}
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
def test_a_node_that_dies_costs_no_more_than_what_it_had(nodes, two, work, replaced):
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


def test_all_nodes_gone_is_an_error_that_says_what_is_kept(nodes, two, work, monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE", 4.0)
    victims = iter(two)
    kept = []

    def seen(unit):
        kept.append(unit)
        for node in victims:
            nodes.kill(node)

    with pytest.raises(WorkerDied, match="no machine has had room.*--resume"):
        outcomes(work(seconds=0.2), [*range(20)], nodes.runner(), seen=seen)
    assert kept


def test_nodes_that_come_back_in_time_go_on(nodes, two, work):
    victims = iter([two])

    def seen(unit):
        for both in victims:
            for node in both:
                nodes.kill(node)
            nodes.add()

    assert outcomes(work(seconds=0.2), [*range(12)], nodes.runner(), seen=seen) == squares(range(12))


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


def test_an_audit_has_the_same_bytes_as_here(nodes, two, tmp_path, saved):
    for name, subject in (("sent", regard.pooled(toys.decisive())), ("loaded", regard.text(saved))):
        regard.audit(subject, TEXTS, out=tmp_path / name / "here", **ASKED)
        regard.audit(subject, TEXTS, out=tmp_path / name / "there", **on(nodes))
        assert found_in(tmp_path / name / "here") == found_in(tmp_path / name / "there")
        assert len({one.statistic for _, one in load_audit(tmp_path / name / "there").findings}) == 3


def test_a_run_that_lost_its_machines_goes_on_here(nodes, two, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE", 3.0)
    subject, kept = regard.pooled(toys.decisive()), []
    add = Store.add

    def adding(store, job, *result):
        add(store, job, *result)
        kept.append(job)
        for node in two if len(kept) == 2 else ():
            nodes.kill(node)

    monkeypatch.setattr(Store, "add", adding)
    with pytest.raises(WorkerDied, match="--resume"):
        regard.audit(subject, TEXTS, out=tmp_path / "run", **on(nodes))
    before = {*kept}
    assert len(before) >= 2
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
    other = regard.text(saved)
    other.model.classifier.bias.data += 1
    other.model.save_pretrained(saved)
    with pytest.raises(WorkerDiffers, match=r"model\.weights: was"):
        regard.audit(subject, TEXTS, **on(nodes))
    shutil.rmtree(saved)
    with pytest.raises(NotAModel, match=r"cannot work for this machine.*does not exist"):
        regard.audit(subject, TEXTS, **on(nodes))


def test_a_node_without_room_is_said(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE", 2.0)
    nodes.exactly(0)
    node = nodes.add(memory=100 << 20)
    try:
        with pytest.raises(WorkerDied, match=r"no machine has had room.*memory=.*: 0"):
            outcomes(surroundings, [1], nodes.runner(), memory=1 << 30)
    finally:
        nodes.kill(node)
