"""How well scores or marks on tokens agree with those of people: ERASER's metrics (DeYoung et al. 2020).

They follow the benchmark's own program, whose averages differ from metric to metric; each docstring says how. There a
document is a pair of an annotation and a text. A mask is a bool for each token.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn import metrics

from regard.errors import EmptyInput, InputError, OptionError

Span = tuple[int, int]
DRAWS = 50  # random orders of a document, for the level that chance reaches


def spans_of(mask: ArrayLike) -> list[Span]:
    """The runs of marked tokens: (start, end), the end excluded.

    Example:
        >>> spans_of([True, True, False, True])
        [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(_mask("mask", mask).astype(np.int8), prepend=0, append=0))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def top_mask(scores: ArrayLike, *, share: float) -> NDArray[np.bool_]:
    """Marks the tokens with the largest scores: ⌈share · n⌉ of n, so at least one; of equal ones those that come first.

    Args:
        scores: ``(token,)``.
        share: above 0, up to 1; of ERASER, the mean share of tokens that people mark in that dataset.

    Example:
        >>> top_mask([0.1, 0.7, 0.2], share=0.4).tolist()
        [False, True, True]
    """
    if not 0 < share <= 1:
        raise OptionError(f"share={share!r} must be above 0 and at most 1.")
    numbers = _numbers("scores", scores)
    count = max(1, math.ceil(share * len(numbers) - 1e-9))  # 0.07 · 100 is 7.000000000000001
    mask = np.zeros(len(numbers), dtype=bool)
    mask[np.argsort(-numbers, kind="stable")[:count]] = True
    return mask


def token_f1(predicted: Sequence[ArrayLike], truth: Sequence[ArrayLike]) -> dict[str, float]:
    """Precision, recall and F1 of marked tokens.

    "micro" counts the tokens of all documents together. "macro" is the mean over documents, and here macro F1 is the
    mean of the documents' F1 (`iou_f1` does otherwise). A document in which nothing is predicted, or nothing true, has
    0 in all three; one with neither is not in the mean at all.

    Args:
        predicted: a mask for each document.
        truth: the same.

    Returns:
        "micro_precision", "micro_recall", "micro_f1", "macro_precision", "macro_recall", "macro_f1".

    Example:
        >>> token_f1([[True, True, False, False]], [[False, True, False, False]])["macro_precision"]
        0.5
    """
    masks = [(_mask(f"predicted{at}", one), _mask(f"truth{at}", other)) for at, one, other in _pairs(predicted, truth)]
    counts = np.array([(int((one & other).sum()), int(one.sum()), int(other.sum())) for one, other in masks])
    # NOTE[DIFF]: with nothing predicted, or nothing true, in all documents ERASER divides by zero; here that is 0.
    micro = _ratios(*counts.sum(0))
    each = [_ratios(*one) for one in counts if one[1:].any()]
    return _named(micro, tuple(np.mean(each, axis=0)) if each else (0.0, 0.0, 0.0))


def iou_f1(predicted: Sequence[ArrayLike], truth: Sequence[ArrayLike], *, threshold: float = 0.5) -> dict[str, float]:
    """Precision, recall and F1 of spans: a predicted span is a hit if it overlaps a true one well enough.

    Overlap is intersection over union, in tokens, with the best true span of the document. As in ERASER:

    * Hits are counted among predicted spans, also for recall: two predictions that each hit the same true span count
      twice, so recall (and F1) can exceed 1.
    * Macro precision is the mean over documents with a prediction, macro recall over those with a true span. So a
      document without a prediction has recall 0 and no say in precision.
    * Macro F1 is the F1 of those two means, not the mean of F1 as in `token_f1`.
    * A span given twice counts once; spans that touch are not joined (in a mask they are one run).
    * What has nothing to be divided by is 0.

    Args:
        predicted: for each document a mask, or a list of spans (start, end) with the end excluded.
        truth: the same.
        threshold: the smallest intersection over union of a hit, above 0, up to 1.

    Returns:
        "micro_precision", "micro_recall", "micro_f1", "macro_precision", "macro_recall", "macro_f1".

    Example:
        >>> iou_f1([[(0, 2), (5, 6)]], [[(0, 3)]])["micro_precision"]
        0.5
    """
    if not 0 < threshold <= 1:
        raise OptionError(f"threshold={threshold!r} must be above 0 and at most 1.")
    counts = []
    for at, one, other in _pairs(predicted, truth, spans=True):
        found, true = _spans(f"predicted{at}", one), _spans(f"truth{at}", other)
        hits = sum(max((_iou(span, real) for real in true), default=0.0) >= threshold for span in found)
        counts.append((hits, len(found), len(true)))
    precision, recall = (float(np.mean([one[0] / one[of] for one in counts if one[of]] or [0])) for of in (1, 2))
    return _named(_ratios(*np.sum(counts, axis=0)), (precision, recall, _f1(precision, recall)))


def auprc(scores: Sequence[ArrayLike], truth: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Area under the precision-recall curve of each document, by trapezoids; ERASER reports its mean.

    Documents of a single class stay: 1 where every token is true, 0.5 where none is. The latter is what scikit-learn's
    curve comes to (since 1.1; with the version that ERASER asks for, it is NaN and so is the mean).

    Args:
        scores: for each document a number for each token.
        truth: for each document a mask.

    Example:
        >>> auprc([[0.9, 0.1], [0.2, 0.8]], [[True, False], [False, False]]).tolist()
        [1.0, 0.5]
    """

    def area(mask: NDArray[np.bool_], numbers: NDArray[np.float64]) -> float:
        if not mask.any():
            return 0.5  # scikit-learn: recall 1 at precision 0, then the end of each curve: recall 0 at precision 1
        precision, recall, _ = metrics.precision_recall_curve(mask, numbers)
        return float(metrics.auc(recall, precision))

    return _each(area, scores, truth)


def ranked(scores: ArrayLike, name: str, seed: int) -> NDArray[np.intp]:
    """Words from the largest score, by size, to the smallest; ties are broken by lot for each document, by its name."""
    lots = np.random.default_rng([seed, zlib.crc32(name.encode(errors="surrogatepass"))])
    return np.lexsort((lots.random(np.size(scores)), -np.abs(scores)))


def extracted(scores: ArrayLike, share: float, contiguous: bool, name: str, seed: int) -> set[int]:
    """The words that a rationale of this share keeps: the highest, or the window with the largest sum; ties by lot."""
    array = np.asarray(scores, dtype=np.float64)
    count = math.ceil(share * len(array) - 1e-9)
    if not contiguous:
        return set(ranked(array, name, seed)[:count].tolist())
    sums = np.convolve(np.abs(array), np.ones(count), "valid")
    start = int(ranked(sums, name, seed)[0])
    return set(range(start, start + count))


def auprc_by_lot(
    scores: Sequence[ArrayLike], truth: Sequence[NDArray[np.bool_] | None], names: Sequence[str], seed: int
) -> NDArray[np.float64]:
    """`auprc` by the size of the scores, with ties broken by lot; NaN where nothing is true.

    NOTE[DIFF] ERASER's area gives constant scores (1 + share that is true) / 2, more than random ones.
    """
    areas = np.full(len(scores), np.nan)
    for place, (one, name, mask) in enumerate(zip(scores, names, truth, strict=True)):
        if mask is not None and mask.any():
            areas[place] = auprc([-ranked(one, name, seed).argsort()], [mask])[0]
    return areas


def auprc_by_chance(truth: Sequence[NDArray[np.bool_] | None], seed: int) -> NDArray[np.float64]:
    """The mean AUPRC of 50 random orders of each document: with few words well above the share that is true."""
    lots = np.random.default_rng(seed)
    areas = np.full(len(truth), np.nan)
    for place, mask in enumerate(truth):
        if mask is not None and mask.any():
            hits = mask[(-lots.random((DRAWS, len(mask)))).argsort(1)]  # draw rank
            precision = hits.cumsum(1) / np.arange(1, len(mask) + 1)
            before = np.hstack([np.ones((DRAWS, 1)), precision[:, :-1]])
            areas[place] = (hits * (before + precision)).sum() / (2 * mask.sum() * DRAWS)  # `auprc`, without ties
    return areas


def average_precision(scores: Sequence[ArrayLike], truth: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Average precision of each document; NaN where all tokens are of one class, which ERASER leaves out of its mean.

    Args:
        scores: for each document a number for each token.
        truth: for each document a mask.

    Example:
        >>> average_precision([[0.9, 0.8, 0.1], [0.2, 0.8, 0.5]], [[False, True, False], [True, True, True]]).tolist()
        [0.5, nan]
    """
    return _each(metrics.average_precision_score, scores, truth, single=math.nan)


def roc_auc(scores: Sequence[ArrayLike], truth: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Chance that a true token scores higher than another, for each document; NaN as for `average_precision`.

    Args:
        scores: for each document a number for each token.
        truth: for each document a mask.

    Example:
        >>> roc_auc([[0.9, 0.8, 0.1]], [[False, True, False]]).tolist()
        [0.5]
    """
    return _each(metrics.roc_auc_score, scores, truth, single=math.nan)


def _each(
    function: Callable[..., Any], scores: Sequence[ArrayLike], truth: Sequence[ArrayLike], single: float | None = None
) -> NDArray[np.float64]:
    """The function of mask and scores for each document; ``single`` instead for those of one class, if given."""
    found = []
    for at, one, other in _pairs(scores, truth):
        numbers, mask = _numbers(f"scores{at}", one), _mask(f"truth{at}", other)
        found.append(single if single is not None and mask.all() == mask.any() else function(mask, numbers))
    return np.array(found, dtype=np.float64)


def _pairs(
    first: Sequence[ArrayLike], second: Sequence[ArrayLike], spans: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Where each document is and what both say of it; refused where they do not speak of the same tokens."""
    if len(first) != len(second):
        raise InputError(f"{len(first)} documents are scored, but truth holds {len(second)}. Pass the same documents.")
    if not len(first):
        raise EmptyInput("There is no document. Pass at least one.")
    if not all(hasattr(one, "__len__") for one in (*first, *second)):
        raise InputError(f"{first!r} and {second!r} are of one document. Pass lists of documents: put each in [ ].")
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        sizes: tuple[int, int] = len(one), len(other)  # type: ignore[arg-type]
        free = spans and (0 in sizes or not (_flat(one) and _flat(other)))
        if sizes[0] != sizes[1] and not free:
            raise InputError(f"document {place} has {sizes[0]} tokens, but {sizes[1]} in truth. Pass the same tokens.")
        yield f"[{place}]", one, other


def _flat(document: Any) -> bool:
    return np.ndim(next(iter(document), 0)) == 0


def _mask(name: str, values: ArrayLike) -> NDArray[np.bool_]:
    array = np.asarray(values)
    if array.ndim != 1 or not np.isin(array, (0, 1)).all():
        raise InputError(f"{name}={array!r} is no mask. Pass True or False for each token.")
    return array.astype(bool)


def _numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise InputError(f"{name}={array!r} must be one finite number for each token, of at least one token.")
    return array


def _spans(name: str, document: Any) -> set[Span]:
    if _flat(document):
        return set(spans_of(_mask(name, document)))
    try:
        found = {(index(start), index(end)) for start, end in document}
    except (TypeError, ValueError):
        found = {(0, 0)}
    if not all(0 <= start < end for start, end in found):
        raise InputError(f"{name}={document!r}: pass a mask, or spans (start, end) with 0 ≤ start < end.")
    return found


def _iou(span: Span, other: Span) -> float:
    common = max(0, min(span[1], other[1]) - max(span[0], other[0]))
    return common / (span[1] - span[0] + other[1] - other[0] - common)


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision and recall else 0.0


def _ratios(hits: float, predicted: float, true: float) -> tuple[float, float, float]:
    precision, recall = (hits / count if count else 0.0 for count in (predicted, true))
    return precision, recall, _f1(precision, recall)


def _named(micro: tuple[float, float, float], macro: tuple[float, float, float]) -> dict[str, float]:
    names = [f"{kind}_{name}" for kind in ("micro", "macro") for name in ("precision", "recall", "f1")]
    return {name: float(value) for name, value in zip(names, micro + macro, strict=True)}
