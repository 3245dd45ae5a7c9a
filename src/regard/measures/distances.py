"""How far two distributions p and q, ``(…, outcome)``, are apart."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from regard.errors import InputError, OptionError

Array = NDArray[np.float64]
ROUNDING = 1e-3  # how far from 1 a distribution may sum: half precision, many outcomes


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
