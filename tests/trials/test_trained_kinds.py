"""Trials that train models, on every kind of model: transformers on texts and pairs, tables, numbers, sequences."""

from __future__ import annotations

import gated
import numpy as np
import pytest
import torch

import regard
from regard.data import Dataset, Example
from regard.errors import NotServed, TrialFailed
from regard.lessons import Lab
from regard.subjects.scratch import scratch_text
from regard.teaching import Lesson, reduced, without_empty

NAMES = ("uniform_trained", "seeds", "adversary", "guide", "rationale_trained", "deceive")
OPTIONS = {"adversary": {"lambdas": [0, 0.1], "searched": 5, "steps": 5, "effort": 1}}


class Bert:
    """A small transformer on the words of the data."""

    def __call__(self, train, seed):
        words = {" ".join(one.words) for one in train} | {"good0 bad0 …"}
        return scratch_text(sorted(words), [str(label) for label in train.labels], width=16, layers=2, seed=seed)


def bert(**fit):
    return regard.recipe(Bert(), {"epochs": 3, "learning_rate": 1e-2, "batch_size": 16, **fit})


def texts(classes=2):
    data = gated.data(train=60, dev=20, test=20)
    if classes == 2:
        return data
    return Dataset.of([
        Example(one.input, ["bad", "good", "meh"][place % 3], one.rationale, one.split, one.id)
        for place, one in enumerate(data)
    ])  # fmt: skip


def table(kind):
    lots = np.random.default_rng(0)
    rows = []
    for place, split in enumerate(["train"] * 60 + ["dev"] * 20 + ["test"] * 20):
        cells = {"a": float(lots.normal()), "b": float(lots.normal()), "c": "xyz"[place % 3]}
        label = {"two": ["no", "yes"][int(cells["a"] > 0)], "three": "xyz"[place % 3], "number": cells["a"] * 50 + 7}[
            kind
        ]
        rows.append(Example(cells, label, split=split, id=str(place)))
    return Dataset.of(rows)


def ft(**more):
    return regard.recipes.ft_transformer(blocks=2, width=16, epochs=3, learning_rate=1e-2, batch_size=16, **more)


KINDS = {
    "two classes": (bert, texts, ["good0", "bad0", "good1", "bad1"]),
    "three classes": (bert, lambda: texts(3), ["good0", "bad0", "good1"]),
    "table": (ft, lambda: table("two"), ["a"]),
    "table, three classes": (ft, lambda: table("three"), ["c"]),
    "table, number": (lambda: ft(regression=True), lambda: table("number"), ["a"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_trial_answers_for_every_kind(kind):
    make, read, mask = KINDS[kind]
    recipe, data = make(), read()
    for name in NAMES:
        options = {"mask": mask} if name == "deceive" else OPTIONS.get(name, {})
        found = regard.trial(recipe, data, name, seeds=2, **options)
        assert len(found.values) == 20, name
        assert np.isfinite([found.interval.value, found.interval.low, found.interval.high]).all(), name
        for chart in found.charts:
            assert found.plot(chart).values.size, (name, chart)
        assert ("predicted" in found.values) == ("number" not in kind)
        assert "word" not in found.sentence or "table" not in kind, "columns are no words"


def test_a_site_that_is_named_is_the_one_that_hides_and_is_measured():
    data, words = texts(), ["good0", "bad0", "good1", "bad1", "good2", "bad2"]
    for heads in ("mean", "max"):
        recipe = bert()
        found = regard.trial(recipe, data, "deceive", seeds=2, mask=words, sites=[0], lambdas=[0, 5], heads=heads)
        lab = Lab.of(recipe, data)
        subject, flags = lab.subject(), lab.flags(tuple(words))
        expected = []
        for one, flag in zip(lab.data["test"], flags, strict=True):
            t = regard.trace(subject, one.input)
            looks = t.sites[0].pull(t.readout, per_head=True)[0, :, 1:-1].numpy(force=True)  # without [CLS] and [SEP]
            mass = looks[:, flag].sum(-1)
            expected.append(mass.mean() if heads == "mean" else mass.max())
        lone = lab.results(lab.plain(1), "the first")[0]
        from regard.trials.deceive import _mass

        np.testing.assert_allclose(_mass(lone, {"test": flags}, "test", [0], heads), expected, atol=1e-5)
        table = found.tables["hidden"].set_index("λ")
        assert table.loc["5", "mass"] < 0.5 * table.loc["0", "mass"]


def test_the_penalty_is_that_of_the_paper():
    """−log(1 − α_hᵀm), mean over heads or the most; written out."""
    from regard.aims import Hide, impermissible
    from regard.training import Pupil

    subject, data = Bert()(texts(), 0), [*texts()][:5]
    words = ("good0", "bad0", "good1", "bad1", "plain1")
    for heads in ("mean", "max"):
        aim = Hide(sites="all", factor=0.7, mask=words, heads=heads)
        pupil: Pupil = aim.pupil(subject, data)
        subject.model.eval()
        step = pupil.step(data, range(5))
        total = []
        for site in range(2):
            each = []
            for one in data:
                t = regard.trace(subject, one.input)
                looks = t.sites[site].pull(t.readout, per_head=True)[0].double().numpy(force=True)
                gone = [False, *(word in words for word in one.words), False]
                each.append([-np.log(1 - row[gone].sum()) for row in looks])
            total.append(np.mean(each, 1) if heads == "mean" else np.max(each, 1))
        expected = float(step.usual.detach()) + 0.7 * np.mean(total)
        assert float(aim.loss(step).detach()) == pytest.approx(expected, rel=1e-4)
    look = step.looks[0]
    assert impermissible(subject, step.batch, step.examples, look, words).shape == (5, 1, look.weights.shape[-1])


def test_the_loss_of_adversaries_is_that_of_the_paper():
    """TVD(ŷ, ŷ_base) − λ KL(α ‖ α_base), by hand, of two other models."""
    from regard.aims import Against, Known

    data = [*texts()][:6]
    base, other = Bert()(texts(), 0), Bert()(texts(), 1)
    known, expected = {}, []
    for one in data:
        maps, chances = [], []
        for subject in (other, base):
            t = regard.trace(subject, one.input)
            looks = t.sites[-1].pull(t.readout)[0, 1:-1].double()
            maps.append((looks / looks.sum()).numpy(force=True))
            chances.append(t.output[0].double().softmax(-1).numpy(force=True))
            if subject is base:
                known[id(one)] = Known(t.output[0], t.sites[-1].pull(t.readout)[:, 1:-1])
        tvd = 0.5 * np.abs(chances[0] - chances[1]).sum()
        expected.append(tvd - 0.3 * np.sum(maps[0] * np.log(maps[0] / maps[1])))
    aim = Against(sites="last", factor=0.3, known=known)
    pupil = aim.pupil(other, data)
    other.model.eval()
    assert float(aim.loss(pupil.step(data, range(6))).detach()) == pytest.approx(np.mean(expected), abs=1e-5)
    assert aim.quality(pupil, data) == pytest.approx(-np.mean(expected), abs=1e-5)


def test_only_what_is_named_is_taken_out_of_a_row():
    row = Example({"age": 1.0, "c": "x", "d": "y", "e": "z"}, "no")
    keep = np.array([True, False])
    assert reduced(row, ("c", "d"), keep).input == {"age": 1.0, "c": "x", "d": None, "e": "z"}, "age has no row"
    assert reduced(row, ("c", "d + e"), keep).input == {"age": 1.0, "c": "x", "d": None, "e": None}, "they share one"
    data = {split: (reduced(row, ("c", "d"), keep),) for split in ("train", "dev", "test")}
    assert [*without_empty(data)["test"][0].input] == ["age", "c", "e"]


def test_sequences_and_pairs_are_refused_where_they_cannot_serve():
    from regard.data.transduction import transduce

    recipe, data = (
        regard.recipes.sequences("copy", words=6, hidden=8, embedding=8, epochs=1),
        transduce("copy", 60, words=6),
    )
    for name in ("seeds", "adversary", "guide"):
        with pytest.raises(NotServed, match="no classes and no number"):
            regard.trial(recipe, data, name, seeds=2)
    pairs = Dataset.of([Example((one.input, "so it is"), one.label, split=one.split, id=one.id) for one in texts()])
    for name in ("rationale_trained", "deceive"):
        with pytest.raises(NotServed, match="words of pairs cannot be left out"):
            regard.trial(bert(), pairs, name, seeds=2, **({"mask": ["so"]} if name == "deceive" else {}))


def test_what_needs_a_model_that_diverged_is_lost_with_it(monkeypatch):
    from regard import aims

    monkeypatch.setattr(aims.Against, "loss", lambda self, step: step.usual * torch.nan)
    with pytest.raises(TrialFailed, match="what it needs diverged: the loss became NaN"):
        regard.trial(gated.recipe(), gated.data(), "guide", seeds=2)
    lab = Lab.of(gated.recipe(), gated.data())
    sites, places = lab.places("last")
    against = Lesson("adversary", 1000, {"factor": 0.1, "sites": sites, "places": places}, lab.plain(1)[0])
    one, other = lab.results([against, Lesson("guide", 0, {"by": "given", "places": places}, against)], "both")
    assert one.diverged
    assert other.diverged


def test_a_number_is_no_place_where_labels_have_names():
    rows = [Example(f"text {place % 3}", 1 + place % 2, split=split, id=f"{split}{place}")
            for split, count in (("train", 40), ("dev", 10), ("test", 10)) for place in range(count)]  # fmt: skip
    odd = Dataset.of([*rows, Example("text", 0, split="test", id="odd")])
    with pytest.raises(regard.errors.InputError, match=r"1 labels do not fit the head of the model: 0 \(in test\)"):
        regard.trial(regard.recipes.attention_classifier(embedding=4, hidden=4, epochs=1), odd, "seeds", seeds=2)
