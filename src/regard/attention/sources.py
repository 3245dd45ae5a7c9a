"""Where the weights of a site come from: formed by the model, or recomputed from what its kernel was given.

A fused kernel never forms its weights, so a fused site keeps references to q, k, v and recomputes the weights of the
rows that are asked for, tile by tile; a tile fits into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from einops import rearrange
from torch import Tensor

# examples, heads, and which of the rows asked for; their weights (example, head, row, key)
Tile = tuple[slice, slice, slice, Tensor]

TILE_ROWS = 128  # measured: 64–128 query rows of all heads of a key–value group are fastest at any length
TILE_BYTES = 4 << 20
# The smallest "minus infinity" in use is −10,000; no model's own scores are so far apart.
HIDDEN = -9000.0


@dataclass(frozen=True, eq=False)
class Given:
    """Weights that the model itself has formed (hand-written attention).

    Args:
        weights: ``(example, head, query, key)``.
        values: ``(example, head, key, channel)``.
        visible: as the weights, 0 where a key may not be seen; followed where edits need it.
    """

    weights: Tensor
    values: Tensor
    visible: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(example, head, query, key)."""
        example, head, query, key = self.weights.shape
        return example, head, query, key

    @property
    def queries(self) -> Tensor:
        """``(example, head, query, …)``: what must be finite in every real row."""
        return self.weights

    def tile(self, heads: slice, rows: Tensor) -> Tensor:
        """``(example, head, row, key)`` weights of all examples."""
        return at_least_float(self.weights[:, heads][:, :, rows])

    def allowed(self, examples: slice, heads: slice, rows: Tensor, keys: int) -> Tensor:
        """``(example, head, row, key)``: True where a key may be seen, which here is where it is."""
        return self.weights[examples, heads][:, :, rows, :keys] != 0

    def sweep(self, rows: Tensor, *, together: bool = False) -> Iterator[Tile]:
        """All weights of the given rows, a block of rows of all heads at a time."""
        return row_blocks(self, rows)

    def map(self, refold: Callable[[Tensor], Tensor]) -> Given:
        """The same with each tensor's first two axes rearranged."""
        return Given(refold(self.weights), refold(self.values), None if self.visible is None else refold(self.visible))


@dataclass(frozen=True, eq=False)
class Fused:
    """References to the arguments of a fused kernel, from which weights are recomputed.

    Args:
        q: ``(example, head, query, channel)``.
        k: ``(example, group, key, channel)``; each group of heads shares its keys and values.
        values: ``(example, group, key, channel)``.
        mask: broadcasts to ``(example, head, query, key)``: True where a key may be seen, or an additive bias.
        causal: query i sees keys 0 … i.
        scale: factor of q·k.
        lse: the kernel's log-sum-exp ``(example, head, query)``, if it gave one: it saves two passes.
    """

    q: Tensor
    k: Tensor
    values: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    lse: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(example, head, query, key)."""
        example, head, query, _ = self.q.shape
        return example, head, query, self.k.shape[2]

    @property
    def queries(self) -> Tensor:
        """``(example, head, query, …)``: what must be finite in every real row."""
        return self.q

    def tile(self, heads: slice, rows: Tensor) -> Tensor:
        """softmax(q·kᵀ · scale + mask), ``(example, head, row, key)``, for heads of one group or of all groups."""
        share = self.q.shape[1] // self.k.shape[1]
        q = at_least_float(self.q[:, heads][:, :, rows]) * self.scale
        k = at_least_float(self.k[:, heads.start // share : (heads.stop - 1) // share + 1])
        scores = rearrange(q, "e (g h) r c -> e g (h r) c", g=k.shape[1]) @ k.mT
        scores = scores.view(*q.shape[:3], -1)
        self._hide(scores, slice(None), heads, rows)
        # a row that sees no key at all: 0, as the kernels have it, not NaN
        return scores.softmax(-1).masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)

    @torch.no_grad()
    def sweep(self, rows: Tensor, *, together: bool = False) -> Iterator[Tile]:
        """All weights of the given rows (ascending), in tiles that fit into the cache, or that hold all heads together.

        The kernel's log-sum-exp makes a tile one product and one exp: [q·scale, −lse] · [k, 1]ᵀ, then exp. Keys end
        where causality ends them. A tile is overwritten by the next one.
        """
        example, head, _, key = self.shape
        group = self.k.shape[1]
        share = head // group
        if (
            self.lse is None or self.lse.abs().max() > 1e3
        ):  # it rounds badly: a finite "minus infinity", or steep scores
            yield from row_blocks(self, rows)
            return
        every = len(rows) == self.q.shape[2]  # no need for a copy then
        q, lse = (x if every else x[:, :, rows] for x in (self.q, self.lse))
        q = at_least_float(q)
        q = torch.cat([q * self.scale, -lse[..., None].to(q.dtype)], -1)
        k = at_least_float(self.k)
        k = torch.cat([k, k.new_ones(1).expand(*k.shape[:-1], 1)], -1)
        size = share * min(len(rows), TILE_ROWS) * key * q.element_size()
        groups = group if together else max(1, min(group, TILE_BYTES // max(size, 1)))
        examples = max(1, min(example, TILE_BYTES // max(size * group, 1))) if groups == group else 1
        buffer = q.new_empty(examples * groups * share * min(len(rows), TILE_ROWS) * key)
        in_order = len(rows) > 0 and bool(rows[-1] - rows[0] == len(rows) - 1) and int(rows[-1]) < key
        ends = (rows + 1).clamp_max(key).tolist() if self.causal else [key] * len(rows)
        for first, start, block in product(
            range(0, example, examples), range(0, group, groups), range(0, len(rows), TILE_ROWS)
        ):
            some = slice(first, min(first + examples, example))
            heads = slice(start * share, min(start + groups, group) * share)
            span = slice(block, min(block + TILE_ROWS, len(rows)))
            end = ends[span.stop - 1]
            left = rearrange(q[some, heads, span], "e (g h) r c -> (e g) (h r) c", h=share)
            right = k[some, start : start + groups].flatten(0, 1)[:, :end]
            tile = buffer[: left.shape[0] * left.shape[1] * end].view(*left.shape[:2], end)
            torch.bmm(left, right.mT, out=tile)
            tile = tile.view(some.stop - some.start, heads.stop - heads.start, -1, end)
            # what is hidden is cut after the exp: an exp of minus infinity takes six times as long
            mask = self._mask_of(some, heads, rows[span], end)
            if mask is not None and mask.dtype != torch.bool:
                tile += mask
            tile.exp_()
            if mask is not None and mask.dtype == torch.bool:
                tile.masked_fill_(~mask, 0.0)
            if self.causal and in_order:  # the usual tile: a triangle at its end
                tile[..., end - tile.shape[2] :].tril_()
            elif self.causal:
                tile.masked_fill_(_after(rows[span], end), 0.0)
            yield some, heads, span, tile

    def allowed(self, examples: slice, heads: slice, rows: Tensor, keys: int) -> Tensor:
        """``(example, head, row, key)``: True where a key may be seen; a bias of −9,000 or less hides it."""
        shape = (
            len(range(*examples.indices(self.shape[0]))),
            len(range(*heads.indices(self.shape[1]))),
            len(rows),
            keys,
        )
        scores = torch.zeros(shape, dtype=torch.float32, device=self.q.device)
        self._hide(scores, examples, heads, rows)
        return scores > HIDDEN

    def _hide(self, scores: Tensor, examples: slice, heads: slice, rows: Tensor) -> None:
        """Apply the mask and causality to a tile of scores, in place."""
        mask = self._mask_of(examples, heads, rows, scores.shape[-1])
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        elif mask is not None:
            scores += mask
        if self.causal:
            scores.masked_fill_(_after(rows, scores.shape[-1]), -torch.inf)

    def _mask_of(self, examples: slice, heads: slice, rows: Tensor, keys: int) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask[examples] if self.mask.shape[0] > 1 else self.mask
        mask = mask[:, heads] if mask.shape[1] > 1 else mask
        return (mask[:, :, rows] if mask.shape[2] > 1 else mask)[..., :keys]

    def map(self, refold: Callable[[Tensor], Tensor]) -> Fused:
        """The same with each tensor's first two axes rearranged."""
        mask = self.mask if self.mask is None else refold(self.mask)
        lse = self.lse if self.lse is None else refold(self.lse)
        return replace(self, q=refold(self.q), k=refold(self.k), values=refold(self.values), mask=mask, lse=lse)


def row_blocks(source: Given | Fused, rows: Tensor) -> Iterator[Tile]:
    """All weights of the given rows, a block of rows at a time."""
    example, head, _, _ = source.shape
    for start in range(0, len(rows), TILE_ROWS):
        span = slice(start, min(start + TILE_ROWS, len(rows)))
        yield slice(0, example), slice(0, head), span, source.tile(slice(0, head), rows[span])


def _after(rows: Tensor, keys: int) -> Tensor:
    """``(row, key)``: True where a key comes after the query."""
    return torch.arange(keys, device=rows.device) > rows[:, None]


def at_least_float(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
