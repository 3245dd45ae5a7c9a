"""How many heads can be taken out?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from regard.errors import OptionError, at_least_one, choose, whole_numbers, within
from regard.glimpses import Survey
from regard.mattering import gate_gradients, gated_scores, integrated_peaks, judge_of, per_layer, rises, two_surveys
from regard.measures import crossed
from regard.probed import Array, Probed, tabled

EACH = "case"
ABOUT = "share of all heads that are gone when it goes"
NEEDS = ("reruns", "gradients")
CITE = "michel2019sixteen"
# Of some examples ``(head,)``: how much each head matters.
ORDERS: dict[str, Callable[[Survey], Array]] = {
    "importance": lambda some: per_layer(gate_gradients(some).mean(0), some.index["layer"].to_numpy()),
    "ablation": lambda some: rises(some).mean(0),
    "integrated": lambda some: integrated_peaks(some).mean(0),
}
By = Literal["importance", "ablation", "integrated"]


def pruning(
    survey: Survey,
    *,
    by: By | Sequence[By] = ("importance", "ablation"),
    random: int = 5,
    steps: int = 10,
    cost: float = 0.01,
) -> Probed:
    """The score against the share of heads that hand on nothing, those that matter least first (Michel et al. 2019).

    Orders are chosen on one half of the examples, drawn by lot, and scores are those of the other half: an order would
    flatter itself on the examples that it was chosen by. The score is accuracy; without labels agreement with the whole
    model's decisions; of language models, and models without classes, minus the loss. What is lost is the difference to
    the whole model, example by example.

    The number of a head is the share of heads that are gone once it is, in the first order.

    Args:
        survey: the case.
        by: what heads are ordered by, one or several of "importance" (gradient of a gate, of length 1 in each layer),
            "ablation" (rise of the loss when it alone hands on nothing) and "integrated" (AttAttr).
        random: how many random orders; their mean is one curve, whose interval is over orders and examples.
        steps: shares from 0 to 1, so many after 0.
        cost: of the score; the largest share that costs less is reported. 0.01 of accuracy is one point.
    """
    named = _named(by)
    steps, within_cost = at_least_one("steps", steps), within("cost", cost, 0, np.inf)
    (lots,) = whole_numbers("random", random)
    if lots < 0:
        raise OptionError(f"random={lots} must be 0 or more.")
    chosen, judged = two_surveys(survey, "pruning")
    count = len(survey.index)
    draws = np.random.default_rng(survey.seed)
    orders = {name: [np.argsort(ORDERS[name](chosen), kind="stable")] for name in named}
    orders |= {"random": [draws.permutation(count) for _ in range(lots)]} if lots else {}
    gone = np.unique(np.linspace(0, count, steps + 1).round().astype(int))  # how many heads, from none to all
    curve, judge = _curves(judged, orders, gone)
    largest = _largest(curve, within_cost)
    places = np.argsort(orders[named[0]][0])  # when each head goes
    chart = {
        "kind": "lines", "table": "curve", "x": "heads", "y": "score", "by": "order",
        "caption": f"{judge} when heads hand on nothing, those that matter least first; 95 % intervals. Orders were "
        f"chosen on {len(chosen.examples)} examples, and scored on {len(judged.examples)} others.",
    }  # fmt: skip
    return Probed(
        "pruning", ABOUT, tabled(survey.index, (places + 1)[None] / count),
        _sentence(largest, judge, within_cost, len(chosen.examples), len(judged.examples)),
        {"curve": curve, "largest": largest}, {"curve": chart}, warnings=_few(len(judged.examples), judge, within_cost),
    )  # fmt: skip


def _named(by: Any) -> list[str]:
    named = [by] if isinstance(by, str) else [*by]
    if not named:
        raise OptionError(f"by={by!r} is empty. Name one or several of {', '.join(ORDERS)}.")
    return [choose("by", one, tuple(ORDERS)) for one in dict.fromkeys(named)]


def _curves(survey: Survey, orders: dict[str, list[Any]], gone: Any) -> tuple[pd.DataFrame, str]:
    """A row for each order and number of heads that are gone; and what the score is."""
    judge, count = judge_of(survey), len(survey.index)
    lots = [lot for some in orders.values() for lot in some]
    gates = np.ones((len(lots), len(gone), count))
    for at, lot in enumerate(lots):
        for step, number in enumerate(gone):
            gates[at, step, lot[:number]] = 0.0
    scores = gated_scores(survey, judge, gates.reshape(-1, count)).T.reshape(len(lots), len(gone), -1)
    rows, start = [], 0
    for name, some in orders.items():
        mine = scores[start : start + len(some)]  # lot step example
        start += len(some)
        rows += [
            {
                "order": name, "share": number / count, "heads": int(number),
                **crossed(mine[:, step], seed=survey.seed).cells("score"),
                **crossed(mine[:, 0] - mine[:, step], seed=survey.seed).cells("lost"),
            }
            for step, number in enumerate(gone)
        ]  # fmt: skip
    return pd.DataFrame(rows), judge.about


def _largest(curve: pd.DataFrame, cost: float) -> pd.DataFrame:
    """By order the largest share that costs less: by the loss itself, and by the end of its interval."""
    rows = []
    for name, some in curve.groupby("order", sort=False):
        for rule, column in (("estimate", "lost"), ("interval", "lost_high")):
            kept = some[some[column] < cost].iloc[-1]  # nothing gone costs nothing: there is always one
            rows.append({"order": name, "rule": rule} | kept.drop("order").to_dict())
    return pd.DataFrame(rows)


def _few(judged: int, judge: str, cost: float) -> tuple[str, ...]:
    """Of decisions that none of n examples shows changed, up to 3 / n may change (the rule of three)."""
    if not judge.startswith(("accuracy", "agreement")) or judged >= 3 / cost:
        return ()
    return (
        f"{judged} examples cannot exclude a cost of {cost:g}: where none of their decisions changes, up to "
        f"{min(3 / judged, 1):.2g} may be lost on others. Pass {math.ceil(6 / cost)} or more: half are for this.",
    )


def _sentence(largest: pd.DataFrame, judge: str, cost: float, chosen: int, judged: int) -> str:
    told = []
    for name, some in largest.groupby("order", sort=False):
        estimate, surely = some.to_dict("records")
        told.append(
            f"by {name} {estimate['heads']} ({estimate['share']:.0%}; {estimate['lost']:.3g} "
            f"[{estimate['lost_low']:.3g}, {estimate['lost_high']:.3g}] lost), and {surely['heads']} "
            f"({surely['share']:.0%}) if the whole interval must stay below {cost:g}"
        )
    return (
        f"The most heads that can go for less than {cost:g} of {judge}: {'; '.join(told)}. Orders were chosen on "
        f"{chosen} examples, and scored on {judged} others."
    )
