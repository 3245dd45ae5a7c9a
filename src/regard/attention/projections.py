"""The linear maps around a site: what its queries, keys and values were made by, and what becomes of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Onward:
    """How the result of a site is mixed into the stream of rows.

    Args:
        projection: ``(head, channel, output)``: the part of the output projection that each head goes through.
        residual: ``(example, query, output)``: what the projected result is added to; None if it was not seen.
        norm: weight and epsilon of the layer norm that the sum goes through, if nothing else does (post-norm).
        total: ``(example, query, output)``: the sum.
    """

    projection: Tensor
    residual: Tensor | None
    norm: tuple[Tensor, float] | None
    total: Tensor | None


@dataclass(frozen=True, eq=False)
class Norm:
    """What the features of a state were multiplied by before a linear map.

    Args:
        weight: ``(input,)``.
        centred: their mean had been subtracted (layer norm).
    """

    weight: Tensor
    centred: bool


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map, and the norm that what it takes has come through.

    Args:
        weight: ``(…, input)``; of a site ``(head, channel, input)``, the same for heads that share it.
        bias: ``(…)``.
        norm: of its input.
    """

    weight: Tensor
    bias: Tensor | None
    norm: Norm | None

    @property
    def folded(self) -> Tensor:
        """The map of the state before the norm, which then only divides by a number: W γ, without its mean if centred.

        W (γ ∘ (x − mean x)) / σ = (W γ − its mean over inputs) x / σ.
        """
        if self.norm is None:
            return self.weight
        weight = self.weight * self.norm.weight.to(self.weight.dtype)
        return weight - weight.mean(-1, keepdim=True) if self.norm.centred else weight


@dataclass(frozen=True, eq=False)
class Inward:
    """The linear maps that made what a site takes from the states of rows.

    Args:
        query: of each head, ``(head, channel, input)``; None where it is no linear map, as with rotary positions.
        key: likewise.
        value: likewise.
        why: by name why one is None.
    """

    query: Projection | None = None
    key: Projection | None = None
    value: Projection | None = None
    why: Mapping[str, str] = field(default_factory=dict)
