"""What probes see: some rows of one site, what a model loses, and for probes that run by themselves all examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.attention import Site, Trace
from regard.attention.running import ROWS_KEPT, batch_of
from regard.attention.sites import Part
from regard.attention.sources import Fused
from regard.attention.tracing import special_keys
from regard.cases import Case
from regard.data import Example
from regard.errors import InputError, NotServed, WrongTarget
from regard.progress import Counter
from regard.training import class_of, inputs_of, length_of
from regard.types import Batch, Features, Of, Source, Targets

Array = NDArray[np.float64]
LOOKAHEAD = 16  # batches whose examples are sorted by length among themselves
PIECE = "\ufffd"  # what a token that is a part of a letter is decoded to
ONE_SEQUENCE = ("self", "encoder", "decoder")  # kinds of sites whose queries and keys are the same rows
ROWS = 128  # of one site at a time; what probes make of them fits into the cache


@dataclass(frozen=True, eq=False)
class Keys:
    """What is known of the keys of a site, ``(example, key)``.

    Args:
        real: False at padding.
        special: True at special tokens.
        punctuation: True at tokens without a letter or digit.
        part: which of two texts a token belongs to; 0 where there is one.
        features: what a person sees of the keys of each example; () where they are no rows of the input.
    """

    real: Tensor
    special: Tensor
    punctuation: Tensor
    part: Tensor
    features: tuple[Features, ...] = ()

    @property
    def first(self) -> Tensor:
        """True at the first that is no padding."""
        return self.real & (self.real.cumsum(-1) == 1)

    @classmethod
    def of(cls, batch: Batch, site: Site) -> Keys:
        """Those of a site; of keys that are no rows of the input nothing is known but that they are there."""
        example, _, _, key = site.shape
        sequence = batch.sequence_of(key) if site.kind != "samples" else None
        nothing = torch.zeros(example, key, dtype=torch.bool, device=site.real.device)
        if sequence is None:
            return cls(~nothing, nothing, nothing, nothing.long())
        special = special_keys(batch, key).to(nothing.device)
        signs = nothing.clone()
        for place, one in enumerate(sequence.features):
            odd = [
                row for row, token, word in zip(one.rows, one.tokens, one.word, strict=True)
                if word is not None and not any(letter.isalnum() or letter == PIECE for letter in token)
            ]  # fmt: skip
            signs[place, odd] = True
        parts = _parts(batch, sequence, key).to(nothing.device)
        return cls(site.real_keys, special, signs, parts, sequence.features)


@dataclass(frozen=True, eq=False)
class Glimpse:
    """Some query rows of one site, for those probes that look at weights row by row.

    Args:
        weights: ``(example, head, row, key)``; padding rows hold anything. Not to be written into.
        rows: ``(row,)``: which queries they are.
        keys: what is known of the keys.
        trace: the trace.
        site: the site.
    """

    weights: Tensor
    rows: Tensor
    keys: Keys
    trace: Trace
    site: Site

    @cached_property
    def offset(self) -> Tensor | None:
        """``(row, key)``: how far behind the query each key is (negative: before it); None: not one sequence."""
        if self.site.kind not in ONE_SEQUENCE or self.site.rows is not None:
            return None
        keys = torch.arange(self.weights.shape[-1], device=self.rows.device)
        return keys - self.rows[:, None]

    @cached_property
    def visible(self) -> Tensor:
        """``(example, row, key)``: the keys that some head may look at."""
        source = self.site.source
        alike = isinstance(source, Fused) and (source.mask is None or source.mask.shape[1] == 1)  # one mask for all
        part = Part(slice(None), slice(0, 1 if alike else self.site.heads), self.rows)
        return self.site.allowed(part, self.weights.shape[-1]).any(1) & self.keys.real[:, None]

    def on(self, keys: Tensor) -> Tensor:
        """``(example, head, row)``: the weight on some keys, ``(example, key)``; NaN: nothing is known of the keys."""
        if not self.keys.features:
            return self.undefined
        return torch.einsum("ehrk,ek->ehr", self.weights, keys.to(self.weights.dtype))

    def at(self, offset: int) -> Tensor:
        """``(example, head, row)``: the weight on the key that is so far behind the query; NaN: it is not there."""
        if self.offset is None:
            return self.undefined
        keys, last = self.rows + offset, self.weights.shape[-1] - 1
        found = self.weights[:, :, torch.arange(len(keys), device=keys.device), keys.clamp(0, last)]
        exists = self.keys.real[:, keys.clamp(0, last)] & (keys >= 0) & (keys <= last)  # example row
        return found.where(exists[:, None], torch.nan)

    @property
    def undefined(self) -> Tensor:
        """``(example, head, row)`` of NaN: what these rows do not define."""
        return torch.full_like(self.weights[..., 0], torch.nan)


Look = Callable[[Glimpse], Tensor]  # to (example, head, row), or (example, head, row, part)


def glimpses(trace: Trace, site: Site) -> Iterator[Glimpse]:
    """All rows of a site that are real in some example, a block at a time."""
    keys = Keys.of(trace.batch, site)
    for rows in site.real.any(0).nonzero().squeeze(-1).split(ROWS):
        yield Glimpse(site.weights(rows=rows), rows, keys, trace, site)


def row_means(trace: Trace, site: Site, asked: Mapping[str, tuple[Look, int]]) -> dict[str, Tensor]:
    """Means over the real rows of a site of what is asked, each with its number of parts: ``(example, part, head)``.

    NaN is left out. Attention between examples has no rows, and defines nothing.
    """
    size = len(trace.batch)
    if site.kind == "samples":
        return {name: torch.full((size, parts, site.heads), torch.nan) for name, (_, parts) in asked.items()}
    totals = {name: torch.zeros(size, parts, site.heads, dtype=torch.float64) for name, (_, parts) in asked.items()}
    counts = {name: torch.zeros_like(one) for name, one in totals.items()}
    for glimpse in glimpses(trace, site) if asked else ():
        real = site.real[:, None, glimpse.rows, None]
        for name, (look, _) in asked.items():
            values = look(glimpse)
            values = values if values.dim() == 4 else values[..., None]  # example head row part
            there = real & values.isfinite()
            totals[name] += values.where(there, 0.0).double().sum(2).mT.cpu()
            counts[name] += there.sum(2).mT.cpu()
    return {name: totals[name] / counts[name] for name in totals}  # 0 / 0: not defined


def unordered(subject: Any, trace: Trace) -> str | None:
    """Why places mean nothing: for ``cannot`` of probes that are about them."""
    return "the columns of a table have no order." if hasattr(subject, "schema") else None


def apart(subject: Any, trace: Trace) -> str | None:
    """Why no key can be told by where the query is: for ``cannot`` of probes that compare the two."""
    beside = any(site.kind in ONE_SEQUENCE for site in trace.sites)
    return None if beside else "at no site of the model are queries and keys one sequence."


@dataclass(frozen=True, eq=False)
class Survey(Case):
    """What probes of "case" are asked of: a case, and the heads that its model has.

    Args:
        index: a row for each head: layer, site, kind, head.
        draws: of examples, for intervals.
    """

    index: pd.DataFrame = field(default_factory=pd.DataFrame)
    draws: int = 200

    @cached_property
    def loss(self) -> Loss:
        """What the model loses on these examples."""
        return loss_of(self.subject, self.examples, self.target)

    def batches(self, what: str, subject: Any = None) -> Iterator[tuple[list[int], Batch]]:
        """All examples in batches of like lengths: their places, and what the model takes. A bar says ``what``."""
        with Counter(what, len(self.examples)) as counter:
            for some, batch in batches(subject or self.subject, self.examples, self.batch_size):
                yield [place for place, _ in some], batch
                counter.advance(len(some))

    def drawn(self, values: Array) -> Array:
        """``(1 + draw, …)``: means of ``(example, …)`` over the examples, then over examples that were drawn again."""
        sums = Sums()
        sums.add(values, copies(range(len(values)), self.draws, self.seed))
        return sums.means()


def halves(survey: Survey) -> tuple[list[int], list[int]]:
    """The places of the examples to choose on, and of those to score on; by lot."""
    order = np.random.default_rng(survey.seed).permutation(len(survey.examples)).tolist()
    half = len(order) // 2
    return sorted(order[:half]), sorted(order[half:])


@dataclass(eq=False)
class Sums:
    """What is added up, batch by batch: ``(1 + draw, …)``, and how often it was defined."""

    total: Any = 0.0
    count: Any = 0.0
    shape: tuple[int, ...] = ()

    def add(self, values: Array, copies: Array) -> None:
        """``(example, …)``, and how often each example counts in each draw, ``(example, 1 + draw)``."""
        flat = values.reshape(len(values), -1)
        there = np.isfinite(flat)
        self.shape = values.shape[1:]
        self.total = self.total + copies.T @ np.where(there, flat, 0.0)
        self.count = self.count + copies.T @ there

    def means(self) -> Array:
        """``(1 + draw, …)``; NaN where nothing was defined. A draw that holds none is all of them."""
        with np.errstate(invalid="ignore"):
            found = self.total / self.count
        found = np.where(np.isfinite(found), found, found[:1])
        return np.asarray(found.reshape(len(found), *self.shape))


def copies(places: Iterable[int], draws: int, seed: int) -> Array:
    """``(example, 1 + draw)``: 1, then how often an example is there in each draw; by its place, in any order."""
    lots = [np.random.default_rng((seed, place)).poisson(1.0, draws) for place in places]
    return np.concatenate([np.ones((len(lots), 1)), np.array(lots, dtype=np.float64)], 1)


def batches(subject: Any, examples: Iterable[Example], size: int) -> Iterator[tuple[list[tuple[int, Example]], Batch]]:
    """Examples in a stream, in batches of like lengths: with their places, and as the model takes them."""
    stream = enumerate(examples)
    while window := list(islice(stream, size * LOOKAHEAD)):
        window.sort(key=lambda one: length_of(one[1]))
        for start in range(0, len(window), size):
            yield from _cut(subject, window[start : start + size])


def _cut(subject: Any, some: list[tuple[int, Example]]) -> Iterator[tuple[list[tuple[int, Example]], Batch]]:
    """Encoded, in parts of so many rows as are traced at once."""
    batch = None
    try:
        batch = batch_of(subject, inputs_of(one for _, one in some))
    except InputError as problem:
        if len(some) == 1:
            place, one = some[0]
            raise type(problem)(f"example {one.id or place}: {problem}") from problem
    if batch is not None and (len(some) == 1 or len(some) * max(batch.lengths) <= ROWS_KEPT):
        yield some, batch
        return
    half = len(some) // 2
    for part in (some[:half], some[half:]):
        yield from _cut(subject, part)


def _parts(batch: Batch, sequence: Batch | Source, keys: int) -> Tensor:
    """Which of two texts each key belongs to: as the model is told, or by the separators between them."""
    given = batch.inputs.get("token_type_ids")
    if isinstance(given, Tensor) and given.shape == (len(batch), keys):
        return given.long()
    found = torch.zeros(len(batch), keys, dtype=torch.long)
    for place, one in enumerate(sequence.features):
        words = [place for place, odd in enumerate(one.special) if not odd]
        starts = [after for before, after in pairwise(words) if after > before + 1]
        if starts:  # special tokens between words: the second text begins after them
            found[place, [row for at, row in enumerate(one.rows) if at >= starts[0]]] = 1
    return found


@dataclass(frozen=True, eq=False)
class Loss:
    """What a model loses: −(a score of its output), the larger the worse.

    Args:
        subject: what is run: a language model is asked about each token of its text.
        of: what the score is of its target.
        about: what it is, in words.
        targets: of some examples what the score is about.
    """

    subject: Any
    of: Of
    about: str
    targets: Callable[[Sequence[Example]], Targets]

    def values(self, output: Tensor, examples: Sequence[Example]) -> Tensor:
        """``(example,)``: the loss of each, with its graph."""
        values: Tensor = self.subject.score(output, self.targets(examples), self.of).values
        return -values


def loss_of(subject: Any, examples: Sequence[Example], target: Targets = None) -> Loss:
    """What a model is asked to be good at: the labels, else the text itself, else what it says now.

    Of classes it is the cross-entropy; of a number its squared error; of a decoder without a verbalizer the mean over
    tokens of −log p(token | those before it); of a model without classes minus the target that was named.
    """
    head = getattr(getattr(subject, "head", None), "kind", "embedding")
    labelled = all(one.label is not None and not one.marks for one in examples)  # whom a pronoun means is no class
    if target is not None:
        return Loss(subject, "logit", "minus the target", lambda _: target)
    if hasattr(subject, "whole") and subject.verbalizer is None:
        whole = subject.whole()
        return Loss(whole, "logit", "−log p of a token, mean over the text", lambda _: whole.mean)
    if head == "regression" and labelled:
        return Loss(subject, "logit", "squared error", _minus_error)
    if head == "regression":
        return Loss(subject, "logit", "minus the output", lambda _: None)
    if head == "embedding":
        raise NotServed("the model has no classes: pass target=, a function of its output; or --similar-to TEXT.")
    if labelled:
        return Loss(subject, "logprob", "cross-entropy of the labels",
                    lambda some: [_class(subject, one) for one in some])  # fmt: skip
    return Loss(subject, "logprob", "−log p of what is predicted", lambda _: None)


def _minus_error(examples: Sequence[Example]) -> Targets:
    try:
        truth = torch.tensor([float(_label(one)) for one in examples], dtype=torch.float64)
    except (TypeError, ValueError) as problem:
        raise InputError(f"labels must be numbers, as the model's output is: {problem}.") from None
    return lambda output: -((output[:, 0] - truth.to(output)) ** 2)


def _class(subject: Any, one: Example) -> int:
    try:
        return class_of(subject.head, _label(one))
    except WrongTarget as problem:
        said = str(problem).replace("target=", "label=", 1)
        raise WrongTarget(f"example {one.id!r}: {said} Correct it, or name the column of labels.") from None


def _label(one: Example) -> Any:
    if one.label is None:
        raise InputError(f"example {one.id!r} has no label, and others have. Leave it out.")
    return one.label
