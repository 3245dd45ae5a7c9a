"""Where hidden states come out of a model: which call returns what the block around a site hands on, and adds.

A block takes the state x of rows and hands on y. Its parts are looked up in the numbers of a small run, not in the
names of modules: "block" is y; "attention" is the output a of a call such that y = x + a, or y = x + a + m; then "mlp"
is m, the output of another.

Usually x goes into, and y comes out of, the outermost submodule during which the site is the only one that runs. Some
models add in the code of an outer module (rtdl's FT-Transformer); they have "block" where a call returns y and all goes
on from there. Where a norm comes after the sum, as in BERT, y is no sum of x and something: there is "block" only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regard.attention.checkpoints import is_state
from regard.attention.replay import Call, Running, shadowed
from regard.attention.running import run, undisturbed
from regard.attention.sites import TOLERANCE
from regard.attention.sources import Fused, Given
from regard.attention.state_edits import At
from regard.attention.tape import Record, Tape
from regard.errors import RegardError
from regard.types import Batch, Subject


@dataclass(frozen=True)
class Outlet:
    """Where a state comes out: a call, which of the tensors that it returns, and whether rows come first there."""

    call: Call
    leaf: int
    rows_first: bool

    def take(self, output: Any) -> Tensor:
        """``(example, row, channel)`` of what the call returned."""
        state: Tensor = pytree.tree_leaves(output)[self.leaf]
        return state.transpose(0, 1) if self.rows_first else state

    def put(self, output: Any, state: Tensor) -> Any:
        """What the call returned, with another state."""
        leaves, tree = pytree.tree_flatten(output)
        leaves[self.leaf] = state.transpose(0, 1) if self.rows_first else state
        return pytree.tree_unflatten(leaves, tree)


Key = tuple[int, At]  # number of a site, and what of its block
Layout = dict[Key, Outlet | str]  # or why there is none
_known: WeakKeyDictionary[nn.Module, dict[Any, Layout]] = WeakKeyDictionary()


def layout_of(subject: Subject, batch: Batch) -> Layout:
    """Where the states of each site come out; looked up once for a model. Calls are keyed as in replay."""
    known = _known.setdefault(subject.model, {})
    shape = (len(batch) > 1, batch.source is None, max(batch.lengths) > 1)
    if shape in known:
        there = {id(module) for module in subject.model.modules()}
        calls = [one.call for one in known[shape].values() if isinstance(one, Outlet)]
        if all(module in there for call in calls for module, _ in call):
            return known[shape]
    known[shape] = _Finding(subject, batch).layout()
    return known[shape]


class _Sample(NamedTuple):
    """A few rows of a state: which tensor of a call it is, whether rows come first there, how many there are."""

    leaf: int
    rows_first: bool
    rows: int
    state: Tensor


@dataclass(eq=False)
class _Seen:
    """One call: when it ran, between which sites, and the states that it was given and returned."""

    call: Call
    begun: int
    before: int
    given: list[_Sample]
    returned: list[_Sample] = field(default_factory=list)
    ended: int = 0
    after: int = 0

    def holds(self, site: int) -> bool:
        """Whether that site ran in it, and no other."""
        return (self.before, self.after) == (site, site + 1)

    def outlet(self, sample: _Sample) -> Outlet:
        """Where a state comes out that it returned."""
        return Outlet(self.call, sample.leaf, sample.rows_first)


Part = tuple[_Seen, _Sample]  # a call and a state that it returned
Found = tuple[Outlet | str, Outlet | str, Outlet | str]  # block, attention, mlp


class _Silent(Tape):
    """All sites hand on zeros."""

    def edit(self, record: Record, source: Given | Fused, result: Tensor, dropout: float = 0.0) -> Tensor:
        """Zeros."""
        return torch.zeros_like(result)


class _Finding:
    """Looks for states in what the calls of a small run were given and returned."""

    def __init__(self, subject: Subject, batch: Batch) -> None:
        # as many examples as no axis of rows is long; attention between examples shows with two
        few = next(count for count in range(1 if len(batch) == 1 else 2, 6) if count not in batch.lengths)
        self.subject, self.batch = subject, batch.pick([place % len(batch) for place in range(few)])
        tape = Tape(subject.model, self.batch)
        self.seen = self._run(tape)
        self.rows = [record.source.shape[2] for record in tape.records]
        self.names = [f"site {number} ({record.name})" for number, record in enumerate(tape.records)]
        self.silent: dict[Call, _Seen] | None = None

    def layout(self) -> Layout:
        """Of every site."""
        names: tuple[At, ...] = ("block", "attention", "mlp")
        return {
            (site, at): outlet
            for site in range(len(self.names)) for at, outlet in zip(names, self._states(site), strict=True)
        }  # fmt: skip

    def _states(self, site: int) -> Found:
        holders = [
            one for one in self.seen
            if one.holds(site) and one.given and any(self.rows[site] in (1, y.rows) for y in one.returned)
        ]  # fmt: skip
        none = f"no submodule holds {self.names[site]} together with its residual connection."
        if not holders:
            return none, none, none
        for block in holders:  # the outermost first
            inner = [one for one in self.seen if one.call[: len(block.call)] == block.call and one is not block]
            parts = _parts(sorted(inner, key=lambda one: not one.holds(site)))
            y = block.returned[0]
            for x in block.given:
                if found := _summed(x, y, parts, parts):
                    return block.outlet(y), *self._added(found, site)
        if outer := self._outside(site, holders[0]):
            return outer
        if self._keeps_rows_apart(site, holders[0]):
            late = f"a norm comes after the sum in the block of {self.names[site]}: there is 'block' only."
            return holders[0].outlet(holders[0].returned[0]), late, late
        return none, none, none

    def _added(self, found: tuple[Part, Part | None], site: int) -> tuple[Outlet | str, Outlet | str]:
        (call, a), rest = found
        nothing = f"the block of {self.names[site]} adds nothing but attention."
        return call.outlet(a), nothing if rest is None else rest[0].outlet(rest[1])

    def _outside(self, site: int, attention: _Seen) -> Found | None:
        """Where the code of an outer module adds: x is seen before the attention, y after it, before the next site."""
        until = min((one.begun for one in self.seen if one.holds(site + 1)), default=2 * len(self.seen))
        since = max((one.ended for one in self.seen if one.holds(site - 1)), default=-1)
        earlier = [x for one in self.seen if since <= one.begun <= attention.begun for x in one.given]
        earlier += [x for one in self.seen if since <= one.ended < attention.begun for x in one.returned]
        later = [one for one in self.seen if attention.ended < one.begun <= until]
        parts, added = _parts([one for one in later if one.ended < until]), _parts([attention])

        def sums(ends: Sequence[Part]) -> Iterator[tuple[Part, tuple[Part, Part | None]]]:
            for end in reversed(ends):
                yield from ((end, found) for x in earlier if (found := _summed(x, end[1], added, parts)))

        for (call, y), found in sums(parts):
            if self._narrow(call.outlet(y), found[0]):
                return call.outlet(y), *self._added(found, site)
        for _, found in sums([(call, y) for call in later for y in call.given]):
            why = f"the residual connection around {self.names[site]} is in no submodule: no call hands on the state."
            return why, *self._added(found, site)
        return None

    def _narrow(self, outlet: Outlet, added: Part) -> bool:
        """Whether all that attention adds goes on through there: with another state there, it does not matter."""
        attention = added[0].outlet(added[1])
        outputs = []
        for silent in (False, True):

            def called(call: Call, forward: Running, silent: bool = silent) -> Any:
                output = forward()
                if silent and call == attention.call:
                    return attention.put(output, torch.zeros_like(attention.take(output)))
                if call == outlet.call:
                    state = outlet.take(output)
                    other = torch.randn(state.shape, generator=torch.Generator().manual_seed(0))
                    return outlet.put(output, other.to(state))
                return output

            with undisturbed(self.subject.model), shadowed(self.subject.model, called):
                outputs.append(run(self.subject, self.batch, Tape(self.subject.model, self.batch), gradients=False))
        one, other = outputs
        return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.abs().max()))

    def _keeps_rows_apart(self, site: int, block: _Seen) -> bool:
        """Whether rows still differ after a block whose site hands on nothing, as they do by a residual connection."""
        if self.silent is None:
            try:
                self.silent = {one.call: one for one in self._run(_Silent(self.subject.model, self.batch))}
            except RegardError:  # the model cannot do without its sites
                self.silent = {}
        again = self.silent.get(block.call)
        if again is None or not again.returned or self.rows[site] == 1:
            return False
        state = again.returned[0].state
        return not torch.allclose(state, state[:, :1].expand_as(state), atol=1e-6)

    def _run(self, tape: Tape) -> list[_Seen]:
        """The calls of submodules, in the order in which they began."""
        seen: list[_Seen] = []
        clock = iter(range(1 << 62))

        def called(call: Call, forward: Running) -> Any:
            seen.append(one := _Seen(call, next(clock), tape.count, self._sampled((forward.args, forward.keywords))))
            output = forward()
            one.returned, one.ended, one.after = self._sampled(output), next(clock), tape.count
            return output

        with undisturbed(self.subject.model), shadowed(self.subject.model, called):
            run(self.subject, self.batch, tape, gradients=False)
        return seen

    def _sampled(self, given: Any) -> list[_Sample]:
        """The states of rows among tensors."""
        found, size = [], len(self.batch)
        possible = {*self.batch.lengths, *self.batch.queries, 1}
        for leaf, one in enumerate(pytree.tree_leaves(given)):
            if is_state(one):
                rows_first = one.shape[0] != size
                state = one.transpose(0, 1) if rows_first else one
                if state.shape[0] == size and (rows := state.shape[1]) in possible:
                    found.append(_Sample(leaf, rows_first, rows, state[:, self._few(rows)].detach().clone()))
        return found

    def _few(self, rows: int) -> list[int]:
        """Some of the rows that are real in every example."""
        sequence = self.batch.sequence_of(rows)
        real = list(range(rows)) if sequence is None else sequence.real.all(0).nonzero().squeeze(-1).tolist()
        return sorted({real[0], real[len(real) // 2], real[-1]}) if real else [0]


def _parts(calls: Sequence[_Seen]) -> list[Part]:
    return [(call, one) for call in calls for one in call.returned]


def _summed(x: _Sample, y: _Sample, parts: Sequence[Part], others: Sequence[Part]) -> tuple[Part, Part | None] | None:
    """The first a among parts and m among others with y = x + a, or y = x + a + m."""
    for part in parts:
        if _same(y, x, part[1]):
            return part, None
    for part in parts:
        for other in others:
            if other[0] is not part[0] and _same(y, x, part[1], other[1]):
                return part, other
    return None


def _same(y: _Sample, x: _Sample, *parts: _Sample) -> bool:
    """Whether y is the sum: in each number, up to what its parts' sizes allow. A single row may be added to all."""
    widths = {one.state.shape[-1] for one in (y, x, *parts)}
    if x.rows != y.rows or len(widths) > 1 or any(one.rows not in (1, y.rows) for one in parts):
        return False
    if not all(one.state.any() for one in (x, *parts)):  # zeros add nothing
        return False
    every = [x.state.double(), *(one.state.double() for one in parts)]
    gap = y.state.double() - torch.stack(torch.broadcast_tensors(*every)).sum(0)
    size = torch.stack(torch.broadcast_tensors(*(one.abs() for one in every))).sum(0)
    return bool((gap.abs() <= TOLERANCE.get(y.state.dtype, 1e-4) * (size + 1e-3 * size.mean())).all())
