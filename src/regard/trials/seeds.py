"""Train the same model from other seeds: how far does attention differ for no reason?"""

from __future__ import annotations

import numpy as np

from regard.cases import Case
from regard.finding import Finding, holds, level, said
from regard.lessons import scores_of
from regard.measures import crossed

CLAIM = "Models that differ in nothing but their seed look at the same words."
REFERENCE = "The base model's own weights, shuffled among the words of each example."
CITE = "wiegreffe2019attention"
CRITERION = ""
NEEDS = ("recipe", "labels")


def seeds(case: Case, *, seeds: int = 5) -> Finding:
    """How far attention and outputs are apart between a base model and those of other seeds.

    The 95th percentile of these divergences is the level that other trials call "very different".

    Args:
        case: what is on trial.
        seeds: how many models, with the base.
    """
    lab = case.lab
    lab.must_have(seeds)
    places = lab.places(case.sites)[1]
    base, *others = results = lab.sound(lab.results(lab.plain(seeds), "training from other seeds"))
    apart = np.stack([lab.jsd(base, one, places) for one in others])  # seed example
    moved = np.stack([lab.tvd(base, one) for one in others])
    shuffled = lab.shuffled(base, places)
    interval, output = crossed(apart, seed=case.seed), crossed(moved, seed=case.seed)
    chance = crossed(shuffled[None], seed=case.seed)
    margin = crossed(shuffled - apart, seed=case.seed)
    most = float(np.percentile(apart, 95))
    sentence = (
        f"Between the base and {len(others)} models of other seeds attention differs by {said(interval)} "
        f"(Jensen–Shannon divergence, at most 0.693; mean over {interval.n} examples), and in 95 % of the cases by at "
        f"most {most:.3f}; shuffled among the words it would differ by {said(chance)}. Outputs differ by "
        f"{said(output)} ({case.unit})."
    )
    values = lab.rows(base).assign(jsd=np.median(apart, 0), moved=moved.mean(0), shuffled=shuffled,
        largest=[float(one.mean(0).max()) for one in base.looks(places)],
    )  # fmt: skip
    by = {"by": "predicted"} if "predicted" in values else {}
    return Finding(
        "seeds", "mean JSD between seeds", interval, margin, holds(margin), sentence, values,
        reference={"shuffled": chance, "95th percentile": level(most)},
        tables={"models": scores_of(lab, results, "base")},
        charts={
            "how far attention differs": {
                "kind": "points", "x": "largest", "y": "jsd", "level": most, **by,
                "caption": "Of each example the median over seeds; dashed: 95 % of all cases are below."},
            "how far outputs differ": {"kind": "points", "x": "jsd", "y": "moved", **by},
        },
        settings={"sites": case.sites, "between_seeds": most, "tvd_between_seeds": output.value}, settles=False,
    )  # fmt: skip
