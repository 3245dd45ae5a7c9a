"""Does attention to what a question is about tell whether the answer will be right?"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from regard.attention import Site, Trace, trace
from regard.errors import NotServed, at_least_one, choose
from regard.facts import knows, speechless, subject_rows
from regard.glimpses import Array, Survey, copies
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "whether attention to the subject tells right answers from wrong ones"
NEEDS = ("weights", "facts", "tokens")
CITE = "yuksekgonul2024attention"
C = 0.05  # the inverse of the strength of the L1 penalty
Weigh = Literal["weights", "norms"]
Mask = NDArray[np.bool_]
cannot = speechless


def satisfies(survey: Survey, *, weigh: Weigh = "weights", least: int = 20) -> Probed:
    """The SAT probe (Yuksekgonul et al. 2024): p(right) = σ(Σ_h w_h z_h + b), z_h = max_k A_h(last token, k).

    k are the tokens of the fact's subject, the constraint that its answer has to satisfy; z is standardised. w and b
    minimise ‖w‖₁ + |b| + C Σ log loss with C = .05 on one half of the facts, by lot; on the other half the AUROC is
    taken: how often a right answer has a higher p than a wrong one. Beside it are those of the model's confidence (the
    probability of the token that it says), of a regression on both, and of nothing (½). Intervals are over facts that
    were held out, not over other halves to learn from. An answer is right if what the model says begins with it.

    The number of a head is its w_h. It is 0 where the head was left out; above 0, more attention speaks for a right
    answer.

    NOTE[DIFF] A fact has one constraint, its subject. The authors take the confidence of the whole answer; here it is
    that of its first token, since where a wrong answer ends is not known. Popularity, their third baseline, is not in
    files of facts and is left out.

    Args:
        survey: a decoder, and facts, of which it knows some and others not.
        weigh: "weights": A_h; "norms": A_h(last token, k) · ‖v_k W_O‖, the size of what is handed on.
        least: right answers, and wrong ones, that there must be.
    """
    choose("weigh", weigh, ("weights", "norms"))
    at_least_one("least", least)
    looks, confidence, right = _asked(survey, weigh)
    wrong = len(right) - int(right.sum())
    if min(int(right.sum()), wrong) < (needed := max(least, 2)):  # one of each in both halves
        raise NotServed(
            f"the model answers {right.sum()} of {len(right)} facts rightly and {wrong} wrongly; it takes {needed} of "
            "both. Pass more facts (examples=None takes all), or others."
        )
    learn, test = train_test_split(np.arange(len(right)), test_size=0.5, stratify=right, random_state=survey.seed)
    learn, test = np.sort(learn), np.sort(test)
    attention, weights = _learned(looks, right, learn, test, survey.seed)
    both, _ = _learned(np.column_stack([looks, confidence]), right, learn, test, survey.seed)
    scores = {"attention": attention, "confidence": confidence[test], "both": both}
    lots = copies(test, survey.draws, survey.seed)
    table = _table({by: auroc(one, right[test], lots) for by, one in (scores | {"nothing": 0 * both}).items()})
    names = [one.id or str(at) for at, one in enumerate(survey.examples)]
    every = pd.DataFrame({"fact": names, "answer": np.where(right, "right", "wrong")})
    told = every.iloc[test].reset_index(drop=True).assign(**scores)
    labels = ["right" if one > 0 else "wrong" if one < 0 else "" for one in weights]
    return Probed(
        "satisfies", "weight in the regression", tabled(survey.index, weights[None], labels),
        _sentence(table, int(np.count_nonzero(weights)), len(weights), int(right.sum()), len(right)),
        {"auroc": table, "facts": told, "learned on": every.iloc[learn].reset_index(drop=True)},
        {"right or wrong": {
            "kind": "points", "table": "facts", "x": "confidence", "y": "attention", "by": "answer",
            "caption": "Facts that were held out: the model's confidence, and log-odds of a right answer by attention.",
        }},
        {"right": int(right.sum()), "wrong": wrong, "learned on": len(learn), "held out": len(test)},
        () if weights.any() else ("No head was kept. With few facts the penalty outweighs any head: pass more.",),
    )  # fmt: skip


def _asked(survey: Survey, weigh: Weigh) -> tuple[Array, Array, Mask]:
    """``(fact, head)``: the most that each head has on the subject; ``(fact,)``: confidence, and what is right."""
    looks = np.zeros((len(survey.examples), len(survey.index)))
    confidence, right = np.zeros(len(looks)), np.zeros(len(looks), dtype=bool)
    for places, batch in survey.batches("asking for facts"):
        examples = [survey.examples[place] for place in places]
        seen = trace(survey.subject, batch, onward=weigh == "norms")
        about = torch.zeros(batch.real.shape, dtype=torch.bool)
        for at, one in enumerate(examples):
            about[at, subject_rows(batch.features[at], one)] = True
        found = [_most(seen, site, about.to(site.real.device), weigh) for site in seen.sites]
        looks[places] = torch.cat(found, -1).double().numpy(force=True)
        confidence[places] = seen.output.softmax(-1).amax(-1).double().numpy(force=True)
        right[places] = [knows(survey.subject, one, seen.output[at]) for at, one in enumerate(examples)]
    return looks, confidence, right


def _most(seen: Trace, site: Site, about: Tensor, weigh: Weigh) -> Tensor:
    """``(example, head)``: the most that the last token has on one of some keys ``(example, key)``."""
    looks = site.pull(seen.readout, per_head=True)  # the one row that is read: example head key
    if weigh == "norms":
        if site.onward is None:
            raise NotServed(f"weigh='norms': no output projection was seen after site {site.index} ({site.name}).")
        handed = torch.einsum("ehkc,hco->ehko", site.values.to(looks), site.onward.projection.to(looks))
        looks = looks * handed.norm(dim=-1)
    return looks.where(about[:, None], 0).amax(-1)


def _learned(
    looks: Array, right: Mask, learn: NDArray[np.intp], test: NDArray[np.intp], seed: int
) -> tuple[Array, Array]:
    """Log-odds of the facts that were held out; and the weights."""
    regression = LogisticRegression(l1_ratio=1, solver="liblinear", C=C, max_iter=1000, random_state=seed)
    model = make_pipeline(StandardScaler(), regression).fit(looks[learn], right[learn])
    return np.asarray(model.decision_function(looks[test])), np.asarray(regression.coef_[0])


def auroc(scores: Array, right: Mask, copies: Array) -> Array:
    """``(1 + draw,)``: how often a right answer scores higher than a wrong one, of copies ``(fact, 1 + draw)``.

    A tie is ½.
    """
    higher = (np.sign(scores[right][:, None] - scores[~right]) + 1) / 2
    one, other = copies[right], copies[~right]
    with np.errstate(invalid="ignore"):  # a draw without one of both
        return np.asarray(((one.T @ higher) * other.T).sum(1) / (one.sum(0) * other.sum(0)))


def _table(drawn: dict[str, Array]) -> pd.DataFrame:
    """A row for each predictor: its AUROC, and how far it is above that of confidence, over the same draws."""
    rows = []
    for by, one in drawn.items():
        above = one - drawn["confidence"]
        rows.append({
            "by": by, "auroc": one[0], **_ends("auroc", one),
            "above confidence": above[0], **_ends("above confidence", above),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _ends(name: str, drawn: Array) -> dict[str, float]:
    low, high = np.nanquantile(drawn[1:], [0.025, 0.975])
    return {f"{name}_low": float(low), f"{name}_high": float(high)}


def _sentence(table: pd.DataFrame, used: int, heads: int, right: int, facts: int) -> str:
    gap, *_ = rows = table.to_dict(orient="records")
    said = ", ".join(
        f"{one['by']} {one['auroc']:.3f} [{one['auroc_low']:.3f}, {one['auroc_high']:.3f}]" for one in rows[:3]
    )
    return (
        f"The model answers {right} of {facts} facts rightly. Right answers are told from wrong ones with an AUROC of: "
        f"{said}. Attention (of {used} of {heads} heads) is {gap['above confidence']:+.3f} "
        f"[{gap['above confidence_low']:+.3f}, {gap['above confidence_high']:+.3f}] above confidence."
    )
