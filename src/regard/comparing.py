"""Which explanation for my model? Methods side by side: how they agree, and what each is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.attention.running import batch_of, must_be_subject
from regard.catalog import found
from regard.comparison import Comparison, Numbers, summarise
from regard.data import Dataset, Example, read
from regard.data.planted import confirm
from regard.erasing import BINS, Values, erased, possible
from regard.errors import EmptyInput, InputError, NoGradient, NotServed, OptionError, WorkerDied, at_least_one
from regard.explaining import Job, job_for, traces_for
from regard.explanation import Explanation
from regard.fingerprints import fetching, of_subject
from regard.jobs.running import Afar, Failed, Runner, run, runner_of
from regard.measures import kendall
from regard.memory import OVERHEAD, weight
from regard.progress import Counter
from regard.training import fit_planted, inputs_of, predict, shared_out, threaded
from regard.types import Batch, Features, How, Of, Subject, Targets
from regard.wording import on_words, truth_on

Method = str | tuple[str, Mapping[str, Any]]
Array = NDArray[np.float64]


def compare(
    subject: Subject,
    data: Any,
    *,
    methods: Sequence[Method] | None = None,
    adopted: Mapping[str, Sequence[Explanation]] | None = None,
    target: Targets = None,
    examples: int = 200,
    how: How | None = None,
    bins: Sequence[float] = BINS,
    batch_size: int = 32,
    seed: int = 0,
    workers: int | None = 1,
    threads: int | None = None,
    runner: str = "local",
    address: str | None = None,
    gpus_per_worker: float = 0.0,
    timeout: float | None = None,
) -> Comparison:
    """Put methods side by side on the same examples: do they agree, and does what they point at matter?

    All are judged on words (or columns, or patches), by the size of their scores, because attention has no sign; so
    each removes the same number of words. Special tokens take no part. `random` is always among them.

    Args:
        subject: made by `regard.text`, `regard.pooled` and the like.
        data: what `regard.data.read` takes, or has read. Rationales, where there are some, are the truth to be found.
        methods: names from `regard.list_methods`, with options as ``(name, options)``; None: all that can.
        adopted: by name, explanations from elsewhere (`regard.adopt`), one for each example.
        target: what is explained: a class, label or function of the output, for all examples; None: what is predicted.
        examples: how many are drawn by lot from the data.
        how: how words are removed, as in `leave_one_out`.
        bins: the shares of words that are removed; ERASER's unless you say so.
        batch_size: how many examples run together.
        seed: of what is drawn: examples, ties, controls, intervals.
        workers: how many processes share the work; each holds the model. None: as many as there are cores, if they
            fit into memory.
        threads: of each process; None: this machine's cores shared among workers. Results are the same to the last bit
            for any number of workers, and not for any number of threads.
        runner: where the work is done: "local", or "ray", on a cluster.
        address: of the cluster, as in `audit`.
        gpus_per_worker: of a cluster: 1, or a part of one.
        timeout: seconds of a batch on a cluster.

    Example::

        found = regard.compare(subject, "reviews.csv", methods=["rollout", ("gradient", {"norm": "l2"})])
        found.league  # a row for each method, with intervals
        found.matrix("tau")  # how far each two agree
        found.to_html("comparison.html")
    """
    must_be_subject(subject)
    where = runner_of(runner, workers=workers, address=address, gpus_per_worker=gpus_per_worker, timeout=timeout)
    where, threads = shared_out(where, None if threads is None else at_least_one("threads", threads), subject.model)
    at_least_one("examples", examples)
    at_least_one("batch_size", batch_size)
    if not bins or any(not 0 < share <= 1 for share in bins):
        raise OptionError(f"bins={bins!r} must be shares of the words, between 0 and 1.")
    dataset = data if isinstance(data, Dataset) else read(data)
    chosen = list(dataset.sample(examples, seed=seed))
    if not chosen:
        raise EmptyInput("data holds no examples.")
    for name, whys in (adopted or {}).items():
        if len(whys) != len(chosen):
            raise InputError(f"adopted[{name!r}] has {len(whys)} explanations for {len(chosen)} examples.")
    asked = _asked(methods, adopted or {})
    work = _Work(subject, asked, target, how, tuple(bins), seed, threads, gpus_per_worker > 0)
    some = [_Some(start, tuple(chosen[start : start + batch_size]),
                  {name: tuple(whys[start : start + batch_size]) for name, whys in (adopted or {}).items()})
            for start in range(0, len(chosen), batch_size)]  # fmt: skip
    whole = _together(work, some, where)
    settings = {
        "examples": len(chosen), "of": len(dataset), "how": whole.how, "bins": list(bins), "seed": seed,
        "scalar": whole.scalar, "skipped_rows": len(dataset.skipped), "left_out": whole.left_out, "kind": dataset.kind,
    }  # fmt: skip
    families = {label: found()[name].family for label, (name, _) in asked.items()}
    families |= dict.fromkeys(adopted or {}, "adopted")
    return summarise(whole.numbers, families=families, settings=settings, refused=whole.refused)


def compare_planted(
    task: str,
    *,
    methods: Sequence[Method] | None = None,
    examples: int = 200,
    train: int = 2000,
    epochs: int = 20,
    seed: int = 0,
) -> Comparison:
    """Train a small model on a planted task, see that it uses the planted cause, and compare methods against that.

    Args:
        task: a name from `regard.data.planted.TASKS`.
        methods: as in `compare`.
        examples: how many of the test examples are compared.
        train: how many examples the model learns from.
        epochs: of training; fewer where it does not become better.
        seed: of data, model and comparison.

    Example::

        found = regard.compare_planted("shortcut")
        found.confirmation  # which cause the model was seen to use
        found.league.sort_values("auprc")
    """
    subject, made = fit_planted(task, train=train, epochs=epochs, seed=seed)
    sure = confirm(made, lambda inputs: predict(subject, inputs))
    truth = sure.truth if sure.confirmed else [None] * len(made.test)  # what it uses, or nothing at all
    tested = Dataset.of([replace(one, rationale=mask) for one, mask in zip(made.test, truth, strict=True)])
    found = compare(subject, tested, methods=methods, examples=examples, seed=seed)
    return replace(found, confirmation=sure, settings={**found.settings, "task": task, "rule": made.says})


class _Counted:
    """A subject that counts how many examples its model is run on."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.run = subject, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subject, name)

    def forward(self, batch: Batch) -> Any:
        """As the subject does."""
        self.run += len(batch)
        return self.subject.forward(batch)


def _asked(methods: Sequence[Method] | None, adopted: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Methods with their options, by the names that they have in tables."""
    wanted: list[Method] = [*found()] if methods is None else [*methods]
    if not any(name == "random" for name in wanted):
        wanted.append("random")
    asked = {}
    for entry in wanted:
        name, options = (entry, {}) if isinstance(entry, str) else entry
        asked[name + "".join(f" {key}={value}" for key, value in options.items())] = name, options
    if clash := asked.keys() & adopted.keys():
        raise OptionError(f"adopted: {sorted(clash)} are names of methods. Choose others.")
    return asked


@dataclass(frozen=True, eq=False)
class _Some:
    """Examples that run together, the number of the first of them, and what others say of them."""

    first: int
    examples: tuple[Example, ...]
    adopted: Mapping[str, tuple[Explanation, ...]]


@dataclass(frozen=True, eq=False)
class _Work:
    """What is done with a batch, here or elsewhere. Arguments as in `compare`."""

    subject: Any
    asked: Mapping[str, tuple[str, Mapping[str, Any]]]
    target: Targets
    how: How | None
    bins: tuple[float, ...]
    seed: int
    threads: int
    gpu: bool

    def __call__(self, some: _Some) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was found out about a batch, as "found"."""
        with threaded(self.threads):
            run = _Run(_Counted(self.subject), some.adopted, self.target, self.how, self.bins, self.seed)
            jobs = {label: job_for(run.subject, *one, self.seed) for label, one in self.asked.items()}
            jobs["random"] = replace(jobs["random"], of=run.scalar)  # so there is a trace to measure erasing against
            run.add(jobs, batch_of(self.subject, inputs_of(some.examples)), some.examples, some.first)
        return {"found": replace(run, subject=None, adopted={}, target=None)}, {}

    @property
    def afar(self) -> Afar:
        """How it goes to other machines."""
        sent = replace(self, subject=fetching(self.subject, of_subject(self.subject), gpu=self.gpu))
        return Afar(sent, 2 * weight(self.subject.model) + OVERHEAD, self.threads)


def _together(work: _Work, some: Sequence[_Some], runner: Runner) -> _Run:
    """What all batches gave; the first tells which methods can be served, and the others need not try the rest."""
    with runner.open(threads=work.threads), Counter("comparing", sum(len(one.examples) for one in some)) as counter:
        first: _Run = work(some[0])[0]["found"]
        counter.advance(len(some[0].examples))
        able = {label: one for label, one in work.asked.items() if label not in first.refused}
        rest = replace(work, asked=able, how=first.how)
        done: dict[int, _Run] = {}
        for one, result in run(
            rest, [[one] for one in some[1:]], runner=runner, afar=rest.afar if runner.kind == "ray" else None
        ):
            if isinstance(result, Failed):
                raise WorkerDied(f"examples {one.first} to {one.first + len(one.examples) - 1}: {result.why}")
            done[one.first] = result[0]["found"]
            counter.advance(len(one.examples))
    for start in sorted(done):
        first.extend(done[start])
    return first


@dataclass
class _Run:
    """What is found out about a batch."""

    subject: Any
    adopted: Mapping[str, Sequence[Explanation]]
    target: Targets
    how: How | None
    bins: tuple[float, ...]
    seed: int
    numbers: Numbers = field(default_factory=Numbers)
    refused: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    scalar: Of = "probability"

    def __post_init__(self) -> None:
        kind = getattr(getattr(self.subject, "head", None), "kind", None)
        if self.subject is not None and kind in ("regression", "embedding"):
            self.scalar = "logit"  # what erasing is measured in, where there are no probabilities

    def extend(self, other: _Run) -> None:
        """With what was found out about the next batch; a method that cannot serve one is dropped for all."""
        self.numbers.extend(other.numbers)
        self.refused |= other.refused
        for label in self.refused:
            self.numbers.drop(label)
        self.left_out = self.left_out or other.left_out

    def add(self, jobs: dict[str, Job], batch: Batch, examples: Sequence[Example], first: int) -> None:
        """Explain and judge a batch whose first example has this number; jobs that cannot be done are dropped."""
        self.how = possible(self.subject, batch, self.how)
        try:
            traces = traces_for([*jobs.values()], batch, self.target)
        except NoGradient as problem:
            for label in [label for label, job in jobs.items() if "gradients" in job.method.needs]:
                self._refuse(jobs, label, problem)
            traces = traces_for([*jobs.values()], batch, self.target)
        whole = (batch.source or batch).features
        features, self.left_out = [one.present for one in whole], self.left_out or whole[0].left_out
        scores: dict[str, list[Array]] = {}
        for label, job in list(jobs.items()):
            before = self.subject.run
            try:
                whys = job.explained(traces[job.of])
                scores[label] = [on_words(why, one) for why, one in zip(whys, features, strict=True)]
            except (NotServed, NoGradient) as problem:
                self._refuse(jobs, label, problem)
                continue
            self.numbers.forwards[label] = self.numbers.forwards.get(label, 0) + self.subject.run - before + len(batch)
            self._stability(label, job, traces[job.of], scores[label], features)
        for label, given in self.adopted.items():
            scores[label] = [on_words(why, one) for why, one in zip(given, features, strict=True)]
        for number, (example, one) in enumerate(zip(examples, features, strict=True)):
            self.numbers.add(
                example.id or str(first + number), one.words, {label: some[number] for label, some in scores.items()},
                truth_on(example, one.words),
            )  # fmt: skip
        assert self.how is not None
        falls = erased(Values(traces[self.scalar]), features, scores, self.numbers.ids, self.bins, self.how, self.seed)
        for kept, fallen in zip((self.numbers.comprehensiveness, self.numbers.sufficiency), falls, strict=True):
            for label, of_examples in fallen.items():
                kept.setdefault(label, []).extend(of_examples.tolist())

    def _refuse(self, jobs: dict[str, Job], label: str, problem: Exception) -> None:
        """Drop a job, with what was found of it before; the reason is kept."""
        said = str(problem).split(" Methods that can: ")[0]  # the others are in the table
        self.refused[label] = said if said.startswith(label) else f"{label}: {said}"
        self.numbers.drop(label)
        del jobs[label]

    def _stability(self, label: str, job: Job, trace: Any, scores: list[Array], features: Sequence[Features]) -> None:
        """How well the scores agree with those of another seed; what draws no lots gives the same again."""
        if "seed" not in job.options:
            self.numbers.stability.setdefault(label, []).extend([1.0] * len(scores))
            return
        other = replace(job, options={**job.options, "seed": job.options["seed"] + 1}).explained(trace)
        again = [on_words(why, one) for why, one in zip(other, features, strict=True)]
        found = [kendall(np.abs(x), np.abs(y)).value for x, y in zip(scores, again, strict=True)]
        self.numbers.stability.setdefault(label, []).extend(found)
