"""Does the explanation find the cause that was planted?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from regard.cases import Case, Part
from regard.data.planted import Planted, confirm
from regard.errors import InputError
from regard.finding import Finding, holds, said
from regard.measures import bootstrap, paired
from regard.rationales import auprc_by_chance, auprc_by_lot
from regard.training import predict
from regard.wording import truth_on

CLAIM = "The explanation ranks what the model is known to use above what it does not use."
REFERENCE = "Random orders of the same words; leave_one_out, which changes the input and looks."
CITE = "bastings2022will"
CRITERION = ""
NEEDS = ("explanation",)


def planted(case: Case) -> Finding:
    """AUPRC against the cause that was planted, and that the model was seen to use.

    Args:
        case: what is on trial; its data is a planted task.
    """
    if not isinstance(case.data, Planted):
        raise InputError(
            f"planted needs data whose cause is known, and this is a {type(case.data).__name__}. Pass "
            "regard.data.planted.plant(task), of which the model has learned .train, or --planted TASK."
        )
    sure = case.once("planted", lambda: confirm(case.data, lambda inputs: predict(case.subject, inputs)))
    masks = {one.id: mask for one, mask in zip(case.data.test, sure.truth, strict=True)}

    def work(part: Part) -> dict[str, Sequence[Any]]:
        jobs = {
            "method": case.job, "random": case.lots(1)["random 1"],
            "leave_one_out": case.ask("leave_one_out", how=part.how),
        }  # fmt: skip
        truth = [
            truth_on(replace(one, rationale=masks[one.id]), features.words) if sure.confirmed else None
            for one, features in zip(part.examples, part.features, strict=True)
        ]
        found = part.scores(jobs).items()
        return {"truth": truth, **{who: [*auprc_by_lot(some, truth, part.ids, case.seed)] for who, some in found}}

    values, failed = case.each("looking for the cause", work)
    values["chance"] = auprc_by_chance(values.pop("truth").map(np.array, na_action="ignore").tolist(), case.seed)
    found = {who: bootstrap(values[who], seed=case.seed) for who in ("method", "chance", "random", "leave_one_out")}
    interval, margin = found.pop("method"), paired(values["method"], values["chance"], seed=case.seed)
    sentence = f"{sure.says} So its true cause is not known, and no explanation can be held against it."
    if sure.confirmed:
        sentence = (
            f"{sure.says} Against what it uses, {case.job.method.name} has a mean AUPRC of {said(interval)} in "
            f"{interval.n} examples; random orders have {said(found['chance'])}, leave_one_out "
            f"{said(found['leave_one_out'])}. Above chance: {said(margin)}."
        )
    shares = {**sure.flips, "what is no cause": sure.neutral_flips, **sure.kept_flips}
    changes = [{"changed": what, "flips": flips, "used": what in sure.uses} for what, flips in shares.items()]
    return Finding(
        "planted", "mean AUPRC", interval, margin, holds(margin), sentence, values, reference=found, failed=failed,
        tables={"what the model uses": pd.DataFrame(changes)},
        charts={"AUPRC": {"kind": "histogram", "x": "method", "by": "predicted", "level": found["chance"].value}}
        if sure.confirmed
        else {},
        settings={"task": case.data.task, "rule": case.data.says, "confirmed": sure.confirmed},
    )  # fmt: skip
