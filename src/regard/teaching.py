"""From a lesson to what was learned: models of a recipe, trained in the ways that trials ask for."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.aims import Against, Guided, Hide, Known, features_of, flagged, guide_for, impermissible, mass_on, words_in
from regard.data import Dataset, Example
from regard.errors import NotServed
from regard.explaining import job_for
from regard.jobs.files import remove
from regard.rationales import extracted
from regard.recipes import Recipe, described
from regard.recipes.core import AdamW
from regard.splitting import SPLITS
from regard.training import Aim, Diverged, fit, fits, inputs_of, settled, threaded
from regard.types import JOIN
from regard.wording import on_words

Kind = Literal["plain", "uniform", "adversary", "guide", "deceive", "without", "rationale"]
MODEL = "model."  # before the names of weights
AT_ONCE = 32  # examples that are explained together
# Of models without context, whatever the recipe does: they begin with nothing, and are small.
GUIDE: dict[str, Any] = {"batch_size": 32, "optimizer": AdamW(1e-3, 1e-5)}
EMPTY = "…"  # a text of which nothing is left
Array = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Lesson:
    """One training run: plain data, and with recipe, data and threads all that its result depends on.

    Args:
        kind: what is trained.
        seed: of the model, of the order of examples and of dropout.
        options: of the kind.
        base: whose outputs, attention or weights it needs.
    """

    kind: Kind
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    base: Lesson | None = None

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        options = {name: described(one) for name, one in self.options.items()}
        return {"kind": self.kind, "seed": self.seed, "options": options, "base": self.base and self.base.plain}

    @cached_property
    def id(self) -> str:
        """A hash of all that."""
        return blake2b(json.dumps(self.plain, sort_keys=True).encode(), digest_size=12).hexdigest()

    @property
    def depth(self) -> int:
        """How many lessons must come before it."""
        return 0 if self.base is None else 1 + self.base.depth

    def needs(self, name: str) -> bool:
        """Whether it needs an array of its base."""
        return name.startswith(MODEL) == (self.kind == "rationale")


@dataclass(frozen=True, eq=False)
class Task:
    """A lesson with what it needs of its base."""

    lesson: Lesson
    needed: Arrays


@dataclass(frozen=True, eq=False)
class Taught:
    """What came of a lesson.

    Args:
        lesson: which one.
        record: "diverged" ("" or why), "history", a row for each epoch.
        arrays: of the test split "test/output", "test/looks", "test/lengths" and the like.
    """

    lesson: Lesson
    record: Mapping[str, Any]
    arrays: Arrays

    @property
    def diverged(self) -> str:
        """Why training came to nothing; "" where it did not."""
        return str(self.record["diverged"])

    def looks(self, places: Sequence[int]) -> list[Array]:
        """Of each test example the weights of its words, ``(site, word)``, each site divided by its sum."""
        return [_normalised(part) for part in self.raw(places)]

    def raw(self, places: Sequence[int], split: str = "test") -> list[Array]:
        """The same as it is; what is missing to 1 is on special tokens."""
        return _split(self.arrays[f"{split}/looks"][list(places)], self.arrays[f"{split}/lengths"])

    def heads(self, place: int, split: str = "test") -> list[Array]:
        """Of each example what each head of a site gives its words: ``(head, word)``."""
        return _split(self.arrays[f"{split}/heads/{place}"], self.arrays[f"{split}/lengths"])


@dataclass(frozen=True, eq=False)
class Teacher:
    """Gives lessons; it can be sent to other processes.

    Args:
        recipe: how models come about.
        data: by split, the examples.
        folder: where training that was stopped goes on from.
        threads: of torch.
    """

    recipe: Recipe
    data: Mapping[str, tuple[Example, ...]]
    folder: Path
    threads: int

    def checkpoint(self, lesson: Lesson) -> Path:
        """Where its training is kept while it goes on; on a machine that does not see the folder, in one of its own."""
        folder = self.folder
        if not folder.parent.is_dir():
            folder = Path(tempfile.gettempdir()) / f"regard-{folder.parent.name}"
        return folder / f"{lesson.id}.safetensors"

    def __call__(self, task: Task) -> tuple[dict[str, Any], Arrays]:
        """What comes of it: a record of plain values, and arrays."""
        began = time.monotonic()
        with threaded(self.threads), settled(task.lesson.seed, devices=[]):
            record, arrays = self._taught(task.lesson, task.needed)
        if not self.folder.parent.is_dir():
            remove(self.checkpoint(task.lesson))  # nobody else will
        return record | {"seconds": round(time.monotonic() - began, 1)}, arrays

    def _taught(self, lesson: Lesson, needed: Arrays) -> tuple[dict[str, Any], Arrays]:
        data: Mapping[str, tuple[Example, ...]] = self.data
        if lesson.kind in ("without", "rationale"):
            data = self._changed(lesson, needed)
        train = Dataset.of(data["train"])
        subject: Any = self.recipe.build(train, lesson.seed)
        aim = self._aim(lesson, subject, needed)
        if lesson.kind == "guide":
            subject = guide_for(subject, lesson.seed)
        try:
            history = fit(
                subject, train, validation=Dataset.of(data["dev"]), seed=lesson.seed, aim=aim,
                checkpoint=self.checkpoint(lesson), **self._course(lesson),
            )  # fmt: skip
        except Diverged as problem:
            return {"diverged": str(problem), "history": problem.rows}, {}
        record: dict[str, Any] = {"diverged": "", "history": history.to_dict("records")}
        arrays: Arrays = {}
        if lesson.kind in ("plain", "adversary", "deceive"):
            for split in SPLITS if lesson.kind != "deceive" else ("dev", "test"):
                arrays |= observed(subject, data[split], split)
        elif hasattr(subject, "fits"):
            arrays["test/fits"] = aim.pupil(subject, data["test"]).fits(data["test"])
        else:
            arrays["test/output"] = aim.pupil(subject, data["test"]).outputs(data["test"]).numpy(force=True)
        if lesson.kind == "plain":
            weights = subject.model.state_dict()
            arrays |= {MODEL + name: one.detach().numpy(force=True) for name, one in weights.items()}
        return record, arrays

    def _course(self, lesson: Lesson) -> dict[str, Any]:
        """The recipe's; models without context are no models of the recipe, and adversaries may take longer."""
        if lesson.kind == "guide":  # of small data more epochs, so that there is something to compare
            epochs = max(20, -(-1000 * GUIDE["batch_size"] // len(self.data["train"])))
            return GUIDE | {"epochs": epochs, "patience": epochs // 6}
        course, effort = dict(self.recipe.fit), lesson.options.get("effort", 1)
        patience = course["patience"] and effort * course["patience"]
        return course | {"epochs": effort * course["epochs"], "patience": patience}

    def _aim(self, lesson: Lesson, subject: Any, needed: Arrays) -> Aim:
        options = lesson.options
        if lesson.kind == "uniform":
            return Aim(uniform=options["sites"])
        if lesson.kind == "deceive":
            return Hide(sites=options["sites"], factor=options["factor"], mask=options["mask"], heads=options["heads"])
        known: dict[int, Known] = {}
        if lesson.kind in ("adversary", "guide") and lesson.base is not None:
            for split in SPLITS:
                known |= known_of(self.data[split], needed, split, options["places"])
        if lesson.kind == "adversary":
            return Against(sites=options["sites"], factor=options["factor"], known=known)
        if lesson.kind == "guide":
            return Guided(base=subject, by=options["by"], known=known)
        return Aim()

    def _changed(self, lesson: Lesson, needed: Arrays) -> dict[str, tuple[Example, ...]]:
        """The examples with only some of their words: those that are not masked, or those that are a rationale."""
        options, subject = lesson.options, self.recipe.build(Dataset.of(self.data["train"]), lesson.seed)
        if lesson.kind == "rationale":
            load_weights(subject, needed)

        def kept(examples: Sequence[Example]) -> Iterator[tuple[tuple[str, ...], NDArray[np.bool_]]]:
            batch = subject.encode(inputs_of(examples))
            words = [one.words for one in features_of(batch)]
            if lesson.kind == "without":
                flags = [flagged(one, some, options["mask"]) for one, some in zip(examples, words, strict=True)]
                yield from ((some, ~flag) for some, flag in zip(words, flags, strict=True))
                return
            job = job_for(subject, options["method"], options["options"], options["lot"])
            whys = job.explained(job.trace(batch, None))
            for example, some, why, features in zip(examples, words, whys, features_of(batch), strict=True):
                scores = on_words(why, features)
                chosen = extracted(scores, options["share"], options["contiguous"], example.id, options["lot"])
                yield some, np.isin(np.arange(len(some)), [*chosen])

        changed: dict[str, tuple[Example, ...]] = {}
        for split, examples in self.data.items():
            order = sorted(range(len(examples)), key=lambda place: len(str(examples[place].input)))
            made: dict[int, Example] = {}
            for start in range(0, len(order), AT_ONCE):
                places = order[start : start + AT_ONCE]
                pairs = kept([examples[place] for place in places])
                made |= {
                    place: reduced(examples[place], words, keep)
                    for place, (words, keep) in zip(places, pairs, strict=True)
                }
            changed[split] = tuple(made[place] for place in range(len(examples)))
        return without_empty(changed)


@torch.no_grad()
def observed(subject: Any, examples: Sequence[Example], split: str) -> Arrays:
    """What a model says of examples and where it looks: by site the weights of words, of all examples in a row.

    For judging also those of each head; where the subject knows what is impermissible, the mass that is on it.
    """
    pupil = Aim(sites="all").pupil(subject, examples)
    outputs: dict[int, Tensor] = {}
    looks: dict[int, Tensor] = {}
    heads: dict[int, list[Tensor]] = {}
    masses: dict[int, Tensor] = {}
    right: dict[int, float] = {}
    for step in pupil.steps(examples):
        maps = [look.heads for look in step.looks]
        seen = words_in(step.batch, maps[-1].shape[-1])
        if any(one.shape[-1] != seen.shape[1] for one in maps):
            raise NotServed("not all attention of this model is over the rows of its input, so it cannot be compared.")
        for at, place in enumerate(step.places):
            outputs[place] = step.output[at]
            looks[place] = torch.stack([one[at].mean(0)[seen[at]] for one in maps])
            heads[place] = [one[at][:, seen[at]] for one in maps]
        if hasattr(subject, "aligned"):
            mass = [
                mass_on(look, impermissible(subject, step.batch, step.examples, look, ())).mean(1)
                for look in step.looks
            ]
            masses |= dict(zip(step.places, torch.stack(mass, 1), strict=True))  # of each the sites
            right |= dict(zip(step.places, fits(subject, step.output, step.examples), strict=True))
    order = range(len(examples))
    arrays = {f"{split}/lengths": np.array([looks[place].shape[1] for place in order])}
    if outputs[0].dim() == 1:  # of sequences there is one for each step, and nobody asks for them
        arrays[f"{split}/output"] = torch.stack([outputs[place] for place in order]).numpy(force=True)
    arrays[f"{split}/looks"] = torch.cat([looks[place] for place in order], 1).numpy(force=True)
    for site in range(len(heads[0])) if split != "train" else ():
        arrays[f"{split}/heads/{site}"] = torch.cat([heads[place][site] for place in order], 1).numpy(force=True)
    if masses:
        arrays[f"{split}/mass"] = torch.stack([masses[place] for place in order]).numpy(force=True)
        arrays[f"{split}/fits"] = np.array([right[place] for place in order])
    return arrays


def known_of(examples: Sequence[Example], arrays: Arrays, split: str, places: Sequence[int]) -> dict[int, Known]:
    """By identity of each example what `observed` has kept of it; of these sites only."""
    looks = torch.from_numpy(arrays[f"{split}/looks"])[list(places)]
    parts = looks.split(arrays[f"{split}/lengths"].tolist(), 1)
    outputs = torch.from_numpy(arrays[f"{split}/output"])
    return {id(one): Known(output, part) for one, output, part in zip(examples, outputs, parts, strict=True)}


def load_weights(subject: Any, arrays: Arrays) -> None:
    """Put weights that were kept into a model that was just built."""
    state = {name.removeprefix(MODEL): torch.from_numpy(one) for name, one in arrays.items() if name.startswith(MODEL)}
    subject.model.load_state_dict(state)
    subject.model.eval()


def without_empty(data: dict[str, tuple[Example, ...]]) -> dict[str, tuple[Example, ...]]:
    """Without columns of a table that are missing in all rows that are learned from: nothing can be known of them."""
    if data["train"][0].kind != "table":
        return data
    rows: list[Any] = [one.input for one in data["train"]]
    gone = {name for name in rows[0] if all(row[name] is None for row in rows)}
    if gone == {*rows[0]}:
        raise NotServed("nothing is left of the table to learn from.")

    def left(one: Example) -> Example:
        assert isinstance(one.input, Mapping)
        return replace(one, input={name: cell for name, cell in one.input.items() if name not in gone})

    return {split: tuple(map(left, some)) for split, some in data.items()}


def reduced(example: Example, words: Sequence[str], keep: NDArray[np.bool_]) -> Example:
    """The example with some of its words only; cells of a table that are not kept are missing."""
    if isinstance(example.input, Mapping):
        gone = {name for word, one in zip(words, keep, strict=True) if not one for name in (word, *word.split(JOIN))}
        cells = {name: None if name in gone else value for name, value in example.input.items()}
        return replace(example, input=cells, rationale=None)
    text = " ".join(word for word, one in zip(words, keep, strict=True) if one)
    return replace(example, input=text or EMPTY, rationale=None)


def _normalised(part: Array) -> Array:
    """Weights of words divided by their sum; alike, where there are none."""
    total = part.sum(-1, keepdims=True)
    return np.asarray(np.where(total > 1e-12, part / np.maximum(total, 1e-12), 1 / part.shape[-1]))


def _split(looks: NDArray[Any], lengths: NDArray[Any]) -> list[Array]:
    return np.split(looks.astype(np.float64), np.cumsum(lengths)[:-1], axis=-1)
