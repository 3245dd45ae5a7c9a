"""Distances, rank correlations, intervals and tests: arrays in, numbers out.

Distances take distributions p and q, ``(…, outcome)``, over the last axis; the other axes are broadcast, and what
rounding left of a sum of 1 is divided away. Agreements take two scores for each feature, x and y, ``(feature,)``.
Where a number is not defined (a correlation with constant scores, the mean of nothing) it is NaN, without a warning:
those who report a mean count the undefined, as `bootstrap` and `paired` do. What else cannot be used is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from regard.errors import EmptyInput, InputError, OptionError, choose, whole_numbers

Array = NDArray[np.float64]
ROUNDING = 1e-3  # how far from 1 a distribution may sum: half precision, many outcomes
BLOCK = 1_000_000  # numbers that are drawn at a time


# --- distributions ---------------------------------------------------------------------------------------------------


def tvd(p: ArrayLike, q: ArrayLike) -> Array:
    """Total variation distance ½ Σ |p − q|: between 0 and 1.

    Example:
        >>> float(tvd([0.5, 0.5, 0], [0.5, 0, 0.5]))
        0.5
    """
    p, q = _distributions(p, q)
    return _between(np.abs(p - q).sum(-1) / 2, 1)


def kl(p: ArrayLike, q: ArrayLike, *, epsilon: float | None = None) -> Array:
    """Kullback-Leibler divergence KL(p ‖ q) = Σ p ln(p / q): 0 or more; inf where q is 0 and p is not.

    With ``epsilon`` that number is added to every outcome of both, which are then divided by their sums: always
    finite, but not the divergence of p and q, so report it.

    Example:
        >>> float(kl([1, 0], [0.5, 0.5])) == math.log(2)
        True
        >>> float(kl([0.5, 0.5], [1, 0]))
        inf
    """
    p, q = _distributions(p, q)
    if epsilon is not None:
        if not 0 < epsilon < math.inf:
            raise OptionError(f"epsilon={epsilon!r} must be a number above 0, or None to add nothing.")
        p, q = ((one + epsilon) / (1 + epsilon * one.shape[-1]) for one in (p, q))
    return _between(special.rel_entr(p, q).sum(-1), math.inf)


def jsd(p: ArrayLike, q: ArrayLike) -> Array:
    """Jensen-Shannon divergence ½ KL(p ‖ m) + ½ KL(q ‖ m), m = (p + q) / 2: between 0 and ln 2, exact at zeros.

    Example:
        >>> float(jsd([1, 0], [0, 1])) == math.log(2)
        True
    """
    p, q = _distributions(p, q)
    both = p + q  # p ln(p / m) is ½ · 2p ln(2p / (p + q)), which does not underflow as m does
    terms = special.rel_entr(2 * p, both) + special.rel_entr(2 * q, both)
    return _between(terms.sum(-1) / 4, math.log(2))


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[Array, Array]:
    """Both as float64 that sums to 1 over the last axis; refused where they are no distributions over the same."""
    first, second = _distribution("p", p), _distribution("q", q)
    shapes = first.shape, second.shape
    axes = zip(shapes[0][-2::-1], shapes[1][-2::-1], strict=False)  # but the outcomes, which are not broadcast
    if shapes[0][-1] != shapes[1][-1] or any(one != other and 1 not in (one, other) for one, other in axes):
        raise InputError(f"p has shape {shapes[0]} and q {shapes[1]}. Pass distributions over the same outcomes.")
    return first, second


def _distribution(name: str, values: ArrayLike) -> Array:
    array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    with np.errstate(invalid="ignore"):
        sums = array.sum(-1)
    wrong = ~((array >= 0).all(-1) & (np.abs(sums - 1) <= ROUNDING))  # also where NaN is
    for place in np.argwhere(wrong)[:1].tolist():
        total, lowest = sums[tuple(place)], array[tuple(place)].min(initial=np.inf)
        raise InputError(
            f"{name}{place or ''} is no distribution: it sums to {total:.6g}, its lowest is {lowest:.6g}. "
            "Pass numbers that are 0 or more and sum to 1 over the last axis."
        )
    return np.asarray(array / sums[..., None])


def _between(distance: Array, largest: float) -> Array:
    """Without what rounding added below 0 and above the largest that there is."""
    clipped: Array = np.clip(distance, 0, largest)
    return clipped


# --- agreement of two rankings ---------------------------------------------------------------------------------------


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
    k = _count("k", k, len(x))
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
    k = _count("k", k, len(x))
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


def _count(name: str, value: int, most: float = math.inf) -> int:
    (count,) = whole_numbers(name, value)
    if not 1 <= count <= most:
        raise OptionError(f"{name}={count} must be at least 1" + f" and at most {most}." * (most < math.inf))
    return count


def _ranks(scores: Array) -> NDArray[np.intp]:
    """0 for the largest; of equal scores, the one that comes first ranks first."""
    return np.argsort(np.argsort(-scores, kind="stable"))


# --- intervals and tests ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` examples, the ends of its interval, and how many more were NaN and left out."""

    value: float
    low: float
    high: float
    n: int
    undefined: int


def bootstrap(values: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Interval:
    """The mean with its percentile bootstrap interval: what it might be for other examples of the same kind.

    Of ``values``, ``(example,)``, NaN is left out and counted. If none is defined, value, low and high are NaN. A
    single one tells nothing of others: low and high are the value itself, so look at ``n``.

    Example:
        >>> bootstrap([1, 1, 1, float("nan")])
        Interval(value=1.0, low=1.0, high=1.0, n=3, undefined=1)
    """
    if not 0 < level < 1:
        raise OptionError(f"level={level!r} must be between 0 and 1, both excluded.")
    draws = _count("draws", draws)
    array = _values("values", values)
    defined = array[~np.isnan(array)]
    n, undefined = len(defined), len(array) - len(defined)
    value = low = high = float(defined.mean()) if n else math.nan
    if n > 1:
        drawn = stats.bootstrap(
            (defined,), np.mean, n_resamples=draws, batch=max(1, BLOCK // n), confidence_level=level,
            method="percentile", rng=np.random.default_rng(seed),
        )  # fmt: skip
        low, high = (float(end) for end in drawn.confidence_interval)
    return Interval(value, low, high, n, undefined)


def paired(values: ArrayLike, others: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Interval:
    """`bootstrap` of ``values − others``, example by example; a pair with a NaN in it is undefined.

    Example:
        >>> paired([2, 3, 4], [1, 2, float("nan")])
        Interval(value=1.0, low=1.0, high=1.0, n=2, undefined=1)
    """
    return bootstrap(_differences(values, others), level=level, draws=draws, seed=seed)


def permutation_p(values: ArrayLike, others: ArrayLike, *, draws: int = 9999, seed: int = 0) -> float:
    """p-value of the paired, two-sided permutation test that the mean of ``values − others`` is 0; never 0.

    Under that hypothesis each difference could have had the other sign. All signs are tried where they are not more
    than ``draws``; otherwise as many are drawn, and what was observed counts as one of them. Pairs with a NaN in them
    are left out; without any other the p-value is NaN.

    Example:
        >>> permutation_p([1, 2, 3], [0, 0, 0])  # 2 of 2³ signs give a mean as far from 0
        0.25
    """
    draws = _count("draws", draws)
    differences = _differences(values, others)
    differences = differences[~np.isnan(differences)]
    n, total = len(differences), differences.sum()
    if not n:
        return math.nan
    far = abs(total) - 1e-12 * np.abs(differences).sum()  # equal sums differ by their rounding

    def as_far(flipped: NDArray[Any]) -> int:
        return int((np.abs(total - 2 * (flipped @ differences)) >= far).sum())

    if (every := 1 << n) <= draws:
        return as_far(np.arange(every)[:, None] >> np.arange(n) & 1) / every
    rng, size = np.random.default_rng(seed), max(1, BLOCK // n)
    blocks = (min(size, draws - start) for start in range(0, draws, size))
    return (1 + sum(as_far(rng.integers(2, size=(block, n), dtype=np.int8)) for block in blocks)) / (1 + draws)


def corrected(p_values: ArrayLike, *, how: str = "holm") -> Array:
    """p-values corrected for their number, in the shape given.

    Args:
        p_values: of all tests that were made. NaN stays NaN and does not count as a test.
        how: "holm": the chance of any false finding is bounded (Holm 1979). "fdr": the share of false findings among
            all is (Benjamini & Hochberg 1995).

    Example:
        >>> corrected([0.01, 0.02, float("nan")]).tolist()
        [0.02, 0.02, nan]
    """
    choose("how", how, ("holm", "fdr"))
    result: Array = np.array(p_values, dtype=np.float64)
    tested = ~np.isnan(result)
    p = result[tested]
    for wrong in p[(p < 0) | (p > 1)][:1]:
        raise InputError(f"p_values holds {wrong}. Pass numbers between 0 and 1, or NaN.")
    if how == "holm":
        order = np.argsort(p)
        p[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    elif p.size:
        p = stats.false_discovery_control(p)
    result[tested] = p
    return result


def _values(name: str, values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise InputError(f"{name} has shape {array.shape}. Pass one number for each example.")
    for place in np.flatnonzero(np.isinf(array))[:1]:
        raise InputError(f"{name}[{place}]={array[place]}: no mean is finite. Leave it out, or give `kl` an epsilon.")
    return array


def _differences(values: ArrayLike, others: ArrayLike) -> Array:
    first, second = _values("values", values), _values("others", others)
    if len(first) != len(second):
        raise InputError(f"values holds {len(first)} numbers, others {len(second)}. Pass those of the same examples.")
    return first - second
