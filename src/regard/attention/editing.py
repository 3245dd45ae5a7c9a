"""Edits, made while the model runs: a tape that hands on other results than the sites' own.

The kernel stays fused. Only the rows that are edited are computed explicitly and written into its result; edits that
multiply rows, or replace what heads hand on, change its result, and what the kernel itself can do (uniform, detached
weights) it is asked to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.checkpoints import recompute_inside
from regard.attention.edits import Edit, Place
from regard.attention.replay import CannotReplay
from regard.attention.running import Gradients, undisturbed
from regard.attention.sharding import Among, Shard
from regard.attention.sites import Kind
from regard.attention.sources import HIDDEN, Fused, Given, at_least_float
from regard.attention.tape import Reading, Record, Tape, attend_again, writable
from regard.errors import BadEdit, NotReproduced
from regard.types import Batch

if TYPE_CHECKING:
    from regard.attention.states import Changes

BLOCK_BYTES = 256 << 20  # of explicit weights, where there is no graph that would keep them anyway
SLACK = 1e-4  # of row sums; optimisers and half precision do not hit 1 more closely


@dataclass(frozen=True, eq=False)
class Spot:
    """What edits need to know of a site before the run."""

    index: int
    name: str
    kind: Kind
    shape: tuple[int, int, int, int]
    real: Tensor  # example query
    rows: Tensor | None  # example query: the row that each query stands for, where only some are computed
    special: Tensor  # example key
    real_keys: Tensor  # example key
    shard: Shard | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """One edit at one site.

    Args:
        edit: what is done.
        heads: ``(head,)``: places among the heads that this process holds.
        rows: ``(example, row)``, padded by repeating; without a variant axis.
        valid: ``(example, row)``, False where ``rows`` is padding.
        among: which of the edited heads these are, where the model is spread over processes.
    """

    edit: Edit
    heads: Tensor
    rows: Tensor
    valid: Tensor
    among: Among | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What to do at which site, for a batch of ``variants`` times the same examples.

    Args:
        steps: for each edited site its steps, in order.
        spots: all sites, as a plain run saw them.
        readings: of all sites, as settled for this batch size.
        variants: the variants of this run.
        total: how many there are in all; None if none were asked for.
        gradients: whether a backward pass will follow; "edits": the graph begins at the first edited site.
        replayed: whether what lies upstream is not run but returned.
        leaf: the site whose edited result is the only leaf of the graph, to differentiate by; None: there is none.
        states: edits of hidden states, made beside these.
    """

    steps: dict[int, list[Step]]
    spots: Sequence[Spot]
    readings: Sequence[Reading]
    variants: range
    total: int | None
    gradients: Gradients
    replayed: bool = False
    leaf: int | None = None
    states: Changes | None = None


class Editor(Tape):
    """Runs one forward pass with edits. Keeps nothing of it.

    Args:
        model: the model that will run.
        batch: what it will run on: the variants one after the other, each with all examples.
        plan: what to do where.
        first: number of the first site that will be seen (not 0 when a part of the model is recomputed).
        recomputes: whether this is the recomputation of a checkpoint.
    """

    def __init__(self, model: nn.Module, batch: Batch, plan: Plan, first: int = 0, *, recomputes: bool = False) -> None:
        super().__init__(model, batch)
        self.model = model
        self.plan = plan
        self.count = first
        self.recomputes = recomputes
        self.reached: set[int] = set()
        self.leaf_result: tuple[Record, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Where the next site is edited, which keys may be seen must be known."""
        self.follower.looks_for_masks = self.count in self.plan.steps
        return super().__torch_function__(func, types, args, kwargs)

    def verify(self) -> None:
        """After the run: no edited site was passed over, or its edits would be lost without a word."""
        for number in self.plan.steps.keys() - self.reached:
            if self.plan.replayed:
                raise CannotReplay(f"site {number} was not seen again")
            raise NotReproduced(
                f"site {number} ({self.plan.spots[number].name}) was not reached with these edits: the model takes "
                "another path. Edit later sites, or one at a time."
            )

    def _keep(self, record: Record, result: Tensor) -> None:
        """Nothing: the sites of many variants would fill the memory."""
        if self.plan.gradients:
            first = self.count
            found = recompute_inside(lambda sites: self._again(first, sites), first)
            if found and self.plan.replayed:
                raise CannotReplay("activations are checkpointed, and would be recomputed in full")

    @contextmanager
    def _again(self, first: int, sites: set[int]) -> Iterator[None]:
        """The same edits, and the same modes, for a part of the model that is recomputed."""
        with undisturbed(self.model), Editor(self.model, self.batch, self.plan, first, recomputes=True) as editor:
            yield
        if missed := sorted(sites & self.plan.steps.keys() - editor.reached):
            raise NotReproduced(
                f"site {missed[0]} ({self.plan.spots[missed[0]].name}) was not seen again when its checkpoint was "
                "recomputed: its softmax lies outside. Switch checkpointing off for gradients of edited attention."
            )

    def edit(self, record: Record, source: Given | Fused, result: Tensor, dropout: float = 0.0) -> Tensor:
        """The site's result with its edits made."""
        number = self.count - 1
        self.reached.add(number)
        steps = self.plan.steps.get(number)
        if not steps:
            return result
        with nullcontext() if self.shards is None else self.shards.together(f"editing site {number}"):
            return self._edited(number, steps, record, source, result, dropout)

    def _edited(
        self, number: int, steps: list[Step], record: Record, source: Given | Fused, result: Tensor, dropout: float
    ) -> Tensor:
        if self.plan.gradients == "edits":
            torch.set_grad_enabled(True)  # `run` restores it
        planned = self.plan.spots[number].name
        if record.name != planned and not self.recomputes:  # a checkpointed function has no module
            raise NotReproduced(
                f"site {number} was {planned} in the plain run and is {record.name} with edits: the model takes "
                "another path. Edit later sites, or one at a time."
            )
        record.readings = (self.plan.readings[number],)
        before = record.fold(result)
        edited, view = writable(result, record.fold)
        if isinstance(source, Fused) and (asked := by_kernel(steps[0].edit, source)):
            source, steps = asked, steps[1:]
            again = attend_again(source, dropout)
            real = self.real_rows(record, 2)[:, None, :, None]  # padding rows stay as they are
            before = record.fold(again).where(real, before)
            view.copy_(before)
        first = next((place for place, step in enumerate(steps) if step.edit.handed), len(steps))
        steps, last = steps[:first], steps[first:]
        if all(step.edit.factor for step in steps):
            for step in steps:
                before = self._multiplied(step, record, before)
            view.copy_(before)
        else:
            self._write(steps, record, source.map(record.read), view, dropout)
        for step in last:
            view.copy_(self._handed(step, record, view.clone()))
        if number == self.plan.leaf:
            torch.set_grad_enabled(True)  # `run` restores it
            edited = edited.detach().requires_grad_()
            self.leaf_result = (record, edited)
            return edited.clone()  # the model may write into it
        return edited

    def _multiplied(self, step: Step, record: Record, out: Tensor) -> Tensor:
        """``out`` ``(example, head, query, channel)`` times the factor of an edit, at its heads and rows."""
        assert step.edit.factor is not None
        split = self._split(out)
        place = self._place(step, record, step.rows, torch.ones((), dtype=torch.bool), slice(0, None))
        factor = torch.ones(*split.shape[:-2], 1, 1, dtype=out.dtype, device=out.device)
        given = step.edit.factor(place, (*split.shape[:-3], len(step.heads), 1, 1))
        factor = factor.index_copy(-3, step.heads, given.to(out))
        return (split * factor.where(self._chosen(step, split), 1.0)).view_as(out)

    def _handed(self, step: Step, record: Record, out: Tensor) -> Tensor:
        """``out`` ``(example, head, query, channel)`` with what an edit puts in its place, at its heads and rows."""
        if step.edit.factor:
            return self._multiplied(step, record, out)
        if step.edit.handed is None:
            raise BadEdit(
                f"edit {step.edit.name} changes weights at site {self.count - 1} ({record.name}), after hand_on has "
                "put something else in place of what they make. Name hand_on last."
            )
        split = self._split(out)
        place = self._place(step, record, step.rows, torch.ones((), dtype=torch.bool), slice(0, None))
        new = split.index_copy(-3, step.heads, step.edit.handed(split.index_select(-3, step.heads), place))
        return new.where(self._chosen(step, split), split).view_as(out)

    def _chosen(self, step: Step, split: Tensor) -> Tensor:
        """``(example, 1, query, 1)``: the rows of ``(…, example, head, query, channel)`` that a step edits."""
        chosen = torch.zeros(split.shape[-4], split.shape[-2], dtype=torch.bool, device=split.device)
        chosen[step.valid.nonzero(as_tuple=True)[0], step.rows[step.valid]] = True
        return chosen[:, None, :, None]

    def _write(self, steps: list[Step], record: Record, source: Given | Fused, view: Tensor, dropout: float) -> None:
        """Compute the edited rows explicitly and write them into the result, in blocks where no graph is kept."""
        heads = torch.cat([step.heads for step in steps]).unique()
        rows = steps[0].rows if len(steps) == 1 else _union(steps, source.shape[2])
        block = rows.shape[1]
        if len(steps) == 1 and not torch.is_grad_enabled():
            row_bytes = view.shape[0] * len(heads) * source.shape[3] * 4
            block = max(1, min(block, BLOCK_BYTES // max(row_bytes, 1)))
        for start in range(0, rows.shape[1], block):
            span = slice(start, min(start + block, rows.shape[1]))
            self._write_block(steps, record, source, view, dropout, heads, rows[:, span], span)

    def _write_block(
        self, steps: list[Step], record: Record, source: Given | Fused, view: Tensor, dropout: float, heads: Tensor,
        rows: Tensor, span: slice,
    ) -> None:  # fmt: skip
        """Rows ``(example, row)`` of the chosen heads."""
        variants = len(self.plan.variants)
        every = rows.repeat(variants, 1)  # example-of-a-variant row
        weights, allowed = explicit(source, heads, every)
        written = torch.zeros(weights.shape[:3], dtype=torch.bool, device=weights.device)
        for step in steps:
            # where the step's rows and heads are among those computed
            mine = step.rows[:, span] if len(steps) == 1 else step.rows
            valid = (step.valid[:, span] if len(steps) == 1 else step.valid).repeat(variants, 1)
            head_at = torch.searchsorted(heads, step.heads)
            row_at = torch.searchsorted(rows, mine.contiguous()).repeat(variants, 1) if len(steps) > 1 else None
            part, seen = weights[:, head_at], allowed[:, head_at]
            if row_at is not None:
                part, seen = (x.take_along_dim(row_at[:, None, :, None], 2) for x in (part, seen))
            new = self._changed(step, record, part, seen, mine, valid, span if len(steps) == 1 else slice(0, None))
            example, row = valid.nonzero(as_tuple=True)
            at = (example[:, None], head_at[None], (row if row_at is None else row_at[example, row])[:, None])
            weights = weights.index_put(at, new.transpose(1, 2)[example, row])
            written[at] = True
        share = view.shape[1] // source.values.shape[1]
        out = F.dropout(weights, dropout) @ at_least_float(of_heads(source.values, heads // share))
        example, head, row = written.nonzero(as_tuple=True)
        view[example, heads[head], every[example, row]] = out[example, head, row].to(view.dtype)

    def _changed(
        self, step: Step, record: Record, weights: Tensor, allowed: Tensor, rows: Tensor, valid: Tensor, span: slice
    ) -> Tensor:
        """What an edit makes of weights, after a look at whether it may."""
        place = self._place(step, record, rows, allowed, span)
        old = self._split(weights)
        mass = weights.detach().transpose(1, 2)[valid].sum(-1)  # before the edit, which may write into the weights
        what = f"edit {step.edit.name} at site {place.site} ({place.name})"
        try:
            new = step.edit.change(old, place)
        except Exception as raised:
            raised.add_note(f"raised by {what}")
            raise
        if not isinstance(new, Tensor) or new.shape != old.shape:
            got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise BadEdit(f"{what} returned {got}; the weights it was given have shape {tuple(old.shape)}.")
        if new.device != old.device:
            raise BadEdit(f"{what} returned a tensor on {new.device}; the weights are on {old.device}.")
        new = new.reshape(weights.shape).to(weights.dtype)
        shown = new.detach().transpose(1, 2)[valid]
        if not shown.isfinite().all():
            raise BadEdit(f"{what} returned NaN or Inf.")
        if step.edit.normalised and shown.numel():
            total = shown.sum(-1)
            off = torch.minimum((total - mass).abs(), (total - 1).abs()).flatten()
            lowest = float(shown.min())
            hidden = float(shown.where(~allowed.transpose(1, 2)[valid], 0).abs().sum(-1).max())
            problem = (
                f"has a negative weight ({lowest:.3g})" if lowest < -SLACK
                else f"has a row that sums to {float(total.flatten()[off.argmax()]):.4g}, not 1" if off.max() > SLACK
                else f"gives weight {hidden:.3g} to keys that the mask hides" if hidden > SLACK
                else None
            )  # fmt: skip
            if problem:
                raise BadEdit(f"{what} {problem}. Pass allow_unnormalised=True if that is meant.")
        return new

    def _place(self, step: Step, record: Record, rows: Tensor, allowed: Tensor, span: slice) -> Place:
        site = self.count - 1
        spot = self.plan.spots[site]
        special, real = spot.special.to(rows.device), spot.real_keys.to(rows.device)
        allowed = self._split(allowed) if allowed.dim() else allowed
        first = 0 if spot.shard is None else spot.shard.held.start
        return Place(
            site, record.name, tuple((step.heads + first).tolist()), rows, allowed, special[:, None, None], real,
            self.plan.variants, self.plan.total, span, step.rows.shape[1], step.among,
        )  # fmt: skip

    def _split(self, x: Tensor) -> Tensor:
        """``(variant, example, …)``, or as it is if no variants were asked for."""
        return x if self.plan.total is None else x.unflatten(0, (len(self.plan.variants), -1))


def of_heads(x: Tensor, heads: Tensor) -> Tensor:
    """``x[:, heads]``, without a copy where these are all of them."""
    return x if heads.tolist() == list(range(x.shape[1])) else x[:, heads]


def explicit(source: Given | Fused, heads: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``(example, head, row, key)`` with their graph, and which keys the mask lets each row see.

    ``heads`` is ``(head,)``, ``rows`` ``(example, row)``.
    """
    index = rows[:, None, :, None]
    if isinstance(source, Given):
        weights = at_least_float(of_heads(source.weights, heads).take_along_dim(index, 2))
        visible = weights.detach()
        if source.visible is not None:
            visible = of_heads(source.visible, heads).take_along_dim(index, 2)
        return weights, visible != 0
    share = source.q.shape[1] // source.k.shape[1]
    q = at_least_float(of_heads(source.q, heads).take_along_dim(index, 2)) * source.scale
    scores = q @ at_least_float(of_heads(source.k, heads // share)).mT
    allowed = torch.ones_like(scores, dtype=torch.bool)
    mask = source.mask
    if mask is not None:
        mask = mask[:, heads] if mask.shape[1] > 1 else mask
        mask = mask.take_along_dim(index, 2) if mask.shape[2] > 1 else mask
        if mask.dtype == torch.bool:
            allowed = allowed & mask
        else:
            scores = scores + mask
            allowed = allowed & (mask > HIDDEN)
    if source.causal:
        allowed = allowed & (torch.arange(scores.shape[-1], device=rows.device) <= index)
    scores = scores.masked_fill(~allowed, -torch.inf)
    blind = (
        scores.detach().amax(-1, keepdim=True) == -torch.inf
    )  # a row that sees no key at all: 0, and no NaN behind it
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return weights, allowed


def by_kernel(edit: Edit, source: Fused) -> Fused | None:
    """The arguments with which the kernel itself makes an edit of all heads and rows, if it can."""
    if edit.heads is not None or edit.rows != "all":
        return None
    if edit.fused == "detach":
        mask = source.mask if source.mask is None else source.mask.detach()
        return replace(source, q=source.q.detach(), k=source.k.detach(), mask=mask)
    if edit.fused == "uniform" and (source.mask is None or source.mask.dtype == torch.bool):
        return replace(source, q=torch.zeros_like(source.q))
    return None


def _union(steps: list[Step], queries: int) -> Tensor:
    """``(example, row)``: the rows of all steps, ascending, padded with the last."""
    chosen = torch.zeros(len(steps[0].rows), queries, dtype=torch.bool, device=steps[0].rows.device)
    for step in steps:
        chosen.scatter_(1, step.rows, True)
    return padded_rows(chosen)[0]


def padded_rows(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The True entries of each row of ``(example, row)`` as numbers, ascending; padded by repeating the last.

    Beside them a mask of the same shape, False at padding.
    """
    count = chosen.sum(-1, keepdim=True)
    order = (~chosen).to(torch.int8).argsort(dim=-1, stable=True)[:, : max(int(count.max()), 1)]
    place = torch.arange(order.shape[1], device=chosen.device)
    return order.take_along_dim(torch.minimum(place, (count - 1).clamp_min(0)), 1), place < count
