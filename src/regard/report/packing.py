"""Attention maps in few bytes, for the head explorer of the page.

Most of a row of attention is next to nothing. Of each row the largest weights are kept, until they make up `SHARE` of
the row or `MOST` are kept, and each is rounded to a byte: 255 is 1. So a weight that is shown is right to 0.002, and
one that is not shown is smaller than those that are. In bytes, numbers of two bytes with the low one first::

    heads rows keys         two bytes each
    for each head and row   how many weights are kept (one byte), then of each its key and the weight (one byte)

A key is one byte if there are at most 256 of them, otherwise two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from regard.errors import OptionError

SHARE, MOST = 0.95, 16
STEP = 255


def pack(weights: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Weights ``(head, row, key)`` between 0 and 1, sparsified and rounded to bytes.

    Example:
        >>> packed = pack(np.array([[[0.7, 0.3, 0.0]]]))
        >>> packed.tolist()
        [1, 0, 1, 0, 3, 0, 2, 0, 178, 1, 76]
        >>> unpack(packed).round(2).tolist()
        [[[0.7, 0.3, 0.0]]]
    """
    array = np.asarray(weights, dtype=float)
    if array.ndim != 3 or max(array.shape) >= 1 << 16 or not np.isfinite(array).all():
        raise OptionError(f"weights must be finite and (head, row, key), but has shape {array.shape} or holds NaN.")
    wide = 1 if array.shape[2] <= 256 else 2
    parts = [np.array(array.shape, "<u2").tobytes()]
    order = np.argsort(-array, axis=-1, kind="stable")[..., :MOST]  # head row place
    largest = np.take_along_axis(array, order, -1).clip(0, 1)
    before = np.cumsum(largest, -1) - largest  # what the larger ones make up
    bytes_of = np.rint(largest * STEP).astype(np.uint8)
    kept = (before < SHARE * array.sum(-1, keepdims=True)) & (bytes_of > 0)
    for keys, values, some in zip(*(one.reshape(-1, order.shape[-1]) for one in (order, bytes_of, kept)), strict=True):
        pairs = zip(keys[some].tolist(), values[some].tolist(), strict=True)
        parts.append(
            bytes([some.sum()]) + b"".join(key.to_bytes(wide, "little") + bytes([value]) for key, value in pairs)
        )
    return np.frombuffer(b"".join(parts), np.uint8)


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What the page shows of packed weights: ``(head, row, key)``, 0 where nothing was kept."""
    data = packed.tobytes()
    shape = np.frombuffer(data[:6], "<u2").astype(int)
    wide = 1 if shape[2] <= 256 else 2
    flat, at = np.zeros((shape[0] * shape[1], shape[2])), 6
    for row in flat:
        count, at = data[at], at + 1
        for _ in range(count):
            row[int.from_bytes(data[at : at + wide], "little")] = data[at + wide] / STEP
            at += wide + 1
    return flat.reshape(shape)
