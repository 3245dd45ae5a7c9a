"""The blocks around sites, and the states of the rows between them.

The block of a site is the outermost call of a submodule during which it is the only site that runs: a transformer
layer, or the half of one that holds one of two attentions. What goes in is the state before, what comes out the state
after it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regard.attention.checkpoints import is_state, with_leaf
from regard.attention.replay import PLAIN, Call, Running, shadowed
from regard.attention.running import must_differentiate, run, undisturbed
from regard.attention.sites import Site
from regard.attention.sources import Fused, Given
from regard.attention.tape import Record, Tape, attend_again, writable
from regard.attention.tracing import Trace
from regard.errors import NotServed
from regard.types import Batch


@dataclass(frozen=True, eq=False)
class Block:
    """One call that holds one site.

    Args:
        call: which call it is.
        again: does it again, with the arguments it had.
        before: ``(example, row, channel)``: the state of the rows that went in.
        after: the same of what came out.
        rows_first: the model has rows before examples.
    """

    call: Call
    again: Running
    before: Tensor
    after: Tensor
    rows_first: bool


def find_blocks(
    trace: Trace, batch: Batch | None = None, *, leaf: Call | None = None
) -> tuple[dict[int, Block], Tensor | None]:
    """The block of each site, in one forward pass; sites around which there is none are not there.

    Args:
        trace: of the same model.
        batch: what to run; None: what was traced.
        leaf: the call whose input is made a leaf of the graph, which is kept from there on; it is returned, too.
    """
    batch = batch or trace.batch
    if leaf is not None:
        must_differentiate(trace.subject.model)
    alike = len(batch) > 1 and any(site.shape[2] == len(batch) for site in trace.sites)
    # as many examples as rows: which axis is which is seen where there is one example
    known = find_blocks(trace, batch.pick([0]))[0] if alike else {}
    found: dict[int, Block] = {}
    leaves: list[Tensor] = []
    tape = Tape(trace.subject.model, batch)

    def called(call: Call, forward: Running) -> Any:
        before = tape.count
        if call == leaf:
            torch.set_grad_enabled(True)  # `run` restores it
            args, keywords, start = with_leaf(forward.args, forward.keywords)
            forward = Running(forward.func, *args, **keywords)
            leaves.append(start)
        again = Running(forward.func, *_own(forward.args), **_own(forward.keywords))  # a cache changes as it is used
        output = forward()
        if tape.count == before + 1:
            shape = (len(batch), trace.sites[before].shape[2])
            for rows_first in [known[before].rows_first] if before in known else [False, True]:
                states = [_state(x, shape, rows_first) for x in ((forward.args, forward.keywords), output)]
                if states[0] is not None and states[1] is not None:
                    # outer calls end later, and stay
                    found[before] = Block(call, again, states[0], states[1], rows_first)
                    break
        return output

    with undisturbed(trace.subject.model), shadowed(trace.subject.model, called):
        run(trace.subject, batch, tape, gradients=False)
    return found, leaves[0] if leaves else None


def block_of(trace: Trace, blocks: dict[int, Block], site: Site) -> Block:
    """The block of a site, if it can be run again by itself and holds the residual connection around the site."""
    block = blocks.get(site.index)
    if block is None:
        raise NotServed(f"no submodule holds site {site.index} ({site.name}) together with its residual connection.")
    same = _run_again(trace, block, _Changed(trace, site, "nothing"))
    silent = _run_again(trace, block, _Changed(trace, site, "all"))
    if not torch.allclose(same, block.after, rtol=1e-4, atol=1e-5 * float(block.after.abs().max())):
        raise NotServed(f"the block of site {site.index} ({site.name}) gives something else when it is run again.")
    rows = silent[site.real] if silent.shape[:2] == site.real.shape else silent.flatten(0, 1)
    if len(rows) > 1 and torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-6):  # nothing is left but a bias
        raise NotServed(f"the residual connection around site {site.index} ({site.name}) is in no submodule.")
    return block


def without_value(trace: Trace, block: Block, site: Site, key: int) -> Tensor:
    """``(example, row, channel)``: the state after a block in which one key's value is zero for all rows and heads."""
    return _run_again(trace, block, _Changed(trace, site, key))


class _Changed(Tape):
    """Runs one block with a key's value, or all that the site hands on, set to zero."""

    def __init__(self, trace: Trace, site: Site, change: int | Literal["nothing", "all"]) -> None:
        super().__init__(trace.subject.model, trace.batch)
        self.count, self.site, self.change = site.index, site.index, change

    def edit(self, record: Record, source: Given | Fused, result: Tensor, dropout: float = 0.0) -> Tensor:
        """The site's result without the value of a key."""
        if self.change == "nothing" or self.count - 1 != self.site:
            return result
        if isinstance(self.change, str):
            return torch.zeros_like(result)
        values = source.values.clone()
        values[..., self.change, :] = 0
        if isinstance(source, Fused):
            return attend_again(replace(source, values=values), dropout)
        edited, view = writable(result, record.arrange_out)
        view.copy_(source.weights.to(values.dtype) @ values)
        return edited


def _run_again(trace: Trace, block: Block, tape: Tape) -> Tensor:
    with torch.no_grad(), undisturbed(trace.subject.model), tape:
        output = block.again.func(*_own(block.again.args), **_own(block.again.keywords))
    state = _state(output, block.after.shape, block.rows_first)
    assert state is not None
    return state


def _state(given: Any, shape: tuple[int, ...], rows_first: bool) -> Tensor | None:
    """The first tensor ``(example, row, channel)``, however the model has it, in what a call was given or returned."""
    lead = shape[1::-1] if rows_first else shape[:2]
    for one in pytree.tree_leaves(given):
        if is_state(one) and one.shape[:2] == tuple(lead):
            state: Tensor = one.transpose(0, 1) if rows_first else one
            return state
    return None


def _own(given: Any) -> Any:
    """The same, with copies of objects that a call may write into: a cache, say. Tensors are shared."""
    if isinstance(given, (list, tuple)) and type(given) in (list, tuple):
        return type(given)(map(_own, given))
    if isinstance(given, dict):
        return {name: _own(value) for name, value in given.items()}
    if isinstance(given, (Tensor, nn.Module, *PLAIN)) or not hasattr(given, "__dict__") or callable(given):
        return given
    copied = copy.copy(given)
    for name, value in vars(given).items():
        object.__setattr__(copied, name, _own(value))
    return copied
