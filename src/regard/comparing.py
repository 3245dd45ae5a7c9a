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
from regard.errors import EmptyInput, InputError, NoGradient, NotServed, OptionError, at_least_one
from regard.explaining import Job, job_for, traces_for
from regard.explanation import Explanation
from regard.measures import kendall
from regard.progress import Counter
from regard.training import fit_planted, inputs_of, predict
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

    Example::

        found = regard.compare(subject, "reviews.csv", methods=["rollout", ("gradient", {"norm": "l2"})])
        found.league  # a row for each method, with intervals
        found.matrix("tau")  # how far each two agree
        found.to_html("comparison.html")
    """
    must_be_subject(subject)
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
    run = _Run(_Counted(subject), adopted or {}, target, how, tuple(bins), seed)
    jobs = run.jobs(methods)
    with Counter("comparing", len(chosen)) as counter:
        for start in range(0, len(chosen), batch_size):
            some = chosen[start : start + batch_size]
            run.add(jobs, batch_of(subject, inputs_of(some)), some, start)
            counter.advance(len(some))
    settings = {
        "examples": len(chosen), "of": len(dataset), "how": run.how, "bins": list(bins), "seed": seed,
        "scalar": run.scalar, "skipped_rows": len(dataset.skipped), "left_out": run.left_out, "kind": dataset.kind,
    }  # fmt: skip
    return summarise(run.numbers, families=run.families, settings=settings, refused=run.refused)


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


@dataclass
class _Run:
    """What is found out, batch by batch."""

    subject: Any
    adopted: Mapping[str, Sequence[Explanation]]
    target: Targets
    how: How | None
    bins: tuple[float, ...]
    seed: int
    numbers: Numbers = field(default_factory=Numbers)
    refused: dict[str, str] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    left_out: str = ""

    @property
    def scalar(self) -> Of:
        """What erasing is measured in: a probability, where there are some."""
        kind = getattr(getattr(self.subject, "head", None), "kind", None)
        return "logit" if kind in ("regression", "embedding") else "probability"

    def jobs(self, methods: Sequence[Method] | None) -> dict[str, Job]:
        """What is asked, by the name that it has in tables; what draws lots takes the seed."""
        wanted: list[Method] = [*found()] if methods is None else [*methods]
        if not any(name == "random" for name in wanted):
            wanted.append("random")
        jobs: dict[str, Job] = {}
        for entry in wanted:
            name, options = (entry, {}) if isinstance(entry, str) else entry
            label = name + "".join(f" {key}={value}" for key, value in options.items())
            jobs[label] = job_for(self.subject, name, options, self.seed)
            self.families[label] = jobs[label].method.family
        jobs["random"] = replace(jobs["random"], of=self.scalar)  # so there is a trace to measure erasing against
        if clash := jobs.keys() & self.adopted.keys():
            raise OptionError(f"adopted: {sorted(clash)} are names of methods. Choose others.")
        self.families |= dict.fromkeys(self.adopted, "adopted")
        return jobs

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
            some = given[first : first + len(examples)]
            scores[label] = [on_words(why, one) for why, one in zip(some, features, strict=True)]
        for number, (example, one) in enumerate(zip(examples, features, strict=True)):
            self.numbers.add(
                example.id or str(first + number), one.words, {label: some[number] for label, some in scores.items()},
                truth_on(example, one.words),
            )  # fmt: skip
        assert self.how is not None
        falls = erased(
            Values(traces[self.scalar]), features, scores, self.numbers.ids[first:], self.bins, self.how, self.seed
        )
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
