"""What to do to hidden states, and where: `regard.edits.state`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from regard.errors import BadEdit, choose, whole_numbers

At = Literal["block", "attention", "mlp", "entrance"]
AT: tuple[At, ...] = ("block", "attention", "mlp", "entrance")
Layers = int | Sequence[int] | None


class Variants:
    """Which variants of the inputs are at hand: ``variants``, of ``total``; None if none were asked for."""

    variants: range
    total: int | None

    def at_hand(self, given: Tensor, what: str) -> Tensor:
        """The part of ``(variant, …)`` that belongs to the variants at hand; one entry stands for all."""
        if self.total is None or given.shape[0] not in (1, self.total):
            asked = "no variants were" if self.total is None else f"{self.total} variants were"
            raise BadEdit(f"{what} of shape {tuple(given.shape)} begins with a variant axis, but {asked} asked for.")
        return given if given.shape[0] == 1 else given[self.variants.start : self.variants.stop]


@dataclass(frozen=True, eq=False)
class StatePlace(Variants):
    """Where an edit of states acts.

    Args:
        at: "block", "attention", "mlp" or "entrance".
        layer: number of the site whose block it is; None at the entrance.
        name: the site's name; at the entrance which sequence enters: "rows", or "source".
        real: ``(example, row)``, False at padding.
        variants: the numbers of the variants at hand; one if none were asked for.
        total: how many variants were asked for; None if none were, and then the state has no variant axis.
    """

    at: At
    layer: int | None
    name: str
    real: Tensor
    variants: range
    total: int | None


@dataclass(frozen=True, eq=False)
class StateEdit:
    """A change of hidden states. Made by `regard.edits.state`; its arguments are described there."""

    name: str
    change: Callable[[Tensor, StatePlace], Tensor]
    at: At
    layers: Layers


def state(change: Callable[[Tensor, StatePlace], Tensor], *, at: At = "block", layers: Layers = None) -> StateEdit:
    """Put other hidden states in place of the model's. Differentiable with respect to what the change holds.

    Args:
        change: ``change(state, place)`` returns a state of the same shape, ``(example, row, channel)``, with a variant
            axis before it when variants are run. All rows are there; what it makes of padding is not used.
        at: "block": what is handed on after the block of a site; "attention": what its attention adds to that;
            "mlp": what the rest of the block adds; "entrance": the vectors that the input enters as. In blocks with
            the norm after the sum there is only "block": see `regard.attention.states`.
        layers: numbers of sites; None: everywhere. Of the entrance there is one.

    Example:
        >>> import regard
        >>> silent = regard.edits.state(lambda state, place: state * 0, at="mlp", layers=[0, 1])
    """
    choose("at", at, AT)
    name = f"state at {at}"
    if not callable(change):
        raise BadEdit(f"{name}: change={change!r} must be a function of (state, place).")
    try:
        inspect.signature(change).bind("state", "place")
    except (TypeError, ValueError) as problem:
        raise BadEdit(f"{name}: change must take (state, place): {problem}.") from None
    if layers is not None:
        layers = whole_numbers(f"{name}: layers", layers)
        if at == "entrance":
            raise BadEdit(f"{name}: layers={layers}: an input enters once. Leave layers out.")
    return StateEdit(name, change, at, layers)
