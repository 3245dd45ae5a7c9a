"""Train a second model on rationales alone: do they hold what the decision needs?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from regard.cases import Case
from regard.errors import true_or_false, within
from regard.finding import Finding, holds, said
from regard.lessons import scores_of
from regard.measures import crossed
from regard.teaching import Lesson

CLAIM = "What the explanation ranks highest is enough: a model trained on it alone is better than on random words."
REFERENCE = "Models that are trained on as many random words, and on full texts."
CITE = "jain2020learning"
CRITERION = ""
NEEDS = ("explanation", "recipe", "labels")


def rationale_trained(case: Case, *, share: float = 0.2, contiguous: bool = False, seeds: int = 3) -> Finding:
    """FRESH: the base model is explained, ⌈share · words⌉ words are kept, and models are trained anew on these.

    Of tables the other cells are missing.

    Args:
        case: what is on trial.
        share: how many words are kept.
        contiguous: the words side by side whose scores have the largest sum, instead of those with the largest scores.
        seeds: how many models of each kind.
    """
    lab, job = case.lab, case.job
    lab.must_have(seeds, words=True)
    within("share", share, 0, 1)
    true_or_false("contiguous", contiguous)
    plain = lab.plain(seeds)

    def trained_on(method: str, options: dict[str, object], lots: bool) -> list[Lesson]:
        """Lots are drawn anew for each model."""
        given = {"share": share, "contiguous": contiguous, "method": method}
        return [
            Lesson("rationale", one.seed, given | {"options": options | ({"seed": 1 + one.seed} if lots else {}),
                                                   "lot": case.seed}, plain[0])
            for one in plain
        ]  # fmt: skip

    lessons = {"full text": plain, "rationale": trained_on(job.method.name, dict(job.options), False),
               "random words": trained_on("random", {}, True)}  # fmt: skip
    results = lab.sound(lab.results([one for some in lessons.values() for one in some], "training on rationales"))
    groups = {name: results[at * seeds : (at + 1) * seeds] for at, name in enumerate(lessons)}
    right = {name: np.stack([lab.fits(one) for one in some]) for name, some in groups.items()}
    scores = {name: crossed(one, seed=case.seed) for name, one in right.items()}
    margin = crossed(right["rationale"] - right["random words"], seed=case.seed)
    short = crossed(right["full text"] - right["rationale"], seed=case.seed)
    sentence = (
        f"Trained on {share:.0%} of the words, those that {job.method.name} ranks highest"
        + " side by side" * contiguous
        + f", {seeds} models have a test {lab.score} of {said(scores['rationale'])}; on as many random words "
        f"{said(scores['random words'])}, on full texts {said(scores['full text'])}. That is {said(margin)} above "
        f"random words, and {said(short)} below full texts."
    )
    table = pd.concat([scores_of(lab, some, name) for name, some in groups.items()], ignore_index=True)
    table["trained on"] = table.pop("model")
    values = lab.rows(results[0]).assign(**{name: one.mean(0) for name, one in right.items()})
    return Finding(
        "rationale_trained", f"{lab.score} from rationales", scores["rationale"], margin, holds(margin), sentence,
        values,
        reference={name: scores[name] for name in ("random words", "full text")}, tables={"models": table},
        charts={"scores": {"kind": "lines", "table": "models", "x": "seed", "y": "score", "by": "trained on",
                           "caption": f"Test {lab.score} of each model."}}, settles=False,
    )  # fmt: skip
