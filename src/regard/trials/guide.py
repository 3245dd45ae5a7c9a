"""Let attention guide a model that sees no context: do its weights help there, too?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from regard.cases import Case
from regard.errors import within
from regard.finding import Finding, holds, level, said
from regard.lessons import scores_of
from regard.measures import crossed
from regard.teaching import Lesson

CLAIM = "Attention works out of context: it guides a model without context better than uniform weights or its own."
REFERENCE = "The same model with uniform weights, with weights that it learns, and with those of an adversary."
CITE = "wiegreffe2019attention"
CRITERION = "works out of context"
NEEDS = ("recipe", "labels")


def guide(case: Case, *, seeds: int = 5, adversary: float = 0.01) -> Finding:
    """Scores of an MLP that sees each word by itself, and mixes words by the attention of other models.

    It begins with the embeddings of the recipe, or with columns, and is trained by AdamW (1e-3) for up to 20 epochs, of
    small data for up to 1,000 steps, whatever the recipe does.

    Args:
        case: what is on trial.
        seeds: how many such models for each kind of weights; all are told by the same base and adversary.
        adversary: λ of the adversary among the guides.
    """
    lab = case.lab
    lab.must_have(seeds)
    within("adversary", adversary, 0, float("inf"), ends="[)")
    sites, places = lab.places(case.sites)
    (base,) = lab.plain(1)
    against = Lesson("adversary", lab.fresh(0), {"factor": adversary, "sites": sites, "places": places}, base)
    told = {
        "base": ("given", base),
        "uniform": ("uniform", None),
        "own": ("own", None),
        "adversary": ("given", against),
    }
    lessons = [
        Lesson("guide", lab.seed + number, {"by": by} if of is None else {"by": by, "places": places}, of)
        for by, of in told.values() for number in range(seeds)
    ]  # fmt: skip
    results = lab.results(lessons, "training guided models")
    groups = {name: results[at * seeds : (at + 1) * seeds] for at, name in enumerate(told)}
    groups = {name: lab.sound(some) for name, some in groups.items()}
    right = {name: np.stack([lab.fits(one) for one in some]) for name, some in groups.items()}
    scores = {name: crossed(one, seed=case.seed) for name, one in right.items()}
    above = {name: crossed(right["base"] - right[name], seed=case.seed) for name in ("uniform", "own")}
    margin = min(above.values(), key=lambda one: one.low)  # it must beat both
    sentence = (
        f"A model without context has a test {lab.score} of {said(scores['base'])} guided by the base's attention, "
        f"{said(scores['uniform'])} by uniform weights, {said(scores['own'])} by weights of its own, and "
        f"{said(scores['adversary'])} by those of an adversary (λ = {adversary:g}); {seeds} seeds. The base's are "
        f"better than uniform ones by {said(above['uniform'])}, than its own by {said(above['own'])}."
    )
    table = pd.concat([scores_of(lab, some, name) for name, some in groups.items()], ignore_index=True)
    table["guided by"] = table.pop("model")
    values = lab.rows(lab.results([base], "the base")[0]).assign(**{name: one.mean(0) for name, one in right.items()})
    return Finding(
        "guide", f"{lab.score} above uniform weights and its own", margin, margin, holds(margin), sentence, values,
        reference={"no difference": level(0.0)}, tables={"models": table},
        charts={"scores": {"kind": "lines", "table": "models", "x": "seed", "y": "score", "by": "guided by",
                           "caption": f"Test {lab.score} of each model."}},
        settings={"sites": case.sites}, settles=False,
    )  # fmt: skip
