"""Train a model to say the same and look elsewhere: what does it pay?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from regard.cases import Array, Case
from regard.errors import OptionError, RegardError, TrialFailed, at_least_one, within
from regard.finding import Finding, holds, level, said
from regard.lessons import VERY_DIFFERENT, Lab, losses_of
from regard.measures import Interval, bootstrap, crossed, resampled, widened
from regard.searching import Search
from regard.teaching import Lesson, Taught

CLAIM = "Attention is hard to manipulate: a model trained to look elsewhere does not give the same output any more."
REFERENCE = "Models of other seeds: how far their attention and their outputs differ for no reason."
CITE = "wiegreffe2019attention"
CRITERION = "hard to manipulate"
NEEDS = ("recipe", "labels")
LAMBDAS = (0.0, 0.0001, 0.001, 0.01, 0.1)
DRAWS = 2000
log = logging.getLogger("regard")


def adversary(
    case: Case, *, lambdas: Sequence[float] = LAMBDAS, seeds: int = 5, effort: int = 2, epsilon: float = 0.01,
    searched: int = 100, steps: int = 500,
) -> Finding:  # fmt: skip
    """Models trained to minimise TVD(ŷ, ŷ_base) − λ KL(α ‖ α_base), each from a fresh seed: TVD against JSD, on test.

    The summary is the TVD that is paid at the JSD which 95 % of models of another seed stay below: between the points
    of the curve it is interpolated, and an adversary that goes farther for less counts. It is held against what comes
    without any manipulation: the TVD of other seeds, and of models that only imitate (λ = 0); or against epsilon, if
    that is more. Where seeds hardly differ in attention, 0.1 is very different.

    NOTE[DIFF] the authors compare with seeds alone, and train for up to 80 epochs (their base: 8).

    Args:
        case: what is on trial; the readout's row of the last site, unless others are named.
        lambdas: the grid; 0, a model that only imitates the output, is always part of it.
        seeds: how many models of other seeds, with the base; and how many adversaries for each λ.
        effort: adversaries may take so many times the epochs of the recipe, and its patience.
        epsilon: outputs that are no farther apart are the same, also where those of other seeds are even closer.
        searched: for how many examples adversaries are also searched one by one, as Jain & Wallace did; 0: none.
        steps: of that search.
    """
    lab = case.lab
    lab.must_have(seeds)
    grid = _grid(lambdas)
    within("epsilon", epsilon, 0, 1, ends="[)")
    more = {"effort": effort} if at_least_one("effort", effort) > 1 else {}
    if searched:
        at_least_one("searched", searched)
        at_least_one("steps", steps)
    sites, places = lab.places(case.sites)
    plain = lab.plain(seeds)
    lessons = [
        Lesson("adversary", lab.fresh(number), {"factor": factor, "sites": sites, "places": places} | more, plain[0])
        for factor in grid for number in range(seeds)
    ]  # fmt: skip
    every = lab.results([*plain, *lessons], "training adversaries")
    (base, *others), results = lab.sound(every[:seeds]), every[seeds:]
    whole = {
        factor: [one for one in results if one.lesson.options["factor"] == factor and not one.diverged]
        for factor in grid
    }
    lost = [one for one in results if one.diverged]
    cloud = _both(lab, base, others, places)
    curve = {factor: _both(lab, base, some, places) for factor, some in whole.items() if some}
    if 0.0 not in curve:
        raise TrialFailed(f"adversary: models that only imitate diverged. The last: {lost[-1].diverged}")
    at = max(float(np.percentile(cloud[0], 95)), VERY_DIFFERENT)
    paid, own = _paid(curve, at, case.seed), crossed(cloud[1], seed=case.seed)
    imitated = crossed(curve[0.0][1], seed=case.seed)
    value, low, high = (
        max(getattr(one, end) for one in (own, imitated, level(epsilon))) for end in ("value", "low", "high")
    )
    least = Interval(value, low, high, own.n, 0)
    margin = Interval(paid.value - least.value, paid.low - least.high, paid.high - least.low, paid.n, 0)
    farthest = max(float(far.mean()) for far, _ in curve.values())
    points = [_point("adversary", f"λ = {factor:g}", *both, factor=factor) for factor, both in curve.items()]
    points += [_point("other seeds", f"seed {one.lesson.seed}", *(x[[place]] for x in cloud))
               for place, one in enumerate(others)]  # fmt: skip
    points += [{"kind": "base", "point": "base", **level(0.0).cells("jsd"), **level(0.0).cells("moved"), "models": "1"}]
    points += _searched(case, searched, steps) if searched else []
    table = pd.DataFrame(points)
    sentence = _sentence(case, paid, own, imitated, margin, at, farthest, lost)
    values = lab.rows(base).assign(jsd_between_seeds=cloud[0].mean(0),
                              tvd_between_seeds=cloud[1].mean(0))  # fmt: skip
    for factor, (far, moved) in curve.items():
        values = values.assign(**{f"jsd λ={factor:g}": far.mean(0), f"tvd λ={factor:g}": moved.mean(0)})
    return Finding(
        "adversary", f"change of the output ({case.unit}) paid for other attention", paid, margin,
        holds(margin) if farthest >= at else None, sentence, values,
        reference={"other seeds": own, "imitation": imitated},
        tables={"points": table, "losses": losses_of(results, "factor", "λ")},
        charts={
            "what it pays to look elsewhere": {
                "kind": "tradeoff", "table": "points", "x": "jsd", "y": "moved", "by": "kind", "line": "adversary",
                "label": "point", "level": at,
                "caption": "To the right: attention differs more from the base's. Up: outputs differ more. A curve "
                           "that stays low means that other attention costs nothing. Dashed: from here on it is very "
                           "different. One by one: what a search finds for each example by itself."},
            "loss of training": {"kind": "lines", "table": "losses", "x": "epoch", "y": "loss", "by": "λ",
                                 "caption": "Mean over seeds."},
        },
        settings={"sites": case.sites, "between_seeds": at}, settles=False,
        warnings=tuple(f"λ = {one.lesson.options['factor']:g}, seed {one.lesson.seed}: {one.diverged}" for one in lost),
    )  # fmt: skip


def _grid(lambdas: Any) -> list[float]:
    listed = list(lambdas) if isinstance(lambdas, (Sequence, np.ndarray)) and not isinstance(lambdas, str) else []
    if not listed or len({*listed}) != len(listed):
        raise OptionError(f"lambdas={lambdas!r} must be a list of numbers, each once, such as [0, 0.001, 0.01].")
    return sorted({0.0, *(within("lambdas", one, 0, float("inf"), ends="[)") for one in listed)})


def _both(lab: Lab, base: Taught, others: Sequence[Taught], places: Sequence[int]) -> tuple[Array, Array]:
    """``(model, example)``: JSD of attention and TVD of outputs, from the base."""
    return (np.stack([lab.jsd(base, one, places) for one in others]),
            np.stack([lab.tvd(base, one) for one in others]))  # fmt: skip


def _paid(curve: dict[float, tuple[Array, Array]], at: float, seed: int) -> Interval:
    """The TVD at a JSD, or at the farthest that there is, with an interval for other seeds and examples."""
    examples = next(iter(curve.values()))[0].shape[1]
    value = _between([(far.mean(), moved.mean()) for far, moved in curve.values()], at)
    count = max(len(far) for far, _ in curve.values())
    drawn: list[float] = []
    by_models: list[float] = []
    for models, some in resampled(count, examples, DRAWS, seed):
        for into, counts in ((drawn, some), (by_models, np.ones_like(some))):
            pairs = [[_mean(one, models, counts) for one in both] for both in curve.values()]  # λ (jsd, tvd) draw
            into += [_between([(far[draw], moved[draw]) for far, moved in pairs], at) for draw in range(len(models))]
    low, high = np.quantile(widened(drawn, by_models, value, count), [0.025, 0.975])
    return Interval(value, max(float(low), 0.0), float(high), examples, 0)


def _mean(values: Array, models: Array, examples: Array) -> Array:
    """``(draw,)``; where some models of a λ are lost, those that are left count for them."""
    of = models[:, : len(values)]
    of = np.where(of.sum(1, keepdims=True) > 0, of / np.maximum(of.sum(1, keepdims=True), 1e-12), 1 / len(values))
    return np.asarray(np.einsum("dm,me,de->d", of, values, examples) / values.shape[1])


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """TVD at a JSD: between the points next to it, or that of one farther away, if that is less."""
    far, moved = (np.array(column) for column in zip(*sorted(points), strict=True))
    at = min(at, far[-1])
    return float(min(np.interp(at, far, moved), moved[far >= at].min()))


def _point(kind: str, name: str, far: Array, moved: Array, **more: float) -> dict[str, Any]:
    return {"kind": kind, "point": name, **more, **bootstrap(far.mean(0)).cells("jsd"),
            **bootstrap(moved.mean(0)).cells("moved"), "models": f"{len(far)}"}  # fmt: skip


def _searched(case: Case, count: int, steps: int) -> list[dict[str, Any]]:
    """The adversaries of Jain & Wallace, which are searched for each example by itself and are no model."""
    some = replace(case, examples=case.examples[:count], hand=None)
    try:
        values, _ = some.each("searching for adversaries one by one", Search(steps=steps))
    except RegardError as problem:  # it is a point of a picture, and all else is there
        log.warning("adversary: no adversaries one by one: %s", problem)
        return []
    known = values.dropna(subset=["epsilon_max_jsd"])
    if known.empty:
        return []
    far, moved = (bootstrap(known[name]) for name in ("epsilon_max_jsd", "moved"))
    name = f"searched for {len(known)} examples"
    return [{"kind": "one by one", "point": name, **far.cells("jsd"), **moved.cells("moved"), "models": "none"}]


def _sentence(
    case: Case, paid: Interval, own: Interval, imitated: Interval, margin: Interval, at: float, farthest: float,
    lost: Sequence[Taught],
) -> str:  # fmt: skip
    short = farthest < at
    sentence = (
        f"Very different is a JSD of {at:.3f} from the base's attention"
        + (
            ", though models of other seeds differ less. "
            if at == VERY_DIFFERENT
            else ", which 95 % of other seeds stay below. "
        )
    ) + (f"No adversary went so far; the farthest, at {farthest:.3f}, has" if short else "An adversary so far away has")
    sentence += (
        f" outputs {said(paid)} ({case.unit}) away from the base's; models of other seeds are {said(own)} "
        f"away, and those that only imitate it {said(imitated)}. "
    )
    if short:
        sentence += "What it would cost to go farther is not known: add larger lambdas, or more effort."
    elif margin.low > 0:
        sentence += "To look elsewhere costs the output: attention is not arbitrary here."
    elif margin.high < 0:
        sentence += "Very different attention comes for nothing: whoever trains the model decides where it looks."
    else:
        sentence += "Whether that costs more than another seed or imitation does these examples and seeds do not tell."
    gone = {one.lesson.options["factor"] for one in lost}
    return sentence + (f" Training diverged for λ = {', '.join(f'{one:g}' for one in sorted(gone))}." if gone else "")
