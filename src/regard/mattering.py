"""How much heads matter: by the gradient of a gate, by taking them out, by integrated gradients; of each example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from regard.attention import Part, Rerun, edits, trace
from regard.attention.editing import Spot
from regard.attention.edits import Edit, Place
from regard.attention.integrating import Rule, integral
from regard.data import Example
from regard.errors import NotServed, choose
from regard.glimpses import Array, Loss, Survey, halves
from regard.training import fits
from regard.types import Batch, Targets

How = Literal["zero", "mean", "uniform"]
HOW = ("zero", "mean", "uniform")
EVEN = edits.uniform()


def gate_gradients(survey: Survey) -> Array:
    """``(example, head)``: |∂L(x)/∂ξ_h|, ξ_h a factor on all that head h hands on (Michel et al. 2019)."""
    loss, found = survey.loss, _empty(survey)
    for places, batch, examples in _batches(survey, "gradients of gates", loss.subject):
        if _mixed(survey):  # a gate is one for all examples of a batch: each loss is differentiated by itself
            rerun = Rerun(loss.subject, batch, gradients="edits")
            gates = torch.ones(len(survey.index), requires_grad=True, device=batch.real.device)
            lost = losses(loss, rerun.output, examples)(rerun(gates_of(gates, rerun.spots)))
            slopes = torch.stack([torch.autograd.grad(one, gates, retain_graph=True)[0] for one in lost])
        else:
            seen = trace(loss.subject, batch, gradients=True, target=loss.targets(examples), of=loss.of)
            slopes = torch.cat([site.gate_gradient for site in seen.sites if site.gate_gradient is not None], 1)
        found[places] = _numbers(slopes.abs())
    return found


def per_layer(values: Array, layer: Any) -> Array:
    """``(…, head)``: I_h / √(Σ_h I_h²) within each layer (Michel et al. 2019)."""
    values = values.copy()
    for one in np.unique(layer):
        length = np.sqrt((values[..., layer == one] ** 2).sum(-1, keepdims=True))
        values[..., layer == one] /= np.where(length > 0, length, 1.0)
    return values


def rises(survey: Survey, how: How = "zero") -> Array:
    """``(example, head)``: L(x without head h) − L(x).

    The heads of one site are variants of one run, so that only what is downstream of it is run again.

    Args:
        survey: the case.
        how: "zero": the head hands on nothing; "mean": in every row its mean over all real rows of the data; "uniform":
            it looks at all keys alike that the mask lets a row see (Kovaleva et al. 2019).
    """
    choose("how", how, HOW)
    loss, found = survey.loss, _empty(survey)
    means = mean_results(survey) if how == "mean" else {}
    for places, batch, examples in _batches(survey, "taking heads out", loss.subject):
        rerun = Rerun(loss.subject, batch)
        lost = losses(loss, rerun.output, examples)
        before = lost(rerun.output)
        after = [
            lost(output) for spot in rerun.spots
            for output in rerun(_without_each(how, spot, means), variants=spot.shape[1])
        ]  # fmt: skip
        found[places] = _numbers(torch.stack(after, 1) - before[:, None])
    return found


def _without_each(how: How, spot: Spot, means: dict[int, Tensor]) -> Edit:
    """Variant h does without head h of a site."""
    alone = torch.eye(spot.shape[1], dtype=torch.bool, device=spot.real.device)[:, None]  # variant 1 head
    if how == "zero":
        return edits.gate(None, (~alone).double(), sites=spot.index)
    if how == "mean":
        return edits.hand_on(means[spot.index][:, None], where=alone, sites=spot.index)

    def even(weights: Tensor, place: Place) -> Tensor:
        mine = place.at_hand(alone[..., None, None], "uniform")
        return EVEN.change(weights, place).where(mine, weights)

    return edits.custom(even, sites=spot.index)


def mean_results(survey: Survey) -> dict[int, Tensor]:
    """By site ``(head, channel)``: the mean over all real rows of all examples of what each head hands on."""
    total: dict[int, Tensor] = {}
    count: dict[int, float] = {}
    for _, batch, _ in _batches(survey, "means of heads", survey.loss.subject):
        for site in trace(survey.loss.subject, batch).sites:
            looked = site.pull(site.real, per_head=True).double()  # example head key: Σ_q A_qk
            handed = torch.einsum("ehk,ehkc->hc", looked, site.values.double())
            total[site.index] = total.get(site.index, 0.0) + handed
            count[site.index] = count.get(site.index, 0.0) + float(site.real.sum())
    return {index: total[index] / count[index] for index in total}


def integrated_peaks(survey: Survey, steps: int = 20, rule: Rule = "midpoint") -> Array:
    """``(example, head)``: max_qk A_qk ∫₀¹ ∂F(αA)/∂A_qk dα, F the probability of what is predicted (Hao et al. 2021).

    Over the rows that are real, and the keys that the mask lets them see.
    """
    subject, found = survey.subject, _empty(survey)
    if survey.target is None and survey.head == "embedding":
        raise NotServed("the model has no classes: pass target=, a function of its output.")
    if _mixed(survey):
        raise NotServed("its examples look at each other: attention within one of them cannot be scaled alone.")
    for places, batch, _ in _batches(survey, "integrating", subject):
        seen = trace(subject, batch, target=survey.target, of=survey.scalar)
        rerun, peaks = Rerun(subject, batch), []
        for site in seen.sites:
            along = replace(site, out_gradient=integral(seen, rerun, site, steps, rule)[0])
            peak = torch.full(site.shape[:2], -torch.inf, dtype=site.dtype, device=site.real.device)

            def weigh(tile: Tensor, part: Part, along: Any = along, peak: Tensor = peak) -> Tensor:
                product: Tensor = tile * along.gradient(part, tile.shape[-1])
                there = along.allowed(part, tile.shape[-1]) & along.real[part.examples][:, None, part.rows, None]
                here = product.masked_fill(~there, -torch.inf).amax((2, 3))
                peak[part.examples, part.heads] = torch.maximum(peak[part.examples, part.heads], here)
                return product

            along.pull(site.real, per_head=True, weigh=weigh)
            peaks.append(peak)
        found[places] = _numbers(torch.cat(peaks, 1))
    return found


@dataclass(frozen=True, eq=False)
class Judge:
    """How good a model is on an example, the larger the better.

    Args:
        about: what it is, in words.
        of: output, the output of the model as it is, and examples to ``(example,)``.
    """

    about: str
    of: Callable[[Tensor, Tensor, Sequence[Example]], Array]


def judge_of(survey: Survey) -> Judge:
    """Whether the class is right; without labels, whether it is what the whole model says; else minus the loss."""
    subject, loss = survey.subject, survey.loss
    decides = survey.head in ("softmax", "binary") and survey.target is None and loss.subject is subject
    if decides and all(one.label is not None for one in survey.examples):
        return Judge("accuracy", lambda output, _, examples: fits(subject, output, examples))
    if decides:
        return Judge("agreement with the whole model", lambda output, whole, _: _same_class(subject, output, whole))
    about = f"minus {loss.about}".removeprefix("minus minus ").replace("minus −", "")
    return Judge(about, lambda output, whole, examples: -_numbers(losses(loss, whole, examples)(output)))


def gated_scores(survey: Survey, judge: Judge, gates: Array) -> Array:
    """``(example, variant)``: how good the model is with factors ``(variant, head)`` on the heads of all sites."""
    loss, found = survey.loss, np.empty((len(survey.examples), len(gates)))
    for places, batch, examples in _batches(survey, "running gated heads", loss.subject):
        rerun = Rerun(loss.subject, batch)
        outputs = rerun(gates_of(torch.from_numpy(gates)[:, None], rerun.spots), variants=len(gates))
        found[places] = np.stack([judge.of(output, rerun.output, examples) for output in outputs], 1)
    return found


def gates_of(values: Tensor, spots: Sequence[Spot]) -> list[Edit]:
    """Edits that multiply the heads of all sites by ``(…, head)``, in their order."""
    parts = values.split([spot.shape[1] for spot in spots], -1)
    return [edits.gate(None, part, sites=spot.index) for spot, part in zip(spots, parts, strict=True)]


def losses(loss: Loss, whole: Tensor, examples: Sequence[Example]) -> Callable[[Tensor], Tensor]:
    """Output to ``(example,)``; what the whole model predicts stays what is asked for when another is predicted."""
    asked: Targets = loss.targets(examples)
    if asked is None:
        index = loss.subject.score(whole, None, loss.of).index
        asked = None if None in index else list(index)

    def lost(output: Tensor) -> Tensor:
        values: Tensor = loss.subject.score(output, asked, loss.of).values
        return -values

    return lost


def two_surveys(survey: Survey, what: str) -> tuple[Survey, Survey]:
    """The examples in two halves, by lot: on one heads are chosen, on the other they are judged."""
    count = len(survey.examples)
    if count < 4:
        raise NotServed(
            f"{what}: heads are chosen on one half of the examples and judged on the other, and {count} are too few. "
            "Pass 4 or more."
        )
    first, second = (
        replace(survey, examples=tuple(survey.examples[place] for place in some)) for some in halves(survey)
    )
    return first, second


def _batches(survey: Survey, what: str, subject: Any) -> Iterator[tuple[list[int], Batch, list[Example]]]:
    for places, batch in survey.batches(what, subject):
        yield places, batch, [survey.examples[place] for place in places]


def _mixed(survey: Survey) -> bool:
    """Whether examples look at each other."""
    return bool((survey.index["kind"] == "samples").any())


def _empty(survey: Survey) -> Array:
    return np.full((len(survey.examples), len(survey.index)), np.nan)


def _same_class(subject: Any, output: Tensor, whole: Tensor) -> Array:
    said, before = (subject.head.columns(one, "logit").argmax(-1) for one in (output, whole))
    return _numbers(said == before)


def _numbers(values: Tensor) -> Array:
    return np.asarray(values.double().numpy(force=True))
