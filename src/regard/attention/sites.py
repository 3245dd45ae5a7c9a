"""One place in the forward pass where attention weights mix values, and what can be asked of it.

Rows are queries, columns are keys. Nothing here forms a whole attention matrix unless it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

from regard.attention.projections import Inward, Onward
from regard.attention.sharding import Shard, Together
from regard.attention.sources import TILE_ROWS, Fused, Given, at_least_float
from regard.errors import NoGradient, NoSuchPart, NotReproduced, non_finite, whole_numbers
from regard.memory import must_fit

Kind = Literal["self", "encoder", "decoder", "cross", "pool", "samples"]
Strand = Literal["rows", "source", "pool"]  # what queries and keys may be rows of
Rows = int | Sequence[int] | None


class Part(NamedTuple):
    """Which examples, heads and query rows a tile of weights holds."""

    examples: slice
    heads: slice
    rows: Tensor


# A tile of weights (example, head, row, key), which may be overwritten, to other numbers in their place.
Weigh = Callable[[Tensor, Part], Tensor]

PROVED = 4  # examples of a batch; all of 32 would cost as much as a pull
# of max |A·V − out| / max |out|; half precision rounds the model's own output
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


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
        source: where the weights come from; of a model that is spread over processes, those of the heads held here.
        real: ``(example, query)``, False at padding rows, whose weights are 0 by definition.
        real_keys: ``(example, key)``, False at padding keys.
        sample: rows of the model's own output, to prove the weights by.
        rows: ``(example, query)``, the row of the input that each query stands for, where a model computes only the
            rows it needs (the last block of an FT-Transformer asks for [CLS] alone); otherwise None.
        out_gradient: ``(example, head, query, channel)``, ∂target/∂(A·V), when the trace was asked for gradients; of
            the heads held here.
        gate_gradient: ``(example, head)``, ∂target/∂(a factor on all that a head hands on), likewise.
        onward: how the result is mixed into the rows, when the trace was asked to follow it and it could be told.
        inward: where queries, keys and values come from, when the trace was asked for it.
        shard: which heads this process holds, of a model that is spread over several; None: all.
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
    gate_gradient: Tensor | None = None
    onward: Onward | None = None
    inward: Inward | None = None
    shard: Shard | None = None

    def __repr__(self) -> str:
        return f"Site({self.index}, {self.name!r}, {self.kind!r}, shape={self.shape})"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(example, head, query, key)."""
        example, head, query, key = self.source.shape
        return example, head if self.shard is None else self.shard.heads, query, key

    @property
    def heads(self) -> int:
        """Number of heads, in all processes."""
        return self.shape[1]

    @property
    def held(self) -> range:
        """Numbers of the heads that this process holds: all, unless the model is spread over several."""
        return range(self.source.shape[1]) if self.shard is None else self.shard.held

    @property
    def values(self) -> Tensor:
        """``(example, head, key, channel)``: what the weights mix, expanded over heads that share it."""
        values = self.source.values
        values = values.repeat_interleave(len(self.held) // values.shape[1], dim=1)
        return values if self.shard is None else self.shard.of_all(values)

    @cached_property
    def proof(self) -> Proof:
        """Recomputed weights × values against the model's own output; done once, before anything is read."""
        if self.shard is None:
            return self._proved()
        with self.shard.shards.together(f"site {self.index} ({self.name})"):
            own = self._proved()
        extremes = torch.tensor([own.error, -own.mass[0], own.mass[1]], device=self.real.device)
        error, low, high = self.shard.shards.reduced(extremes, "max").tolist()
        return Proof(error, (-low, high))

    def _proved(self) -> Proof:
        some, head = self._proved_on, len(self.held)
        source = self.source.map(lambda x: x[some] if x.shape[0] > 1 else x)
        shown = self.real[some][:, self.sample.rows]  # example row
        weights = source.values.new_zeros(len(some), head, len(self.sample.rows), self.shape[3], dtype=self.dtype)
        for examples, heads, rows, tile in source.sweep(self.sample.rows):
            weights[examples, heads, rows, : tile.shape[-1]] = tile
        values = at_least_float(source.values)
        groups = values.shape[1]
        again = rearrange(weights, "e (g h) r k -> e g (h r) k", g=groups) @ values
        expected = rearrange(at_least_float(self.sample.out[some]), "e (g h) r c -> e g (h r) c", g=groups)
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

    @property
    def _proved_on(self) -> Tensor:
        """``(example,)``: a few of those that have a sampled row, from the fullest to the most padded."""
        counts = self.real[:, self.sample.rows].sum(-1)
        order = counts.argsort(descending=True, stable=True)[: max(int((counts > 0).sum()), 1)]
        return order[torch.linspace(0, len(order) - 1, min(len(order), PROVED)).long()]

    def weights(self, *, heads: Rows = None, rows: Rows = None) -> Tensor:
        """Attention weights ``(example, head, query, key)``, at least float32, of the heads and rows asked for.

        Padding rows are 0; what the model's mask hides is exactly 0.

        Shape: ``t.sites[3].weights(heads=0, rows=[0, 5])`` is ``(example, 1, 2, key)``.
        """
        chosen, wanted = self._choose("head", heads), self._choose("row", rows)
        _ = self.proof  # raises if the weights are not the model's
        example, _, _, key = self.shape
        result = torch.zeros(example, len(chosen), len(wanted), key, dtype=self.dtype, device=wanted.device)
        for places in torch.arange(len(wanted), device=wanted.device).split(TILE_ROWS):
            real = self.real[:, None, wanted[places], None]
            for place, part in self._spans(heads, chosen):
                tile = self.source.tile(self._here(part), wanted[places])
                result[:, place : place + part.stop - part.start, places] = tile.where(real, 0)
        return self._finite(self._joined(result))

    def gradients(self, *, heads: Rows = None, rows: Rows = None) -> Tensor:
        """∂target/∂A ``(example, head, query, key)``: ⟨∂target/∂out_q, v_k⟩, because out = A·V.

        Keys that the mask hides have a gradient, too: what would happen if they were given weight. Padding has none.
        """
        chosen, wanted = self._choose("head", heads), self._choose("row", rows)
        self._must_have_gradients()
        example, _, _, key = self.shape
        result = torch.zeros(example, len(chosen), len(wanted), key, dtype=self.dtype, device=wanted.device)
        for place, part in self._spans(heads, chosen):
            tile = self.gradient(Part(slice(None), part, wanted), key)
            result[:, place : place + part.stop - part.start] = tile
        return self._joined(result) * self.real[:, None, wanted, None] * self.real_keys[:, None, None]

    def gradient(self, part: Part, keys: int) -> Tensor:
        """∂target/∂A of a part, ``(example, head, row, key)``, for the first so many keys."""
        self._must_have_gradients()
        assert self.out_gradient is not None
        share, heads = len(self.held) // self.source.values.shape[1], self._here(part.heads)
        groups = slice(heads.start // share, (heads.stop - 1) // share + 1)
        values = at_least_float(self.source.values[part.examples, groups, :keys])
        gradient = at_least_float(self.out_gradient[part.examples, heads][:, :, part.rows])
        tile = rearrange(gradient, "e (g h) r c -> e g (h r) c", g=values.shape[1]) @ values.mT
        return tile.view(*gradient.shape[:3], keys)

    def _must_have_gradients(self) -> None:
        if self.out_gradient is None:
            raise NoGradient(
                f"site {self.index} ({self.name}) has no gradients: trace with gradients=True and a target."
            )

    def pull(
        self, r: Tensor, *, per_head: bool = False, weigh: Weigh | None = None, together: Together = False
    ) -> Tensor:
        """r·Ā: how the weight ``r`` on query rows spreads over keys, without ever forming A.

        Args:
            r: ``(example, row)``. Rows where it is zero for all examples cost nothing.
            per_head: r·A of each head instead of the mean over heads.
            weigh: puts other numbers in place of a tile of weights, before they are summed.
            together: ``weigh`` needs all heads of a row at once, and may return one in place of them: their "sum",
                the largest ("max") or smallest ("min"), the "same" for any of them, or anything else (True).

        Returns:
            ``(example, key)``, or ``(example, head, key)`` with ``per_head``. Memory is linear in tokens.
        """
        example, head, _, key = self.shape
        r = self.on_queries(r)
        result = r.new_zeros(example, head if per_head else 1, key)
        for part, tile in self._tiles(r.any(0).nonzero().squeeze(-1), weigh, together):
            row = r[part.examples][:, part.rows]
            end = tile.shape[-1]
            if per_head:
                result[part.examples, part.heads, :end] += torch.einsum("er,ehrk->ehk", row, tile)
            else:  # heads and rows are one axis of a single vector–matrix product
                row = row.repeat(1, tile.shape[1]).unsqueeze(1) / (tile.shape[1] if together else head)
                result[part.examples, :, :end] += row @ tile.flatten(1, 2)
        result = self._joined(result, False if per_head else together, r)
        return self._finite(result if per_head else result[:, 0])

    def matrix(self, *, per_head: bool = False, weigh: Weigh | None = None, together: Together = False) -> Tensor:
        """Ā itself, ``(example, query, key)``, or ``(example, head, query, key)``; padding rows are 0.

        The arguments are those of `pull`.
        """
        example, head, query, key = self.shape
        shape = (example, head if per_head else 1, query, key)
        must_fit(f"the matrix of site {self.index} ({self.name})", shape)
        _ = self.proof  # raises if the weights are not the model's
        result = torch.zeros(shape, dtype=self.dtype, device=self.real.device)
        for part, tile in self._tiles(self.real.any(0).nonzero().squeeze(-1), weigh, together):
            heads = part.heads if per_head else slice(0, 1)
            tile = tile if per_head else tile.sum(1, keepdim=True) / (tile.shape[1] if together else head)
            result[part.examples, heads][:, :, part.rows, : tile.shape[-1]] += tile
        result = self._joined(result.mul_(self.real[:, None, :, None]), False if per_head else together)
        return self._finite(result if per_head else result[:, 0])

    def _tiles(self, rows: Tensor, weigh: Weigh | None, together: Together) -> Iterator[tuple[Part, Tensor]]:
        """The weights of the given rows, or what is put in their place."""
        first = self.held.start
        for examples, heads, span, tile in self.source.sweep(rows, together=bool(together)):
            part = Part(examples, slice(heads.start + first, heads.stop + first), rows[span])
            yield part, tile if weigh is None else weigh(tile, part)

    def _spans(self, heads: Rows, chosen: Tensor) -> Iterator[tuple[int, slice]]:
        """Those of the chosen heads that are held here, and the place of the first of each span among the chosen."""
        if heads is None:
            yield self.held.start, slice(self.held.start, self.held.stop)
            return
        for place, head in enumerate(chosen.tolist()):
            if head in self.held:
                yield place, slice(head, head + 1)

    def _here(self, heads: slice) -> slice:
        """Numbers of heads as places among those that are held here."""
        return heads if self.shard is None else self.shard.places(heads, f"site {self.index} ({self.name})")

    def _joined(self, result: Tensor, together: Together = False, r: Tensor | None = None) -> Tensor:
        """What all processes make of their heads, where there are several; ``r``: what rows were summed by."""
        return result if self.shard is None else self.shard.joined(result, together, r)

    def allowed(self, part: Part, keys: int) -> Tensor:
        """Which of the first so many keys the mask lets a row see: ``(example, head, row, key)``.

        Where the model forms its weights itself, keys of weight 0 count as hidden.
        """
        return self.source.allowed(part.examples, self._here(part.heads), part.rows, keys)

    def entropy(self, r: Tensor) -> Tensor:
        """Σ_q r_q · H(A_q) in nats for each head: ``(example, head)``. 0 looks at one key, log(keys) at all."""
        r = self.on_queries(r)
        result = r.new_zeros(self.shape[:2])
        for part, tile in self._tiles(r.any(0).nonzero().squeeze(-1), None, together=False):
            entropy = torch.special.entr(tile).sum(-1)
            result[part.examples, part.heads] += (entropy * r[part.examples, None, part.rows]).sum(-1)
        return self._finite(self._joined(result))

    def on_queries(self, r: Tensor) -> Tensor:
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
        return r.to(self.real.device, self.dtype) * self.real

    def _finite(self, result: Tensor) -> Tensor:
        """Never NaN in place of an answer."""
        if not result.sum().isfinite():
            raise non_finite(f"some row of site {self.index} ({self.name})")
        return result

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and what is made of them: at least float32."""
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
