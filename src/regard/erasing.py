"""What would the model have said without some of the features?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.attention import Rerun, Trace, edits
from regard.attention.paths import must_have_score
from regard.attention.running import mixes, undisturbed
from regard.attention.sources import at_least_float
from regard.errors import NotServed, choose, non_finite
from regard.progress import Counter
from regard.rationales import ranked
from regard.types import Batch, Features, How, Scores, Subject

HOWS: tuple[How, ...] = ("delete", "mask", "pad", "attention")
Unit = Literal["word", "token"]
Rows = tuple[int, ...]
Array = NDArray[np.float64]
BINS = (0.01, 0.05, 0.1, 0.2, 0.5)  # shares of the words that are removed, as in ERASER
# What is wanted of the outputs (removal, class) of some examples: (removal, …).
Read = Callable[[Tensor, list[int]], Tensor]
ROWS_AT_ONCE = 2048  # of all examples in one forward pass: more is no faster on a CPU


def removable(trace: Trace) -> list[Features]:
    """Of each example what can be removed: of its source where it has one, and nothing after the row that is read."""
    last: int | None = getattr(trace.subject, "row", None)  # of a decoder, which does not see what comes later
    return [features.until(last) for features in (trace.batch.source or trace.batch).features]


def units(features: Features, unit: Unit) -> list[Rows]:
    """The rows of each word, or of each token; special tokens are part of no unit, and never removed."""
    if unit == "word":
        return [rows for rows in features.rows_of_words if rows]
    return [(row,) for row, word in zip(features.rows, features.word, strict=True) if word is not None]


def on_units(trace: Trace, numbers: Sequence[tuple[int, Rows, Tensor]]) -> Tensor:
    """``(example, row)``: the tokens of a unit share its number, so that the words of an explanation have it."""
    real = (trace.batch.source or trace.batch).real
    spread = torch.zeros(real.shape, dtype=at_least_float(trace.output).dtype, device=real.device)
    for example, rows, number in numbers:
        spread[example, list(rows)] = (number / len(rows)).to(spread)
    return spread


def scores_of(trace: Trace, numbers: Tensor, **rest: Any) -> Scores:
    """Numbers for the sequence whose features are removed."""
    return Scores(numbers, **rest) if trace.batch.source is None else Scores(None, numbers, **rest)


def possible(subject: Subject, batch: Batch, how: How | None) -> How:
    """How features are removed: as asked, or in the first way that the subject can."""
    if how is None:
        return next((way for way in HOWS[:3] if _can(subject, batch, way)), "attention")
    choose("how", how, HOWS)
    if how != "attention":
        _nothing_removed(subject, batch.pick([0]), how)
    return how


def _can(subject: Subject, batch: Batch, how: How) -> bool:
    try:
        _nothing_removed(subject, batch.pick([0]), how)
    except NotServed:
        return False
    return True


def _nothing_removed(subject: Subject, batch: Batch, how: How) -> Batch:
    return subject.without(batch, torch.zeros_like((batch.source or batch).real), how)


def without(subject: Subject, batch: Batch, removals: Sequence[tuple[int, Rows]], how: How, read: Read) -> Tensor:
    """Run the subject once for each removal, with as little padding as there can be.

    Args:
        subject: what to run.
        batch: the examples.
        removals: the number of an example, and the rows that are removed from it; of its source where it has one.
        how: "delete" takes tokens out, and later ones move up; "mask" and "pad" put another token in their place;
            "attention" takes all weight off them at every site, and nothing else.
        read: called with some outputs and the numbers of their examples.

    Returns:
        What ``read`` returns for each removal, in their order.
    """
    if not removals:  # nothing but special tokens
        return torch.zeros(0)
    real = (batch.source or batch).real
    gone = torch.zeros(len(removals), real.shape[1], dtype=torch.bool, device=real.device)
    for number, (_, rows) in enumerate(removals):
        gone[number, list(rows)] = True
    examples = torch.tensor([example for example, _ in removals])
    results: dict[int, Tensor] = {}
    with Counter("removing features", len(removals)) as counter, torch.no_grad(), undisturbed(subject.model):
        runs = _by_attention if how == "attention" else _by_length
        runs = _in_company if mixes(subject, batch) else runs
        for numbers, output in runs(subject, batch, examples, gone, how):
            if not output.isfinite().all():
                raise non_finite("the model's output without some features")
            found = read(output, examples[numbers].tolist())
            results |= dict(zip(numbers, found, strict=True))
            counter.advance(len(numbers))
    return torch.stack([results[number] for number in range(len(removals))])


class Values:
    """What is explained of a trace's examples, and how far it is from what other outputs say of them.

    Args:
        trace: with a target.
    """

    def __init__(self, trace: Trace) -> None:
        must_have_score(trace)
        assert trace.score is not None
        self.trace = trace
        self.before = self.scores(trace.output, [*range(len(trace.batch))])

    def scores(self, output: Tensor, examples: list[int]) -> Tensor:
        """``(removal,)``: what is explained, of other outputs of these examples."""
        target = self.trace.target
        if isinstance(target, list):
            output, target = at_least_float(output), [target[example] for example in examples]
        return at_least_float(self.trace.subject.score(output, target, self.trace.of).values)

    def fallen(self, output: Tensor, examples: list[int]) -> Tensor:
        """``(removal,)``: by how much it falls."""
        return self.before[examples] - self.scores(output, examples)

    def moved(self, output: Tensor, examples: list[int]) -> Tensor:
        """``(removal,)``: the total variation between the outputs.

        The mean over labels where several may be true; where there are no probabilities, how far what is explained has
        changed.
        """
        head: Any = getattr(self.trace.subject, "head", None)
        kind = getattr(head, "kind", None)
        if kind not in ("softmax", "binary", "sigmoid"):
            return self.fallen(output, examples).abs()
        moved: Tensor = head.apart(*(at_least_float(one) for one in (self.trace.output[examples], output)))
        return moved


def erased(
    values: Values, features: Sequence[Features], scores: Mapping[str, Sequence[Array]], ids: Sequence[str],
    bins: Sequence[float], how: How, seed: int, removed: Sequence[bool] = (True, False),
) -> tuple[dict[str, Array], ...]:  # fmt: skip
    """Comprehensiveness and sufficiency of every method, ``(example, bin)``; what several remove is run once.

    p(x) − p(x without the words ranked highest), and p(x) − p(these words alone). Signed and unsigned methods rank by
    the size of their scores; ties are broken by lot.

    Args:
        values: what is explained of the examples.
        features: of each example its words.
        scores: by method, for each example a number for each word.
        ids: names of the examples.
        bins: the shares of words that are removed.
        how: how they are removed.
        seed: of the lots.
        removed: which of the two is wanted: True: these words are removed; False: all others.
    """
    wanted: dict[tuple[int, Rows], int] = {}
    asked: dict[bool, dict[str, list[int]]] = {inside: {} for inside in removed}  # which run
    for label, of_examples in scores.items():
        for example, numbers in enumerate(of_examples):
            rows, order = features[example].rows_of_words, ranked(numbers, ids[example], seed)
            for share in bins:
                top = set(order[: math.ceil(share * len(order))].tolist())
                for inside, runs in asked.items():
                    gone = tuple(row for word, of in enumerate(rows) if (word in top) == inside for row in of)
                    runs.setdefault(label, []).append(wanted.setdefault((example, gone), len(wanted)))
    trace = values.trace
    fallen = without(trace.subject, trace.batch, list(wanted), how, values.fallen).double().numpy(force=True)
    return tuple(
        {label: fallen[some].reshape(-1, len(bins)) for label, some in runs.items()} for runs in asked.values()
    )


def _by_length(subject: Subject, batch: Batch, examples: Tensor, gone: Tensor, how: How) -> Any:
    """Inputs of like length run together; each batch is padded no further than it needs."""
    real = (batch.source or batch).real
    lengths = (real[examples] & ~gone).sum(-1) if how == "delete" else real[examples].sum(-1)
    order = lengths.argsort(stable=True, descending=True).tolist()
    cut = how != "delete" and not real.all() and _can(subject, batch, "delete")
    while order:
        width = int(lengths[order[0]]) + (0 if batch.source is None else batch.real.shape[1])
        count = max(1, ROWS_AT_ONCE // max(1, width))
        numbers, order = order[:count], order[count:]
        part = subject.without(batch.pick(examples[numbers].tolist()), gone[numbers], how)
        yield numbers, subject.forward(_nothing_removed(subject, part, "delete") if cut else part)


def _by_attention(subject: Subject, batch: Batch, examples: Tensor, gone: Tensor, how: How) -> Any:
    """The n-th removal of every example together is one variant; those that have fewer are left as they are."""
    wanted = examples.unique().tolist()
    places: list[list[int]] = [(examples == example).nonzero().squeeze(-1).tolist() for example in wanted]
    rerun = Rerun(subject, batch.pick(wanted))
    rows = gone.shape[1]
    sites = _sites(rerun, rows)
    most = max(map(len, places))
    at_once = max(1, ROWS_AT_ONCE // (rows * len(wanted)))
    for start in range(0, most, at_once):
        taken = [some[start : start + at_once] for some in places]
        variants = max(map(len, taken))
        mask = torch.zeros(variants, len(wanted), rows, dtype=torch.bool, device=gone.device)
        for example, some in enumerate(taken):
            mask[: len(some), example] = gone[some]
        output = rerun(edits.zero(mask, sites=sites, rows="all"), variants=variants)
        for example, some in enumerate(taken):
            if some:
                yield some, output[: len(some), example]


def _in_company(subject: Subject, batch: Batch, examples: Tensor, gone: Tensor, how: How) -> Any:
    """One removal after the other, the other examples as they are: for models whose examples look at each other."""
    rerun = Rerun(subject, batch) if how == "attention" else None
    for number, example in enumerate(examples.tolist()):
        mask = torch.zeros(len(batch), gone.shape[1], dtype=torch.bool, device=gone.device)
        mask[example] = gone[number]
        if rerun is None:
            output = subject.forward(subject.without(batch, mask, how))
        else:
            output = rerun(edits.zero(mask[None], sites=_sites(rerun, gone.shape[1]), rows="all"), variants=1)[0]
        yield [number], output[example : example + 1]


def _sites(rerun: Rerun, rows: int) -> list[int]:
    """Those that have the features among their keys."""
    sites = [spot.index for spot in rerun.spots if spot.shape[3] == rows and spot.kind != "samples"]
    if not sites:
        raise NotServed("how='attention': no site has the features among its keys. Use another how.")
    return sites
