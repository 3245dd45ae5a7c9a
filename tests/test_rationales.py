"""ERASER's metrics: by hand, and against literal versions over sets of (document, token) and (document, span)."""

from __future__ import annotations

import itertools
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from regard import errors
from regard.rationales import auprc, average_precision, iou_f1, roc_auc, spans_of, token_f1, top_mask

NAMES = [f"{kind}_{name}" for kind in ("micro", "macro") for name in ("precision", "recall", "f1")]


def marks(text):
    """A mask written as x and dots."""
    return [one == "x" for one in text]


def f1(precision, recall):
    return 2 * precision * recall / (precision + recall) if precision and recall else 0


def same(found, *expected):
    return found == pytest.approx(dict(zip(NAMES, expected, strict=True)), abs=1e-12)


@st.composite
def documents(draw):
    """One to four documents, each with two masks of its tokens."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    return [[draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes] for _ in range(2)]


# --- masks and spans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("", []),
        ("...", []),
        ("xxx", [(0, 3)]),
        ("x", [(0, 1)]),
        (".xx..x", [(1, 3), (5, 6)]),
        ("x.x.", [(0, 1), (2, 3)]),
    ],
)
def test_spans_are_runs(text, spans):
    assert spans_of(marks(text)) == spans
    assert spans_of(np.array(marks(text), dtype=bool)) == spans


@given(st.lists(st.booleans(), max_size=20))
@settings(max_examples=60, deadline=None)
def test_spans_hold_what_is_marked_and_do_not_touch(mask):
    spans = spans_of(mask)
    assert [i for start, end in spans for i in range(start, end)] == [i for i, one in enumerate(mask) if one]
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("scores", "share", "text"),
    [
        ([0.1, 0.7, 0.2], 0.01, ".x."),  # at least one
        ([0.1, 0.7, 0.2], 1 / 3, ".x."),
        ([0.1, 0.7, 0.2], 0.34, ".xx"),  # 1.02 tokens are 2
        ([0.1, 0.7, 0.2], 1, "xxx"),
        ([1, 2, 2, 2], 0.5, ".xx."),  # of equal ones those that come first
        ([0, 0, 0, 0], 0.25, "x..."),
        ([-3, -1, -2], 0.5, ".xx"),
    ],
)
def test_the_largest_are_marked(scores, share, text):
    assert top_mask(scores, share=share).tolist() == marks(text)


def test_shares_are_counted_without_rounding_errors():
    for percent, n in itertools.product(range(1, 101), (1, 7, 10, 30, 100, 300)):
        exact = math.ceil(Fraction(percent, 100) * n)
        assert top_mask(np.zeros(n), share=percent / 100).sum() == exact, "0.07 · 100 is 7.000000000000001"


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_token_f1_by_hand():
    predicted = [marks("xx.."), marks("...x"), marks("....")]
    truth = [marks(".xxx"), marks("...x"), marks("x...")]
    # Document 1: 1 hit of 2 predicted and 3 true: ½, ⅓, F1 = 2·(½·⅓)/(½+⅓) = ⅖. Document 2: 1, 1, 1. Document 3, in
    # which nothing is predicted: 0, 0, 0. Macro: their means. Micro: 2 hits of 3 predicted and 5 true: ⅔, ⅖, F1 = ½.
    assert same(token_f1(predicted, truth), 2 / 3, 2 / 5, 1 / 2, 1.5 / 3, (4 / 3) / 3, 1.4 / 3)


def test_a_document_with_neither_is_not_in_the_mean():
    alone = token_f1([marks("xx.")], [marks("x..")])
    assert token_f1([marks("xx."), marks("..")], [marks("x.."), marks("..")]) == alone
    # One where something is predicted and nothing true is, with 0: micro 1 of 4 and 1 of 1.
    found = token_f1([marks("xx."), marks("xx")], [marks("x.."), marks("..")])
    assert same(found, 1 / 4, 1, 2 / 5, 1 / 4, 1 / 2, 1 / 3)


@pytest.mark.parametrize(("predicted", "truth"), [("...", "x.."), ("x..", "..."), ("...", "..."), ("x..", ".x.")])
def test_nothing_in_common_is_0(predicted, truth):
    assert same(token_f1([marks(predicted)], [marks(truth)]), 0, 0, 0, 0, 0, 0)
    assert same(iou_f1([marks(predicted)], [marks(truth)]), 0, 0, 0, 0, 0, 0)


def literal_tokens(predicted, truth):
    said = {(d, t) for d, mask in enumerate(predicted) for t, one in enumerate(mask) if one}
    real = {(d, t) for d, mask in enumerate(truth) for t, one in enumerate(mask) if one}

    def scores(said, real):
        p = len(said & real) / len(said) if said else 0
        r = len(said & real) / len(real) if real else 0
        return p, r, f1(p, r)

    places = {d for d, _ in said | real}
    each = [scores({one for one in said if one[0] == d}, {one for one in real if one[0] == d}) for d in places]
    return *scores(said, real), *(np.mean(each, axis=0) if each else (0, 0, 0))


@given(documents())
@settings(max_examples=150, deadline=None)
def test_token_f1_by_its_definition(both):
    predicted, truth = both
    found = token_f1(predicted, truth)
    assert same(found, *literal_tokens(predicted, truth))
    turned = token_f1(truth, predicted)
    assert turned["micro_precision"] == found["micro_recall"]
    assert turned["macro_f1"] == pytest.approx(found["macro_f1"])
    assert all(type(one) is float for one in found.values())


# --- spans -----------------------------------------------------------------------------------------------------------


def test_iou_f1_by_hand():
    predicted = [[(0, 2), (4, 6), (9, 10)], [(0, 4)], []]
    truth = [[(0, 3), (5, 7)], [(0, 4)], [(2, 5)]]
    # Document 1: (0, 2) with (0, 3): 2/3, a hit. (4, 6) with (5, 7): 1/3, none. (9, 10): 0, none. So 1 of 3 predicted
    # and 1 of 2 true. Document 2: 1 of 1 and 1 of 1. Document 3: nothing predicted, 0 of 1 true.
    # Micro: 2 of 4 and 2 of 4. Macro precision over the documents with a prediction: (⅓ + 1) / 2 = ⅔; macro recall over
    # those with a true span: (½ + 1 + 0) / 3 = ½; macro F1 is that of ⅔ and ½, 4/7, and not the mean (⅖ + 1 + 0) / 3.
    assert same(iou_f1(predicted, truth), 1 / 2, 1 / 2, 1 / 2, 2 / 3, 1 / 2, 4 / 7)
    # With a threshold of ⅓, reached exactly, (4, 6) is a hit as well: 3 of 4 and 3 of 4; (⅔ + 1) / 2 and (1 + 1 + 0) / 3.
    assert same(iou_f1(predicted, truth, threshold=1 / 3), 3 / 4, 3 / 4, 3 / 4, 5 / 6, 2 / 3, f1(5 / 6, 2 / 3))


def test_two_predictions_may_hit_one_true_span():
    """Each half of a true span has an IOU of ½: two hits of one true span, a recall of 2. So it is in ERASER."""
    found = iou_f1([[(0, 2), (2, 4)]], [[(0, 4)]])
    assert same(found, 1, 2, 4 / 3, 1, 2, 4 / 3)


def test_spans_count_once_and_stay_apart():
    assert iou_f1([[(0, 2), (0, 2)]], [[(0, 2)]])["micro_precision"] == 1
    assert iou_f1([[(0, 2), (2, 4)]], [[(0, 2), (2, 4)]])["micro_recall"] == 1
    assert iou_f1([[(0, 2), (2, 4)]], [[(0, 2)]])["micro_precision"] == 0.5
    assert iou_f1([marks("xxxx")], [[(0, 2), (2, 4)]])["micro_recall"] == 0.5, "one run, with an IOU of ½"


def test_a_document_without_truth_counts_for_precision_only():
    found = iou_f1([[(0, 2)], [(0, 1)]], [[(0, 2)], []])
    assert same(found, 1 / 2, 1, 2 / 3, 1 / 2, 1, 2 / 3)


def literal_spans(predicted, truth, threshold):
    """As the benchmark's text has it: sets of tokens, and dictionaries of the documents that have any span."""
    hits, said, real = {}, {}, {}
    for d, (one, other) in enumerate(zip(predicted, truth, strict=True)):
        best = []
        for start, end in spans_of(one):
            tokens = set(range(start, end))
            true = [set(range(*span)) for span in spans_of(other)]
            best.append(max([len(tokens & them) / len(tokens | them) for them in true], default=0))
        hits[d] = sum(value >= threshold for value in best)
        said |= {d: len(best)} if best else {}
        real |= {d: len(spans_of(other))} if spans_of(other) else {}
    micro = [sum(hits.values()) / sum(of.values()) if of else 0 for of in (said, real)]
    macro = [np.mean([hits[d] / n for d, n in of.items()]) if of else 0 for of in (said, real)]
    return *micro, f1(*micro), *macro, f1(*macro)


@given(documents(), st.sampled_from([0.1, 1 / 3, 0.5, 2 / 3, 1]))
@settings(max_examples=150, deadline=None)
def test_iou_f1_by_its_definition(both, threshold):
    predicted, truth = both
    found = iou_f1(predicted, truth, threshold=threshold)
    assert same(found, *literal_spans(predicted, truth, threshold))
    as_spans = iou_f1(
        [spans_of(one) for one in predicted], [np.array(spans_of(one)) for one in truth], threshold=threshold
    )
    assert as_spans == found, "masks and their runs are the same"
    assert iou_f1([spans_of(one) for one in predicted], truth, threshold=threshold) == found


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_by_hand():
    scores, truth = [[0.9, 0.8, 0.7, 0.1]], [marks("x.x.")]
    # Ranked: true, not, true, not. Precision at recall 0: 1 (by definition), then (½, 1), (½, ½), (1, ⅔), (1, ½).
    # Trapezoids over recall: from 0 to ½ at height 1, ½ to ½ nothing, ½ to 1 between ½ and ⅔: ½ + ½·7/12 = 19/24.
    assert auprc(scores, truth) == pytest.approx([19 / 24])
    # Average precision: ½·1 + ½·⅔ = ⅚. Of four pairs of a true and another token, three are in order.
    assert average_precision(scores, truth) == pytest.approx([5 / 6])
    assert roc_auc(scores, truth) == pytest.approx([3 / 4])


def test_equal_scores_are_one_step():
    scores, truth = [[0.5, 0.5, 0.5, 0.5]], [marks("x...")]
    # One threshold, at recall 1 and precision ¼; the curve falls to it from recall 0 and precision 1: (1 + ¼) / 2.
    assert auprc(scores, truth) == pytest.approx([5 / 8])
    assert average_precision(scores, truth) == pytest.approx([1 / 4])
    assert roc_auc(scores, truth) == pytest.approx([1 / 2])


def test_documents_of_one_class():
    scores = [[0.3, 0.2, 0.9], [0.3, 0.2, 0.9], [0.3], [0.3], [0.3, 0.2, 0.9]]
    truth = [marks("..."), marks("xxx"), marks("."), marks("x"), marks("..x")]
    assert auprc(scores, truth).tolist() == [0.5, 1, 0.5, 1, 1]
    for measure in (average_precision, roc_auc):
        found = measure(scores, truth)
        assert np.isnan(found).tolist() == [True, True, True, True, False]
        assert found[4] == 1
    for numbers, mask in zip(scores, truth, strict=True):  # as scikit-learn has it, which warns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            precision, recall, _ = metrics.precision_recall_curve(mask, numbers)
        assert auprc([numbers], [mask]) == pytest.approx([metrics.auc(recall, precision)])


def literal_curves(numbers, mask):
    """Trapezoid and step areas over the points (recall, precision), one for each distinct score from the top."""
    points = [(0.0, 1.0)]
    for threshold in sorted(set(numbers), reverse=True):
        chosen = [true for score, true in zip(numbers, mask, strict=True) if score >= threshold]
        points.append((sum(chosen) / sum(mask), sum(chosen) / len(chosen)))
    pairs = list(itertools.pairwise(points))
    order = [
        (score > other) + (score == other) / 2
        for score, true in zip(numbers, mask, strict=True) if true
        for other, also in zip(numbers, mask, strict=True) if not also
    ]  # fmt: skip
    return sum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairs), sum((b - a) * q for (a, _), (b, q) in pairs), order


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=12))
@settings(max_examples=150, deadline=None)
def test_scores_by_their_definitions(tokens):
    numbers, mask = zip(*tokens, strict=True)
    if len(set(mask)) == 1:
        assert auprc([numbers], [mask]) == pytest.approx([1 if mask[0] else 0.5])
        return
    trapezoids, steps, order = literal_curves(numbers, mask)
    assert auprc([numbers], [mask]) == pytest.approx([trapezoids])
    assert average_precision([numbers], [mask]) == pytest.approx([steps])
    assert roc_auc([numbers], [mask]) == pytest.approx([np.mean(order)])


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [token_f1, iou_f1, auprc, average_precision, roc_auc])
@pytest.mark.parametrize(
    ("first", "truth", "said"),
    [
        ([[1, 0]], [[1, 0], [1, 0]], "1 documents are scored, but truth holds 2"),
        ([], [], "There is no document"),
        ([[1, 0, 1]], [[1, 0]], "document 0 has 3 tokens, but 2 in truth"),
        ([1, 0], [1, 0], r"\[1, 0\] and \[1, 0\] are of one document"),
        ([[1, 0]], [[1, 2]], r"truth\[0\]=array.* is no mask"),
        ([[1, 0], [1, math.nan]], [[1, 0], [1, 0]], r"\[1\]=array.*nan"),
    ],
)
def test_documents_that_cannot_be_compared_are_refused(measure, first, truth, said):
    with pytest.raises(errors.InputError, match=said):
        measure(first, truth)


@pytest.mark.parametrize("spans", [[(2, 2)], [(3, 2)], [(-1, 2)], [(0, 1, 2)], [(0.5, 2)], [(0, 2), (1,)], [(0, 2), 3]])
def test_spans_that_are_none_are_refused(spans):
    with pytest.raises(errors.InputError, match=r"predicted\[0\]=.*pass a mask, or spans"):
        iou_f1([spans], [[(0, 2)]])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: top_mask([1, 2], share=0), "share=0 must be above 0"),
        (lambda: top_mask([1, 2], share=1.1), "share=1.1 must be above 0 and at most 1"),
        (lambda: top_mask([], share=0.5), "scores=array.* must be one finite number"),
        (lambda: top_mask([1, math.nan], share=0.5), "must be one finite number"),
        (lambda: iou_f1([[1]], [[1]], threshold=0), "threshold=0 must be above 0"),
        (lambda: spans_of([[True]]), "mask=array.* is no mask"),
        (lambda: auprc([[]], [[]]), r"scores\[0\]=array.* of at least one token"),
    ],
)
def test_options_and_values_out_of_range(call, said):
    with pytest.raises(errors.InputError, match=said):
        call()
