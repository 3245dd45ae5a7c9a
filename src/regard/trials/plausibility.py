"""Does the explanation point at the words that people named?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard.cases import Array, Case, Part
from regard.errors import InputError, OptionError
from regard.finding import Finding, above, said
from regard.measures import bootstrap
from regard.rationales import auprc_by_chance, auprc_by_lot, iou_f1, ranked, token_f1, top_mask
from regard.wording import truth_on

CLAIM = "The explanation ranks the words that people named as reasons above others."
REFERENCE = "Random orders of the same words."
CITE = "deyoung2020eraser"
CRITERION = "plausible"
NEEDS = ("explanation", "rationales")
F1 = {"token_f1": token_f1, "iou_f1": iou_f1}


def plausibility(case: Case, *, share: float | None = None, repeats: int = 5) -> Finding:
    """AUPRC against what people named, and F1 of the words that are ranked highest: not about faithfulness.

    NOTE[DIFF] examples in which nothing was named are left out and counted; of equal scores, lots are drawn.

    Args:
        case: what is on trial.
        share: how many words are taken for F1; None: the mean share that people named, as ERASER does.
        repeats: how often random words are drawn for F1.
    """
    if share is not None and not 0 < share <= 1:
        raise OptionError(f"share={share!r} must be above 0 and at most 1, or None: as many as people named.")
    jobs = {"method": case.job, **case.lots(repeats)}

    def work(part: Part) -> dict[str, Sequence[Any]]:
        truth = [truth_on(one, features.words) for one, features in zip(part.examples, part.features, strict=True)]
        return {**part.scores(jobs), "truth": truth}

    values, failed = case.each("looking for rationales", work)
    truth = [np.array(mask, bool) for mask in values.pop("truth")]
    scores = {label: [*map(np.array, values.pop(label))] for label in jobs}
    named = [at for at, mask in enumerate(truth) if mask.any()]
    if not named:
        raise InputError("rationales: none of the words that the model sees was named in any example.")
    share = float(np.mean([truth[at].mean() for at in named])) if share is None else share
    tops = {
        label: [_top(some[at], values["example"][at], share, case.seed) for at in named]
        for label, some in scores.items()
    }
    true = [truth[at] for at in named]

    values["named"] = [mask.mean() for mask in truth]
    values["auprc"] = auprc_by_lot(scores["method"], truth, values["example"].tolist(), case.seed)
    values["random_auprc"] = auprc_by_chance(truth, case.seed)
    for measure, function in F1.items():
        each = [function([mask], [other])["macro_f1"] for mask, other in zip(tops["method"], true, strict=True)]
        values[measure] = pd.Series(each, index=named)
    interval, random = (bootstrap(values[name], seed=case.seed) for name in ("auprc", "random_auprc"))
    margin = above(interval, random.high)
    # Where the two intervals meet, the examples do not tell; so it is also below only if it is below all of the other.
    supported = True if margin.low > 0 else False if interval.high < random.low else None
    rows = []
    for measure, function in F1.items():
        found = pd.DataFrame([function(masks, true) for masks in tops.values()], index=[*tops])
        rows += [{"measure": measure, "by": case.job.method.name, **found.loc["method"]}]
        rows += [{"measure": measure, "by": "random", **found.drop("method").mean()}]
    sentence = (
        f"Against the words that people named, {case.job.method.name} has a mean AUPRC of {said(interval)} in "
        f"{interval.n} examples; random orders have {said(random)}. Of the {share:.0%} of words ranked highest the "
        f"token F1 is {values['token_f1'].mean():.3f}. This tells whether people agree, not whether the model does."
    )
    return Finding(
        "plausibility", "mean AUPRC", interval, margin, supported, sentence, values, reference={"random": random},
        failed=failed, tables={"F1": pd.DataFrame(rows)},
        charts={"AUPRC": {"kind": "histogram", "x": "auprc", "by": "predicted", "level": random.value}},
        settings={"share": share},
    )  # fmt: skip


def _top(scores: Array, name: str, share: float, seed: int) -> NDArray[np.bool_]:
    return top_mask(-ranked(scores, name, seed).argsort(), share=share)
