"""What every trial needs: examples in batches, what the model says of them, and which of them failed."""

from __future__ import annotations

import logging
import math
from collections import Counter as Counted
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from regard.attention import Rerun, Trace, trace
from regard.attention.editing import Spot
from regard.attention.edits import Sites
from regard.attention.running import batch_of
from regard.data import Example
from regard.data.dataset import Kind
from regard.erasing import Values, possible
from regard.errors import EmptyInput, InputError, NonFinite, NotServed, TooLong, TrialFailed, WrongTarget, at_least_one
from regard.excerpts import Excerpt, numbered
from regard.explaining import Job, job_for
from regard.progress import Counter
from regard.training import class_of, inputs_of, length_of
from regard.types import Batch, Features, How, Of, Targets, one_by_one
from regard.wording import on_words

MOST_FAILED = 0.2  # share of the examples; with more, what is left is no sample of the data
ROWS = 1024  # examples whose values are made columns of at a time
FEW = 30  # examples, below which an interval is hardly one
# What one example can be to blame for. All else would meet every example alike, and is raised at once.
BLAMED = (EmptyInput, NonFinite, TooLong, RuntimeError, FloatingPointError)
Array = NDArray[np.float64]
Work = Callable[["Part"], Mapping[str, Sequence[Any]]]
Hand = Callable[["Part", Callable[[], "Result"]], "Result"]
Result = dict[str, Any]  # of a batch: "rows" (None where an example failed), "failed", "notes" and "alone"
log = logging.getLogger("regard")


@dataclass(frozen=True, eq=False)
class Case:
    """What is on trial.

    Args:
        subject: the model and how it is called.
        data: what was passed: some trials need more of it than its examples.
        examples: what it is tried on.
        kind: "text", "pair" or "table".
        job: the explanation on trial.
        sites: which attention is edited: "last", "all", or numbers and names.
        target: what is explained; None: what is predicted.
        how: how words are removed; None: in the first way that the subject can.
        seed: of all that is drawn.
        batch_size: how many examples run together.
        hand: given a batch and what runs it, hands over its result, from wherever it is; None: it is run.
        shelf: what several trials of the same examples ask for, and is found only once.
        lab: where more models like this one are trained; None: how that is done is not known.
    """

    subject: Any
    data: Any
    examples: Sequence[Example]
    kind: Kind
    job: Job
    sites: Sites = "last"
    target: Targets = None
    how: How | None = None
    seed: int = 0
    batch_size: int = 32
    hand: Hand | None = None
    shelf: dict[Any, Any] = field(default_factory=dict, repr=False)
    lab: Any = None

    @property
    def head(self) -> str:
        """What the output is: "softmax", "binary", "sigmoid", "regression" or "embedding"."""
        return str(getattr(getattr(self.subject, "head", None), "kind", "embedding"))

    @property
    def scalar(self) -> Of:
        """What changes of the output are measured in: a probability, where there are some."""
        return "logit" if self.head in ("regression", "embedding") else "probability"

    @property
    def unit(self) -> str:
        """What a change of the output is, in words."""
        other = {"regression": "in standard deviations of the output", "embedding": "of what is explained"}
        return other.get(self.head, "total variation")

    def must_decide(self, trial: str) -> None:
        """Refuse subjects without classes, whose decision cannot change."""
        if self.head not in ("softmax", "binary"):
            raise NotServed(f"{trial}: the model's output is a {self.head}: there is no decision that could change.")

    @cached_property
    def labels(self) -> dict[int, int | None]:
        """Of each example the number of the class that it should have."""
        found: dict[int, int | None] = {}
        unknown = []
        classes = 2 if self.head == "binary" else self.subject.head.size or math.inf  # not known: none is refused
        for place, one in numbered(self.examples):
            try:
                known = one.label if one.label is None else class_of(self.subject.head, one.label)
                found[place] = known
            except WrongTarget:
                known = -1
            if known is not None and not 0 <= known < classes:
                unknown.append((repr(one.label), self.names[place]))
        if unknown:
            listed = ", ".join([*dict(unknown)][:5])
            there = ", ".join(repr(self.subject.head.name(number)) for number in range(int(min(classes, 10))))
            raise InputError(
                f"{len(unknown)} labels are not classes of the model: {listed} (the first is that of example "
                f"{unknown[0][1]}). It has {there}. Rename the labels, or leave them out."
            )
        return found

    def ask(self, method: str, **options: Any) -> Job:
        """What another method is asked."""
        return job_for(self.subject, method, options, self.seed)

    def lots(self, repeats: int) -> dict[str, Job]:
        """The random control so many times, with seeds that the explanation on trial does not have."""
        at_least_one("repeats", repeats)
        return {f"random {number}": self.ask("random", seed=self.seed + number) for number in range(1, repeats + 1)}

    @property
    def scale(self) -> float:
        """What a change of a regression is divided by: the standard deviation of what the model says."""
        if self.head != "regression":
            return 1.0

        def spread() -> float:
            alone = replace(self, hand=None)
            said, _ = alone.each("measuring the spread", lambda part: {"said": part.trace.output[:, 0].tolist()})
            return float(np.std(said["said"])) or 1.0

        return float(self.once("scale", spread))

    @property
    def labelled(self) -> bool:
        """Whether any example has a label."""
        return bool(self.once("labelled", lambda: any(one.label is not None for one in self.examples)))

    def once(self, fact: str, find: Callable[[], Any]) -> Any:
        """What takes all examples to be known; where only some are at hand, it was found before."""
        if (fact,) not in self.shelf:
            self.shelf[fact,] = find()
        if isinstance(known := self.shelf[fact,], Exception):
            raise known
        return known

    def parts(self) -> list[Part]:
        """All examples in batches of like lengths; of an excerpt the one batch that it is."""
        if isinstance(self.examples, Excerpt):
            return [Part(self, [*self.examples.places])]
        order = sorted(range(len(self.examples)), key=lambda place: -length_of(self.examples[place]))
        size = self.batch_size
        return [Part(self, order[start : start + size]) for start in range(0, len(order), size)]

    def each(self, what: str, work: Work) -> tuple[pd.DataFrame, dict[str, str]]:
        """Do the work on all batches; where one fails, on its examples one by one.

        The work is a function of its batch and of nothing else: batches may run in other processes, and another day.

        Args:
            what: what the progress bar says.
            work: from a batch to columns, a value for each of its examples; what is no column it puts into `notes`.

        Returns:
            A row for each example, in their order, with "example" and "predicted"; and by example why others failed.
            `attrs` of the rows has "notes", and "alone": how many examples ran one by one.
        """
        rows: dict[int, dict[str, Any]] = {}
        blocks: list[pd.DataFrame] = []
        failed: dict[str, str] = {}
        notes: dict[str, Any] = {}
        alone = 0
        with Counter(what, len(self.examples)) as counter:
            for part in self.parts():
                run = partial(self._result, part, work)
                result = run() if self.hand is None else self.hand(part, run)
                rows |= {place: row for place, row in zip(part.places, result["rows"], strict=True) if row}
                failed |= result["failed"]
                notes |= result["notes"]
                alone += result["alone"]
                self._must_go_on(failed)
                counter.advance(len(part.places))
                if len(rows) >= ROWS:  # columns of numbers take a tenth of what dictionaries do
                    blocks.append(_frame(rows))
                    rows = {}
        blocks += [_frame(rows)] if rows or not blocks else []
        values = blocks[0] if len(blocks) == 1 else pd.concat(blocks).infer_objects()
        blocks.clear()  # before they are copied once more
        values = values.sort_index().reset_index(drop=True)
        values.attrs |= {"alone": alone, "notes": notes}
        return values, failed

    def _result(self, part: Part, work: Work) -> Result:
        """What comes of a batch, as plain values; where it fails, of its examples one by one.

        What is drawn for a batch, such as permutations, is another for one example.
        """
        try:
            columns = {name: _plain(cells) for name, cells in work(part).items()}
        except BLAMED as problem:
            if len(part.places) == 1:
                why = f"{type(problem).__name__}: {problem}"
                log.warning("example %s: %s", part.ids[0], why)
                return {"rows": [None], "failed": {part.ids[0]: why}, "notes": {}, "alone": 0}
            split: Result = {"rows": [], "failed": {}, "notes": {}, "alone": len(part.places)}
            for place in part.places:
                one = self._result(Part(self, [place]), work)
                split["rows"] += one["rows"]
                split["failed"] |= one["failed"]
                split["notes"] |= one["notes"]
                self._must_go_on(split["failed"])
            return split
        firsts = zip(part.ids, part.predicted, strict=True)
        rows = [
            {"example": name, "predicted": said} | {column: cells[at] for column, cells in columns.items()}
            for at, (name, said) in enumerate(firsts)
        ]
        return {"rows": rows, "failed": {}, "notes": _plain(part.notes), "alone": 0}

    def _must_go_on(self, failed: Mapping[str, str]) -> None:
        """Refuse to go on when too many have failed."""
        if len(failed) > MOST_FAILED * len(self.examples):
            name, why = [*failed.items()][-1]
            raise TrialFailed(
                f"{len(failed)} of {len(self.examples)} examples failed, more than {MOST_FAILED:.0%}. The last: "
                f"example {name}: {why}"
            )

    @cached_property
    def names(self) -> Sequence[str] | Mapping[int, str]:
        """Of each example its id, or its number; ids that are there twice have both."""
        if isinstance(self.examples, Excerpt):
            return self.examples.names
        found: list[str] = self.once("names", self._named)  # one list for all trials of these examples
        return found

    def _named(self) -> list[str]:
        ids = [one.id or str(place) for place, one in enumerate(self.examples)]
        often = Counted(ids)
        return [name if often[name] == 1 else f"{name} ({place})" for place, name in enumerate(ids)]


@dataclass(eq=False)
class Part:
    """Some examples that run together.

    Args:
        case: what is on trial.
        places: their numbers among all examples.
        notes: what the work finds that is no column, as plain values.
    """

    case: Case
    places: list[int]
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def examples(self) -> list[Example]:
        """The examples."""
        return [self.case.examples[place] for place in self.places]

    @property
    def ids(self) -> list[str]:
        """Their names."""
        return [self.case.names[place] for place in self.places]

    @cached_property
    def batch(self) -> Batch:
        """The examples as the model takes them."""
        return batch_of(self.case.subject, inputs_of(self.examples))

    @property
    def target(self) -> Targets:
        """What is explained of each."""
        given: Any = self.case.target
        if isinstance(given, list):
            given = one_by_one(given, len(self.case.examples))
        return [given[place] for place in self.places] if isinstance(given, (list, dict)) else given

    @cached_property
    def trace(self) -> Trace:
        """What flowed through attention; without gradients. The next explanation of these examples has it, too."""
        places, known = self.case.shelf.get(("trace",), (None, None))
        if places != self.places:
            known = trace(self.case.subject, self.batch, target=self.target, of=self.case.scalar)
            self.case.shelf["trace",] = self.places, known
        return cast("Trace", known)

    @cached_property
    def values(self) -> Values:
        """What is explained, and how far other outputs are from it."""
        return Values(self.trace)

    @property
    def features(self) -> Sequence[Features]:
        """What a person sees of each example, of its source where it has one; words without a row are left out."""
        return [one.present for one in (self.batch.source or self.batch).features]

    @property
    def how(self) -> How:
        """How words are removed."""
        return possible(self.case.subject, self.batch, self.case.how)

    @cached_property
    def predicted(self) -> list[str]:
        """The class that is predicted for each; of models without classes what is explained."""
        if not self.case.subject.predicts:
            return list(self.trace.score.names) if self.trace.score else [""] * len(self.places)
        return list(self.case.subject.score(self.trace.output, None, "logit").names)

    def scores(self, jobs: Mapping[str, Job]) -> dict[str, list[Array]]:
        """By name what each method gives the words of each example; it does not depend on what else is asked for."""
        traces: dict[Any, Trace] = {}  # by what they hold, so that methods with the same needs share one
        found = {}
        for name, job in jobs.items():
            key = ("scores", *self.places, job.method.name, repr(job.options), job.of)
            if key not in self.case.shelf:
                holds = (job.of, job.differentiates, "values" in job.method.needs)
                if holds == (self.case.scalar, False, False):
                    traces[holds] = self.trace
                elif holds not in traces:
                    traces[holds] = job.trace(self.batch, self.target)
                whys = job.explained(traces[holds])
                self.case.shelf[key] = [on_words(why, one) for why, one in zip(whys, self.features, strict=True)]
            found[name] = self.case.shelf[key]
        return found

    def rerun(self, **options: Any) -> Rerun:
        """The same examples, to be run again with other attention."""
        return Rerun(self.case.subject, self.batch, **options)

    def spots(self, rerun: Rerun) -> list[Spot]:
        """The sites that are edited."""
        return rerun.named(self.case.sites)

    def moved(self, outputs: Tensor) -> Array:
        """``(variant, example)``: the total variation between other outputs ``(variant, example, class)`` and this."""
        flat = self.values.moved(outputs.detach().flatten(0, 1), [*range(len(self.places))] * len(outputs))
        return np.asarray(flat.view(outputs.shape[:2]).numpy(force=True) / self.case.scale, dtype=np.float64)

    def decisions(self, outputs: Tensor) -> NDArray[np.int64]:
        """``(variant, example)``: the class that other outputs ``(variant, example, class)`` decide for."""
        columns = self.case.subject.head.columns(outputs.detach().flatten(0, 1), "logit")
        return np.asarray(columns.argmax(-1).view(outputs.shape[:2]).numpy(force=True))

    def probabilities(self, outputs: Tensor) -> Tensor:
        """``(…, class)`` from outputs ``(…, class)``, differentiable; of a single logit those of both classes."""
        flat = self.case.subject.head.columns(outputs.flatten(0, -2), "probability")
        return cast("Tensor", flat.unflatten(0, outputs.shape[:-1]))


def _frame(rows: Mapping[int, Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each example, in their order."""
    return pd.DataFrame([rows[place] for place in sorted(rows)], index=sorted(rows))


def _plain(value: Any) -> Any:
    """As it is after it was written to a file and read again, so that it does not matter whether it was."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
