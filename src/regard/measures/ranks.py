"""How well two scores for each feature, x and y, ``(feature,)``, agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from regard.errors import EmptyInput, InputError, OptionError, at_least_one, choose

Array = NDArray[np.float64]


class Correlation(NamedTuple):
    """A correlation and its two-sided p-value; NaN where there is none."""

    value: float
    p: float


def kendall(x: ArrayLike, y: ArrayLike) -> Correlation:
    """Kendall's τ-b, corrected for ties. NaN for one feature and for constant scores.

    Example:
        >>> round(kendall([1, 2, 3, 4], [1, 2, 4, 3]).value, 3)
        0.667
        >>> kendall([1, 1, 1], [1, 2, 3]).value
        nan
    """
    return _correlation(stats.kendalltau, x, y)


def spearman(x: ArrayLike, y: ArrayLike) -> Correlation:
    """Spearman's ρ. NaN as for `kendall`; two features have no p-value."""
    return _correlation(stats.spearmanr, x, y)


def spearman_drawn(x: Array, y: Array) -> dict[str, float]:
    """Spearman's ρ with its interval: "spearman", "low", "high"; NaN as for `kendall`.

    Args:
        x: ``(1 + draw, feature)``: what was seen, and then what was seen of examples that were drawn again.
        y: the same, of the same draws.

    Example:
        >>> spearman_drawn(np.array([[1, 2, 3], [1, 2, 3]]), np.array([[1, 2, 3], [3, 2, 1]]))
        {'spearman': 1.0, 'low': -1.0, 'high': -1.0}
    """
    ranks = [stats.rankdata(one, axis=1) - (one.shape[1] + 1) / 2 for one in (x, y)]
    with np.errstate(invalid="ignore", divide="ignore"):  # features that are all alike have no order
        found = (ranks[0] * ranks[1]).sum(1) / np.sqrt((ranks[0] ** 2).sum(1) * (ranks[1] ** 2).sum(1))
    drawn = found[1:][~np.isnan(found[1:])]
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist() if len(drawn) else (math.nan, math.nan)
    return {"spearman": float(found[0]), "low": low, "high": high}


def pearson(x: ArrayLike, y: ArrayLike) -> Correlation:
    """Pearson's r. NaN as for `kendall`."""
    return _correlation(stats.pearsonr, x, y)


def weighted_kendall(x: ArrayLike, y: ArrayLike, *, by: str = "magnitude") -> float:
    """Kendall's τ in which pairs of features that matter count more. NaN as for `kendall`.

    A pair counts as the sum of the weights of its two features (Vigna 2015), so that the order within a long tail of
    scores near zero, which is noise, counts little.

    Args:
        by: "magnitude": a feature weighs (|x| / Σ|x| + |y| / Σ|y|) / 2. "rank": 1 / (1 + rank), once with the ranks of
            x and once with those of y, averaged.

    Example:
        >>> round(weighted_kendall([8, 4, 0.2, 0.1], [8, 4, 0.1, 0.2]), 3)  # the plain one is 0.667
        0.984
    """
    choose("by", by, ("magnitude", "rank"))

    def weighted(x: Array, y: Array) -> Any:
        weights = sum(np.abs(one) / np.abs(one).sum() for one in (x, y)) / 2
        # What scipy calls the rank of a feature is its place here, by which the weigher finds its weight.
        return stats.weightedtau(x, y, rank=np.arange(len(x)), weigher=lambda place: float(weights[int(place)]))

    return _correlation(weighted if by == "magnitude" else stats.weightedtau, x, y).value


def overlap(x: ArrayLike, y: ArrayLike, *, k: int) -> float:
    """Share of the k features with the largest x that are among the k with the largest y.

    Where scores are equal at the edge of the top k, it is the mean over all ways to break those ties, in x and y apart:
    a feature is in the top k to the part that it has of the places left. Constant scores give chance, k / n; ties
    also keep scores from agreeing wholly with themselves.

    Example:
        >>> overlap([3, 2, 1, 0], [3, 0, 1, 2], k=2)
        0.5
        >>> overlap([3, 2, 1, 0], [1, 1, 1, 1], k=2)
        0.5
    """
    x, y = _scores(x, y)
    k = at_least_one("k", k, len(x))
    return float(membership(x, k) @ membership(y, k)) / k


def membership(scores: Array, k: int) -> Array:
    """The part that each feature has in the top k: 1 or 0, but for those that share what is left at the edge."""
    edge = np.sort(scores)[-k]
    above, tied = scores > edge, scores == edge
    return np.asarray(above + tied * ((k - above.sum()) / tied.sum()))


def top_k_distance(x: ArrayLike, y: ArrayLike, *, k: int, penalty: float = 0.5) -> float:
    """Kendall distance K^(p) of two top-k lists (Fagin, Kumar & Sivakumar 2003) as a part of the largest there is.

    Counted are the pairs of features in either list that the two lists order differently, where what is not in a list
    comes after all that is; and ``penalty``, 0 to 1, for each pair that is in one list and not at all in the other.
    0: the same features in the same order. 1: the most that n features allow; with n ≥ 2k, no common feature.
    Of equal scores, the feature that comes first ranks first; so constant scores make equal lists (see `overlap`).

    Example:
        >>> top_k_distance([3, 2, 1, 0], [2, 3, 1, 0], k=2)  # one pair of at most 2·2 + ½·2·1
        0.2
    """
    x, y = _scores(x, y)
    k = at_least_one("k", k, len(x))
    if not 0 <= penalty <= 1:
        raise OptionError(f"penalty={penalty!r} must be between 0 and 1.")
    ranks = np.minimum([_ranks(x), _ranks(y)], k)
    ranks = ranks[:, (ranks < k).any(0)]
    ahead = ranks[:, :, None] < ranks[:, None, :]  # list feature feature
    missing = ranks.shape[1] - k  # in each list, of those in the other
    distance = (ahead[0] & ahead[1].T).sum() + penalty * missing * (missing - 1)
    common = max(0, 2 * k - len(x))  # that two lists have at least; at worst last in both and in reverse
    apart = k - common
    largest = math.comb(common, 2) + 2 * common * apart + apart**2 + penalty * apart * (apart - 1)
    return float(distance / largest) if largest else 0.0  # one feature: there is only one list


def rank_biased_overlap(x: ArrayLike, y: ArrayLike, *, p: float = 0.9) -> float:
    """Extrapolated rank-biased overlap (Webber, Moffat & Zobel 2010) of two rankings of the same features: 0 to 1.

    pⁿ + (1 − p) / p · Σ_d pᵈ · (share of the top d that is common): the smaller p, the more the first ranks count.
    Of equal scores, the feature that comes first ranks first, as in `top_k_distance`.

    Example:
        >>> rank_biased_overlap([2, 1], [1, 2], p=0.5)  # ½² + ½ · (0/1) + ½² · (2/2)
        0.5
    """
    x, y = _scores(x, y)
    if not 0 < p < 1:
        raise OptionError(f"p={p!r} must be between 0 and 1, both excluded.")
    depth = np.arange(1, len(x) + 1)
    common = np.bincount(np.maximum(_ranks(x), _ranks(y)), minlength=len(x)).cumsum()
    return float(min(p ** len(x) + (1 - p) * (common / depth * p ** (depth - 1)).sum(), 1))


def agreement(x: ArrayLike, y: ArrayLike, *, k: int | None = None) -> dict[str, float]:
    """The three ways in which an agreement is always reported, since τ alone is ruled by a long tail.

    "tau" and its "p" by `kendall`, "top_k" by `overlap` (of a fifth of the features, rounded up, if k is None) and
    "weighted" by `weighted_kendall`.

    Example:
        >>> agreement([3, 2, 1], [3, 1, 2])["top_k"]
        1.0
    """
    tau, p = kendall(x, y)
    top_k = overlap(x, y, k=math.ceil(np.size(x) / 5) if k is None else k)
    return {"tau": tau, "p": p, "top_k": top_k, "weighted": weighted_kendall(x, y)}


def agreements(scores: Array) -> dict[str, Array]:
    """`agreement` of every two rows of ``(method, word)`` at once: ``(method, method)`` for each measure.

    With s_ij = sign(x_i − x_j), Kendall's τ-b is ⟨s, s'⟩ / √(⟨s, s⟩⟨s', s'⟩): one matrix product for all methods. In
    the weighted one the pair of words i, j counts w_i + w_j, w being the mean share of both methods' scores.
    """
    count, size = scores.shape
    shares = scores / np.maximum(scores.sum(-1, keepdims=True), np.finfo(float).tiny)
    plain, weighted, ties = (np.zeros((count, count)) for _ in range(3))
    for word in range(size):
        signs = np.sign(scores[:, [word]] - scores[:, word + 1 :])
        weights = shares[:, [word]] + shares[:, word + 1 :]
        plain += signs @ signs.T
        weighted += (weights * signs) @ signs.T
        ties += weights @ (signs**2).T
    apart = (np.diag(ties)[:, None] + ties.T) / 2  # of a row's own pairs, with the weights of both
    k = max(1, math.ceil(size / 5))
    inside = np.stack([membership(one, k) for one in scores])
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "tau": plain / np.sqrt(np.outer(np.diag(plain), np.diag(plain))),
            "top_k": inside @ inside.T / k,
            "weighted": (weighted + weighted.T) / 2 / np.sqrt(apart * apart.T),
        }


def _scores(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    """Both as float64; refused unless they are finite numbers for the same features."""
    arrays = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if arrays[0].ndim != 1 or arrays[0].shape != arrays[1].shape:
        raise InputError(f"x has shape {arrays[0].shape} and y {arrays[1].shape}. Pass one number for each feature.")
    if not arrays[0].size:
        raise EmptyInput("x and y hold no feature. Pass at least one.")
    for name, array in zip("xy", arrays, strict=True):
        for place in np.flatnonzero(~np.isfinite(array))[:1]:
            raise InputError(f"{name}[{place}]={array[place]} is no finite number. Leave that feature out of x and y.")
    return arrays


def _correlation(function: Callable[[Array, Array], Any], x: ArrayLike, y: ArrayLike) -> Correlation:
    x, y = _scores(x, y)
    if any((one == one[0]).all() for one in (x, y)):
        return Correlation(math.nan, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        found = function(x, y)
    return Correlation(float(found.statistic), float(found.pvalue))


def _ranks(scores: Array) -> NDArray[np.intp]:
    """0 for the largest; of equal scores, the one that comes first ranks first."""
    return np.argsort(np.argsort(-scores, kind="stable"))
