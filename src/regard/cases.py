"""What every trial needs: examples in batches, what the model says of them, and which of them failed."""

from __future__ import annotations

import logging
import math
from collections import Counter as Counted
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.attention import Rerun, Trace, trace
from regard.attention.editing import Spot
from regard.attention.edits import Rows, Sites, scale, uniform
from regard.attention.running import batch_of
from regard.data import Example
from regard.data.dataset import Kind
from regard.erasing import Values, possible
from regard.errors import (
    EmptyInput,
    InputError,
    NonFinite,
    NoSuchPart,
    NotServed,
    OptionError,
    TooLong,
    TrialFailed,
    WrongTarget,
    at_least_one,
)
from regard.explaining import Job, job_for, traces_for
from regard.explanation import Explanation
from regard.methods.raw import raw
from regard.progress import Counter
from regard.training import class_of, inputs_of, length_of
from regard.types import Batch, Features, How, Of, Targets, one_by_one

MOST_FAILED = 0.2  # share of the examples; with more, what is left is no sample of the data
FEW = 30  # examples, below which an interval is hardly one
# What one example can be to blame for. All else would meet every example alike, and is raised at once.
BLAMED = (EmptyInput, NonFinite, TooLong, RuntimeError, FloatingPointError)
Array = NDArray[np.float64]
Work = Callable[["Part"], Mapping[str, Sequence[Any]]]
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
    """

    subject: Any
    data: Any
    examples: tuple[Example, ...]
    kind: Kind
    job: Job
    sites: Sites = "last"
    target: Targets = None
    how: How | None = None
    seed: int = 0
    batch_size: int = 32

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
    def labels(self) -> list[int | None]:
        """Of each example the number of the class that it should have."""
        found: list[int | None] = []
        unknown = []
        classes = 2 if self.head == "binary" else self.subject.head.size or math.inf  # not known: none is refused
        for place, one in enumerate(self.examples):
            try:
                known = one.label if one.label is None else class_of(self.subject.head, one.label)
                found.append(known)
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

    @cached_property
    def scale(self) -> float:
        """What a change of a regression is divided by: the standard deviation of what the model says."""
        if self.head != "regression":
            return 1.0
        said, _ = self.each("measuring the spread", lambda part: {"said": part.trace.output[:, 0].tolist()})
        return float(np.std(said["said"])) or 1.0

    def parts(self) -> list[Part]:
        """All examples in batches of like lengths."""
        order = sorted(range(len(self.examples)), key=lambda place: -length_of(self.examples[place]))
        size = self.batch_size
        return [Part(self, order[start : start + size]) for start in range(0, len(order), size)]

    def each(self, what: str, work: Work) -> tuple[pd.DataFrame, dict[str, str]]:
        """Do the work on all batches; where one fails, on its examples one by one.

        Args:
            what: what the progress bar says.
            work: from a batch to columns, a value for each of its examples.

        Returns:
            A row for each example, in their order, with "example" and "predicted"; and by example why others failed.
        """
        rows: dict[int, dict[str, Any]] = {}
        failed: dict[str, str] = {}
        alone = 0
        waiting = self.parts()
        with Counter(what, len(self.examples)) as counter:
            while waiting:
                part = waiting.pop(0)
                try:
                    columns = work(part)
                except BLAMED as problem:
                    if len(part.places) > 1:
                        alone += len(part.places)
                        waiting[:0] = [Part(self, [place]) for place in part.places]
                        continue
                    name = self.names[part.places[0]]
                    failed[name] = f"{type(problem).__name__}: {problem}"
                    log.warning("example %s: %s", name, failed[name])
                    if len(failed) > MOST_FAILED * len(self.examples):
                        raise TrialFailed(
                            f"{len(failed)} of {len(self.examples)} examples failed, more than {MOST_FAILED:.0%}. The "
                            f"last: example {name}: {failed[name]}"
                        ) from problem
                else:
                    for at, place in enumerate(part.places):
                        rows[place] = {"example": self.names[place], "predicted": part.predicted[at]}
                        rows[place] |= {column: cells[at] for column, cells in columns.items()}
                counter.advance(len(part.places))
        values = pd.DataFrame([rows[place] for place in sorted(rows)])
        values.attrs["alone"] = alone  # what is drawn for a batch, such as permutations, is another for one example
        return values, failed

    @cached_property
    def names(self) -> list[str]:
        """Of each example its id, or its number; ids that are there twice have both."""
        ids = [one.id or str(place) for place, one in enumerate(self.examples)]
        often = Counted(ids)
        return [name if often[name] == 1 else f"{name} ({place})" for place, name in enumerate(ids)]


@dataclass(eq=False)
class Part:
    """Some examples that run together.

    Args:
        case: what is on trial.
        places: their numbers among all examples.
    """

    case: Case
    places: list[int]

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
        given = self.case.target
        if not isinstance(given, list):
            return given
        listed = one_by_one(given, len(self.case.examples))
        return [listed[place] for place in self.places]

    @cached_property
    def trace(self) -> Trace:
        """What flowed through attention; without gradients."""
        return trace(self.case.subject, self.batch, target=self.target, of=self.case.scalar)

    @cached_property
    def values(self) -> Values:
        """What is explained, and how far other outputs are from it."""
        return Values(self.trace)

    @property
    def features(self) -> Sequence[Features]:
        """What a person sees of each example, of its source where it has one."""
        return (self.batch.source or self.batch).features

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
        """By name what each method gives the words of each example; one trace serves all that can share it."""
        traces = traces_for([*jobs.values()], self.batch, self.target)
        return {
            name: [on_words(why, one) for why, one in zip(job.explained(traces[job.of]), self.features, strict=True)]
            for name, job in jobs.items()
        }

    def rerun(self, **options: Any) -> Rerun:
        """The same examples, to be run again with other attention."""
        return Rerun(self.case.subject, self.batch, **options)

    def spots(self, rerun: Rerun) -> list[Spot]:
        """The sites that are edited."""
        if self.case.sites not in ("last", "all"):
            try:
                return rerun.chosen(uniform(sites=self.case.sites))
            except (NoSuchPart, OptionError) as problem:
                said = str(problem).removeprefix("edit uniform(): ")
                raise type(problem)(f"{said} Or pass 'last' or 'all'.") from None
        able = [spot for spot in rerun.spots if spot.kind != "samples"]
        if not able:
            raise NotServed("all attention of this model is between examples: name the sites that are to be edited.")
        return able if self.case.sites == "all" else able[-1:]

    def moved(self, outputs: Tensor) -> Array:
        """``(variant, example)``: the total variation between other outputs ``(variant, example, class)`` and this."""
        flat = self.values.moved(outputs.detach().flatten(0, 1), [*range(len(self.places))] * len(outputs))
        return np.asarray(flat.view(outputs.shape[:2]).numpy(force=True) / self.case.scale, dtype=np.float64)

    def decisions(self, outputs: Tensor) -> NDArray[np.int64]:
        """``(variant, example)``: the class that other outputs ``(variant, example, class)`` decide for."""
        columns = self.case.subject.head.columns(outputs.detach().flatten(0, 1), "logit")
        decided: NDArray[np.int64] = columns.argmax(-1).view(outputs.shape[:2]).numpy(force=True)
        return decided

    def probabilities(self, outputs: Tensor) -> Tensor:
        """``(…, class)`` from outputs ``(…, class)``, differentiable; of a single logit those of both classes."""
        flat: Tensor = self.case.subject.head.columns(outputs.flatten(0, -2), "probability")
        shaped: Tensor = flat.unflatten(0, outputs.shape[:-1])
        return shaped


def edited(rerun: Rerun, spots: Sequence[Spot], rows: str = "readout") -> list[dict[str, Any]]:
    """Which attention was edited, for the settings of a finding; where no row is the readout's, all are."""
    read = tuple(rerun.readout.shape)
    return [
        {"site": spot.name, "kind": spot.kind, "heads": spot.shape[1]}
        | {"rows": rows if spot.rows is not None or read == (spot.shape[0], spot.shape[2]) else "all"}
        for spot in spots
    ]


def looks(part: Part, spots: Sequence[Spot]) -> list[Array]:
    """Of each example the weights of its real tokens that are not special, as the readout sees them: head mean.

    With several sites their mean. Special tokens are left out and the rest is not normalised.
    """
    keys = (part.batch.source or part.batch).real.shape[1]
    for spot in spots:
        if spot.shape[3] != keys:
            raise NotServed(
                f"site {spot.index} ({spot.name}) has {spot.shape[3]} keys, which are not the {keys} rows of features."
            )
    maps = [raw(part.trace, layer=spot.index) for spot in spots]
    stacked = [one.rows if one.source is None else one.source for one in maps]
    return on_tokens(part, torch.stack([one for one in stacked if one is not None]).mean(0))


def on_tokens(part: Part, numbers: Tensor) -> list[Array]:
    """Of each example the numbers ``(example, row)`` of its tokens that are not special."""
    plain = numbers.double().numpy(force=True)
    return [
        one[[row for row, word in zip(on.rows, on.word, strict=True) if word is not None]]
        for one, on in zip(plain, part.features, strict=True)
    ]


def removed(part: Part, rerun: Rerun, spots: Sequence[Spot], rows: Rows = "readout") -> Array:
    """``(example,)``: how far the output moves without what the sites hand on to the rows that are read, or others."""
    nothing = scale(0.0, sites=[spot.index for spot in spots], rows=rows)
    moved: Array = part.moved(rerun(nothing)[None])[0]
    return moved


def on_words(why: Explanation, features: Features) -> Array:
    """The scores of an explanation on the words of what can be removed: pieces are summed, special tokens left out."""
    if why.axes != ("token",):
        raise InputError(
            f"{why.method} has scores with axes {why.axes}. Compare methods without per_layer and the like."
        )
    if "produced" in why.parts and "source" not in why.parts:
        raise NotServed(f"{why.method} has scores for what was produced only, and what can be removed is the source.")
    totals = np.zeros(len(features.words))
    for score, word in zip(why.scores.tolist(), why.features.word, strict=True):
        if word is not None and word < len(totals):  # what was produced comes after the source, and is not removed
            totals[word] += score
    return totals


def truth_on(example: Example, words: Sequence[str]) -> NDArray[np.bool_] | None:
    """A rationale, which is about words between white space, on the words that the model has.

    A word of the model's belongs to it if one of its letters does. A model that was given only the beginning of a text
    has the beginning of the rationale; signs that its tokenizer drops (joiners, say) are passed over.
    """
    if example.rationale is None:
        return None
    if example.words == tuple(words):
        return np.array(example.rationale)
    letters = [(letter, mask) for word, mask in zip(example.words, example.rationale, strict=True) for letter in word]
    found, at = [], 0
    for word in words:
        marked = False
        for letter in "".join(word.split()):
            while at < len(letters) and letters[at][0] != letter and not letters[at][0].isalnum():
                at += 1
            if at == len(letters) or letters[at][0] != letter:
                raise InputError(
                    f"the words of example {example.id or example.input!r} are not those that the model sees (there is "
                    f"no {word!r}), so its rationale cannot be put on them. Leave rationales out, or clean the text."
                )
            marked |= letters[at][1]
            at += 1
        found.append(marked)
    return np.array(found)
