"""What to do to attention weights, and where: `regard.edits`.

An edit is a pure function of weights whose last axes are ``(example, head, row, key)``, with a variant axis before
them when `regard.intervene` is asked for variants. Each is restricted by ``sites=`` (a number, a name, a kind such as
"cross", or several), ``heads=`` and ``rows=`` ("all", "readout", or numbers). Numbers of rows and keys count the real
ones of each example, as `Trace.at` does: padding is not counted, and never edited.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from regard.attention.sharding import Among
from regard.attention.state_edits import StateEdit as StateEdit
from regard.attention.state_edits import Variants
from regard.attention.state_edits import state as state
from regard.errors import BadEdit, NoSuchPart, whole_numbers

Sites = int | str | Sequence[int | str] | None
Heads = int | Sequence[int] | None
Rows = Literal["all", "readout"] | int | Sequence[int]


@dataclass(frozen=True, eq=False)
class Place(Variants):
    """Where an edit acts.

    Args:
        site: number of the site.
        name: its name.
        heads: the heads that are edited; those that this process holds, if the model is spread over several.
        rows: ``(example, row)``: the query row that each row of the weights is; padded with real rows.
        allowed: ``(example, head, row, key)``, True where the model's mask lets a row see a key (with a variant axis
            before them if there are variants). A bias of −9,000 or less hides a key.
        special: ``(example, 1, 1, key)``, True at special tokens.
        real: ``(example, key)``, False at padding.
        variants: the numbers of the variants at hand; one if none were asked for.
        total: how many variants were asked for; None if none were, and then no tensor has a variant axis.
        span: which of all edited rows these are, where they come in blocks.
        edited: how many rows of each example are edited in all.
        among: which of all edited heads these are, if the model is spread over processes; see `at_heads`.
    """

    site: int
    name: str
    heads: tuple[int, ...]
    rows: Tensor
    allowed: Tensor
    special: Tensor
    real: Tensor
    variants: range
    total: int | None
    span: slice
    edited: int
    among: Among | None = None

    @property
    def edited_heads(self) -> int:
        """How many heads are edited, in all processes."""
        return len(self.heads) if self.among is None else self.among.total

    def of_all(self, shape: Sequence[int]) -> tuple[int, ...]:
        """``(…, head, row, key)`` with all edited heads instead of those at hand."""
        return (*shape[:-3], self.edited_heads, *shape[-2:])

    def at_heads(self, given: Tensor, shape: Sequence[int]) -> Tensor:
        """What was given for all edited heads, as ``(…, head, row, key)`` of those at hand."""
        every = given.expand(self.of_all(shape))
        return every if self.among is None else self.among.held(every)


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of attention weights. Made by the functions of `regard.edits`.

    Args:
        name: what messages call it.
        change: weights and their `Place` to new weights of the same shape.
        sites: where; None: everywhere.
        heads: which heads; None: all.
        rows: which query rows: "all", "readout" (those the prediction is read from), or numbers.
        normalised: rows must stay on the simplex, and keys that the mask hides must stay 0.
        factor: for edits that only multiply rows: the factor, of the shape asked for, ``(…, example, head, 1, 1)``,
            from which the change follows; the kernel stays fused.
        fused: "uniform" or "detach": what the kernel itself can be asked for.
        handed: for edits of what heads hand on: it, ``(…, example, head, row, channel)``, and the `Place` to the same
            shape; weights are left alone.
    """

    name: str
    change: Callable[[Tensor, Place], Tensor]
    sites: Sites = None
    heads: Heads = None
    rows: Rows = "all"
    normalised: bool = True
    factor: Callable[[Place, tuple[int, ...]], Tensor] | None = None
    fused: Literal["uniform", "detach"] | None = None
    handed: Callable[[Tensor, Place], Tensor] | None = None


def permute(
    seed: int, *, shared: bool = False, special: bool = False, sites: Sites = None, heads: Heads = None,
    rows: Rows = "readout",
) -> Edit:  # fmt: skip
    """Shuffle the weights of each row among the keys that it may see.

    Args:
        seed: with the site, the number of the variant and the batch it fixes the permutation.
        shared: the same permutation for all heads; otherwise each head has its own.
        special: special tokens take part; otherwise they keep their weight.
        sites: where; None: everywhere.
        heads: which heads; None: all.
        rows: which query rows.
    """

    (seed,) = whole_numbers("seed", seed)
    if seed < 0:
        raise BadEdit(f"permute: seed={seed!r} must be 0 or more.")

    def change(weights: Tensor, place: Place) -> Tensor:
        example, _, row, key = weights.shape[-4:]
        among = None if shared else place.among  # each head has the numbers that it has when all are in one process
        shape = (row, example, 1 if shared else place.edited_heads, key)
        drawn = np.stack([_noise(shape, [seed, place.site, variant], place.span.start) for variant in place.variants])
        drawn = drawn if among is None else drawn[:, :, :, among.places.numpy(force=True)]
        noise = torch.from_numpy(drawn).permute(0, 2, 3, 1, 4).to(weights.device)  # variant example head row key
        noise = noise[0] if place.total is None else noise
        moves = place.allowed if special else place.allowed & ~place.special
        position = torch.arange(key, device=weights.device)
        # what moves is drawn in two orders, what stays comes after it in the same order in both
        taken = torch.where(moves, noise, 2.0 + position).argsort(-1)
        put = torch.where(moves, position / key, 2.0 + position).argsort(-1)
        taken, put = taken.expand_as(weights), put.expand_as(weights)
        return torch.zeros_like(weights).scatter(-1, put, weights.gather(-1, taken))

    return Edit(f"permute({seed})", change, sites, heads, rows)


def uniform(*, sites: Sites = None, heads: Heads = None, rows: Rows = "all") -> Edit:
    """The same weight for every key that the mask lets a row see; the row keeps its sum."""

    def change(weights: Tensor, place: Place) -> Tensor:
        allowed = place.allowed.to(weights)
        return allowed / allowed.sum(-1, keepdim=True).clamp_min(1) * weights.sum(-1, keepdim=True)

    return Edit("uniform()", change, sites, heads, rows, fused="uniform")


def zero(
    positions: int | Sequence[int] | Tensor, renormalise: bool = True, *, sites: Sites = None, heads: Heads = None,
    rows: Rows = "readout",
) -> Edit:  # fmt: skip
    """Take the weight off some keys; the others share it in proportion. A row left without keys is 0.

    Args:
        positions: numbers of keys, in every example; or a bool tensor ``(example, key)`` or
            ``(variant, example, key)``.
        renormalise: give the others what was taken; otherwise it is lost.
        sites: where; None: everywhere.
        heads: which heads; None: all.
        rows: which query rows.
    """

    mask = positions if isinstance(positions, Tensor) and positions.dtype == torch.bool else None
    numbers = whole_numbers("positions", positions) if mask is None else mask

    def change(weights: Tensor, place: Place) -> Tensor:
        gone = _keys(numbers, weights, place)
        kept = weights.masked_fill(gone, 0.0)
        if not renormalise:
            return kept
        left = kept.sum(-1, keepdim=True)
        return kept * (weights.sum(-1, keepdim=True) / left.clamp_min(torch.finfo(left.dtype).tiny)).where(left > 0, 0)

    return Edit(f"zero({_shown(positions)})", change, sites, heads, rows, normalised=False)


def replace(
    weights: Tensor, *, allow_unnormalised: bool = False, sites: Sites = None, heads: Heads = None,
    rows: Rows = "readout",
) -> Edit:  # fmt: skip
    """Put other weights in place of the model's. Differentiable with respect to them.

    Args:
        weights: broadcasts to ``(example, head, row, key)``, or ``(variant, example, head, row, key)``.
        allow_unnormalised: take rows that do not sum to 1 (or to what they summed to), are negative, or give weight
            to keys that the mask hides.
        sites: where; None: everywhere.
        heads: which heads; None: all.
        rows: which query rows.
    """
    given = _tensor("replace: weights", weights)

    def change(old: Tensor, place: Place) -> Tensor:
        new = place.at_hand(given, "replace: weights") if given.dim() == 5 else given
        shape = (*old.shape[:-2], place.edited, old.shape[-1])
        try:
            return place.at_heads(new.to(old.dtype), shape)[..., place.span, :]
        except RuntimeError:
            raise BadEdit(
                f"replace: weights of shape {tuple(given.shape)} do not fit site {place.site} ({place.name}), where "
                f"({'variant, ' * (old.dim() == 5)}example, head, edited row, key) is {place.of_all(shape)}."
            ) from None

    return Edit("replace", change, sites, heads, rows, normalised=not allow_unnormalised)


def scale(alpha: float | Tensor, *, sites: Sites = None, heads: Heads = None, rows: Rows = "all") -> Edit:
    """Multiply the weights by ``alpha``: a number, or one for each variant. Differentiable with respect to it."""
    given = _tensor("scale: alpha", alpha)
    if given.dim() > 1:
        raise BadEdit(f"scale: alpha has shape {tuple(given.shape)}; it is a number, or one for each variant.")

    def factor(place: Place) -> Tensor:
        return place.at_hand(given[:, None, None, None, None], "scale: alpha") if given.dim() else given

    return _multiply("scale", factor, sites, heads, rows)


def gate(heads: Heads, values: float | Tensor, *, sites: Sites = None, rows: Rows = "all") -> Edit:
    """Multiply what each head contributes by a value of its own. Differentiable with respect to the values.

    Args:
        heads: which heads; None: all.
        values: ``(head,)`` in the order of ``heads``, ``(example, head)`` or ``(variant, example, head)``.
        sites: where; None: everywhere.
        rows: which query rows.
    """
    given = _tensor("gate: values", values)

    def factor(place: Place) -> Tensor:
        if given.dim() > 3 or (given.dim() and given.shape[-1] not in (1, place.edited_heads)):
            raise BadEdit(
                f"gate: values of shape {tuple(given.shape)} do not fit {place.edited_heads} heads at site "
                f"{place.site} ({place.name}). Pass (head,), (example, head) or (variant, example, head)."
            )
        spread = given[..., None, None] if given.dim() else given
        return place.at_hand(spread, "gate: values") if given.dim() == 3 else spread

    return _multiply("gate", factor, sites, heads, rows)


def hand_on(
    values: float | Tensor, *, where: Tensor | None = None, sites: Sites = None, heads: Heads = None,
    rows: Rows = "all",
) -> Edit:  # fmt: skip
    """Put other numbers in place of what heads hand on: A·V, before the output projection. Differentiable by them.

    Comes after edits of weights at the same site, which it leaves nothing to change.

    Args:
        values: broadcasts to ``(example, head, row, channel)``, or ``(variant, example, head, row, channel)``; rows are
            all of the site's, also where only some are edited.
        where: bool, ``(head,)``, ``(example, head)`` or ``(variant, example, head)``: which of the heads that are named
            are replaced; None: all.
        sites: where; None: everywhere.
        heads: which heads; None: all.
        rows: which query rows.
    """
    given = _tensor("hand_on: values", values)
    if where is not None and (not isinstance(where, Tensor) or where.dtype != torch.bool or where.dim() > 3):
        raise BadEdit(f"hand_on: where={where!r} must be a bool tensor (head,), (example, head) or with variants.")

    def handed(old: Tensor, place: Place) -> Tensor:
        new = place.at_hand(given, "hand_on: values") if given.dim() == 5 else given
        chosen = torch.ones((), dtype=torch.bool) if where is None else where[..., None, None]
        chosen = place.at_hand(chosen, "hand_on: where") if chosen.dim() == 5 else chosen
        try:
            new = place.at_heads(new.to(old), old.shape)
            return new.where(place.at_heads(chosen.to(old.device), old.shape), old)
        except RuntimeError:
            raise BadEdit(
                f"hand_on: values of shape {tuple(given.shape)}"
                f"{'' if where is None else f' and where of shape {tuple(where.shape)}'} do not fit site {place.site} "
                f"({place.name}), where ({'variant, ' * (old.dim() == 5)}example, head, row, channel) is "
                f"{place.of_all(old.shape)}."
            ) from None

    return Edit("hand_on", lambda weights, _: weights, sites, heads, rows, handed=handed)


def detach(*, sites: Sites = None, heads: Heads = None, rows: Rows = "all") -> Edit:
    """The same weights, as constants: no gradient flows through them into queries and keys."""
    return Edit("detach()", lambda weights, place: weights.detach(), sites, heads, rows, fused="detach")


def custom(
    change: Callable[[Tensor, Place], Tensor], *, allow_unnormalised: bool = False, sites: Sites = None,
    heads: Heads = None, rows: Rows = "all",
) -> Edit:  # fmt: skip
    """A function of your own: ``change(weights, place)`` returns weights of the same shape.

    Example:
        >>> import regard
        >>> last = regard.edits.custom(lambda weights, place: weights.flip(-1))  # looks at the mirror image
    """
    if not callable(change):
        raise BadEdit(f"edits: {change!r} is not an edit. Use the functions of regard.edits, or pass a function.")
    name = getattr(change, "__name__", type(change).__name__)
    if getattr(change, "__module__", None) == __name__ and name != "<lambda>":
        raise BadEdit(f"edits: {name} is not called. Write regard.edits.{name}(…), with parentheses.")
    try:
        inspect.signature(change).bind("weights", "place")
    except (TypeError, ValueError) as problem:
        raise BadEdit(f"edits: {name} must take (weights, place): {problem}.") from None

    def changed(weights: Tensor, place: Place) -> Tensor:
        return change(weights, place) if place.heads else weights  # this process may hold none of the heads

    return Edit(name, changed, sites, heads, rows, normalised=not allow_unnormalised)


def _multiply(name: str, given: Callable[[Place], Tensor], sites: Sites, heads: Heads, rows: Rows) -> Edit:
    def factor(place: Place, shape: tuple[int, ...]) -> Tensor:
        values = given(place)
        try:
            return place.at_heads(values, shape)
        except RuntimeError:
            raise BadEdit(
                f"{name}: {tuple(values.shape)} does not fit site {place.site} ({place.name}), where "
                f"(…, example, head, 1, 1) is {place.of_all(shape)}."
            ) from None

    def change(weights: Tensor, place: Place) -> Tensor:
        return weights * factor(place, (*weights.shape[:-2], 1, 1)).to(weights)

    return Edit(name, change, sites, heads, rows, normalised=False, factor=factor)


def _noise(shape: tuple[int, int, int, int], seed: Sequence[int], first: int) -> np.ndarray:
    """Uniform numbers ``(row, …)`` that are the same however rows are cut into blocks: a counter gives them."""
    row, *rest = shape
    width = -(-int(np.prod(rest)) // 4) * 4  # the counter moves by four numbers
    counter = np.random.Philox(np.random.SeedSequence(seed)).advance(first * width // 4)
    return np.random.Generator(counter).random((row, width))[:, : int(np.prod(rest))].reshape(shape)


def _keys(positions: list[int] | Tensor, weights: Tensor, place: Place) -> Tensor:
    """Keys as a mask that broadcasts to the weights."""
    if isinstance(positions, Tensor):
        if positions.dim() not in (2, 3) or positions.shape[-2:] != place.real.shape:
            raise BadEdit(
                f"zero: a mask of shape {tuple(positions.shape)} does not fit site {place.site} ({place.name}), where "
                f"(example, key) is {tuple(place.real.shape)}. Pass that, or (variant, example, key)."
            )
        gone = positions.to(weights.device)[..., None, None, :]
        return place.at_hand(gone, "zero: a mask") if positions.dim() == 3 else gone
    where = f"zero: positions={positions} at site {place.site} ({place.name})"
    gone = torch.zeros_like(place.real).scatter(1, numbered(place.real, positions, where), True)
    return gone[:, None, None]


def numbered(real: Tensor, numbers: list[int], where: str) -> Tensor:
    """``(example, number)``: which row or key each number is, counting the real ones of each example."""
    counts = real.sum(-1, keepdim=True)
    least = int(counts.min())
    if missing := [number for number in numbers if not -least <= number < least]:
        raise NoSuchPart(f"{where}: {missing} are not there in every example. There are 0 to {least - 1}.")
    ranks = torch.tensor(numbers, device=real.device)
    ranks = torch.where(ranks < 0, counts + ranks, ranks)
    return (~real).to(torch.int8).argsort(dim=-1, stable=True).gather(1, ranks)


def _tensor(name: str, value: object) -> Tensor:
    try:
        given = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise BadEdit(f"{name}={value!r} is neither a number nor a tensor.") from None
    if not given.detach().isfinite().all():
        raise BadEdit(f"{name} holds NaN or Inf.")
    return given


def _shown(positions: object) -> str:
    return f"{tuple(positions.shape)} mask" if isinstance(positions, Tensor) else str(positions)
