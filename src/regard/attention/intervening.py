"""What would the model have said with other attention?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.attention.editing import CannotReplay, Editor, Plan, Step, padded_rows
from regard.attention.edits import Edit, custom, numbered
from regard.attention.reading import verify_readout
from regard.attention.replay import Recording
from regard.attention.running import batch_of, record, run, undisturbed
from regard.attention.sites import Kind
from regard.attention.tape import Reading, Tape
from regard.attention.tracing import settle, sites_of, special_keys
from regard.errors import BadEdit, NoSuchPart, non_finite, whole_numbers
from regard.progress import Counter
from regard.types import Batch, Subject

ROWS_AT_ONCE = 4096  # of all examples of all variants in one forward pass: more is no faster on a CPU
WORTH_RECORDING = 4  # variants; recording costs a forward pass, and proving it right the downstream part of two
log = logging.getLogger("regard")


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


class Rerun:
    """The same inputs, run again and again with different edits.

    Args:
        subject: the model and how it is called.
        inputs: what the subject takes.
        gradients: keep a graph, through the edits and the model's parameters, to differentiate the output by them.
        replay: run what lies upstream of the first edited site once, and not again.
    """

    def __init__(self, subject: Subject, inputs: Any, *, gradients: bool = False, replay: bool = True) -> None:
        self.subject, self.gradients, self.replay = subject, gradients, replay
        self.batch = batch_of(subject, inputs)
        with undisturbed(subject.model):
            tape, self.output = record(subject, self.batch)
            settle(subject, self.batch, tape)
            self.readout = subject.readout(self.batch, None)
            verify_readout(subject, self.batch)
        batch = self.batch
        self.spots = [
            Spot(
                site.index, site.name, site.kind, site.shape, site.real, site.rows,
                special_keys(batch.real, batch.features, batch.source, site.shape[3])[: site.shape[0]], site.real_keys,
            )
            for site in sites_of(tape, self.readout)
        ]  # fmt: skip
        self.readings = [entry.readings[0] for entry in tape.records]
        self.recordings: dict[int, Recording | None] = {}

    def __call__(self, edits: Edits, *, variants: int | None = None) -> Tensor:
        """The output under the edits: ``(example, class)``, or ``(variant, example, class)``."""
        if variants is not None:
            (variants,) = whole_numbers("variants", variants)
            if variants < 1:
                raise BadEdit(f"variants={variants} must be 1 or more, or None.")
        steps = self.resolve(edits)
        plan = Plan(
            steps, [spot.name for spot in self.spots], self.readings,
            {i: (self.spots[i].special, self.spots[i].real_keys) for i in steps}, range(variants or 1), variants,
            self.gradients,
        )  # fmt: skip
        with undisturbed(self.subject.model):
            recording = None
            if steps and self.replay and (variants or 0) >= WORTH_RECORDING:
                recording = self._recording(min(steps))
            if variants is None:
                return self._run(plan, recording)
            readings, apart = self._several
            if not apart:
                return self._run_all(plan, recording, at_once=1)
            at_once = max(1, ROWS_AT_ONCE // (len(self.batch) * max(self.batch.lengths)))
            return self._run_all(replace(plan, readings=readings), recording, at_once)

    def resolve(self, edits: Edits) -> dict[int, list[Step]]:
        """For each site that is edited its steps, in the order of the list."""
        listed: list[Any] = list(edits) if isinstance(edits, (list, tuple)) else [edits]
        steps: dict[int, list[Step]] = {}
        for entry in listed:
            edit = entry if isinstance(entry, Edit) else custom(entry)
            for spot in self._spots(edit):
                rows, valid = self._rows(edit, spot)
                steps.setdefault(spot.index, []).append(Step(edit, self._heads(edit, spot), rows, valid))
        return steps

    def _spots(self, edit: Edit) -> list[Spot]:
        """The sites that an edit names: by number, name or kind."""
        if edit.sites is None:
            return self.spots
        listed = list(edit.sites) if isinstance(edit.sites, (list, tuple)) else [edit.sites]
        wanted: list[int | str] = []
        for part in listed or [edit.sites]:
            wanted += [part] if isinstance(part, str) else whole_numbers(f"edit {edit.name}: sites", part)
        found: dict[int, Spot] = {}
        for which in wanted:
            if isinstance(which, str):
                some = [spot for spot in self.spots if which in (spot.name, spot.kind)]
            else:
                some = self.spots[which : which + 1 or None] if -len(self.spots) <= which < len(self.spots) else []
            if not some:
                there = ", ".join(f"{spot.index}: {spot.name} ({spot.kind})" for spot in self.spots)
                raise NoSuchPart(f"edit {edit.name}: sites={which!r} is not there. There are {there}.")
            found |= {spot.index: spot for spot in some}
        return [found[index] for index in sorted(found)]

    def _heads(self, edit: Edit, spot: Spot) -> Tensor:
        """``(head,)``: those that an edit names, each once."""
        size = spot.shape[1]
        numbers = range(size) if edit.heads is None else whole_numbers(f"edit {edit.name}: heads", edit.heads)
        if any(not -size <= number < size for number in numbers):
            raise NoSuchPart(
                f"edit {edit.name}: heads={edit.heads!r}: site {spot.index} ({spot.name}) has heads 0 to {size - 1}."
            )
        return torch.tensor(list(dict.fromkeys(number % size for number in numbers)), device=spot.real.device)

    def _rows(self, edit: Edit, spot: Spot) -> tuple[Tensor, Tensor]:
        """``(example, row)``: the queries of a site that an edit names, and which of these count."""
        examples, _, queries, _ = spot.shape
        if edit.rows == "readout" and spot.rows is None and tuple(self.readout.shape) == (examples, queries):
            return padded_rows(spot.real & (self.readout.to(spot.real.device) > 0))
        if isinstance(edit.rows, str):
            if edit.rows not in ("all", "readout"):
                raise NoSuchPart(f"edit {edit.name}: rows={edit.rows!r} is neither 'all', 'readout' nor numbers.")
            # where the readout is not among the queries (an encoder's, say), all of them take part in it
            return padded_rows(spot.real)
        where = f"edit {edit.name}: rows={edit.rows!r} at site {spot.index} ({spot.name})"
        numbers = whole_numbers(f"edit {edit.name}: rows", edit.rows)
        if spot.rows is None:
            rows = numbered(spot.real, numbers, where)
            again = (rows[:, :, None] == rows[:, None, :]).tril(-1).any(-1)  # named twice: done once
            return rows, ~again
        computed = torch.isin(spot.rows, numbered(self.batch.real, numbers, where).to(spot.rows.device))
        if not computed.any():
            raise NoSuchPart(f"{where}: the model computes only the row that is read.")
        return padded_rows(computed)

    def _run(self, plan: Plan, recording: Recording | None) -> Tensor:
        """One forward pass over the variants of a plan."""
        subject, size = self.subject, len(self.batch)
        batch = self.batch if plan.total is None else self.batch.pick([*range(size)] * len(plan.variants))
        editor = Editor(subject.model, batch, replace(plan, replayed=recording is not None))
        upstream = nullcontext() if recording is None else recording.replay(editor, len(plan.variants))
        try:
            with upstream:
                output = run(subject, batch, editor, gradients=self.gradients)
            editor.verify()
        except CannotReplay as reason:
            log.debug("replay is off: %s", reason)
            self.recordings[min(plan.steps)] = None
            return self._run(plan, None)
        if not output.detach().isfinite().all():
            raise non_finite("the model's output under these edits")
        return output

    def _run_all(self, plan: Plan, recording: Recording | None, at_once: int) -> Tensor:
        """As many forward passes as the variants need, ``at_once`` in each, fewer if these do not fit into memory."""
        total, size = len(plan.variants), len(self.batch)
        outputs: list[Tensor] = []
        done = 0
        with Counter("variants", total) as counter:
            while done < total:
                variants = range(done, min(done + at_once, total))
                try:
                    outputs.append(self._run(replace(plan, variants=variants), recording))
                except (MemoryError, RuntimeError) as problem:
                    if len(variants) == 1 or not _out_of_memory(problem):
                        raise
                    at_once = len(variants) // 2
                    log.warning(
                        "%d variants do not fit into memory; going on with %d at a time", len(variants), at_once
                    )
                    continue
                done = variants.stop
                counter.advance(len(variants))
        return torch.cat(outputs).view(total, size, -1)

    def _recording(self, first: int) -> Recording | None:
        """What lies upstream of a site, run once; None where it cannot be replayed."""
        known = self.recordings.get(first)
        if first not in self.recordings or (known is not None and known.has_graph):
            recording = self._recorded(self.batch, first, gradients=self.gradients)
            recording.learn_axes(self._recorded(self._twice, first, gradients=False))
            self.recordings[first] = recording if self._proved(recording) else None
        return self.recordings[first]

    def _recorded(self, batch: Batch, first: int, *, gradients: bool) -> Recording:
        tape = Tape(self.subject.model, batch)
        recording = Recording(self.subject.model, first)
        with recording.record(tape):
            run(self.subject, batch, tape, gradients=gradients)
        return recording

    def _proved(self, recording: Recording) -> bool:
        """Two unedited variants, replayed, must give what the plain run gave, twice, at as many sites."""
        tape = Tape(self.subject.model, self._twice)
        try:
            with recording.replay(tape, 2):
                again = run(self.subject, self._twice, tape, gradients=False)
        except Exception as problem:  # whatever a model does when it is given what it did not expect
            log.debug("replay is off: the model fails on what was recorded: %s", problem)
            return False
        if tape.count != len(self.spots) or not self._same(again, torch.cat([self.output, self.output])):
            log.debug("replay is off: unedited variants do not give what the plain run gave")
            return False
        return True

    @cached_property
    def _twice(self) -> Batch:
        """Two variants of all examples."""
        return self.batch.pick([*range(len(self.batch))] * 2)

    @cached_property
    def _several(self) -> tuple[list[Reading], bool]:
        """How examples and heads share their axes when there are several variants, and whether these keep apart.

        They do not in models where the examples of a batch look at one another: there variants are run one by one.
        """
        tape, output = record(self.subject, self._twice)
        apart = self._same(output, torch.cat([self.output, self.output]))
        if apart:
            settle(self.subject, self._twice, tape)
        else:
            log.debug("the examples of a batch are not independent: variants are run one by one")
        return [entry.readings[0] for entry in tape.records], apart

    @staticmethod
    def _same(output: Tensor, expected: Tensor) -> bool:
        return bool((output - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1))


Edits = Edit | Callable[..., Tensor] | Sequence[Edit | Callable[..., Tensor]]


def intervene(
    subject: Subject,
    inputs: Any,
    edits: Edits,
    *,
    variants: int | None = None,
    gradients: bool = False,
    replay: bool = True,
) -> Tensor:
    """Run the subject with edited attention; the model is afterwards as it was.

    Args:
        subject: made by `regard.text`, `regard.causal`, `regard.pooled`, `regard.module` and the like.
        inputs: what the subject takes.
        edits: one or several of `regard.edits`, or functions of your own; made in the order of the list, each on what
            the one before has left.
        variants: run so many variants of the same inputs, which edits can tell apart: each permutation is another.
        gradients: keep a graph, to differentiate the output by what the edits hold and by the model's parameters.
        replay: run what lies upstream of the first edited site once for all variants.

    Returns:
        What the subject's forward gives: ``(example, class)``; with variants ``(variant, example, class)``.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> regard.intervene(subject, "so so good so", [regard.edits.uniform()]).shape
        torch.Size([1, 1])
    """
    return Rerun(subject, inputs, gradients=gradients, replay=replay)(edits, variants=variants)


def _out_of_memory(problem: BaseException) -> bool:
    message = str(problem)
    return isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in message
