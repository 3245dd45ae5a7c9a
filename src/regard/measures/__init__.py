"""Distances, rank correlations, intervals and tests: arrays in, numbers out.

Distances take distributions p and q, ``(…, outcome)``, over the last axis; the other axes are broadcast, and what
rounding left of a sum of 1 is divided away. Agreements take two scores for each feature, x and y, ``(feature,)``.
Where a number is not defined (a correlation with constant scores, the mean of nothing) it is NaN, without a warning:
those who report a mean count the undefined, as `bootstrap` and `paired` do. What else cannot be used is refused.
"""

from regard.measures.distances import jsd, kl, tvd
from regard.measures.ranks import (
    Correlation,
    agreement,
    agreements,
    kendall,
    membership,
    overlap,
    pearson,
    rank_biased_overlap,
    spearman,
    top_k_distance,
    weighted_kendall,
)
from regard.measures.statistics import (
    Interval,
    bootstrap,
    corrected,
    crossed,
    paired,
    permutation_p,
    resampled,
    widened,
)

__all__ = [
    "Correlation",
    "Interval",
    "agreement",
    "agreements",
    "bootstrap",
    "corrected",
    "crossed",
    "jsd",
    "kendall",
    "kl",
    "membership",
    "overlap",
    "paired",
    "pearson",
    "permutation_p",
    "rank_biased_overlap",
    "resampled",
    "spearman",
    "top_k_distance",
    "tvd",
    "weighted_kendall",
    "widened",
]
