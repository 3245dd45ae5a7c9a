"""What people named: against curves and counts that are written out."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from polar import KINDS, LONG, Literal, bert, examples, of_kind, toy

import regard
from regard import errors
from regard.data import Dataset, Example
from regard.rationales import ranked


def test_supported_where_attention_follows_what_people_name():
    found = regard.trial(toy("decisive"), examples(), "plausibility")
    assert found.supported is True
    assert found.statistic == 1
    assert found.margin.value == pytest.approx(1 - found.reference["random"].high)
    assert found.criterion == "plausible"


def test_not_supported_where_it_prefers_other_words():
    found = regard.trial(toy("irrelevant"), examples(), "plausibility")
    assert found.supported is False
    assert found.interval.high < found.reference["random"].low


@pytest.mark.parametrize("method", ["random", "uniform"])
def test_what_carries_no_information_is_inconclusive(method):
    found = regard.trial(toy("decisive"), examples(), "plausibility", method=method)
    assert found.supported is None
    assert abs(found.statistic - found.reference["random"].value) < 0.1


def area(order, truth):
    """Under the curve through (0, 1) and (recall, precision) after each word, by trapezoids."""
    points = [(0.0, 1.0)]
    for count in range(1, len(order) + 1):
        hits = sum(truth[word] for word in order[:count])
        points.append((hits / sum(truth), hits / count))
    return sum((x - u) * (y + v) / 2 for (u, v), (x, y) in pairwise(points))


def test_against_curves_and_counts_written_out(tokenizer):
    model = bert(tokenizer)
    data = Dataset.of([*examples(9, more=LONG), Example("so so the film", None, (False,) * 4, id="none")])
    found = regard.trial(regard.text(model, tokenizer), data, "plausibility", batch_size=4)
    some = [one for one in data if any(one.rationale)]
    share = np.mean([np.mean(one.rationale) for one in some])
    assert found.settings["share"] == pytest.approx(share)
    hits = marked = true = 0
    each = []
    for one, row in zip(some, found.values.to_dict(orient="records"), strict=False):
        order = ranked(Literal(model, tokenizer, one.input).raw(), one.id, 0).tolist()
        assert row["auprc"] == pytest.approx(area(order, one.rationale))
        draws = np.random.default_rng(1)
        level = np.mean([area(draws.permutation(len(order)).tolist(), one.rationale) for _ in range(2000)])
        assert row["random_auprc"] == pytest.approx(level, abs=0.12), "the mean of 50 draws"
        top = order[: math.ceil(share * len(order))]
        both = sum(one.rationale[word] for word in top)
        each.append(2 * both / (len(top) + sum(one.rationale)))
        assert row["token_f1"] == pytest.approx(each[-1])
        hits, marked, true = hits + both, marked + len(top), true + sum(one.rationale)
    table = found.tables["F1"].set_index(["measure", "by"])
    assert table.loc[("token_f1", "raw"), "macro_f1"] == pytest.approx(np.mean(each))
    assert table.loc[("token_f1", "raw"), "micro_precision"] == pytest.approx(hits / marked)
    assert table.loc[("token_f1", "raw"), "micro_recall"] == pytest.approx(hits / true)
    assert np.isnan(found.values.loc[9, ["auprc", "random_auprc", "token_f1", "iou_f1"]].astype(float)).all()
    assert (found.interval.n, found.interval.undefined) == (9, 1), "a rationale that is empty is counted"


def test_spans_count_where_they_overlap_by_half():
    words, marks = "so the good nice film is", (False, False, True, True, False, False)
    found = regard.trial(toy("decisive"), Dataset.of([Example(words, None, marks)] * 6), "plausibility", share=1 / 6)
    assert found.values["iou_f1"].tolist() == [1.0] * 6, "one of two words: an overlap of a half"
    assert found.values["token_f1"].tolist() == pytest.approx([2 / 3] * 6)
    wide = regard.trial(toy("decisive"), Dataset.of([Example(words, None, marks)] * 6), "plausibility", share=1.0)
    assert wide.values["iou_f1"].tolist() == [0.0] * 6, "two of six words"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_subject_in_any_batches(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer)
    found, again = (regard.trial(subject, data, "plausibility", repeats=2, batch_size=size) for size in (12, 5))
    numbers = [one.values.drop(columns=["example", "predicted"]).to_numpy() for one in (found, again)]
    np.testing.assert_allclose(*numbers, atol=1e-5)
    assert found.interval.n == 12


def test_bad_input():
    subject, data = toy("decisive"), examples(8)
    with pytest.raises(errors.OptionError, match="share=0 must be above 0"):
        regard.trial(subject, data, "plausibility", share=0)
    with pytest.raises(errors.OptionError, match="repeats=0"):
        regard.trial(subject, data, "plausibility", repeats=0)
    with pytest.raises(errors.InputError, match="needs rationales, and 1 of 9 examples have none"):
        regard.trial(subject, Dataset.of([*data, Example("so good")]), "plausibility")
    with pytest.raises(errors.InputError, match="none of the words"):
        regard.trial(subject, Dataset.of([Example("so good", None, (False, False))] * 8), "plausibility")
