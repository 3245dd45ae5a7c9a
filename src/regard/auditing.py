"""The verb audit: all trials of a model on data, cut into units that can stop at any time and go on."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections import Counter as Counted
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from regard.asked import EXAMPLES, METHODS, PROBES, Asked, checked, probes_of, threads_of
from regard.attention.running import must_be_subject
from regard.audited import Audit
from regard.cases import Case, Part, Result
from regard.concluding import concluded
from regard.data import Dataset, Example
from regard.data.planted import Planted
from regard.errors import OptionError, RegardError, true_or_false
from regard.excerpts import Parcel, parcels
from regard.exhibits import exhibit, redacted
from regard.explaining import job_for
from regard.fingerprints import fetching, of_examples, of_subject, of_versions
from regard.jobs.plan import EXHIBIT, HEADS, Unit
from regard.jobs.running import Afar, Failed, Runner, run, runner_of
from regard.jobs.store import Store
from regard.lessons import Lab, Planned
from regard.memory import OVERHEAD, weight
from regard.progress import Board
from regard.recipes import Recipe, described
from regard.surveying import probed as ask_heads
from regard.training import settled, shared_out, threaded
from regard.trying import (
    Drawn,
    Hearing,
    draw,
    hearing,
    lab_for,
    must_count,
    must_train,
    named_target,
    trains,
    trial_named,
)
from regard.types import How, Subject, Targets

MOST_PROBED = MOST_KEPT = 1000  # examples that heads are looked at with; things that units leave for one another
FACTS = ("labelled", "planted", "scale", "widths")  # what takes all examples to be known
LOCAL = Runner()
log = logging.getLogger("regard")


def audit(
    subject: Subject | Recipe,
    data: Any,
    *,
    methods: Sequence[Asked] = METHODS,
    trials: str | Sequence[Asked] = "quick",
    probes: Sequence[Asked] = PROBES,
    target: Targets = None,
    how: How | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    shown: int = 12,
    redact: bool = False,
    workers: int | None = 1,
    threads: int | None = None,
    runner: str = "local",
    address: str | None = None,
    gpus_per_worker: float = 0.0,
    timeout: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    command: str = "",
) -> Audit:
    """Put the explanations of a model on trial, all at once, and judge them: the main job.

    Args:
        subject: made by `regard.text`, `regard.causal` and the like; or a recipe: its base model is trained and
            audited, and trials that train more models can run.
        data: what `regard.data.read` takes, or has read; a planted task. With a recipe its splits "train", "dev" and
            "test" are used, or drawn.
        methods: the explanations on trial: names from `regard.list_methods`, or ``(name, options)``.
        trials: "quick", "all", or names from `regard.list_trials`, each with options if need be: ``(name, options)``.
        probes: what is asked of heads and layers: from `regard.list_probes`, of up to 1,000 examples; (): nothing.
        target: what is explained; None: what is predicted.
        how: how words are removed, as in `leave_one_out`.
        limit: how many examples are drawn by lot; None: 200 for "quick", otherwise 500.
        batch_size: how many examples run together.
        seed: of everything that is drawn.
        shown: how many examples the report shows.
        redact: leave texts out of everything that is kept or shown.
        workers: how many processes share the work; each holds the model. None: as many as there are cores, if they
            fit into memory.
        threads: of each process; None: this machine's cores shared among workers. Results are the same to the last bit
            for any number of workers, and not for any number of threads.
        runner: where the work is done: "local", or "ray", on a cluster.
        address: of the cluster: "auto", "host:port", "ray://host:port"; None: one is started here, and stopped again.
        gpus_per_worker: of a cluster: 1, or a part of one; the model must fit into it.
        timeout: seconds of one chunk of work on a cluster, after which it is given up; None: an hour.
        out: the folder of the run, which can go on after it was stopped; None: nothing is kept.
        resume: go on with the run in that folder.
        command: what was typed, for the report.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> texts = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad"] * 8
        >>> regard.audit(subject, texts, methods=["raw"], trials=["comprehensiveness"], shown=2).verdict()["causal"]
        'supported'
    """
    if resume and threads is None and out is not None:
        threads = threads_of(out)
    where = runner_of(runner, workers=workers, address=address, gpus_per_worker=gpus_per_worker, timeout=timeout)
    lab, model = None, cast("Subject", subject)
    with contextlib.ExitStack() as stack:
        if isinstance(subject, Recipe):
            checked(methods, trials, out, resume)  # before anything is trained
            stack.enter_context(where.open(threads=threads))
            lab = lab_for(subject, data, seed=seed, workers=workers, folder=out, runner=where)
            model, data = lab.subject(), lab.test
        bench = prepared(
            model, data, lab=lab, methods=methods, trials=trials, probes=probes, target=target, how=how, limit=limit,
            batch_size=batch_size, seed=seed, shown=shown, redact=redact, runner=where, threads=threads,
            command=command,
        )  # fmt: skip
        stack.enter_context(bench.open())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="regard-")) if out is None else out
        return bench.audit(Path(folder), resume=resume and out is not None)


def prepared(
    subject: Subject,
    data: Any,
    *,
    lab: Lab | None = None,
    methods: Sequence[Asked] = METHODS,
    trials: str | Sequence[Asked] = "quick",
    probes: Sequence[Asked] = PROBES,
    target: Targets = None,
    how: How | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    shown: int = 12,
    redact: bool = False,
    runner: Runner = LOCAL,
    threads: int | None = None,
    command: str = "",
) -> Bench:
    """Check everything that `audit` is asked, and read the data; nothing has run yet."""
    must_be_subject(subject)
    explained, tried = checked(methods, trials)
    must_count(seed, limit=limit, batch_size=batch_size, threads=threads, shown=shown or None)
    true_or_false("redact", redact)
    examples = limit or EXAMPLES["quick" if trials == "quick" else "other"]
    runner, threads = shared_out(runner, threads, subject.model)
    drawn = draw(data, examples, target, seed)
    return Bench(
        subject, drawn, explained, tried, probes_of(probes), how,
        batch_size, seed, min(shown, len(drawn.examples)), redact, runner, threads, command, lab,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Bench:
    """An audit that is ready to run. Arguments as in `audit`; it can be sent to other processes."""

    subject: Any
    drawn: Drawn
    methods: Mapping[str, tuple[str, Mapping[str, Any]]]
    trials: Mapping[str, Mapping[str, Any]]
    probes: Sequence[tuple[str, Mapping[str, Any]]]
    how: How | None
    batch_size: int
    seed: int
    shown: int
    redact: bool
    runner: Runner
    threads: int
    command: str
    lab: Lab | None = None
    shelf: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What goes to other processes: no examples, as each unit brings its own; planted data is asked for more."""
        data = self.drawn.data if isinstance(self.drawn.data, Planted) else None
        target = None if isinstance(self.drawn.target, list) else self.drawn.target
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        drawn = replace(self.drawn, data=data, examples=(), target=target)
        facts = {key: one for key, one in self.shelf.items() if key[0] in FACTS}
        return own | {"drawn": drawn, "shelf": facts, "lab": None}

    def look(self) -> None:
        """Put what takes all examples to be known on the shelf, before units run; also that it could not be."""
        with threaded(self.threads):
            try:
                self._case.labelled, self._case.scale  # noqa: B018 - this is the look
            except Exception as problem:  # it is raised where it is asked for
                self.shelf["scale",] = problem

    @property
    def afar(self) -> Afar:
        """How it goes to other machines."""
        subject = fetching(self.subject, self.identity["model"], gpu=self.runner.gpus_per_worker > 0)
        return Afar(replace(self, subject=subject), 2 * weight(self.subject.model) + OVERHEAD, self.threads)

    def open(self) -> contextlib.AbstractContextManager[Any]:
        """For the length of a block, where it runs."""
        size = 0 if hasattr(self.subject, "reopen") else weight(self.subject.model)
        return self.runner.open(threads=self.threads, size=size)

    def packed(self, chunk: Sequence[Unit]) -> list[Parcel]:
        """Units with what they take of the data."""
        return parcels(chunk, self.drawn, self._case.names, self.seed)

    @cached_property
    def called(self) -> tuple[dict[tuple[str, str | None], Hearing], list[dict[str, Any]]]:
        """The trials by name and explanation; and those that this model, or these data, cannot serve."""
        ready, refused = {}, []
        for name, options in self.trials.items():
            for title in self.methods if "explanation" in trial_named(name).needs else (None,):
                try:
                    must_train(name, self.subject, self.lab)
                    one = self._hearing(name, options, title)
                    with contextlib.suppress(_Done, Planned):
                        one.planned.finding(_stop)  # as far as its first batch: options are checked, and what it needs
                    ready[name, title] = one
                except OptionError:
                    raise
                except RegardError as problem:
                    refused.append({"trial": name, "method": title, "why": str(problem)})
        return ready, refused

    def _hearing(self, name: str, options: Mapping[str, Any], title: str | None) -> Hearing:
        lab = self.lab
        drawn = self.drawn if lab is None or not trains(name) else draw(lab.test, None, None, self.seed)
        return hearing(
            self.subject, drawn, name, options, method=title and self.methods[title], how=self.how,
            batch_size=self.batch_size, seed=self.seed, shelf=self.shelf, lab=lab,
        )  # fmt: skip

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that the findings depend on; while a run is resumed it must not change."""
        asked = {
            "methods": {title: [name, dict(options)] for title, (name, options) in self.methods.items()},
            "trials": {name: dict(options) for name, options in self.trials.items()},
            "probes": [[name, dict(options)] for name, options in self.probes],
            "target": named_target(self.drawn.target),
            "how": self.how, "examples": len(self.drawn.examples), "batch_size": self.batch_size, "seed": self.seed,
            "shown": self.shown, "redact": self.redact, "threads": self.threads,
        }  # fmt: skip
        whole = {
            "model": of_subject(self.subject),
            "data": {"source": self.drawn.source, "of": self.drawn.of, "drawn": of_examples(self.drawn.examples)},
            "options": asked, "versions": of_versions(),
        }  # fmt: skip
        whole |= {} if self.lab is None else {"recipe": self.lab.identity}
        plain: dict[str, Any] = json.loads(json.dumps(whole, default=described))
        return plain

    @cached_property
    def units(self) -> list[Unit]:
        """Everything that is to run: what heads do, all batches of all trials, then the examples that are shown."""
        batches = [tuple(part.places) for part in self._case.parts()]
        cut = [key for key in self.called[0] if not trains(key[0])]
        tried = [self.unit(name, title, places) for name, title in cut for places in batches]
        lots = np.random.default_rng(self.seed).permutation(len(self.drawn.examples))[:MOST_PROBED]
        first = [self.unit(HEADS, None, tuple(np.sort(lots).tolist()))] if self.probes else []
        return [*first, *tried, *(self.unit(EXHIBIT, None, (number,)) for number in range(self.shown))]

    def unit(self, task: str, title: str | None, places: tuple[int, ...]) -> Unit:
        """A batch of a trial, an example that is shown, or the examples that heads are looked at with."""
        if (task, title) not in self._given:
            asked, explained = self.identity["options"], self.identity["options"]["methods"]
            given = {name: self.identity[name] for name in ("model", "data", "versions")}
            given |= {name: asked[name] for name in ("target", "how", "seed", "redact", "threads")}
            options = asked["probes"] if task == HEADS else asked["trials"].get(task)
            self._given[task, title] = given | {"options": options, "method": explained.get(title, explained)}
        return Unit(task, title, places, self._given[task, title])

    @cached_property
    def _given(self) -> dict[tuple[str, str | None], dict[str, Any]]:
        """What very many units share: by trial and explanation, what their results depend on."""
        return {}

    @cached_property
    def _case(self) -> Case:
        """The examples, without a trial."""
        drawn, job = self.drawn, job_for(self.subject, "raw", {}, self.seed)
        return Case(
            self.subject, drawn.data, drawn.examples, drawn.kind, job, target=drawn.target, how=self.how,
            seed=self.seed, batch_size=self.batch_size, shelf=self.shelf,
        )  # fmt: skip

    def __call__(self, given: Unit | Parcel) -> tuple[dict[str, Any], dict[str, Any]]:
        """What comes of a unit: a record of plain values, and arrays. It sees what it would see anywhere else."""
        if isinstance(given, Unit):
            self.look()
            (given,) = self.packed([given])
        examples = cast("tuple[Example, ...]", given.examples)
        return replace(self, drawn=replace(self.drawn, examples=examples, target=given.target))._done(given.unit)

    def _done(self, unit: Unit) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays: dict[str, Any] = {}
        began = time.monotonic()
        with threaded(self.threads), settled(unit.seed):
            if unit.task == HEADS:
                (part,) = self._case.parts()
                probed = self.probes, part.target, self.batch_size, self.seed
                record = ask_heads(self.subject, Dataset.of(part.examples), *probed)
            elif unit.task == EXHIBIT:
                jobs = {title: job_for(self.subject, *one, self.seed) for title, one in self.methods.items()}
                record, arrays = exhibit(self._case, jobs, unit.places[0])
            else:
                record = self._tried(unit)
        found = redacted(record, table=self.drawn.kind == "table") if self.redact else record
        return {"found": found, "seconds": round(time.monotonic() - began, 3)}, arrays

    def _tried(self, unit: Unit) -> dict[str, Any]:
        """What a trial makes of one batch."""
        there = [key for key in self.shelf if key[0] not in FACTS]
        for age, key in enumerate(reversed(there)):
            if age >= MOST_KEPT or key[0] not in ("scores", "trace", unit.task):
                del self.shelf[key]  # of long ago, or of another trial; it may be large

        def hand(part: Part, work: Callable[[], Result]) -> Result:
            raise _Done(work())

        try:
            self._hearing(unit.task, self.trials[unit.task], unit.method).finding(hand)
        except _Done as done:
            return done.result
        except OptionError:
            raise
        except Exception as problem:  # whatever it is: the other trials go on
            said = str(problem) if isinstance(problem, RegardError) else f"{type(problem).__name__}: {problem}"
            log.debug("%s", unit, exc_info=True)
            return {"refused": f"{type(problem).__name__}; the message may quote a text." if self.redact else said}
        raise AssertionError(f"{unit} has no batch of its own")

    def chunks(self, finished: set[str]) -> list[list[Unit]]:
        """What is left to do; the trials of a batch with all explanations run side by side, as they share work."""
        groups: dict[tuple[str, tuple[int, ...]], list[Unit]] = {}
        for unit in self.units:
            if unit.id not in finished:
                groups.setdefault((unit.task, unit.places), []).append(unit)
        return [*groups.values()]

    def audit(self, folder: Path, *, resume: bool, steps: Mapping[str, float] | None = None) -> Audit:
        """Run what is left, and judge it; ``steps``: by part, what a step of it will roughly take."""
        units = self.units  # before anything is written: options are checked
        began = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = {"identity": self.identity, "command": self.command, "began": began}
        self.look()
        failed: dict[str, str] = {}
        with Store.open(folder, manifest, resume=resume) as store:
            left = self.chunks(store.finished)
            totals, done = (
                Counted(unit.part for unit in units),
                Counted(unit.part for unit in units if unit.id in store.finished),
            )
            with Board(totals, done=done, seconds=steps) as board:
                afar = self.afar if self.runner.kind != "local" else None
                for unit, result in run(self, left, runner=self.runner, afar=afar):
                    if isinstance(result, Failed):
                        failed[unit.id] = result.why  # and is not added: who resumes this tries again
                    else:
                        store.add(unit.id, *result)
                    board.advance(unit.part)
            concluding = time.monotonic()
            kept = concluded(self, store, failed)  # which trains, too
            finished = [unit for unit in units if unit.id not in failed]
            maps = {name: array for unit in finished if unit.task == EXHIBIT
                    for name, array in store.arrays(unit.id).items()}  # fmt: skip
            worked = sum(store.record(unit.id)["seconds"] for unit in finished) / (self.runner.workers or 1)
            times = {"began": store.manifest["began"], "seconds": round(worked + time.monotonic() - concluding, 1)}
            store.finish(kept, times)
        return Audit.from_dict(kept, maps, times | {"command": self.command})


class _Done(Exception):
    """Carries the result of a batch out of a trial, which would go on with the next."""

    def __init__(self, result: Result | None = None) -> None:
        self.result = result or {}


def _stop(part: Part, work: object) -> Result:
    raise _Done
