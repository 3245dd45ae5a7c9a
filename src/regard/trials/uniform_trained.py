"""Train the same models with uniform attention: is attention needed on this task at all?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from regard.cases import Case
from regard.errors import within
from regard.finding import Finding, level, said
from regard.lessons import scores_of
from regard.measures import crossed, permutation_p
from regard.teaching import Lesson

CLAIM = "Attention is needed: trained with uniform attention from the start, the model is worse."
REFERENCE = "The same recipe with its own attention, over several seeds."
CITE = "wiegreffe2019attention"
CRITERION = "necessary"
NEEDS = ("recipe", "labels")


def uniform_trained(case: Case, *, seeds: int = 5, tolerance: float = 0.02) -> Finding:
    """How much better models are than those that are trained, and judged, with attention frozen to uniform.

    NOTE[DIFF] the authors choose the best epoch by the test set; here it is chosen by the development set.

    Args:
        case: what is on trial; all sites, unless some are named.
        seeds: how many models of either kind; a pair of them has the same seed.
        tolerance: a difference that counts as none: the claim is not supported only where it can be no larger.
    """
    lab = case.lab
    lab.must_have(seeds, outputs=False)
    within("tolerance", tolerance, 0, 1, ends="[)")
    sites, _ = lab.places("all" if case.sites == "last" else case.sites)
    base = lab.plain(seeds)
    even = [Lesson("uniform", one.seed, {"sites": sites}) for one in base]
    results = lab.sound(lab.results([*base, *even], "training with and without uniform attention"))
    right = np.stack([lab.fits(one) for one in results]).reshape(2, seeds, -1)  # kind seed example
    own, flat = (crossed(one, seed=case.seed) for one in right)
    lost = crossed(right[0] - right[1], seed=case.seed)
    p = permutation_p(right[0].mean(1), right[1].mean(1))
    needed = True if lost.low > 0 else False if lost.high < tolerance else None
    sentence = (
        f"Over {seeds} seeds the models have a test {lab.score} of {said(own)}; trained with uniform attention "
        f"{said(flat)}. The difference is {said(lost)} (p = {p:.3g} over seeds). "
    ) + {
        True: "Attention is needed on this task.",
        False: "Attention is not needed on this task, so what other trials say of it means little here.",
        None: "Whether attention is needed on this task these models do not tell.",
    }[needed]
    values = lab.rows(results[0]).assign(base=right[0].mean(0), uniform=right[1].mean(0))
    table = pd.concat(
        [scores_of(lab, results[:seeds], "base"), scores_of(lab, results[seeds:], "uniform")], ignore_index=True
    )
    return Finding(
        "uniform_trained", f"test {lab.score} above that with uniform attention", lost, lost, needed, sentence, values,
        reference={"no difference": level(0.0), "counts as none": level(tolerance)}, tables={"models": table},
        charts={"scores": {"kind": "lines", "table": "models", "x": "seed", "y": "score", "by": "model",
                           "caption": f"Test {lab.score} of each model."}},
        settings={"sites": sites, "p": p}, settles=False,
    )  # fmt: skip
