"""Where models are trained: each once, kept, the same for any number of processes, and after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.data import Dataset, Example
from regard.errors import InputError, OptionError
from regard.lessons import Lab
from regard.splitting import splits_of
from regard.teaching import Lesson

TRIALS = Path(__file__).parent / "trials"
sys.path.insert(0, str(TRIALS))

import gated  # noqa: E402


def same(one, other):
    assert one.record["history"] == other.record["history"]
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)


def lessons(lab):
    sites, places = lab.places("last")
    base = lab.plain(2)
    against = Lesson("adversary", 1000, {"factor": 0.1, "sites": sites, "places": places}, base[0])
    told = Lesson("guide", 0, {"by": "given", "places": places}, against)
    rationale = {"share": 0.3, "contiguous": False, "method": "raw", "options": {}, "lot": 0}
    return [
        *base, Lesson("uniform", 0, {"sites": "all"}), against, told, Lesson("rationale", 1, rationale, base[0]),
        Lesson("deceive", 0, {"sites": sites, "mask": ("good1",), "heads": "max", "factor": 1.0}),
        Lesson("without", 0, {"mask": ("good1",)}),
    ]  # fmt: skip


def test_results_are_the_same_for_any_number_of_processes_and_when_they_are_read_again(tmp_path):
    data = gated.data(train=60, dev=20, test=20)
    alone, both = (
        Lab.of(gated.recipe(epochs=3), data, workers=workers, folder=tmp_path / str(workers)) for workers in (1, 2)
    )
    asked = lessons(alone)
    found = alone.results(asked, "alone")
    for one, other in zip(found, both.results(asked, "two at a time"), strict=True):
        same(one, other)
    again = Lab.of(gated.recipe(epochs=3), data, folder=tmp_path / "1")
    for one, other in zip(found, again.results(asked, "read"), strict=True):
        same(one, other)
    assert not [*(tmp_path / "1").glob("models-*/checkpoints/*.safetensors")], "nothing is left of training"


SCRIPT = """
import sys
sys.path.insert(0, {trials!r})
import gated
from regard.lessons import Lab

lab = Lab.of(gated.recipe(epochs=150, patience=None), gated.data(train=60, dev=20, test=20), folder={folder!r})
lab.results(lab.plain(2), "to be killed")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_training_goes_on_after_a_kill_to_the_same_bits(tmp_path):
    script = SCRIPT.format(trials=str(TRIALS), folder=str(tmp_path / "killed"))
    started = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not [*tmp_path.glob("killed/models-*/checkpoints/*.safetensors")] and time.monotonic() < deadline:
        assert started.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    time.sleep(0.3)
    started.kill()
    started.wait()
    data = gated.data(train=60, dev=20, test=20)
    half = [*tmp_path.glob("killed/models-*/checkpoints/*.safetensors")]
    assert half, "it was killed in the middle of a training"
    recipe = gated.recipe(epochs=150, patience=None)
    killed, whole = (Lab.of(recipe, data, folder=tmp_path / name) for name in ("killed", "whole"))
    for one, other in zip(*(lab.results(lab.plain(2), "on") for lab in (killed, whole)), strict=True):
        same(one, other)


def test_the_model_of_a_lesson_is_the_one_that_was_trained():
    lab = Lab.of(gated.recipe(), gated.data())
    (taught,) = lab.results(lab.plain(1), "one")
    subject = lab.subject()
    texts = [one.input for one in lab.data["test"]]
    output = subject.forward(subject.encode(texts))
    np.testing.assert_allclose(output.numpy(force=True), taught.arrays["test/output"], atol=1e-6)
    looks = taught.looks([0])
    t = regard.trace(subject, texts[3])
    np.testing.assert_allclose(looks[3][0], t.sites[0].weights()[0, 0, 0].numpy(force=True), atol=1e-6)


def test_other_data_options_and_threads_are_other_models(tmp_path):
    data, other = gated.data(train=40, dev=10, test=10), gated.data(train=40, dev=10, test=10, seed=1)
    folders = {
        Lab.of(recipe, some, folder=tmp_path, threads=threads).folder
        for recipe, some, threads in (
            (gated.recipe(), data, 1), (gated.recipe(), other, 1), (gated.recipe(epochs=9), data, 1),
            (gated.recipe(), data, 2), (gated.recipe(decoupled=True), data, 1), (gated.recipe(), data, 1),
        )
    }  # fmt: skip
    assert len(folders) == 5, "the last is the first again"


def labelled(count, label=lambda place: place % 2, **more):
    return Dataset.of([Example(f"text {place}", label(place), id=str(place), **more) for place in range(count)])


def test_data_without_splits_are_split_by_lot_of_each_class_alike():
    parts = splits_of(labelled(200, lambda place: int(place % 4 == 0)), seed=0)
    assert {name: len(some) for name, some in parts.items()} == {"train": 140, "dev": 20, "test": 40}
    assert [sum(one.label for one in parts[name]) for name in ("train", "dev", "test")] == [35, 5, 10]
    ids = [one.id for some in parts.values() for one in some]
    assert sorted(ids, key=int) == [str(place) for place in range(200)], "each once"
    assert splits_of(labelled(200), seed=0) == splits_of(labelled(200), seed=0)
    assert splits_of(labelled(200), seed=0) != splits_of(labelled(200), seed=1)


def test_splits_that_come_with_the_data_are_kept():
    named = Dataset.of([
        Example(f"text {place}", place % 2, split=split, id=f"{split}{place}")
        for split, count in (("training", 30), ("validation", 8), ("test", 9), ("other", 4))
        for place in range(count)
    ])  # fmt: skip
    parts = splits_of(named, seed=0)
    assert {name: {one.split for one in some} for name, some in parts.items()} == {
        "train": {"training"}, "dev": {"validation"}, "test": {"test"},
    }  # fmt: skip
    without = Dataset.of([one for one in named if one.split != "validation"] * 2)
    assert {one.split for one in splits_of(without, seed=0)["dev"]} == {"training"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (labelled(12), "data holds 12 examples, of which .* are for .*: too few to train"),
        (labelled(60, split="train"), "splits 'train': there must be 'train' and 'test'"),
        (Dataset.of([Example("a text")] * 30), "30 examples have no label"),
    ],
)
def test_data_that_cannot_be_split_are_refused(data, says):
    with pytest.raises(InputError, match=says):
        splits_of(data, seed=0)


def test_a_recipe_that_cannot_be_sent_says_so():
    lab = Lab.of(regard.recipe(lambda train, seed: gated.Build(False)(train, seed)), gated.data(train=30), workers=2)
    with pytest.raises(OptionError, match="workers=2: this model cannot be sent"):
        lab.results(lab.plain(2), "two")


def test_code_that_changes_is_another_model(tmp_path, monkeypatch):
    data = gated.data(train=40, dev=10, test=10)
    before = Lab.of(gated.recipe(), data, folder=tmp_path).folder
    assert Lab.of(gated.recipe(), data, folder=tmp_path).folder == before
    forward = gated.Gate.forward
    monkeypatch.setattr(gated.Gate, "forward", lambda self, ids, real, attend: forward(self, ids, real, attend) + 1)
    assert Lab.of(gated.recipe(), data, folder=tmp_path).folder != before


def test_a_base_that_has_learned_nothing_claims_nothing():
    lots = np.random.default_rng(0)
    data = Dataset.of([
        Example("plain0 plain1", ["bad", "good"][int(lots.random() < 0.5)], split=split, id=f"{split}{place}")
        for split, count in (("train", 60), ("dev", 20), ("test", 60))
        for place in range(count)
    ])  # fmt: skip
    found = regard.trial(gated.recipe(), data, "uniform_trained", seeds=2)
    assert found.supported is None
    assert any("it has learned nothing" in line for line in found.warnings)


@pytest.mark.parametrize("made", [None, 3, "model"])
def test_what_is_built_must_be_a_subject(made):
    with pytest.raises(OptionError, match="build returned a .*, not a subject"):
        Lab.of(regard.recipe(lambda train, seed: made), gated.data(train=30))
