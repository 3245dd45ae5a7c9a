"""Explain first, predict second: what does the model say from the rationale alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import torch

from regard.cases import Case, Part
from regard.erasing import without
from regard.errors import true_or_false, within
from regard.finding import Finding, holds, said
from regard.measures import bootstrap, paired
from regard.rationales import extracted

CLAIM = "The words ranked highest carry the decision: from them alone it is kept more often than from random ones."
REFERENCE = "As many random words alone, of the same examples."
CITE = "jain2020learning"
CRITERION = ""
NEEDS = ("explanation", "classes")


def fresh(case: Case, *, share: float = 0.2, contiguous: bool = False, repeats: int = 5) -> Finding:
    """Share of decisions that are the same from the top ⌈share · words⌉ words alone, against the random control.

    NOTE[DIFF] Jain et al. train a second model on the rationales; here the model on trial reads them itself.

    Args:
        case: what is on trial.
        share: how many words are kept.
        contiguous: the words side by side whose scores have the largest sum, instead of those with the largest scores.
        repeats: how often the random control is drawn.
    """
    within("share", share, 0, 1)
    true_or_false("contiguous", contiguous)
    jobs = {"method": case.job, **case.lots(repeats)}

    def work(part: Part) -> dict[str, Sequence[Any]]:
        part.notes["how"] = part.how
        removals = []
        for scores in part.scores(jobs).values():
            for at, (numbers, features) in enumerate(zip(scores, part.features, strict=True)):
                kept = extracted(numbers, share, contiguous, part.ids[at], case.seed)
                gone = [rows for word, rows in enumerate(features.rows_of_words) if word not in kept]
                removals.append((at, tuple(row for rows in gone for row in rows)))
        left = without(case.subject, part.batch, removals, part.how, lambda output, _: output)
        # the full text, the rationale and the random ones: (text, example, class)
        outputs = torch.cat([part.trace.output[None], left.unflatten(0, (len(jobs), -1))])
        decided, chances = part.decisions(outputs), part.probabilities(outputs).double().numpy(force=True)
        found = {
            "kept": decided == decided[0],
            "probability": np.take_along_axis(chances, decided[:1, :, None], -1)[..., 0],
        }
        if case.labelled:
            labels = np.array([np.nan if case.labels[at] is None else case.labels[at] for at in part.places], float)
            found["correct"] = np.where(np.isnan(labels), np.nan, decided == labels)
        return {
            f"{measure}_{text}": numbers
            for measure, some in found.items()
            for text, numbers in (("full", some[0]), ("rationale", some[1]), ("random", some[2:].mean(0)))
        }

    values, failed = case.each("reading rationales", work)
    notes = values.attrs["notes"]
    values = values.drop(columns="kept_full").astype({"kept_rationale": float})
    rows = [
        {"text": text, "measure": measure, **asdict(bootstrap(values[f"{measure}_{text}"], seed=case.seed))}
        for measure in ("kept", "probability", "correct")
        for text in ("full", "rationale", "random")
        if f"{measure}_{text}" in values
    ]
    interval, random = (bootstrap(values[f"kept_{text}"], seed=case.seed) for text in ("rationale", "random"))
    margin = paired(values["kept_rationale"], values["kept_random"], seed=case.seed)
    sentence = (
        f"From {share:.0%} of the words alone, those that {case.job.method.name} ranks highest"
        + " side by side" * contiguous
        + f", the model decides as from the full text in a share of {said(interval)} of {interval.n} examples; from as "
        f"many random ones in {said(random)}. The difference is {said(margin)}."
    )
    return Finding(
        "fresh", "share of decisions kept", interval, margin, holds(margin), sentence, values,
        reference={"random": random, "above random": margin}, failed=failed, tables={"texts": pd.DataFrame(rows)},
        charts={"sure": {"kind": "points", "x": "probability_full", "y": "probability_rationale", "by": "predicted"}},
        settings=notes,
    )  # fmt: skip
