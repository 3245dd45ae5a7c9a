"""Which heads stay open when gates on them are trained, and open ones cost?"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from regard.attention import Rerun
from regard.errors import at_least_one, within
from regard.glimpses import Survey
from regard.mattering import gated_scores, gates_of, halves, interval, judge_of, losses
from regard.probed import Probed

EACH = "case"
ABOUT = "gate at test time"
NEEDS = ("labels", "gradients", "reruns")
CITE = "voita2019analyzing"
TEMPERATURE = 0.33
LOW, HIGH = -0.1, 1.1  # what gates are stretched to, before they are clipped
BEGIN = 2.5  # log a: at test time the gate is 1
EDGE = 1e-6  # of what is drawn


def gates(survey: Survey, *, penalty: float = 0.01, epochs: int = 20, learning_rate: float = 0.1) -> Probed:
    """Hard Concrete gates, one for each head, all trained together: E[L] + λ Σ_h P(g_h > 0) (Voita et al. 2019).

    They are trained on one half of the examples, by lot, and judged on the other. A head stays open if its gate is
    above 0 at test time.

    NOTE[DIFF] the weights of the model are frozen; in the paper they are trained on, beside the gates, so that fewer
    heads can do the same. Gates begin open.

    Args:
        survey: the case; it needs labels.
        penalty: λ, in units of the loss: what an open head costs.
        epochs: how often the half is seen.
        learning_rate: of Adam.
    """
    within("penalty", penalty, 0, float("inf"))
    within("learning_rate", learning_rate, 0, float("inf"))
    at_least_one("epochs", epochs)
    learned_on, judged_on = halves(survey, "gates")
    value = at_test(_trained(learned_on, penalty, epochs, learning_rate)).numpy()
    judge = judge_of(survey)
    scores = gated_scores(judged_on, judge, np.stack([np.ones_like(value), value]))  # example, before and after
    drawn = judged_on.drawn(np.column_stack([scores, scores[:, 1] - scores[:, 0]]))
    low, high = interval(drawn)
    names = ["all heads", "gated heads", "difference"]
    table = pd.DataFrame({"model": names, "score": drawn[0], "score_low": low, "score_high": high})
    left = int((value > 0).sum())
    return Probed(
        "gates", ABOUT,
        survey.index.assign(value=value, label=["open" if one > 0 else "" for one in value]),
        f"{left} of {len(value)} heads stay open (λ = {penalty:g}); {judge.about} {drawn[0, 0]:.3g} with all heads, "
        f"{drawn[0, 1]:.3g} with these: {drawn[0, 2]:+.3g} ({low[2]:+.3g} to {high[2]:+.3g}), on examples that the "
        "gates were not trained on.",
        {"score": table},
        settings={"learned_on": len(learned_on.examples), "judged_on": len(judged_on.examples), "score": judge.about},
    )  # fmt: skip


def _trained(survey: Survey, penalty: float, epochs: int, learning_rate: float) -> Tensor:
    """``(head,)``: log a of each gate."""
    loss, draw = survey.loss, torch.Generator().manual_seed(survey.seed)
    log_a = torch.full((len(survey.index),), BEGIN, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_a], lr=learning_rate)
    work = []
    for places, batch in survey.batches("gates begin open", loss.subject):
        examples = [survey.examples[place] for place in places]
        rerun = Rerun(loss.subject, batch, gradients="edits")
        work.append((rerun, losses(loss, rerun.output, examples)))
    for _ in range(epochs):
        for at in torch.randperm(len(work), generator=draw).tolist():
            rerun, lost = work[at]
            noise = torch.rand(len(log_a), generator=draw, dtype=torch.float64).clamp(EDGE, 1 - EDGE)
            output = rerun(gates_of(sample(log_a, noise), rerun.spots))
            cost = lost(output).mean() + penalty * p_open(log_a).sum().to(output.device)
            optimizer.zero_grad()
            cost.backward()
            optimizer.step()
    return log_a.detach()


def sample(log_a: Tensor, noise: Tensor) -> Tensor:
    """g = clip(s · (HIGH − LOW) + LOW, 0, 1), s = σ((log u − log(1 − u) + log a) / T), u uniform."""
    s = torch.sigmoid((noise.log() - (1 - noise).log() + log_a) / TEMPERATURE)
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


def p_open(log_a: Tensor) -> Tensor:
    """P(g > 0) = σ(log a − T · log(−LOW / HIGH))."""
    return torch.sigmoid(log_a - TEMPERATURE * math.log(-LOW / HIGH))


def at_test(log_a: Tensor) -> Tensor:
    """Without noise: clip(σ(log a) · (HIGH − LOW) + LOW, 0, 1)."""
    return (torch.sigmoid(log_a) * (HIGH - LOW) + LOW).clamp(0, 1)
