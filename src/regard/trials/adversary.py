"""Train a model to say the same and look elsewhere: what does it pay?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from regard.cases import Array, Case
from regard.errors import OptionError, at_least_one, within
from regard.finding import Finding, holds, said
from regard.lessons import Lab, Taught, losses_of
from regard.measures import Interval, bootstrap, crossed, resampled
from regard.searching import Search
from regard.teaching import Lesson

CLAIM = "Attention is hard to manipulate: a model trained to look elsewhere does not give the same output any more."
REFERENCE = "Models of other seeds: how far their attention and their outputs differ for no reason."
CITE = "wiegreffe2019attention"
CRITERION = "hard to manipulate"
NEEDS = ("recipe", "labels")
LAMBDAS = (0.0, 0.0001, 0.001, 0.01, 0.1)
DRAWS = 2000


def adversary(
    case: Case, *, lambdas: Sequence[float] = LAMBDAS, seeds: int = 5, searched: int = 100, steps: int = 500
) -> Finding:
    """Models trained to minimise TVD(ŷ, ŷ_base) − λ KL(α ‖ α_base), each from a fresh seed: TVD against JSD, on test.

    The summary is the TVD that is paid at the JSD which 95 % of models of another seed stay below: between the points
    of the curve it is interpolated, and an adversary that goes farther for less counts.

    Args:
        case: what is on trial; the readout's row of the last site, unless others are named.
        lambdas: the grid; 0 is a model that only imitates the output.
        seeds: how many models of other seeds, with the base; and how many adversaries for each λ.
        searched: for how many examples adversaries are also searched one by one, as Jain & Wallace did; 0: none.
        steps: of that search.
    """
    lab = case.lab
    lab.must_have(seeds, 2)
    grid = _grid(lambdas)
    if searched:
        at_least_one("searched", searched)
        at_least_one("steps", steps)
    sites, places = lab.places(case.sites)
    plain = lab.plain(seeds)
    lessons = [
        Lesson("adversary", lab.fresh(number), {"factor": factor, "sites": sites, "places": places}, plain[0])
        for factor in grid for number in range(seeds)
    ]  # fmt: skip
    base, *others = lab.sound(lab.results(plain, "training from other seeds"))
    results = lab.results(lessons, "training adversaries")
    whole = {
        factor: [one for one in results if one.lesson.options["factor"] == factor and not one.diverged]
        for factor in grid
    }
    lost = [one for one in results if one.diverged]
    cloud = _both(lab, base, others, places)
    curve = {factor: _both(lab, base, some, places) for factor, some in whole.items() if some}
    at = float(np.percentile(cloud[0], 95))
    paid, own = _paid(curve, at, case.seed), crossed(cloud[1], seed=case.seed)
    margin = Interval(paid.value - own.value, paid.low - own.high, paid.high - own.low, paid.n, 0)
    reached = not np.isnan(paid.value)
    points = [_point("adversary", f"λ = {factor:g}", *both, factor=factor) for factor, both in curve.items()]
    points += [_point("other seeds", f"seed {one.lesson.seed}", *(x[[place]] for x in cloud))
               for place, one in enumerate(others)]  # fmt: skip
    points += [{"kind": "base", "point": "base", "jsd": 0.0, "moved": 0.0}]
    points += _searched(case, searched, steps) if searched else []
    table = pd.DataFrame(points)
    sentence = _sentence(lab, case, paid, own, at, seeds, lost, table)
    values = lab.frame.assign(predicted=lab.named(lab.decisions(base)), jsd_between_seeds=cloud[0].mean(0),
                              tvd_between_seeds=cloud[1].mean(0))  # fmt: skip
    for factor, (far, moved) in curve.items():
        values = values.assign(**{f"jsd λ={factor:g}": far.mean(0), f"tvd λ={factor:g}": moved.mean(0)})
    return Finding(
        "adversary", f"change of the output ({case.unit}) paid for other attention", paid, margin,
        holds(margin) if reached else None, sentence, values,
        reference={"other seeds": own},
        tables={"points": table, "losses": losses_of(results, "factor", "λ")},
        charts={
            "what it pays to look elsewhere": {
                "kind": "tradeoff", "table": "points", "x": "jsd", "y": "moved", "by": "kind", "line": "adversary",
                "label": "point", "level": at,
                "caption": "To the right: attention differs more from the base's. Up: outputs differ more. A curve "
                           "that stays low means that other attention costs nothing. Dashed: 95 % of other seeds "
                           "differ less."},
            "loss of training": {"kind": "lines", "table": "losses", "x": "epoch", "y": "loss", "by": "λ",
                                 "caption": "Mean over seeds."},
        },
        settings={"sites": case.sites, "between_seeds": at}, settles=reached,
        warnings=tuple(f"λ = {one.lesson.options['factor']:g}, seed {one.lesson.seed}: {one.diverged}" for one in lost),
    )  # fmt: skip


def _grid(lambdas: Any) -> list[float]:
    listed = list(lambdas) if isinstance(lambdas, (Sequence, np.ndarray)) and not isinstance(lambdas, str) else []
    if not listed or len({*listed}) != len(listed):
        raise OptionError(f"lambdas={lambdas!r} must be a list of numbers, each once, such as [0, 0.001, 0.01].")
    return sorted(within("lambdas", one, 0, float("inf"), ends="[)") for one in listed)


def _both(lab: Lab, base: Taught, others: Sequence[Taught], places: Sequence[int]) -> tuple[Array, Array]:
    """``(model, example)``: JSD of attention and TVD of outputs, from the base."""
    return (np.stack([lab.jsd(base, one, places) for one in others]),
            np.stack([lab.tvd(base, one) for one in others]))  # fmt: skip


def _paid(curve: dict[float, tuple[Array, Array]], at: float, seed: int) -> Interval:
    """The TVD at a JSD, with an interval for other seeds and examples; NaN where no adversary goes so far."""
    if not curve:
        return Interval(np.nan, np.nan, np.nan, 0, 0)
    examples = next(iter(curve.values()))[0].shape[1]
    value = _between([(far.mean(), moved.mean()) for far, moved in curve.values()], at)
    drawn = []
    for weights in resampled(max(len(far) for far, _ in curve.values()), examples, DRAWS, seed):
        pairs = [[_mean(one, *weights) for one in both] for both in curve.values()]  # λ (jsd, tvd) draw
        drawn += [_between([(far[draw], moved[draw]) for far, moved in pairs], at) for draw in range(len(weights[1]))]
    low, high = np.quantile([one for one in drawn if not np.isnan(one)] or [np.nan], [0.025, 0.975])
    return Interval(value, float(low), float(high), examples, 0)


def _mean(values: Array, models: Array, examples: Array) -> Array:
    """``(draw,)``; where some models of a λ are lost, those that are left count for them."""
    of = models[:, : len(values)]
    of = np.where(of.sum(1, keepdims=True) > 0, of / np.maximum(of.sum(1, keepdims=True), 1e-12), 1 / len(values))
    return np.asarray(np.einsum("dm,me,de->d", of, values, examples))


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """TVD at a JSD: between the points next to it, or that of one farther away, if that is less."""
    far, moved = (np.array(column) for column in zip(*sorted(points), strict=True))
    beyond = moved[far >= at]
    return float(min(np.interp(at, far, moved), beyond.min())) if len(beyond) else np.nan


def _point(kind: str, name: str, far: Array, moved: Array, **more: float) -> dict[str, Any]:
    return {"kind": kind, "point": name, **more, **bootstrap(far.mean(0)).cells("jsd"),
            **bootstrap(moved.mean(0)).cells("moved"), "models": len(far)}  # fmt: skip


def _searched(case: Case, count: int, steps: int) -> list[dict[str, Any]]:
    """The adversaries of Jain & Wallace, which are searched for each example by itself and are no model."""
    some = replace(case, examples=case.examples[:count], hand=None)
    values, _ = some.each("searching for adversaries one by one", Search(steps=steps))
    known = values.dropna(subset=["epsilon_max_jsd"])
    if known.empty:
        return []
    far, moved = (bootstrap(known[name]) for name in ("epsilon_max_jsd", "moved"))
    name = f"searched for {len(known)} examples"
    return [{"kind": "one by one", "point": name, **far.cells("jsd"), **moved.cells("moved")}]


def _sentence(
    lab: Lab, case: Case, paid: Interval, own: Interval, at: float, seeds: int, lost: Sequence[Taught],
    table: pd.DataFrame,
) -> str:  # fmt: skip
    farthest = table[table["kind"] == "adversary"].nlargest(1, "jsd") if len(table) else table
    sentence = f"95 % of models of another seed differ from the base in attention by at most {at:.3f} (JSD). "
    if np.isnan(paid.value):
        most = f"the farthest reached {float(farthest['jsd'].iloc[0]):.3f}" if len(farthest) else "none was trained"
        sentence += f"No adversary went farther ({most}): add larger lambdas, or train for longer."
    else:
        sentence += (
            f"An adversary that goes so far has outputs {said(paid)} ({case.unit}) away from the base's; models of "
            f"other seeds are {said(own)} away. "
        )
        if paid.low > own.high:
            sentence += "To look elsewhere costs the output: attention is not arbitrary here."
        elif paid.high < own.low:
            sentence += "Very different attention comes for nothing: whoever trains the model decides where it looks."
        else:
            sentence += "Whether that costs more than another seed does these examples and seeds do not tell."
    gone = {one.lesson.options["factor"] for one in lost}
    return sentence + (f" Training diverged for λ = {', '.join(f'{one:g}' for one in sorted(gone))}." if gone else "")
