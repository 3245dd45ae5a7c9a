"""From which rows is the prediction read? Declared by the subject, and measured."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.attention.running import record, run, undisturbed
from regard.attention.sources import Fused, Given
from regard.attention.tape import Record, Tape
from regard.errors import NoGradient, NotServed, ReadoutMismatch
from regard.types import Batch, Score, Subject

_verified: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # subjects whose readout was measured


def measure_readout(subject: Subject, batch: Batch) -> tuple[Tensor | None, Score | None]:
    """``(example, row)``: True where the output of the last site moves the model's output; None if none does.

    Attention over samples does not count: its queries are no rows.

    Beside it the score whose gradient was taken, if the subject predicts something. Where there are two sequences, the
    last site may be one of the other's (co-attention): it is then the last that moves the output.
    """
    rows = score = None
    with undisturbed(subject.model):
        plain, _ = record(subject, batch)
        # what looks at other examples has no rows of its own
        within = [leaf for leaf, entry in enumerate(plain.records) if not entry.across]
        last, leaves = max(within, default=0), within[-1:]
        if batch.source is not None:
            queries = [entry.source.shape[2] for entry in plain.records]
            leaves += [leaf for leaf in reversed(range(last)) if queries[leaf] == batch.real.shape[1]]
        for leaf in leaves:
            rows, score = _rows_that_move(subject, batch, leaf)
            if rows is not None:
                break
    return rows, score


def _rows_that_move(subject: Subject, batch: Batch, leaf: int) -> tuple[Tensor | None, Score | None]:
    """``(example, row)`` of one site: True where its output moves the model's; None if no row does."""
    score = None
    tape, output = record(subject, batch, leaf=leaf)
    if not output.requires_grad:
        return None, None
    with torch.enable_grad():
        if subject.predicts:
            score = subject.score(output, batch.explained(None), "logit")
            scalar = score.values.sum()
        else:
            scalar = some_scalar(output).sum()
    entry = tape.records[leaf]
    assert entry.out is not None
    try:
        (gradient,) = torch.autograd.grad(scalar, [entry.out], allow_unused=True)
    except RuntimeError as problem:
        if "use_reentrant" not in str(problem):
            raise
        return None, score  # a reentrant checkpoint cannot be differentiated so
    if gradient is None:
        return None, score
    rows: Tensor = entry.fold(gradient).ne(0).any(1).any(-1)
    rows = rows if tape.shards is None else tape.shards.reduced(rows.int()).bool()  # of any head
    return (rows if rows.any() else None), score


def _rows_past_attention(subject: Subject, batch: Batch) -> Tensor | None:
    """``(example, row)``: the row of each input that moves the output if attention hands on a constant.

    None where it is not one row: the stream of rows does not pass by attention, or mixes them otherwise, too.
    """
    from regard.attention.entrance import Entrance  # it needs traces, which need this module

    def deaf(batch: Batch) -> Tensor:
        return run(subject, batch, _Constant(subject.model, batch), gradients=True)

    try:
        entrance = Entrance(subject, batch)
        leaf = entrance.vectors["rows"].clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(some_scalar(entrance.run({"rows": leaf}, deaf)).sum(), [leaf])
    except (KeyError, NotServed, NoGradient, RuntimeError):  # no states to begin with, or none that the output has
        return None
    rows = gradient.ne(0).any(-1)
    return rows if rows.shape == batch.real.shape and bool((rows.sum(-1) == 1).all()) else None


class _Constant(Tape):
    """Attention works, and nothing can be differentiated through it."""

    def edit(self, record: Record, source: Given | Fused, result: Tensor, dropout: float = 0.0) -> Tensor:
        """The result without its graph."""
        return result.detach()


def some_scalar(output: Tensor) -> Tensor:
    """``(example,)``: a number that depends on all channels of an embedding.

    Each has a weight of its own, or they would cancel: after a layer norm their sum is a constant.
    """
    return (output * torch.cos(torch.arange(output.shape[-1], device=output.device))).sum(-1)


def verify_readout(subject: Subject, batch: Batch) -> str:
    """The rows that the subject declares must be those that move the output; measured once for each subject."""
    if subject not in _verified:
        _verified[subject] = _measured_against_declared(subject, batch)
    return _verified[subject]


def _measured_against_declared(subject: Subject, batch: Batch) -> str:
    probe = subject.probe(batch)
    rows, score = measure_readout(subject, probe)
    if rows is None:
        return "not measurable: the output does not depend on the last site"
    declared = subject.readout(probe, score) > 0
    if rows.shape[1] == 1 < declared.shape[1] and bool((declared.sum(-1) == 1).all()):
        # the last site computes one row, and one row is read: which of them it is, the other sites do not tell
        passed = _rows_past_attention(subject, probe)
        rows = declared if passed is None else passed
    if rows.shape[1] == declared.shape[1] == 1:
        return "measured"
    if declared.shape != rows.shape:
        raise ReadoutMismatch(
            f"the readout has {declared.shape[1]} rows, but the last attention site has {rows.shape[1]}. "
            "Pass readout= with one entry for each row."
        )
    if not torch.equal(declared.to(rows.device), rows):
        odd = int((declared.to(rows.device) != rows).any(-1).long().argmax())
        raise ReadoutMismatch(
            f"the readout is declared at rows {_rows(declared[odd])}, but the output moves with rows "
            f"{_rows(rows[odd])}. "
            "Pass readout='first', 'last' or 'mean', or the row that the prediction is read from."
        )
    return "measured"


def _rows(mask: Tensor) -> str:
    rows: list[int] = mask.nonzero().squeeze(-1).tolist()
    shown = ", ".join(map(str, rows[:8]))
    return f"{shown}, … ({len(rows)} in all)" if len(rows) > 8 else shown
