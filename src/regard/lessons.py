"""Where models of a recipe are trained: each once, kept, and never twice."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections import Counter as Counted
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from regard.aims import Mask, features_of, flagged, moved
from regard.attention.edits import Sites
from regard.attention.learning import Watch
from regard.attention.running import is_subject
from regard.data import Dataset, Example
from regard.errors import NotServed, OptionError, TrialFailed, at_least_one
from regard.fingerprints import Fetched, of_examples, of_teacher, of_untrained, of_versions
from regard.jobs.files import digest, remove
from regard.jobs.running import Afar, Failed, Runner, run
from regard.jobs.store import Store
from regard.measures import bootstrap, jsd
from regard.memory import OVERHEAD, weight
from regard.progress import Counter
from regard.recipes import Recipe
from regard.splitting import must_fit, splits_of, standardised
from regard.teaching import Arrays, Lesson, Task, Taught, Teacher, load_weights
from regard.training import AT_ONCE, PROBED, class_of, fits, inputs_of

VERY_DIFFERENT = 0.1  # JSD, below which nobody would call attention different, also where seeds hardly differ
WORTH = 15.0  # seconds: a process takes some of them to begin
DAY = 86400.0  # seconds that a training may take on another machine
FRESH = 1000  # between the seed of a base and those of models that are no copy of one
Array = NDArray[np.float64]


class Planned(Exception):
    """Carries the lessons that a trial asks for out of it."""

    def __init__(self, lessons: Sequence[Lesson]) -> None:
        self.lessons = {one.id: one for lesson in lessons for one in _with_bases(lesson)}


@dataclass(frozen=True, eq=False)
class Lab:
    """A recipe, its data, and the models that were trained so far. Made by `Lab.of`.

    Args:
        recipe: how models come about.
        data: by split, the examples. They are learned from, stopped by, and judged by, and these are never the same.
        source: what the data is called.
        seed: of the first model; the others follow.
        runner: where trainings run, and how many at a time.
        threads: of each of them.
        folder: where all is kept.
        identity: all that a lesson's result depends on, besides the lesson.
        untrained: a model that has learned nothing: it tells what can be asked.
        known: what came of lessons, by their ids.
        plans: only tell which lessons are asked for.
        least: seconds of a training, below which it is not worth a process of its own.
    """

    recipe: Recipe
    data: Mapping[str, tuple[Example, ...]]
    source: str
    seed: int
    runner: Runner
    threads: int
    folder: Path
    identity: dict[str, Any] = field(repr=False)
    untrained: Any = field(repr=False)
    known: dict[str, Taught] = field(default_factory=dict, repr=False)
    plans: bool = False
    least: float = 0.0

    @classmethod
    def of(
        cls, recipe: Recipe, data: Dataset, *, seed: int = 0, workers: int = 1, threads: int = 1,
        folder: Path | None = None, runner: Runner | None = None,
    ) -> Lab:  # fmt: skip
        """Split the data, if they do not come so, and see that labels fit; nothing is trained yet."""
        parts = splits_of(data, seed)
        untrained: Any = recipe.build(Dataset.of(parts["train"]), seed)
        if not is_subject(untrained):
            raise OptionError(
                f"build returned a {type(untrained).__name__}, not a subject. Make one of the model: regard.pooled, "
                "regard.text, regard.tabular or regard.module."
            )
        head = untrained.head
        if head.kind == "regression":
            parts = standardised(parts)
        elif head.kind != "embedding":
            must_fit(head, parts)
        prints = {name: of_examples(some) for name, some in parts.items()}
        identity = {"recipe": recipe.identity, "data": prints, "versions": of_versions(), "threads": threads,
                    "untrained": of_untrained(untrained, inputs_of(parts["train"][:PROBED]))}  # fmt: skip
        within = recipe.keep or folder or _while_at_hand(recipe)
        place = Path(within) / f"models-{digest(repr(identity).encode())[:16]}"
        where = runner or Runner(workers=workers)
        return cls(recipe, parts, data.source, seed, where, threads, place, identity, untrained)

    @property
    def planning(self) -> Lab:
        """The same, but that it trains nothing and only tells what it would."""
        return replace(self, plans=True)

    def shared(self, workers: int) -> Lab:
        """The same, with so many trainings at a time, if they take long enough."""
        return replace(self, runner=Runner(workers=workers), least=WORTH)

    @property
    def head(self) -> Any:
        """What the columns of the output are."""
        return self.untrained.head

    @cached_property
    def test(self) -> Dataset:
        """What models are judged by."""
        return replace(Dataset.of(self.data["test"]), source=self.source)

    @cached_property
    def doubt(self) -> str:
        """Why nothing can be said of these models: the base has learned nothing; "" if it has."""
        (base,) = self.results(self.plain(1), "training the base")
        if base.diverged or self.head.kind == "embedding":
            return ""
        right, labels = bootstrap(self.fits(base)), Counted(str(one.label) for one in self.data["test"])
        usual, count = labels.most_common(1)[0]
        share = 0.0 if self.head.kind == "regression" else count / labels.total()
        if right.low > share:
            return ""
        always = "the mean" if self.head.kind == "regression" else repr(usual)
        return (
            f"the base has a test {self.score} of {right.value:.3f} [{right.low:.3f}, {right.high:.3f}], no more than "
            f"always saying {always} ({share:.3f}): it has learned nothing, so nothing is claimed. Train it longer."
        )

    def must_have(self, seeds: Any, *, outputs: bool = True, words: bool = False) -> None:
        """Refuse to compare fewer models than it takes, and what these have not: one output, words to leave out."""
        if at_least_one("seeds", seeds) < 2:
            raise OptionError(f"seeds={seeds!r}: it takes 2 models at least to tell how far seeds differ.")
        if outputs and self.head.kind == "embedding":
            raise NotServed("these models have no classes and no number to compare: there is no total variation.")
        if words and self.test.kind == "pair":
            raise NotServed("words of pairs cannot be left out: which of the two texts they belong to is not known.")

    def fresh(self, number: int) -> int:
        """The seed of a model that is no copy of a plain one."""
        return self.seed + FRESH + number

    def plain(self, seeds: int) -> list[Lesson]:
        """The recipe as it is, so many times; the first is the base of all else."""
        return [Lesson("plain", self.seed + number) for number in range(seeds)]

    def places(self, sites: Sites) -> tuple[list[int], list[int]]:
        """The numbers of the sites that are meant, and which of those with words for keys they are."""
        few = inputs_of(self.data["train"][:PROBED])
        every, wanted = (Watch(self.untrained, few, sites=which).sites for which in ("all", sites))
        return wanted, [every.index(site) for site in wanted]

    def results(self, lessons: Sequence[Lesson], what: str) -> list[Taught]:
        """Give those lessons that were not given yet, the ones that others need first; and what came of all."""
        if self.plans:
            raise Planned(lessons)
        missing = {one.id: one for lesson in lessons for one in _with_bases(lesson) if one.id not in self.known}
        if missing:
            with Store.open(self.folder, {"identity": self.identity}, resume=True) as store:
                self._give([*missing.values()], store, what)
                for one in missing.values():
                    kept = {name: x for name, x in store.arrays(one.id).items() if name.startswith(("dev/", "test/"))}
                    self.known[one.id] = Taught(one, store.record(one.id), kept)
        return [self.known[lesson.id] for lesson in lessons]

    @property
    def finished(self) -> set[str]:
        """The ids of all lessons that were given, now or before."""
        with Store.open(self.folder, {"identity": self.identity}, resume=True) as store:
            return store.finished

    def _give(self, lessons: list[Lesson], store: Store, what: str) -> None:
        teacher = Teacher(self.recipe, self.data, self.folder / "checkpoints", self.threads)
        afar = self._afar(teacher)
        left = [one for one in lessons if one.id not in store.finished]
        with Counter(what, len(left), patience=0 if left else 2.0) as counter:
            for depth in sorted({one.depth for one in left}):
                tasks = self._tasks([one for one in left if one.depth == depth], store)
                failed = []
                for task, result in run(teacher, tasks, runner=self._at_once(len(tasks)), beside=False, afar=afar):
                    if isinstance(result, Failed):
                        failed.append(f"{task.lesson.kind} with seed {task.lesson.seed}: {result.why}")
                        continue
                    store.add(task.lesson.id, *result)
                    remove(teacher.checkpoint(task.lesson))
                    counter.advance()
                if failed:  # what others were taught is kept
                    raise TrialFailed("; ".join(failed))

    def _afar(self, teacher: Teacher) -> Afar | None:
        """How it goes to other machines, where models must begin as they do here."""
        if self.runner.kind == "local":
            return None
        of = partial(of_teacher, seed=self.seed)
        sent = Fetched(partial(replace, teacher), of, of(teacher))
        return Afar(sent, 4 * weight(self.untrained.model) + OVERHEAD, self.threads, DAY)

    def _at_once(self, tasks: int) -> Runner:
        """Where so many run: here, if they are not worth a process each, and nobody said how many there shall be."""
        if self.runner.kind != "local":
            return self.runner
        base = self.known.get(self.plain(1)[0].id)
        long = base is None or float(base.record.get("seconds", 0)) >= self.least
        return Runner(workers=min(self.runner.workers or 1, tasks) if long else 1)

    def _tasks(self, lessons: list[Lesson], store: Store) -> list[list[Task]]:
        """Lessons with what they need, of which those of one base share the memory; without those that cannot be."""
        bases: dict[str, Arrays] = {}
        tasks = []
        for one in lessons:
            needed: Arrays = {}
            if one.base is not None:
                if why := store.record(one.base.id)["diverged"]:
                    store.add(one.id, {"diverged": f"what it needs diverged: {why}", "history": [], "seconds": 0.0})
                    continue
                if one.base.id not in bases:
                    bases[one.base.id] = store.arrays(one.base.id)
                needed = {name: array for name, array in bases[one.base.id].items() if one.needs(name)}
            tasks.append([Task(one, needed)])
        return tasks

    def subject(self, lesson: Lesson | None = None) -> Any:
        """The model that a plain lesson has trained; None: the base."""
        wanted = lesson or self.plain(1)[0]
        (taught,) = self.results([wanted], "training the base")
        self.sound([taught])
        with Store.open(self.folder, {"identity": self.identity}, resume=True) as store:
            arrays = store.arrays(wanted.id)
        subject = self.recipe.build(Dataset.of(self.data["train"]), wanted.seed)
        load_weights(subject, arrays)
        return subject

    def rows(self, base: Taught) -> pd.DataFrame:
        """A row for each test example: its name, label and, where there are classes, what the base predicts."""
        test = self.data["test"]
        names = [one.id or str(place) for place, one in enumerate(test)]
        frame = pd.DataFrame({"example": names, "label": [one.label for one in test]})
        if self.head.kind in ("regression", "embedding"):
            return frame
        return frame.assign(predicted=[self.head.name(int(place)) for place in self.decisions(base)])

    def sound(self, results: list[Taught]) -> list[Taught]:
        """The same; refused where training diverged, since nothing can be said without these models."""
        for one in results:
            if one.diverged:
                raise TrialFailed(
                    f"recipe={self.recipe.name!r}: {one.lesson.kind} with seed {one.lesson.seed}: {one.diverged}"
                )
        return results

    def fits(self, taught: Taught) -> Array:
        """``(example,)`` of the test split: 1 where the class is right, else 0; of a number 1 − error² / variance."""
        if "test/fits" in taught.arrays:
            return np.asarray(taught.arrays["test/fits"])
        test = self.data["test"]
        right = fits(self.untrained, torch.from_numpy(taught.arrays["test/output"]), test)
        if self.head.kind == "regression":
            right = 1 + right / (float(np.var([float(one.label) for one in test])) or 1.0)  # type: ignore[arg-type]
        return np.asarray(right)

    def f1(self, taught: Taught) -> float:
        """F1 of the second of two classes, as the papers have it; the mean over more; of numbers there is none."""
        from sklearn.metrics import f1_score

        if self.head.kind in ("regression", "embedding"):
            return float("nan")
        true = [class_of(self.head, one.label) for one in self.data["test"]]
        said = self.decisions(taught)
        two = self.head.kind == "binary" or self.head.size == 2
        return float(f1_score(true, said, average="binary" if two else "macro", zero_division=0))

    def decisions(self, taught: Taught) -> NDArray[np.int64]:
        """``(example,)``: the class that is decided for."""
        output = torch.from_numpy(taught.arrays["test/output"])
        return np.asarray(self.head.columns(output, "logit").argmax(-1))

    @property
    def score(self) -> str:
        """What `fits` is, in words."""
        return "accuracy" if self.head.kind != "regression" else "R²"

    def tvd(self, one: Taught, other: Taught) -> Array:
        """``(example,)``: how far two models' outputs are apart."""
        both = (torch.from_numpy(some.arrays["test/output"]).double() for some in (one, other))
        return np.asarray(moved(self.head, *both))

    def jsd(self, one: Taught, other: Taught, places: Sequence[int]) -> Array:
        """``(example,)``: how far apart their attention to words is; with several sites the mean."""
        return divergence(one.looks(places), other.looks(places))

    def shuffled(self, taught: Taught, places: Sequence[int]) -> Array:
        """``(example,)``: how far weights are from themselves when they are shuffled among the words, by lot."""
        lots = np.random.default_rng(self.seed)
        looks = taught.looks(places)
        return divergence(looks, [lots.permuted(one, axis=1) for one in looks])

    def flags(self, mask: Mask, split: str = "test") -> list[NDArray[np.bool_]]:
        """Of each example which words are impermissible, in the order in which looks have its tokens."""
        found = []
        for some in batches(self.data[split]):
            for one, features in zip(some, features_of(self.untrained.encode(inputs_of(some))), strict=True):
                marked = flagged(one, features.words, mask)
                found.append(np.array([marked[word] for word in features.word if word is not None], dtype=bool))
        return found


def batches(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """A few at a time."""
    return (examples[start : start + AT_ONCE] for start in range(0, len(examples), AT_ONCE))


def scores_of(lab: Lab, results: Sequence[Taught], name: str) -> pd.DataFrame:
    """A row for each model: its seed, score, F1 and epochs."""
    rows = [
        {"model": name, "seed": str(one.lesson.seed), "score": float(lab.fits(one).mean()), "f1": lab.f1(one),
         "epochs": len(one.record["history"])}
        for one in results
    ]  # fmt: skip
    return pd.DataFrame(rows)


def losses_of(results: Sequence[Taught], option: str, name: str) -> pd.DataFrame:
    """A row for each value of an option and each epoch: the mean loss over models."""
    rows = [
        {name: f"{one.lesson.options[option]:g}", "epoch": row["epoch"], "loss": row["loss"]}
        for one in results
        for row in one.record["history"]
        if np.isfinite(row["loss"])
    ]
    frame = pd.DataFrame(rows, columns=[name, "epoch", "loss"])
    return frame.groupby([name, "epoch"], sort=False)["loss"].mean().reset_index()


def divergence(ones: Sequence[Array], others: Sequence[Array]) -> Array:
    """``(example,)``: the mean over sites of the Jensen–Shannon divergence of maps ``(site, word)``."""
    return np.array([float(np.mean(jsd(one, other))) for one, other in zip(ones, others, strict=True)])


def _with_bases(lesson: Lesson) -> list[Lesson]:
    """The lesson, and before it what it needs."""
    return [*(_with_bases(lesson.base) if lesson.base else ()), lesson]


def _while_at_hand(recipe: Recipe) -> Path:
    """A temporary folder that is there as long as the recipe is."""
    if "folder" not in recipe.own:
        recipe.own["folder"] = tempfile.mkdtemp(prefix="regard-")
        weakref.finalize(recipe, shutil.rmtree, recipe.own["folder"], ignore_errors=True)
    return Path(recipe.own["folder"])
