"""One place in the forward pass where attention weights mix values, and what can be asked of it.

Rows are queries, columns are keys. A fused kernel never forms its weights, so a fused site keeps references to
q, k, v and recomputes the weights of the rows that are asked for, tile by tile; a tile fits into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from einops import rearrange
from torch import Tensor

from regard.errors import NoGradient, NoSuchPart

Kind = Literal["self", "cross", "pool", "samples"]
Rows = int | Sequence[int] | None
# example, head, query rows: what is computed in one go
Tile = tuple[slice, slice, Tensor]

TILE_ROWS = 128  # measured: 64–128 query rows of all heads of a key–value group are fastest at any length
TILE_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class Given:
    """Weights that the model itself has formed (hand-written attention).

    Args:
        weights: ``(example, head, query, key)``.
        values: ``(example, head, key, channel)``.
    """

    weights: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(example, head, query, key)."""
        example, head, query, key = self.weights.shape
        return example, head, query, key

    def tiles(self, rows: Tensor) -> Iterator[Tile]:
        """A single tile: the weights exist already."""
        yield slice(0, self.shape[0]), slice(0, self.shape[1]), rows

    def tile(self, examples: slice, heads: slice, rows: Tensor, *, exact: bool = False) -> Tensor:
        """``(example, head, row, key)`` weights."""
        return at_least_float(self.weights[examples, heads][:, :, rows])

    def map(self, refold: Callable[[Tensor], Tensor]) -> Given:
        """The same with each tensor's first two axes rearranged."""
        return Given(refold(self.weights), refold(self.values))


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

    def tiles(self, rows: Tensor) -> Iterator[Tile]:
        """Cut examples × heads × rows into tiles that fit into the cache."""
        examples, heads, _, keys = self.shape
        groups = self.k.shape[1]
        group = heads // groups
        size = group * min(len(rows), TILE_ROWS) * keys * 4
        per_group = max(1, min(groups, TILE_BYTES // max(size, 1)))
        per_example = max(1, min(examples, TILE_BYTES // max(size * groups, 1))) if per_group == groups else 1
        for block in rows.split(TILE_ROWS):
            for e in range(0, examples, per_example):
                for g in range(0, groups, per_group):
                    last = min(g + per_group, groups)
                    yield slice(e, min(e + per_example, examples)), slice(g * group, last * group), block

    def tile(self, examples: slice, heads: slice, rows: Tensor, *, exact: bool = False) -> Tensor:
        """exp(q·kᵀ · scale + mask − lse), ``(example, head, row, key)``; keys end where causality ends them.

        Where scores are in the hundreds, the kernel's own rounding of lse shows in the sixth digit; ``exact``
        normalises the row anew instead.
        """
        lse = None if exact else self.lse
        group = self.q.shape[1] // self.k.shape[1]
        end = min(self.k.shape[2], int(rows[-1]) + 1) if self.causal else self.k.shape[2]
        q = at_least_float(self.q[examples, heads][:, :, rows]) * self.scale
        k = at_least_float(self.k[examples, heads.start // group : (heads.stop - 1) // group + 1, :end])
        example, head, row, _ = q.shape
        share = head // k.shape[1]  # heads of this tile that share a group's keys
        q = rearrange(q, "e (g h) r c -> (e g) (h r) c", h=share)
        k_t = rearrange(k, "e g k c -> (e g) c k")
        if lse is None:
            scores = torch.bmm(q, k_t)
        else:
            lse = lse[examples, heads][:, :, rows]
            scores = torch.baddbmm(-rearrange(lse, "e (g h) r -> (e g) (h r) 1", h=share), q, k_t)
        scores = scores.view(example, head, row, end)
        self._hide(scores, examples, heads, rows)
        if lse is None:
            # a row that sees no key at all: 0, as the kernels have it, not NaN
            return scores.softmax(-1).nan_to_num_(0.0)
        return scores.exp_()

    def _hide(self, scores: Tensor, examples: slice, heads: slice, rows: Tensor) -> None:
        """Apply the mask and causality to a tile of scores, in place."""
        end = scores.shape[-1]
        if self.mask is not None:
            mask = self.mask[examples if self.mask.shape[0] > 1 else slice(None)]
            mask = mask[:, heads if mask.shape[1] > 1 else slice(None)]
            mask = (mask[:, :, rows] if mask.shape[2] > 1 else mask)[..., :end]
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores += mask
        if self.causal:
            start = min(int(rows[0]), end)  # keys before the first row of the tile are seen by all its rows
            later = torch.arange(start, end, device=rows.device) > rows[:, None]
            scores[..., start:].masked_fill_(later, -torch.inf)

    def map(self, refold: Callable[[Tensor], Tensor]) -> Fused:
        """The same with each tensor's first two axes rearranged."""
        mask = self.mask if self.mask is None else refold(self.mask)
        lse = self.lse if self.lse is None else refold(self.lse)
        return replace(
            self, q=refold(self.q), k=refold(self.k), values=refold(self.values), mask=mask, lse=lse
        )


@dataclass(frozen=True, eq=False)
class Site:
    """One place in the forward pass where attention weights mix values.

    Args:
        index: its place in the order of execution.
        name: path of the module that was executing.
        kind: ``self``, ``cross``, ``pool`` (one distribution for the whole input) or ``samples`` (across examples).
        source: where the weights come from.
        real: ``(example, query)``, False at padding rows, whose weights are 0 by definition.
        out_gradient: ``(example, head, query, channel)``, ∂target/∂(A·V), when the trace was asked for gradients.
    """

    index: int
    name: str
    kind: Kind
    source: Given | Fused
    real: Tensor
    out_gradient: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(example, head, query, key)."""
        return self.source.shape

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.shape[1]

    @property
    def values(self) -> Tensor:
        """``(example, head, key, channel)``: what the weights mix, expanded over heads that share it."""
        values = self.source.values
        return values.repeat_interleave(self.heads // values.shape[1], dim=1)

    def weights(self, *, heads: Rows = None, rows: Rows = None) -> Tensor:
        """Attention weights ``(example, head, query, key)``, at least float32, of the heads and rows asked for.

        Padding rows are 0; what the model's mask hides is exactly 0.

        Shape: ``t.sites[3].weights(heads=0, rows=[0, 5])`` is ``(example, 1, 2, key)``.
        """
        chosen, wanted = self._choose("head", heads), self._choose("row", rows)
        example, _, _, key = self.shape
        result = torch.zeros(example, len(chosen), len(wanted), key, dtype=self._dtype, device=wanted.device)
        # causality ends a tile's keys after its last row, so tiles need ascending rows
        order = wanted.argsort()
        spans = [(0, self.heads)] if heads is None else [(head, head + 1) for head in chosen.tolist()]
        for places in order.split(TILE_ROWS):
            real = self.real[:, None, wanted[places], None]
            for place, (first, last) in enumerate(spans):
                tile = self.source.tile(slice(0, example), slice(first, last), wanted[places], exact=True)
                result[:, place : place + last - first, places, : tile.shape[-1]] = tile * real
        return result

    def gradients(self, *, heads: Rows = None, rows: Rows = None) -> Tensor:
        """∂target/∂A ``(example, head, query, key)``: ⟨∂target/∂out_q, v_k⟩, because out = A·V.

        Keys that the mask hides have a gradient, too: what would happen if they were given weight.
        """
        if self.out_gradient is None:
            raise NoGradient(
                f"site {self.index} ({self.name}) has no gradients: trace with gradients=True and a target."
            )
        chosen, wanted = self._choose("head", heads), self._choose("row", rows)
        group = self.heads // self.source.values.shape[1]
        gradient = at_least_float(self.out_gradient[:, chosen][:, :, wanted])
        values = at_least_float(self.source.values[:, chosen // group])
        real = self.real[:, None, wanted, None]
        return torch.einsum("ehqc,ehkc->ehqk", gradient, values) * real

    @overload
    def pull(self, r: Tensor) -> Tensor: ...
    @overload
    def pull(self, r: Tensor, *, per_head: bool) -> Tensor: ...
    def pull(self, r: Tensor, *, per_head: bool = False) -> Tensor:
        """r·Ā: how the weight ``r`` on query rows spreads over keys, without ever forming A.

        Args:
            r: ``(example, query)``. Rows where it is zero for all examples cost nothing.
            per_head: r·A of each head instead of the mean over heads.

        Returns:
            ``(example, key)``, or ``(example, head, key)`` with ``per_head``. Memory is linear in tokens.
        """
        example, head, query, key = self.shape
        if tuple(r.shape) != (example, query):
            raise NoSuchPart(
                f"r has shape {tuple(r.shape)}, but site {self.index} ({self.name}) has "
                f"(example, query) = {(example, query)}."
            )
        r = r.to(self.real.device, self._dtype) * self.real
        result = r.new_zeros(example, head, key)
        for examples, heads, rows in self.source.tiles(r.any(0).nonzero().squeeze(-1)):
            tile = self.source.tile(examples, heads, rows)
            row = r[examples, None, None, rows]
            result[examples, heads, : tile.shape[-1]] += (row @ tile).squeeze(2)
        return result if per_head else result.mean(1)

    def entropy(self, r: Tensor) -> Tensor:
        """Σ_q r_q · H(A_q) in nats for each head: ``(example, head)``. 0 looks at one key, log(keys) at all."""
        r = r.to(self.real.device, self._dtype) * self.real
        result = r.new_zeros(self.shape[:2])
        for examples, heads, rows in self.source.tiles(r.any(0).nonzero().squeeze(-1)):
            entropy = torch.special.entr(self.source.tile(examples, heads, rows)).sum(-1)
            result[examples, heads] += (entropy * r[examples, None, rows]).sum(-1)
        return result

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.source.values.dtype, torch.float32)

    def _choose(self, part: Literal["head", "row"], wanted: Rows) -> Tensor:
        """Validated indices of heads or query rows."""
        size = self.shape[1 if part == "head" else 2]
        if wanted is None:
            return torch.arange(size, device=self.real.device)
        indices = [wanted] if isinstance(wanted, int) else [int(index) for index in wanted]
        for index in indices:
            if not -size <= index < size:
                raise NoSuchPart(
                    f"{part}s={wanted!r}: site {self.index} ({self.name}) has {size} {part}s, "
                    f"so {index} is not there. Choose from 0 to {size - 1}."
                )
        return torch.tensor([index % size for index in indices], device=self.real.device)


def at_least_float(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
