"""A forward pass to learn from: the model in its own mode, with the weights of attention as part of the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.editing import by_kernel, explicit, of_heads, padded_rows
from regard.attention.edits import Sites, uniform
from regard.attention.intervening import Rerun
from regard.attention.running import uncompiled
from regard.attention.sharding import must_be_whole
from regard.attention.sources import Fused, Given, at_least_float
from regard.attention.tape import Reading, Record, Tape, attend_again, relevant_name, writable
from regard.errors import NotServed, non_finite
from regard.types import Batch, Subject


@dataclass(frozen=True, eq=False)
class Look:
    """Where one site looked.

    Args:
        weights: ``(example, head, row, key)`` of the rows that are read, with their graph.
        read: ``(example, row)``: how much each of them counts; sums to 1.
        rows: ``(example, row)``: which queries they are.
    """

    weights: Tensor
    read: Tensor
    rows: Tensor

    @property
    def heads(self) -> Tensor:
        """``(example, head, key)``: Σ_q r_q A_q of each head."""
        return torch.einsum("er,ehrk->ehk", self.read, self.weights)

    @property
    def mean(self) -> Tensor:
        """``(example, key)``: their mean over heads, which is the map that people are shown."""
        return self.heads.mean(1)


class Watch:
    """Runs a subject as it is, in train mode too, and has its attention looked at, or made uniform.

    Args:
        subject: the model and how it is called.
        inputs: some inputs, by which it is told which sites there are.
        sites: whose weights are wanted: "last", "all", or numbers and names.
        uniform: at which sites every row looks everywhere alike: as ``sites``; None: nowhere.
        gates: asked in each pass for factors ``(head,)`` on what the heads of all sites hand on; None: there are none.
    """

    def __init__(
        self, subject: Subject, inputs: Any, *, sites: Sites = "last", uniform: Sites = None,
        gates: Callable[[], Tensor] | None = None,
    ) -> None:  # fmt: skip
        if getattr(subject.model, "is_gradient_checkpointing", False):
            raise NotServed("the model checkpoints its activations: switch that off to learn from its attention.")
        must_be_whole(subject.model, "learning from attention")
        self.subject = subject
        rerun = Rerun(subject, subject.encode(inputs))
        self.readings = rerun.readings
        self.sites = [spot.index for spot in rerun.named(sites)]
        self.uniform = frozenset(() if uniform is None else (spot.index for spot in rerun.named(uniform)))
        self.gates, self.heads = gates, [spot.shape[1] for spot in rerun.spots]
        self._tape: _Pass | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """The output, with its graph."""
        factors = None if self.gates is None else self.gates().split(self.heads)
        self._tape = _Pass(self.subject.model, batch, self.readings, self.sites, self.uniform, factors)
        with uncompiled(self.subject.model), self._tape:
            output = self.subject.forward(batch)
        if len(self._tape.kept) != len(self.sites):
            raise NotServed("the model takes another path than the one by which its attention was found.")
        return output

    def looks(self) -> list[Look]:
        """Where each of the wanted sites looked in the last call."""
        assert self._tape is not None, "call it first"
        tape = self._tape
        readout = self.subject.readout(tape.batch, None)
        return [_look(tape, *tape.kept[site], readout) for site in self.sites]


class _Pass(Tape):
    """Keeps what the wanted sites were given, makes some of them uniform, and gates heads."""

    def __init__(
        self, model: nn.Module, batch: Batch, readings: Sequence[Reading], wanted: Collection[int],
        even: Collection[int], factors: Sequence[Tensor] | None,
    ) -> None:  # fmt: skip
        super().__init__(model, batch)
        self.known, self.wanted, self.even, self.factors = readings, wanted, even, factors
        self.follower.looks_for_masks = bool(even)
        self.kept: dict[int, tuple[Record, Given | Fused]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Weights that drop out are no distribution any more: what a site drops, it drops later, in `edit`."""
        if relevant_name(func) == "dropout" and args and (flow := self.follower.flows.get(args[0])) is not None:
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | (kwargs or {})
            if given.get("training", True) and not flow.settled:
                self.dropped[id(flow)] = float(given.get("p", 0.5))
                return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def _keep(self, record: Record, result: Tensor) -> None:
        """Nothing: what is wanted is kept with its graph, in `edit`."""

    def edit(self, record: Record, source: Given | Fused, result: Tensor, dropout: float = 0.0) -> Tensor:
        """The site's own result, with what drops out of it; or that of uniform weights; times the gates of heads."""
        number = self.count - 1
        if number < len(self.known) and self.known[number] in record.readings:
            record.readings = (self.known[number],)
        read = source.map(record.read)
        even, drops = number in self.even, isinstance(source, Given) and dropout > 0
        if number in self.wanted:
            self.kept[number] = record, read
        if not even and not drops and self.factors is None:
            return result
        edited, view = writable(result, record.fold)
        if even and isinstance(source, Fused) and (asked := by_kernel(EVEN, source)):
            new = record.fold(attend_again(asked, dropout))
        elif not even and not drops:
            new = record.fold(result)
        else:
            rows = torch.arange(read.shape[2], device=result.device).expand(read.shape[0], -1)
            every = torch.arange(read.shape[1], device=result.device)
            weights, allowed = explicit(read, every, rows)
            if even:
                weights = allowed.to(weights) / allowed.sum(-1, keepdim=True).clamp_min(1)
            values = of_heads(read.values, every // (len(every) // read.values.shape[1]))
            new = (F.dropout(weights, dropout) @ at_least_float(values)).to(view.dtype)
        if self.factors is not None:
            new = new * self.factors[number].to(new)[:, None, None]
        real = self.real_rows(record, 2)[:, None, :, None]  # padding rows stay as they are
        view.copy_(new.where(real, record.fold(result)))
        return edited


EVEN = uniform()


def _look(tape: Tape, record: Record, source: Given | Fused, readout: Tensor) -> Look:
    """The rows of a site that are read; all of them, where the readout has no row among them."""
    examples, heads, queries, _ = source.shape
    if (examples, queries) == tuple(readout.shape):
        rows, valid = padded_rows(readout > 0)
        read = readout.gather(1, rows) * valid
    else:
        real = tape.real_rows(record, 2)
        rows, valid = padded_rows(real)
        read = valid / valid.sum(-1, keepdim=True)
    weights, _ = explicit(source, torch.arange(heads, device=rows.device), rows)
    if not weights.detach().isfinite().all():
        raise non_finite(f"attention at {record.name}")
    return Look(weights, read.to(weights), rows)
