"""Put an explanation on trial."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pandas as pd

from regard import trials
from regard.attention.edits import Sites
from regard.attention.running import must_be_subject
from regard.attention.sharding import must_be_whole
from regard.cases import FEW, Case, Hand
from regard.catalog import Entry, modules, named
from regard.data import Dataset, Example, read
from regard.data.dataset import Kind
from regard.data.planted import Planted
from regard.data.spooling import held
from regard.errors import InputError, NotServed, OptionError, at_least_one, whole_numbers
from regard.explaining import job_for, model_of
from regard.finding import Finding
from regard.jobs.running import Runner
from regard.lessons import VERY_DIFFERENT, Lab, Planned
from regard.memory import room_for, weight
from regard.recipes import FITS, Recipe
from regard.training import inputs_of
from regard.types import How, Subject, Targets, one_by_one

GROUP = "regard.trials"  # of entry points: name = "package.module"
LEAST = 5  # examples; of fewer there is nothing to say
UNITS = {"text": "texts", "pair": "pairs of texts", "table": "rows"}
log = logging.getLogger("regard")


@dataclass(frozen=True)
class Trial(Entry):
    """A test that an explanation can fail. What its file declares is described in `regard.trials`."""

    claim: str
    reference: str
    criterion: str


@lru_cache
def found() -> dict[str, Trial]:
    """All trials by name."""
    return {one.name: one for one in map(_read, modules(trials, GROUP))}


def trial_named(name: str) -> Trial:
    """The trial of that name."""
    return named("trial", name, found())


def trial(
    subject: Subject | Recipe,
    data: Any,
    name: str,
    *,
    method: str | tuple[str, Mapping[str, Any]] | None = None,
    sites: Sites = "last",
    target: Targets = None,
    examples: int | None = 200,
    how: How | None = None,
    batch_size: int = 32,
    seed: int = 0,
    workers: int = 1,
    threads: int = 1,
    **options: Any,
) -> Finding:
    """Put attention, and what is made of it, on trial: a claim that can be false, tried on your model and data.

    Args:
        subject: made by `regard.text`, `regard.pooled` and the like; or a recipe (`regard.recipe`, `regard.recipes`),
            whose base model is trained first. Trials that train more models need one.
        data: what `regard.data.read` takes, or has read; a planted task. With a recipe its splits "train", "dev" and
            "test" are used, or drawn.
        name: a name from `regard.list_trials`.
        method: the explanation on trial: a name from `regard.list_methods`, or ``(name, options)``; None: "raw".
            Trials that edit attention itself judge no explanation, and take none.
        sites: which attention is edited: "last" (the readout's rows, every head), "all", or numbers and names.
        target: what is explained; None: what is predicted.
        examples: how many are drawn by lot from the data; None: all. Trials that train models take all of "test".
        how: how words are removed, as in `leave_one_out`.
        batch_size: how many examples run together.
        seed: of everything that is drawn, and of the base model of a recipe.
        workers: how many models are trained at a time, in as many processes; a script needs the usual
            ``if __name__ == "__main__"`` then.
        threads: of each training. Results are the same to the last bit for any number of workers, not of threads.
        options: of the trial; unknown ones are refused.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> texts = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad"] * 8
        >>> regard.trial(subject, texts, "permutation", n=20).outcome
        'supported'
    """
    trial_named(name).chosen(options)
    must_count(seed, examples=examples, batch_size=batch_size, workers=workers, threads=threads)
    asked: Any = {"method": method, "sites": sites, "how": how, "batch_size": batch_size, "seed": seed}
    lab, model = None, cast("Subject", subject)
    if isinstance(subject, Recipe):
        lab = lab_for(subject, data, seed=seed, workers=workers, threads=threads)
        model, data = lab.untrained, lab.test
    must_be_subject(model)
    must_be_whole(model.model, f"trial {name}")
    must_train(name, model, lab)
    drawn = draw(data, None if trains(name) else examples, target, seed)
    if lab is not None:
        with suppress(Planned):  # what is wrong is said before anything is trained
            if trains(name):
                hearing(model, drawn, name, options, **asked, lab=lab.planning).finding()
        model = lab.subject()
    found = hearing(model, drawn, name, options, **asked, lab=lab).finding()
    for line in found.warnings:
        log.warning("%s: %s", name, line)
    return found


@dataclass(frozen=True, eq=False)
class Drawn:
    """The examples of a trial.

    Args:
        data: what they come from, as it was passed.
        examples: those that were drawn.
        target: what is explained, a list of one for each, or None: what is predicted.
        kind: "text", "pair" or "table".
        of: how many there are in all.
        skipped: how many rows could not be used.
        source: what the data is called.
    """

    data: Any
    examples: Sequence[Example]
    target: Targets
    kind: Kind
    of: int
    skipped: int
    source: str


def draw(data: Any, examples: int | None, target: Targets, seed: int) -> Drawn:
    """Read the data and draw examples by lot; None: take all."""
    dataset = data.test if isinstance(data, Planted) else dataset_of(data)
    size = len(dataset) if examples is None else examples
    chosen = np.zeros(len(dataset), dtype=bool)
    chosen[dataset.places(size, seed=seed)] = True
    drawn = held(compress(dataset, chosen))
    if isinstance(target, list):
        target = [one_by_one(target, len(dataset))[place] for place in dataset.places(size, seed=seed)]
    if len(drawn) < LEAST:
        asked = f"examples={examples}" if len(drawn) == examples else f"data holds {len(drawn)} examples"
        raise InputError(f"{asked}: a trial needs {LEAST} at least, and {FEW} to mean much.")
    source = str(data) if isinstance(data, (str, Path)) else dataset.source or f"{len(dataset):,} {UNITS[dataset.kind]}"
    return Drawn(data, drawn, target, dataset.kind, len(dataset), len(dataset.skipped), source)


@dataclass(frozen=True, eq=False)
class Hearing:
    """A trial that is ready to run.

    Args:
        trial: which one.
        case: what is on trial.
        options: of the trial.
        drawn: where the examples come from.
    """

    trial: Trial
    case: Case
    options: Mapping[str, Any]
    drawn: Drawn

    @property
    def judges(self) -> bool:
        """Whether it is about an explanation; or about attention itself."""
        return "explanation" in self.trial.needs

    @property
    def planned(self) -> Hearing:
        """The same, but that nothing is trained: it ends when models are asked for."""
        lab = self.case.lab
        return self if lab is None else replace(self, case=replace(self.case, lab=lab.planning))

    def calibrated(self, seeds: Finding) -> Hearing:
        """`adversarial`, held against what the trial `seeds` found rather than against a stand-in."""
        if self.options["between_seeds"] is not None:
            return self
        level = max(round(seeds.settings["between_seeds"], 3), VERY_DIFFERENT)
        return replace(self, options={**self.options, "between_seeds": level})

    def finding(self, hand: Hand | None = None) -> Finding:
        """Run it; with ``hand``, batches come from elsewhere."""
        case = replace(self.case, hand=hand)
        result: Finding = self.trial.function(case, **self.options)
        job = case.job
        about = {"method": job.method.name, "options": dict(job.options)} if self.judges else {"sites": case.sites}
        settings = about | {
            "examples": len(case.examples), "of": self.drawn.of, "target": named_target(case.target),
            "model": model_of(case.subject), "data": self.drawn.source, "seed": case.seed,
            "batch_size": case.batch_size, **self.options, **result.settings,
        }  # fmt: skip
        if result.margin.n < LEAST:
            result = replace(result, supported=None)
        if case.lab is not None:
            settings |= {"recipe": case.lab.recipe.name, **{name: len(some) for name, some in case.lab.data.items()}}
            if doubt := case.lab.doubt:
                result = replace(result, supported=None, warnings=(doubt, *result.warnings))
        control = self.judges and job.method.family == "control"
        warned = (*_warnings(result, self.drawn.skipped, control), *result.warnings)
        absent = getattr(getattr(case.subject, "features", None), "left_out", "") if self.judges else ""
        warned += (f"left out: {absent}.",) if absent else ()
        if hasattr(case.subject, "remarks"):
            if "remarks" not in case.shelf:  # one for all trials of these examples
                case.shelf["remarks"] = case.subject.remarks(inputs_of(case.examples))
            warned += (*case.shelf["remarks"],)
        whole = replace(
            result, trial=self.trial.name, claim=self.trial.claim, cite=self.trial.cite,
            criterion=self.trial.criterion, settings=settings, warnings=warned,
        )  # fmt: skip
        return whole.of_columns() if case.kind == "table" else whole


def hearing(
    subject: Subject,
    drawn: Drawn,
    name: str,
    options: Mapping[str, Any],
    *,
    method: Any = None,
    sites: Sites = "last",
    how: How | None = None,
    batch_size: int = 32,
    seed: int = 0,
    shelf: dict[Any, Any] | None = None,
    lab: Lab | None = None,
) -> Hearing:
    """Make a trial ready, or refuse what the data or the model does not have; arguments as in `trial`."""
    chosen = trial_named(name)
    wanted = chosen.chosen(options)
    judges = "explanation" in chosen.needs
    by, more = _explanation(chosen.name, method, judges)
    if judges and sites != "last":
        raise OptionError(f"sites={sites!r}: {name} judges an explanation, and edits no attention. Leave it out.")
    case = Case(
        subject, drawn.data, drawn.examples, drawn.kind, job_for(subject, by, more, seed), sites=sites,
        target=drawn.target, how=how, seed=seed, batch_size=batch_size, shelf={} if shelf is None else shelf,
        lab=lab,
    )  # fmt: skip
    _must_serve(chosen, case)
    return Hearing(chosen, case, wanted, drawn)


def lab_for(
    recipe: Recipe, data: Any, *, seed: int, workers: int | None = 1, threads: int = 1,
    folder: str | Path | None = None, runner: Runner | None = None,
) -> Lab:  # fmt: skip
    """Where the models of a recipe are trained; in a folder, or where the recipe keeps them."""
    must_count(seed, workers=workers, threads=threads)
    within = None if folder is None else Path(folder)
    lab = Lab.of(
        recipe, dataset_of(data), seed=seed, workers=workers or 1, threads=threads, folder=within, runner=runner
    )
    if workers is not None or lab.runner.kind != "local":
        return lab
    room = room_for(4 * weight(lab.untrained.model))  # weights, gradients, and what Adam keeps
    return lab.shared(min(os.cpu_count() or 1, room))


def dataset_of(data: Any) -> Dataset:
    """The data, read if need be; of a planted task what is learned from, and what is for judging."""
    if isinstance(data, Planted):
        parts = {"train": data.train, "dev": data.held_out, "test": data.test}
        return Dataset.of([replace(one, split=split) for split, some in parts.items() for one in some])
    found = data if isinstance(data, Dataset) else read(data)
    named = found.source or (str(data) if isinstance(data, (str, Path)) else "")
    return replace(found, source=named)


def trains(name: str) -> bool:
    """Whether a trial trains models."""
    return "recipe" in trial_named(name).needs


def must_train(name: str, subject: Any, lab: Lab | None) -> None:
    """Refuse to train models of which nobody knows how they came about."""
    if lab is None and trains(name):
        kind = type(subject).__name__
        fitting = f"regard.recipes.{FITS[kind]}" if kind in FITS else "regard.recipe(build=…, fit=…)"
        raise NotServed(
            f"it trains more models, and a {kind} does not say how it was trained. Pass a recipe in its place: "
            f"{fitting} makes models like this one; on the command line --recipe."
        )


def must_count(seed: int, **counts: int | None) -> None:
    """Refuse counts below one, and seeds below zero."""
    for option, count in counts.items():
        if count is not None:
            at_least_one(option, count)
    if whole_numbers("seed", seed)[0] < 0:
        raise OptionError(f"seed={seed!r} must be 0 or more.")


def list_trials() -> pd.DataFrame:
    """A row for each trial: its name, its claim, what it is held against, what it needs, and its paper.

    Example:
        >>> import regard
        >>> "permutation" in set(regard.list_trials()["name"])
        True
    """
    rows = [
        {
            "name": one.name, "claim": one.claim, "reference": one.reference, "criterion": one.criterion,
            "needs": ", ".join(one.needs), "paper": one.cite,
            "options": ", ".join(f"{option}={value!r}" for option, value in one.options.items()),
        }
        for one in found().values()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _explanation(name: str, method: Any, judges: bool) -> tuple[str, Mapping[str, Any]]:
    """The method on trial, and its options."""
    if method is not None and not judges:
        shown = method if isinstance(method, str) else method[0]
        raise OptionError(f"method={shown!r}: {name} edits attention itself and judges no explanation. Leave it out.")
    by = ("raw", {}) if method is None else (method, {}) if isinstance(method, str) else method
    if not isinstance(by, tuple) or len(by) != 2 or not isinstance(by[1], Mapping):
        raise OptionError(f"method={method!r} must be a name from regard.list_methods(), or (name, options).")
    return by


def named_target(target: Targets) -> Any:
    """A target as it is recorded: functions by their names."""
    if isinstance(target, list):
        return [named_target(one) for one in target]
    return getattr(target, "__name__", type(target).__name__) if callable(target) else target


def _must_serve(chosen: Trial, case: Case) -> None:
    """Refuse what the data or the model does not have."""
    if "classes" in chosen.needs:
        case.must_decide(chosen.name)
    for what, missing in (
        ("labels", sum(one.label is None for one in case.examples)),
        ("rationales", sum(one.rationale is None for one in case.examples)),
    ):
        if what in chosen.needs and missing:
            raise InputError(
                f"{chosen.name} needs {what}, and {missing} of {len(case.examples)} examples have none. Name the "
                f"column that holds them: regard.data.read(…, {what[:-1]}=…), or --{what[:-1]} on the command line."
            )
    if not case.subject.predicts and case.target is None and "recipe" not in chosen.needs:
        raise NotServed(f"{chosen.name}: the model has no classes. Pass target=, such as subject.similarity(text).")


def _warnings(result: Finding, skipped: int, control: bool) -> list[str]:
    interval, lines = result.interval, []
    if control:
        lines.append("the explanation on trial is a control, which looks at nothing of the model.")
    if interval.n < LEAST:
        lines.append(f"{interval.n} examples define the statistic: nothing is claimed of fewer than {LEAST}.")
    elif interval.n < FEW:
        width = interval.high - interval.low
        lines.append(f"only {interval.n} examples: the interval is {width:.3g} wide, and itself uncertain below {FEW}.")
    if interval.undefined:
        lines.append(f"{interval.undefined} examples leave the statistic undefined, and are not in it.")
    said = [*result.values["predicted"].unique()] if "predicted" in result.values else []
    if len(said) == 1:
        lines.append(f"all examples are predicted as {said[0]!r}: nothing is known about other classes.")
    if result.failed:
        lines.append(f"{len(result.failed)} examples failed, and are not in it: {', '.join([*result.failed][:5])}.")
    if result.values.attrs.get("alone"):
        lines.append(f"{result.values.attrs['alone']} examples ran one by one, since their batches failed.")
    if skipped:
        lines.append(f"{skipped} rows of the data could not be used.")
    return lines


def _read(module: ModuleType) -> Trial:
    name = module.__name__.rsplit(".", 1)[-1]
    return Trial(
        name, tuple(module.NEEDS), module.CITE, getattr(module, name), module.CLAIM, module.REFERENCE, module.CRITERION
    )
