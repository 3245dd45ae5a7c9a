"""The cause that was planted: on models that are wired to use it, or not, and on models that have learned it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from polar import examples, toy

import regard
from regard import errors
from regard.data.planted import plant
from regard.data.words import SIDES
from regard.models.toys import Pool
from regard.rationales import auprc, ranked
from regard.subjects.scratch import scratch_table, scratch_text
from regard.training import fit


@pytest.fixture(scope="module")
def keyword():
    return plant("keyword", train=20, test=60)


def wired(made, kind="keyword", *, attends=True):
    """A model that decides by a kind of words; it attends to them, or to all words but them."""
    texts = [made.test, made.held_out, made.neutral, *made.changed.values()]
    words = ["<pad>", "<unk>", *sorted({word for some in texts for one in some for word in one.words})]
    negative, positive = SIDES[kind]
    polarity = torch.tensor([float(word in positive) - float(word in negative) for word in words])
    scores, values, direct = 6 * polarity.abs(), polarity[:, None], 0 * polarity
    if not attends:  # the decision goes past attention
        scores, values, direct = -scores, 0 * values, 10 * polarity
    model = Pool(scores, values, direct, torch.tensor([1.0]))
    model.vocabulary = {word: place for place, word in enumerate(words)}
    return regard.pooled(model)


def test_supported_where_attention_rests_on_the_cause(keyword):
    found = regard.trial(wired(keyword), keyword, "planted")
    assert found.supported is True
    assert found.statistic == 1
    assert found.reference["leave_one_out"].value == 1
    assert found.settings["confirmed"] is True
    assert "it uses keyword" in found.sentence
    assert found.tables["what the model uses"].set_index("changed").loc["keyword", "flips"] == 1


def test_not_supported_where_attention_avoids_the_cause(keyword):
    found = regard.trial(wired(keyword, attends=False), keyword, "planted")
    assert found.supported is False
    assert found.statistic < found.reference["chance"].low
    assert found.reference["leave_one_out"].value == 1, "the cause is there to be found"


@pytest.mark.parametrize("method", ["uniform", "random"])
def test_what_carries_no_information_does_not_find_it(keyword, method):
    found = regard.trial(wired(keyword), keyword, "planted", method=method)
    assert found.supported is not True
    assert abs(found.margin.value) < 0.1


def test_examples_that_are_drawn_keep_their_own_truth(keyword):
    subject = wired(keyword)
    found, again = (
        regard.trial(subject, keyword, "planted", method="position", examples=40, seed=3, batch_size=size)
        for size in (32, 7)
    )
    by_id = {one.id: one for one in keyword.test}
    assert len(found.values) == 40
    for row in found.values.to_dict(orient="records"):
        one = by_id[row["example"]]
        scores = -ranked(np.arange(len(one.words), 0, -1), one.id, 3).argsort()
        assert row["method"] == pytest.approx(auprc([scores], [np.array(one.rationale)])[0])
    np.testing.assert_allclose(
        found.values.drop(columns=["example", "predicted"]),
        again.values.drop(columns=["example", "predicted"]),
        atol=1e-5,
    )


def test_the_truth_is_what_the_model_uses_not_what_was_meant():
    made = plant("shortcut", train=20, test=60)
    found = regard.trial(wired(made, "day"), made, "planted")
    assert "it uses shortcut" in found.sentence
    assert found.supported is True
    assert found.statistic == 1, "against the day, though the rationales of the data are the colours"


def test_a_model_that_does_not_use_the_cause_tells_nothing(keyword):
    found = regard.trial(toy("decisive"), keyword, "planted")
    assert found.supported is None
    assert "may not serve as ground truth" in found.sentence
    assert "not known" in found.sentence
    assert found.values["method"].isna().all()
    assert len(found.values) == 60
    assert found.settings["confirmed"] is False


@pytest.fixture(scope="module")
def learned():
    """A small BERT that has learned the task, in seconds."""
    made = plant("keyword", train=400, test=60, undecided=0.2)
    subject = scratch_text(made.train.inputs(), ["negative", "positive"])
    fit(subject, made.train, epochs=6, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3))
    return made, subject


@pytest.mark.parametrize(("method", "outcome"), [("leave_one_out", True), ("raw", True), ("uniform", None)])
def test_a_task_that_was_learned(learned, method, outcome):
    made, subject = learned
    found = regard.trial(subject, made, "planted", method=method)
    assert found.settings["confirmed"] is True
    assert found.supported is outcome


def test_a_table_that_was_learned():
    made = plant("columns", train=600, test=60, undecided=0.2)
    subject = scratch_table(made.train.columns, ["negative", "positive"], torch.zeros(8))
    fit(
        subject,
        made.train,
        epochs=4,
        batch_size=64,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    )
    found = regard.trial(subject, made, "planted", method="leave_one_out")
    assert found.settings["confirmed"] is True
    assert found.supported is True
    assert found.interval.low > 0.8
    assert found.interval.value == found.reference["leave_one_out"].value


def test_data_without_a_planted_cause_is_refused():
    with pytest.raises(errors.InputError, match=r"this is a Dataset\. Pass regard\.data\.planted\.plant"):
        regard.trial(toy("decisive"), examples(8), "planted")
    assert callable(regard.data.planted.plant), "what the message names is there"
