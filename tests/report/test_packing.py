"""Packed attention: little is lost, and how little is known."""

from __future__ import annotations

import numpy as np
import pytest

from regard.errors import OptionError
from regard.report.packing import MOST, SHARE, STEP, pack, unpack


def literal(weights):
    """Row by row: the largest until they make up the share, rounded to a byte."""
    kept = np.zeros_like(weights)
    for index in np.ndindex(weights.shape[:2]):
        row, total = weights[index], 0.0
        for key in sorted(range(len(row)), key=lambda at: (-row[at], at))[:MOST]:
            if total >= SHARE * row.sum():
                break
            kept[index][key] = round(row[key] * STEP) / STEP
            total += row[key]
    return kept


@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 1, 40), (1, 4, 300), (4, 2, 1)])
def test_what_is_unpacked_is_what_the_definition_keeps(shape):
    weights = np.random.default_rng(0).dirichlet([0.2] * shape[2], size=shape[:2])
    packed = pack(weights)
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    found = unpack(packed)
    np.testing.assert_allclose(found, literal(weights), atol=1e-12)
    assert np.abs(found - weights)[found > 0].max() <= 0.5 / STEP + 1e-12
    assert (found > 0).sum(-1).max() <= MOST
    assert len(packed) == 6 + shape[0] * shape[1] + (2 if shape[2] <= 256 else 3) * (found > 0).sum()


def test_rows_of_nothing_and_of_one():
    weights = np.zeros((1, 3, 4))
    weights[0, 1, 2] = 1.0
    assert unpack(pack(weights)).tolist() == weights.tolist()
    assert unpack(pack(np.zeros((2, 0, 4)))).shape == (2, 0, 4)


@pytest.mark.parametrize("wrong", [np.ones((2, 2)), np.full((1, 1, 2), np.nan)])
def test_what_cannot_be_packed(wrong):
    with pytest.raises(OptionError, match=r"weights must be finite and \(head, row, key\)"):
        pack(wrong)
