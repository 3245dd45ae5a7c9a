"""One place in the forward pass where attention weights mix values, and what can be asked of it.

Rows are queries, columns are keys. A fused kernel never forms its weights, so a fused site keeps references to
q, k, v and recomputes the weights of the rows that are asked for, tile by tile; a tile fits into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal

import torch
from einops import rearrange, repeat
from torch import Tensor

from regard.errors import NoGradient, NoSuchPart, NotReproduced, non_finite, whole_numbers

Kind = Literal["self", "encoder", "decoder", "cross", "pool", "samples"]
Rows = int | Sequence[int] | None
# examples, heads, and which of the rows asked for; their weights (example, head, row, key)
Tile = tuple[slice, slice, slice, Tensor]

TILE_ROWS = 128  # measured: 64–128 query rows of all heads of a key–value group are fastest at any length
TILE_BYTES = 4 << 20
# of max |A·V − out| / max |out|; half precision rounds the model's own output
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


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

    def sweep(self, rows: Tensor) -> Iterator[Tile]:
        """All weights of the given rows, a block of rows at a time."""
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
    def sweep(self, rows: Tensor) -> Iterator[Tile]:
        """All weights of the given rows (ascending), in tiles that fit into the cache.

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
        q = at_least_float(self.q[:, :, rows])
        q = torch.cat([q * self.scale, -self.lse[:, :, rows, None].to(q.dtype)], -1)
        k = at_least_float(self.k)
        k = torch.cat([k, k.new_ones(1).expand(*k.shape[:-1], 1)], -1)
        size = share * min(len(rows), TILE_ROWS) * key * q.element_size()
        groups = max(1, min(group, TILE_BYTES // max(size, 1)))
        examples = max(1, min(example, TILE_BYTES // max(size * group, 1))) if groups == group else 1
        buffer = q.new_empty(examples * groups * share * min(len(rows), TILE_ROWS) * key)
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
            self._hide(tile, some, heads, rows[span])
            yield some, heads, span, tile.exp_()

    def _hide(self, scores: Tensor, examples: slice, heads: slice, rows: Tensor) -> None:
        """Apply the mask and causality to a tile of scores, in place."""
        end = scores.shape[-1]
        if self.mask is not None:
            mask = self.mask[examples] if self.mask.shape[0] > 1 else self.mask
            mask = mask[:, heads] if mask.shape[1] > 1 else mask
            mask = (mask[:, :, rows] if mask.shape[2] > 1 else mask)[..., :end]
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores += mask
        if self.causal:
            if end == int(rows[-1]) + 1 and bool((rows.diff() == 1).all()):  # the usual tile: a triangle at its end
                scores[..., end - len(rows) :].masked_fill_(_triangle(len(rows), rows.device), -torch.inf)
            else:
                scores.masked_fill_(torch.arange(end, device=rows.device) > rows[:, None], -torch.inf)

    def map(self, refold: Callable[[Tensor], Tensor]) -> Fused:
        """The same with each tensor's first two axes rearranged."""
        mask = self.mask if self.mask is None else refold(self.mask)
        lse = self.lse if self.lse is None else refold(self.lse)
        return replace(self, q=refold(self.q), k=refold(self.k), values=refold(self.values), mask=mask, lse=lse)


@dataclass(frozen=True, eq=False)
class Sample:
    """A few rows of what the model itself computed at a site: ``(example, head, row, channel)``."""

    rows: Tensor
    out: Tensor


@dataclass(frozen=True)
class Proof:
    """How well recomputed weights × values reproduce the model's own output, on the sampled rows.

    Args:
        error: max |A·V − out| / max |out|.
        mass: smallest and largest row sum of A: 1, but for models with sink logits.
    """

    error: float
    mass: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Site:
    """One place in the forward pass where attention weights mix values.

    Args:
        index: its place in the order of execution.
        name: path of the module that was executing.
        kind: ``self``, ``pool`` (one distribution for the whole input) or ``samples`` (across examples); in models
            with a second sequence ``encoder`` (over the source), ``decoder`` (over the rows) or ``cross`` (between).
        source: where the weights come from.
        real: ``(example, query)``, False at padding rows, whose weights are 0 by definition.
        real_keys: ``(example, key)``, False at padding keys.
        sample: rows of the model's own output, to prove the weights by.
        rows: ``(example, query)``, the row of the input that each query stands for, where a model computes only the
            rows it needs (the last block of an FT-Transformer asks for [CLS] alone); otherwise None.
        out_gradient: ``(example, head, query, channel)``, ∂target/∂(A·V), when the trace was asked for gradients.
    """

    index: int
    name: str
    kind: Kind
    source: Given | Fused
    real: Tensor
    real_keys: Tensor
    sample: Sample
    rows: Tensor | None = None
    out_gradient: Tensor | None = None

    def __repr__(self) -> str:
        return f"Site({self.index}, {self.name!r}, {self.kind!r}, shape={self.shape})"

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

    @cached_property
    def proof(self) -> Proof:
        """Recomputed weights × values against the model's own output; done once, before anything is read."""
        example, head, _, _ = self.shape
        shown = self.real[:, self.sample.rows]  # example row
        weights = self.source.values.new_zeros(example, head, len(self.sample.rows), self.shape[3], dtype=self._dtype)
        for examples, heads, rows, tile in self.source.sweep(self.sample.rows):
            weights[examples, heads, rows, : tile.shape[-1]] = tile
        values = at_least_float(self.source.values)
        groups = values.shape[1]
        again = rearrange(weights, "e (g h) r k -> e g (h r) k", g=groups) @ values
        expected = rearrange(at_least_float(self.sample.out), "e (g h) r c -> e g (h r) c", g=groups)
        visible = repeat(shown, "e r -> e 1 (h r) 1", h=head // groups)
        # padding rows may hold NaN, which a product would keep
        gap = (again - expected).abs().where(visible, 0).max()
        error = float(gap / expected.abs().where(visible, 0).max().clamp_min(1e-30))
        masses = weights.sum(-1)[shown[:, None].expand(-1, head, -1)]
        if not math.isfinite(error):
            raise non_finite(f"site {self.index} ({self.name})")
        if error > TOLERANCE.get(self.sample.out.dtype, 1e-4):
            raise NotReproduced(
                f"site {self.index} ({self.name}): recomputed weights × values differ from the model's own output by "
                f"{error:.2g} of its largest value. Please report it with the model's class; until then, do not "
                "trust this site."
            )
        return Proof(error, (float(masses.min()), float(masses.max())))

    def weights(self, *, heads: Rows = None, rows: Rows = None) -> Tensor:
        """Attention weights ``(example, head, query, key)``, at least float32, of the heads and rows asked for.

        Padding rows are 0; what the model's mask hides is exactly 0.

        Shape: ``t.sites[3].weights(heads=0, rows=[0, 5])`` is ``(example, 1, 2, key)``.
        """
        chosen, wanted = self._choose("head", heads), self._choose("row", rows)
        _ = self.proof  # raises if the weights are not the model's
        example, _, _, key = self.shape
        result = torch.zeros(example, len(chosen), len(wanted), key, dtype=self._dtype, device=wanted.device)
        spans = [(0, self.heads)] if heads is None else [(head, head + 1) for head in chosen.tolist()]
        for places in torch.arange(len(wanted), device=wanted.device).split(TILE_ROWS):
            real = self.real[:, None, wanted[places], None]
            for place, (first, last) in enumerate(spans):
                tile = self.source.tile(slice(first, last), wanted[places])
                result[:, place : place + last - first, places] = tile.where(real, 0)
        return self._finite(result)

    def gradients(self, *, heads: Rows = None, rows: Rows = None) -> Tensor:
        """∂target/∂A ``(example, head, query, key)``: ⟨∂target/∂out_q, v_k⟩, because out = A·V.

        Keys that the mask hides have a gradient, too: what would happen if they were given weight. Padding has none.
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
        return torch.einsum("ehqc,ehkc->ehqk", gradient, values) * real * self.real_keys[:, None, None]

    def pull(self, r: Tensor, *, per_head: bool = False) -> Tensor:
        """r·Ā: how the weight ``r`` on query rows spreads over keys, without ever forming A.

        Args:
            r: ``(example, row)``. Rows where it is zero for all examples cost nothing.
            per_head: r·A of each head instead of the mean over heads.

        Returns:
            ``(example, key)``, or ``(example, head, key)`` with ``per_head``. Memory is linear in tokens.
        """
        example, head, _, key = self.shape
        r = self._on_queries(r)
        wanted = r.any(0).nonzero().squeeze(-1)
        result = r.new_zeros(example, head if per_head else 1, key)
        for examples, heads, span, tile in self.source.sweep(wanted):
            row = r[examples, wanted[span]]
            end = tile.shape[-1]
            if per_head:
                result[examples, heads, :end] += torch.einsum("er,ehrk->ehk", row, tile)
            else:  # heads and rows are one axis of a single vector–matrix product
                row = row.repeat(1, tile.shape[1]).unsqueeze(1)
                result[examples, :, :end] += row @ tile.flatten(1, 2)
        return self._finite(result if per_head else result[:, 0] / head)

    def entropy(self, r: Tensor) -> Tensor:
        """Σ_q r_q · H(A_q) in nats for each head: ``(example, head)``. 0 looks at one key, log(keys) at all."""
        r = self._on_queries(r)
        wanted = r.any(0).nonzero().squeeze(-1)
        result = r.new_zeros(self.shape[:2])
        for examples, heads, span, tile in self.source.sweep(wanted):
            entropy = torch.special.entr(tile).sum(-1)
            result[examples, heads] += (entropy * r[examples, None, wanted[span]]).sum(-1)
        return self._finite(result)

    def _on_queries(self, r: Tensor) -> Tensor:
        """``r`` on the rows of the input, as weights of this site's queries; padding rows get none."""
        _ = self.proof  # raises if the weights are not the model's
        r = torch.as_tensor(r)
        example, _, query, key = self.shape
        if self.rows is not None and r.shape == (example, key):
            r = r.gather(1, self.rows.to(r.device))
        if r.shape != (example, query):
            raise NoSuchPart(
                f"r has shape {tuple(r.shape)}, but site {self.index} ({self.name}) has "
                f"(example, query) = {(example, query)}."
            )
        return r.to(self.real.device, self._dtype) * self.real

    def _finite(self, result: Tensor) -> Tensor:
        """Never NaN in place of an answer."""
        if not result.sum().isfinite():
            raise non_finite(f"some row of site {self.index} ({self.name})")
        return result

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self.source.values.dtype, torch.float32)

    def _choose(self, part: Literal["head", "row"], wanted: Rows) -> Tensor:
        """Validated indices of heads or query rows."""
        size = self.shape[1 if part == "head" else 2]
        if wanted is None:
            return torch.arange(size, device=self.real.device)
        indices = whole_numbers(f"{part}s", wanted)
        for index in indices:
            if not -size <= index < size:
                raise NoSuchPart(
                    f"{part}s={wanted!r}: site {self.index} ({self.name}) has {size} {part}s, "
                    f"so {index} is not there. Choose from 0 to {size - 1}."
                )
        return torch.tensor([index % size for index in indices], device=self.real.device)


def row_blocks(source: Given | Fused, rows: Tensor) -> Iterator[Tile]:
    """All weights of the given rows, a block of rows at a time."""
    example, head, _, _ = source.shape
    for start in range(0, len(rows), TILE_ROWS):
        span = slice(start, min(start + TILE_ROWS, len(rows)))
        yield slice(0, example), slice(0, head), span, source.tile(slice(0, head), rows[span])


@lru_cache(maxsize=8)
def _triangle(size: int, device: torch.device) -> Tensor:
    """True where a key comes after the query."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def at_least_float(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
