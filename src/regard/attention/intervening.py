"""What would the model have said with other attention?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.attention.editing import Editor, Plan, Spot, Step, padded_rows
from regard.attention.edits import Edit, Sites, StateEdit, custom, numbered, scale, uniform
from regard.attention.reading import verify_readout
from regard.attention.replay import Recording
from regard.attention.running import Gradients, batch_of, must_differentiate, out_of_memory, record, run, undisturbed
from regard.attention.settling import settle
from regard.attention.sharding import Among, agree
from regard.attention.sites import TOLERANCE, Site
from regard.attention.sources import at_least_float
from regard.attention.states import changes_of
from regard.attention.tape import Reading, Tape
from regard.attention.tracing import sites_of, special_keys
from regard.errors import (
    NoGradient,
    NoSuchPart,
    NotServed,
    OptionError,
    RegardError,
    at_least_one,
    non_finite,
    whole_numbers,
)
from regard.progress import Counter
from regard.types import Batch, Subject

ROWS_AT_ONCE = 2048  # of all examples of all variants in one forward pass: more is no faster on a CPU
WORTH_RECORDING = 4  # variants; recording costs a forward pass, and proving it right the downstream part of two
log = logging.getLogger("regard")


@dataclass(eq=False)
class Upstream:
    """What was found out about running several variants that differ from one site on.

    Args:
        apart: variants keep apart; they do not in models where the examples of a batch look at one another.
        recording: what lies upstream, if it can be replayed.
    """

    apart: bool
    recording: Recording | None


class Rerun:
    """The same inputs, run again and again with different edits.

    Args:
        subject: the model and how it is called.
        inputs: what the subject takes.
        gradients: keep a graph, through the edits and the model's parameters, to differentiate the output by them.
            "edits": by what the edits hold and nothing else; the graph begins at the first edited site, so what lies
            upstream is run once however many backward passes follow.
        replay: run what lies upstream of the first edited site once, and not again.
    """

    def __init__(self, subject: Subject, inputs: Any, *, gradients: Gradients = False, replay: bool = True) -> None:
        self.subject, self.gradients, self.replay = subject, gradients, replay
        if gradients == "edits":
            must_differentiate(subject.model)
        self.batch = batch_of(subject, inputs)
        agree(subject.model, self.batch)
        with undisturbed(subject.model):
            tape, self.output = record(subject, self.batch)
            settle(subject, self.batch, tape)
            self.readout = subject.readout(self.batch, None)
            verify_readout(subject, self.batch)
        self.spots = [
            Spot(
                site.index, site.name, site.kind, site.shape, site.real, site.rows,
                _special(self.batch, site), site.real_keys, site.shard,
            )
            for site in sites_of(tape, self.readout)
        ]  # fmt: skip
        self.readings = [entry.readings[0] for entry in tape.records]
        self.leads = [entry.proof.out.shape[:-2] for entry in tape.records]  # axes before queries and channels
        self.upstream: dict[int, Upstream] = {}

    def __call__(self, edits: Edits, *, variants: int | None = None) -> Tensor:
        """The output under the edits: ``(example, class)``, or ``(variant, example, class)``."""
        variants = None if variants is None else at_least_one("variants", variants)
        plan = self._plan(self.resolve(edits), variants, gradients=self.gradients)
        names = [spot.name for spot in self.spots]
        plan = replace(plan, states=changes_of(self.subject, self.batch, _listed(edits), names))
        with undisturbed(self.subject.model):
            return self._run(plan) if variants is None else self._run_all(plan)

    def _plan(self, steps: dict[int, list[Step]], variants: int | None, *, gradients: Gradients) -> Plan:
        readings = self.readings if variants is None else self._readings_of_many
        return Plan(steps, self.spots, readings, range(variants or 1), variants, gradients)

    def resolve(self, edits: Edits) -> dict[int, list[Step]]:
        """For each site that is edited its steps, in the order of the list."""
        steps: dict[int, list[Step]] = {}
        for entry in _listed(edits):
            if isinstance(entry, StateEdit):
                continue
            edit = entry if isinstance(entry, Edit) else custom(entry)
            for spot in self.chosen(edit):
                heads, among = self._heads(edit, spot)
                steps.setdefault(spot.index, []).append(Step(edit, heads, *self._rows(edit, spot), among))
        return steps

    def chosen(self, edit: Edit) -> list[Spot]:
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

    def named(self, sites: Sites) -> list[Spot]:
        """The sites that are meant: "last", "all", or numbers and names; attention between examples only by name."""
        if sites not in ("last", "all"):
            try:
                return self.chosen(uniform(sites=sites))
            except (NoSuchPart, OptionError) as problem:
                said = str(problem).removeprefix("edit uniform(): ")
                raise type(problem)(f"{said} Or pass 'last' or 'all'.") from None
        able = [spot for spot in self.spots if spot.kind != "samples"]
        if not able:
            raise NotServed("all attention of this model is between examples: name the sites that are to be edited.")
        return able if sites == "all" else able[-1:]

    def _heads(self, edit: Edit, spot: Spot) -> tuple[Tensor, Among | None]:
        """``(head,)``: those that an edit names, each once; where they are spread over processes, those held here."""
        size = spot.shape[1]
        numbers = range(size) if edit.heads is None else whole_numbers(f"edit {edit.name}: heads", edit.heads)
        if any(not -size <= number < size for number in numbers):
            raise NoSuchPart(
                f"edit {edit.name}: heads={edit.heads!r}: site {spot.index} ({spot.name}) has heads 0 to {size - 1}."
            )
        heads = torch.tensor(list(dict.fromkeys(number % size for number in numbers)), device=spot.real.device)
        return (heads, None) if spot.shard is None else spot.shard.among(heads)

    def _rows(self, edit: Edit, spot: Spot) -> tuple[Tensor, Tensor]:
        """``(example, row)``: the queries of a site that an edit names, and which of these count."""
        examples, _, queries, _ = spot.shape
        read = isinstance(edit.rows, str) and edit.rows == "readout"
        if read and spot.rows is None and tuple(self.readout.shape) == (examples, queries):
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
            once = ~(rows[:, :, None] == rows[:, None, :]).tril(-1).any(-1)  # named twice: done once
            return rows[:, once.any(0)], once[:, once.any(0)]
        named = numbered(self.batch.real, numbers, where).to(spot.rows.device)
        computed = (spot.rows[:, :, None] == named[:, None, :]).any(-1)
        if not computed.any():
            raise NoSuchPart(f"{where}: the model computes only the row that is read.")
        return padded_rows(computed)

    def gradient(
        self, edits: Edits, variants: int, site: int, score: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Differentiate a score of the output by the edited result of a site, under each variant of an edit of it.

        Args:
            edits: of attention at that site.
            variants: how many.
            site: its number.
            score: ``(example, class)`` to ``(example,)``; called on one variant after the other.

        Returns:
            The gradients' sum over variants, ``(example, head, query, channel)``, and scores ``(variant, example)``.
        """
        must_differentiate(self.subject.model)
        plan = replace(self._plan(self.resolve(edits), variants, gradients=False), leaf=site)
        total, size = torch.zeros(()), len(self.batch)

        def differentiate(editor: Editor, output: Tensor) -> Tensor:
            nonlocal total
            assert editor.leaf_result is not None
            record, leaf = editor.leaf_result
            with torch.enable_grad():
                scores = torch.stack([score(part) for part in output.split(size)])
            if not scores.requires_grad:
                raise NoGradient("the target does not depend differentiably on the model's output.")
            (gradient,) = torch.autograd.grad(scores.sum(), [leaf], allow_unused=True)
            gradient = torch.zeros_like(leaf) if gradient is None else gradient  # the output does not depend on it
            total = total + at_least_float(record.fold(gradient)).unflatten(0, (-1, size)).sum(0)
            return scores.detach().flatten()

        with undisturbed(self.subject.model):
            scores = self._run_all(plan, differentiate)
        return total, scores.view(variants, size)

    def _run(self, plan: Plan, recording: Recording | None = None, *, keep: Recording | None = None) -> Tensor:
        """One forward pass over the variants of a plan; ``keep`` records what lies upstream."""
        return self._run_editor(plan, recording, keep=keep)[1]

    def _run_editor(
        self, plan: Plan, recording: Recording | None, *, keep: Recording | None = None
    ) -> tuple[Editor, Tensor]:
        """The same, with the tape that made the edits."""
        subject, size = self.subject, len(self.batch)
        batch = self.batch if plan.total is None else self.batch.pick([*range(size)] * len(plan.variants))
        editor = Editor(subject.model, batch, replace(plan, replayed=recording is not None))
        beside: AbstractContextManager[None] = nullcontext()
        if recording is not None:
            beside = recording.replay(editor, len(plan.variants))
        elif keep is not None:
            beside = keep.record(editor)
        with beside, plan.states.made(batch, editor.plan) if plan.states else nullcontext():
            begins = plan.states is not None and plan.states.entering  # with the input: all of it lies downstream
            output = run(subject, batch, editor, gradients=bool(plan.gradients) if begins else plan.gradients)
        editor.verify()
        if not output.detach().isfinite().all():
            raise non_finite("the model's output under these edits")
        return editor, output

    def _run_all(self, plan: Plan, then: Callable[[Editor, Tensor], Tensor] | None = None) -> Tensor:
        """As many forward passes as the variants need; fewer variants in each if they do not fit into memory.

        ``then`` makes something else of the output of each: ``(variant × example, …)``.
        """
        total, size = len(plan.variants), len(self.batch)
        first = min({*plan.steps} | (plan.states.layers if plan.states else set()), default=None)
        upstream = Upstream(True, None) if first is None else self._upstream(first, total)
        recording = upstream.recording if plan.states is None or not plan.states.entering else None
        most = total if plan.gradients == "edits" else ROWS_AT_ONCE // (size * max(self.batch.lengths))
        at_once = max(1, most) if upstream.apart else 1  # a graph keeps all of them anyway
        outputs: list[Tensor] = []
        done = 0
        with Counter("variants", total) as counter:
            while done < total:
                some = replace(plan, variants=range(done, min(done + at_once, total)))
                try:
                    editor, output = self._run_editor(some, recording)
                    outputs.append(output if then is None else then(editor, output))
                except Exception as problem:
                    if out_of_memory(problem) and len(some.variants) > 1:
                        at_once = len(some.variants) // 2
                        log.warning(
                            "%d variants do not fit into memory; going on with %d at a time", 2 * at_once, at_once
                        )
                    elif recording is not None and not isinstance(problem, RegardError) and not _in_edit(problem):
                        log.debug("replay is off: %s", problem)
                        recording = upstream.recording = None
                    else:
                        raise
                    continue
                done = some.variants.stop
                counter.advance(len(some.variants))
        return torch.cat(outputs).view(total, size, -1)

    def _upstream(self, first: int, variants: int) -> Upstream:
        """Whether variants keep apart, and what lies upstream of a site; found out once."""
        if variants == 1 and self.gradients != "edits":
            return Upstream(True, None)
        if first not in self.upstream:
            self.upstream[first] = self._found_out(first, variants)
        known = self.upstream[first].recording
        if known is not None and known.has_graph:  # used up by the backward pass of an earlier call
            anew = self._recorded(first)
            anew.axes = known.axes
            self.upstream[first].recording = anew
        return self.upstream[first]

    def _found_out(self, first: int, variants: int) -> Upstream:
        """Two variants that differ are run, the second with the site's result removed; the first must not notice.

        That shows that they keep apart. Replayed, they must give the same again.
        """
        both = self._plan(self.resolve(scale(torch.tensor([1.0, 0.0]), sites=first)), 2, gradients=False)
        twice = Recording(self.subject.model, first)
        apart = all(spot.kind != "samples" for spot in self.spots)
        try:
            expected = self._run(both, keep=twice) if apart else self.output
            apart = apart and _same(expected[: len(self.batch)], self.output)
        except RegardError as problem:  # a model that cannot do without the site
            log.debug("whether variants keep apart could not be told: %s", problem)
            apart = False
        if not apart:
            log.debug("the examples of a batch are not independent: variants are run one by one")
        few = variants < WORTH_RECORDING and self.gradients != "edits"  # which are run again, step after step
        if not apart or not self.replay or few:
            return Upstream(apart, None)
        recording = self._recorded(first)
        recording.learn_axes(twice)
        return Upstream(apart, recording if self._proved(recording, both, expected) else None)

    def _recorded(self, first: int) -> Recording:
        tape, recording = Tape(self.subject.model, self.batch), Recording(self.subject.model, first)
        with recording.record(tape):
            run(self.subject, self.batch, tape, gradients=self.gradients is True)
        return recording

    def _proved(self, recording: Recording, both: Plan, expected: Tensor) -> bool:
        try:
            again = self._run(both, recording)
        except Exception as problem:  # whatever a model does when it is given what it did not expect
            log.debug("replay is off: the model fails on what was recorded: %s", problem)
            return False
        if not _same(again, expected):
            log.debug("replay is off: two variants do not give what they give when all is run")
        return _same(again, expected)

    @cached_property
    def _readings_of_many(self) -> list[Reading]:
        """How examples and heads share their axes when there are several; with one example that is not known yet."""
        if len(self.batch) > 1:
            return self.readings
        if all(len(lead) == 2 and lead[0] == 1 < lead[1] for lead in self.leads):  # heads come second
            return ["plain"] * len(self.leads)
        two = self.batch.pick([0, 0])
        tape, _ = record(self.subject, two)
        if any(entry.across for entry in tape.records):  # variants will be run one by one
            return self.readings
        settle(self.subject, two, tape)
        return [entry.readings[0] for entry in tape.records]


Edits = Edit | StateEdit | Callable[..., Tensor] | Sequence[Edit | StateEdit | Callable[..., Tensor]]


def _listed(edits: Edits) -> list[Any]:
    return list(edits) if isinstance(edits, (list, tuple)) else [edits]


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


def _special(batch: Batch, site: Site) -> Tensor:
    """``(example, key)``: True at special tokens; where keys are examples there are none."""
    if site.kind == "samples":
        return torch.zeros_like(site.real_keys)
    return special_keys(batch, site.shape[3])


def _same(output: Tensor, expected: Tensor) -> bool:
    """Up to rounding; a logit that is masked by a huge number does not make all others the same."""
    size = expected.abs()
    usual = size[size < 1e30].median() if (size < 1e30).any() else size.min()
    return bool(((output - expected).abs() <= TOLERANCE.get(output.dtype, 1e-4) * (size + usual)).all())


def _in_edit(problem: BaseException) -> bool:
    return any(note.startswith("raised by edit") for note in getattr(problem, "__notes__", ()))
