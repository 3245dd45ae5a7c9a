"""Measures against slow, literal re-implementations of their definitions, hand-computed cases and simulations."""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from regard import errors, measures
from regard.measures import (
    Interval,
    agreement,
    bootstrap,
    corrected,
    crossed,
    jsd,
    kendall,
    kl,
    overlap,
    paired,
    pearson,
    permutation_p,
    rank_biased_overlap,
    resampled,
    spearman,
    top_k_distance,
    tvd,
    weighted_kendall,
)  # fmt: skip

NAN = math.nan


# --- distributions ---------------------------------------------------------------------------------------------------


@st.composite
def two_distributions(draw):
    """Over the same outcomes, many of them zero, some as small as floats get."""
    size = draw(st.integers(1, 8))
    mass = st.one_of(st.just(0.0), st.sampled_from([1e-320, 1e-12]), st.floats(0.01, 1))
    both = []
    for _ in range(2):
        numbers = draw(st.lists(mass, min_size=size, max_size=size))
        assume(sum(numbers) >= 0.01)
        both.append(np.array(numbers) / sum(numbers))
    return both


def literal_kl(p, q):
    total = 0.0
    for a, b in zip(p, q, strict=True):
        if a > 0:
            total += math.inf if b == 0 else a * (math.log(a) - math.log(b))
    return total


def literal_jsd(p, q):
    total = 0.0
    for a, b in zip(p, q, strict=True):  # ln m as ln(a + b) − ln 2, since the half of the smallest float is 0
        for one in (a, b):
            total += one * (math.log(one) - math.log(a + b) + math.log(2)) / 2 if one > 0 else 0
    return total


@given(two_distributions())
@settings(max_examples=150, deadline=None)
def test_distances_by_their_definitions(both):
    p, q = both
    assert tvd(p, q) == pytest.approx(sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2, abs=1e-12)
    assert kl(p, q) == pytest.approx(literal_kl(p, q), rel=1e-9, abs=1e-12)
    assert jsd(p, q) == pytest.approx(literal_jsd(p, q), rel=1e-9, abs=1e-12)


@given(two_distributions(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_what_holds_of_all_distances(both, random):
    p, q = both
    order = list(range(len(p)))
    random.shuffle(order)
    for distance, largest in ((tvd, 1), (jsd, math.log(2)), (kl, math.inf)):
        assert 0 <= distance(p, q) <= largest
        assert distance(p, p) == 0
        assert distance(p[order], q[order]) == pytest.approx(distance(p, q), abs=1e-12)
    assert tvd(p, q) == tvd(q, p)
    assert jsd(p, q) == jsd(q, p)
    assert tvd(p, q) ** 2 <= kl(p, q) / 2 + 1e-9, "Pinsker"
    assert np.isfinite(kl(p, q, epsilon=1e-6))


def test_distances_by_hand():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    assert tvd(p, q) == 0.25  # ½ (¼ + 0 + ¼)
    assert kl(p, q) == pytest.approx(0.25 * math.log(2))  # ½ ln 2 + 0 + ¼ ln ½
    assert jsd(p, q) == pytest.approx(0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3))  # m = (⅜, ¼, ⅜)
    assert kl([1, 0], [0.5, 0.5]) == math.log(2)
    assert kl([0.5, 0.5], [1, 0]) == math.inf
    assert jsd([0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5]) == math.log(2), "no common support: the bound itself"


def test_epsilon_is_added_to_both_before_they_are_divided_by_their_sums():
    p, q = np.array([0.5, 0.5, 0]), np.array([1.0, 0, 0])
    added = [(one + 0.1) / (one + 0.1).sum() for one in (p, q)]
    assert kl(p, q, epsilon=0.1) == pytest.approx(literal_kl(*added))
    assert kl(q, p, epsilon=0.1) == pytest.approx(literal_kl(*added[::-1]))


@pytest.mark.parametrize("distance", [tvd, kl, jsd])
def test_distances_over_the_last_axis(distance):
    rng = np.random.default_rng(0)
    many, few = rng.dirichlet(np.ones(5), size=(3, 4)), rng.dirichlet(np.ones(5), size=4)
    found = distance(many, few)
    assert found.shape == (3, 4)
    for i, j in itertools.product(range(3), range(4)):
        assert found[i, j] == pytest.approx(distance(many[i, j], few[j]), rel=1e-12)
    assert distance(many[:, :1], few[0]).shape == (3, 1)
    assert isinstance(distance(few[0], few[1]), float)


@pytest.mark.parametrize("distance", [tvd, kl, jsd])
def test_rounded_sums_are_divided_away(distance):
    """Float16 probabilities over many outcomes; without it KL could be below 0 and JSD above ln 2."""
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(50), size=2)
    assert distance(p * 1.0009, q * 0.9991) == pytest.approx(distance(p, q), rel=1e-9)
    assert distance(p * 0.9991, p) == pytest.approx(0, abs=1e-15)
    assert distance(p.astype(np.float16), p) < 1e-3


@pytest.mark.parametrize("distance", [tvd, kl, jsd])
@pytest.mark.parametrize(
    ("p", "q", "said"),
    [
        ([[0.5, 0.5], [0.5, 0.6]], [0.5, 0.5], r"p\[1\] is no distribution: it sums to 1.1"),
        ([0.5, 0.5], [1.5, -0.5], "q is no distribution.*its lowest is -0.5"),
        ([NAN, 1], [0.5, 0.5], "p is no distribution: it sums to nan"),
        ([math.inf, -math.inf], [0.5, 0.5], "p is no distribution"),
        ([[[1, 0], [0, 1]], [[0, 1], [0, 0.99]]], [0.5, 0.5], r"p\[1, 1\] is no distribution: it sums to 0.99"),
        ([], [], "p is no distribution: it sums to 0"),
        ([1], [0.5, 0.5], r"p has shape \(1,\) and q \(2,\)"),
        ([[1, 0]] * 3, [[1, 0]] * 2, r"p has shape \(3, 2\) and q \(2, 2\)"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_distribution_is_refused(distance, p, q, said):
    with pytest.raises(errors.InputError, match=said):
        distance(p, q)


@pytest.mark.parametrize("epsilon", [0, -1e-3, math.inf, NAN])
def test_epsilon_out_of_range(epsilon):
    with pytest.raises(errors.OptionError, match="epsilon=.* must be a number above 0"):
        kl([1, 0], [1, 0], epsilon=epsilon)


# --- agreement of two rankings ---------------------------------------------------------------------------------------


@st.composite
def two_scores(draw, shortest=1):
    """With ties, signs and zeros; also of one feature, also constant."""
    size = draw(st.integers(shortest, 9))
    number = st.one_of(st.integers(-3, 3).map(float), st.floats(-1, 1, allow_subnormal=False))
    return [np.array(draw(st.lists(number, min_size=size, max_size=size))) for _ in range(2)]


def constant(scores):
    return len(set(scores)) == 1


def literal_tau(x, y, weight=lambda i, j: 1):
    """τ-b: pairs in the same order minus pairs in opposite order, by the geometric mean of pairs untied in each."""
    both = in_x = in_y = 0.0
    for i, j in itertools.combinations(range(len(x)), 2):
        sign_x, sign_y = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
        both += weight(i, j) * sign_x * sign_y
        in_x += weight(i, j) * sign_x**2
        in_y += weight(i, j) * sign_y**2
    return both / math.sqrt(in_x * in_y) if in_x and in_y else NAN


def same(found, expected):
    return (math.isnan(found) and math.isnan(expected)) or found == pytest.approx(expected, abs=1e-9)


@given(two_scores())
@settings(max_examples=150, deadline=None)
def test_kendall_is_tau_b(both):
    x, y = both
    found = kendall(x, y)
    assert same(found.value, literal_tau(x, y))
    assert math.isnan(found.p) == math.isnan(found.value)


def test_p_of_kendall_is_exact_without_ties():
    """Of 4! orders of four features, 4 have |τ| ≥ ⅔ on either side: all in order, or one neighbouring pair swapped."""
    orders = [literal_tau(range(4), order) for order in itertools.permutations(range(4))]
    assert kendall([1, 2, 3, 4], [1, 2, 4, 3]).p == pytest.approx(np.mean([abs(tau) > 0.66 for tau in orders]))


@given(two_scores(shortest=2))
@settings(max_examples=100, deadline=None)
def test_pearson_and_spearman_by_their_definitions(both):
    x, y = both

    def literal(a, b):
        a, b = a - a.mean(), b - b.mean()
        return (a @ b) / math.sqrt((a @ a) * (b @ b))

    def ranks(a):
        return np.array([np.mean([place for place, one in enumerate(sorted(a)) if one == value]) for value in a])

    if constant(x) or constant(y):
        assert all(math.isnan(one) for one in (*pearson(x, y), *spearman(x, y)))
    else:
        assert spearman(x, y).value == pytest.approx(literal(ranks(x), ranks(y)), abs=1e-9)
        if min(np.ptp(x), np.ptp(y)) > 1e-3:  # else the literal one cancels
            assert pearson(x, y).value == pytest.approx(literal(x, y), abs=1e-6)


@given(two_scores())
@settings(max_examples=150, deadline=None)
def test_weighted_kendall_by_its_definition(both):
    x, y = both
    if constant(x) or constant(y):
        assert math.isnan(weighted_kendall(x, y))
        assert math.isnan(weighted_kendall(x, y, by="rank"))
        return
    weights = (abs(x) / abs(x).sum() + abs(y) / abs(y).sum()) / 2
    assert same(weighted_kendall(x, y), literal_tau(x, y, lambda i, j: weights[i] + weights[j]))

    def by_ranks_of(a, b):
        order = sorted(range(len(a)), key=lambda i: (a[i], b[i]), reverse=True)
        rank = [order.index(i) for i in range(len(a))]
        return literal_tau(x, y, lambda i, j: 1 / (1 + rank[i]) + 1 / (1 + rank[j]))

    if len(set(zip(x, y, strict=True))) == len(x):  # of features that are equal in both, any may come first
        assert same(weighted_kendall(x, y, by="rank"), (by_ranks_of(x, y) + by_ranks_of(y, x)) / 2)


def test_a_long_tail_counts_little_when_weighted():
    rng = np.random.default_rng(0)
    top = [9, 8, 7, 6, 5]
    x, y = (np.concatenate([top, rng.uniform(0, 0.01, 200)]) for _ in range(2))
    assert kendall(x, y).value < 0.2
    assert weighted_kendall(x, y) > 0.9
    x[:5] = top[::-1]
    assert weighted_kendall(x, y) < 0.95, "and the order of the few that matter does count"
    assert isinstance(weighted_kendall([1, 2, 3], [3, 1, 2]), float), "whole numbers will do"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("of", [kendall, spearman, pearson])
def test_undefined_is_nan_without_a_warning(of):
    for x, y in (([1.0], [2.0]), ([0.1] * 3, [1, 2, 3]), ([1, 2, 3], [0.1] * 3), ([0, 0], [0, 0])):
        found = of(x, y)
        assert isinstance(found, measures.Correlation)
        assert math.isnan(found.value)
        assert math.isnan(found.p)
        assert math.isnan(weighted_kendall(x, y))
        assert math.isnan(weighted_kendall(x, y, by="rank"))
    assert of([1, 1, 1 + 1e-15], [1, 2, 3]).value > 0.8, "nearly constant is not constant"
    assert of([1, 2], [3, 7]).value == pytest.approx(1)


@given(two_scores(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_what_holds_of_all_agreements(both, random):
    x, y = both
    n = len(x)
    order = list(range(n))
    random.shuffle(order)
    k = random.randint(1, n)
    for of in (kendall, spearman, pearson):
        value = of(x, y).value
        assert math.isnan(value) or -1 - 1e-9 <= value <= 1 + 1e-9
        assert same(of(y, x).value, value)
        assert same(of(x[order], y[order]).value, value)
    assert same(weighted_kendall(y, x), weighted_kendall(x, y))
    assert same(weighted_kendall(x[order], y[order]), weighted_kendall(x, y))
    assert 0 <= overlap(x, y, k=k) <= 1 + 1e-12
    assert overlap(x, y, k=k) == pytest.approx(overlap(y, x, k=k))
    assert overlap(x, y, k=k) == pytest.approx(overlap(x[order], y[order], k=k))
    assert overlap(x, y, k=n) == pytest.approx(1)
    assert overlap(x, np.ones(n), k=k) == pytest.approx(k / n)
    assert top_k_distance(x, x, k=k) == 0
    assert top_k_distance(x, y, k=k) == top_k_distance(y, x, k=k)
    assert 0 <= top_k_distance(x, y, k=k) <= 1
    assert rank_biased_overlap(x, x) == pytest.approx(1)
    assert 0 < rank_biased_overlap(x, y) <= 1
    assert rank_biased_overlap(x, y) == rank_biased_overlap(y, x)


@given(two_scores(), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_overlap_is_the_mean_over_all_ways_to_break_ties(both, k):
    x, y = (one[:4] for one in both)
    k = min(k, len(x))

    def tops(scores):
        """The top k of each order that is by score: one for each way to break ties."""
        orders = itertools.permutations(range(len(scores)))
        return [{*one[:k]} for one in orders if all(scores[a] >= scores[b] for a, b in itertools.pairwise(one))]

    shares = [len(a & b) / k for a, b in itertools.product(tops(x), tops(y))]
    assert overlap(x, y, k=k) == pytest.approx(np.mean(shares))


def test_overlap_by_hand():
    assert overlap([5, 4, 3, 2, 1], [5, 4, 1, 2, 3], k=3) == pytest.approx(2 / 3)
    # Top 2 of x: the first, and the second or the third by lot. Of y: the first two. Expected: (1 + ½) / 2.
    assert overlap([3, 1, 1, 0], [4, 3, 2, 1], k=2) == 0.75
    assert overlap([1, 1, 1, 1], [2, 2, 2, 2], k=1) == 0.25, "constant scores agree by chance, also with themselves"
    assert overlap([7], [-7], k=1) == 1


def literal_distance(first, second, penalty):
    """K^(p) of Fagin, Kumar & Sivakumar, case by case, for two lists with the best first."""
    total = 0.0
    for i, j in itertools.combinations(sorted({*first, *second}), 2):
        in_first, in_second = [one for one in (i, j) if one in first], [one for one in (i, j) if one in second]
        if len(in_first) == len(in_second) == 2:  # case 1: both are in both lists
            total += (first.index(i) < first.index(j)) != (second.index(i) < second.index(j))
        elif 2 in (len(in_first), len(in_second)) and 1 in (len(in_first), len(in_second)):
            # case 2: both are in one list, one of them in the other, where it is ahead of the absent one
            whole, (ahead,) = (first, in_second) if len(in_first) == 2 else (second, in_first)
            behind = j if ahead == i else i
            total += whole.index(behind) < whole.index(ahead)
        elif len(in_first) == len(in_second) == 1:  # case 3: one is only in the first list, the other in the second
            total += 1
        else:  # case 4: both are in one list, none in the other
            total += penalty
    return total


def by_score(scores, k):
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


@pytest.mark.parametrize("penalty", [0, 0.5, 1])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_top_k_distance_is_that_of_the_four_cases(n, penalty):
    """Against all rankings: the value case by case, and the largest value that there is."""
    x = list(range(n, 0, -1))
    for k in range(1, n + 1):
        others = list(itertools.permutations(x))
        literal = [literal_distance(by_score(x, k), by_score(y, k), penalty) for y in others]
        largest = max(literal) or 1
        for y, distance in zip(others, literal, strict=True):
            assert top_k_distance(x, y, k=k, penalty=penalty) == pytest.approx(distance / largest)


@given(two_scores(), st.integers(1, 9), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_top_k_distance_breaks_ties_by_place(both, k, penalty):
    x, y = both
    k = min(k, len(x))
    literal = literal_distance(by_score(x, k), by_score(y, k), penalty)
    zeros = np.zeros(100)  # more features, so that the largest value is that of two lists without a common feature
    x, y = (np.concatenate([one, zeros - 9]) for one in (x, y))
    assert top_k_distance(x, y, k=k, penalty=penalty) == pytest.approx(literal / (k**2 + penalty * k * (k - 1)))


def test_top_k_distance_by_hand():
    # (a, b) and (c, d): four pairs across the lists, two within one: 4 + 2 · ½, the largest value.
    assert top_k_distance([4, 3, 2, 1], [1, 2, 4, 3], k=2) == 1
    # (a, b) and (b, a) of four features: 1 / 5; of two there is nothing worse.
    assert top_k_distance([2, 1, 0, 0], [1, 2, 0, 0], k=2) == 0.2
    assert top_k_distance([2, 1], [1, 2], k=2) == 1
    # (a, b) and (a, c): b and c are case 3; a, b and a, c are in order.
    assert top_k_distance([3, 2, 1, 0], [3, 1, 2, 0], k=2) == 0.2


def literal_rbo(first, second, p):
    """Webber, Moffat & Zobel, their equation 23 for lists of one length."""
    n = len(first)
    common = [len({*first[:d]} & {*second[:d]}) for d in range(1, n + 1)]
    return common[-1] / n * p**n + (1 - p) / p * sum(x / d * p**d for d, x in enumerate(common, 1))


@given(two_scores(), st.floats(0.05, 0.99))
@settings(max_examples=100, deadline=None)
@example([np.arange(3.0), np.arange(3.0)], 0.9)
def test_rank_biased_overlap_by_its_definition(both, p):
    x, y = both
    expected = literal_rbo(by_score(x, len(x)), by_score(y, len(y)), p)
    assert rank_biased_overlap(x, y, p=p) == pytest.approx(expected)


def test_rank_biased_overlap_by_hand():
    # Orders a b c and a c b with p = ½: shares 1, ½, 1. ⅛ + ½·1 + ¼·½ + ⅛·1 = 0.875.
    assert rank_biased_overlap([3, 2, 1], [3, 1, 2], p=0.5) == pytest.approx(0.875)
    # Orders a b c and c b a: shares 0, ½, 1. ⅛ + 0 + ¼·½ + ⅛ = 0.375.
    assert rank_biased_overlap([3, 2, 1], [1, 2, 3], p=0.5) == pytest.approx(0.375)


def test_an_agreement_is_reported_in_three_ways():
    rng = np.random.default_rng(0)
    for n, k in ((1, 1), (2, 1), (5, 1), (6, 2), (11, 3)):
        x, y = rng.random((2, n))
        found = agreement(x, y)
        assert set(found) == {"tau", "p", "top_k", "weighted"}
        assert same(found["tau"], kendall(x, y).value)
        assert same(found["p"], kendall(x, y).p)
        assert same(found["weighted"], weighted_kendall(x, y))
        assert found["top_k"] == overlap(x, y, k=k)
        assert agreement(x, y, k=n)["top_k"] == 1
        assert all(type(one) is float for one in found.values())


@pytest.mark.parametrize(
    "measure", [kendall, spearman, pearson, weighted_kendall, agreement, rank_biased_overlap,
                lambda x, y: overlap(x, y, k=1), lambda x, y: top_k_distance(x, y, k=1)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        ([1, 2], [1, 2, 3], r"x has shape \(2,\) and y \(3,\)"),
        ([[1, 2]], [[1, 2]], r"x has shape \(1, 2\)"),
        ([1, 2, NAN], [1, 2, 3], r"x\[2\]=nan is no finite number"),
        ([1, 2, 3], [1, -math.inf, 3], r"y\[1\]=-inf is no finite number"),
        ([], [], "x and y hold no feature"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(measure, x, y, said):
    with pytest.raises(errors.InputError, match=said):
        measure(x, y)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: overlap(x, x, k=0), "k=0 must be 1 or more, and at most 3"),
        (lambda x: overlap(x, x, k=4), "k=4 must be 1 or more, and at most 3"),
        (lambda x: top_k_distance(x, x, k=4), "k=4 must be"),
        (lambda x: top_k_distance(x, x, k=1.5), "k=1.5 must be 1 or more, and at most 3: a whole number"),
        (lambda x: top_k_distance(x, x, k=1, penalty=1.1), "penalty=1.1 must be between 0 and 1"),
        (lambda x: rank_biased_overlap(x, x, p=1), "p=1 must be between 0 and 1"),
        (lambda x: agreement(x, x, k=4), "k=4 must be"),
        (lambda x: weighted_kendall(x, x, by="size"), "by='size' is not known"),
        (lambda x: bootstrap(x, level=1), "level=1 must be between 0 and 1"),
        (lambda x: bootstrap(x, draws=0), "draws=0 must be 1 or more"),
        (lambda x: permutation_p(x, x, draws=0), "draws=0 must be 1 or more"),
        (lambda x: corrected(x, how="sidak"), "how='sidak' is not known"),
    ],
)
def test_options_out_of_range(call, said):
    with pytest.raises(errors.OptionError, match=said):
        call([1, 2, 3])


# --- intervals and tests ---------------------------------------------------------------------------------------------


def test_bootstrap_by_its_definition():
    values = np.random.default_rng(3).exponential(size=30)
    found = bootstrap(values, level=0.9, draws=4000, seed=1)
    rng = np.random.default_rng(7)
    means = [np.mean([values[rng.integers(30)] for _ in range(30)]) for _ in range(4000)]
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(np.quantile(means, 0.05), abs=0.015)
    assert found.high == pytest.approx(np.quantile(means, 0.95), abs=0.015)
    assert found == bootstrap(values, level=0.9, draws=4000, seed=1), "same seed, same interval"
    assert found != bootstrap(values, level=0.9, draws=4000, seed=2)


def test_a_bootstrap_of_two_values_is_exact():
    """The mean is 0, ½ or 1 with ¼, ½ and ¼: so the middle 40% are ½ alone, and the middle 60% reach 0 and 1."""
    narrow, wide = (bootstrap([0, 1], level=level, draws=20_000) for level in (0.4, 0.6))
    assert (narrow.value, narrow.low, narrow.high) == (0.5, 0.5, 0.5)
    assert (wide.low, wide.high) == (0, 1)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    """300 samples of 40 skewed values. The percentile interval is known to be a little narrow; 3 sd are 5 points."""
    rng = np.random.default_rng(0)
    intervals = [bootstrap(rng.exponential(size=40), level=0.9, draws=500, seed=i) for i in range(300)]
    covered = np.mean([one.low <= 1 <= one.high for one in intervals])
    assert 0.83 <= covered <= 0.93


def test_undefined_values_are_left_out_and_counted():
    values = np.array([1.0, NAN, 2.0, 4.0, NAN])
    found = bootstrap(values)
    assert (found.n, found.undefined) == (3, 2)
    assert (found.value, found.low, found.high) == (pytest.approx(7 / 3), *_ends(bootstrap([1, 2, 4])))
    assert bootstrap([5, NAN]) == Interval(5, 5, 5, n=1, undefined=1)
    for nothing in ([], [NAN, NAN]):
        found = bootstrap(nothing)
        assert all(math.isnan(one) for one in (found.value, found.low, found.high))
        assert (found.n, found.undefined) == (0, len(nothing))


def _ends(interval):
    return interval.low, interval.high


def test_paired_is_the_bootstrap_of_differences():
    rng = np.random.default_rng(0)
    values, others = rng.random((2, 50))
    values[3] = others[4] = values[5] = others[5] = NAN
    found = paired(values, others, level=0.8, draws=300, seed=5)
    assert found == bootstrap(values - others, level=0.8, draws=300, seed=5)
    assert (found.n, found.undefined) == (47, 3)
    # Examples differ much, their differences do not: that is what pairs are for.
    base = rng.normal(size=50) * 10
    close = paired(base + 1 + rng.normal(size=50) * 0.1, base)
    assert 0.9 < close.low < close.high < 1.1


def test_many_values_are_fast_and_take_little_memory():
    values = np.random.default_rng(0).normal(size=10_000)
    tracemalloc.start()
    started = time.perf_counter()
    bootstrap(values)
    permutation_p(values, np.zeros(10_000))
    seconds, (_, peak) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    assert seconds < 20  # about 1 on an idle core


def literal_p(differences):
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    means = [abs(sum(s * d for s, d in zip(one, differences, strict=True))) for one in signs]
    return sum(mean >= means[0] - 1e-9 for mean in means) / len(means)


@given(st.lists(st.one_of(st.integers(-3, 3), st.sampled_from([0.1, 0.2, 0.3, -0.3])), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_few_pairs_are_permuted_in_all_ways(differences):
    others = np.linspace(0, 1, len(differences))
    assert permutation_p(others + differences, others) == pytest.approx(literal_p(differences))
    assert permutation_p(others, others + differences) == pytest.approx(literal_p(differences))


def test_many_pairs_are_permuted_by_lot():
    rng = np.random.default_rng(0)
    differences = rng.normal(0.4, 1, size=15)
    exact = literal_p(differences)
    found = permutation_p(differences, np.zeros(15), draws=20_000)
    assert 0.02 < exact < 0.9
    assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 20_000))
    assert found == permutation_p(differences, np.zeros(15), draws=20_000)
    assert found != permutation_p(differences, np.zeros(15), draws=20_000, seed=1)
    assert permutation_p(np.ones(100), np.zeros(100), draws=99) == 0.01, "never 0: what was observed is one of them"
    assert permutation_p(np.ones(2000), np.ones(2000), draws=99) == 1


def test_a_permutation_test_is_as_often_wrong_as_it_says():
    rng = np.random.default_rng(1)
    p = [permutation_p(*rng.exponential(size=(2, 20)), draws=199, seed=i) for i in range(400)]
    assert np.mean(np.array(p) <= 0.1) == pytest.approx(0.1, abs=0.045)  # 3 sd


def test_undefined_pairs_do_not_count_in_a_permutation_test():
    assert permutation_p([1, 2, 3, NAN], [0, 0, 0, 0]) == permutation_p([1, 2, 3], [0, 0, 0]) == 0.25
    assert permutation_p([5], [0]) == 1
    assert math.isnan(permutation_p([1, NAN], [NAN, 1]))


def test_corrected_by_hand():
    p = [0.01, 0.04, 0.03, 0.5]
    # Holm: sorted .01 .03 .04 .5 times 4 3 2 1 is .04 .09 .08 .5; none may be below the one before: .04 .09 .09 .5.
    assert corrected(p).tolist() == pytest.approx([0.04, 0.09, 0.09, 0.5])
    # Benjamini-Hochberg: times 4/1 4/2 4/3 4/4 is .04 .06 .0533 .5; none may be above the one after: .04 .0533 .0533 .5.
    assert corrected(p, how="fdr").tolist() == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    assert corrected([0.6, 0.7]).tolist() == [1, 1]


@pytest.mark.parametrize("how", ["holm", "fdr"])
def test_corrected_keeps_shape_and_nan(how):
    p = np.array([[0.01, NAN, 0.04], [NAN, 0.03, 0.5]])
    found = corrected(p, how=how)
    assert found.shape == p.shape
    assert np.isnan(found).tolist() == np.isnan(p).tolist()
    assert found[~np.isnan(p)].tolist() == corrected([0.01, 0.04, 0.03, 0.5], how=how).tolist()
    assert p[0, 0] == 0.01, "what was passed stays as it was"
    assert np.isnan(corrected([NAN], how=how)).all()
    assert corrected([], how=how).size == 0
    assert corrected([0.2], how=how).tolist() == [0.2]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_corrections_are_bounds_in_the_same_order(p, random):
    holm, fdr = corrected(p), corrected(p, how="fdr")
    assert all(a - 1e-12 <= b <= c + 1e-12 for a, b, c in zip(p, fdr, holm, strict=True))
    assert all(holm <= np.minimum(np.array(p) * len(p), 1) + 1e-12), "never stricter than Bonferroni"
    order = list(range(len(p)))
    random.shuffle(order)
    assert corrected([p[i] for i in order]).tolist() == pytest.approx([holm[i] for i in order])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: corrected([0.5, 1.2]), "p_values holds 1.2"),
        (lambda: corrected([-0.1]), "p_values holds -0.1"),
        (lambda: bootstrap([[1, 2]]), r"values has shape \(1, 2\)"),
        (lambda: bootstrap([1, math.inf]), r"values\[1\]=inf: no mean is finite"),
        (lambda: paired([1, 2], [1]), "values holds 2 numbers, others 1"),
        (lambda: paired([1, 2], [1, -math.inf]), r"others\[1\]=-inf"),
        (lambda: permutation_p([1, 2], [1]), "values holds 2 numbers, others 1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(call, said):
    with pytest.raises(errors.InputError, match=said):
        call()


def test_crossed_intervals_are_those_of_a_slow_bootstrap_over_models_and_examples():
    draws = np.random.default_rng(0)
    values = draws.normal(size=(4, 30)) + draws.normal(size=(4, 1))
    found = crossed(values, draws=4000, seed=1)
    lots = np.random.default_rng(5)
    factor = math.sqrt(4 / 3) * 3.182446305284263 / 1.959963984540054  # Student's t with three degrees of freedom
    slow = []
    for _ in range(4000):
        some = values[lots.integers(4, size=4)]
        slow.append(some[:, lots.integers(30, size=30)].mean() + (factor - 1) * (some.mean() - values.mean()))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])), abs=0.06)
    assert found.n == 30
    wider = bootstrap(values.mean(0))
    assert found.high - found.low > 1.5 * (wider.high - wider.low), "models differ, too"
    for bad in ([1.0, 2.0], [[1.0, np.nan]], np.zeros((0, 3))):
        with pytest.raises(errors.InputError, match="values has shape"):
            crossed(bad)


def test_resampled_counts_add_up():
    whole = [*resampled(3, 7, 50, seed=2)]
    for models, examples in whole:
        assert (models.sum(1) == 3).all()
        assert (examples.sum(1) == 7).all()
    assert sum(len(models) for models, _ in whole) == 50


def test_intervals_of_few_models_miss_no_more_often_than_they_say():
    draws, missed = np.random.default_rng(0), 0
    for place in range(200):
        models, examples = draws.normal(0, 0.02, (3, 1)), draws.normal(0, 0.2, (1, 60))
        found = crossed(models + examples + draws.normal(0, 0.2, (3, 60)), draws=400, seed=place)
        missed += not found.low <= 0 <= found.high
    assert missed <= 14, "5 % of 200, and two standard errors"
    assert crossed([[1.0, 2.0, 3.0]]).low >= 1, "of one model nothing is known of others"
