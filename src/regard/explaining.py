"""From a model and inputs to explanations: batches in, one record for each example out."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from regard.attention.running import batch_of, must_be_subject, out_of_memory, undisturbed
from regard.attention.tracing import Trace, traced
from regard.catalog import Method, found, method_named
from regard.errors import (
    EmptyInput,
    InputError,
    NoGradient,
    NotServed,
    WrongTarget,
    at_least_one,
    choose,
    non_finite,
)
from regard.explanation import Explanation
from regard.progress import Counter
from regard.types import Batch, Features, Of, Scores, Special, Subject, Targets, one_by_one

log = logging.getLogger("regard")
OFS = ("logit", "probability", "logprob")


def explain(
    subject: Subject,
    inputs: Any,
    *,
    method: str,
    target: Targets = None,
    of: Of | None = None,
    special: Special | None = None,
    sink: Special = "keep",
    batch_size: int = 32,
    generate: int | None = None,
    continuation: str | None = None,
    **options: Any,
) -> Any:
    """Turn attention into an attribution: a number for each token.

    Args:
        subject: made by `regard.text`, `regard.causal`, `regard.image` and the like.
        inputs: one input, or many: a list, a DataFrame with a column "text", a generator, tensors, an encoded batch.
        method: a name from `regard.list_methods`.
        target: what is explained: a class, label, token, pair or function of the output, or a list with one for each
            example; None: what is predicted.
        of: "logit", "probability" or "logprob" of the target; None: what the method's paper explains.
        special: what words and pictures do with special tokens; None: what the subject says. Scores stay raw.
        sink: the same for the first token of a decoder.
        batch_size: how many inputs run together; fewer where they do not fit into memory.
        generate: explain each of up to so many tokens that a language model goes on with.
        continuation: explain each token of this text, which it is made to go on with.
        options: of the method; unknown ones are refused.

    Returns:
        An `Explanation` for one input, a list of them for many, and for the tokens of a continuation.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> why = regard.explain(subject, "so so good so", method="rollout")
        >>> why.words().loc[2, "word"]
        'good'
    """
    must_be_subject(subject)
    chosen = method_named(method)
    wanted = chosen.chosen(options)
    policies = ("keep", "drop", "renormalise")
    for name, given, choices in (("of", of, OFS), ("special", special, policies), ("sink", sink, policies)):
        if given is not None:
            choose(name, given, choices)
    at_least_one("batch_size", batch_size)
    job = Job(subject, chosen, wanted, of or _scalar(chosen, subject), special or subject.special, sink)
    try:
        if generate is not None or continuation is not None:
            return _produced(job, inputs, generate, continuation, target)
        return _all(job, inputs, batch_size, target)
    except NoGradient as problem:
        able = [one.name for one in found().values() if one.family == "attention" and "gradients" not in one.needs]
        raise NoGradient(f"{method}: {problem} Methods without gradients: {', '.join(able)}.") from problem


def _all(job: Job, inputs: Any, batch_size: int, target: Targets) -> Any:
    """The explanations of all inputs, or of the only one; texts run with others of their length, the longest first."""
    inputs = _listed(job.subject, inputs)
    if isinstance(inputs, list) and len(inputs) > batch_size and all(isinstance(one, str) for one in inputs):
        order = sorted(range(len(inputs)), key=lambda place: -len(inputs[place]))
        listed = isinstance(target, list) and one_by_one(target, len(inputs))
        targets = [listed[place] for place in order] if listed else target
        try:
            whys = _in_turn(job, [inputs[place] for place in order], batch_size, targets)
        except InputError as problem:
            raise type(problem)(_renumbered(str(problem), order.__getitem__)) from problem
        return [why for _, why in sorted(zip(order, whys, strict=True), key=lambda pair: pair[0])]
    return _in_turn(job, inputs, batch_size, target)


def _in_turn(job: Job, inputs: Any, batch_size: int, target: Targets) -> Any:
    """The explanations of all inputs, or of the only one, in their order."""
    single, total, batches = _batches(job.subject, inputs, batch_size)
    explanations: list[Explanation] = []
    with Counter(f"explaining by {job.method.name}", total) as counter:
        for batch in batches:
            explanations += _explained(job, batch, _targets_of(target, len(explanations), len(batch), total))
            counter.advance(len(batch))
    if not explanations:
        raise EmptyInput("inputs holds no examples.")
    if isinstance(target, list):
        one_by_one(target, len(explanations))  # raises if they are not as many
    return explanations[0] if single else explanations


def _scalar(method: Method, subject: Subject) -> Of:
    """What the method's paper explains, where the output has it: a regression has no probabilities."""
    kind = getattr(getattr(subject, "head", None), "kind", None)
    return "logit" if kind == "regression" else method.of


@dataclass(frozen=True)
class Job:
    """What is asked of every batch."""

    subject: Subject
    method: Method
    options: dict[str, Any]
    of: Of
    special: Special
    sink: Special

    @property
    def differentiates(self) -> bool:
        """Whether the trace must have gradients; methods that run the model again see to it then."""
        return "gradients" in self.method.needs and "reruns" not in self.method.needs

    def trace(
        self, batch: Batch, target: Targets, *, subject: Subject | None = None, verified: str | None = None
    ) -> Trace:
        """What the method needs of these examples."""
        return traced(
            subject or self.subject, batch, target=target, of=self.of, verified=verified,
            onward="values" in self.method.needs, gradients=self.differentiates,
        )  # fmt: skip

    def explained(self, trace: Trace) -> list[Explanation]:
        """One record for each example."""
        return _records(self, trace, self.method(trace, **self.options))


def job_for(subject: Subject, method: str, options: Mapping[str, Any], seed: int = 0) -> Job:
    """What a method is asked when nothing else is said; what draws lots takes the seed."""
    chosen = method_named(method)
    seeded = {"seed": seed, **options} if "seed" in chosen.options else options
    return Job(subject, chosen, chosen.chosen(seeded), _scalar(chosen, subject), subject.special, "keep")


def traces_for(jobs: Sequence[Job], batch: Batch, target: Targets) -> dict[Of, Trace]:
    """One trace for each scalar that is explained, which serves all methods that explain it."""
    traces: dict[Of, Trace] = {}
    for of in dict.fromkeys(job.of for job in jobs):
        some = [job for job in jobs if job.of == of]
        known = next((trace.check.readout for trace in traces.values()), None)
        traces[of] = traced(
            jobs[0].subject, batch, target=target, of=of, verified=known,
            onward=any("values" in job.method.needs for job in some), gradients=any(job.differentiates for job in some),
        )  # fmt: skip
    return traces


def _explained(job: Job, batch: Batch, target: Targets) -> list[Explanation]:
    """The explanations of a batch; in halves, on record, where it does not fit into memory."""
    try:
        return job.explained(job.trace(batch, target))
    except Exception as problem:
        if not out_of_memory(problem) or len(batch) == 1:
            raise
        size = len(batch) // 2
    log.warning("a batch of %d does not fit into memory; going on with %d at a time", len(batch), size)
    listed = one_by_one(target, len(batch)) if isinstance(target, list) else None
    explanations = []
    for part in (range(size), range(size, len(batch))):
        some = target if listed is None else [listed[place] for place in part]
        explanations += _explained(job, batch.pick(part), some)
    return explanations


def _records(job: Job, trace: Trace, scores: Scores, upto: int | None = None) -> list[Explanation]:
    """One record for each example of a trace; ``upto``: what lies after that row of the input is left out."""
    batch, score = trace.batch, trace.score
    sequences = [(name, part, numbers) for name, part, numbers in (
        ("source", batch.source, scores.source), ("produced" if batch.source else "input", batch, scores.rows),
    ) if part is not None and numbers is not None]  # fmt: skip
    arrays = [numbers.detach().numpy(force=True) for _, _, numbers in sequences]
    facts = {name: fact.detach().numpy(force=True) for name, fact in scores.facts.items()}
    errors = None if scores.errors is None else scores.errors.detach().numpy(force=True)
    chance = _probabilities(trace)
    proved = [site.proof.error for site in trace.sites if "proof" in vars(site)]
    check: dict[str, Any] = {
        "error": max(proved, default=None), "readout": trace.check.readout,
        "left_fast_path": trace.check.left_fast_path, "batch_size": len(batch),
    }  # fmt: skip
    if between := [site.name for site in trace.sites if site.kind == "samples"]:
        check["between_examples"] = between  # they take no part in what is said of features
    pictures = _pictures(trace)
    explanations = []
    for example in range(len(batch)):
        shown = [part.features[example].until(upto if part is batch else None) for _, part, _ in sequences]
        pieces = [array[example][..., list(some.rows)] for array, some in zip(arrays, shown, strict=True)]
        queries = None
        if "query" in scores.axes:
            axis = scores.axes.index("query")
            asked = batch.sequence_of(pieces[0].shape[axis])
            named = asked.features[example].until(upto if asked is batch else None) if asked else None
            lines = list(named.rows) if named else range(pieces[0].shape[axis])
            queries = named.tokens if named else _read_row(trace, example, len(lines)) or tuple(map(str, lines))
            pieces = [np.take(piece, lines, axis) for piece in pieces]
        numbers = np.concatenate(pieces, -1)
        if not np.isfinite(numbers).all():
            raise non_finite(f"what {job.method.name} gives for example {example}")
        explanations.append(Explanation(
            scores=numbers,
            axes=(*scores.axes, "token"),
            features=reduce(Features.followed_by, shown),
            parts={name: len(some.tokens) for (name, _, _), some in zip(sequences, shown, strict=True)},
            queries=queries,
            method=job.method.name,
            options=dict(job.options),
            target=score.names[example] if score else "the output as a whole (no target)",
            value=float(score.values[example]) if score else None,
            probability=chance[example],
            of=trace.of,
            special=job.special,
            sink=job.sink,
            check=check,
            facts={name: fact[example] for name, fact in facts.items()}
            | ({} if errors is None else {"standard_error": errors[example][list(shown[0].rows)]}),
            model=model_of(trace.subject),
            versions=versions(),
            seed=job.options.get("seed"),
            picture=pictures[example],
        ))  # fmt: skip
    return explanations


def _probabilities(trace: Trace) -> Sequence[float | None]:
    """Of the class that is explained, where it is one and has one."""
    score = trace.score
    if score is None or None in score.index:
        return [None] * len(trace.batch)
    try:
        return trace.subject.score(trace.output, list(score.index), "probability").values.tolist()
    except WrongTarget:  # a regression
        return [None] * len(trace.batch)


def _pictures(trace: Trace) -> Sequence[Any]:
    """Of subjects that look at some; otherwise None for each example."""
    seen = getattr(trace.subject, "pictures_of", lambda batch: None)(trace.batch)
    return [None] * len(trace.batch) if seen is None else seen


def _listed(subject: Subject, inputs: Any) -> Any:
    """Texts of a table, or of a column, as a list; rows of a table stay a table for subjects that have columns."""
    if isinstance(inputs, pd.DataFrame) and hasattr(subject, "columns_of"):
        return inputs
    column = _column(inputs) if isinstance(inputs, pd.DataFrame) else inputs
    return column.tolist() if isinstance(column, pd.Series) else column


def _batches(subject: Subject, inputs: Any, size: int) -> tuple[bool, int | None, Iterator[Batch]]:
    """Whether there is a single input, how many there are (None: not known yet), and their batches."""
    if isinstance(inputs, (list, Iterator)):
        total = len(inputs) if isinstance(inputs, list) else None
        return False, total, _encoded(subject, inputs, size)
    batch = batch_of(subject, inputs)
    parts = [inputs] if not isinstance(inputs, tuple) else list(inputs)
    picture = isinstance(inputs, Tensor) and inputs.dim() == 3 and hasattr(subject, "pictures_of")
    tensors = any(isinstance(part, Tensor) for part in parts) and not picture
    many = len(batch) > 1 or tensors or isinstance(inputs, (Batch, Mapping, pd.DataFrame))
    chunks = (batch.pick(range(start, min(start + size, len(batch)))) for start in range(0, len(batch), size))
    return not many, len(batch), iter([batch]) if len(batch) <= size else chunks


def _encoded(subject: Subject, inputs: Iterable[Any], size: int) -> Iterator[Batch]:
    """Batches of so many inputs."""
    stream, done = iter(inputs), 0
    while some := list(islice(stream, size)):
        try:
            yield batch_of(subject, some)
        except InputError as problem:
            raise type(problem)(_renumbered(str(problem), partial(operator.add, done))) from problem
        done += len(some)


def _renumbered(said: str, number: Callable[[int], int]) -> str:
    """A message about inputs[…], with the number that each has among all inputs."""
    return re.sub(r"inputs\[(\d+)\]", lambda hit: f"inputs[{number(int(hit[1]))}]", said)


def _column(table: pd.DataFrame) -> pd.Series[Any]:
    """The column that holds the texts."""
    if "text" in table.columns:
        return table["text"]
    texts = [name for name in table.columns if len(table) and table[name].map(lambda cell: isinstance(cell, str)).all()]
    if len(texts) != 1:
        raise InputError(
            f"inputs: a table with columns {list(table.columns)} has no column 'text', and {len(texts)} columns of "
            "texts. Pass the one that you mean: frame['…']."
        )
    return table[texts[0]]


def _targets_of(target: Targets, done: int, size: int, total: int | None) -> Targets:
    """Those of one batch, where there is one for each example."""
    if not isinstance(target, list):
        return target
    if total is not None:
        one_by_one(target, total)  # raises if they are not as many
    return target[done : done + size]


def _produced(
    job: Job, inputs: Any, generate: int | None, continuation: str | None, target: Targets
) -> list[Explanation]:
    """One explanation for each token that a language model goes on with, over all that came before it."""
    subject: Any = job.subject
    if not hasattr(subject, "produce"):
        raise NotServed(
            f"generate={generate!r}, continuation={continuation!r}: this subject writes no text. Use regard.causal or "
            "regard.seq2seq."
        )
    if target is not None:
        raise WrongTarget(f"target={target!r}: each token of the continuation is the target. Leave target out.")
    batch, rows, tokens = subject.produce(inputs, generate, continuation)
    explanations: list[Explanation] = []
    with Counter(f"explaining by {job.method.name}", len(rows)) as counter:
        for row, trace in zip(rows, _traces_of_tokens(job, batch, rows, tokens), strict=True):
            explanations += _records(job, trace, job.method(trace, **job.options), upto=row)
            counter.advance()
    return explanations


def _traces_of_tokens(job: Job, batch: Batch, rows: list[int], tokens: list[int]) -> Iterator[Trace]:
    """One for each row; a single pass serves methods that neither differentiate nor run the model again."""
    subject: Any = job.subject
    if {"gradients", "reruns"} & {*job.method.needs}:
        verified = None
        for row, token in zip(rows, tokens, strict=True):
            trace = job.trace(batch, [token], subject=subject.at(row), verified=verified)
            verified = trace.check.readout
            yield trace
        return
    found = job.trace(batch, [tokens[-1]], subject=subject.at(rows[-1]))
    with torch.no_grad(), undisturbed(subject.model):
        outputs = subject.outputs(batch, rows)
    for row, token, output in zip(rows, tokens, outputs[:, None], strict=True):
        score = subject.score(output, [token], job.of)
        yield replace(found.at(row).until(row), output=output, score=score, check=found.check)


def _read_row(trace: Trace, example: int, count: int) -> tuple[str, ...]:
    """The token of the row that is read, where a model computes that one only."""
    features, read = trace.batch.features[example], trace.readout[example].nonzero().flatten().tolist()
    return tuple(features.tokens[features.rows.index(row)] for row in read if count == len(read) == 1)


def model_of(subject: Subject) -> dict[str, str]:
    """The model's class, and the name or path that it was loaded from."""
    name = getattr(subject, "name", "") or getattr(getattr(subject.model, "config", None), "_name_or_path", "")
    return {"class": type(subject.model).__name__, "name": str(name)}


@lru_cache
def versions(packages: tuple[str, ...] = ("regard", "torch", "transformers")) -> dict[str, str]:
    """Of each package the version that is installed."""
    known = {}
    for package in packages:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = "unknown"
    return known
