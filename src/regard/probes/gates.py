"""Which heads stay open when open ones cost?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import torch

from regard.attention import Rerun
from regard.errors import at_least_one, within
from regard.gating import HardConcrete
from regard.glimpses import Survey
from regard.mattering import gated_scores, gates_of, judge_of, losses, two_surveys
from regard.measures import crossed
from regard.probed import Probed
from regard.progress import Counter

EACH = "case"
ABOUT = "gate at test time"
NEEDS = ("gradients", "reruns")
CITE = "voita2019analyzing"


def gates(survey: Survey, *, penalty: float = 0.01, epochs: int = 50, learning_rate: float = 0.1) -> Probed:
    """Hard Concrete gates, one for each head, all trained together: E[L] + λ Σ_h P(g_h > 0) (Voita et al. 2019).

    They are trained on one half of the examples, drawn by lot, and judged on the other. A head survives if its gate is
    above 0 at test time: if it is worth more than λ of the loss, beside the others that are open.

    NOTE[DIFF] the weights of the model are frozen, and it runs in eval mode. In the paper they are trained on, so that
    fewer heads learn to do the same: `regard.gating.gated` does that.

    Args:
        survey: the case.
        penalty: λ, in units of the loss: what an open head costs.
        epochs: how often the half is seen.
        learning_rate: of Adam; a gate has to move by 4.8 to close.
    """
    within("penalty", penalty, 0, math.inf, ends="[)")
    within("learning_rate", learning_rate, 0, math.inf)
    learned, judged = two_surveys(survey, "gates")
    hard, history = _trained(learned, penalty, at_least_one("epochs", epochs), learning_rate)
    value = hard.settled.detach().double().numpy(force=True)
    judge = judge_of(judged)
    scores = gated_scores(judged, judge, np.stack([np.ones_like(value), value])).T  # before and after, example
    found = {"all heads": scores[0], "gated heads": scores[1], "lost": scores[0] - scores[1]}
    table = pd.DataFrame([{"": name, **crossed(one[None], seed=survey.seed).cells("score")}
                          for name, one in found.items()])  # fmt: skip
    before, after, lost = table.itertuples(index=False, name=None)
    left, between = int((value > 0).sum()), int(((value > 0) & (value < 1)).sum())
    sentence = (
        f"{left} of {len(value)} heads survive a penalty of {penalty:g} ({between} of them are turned down). "
        f"{judge.about}: {before[1]:.3g} with all heads, {after[1]:.3g} with these; {lost[1]:.3g} "
        f"[{lost[2]:.3g}, {lost[3]:.3g}] lost. Gates were trained on {len(learned.examples)} examples, and judged on "
        f"{len(judged.examples)} others."
    )
    chart = {
        "kind": "lines", "table": "history", "x": "epoch", "y": "open",
        "caption": "How many heads are expected to be open, Σ P(g > 0), while their gates are trained. Where the curve "
        "still falls, more epochs would close more.",
    }  # fmt: skip
    values = survey.index.assign(value=value, label=["open" if one > 0 else "" for one in value])
    return Probed("gates", ABOUT, values, sentence, {"scores": table, "history": history}, {"history": chart})


def _trained(survey: Survey, penalty: float, epochs: int, learning_rate: float) -> tuple[HardConcrete, pd.DataFrame]:
    """The gates, and of each epoch the mean loss and how many heads are expected to be open."""
    loss, hard = survey.loss, HardConcrete(len(survey.index))
    work: list[tuple[Rerun, Any]] = []
    for places, batch in survey.batches("reading", loss.subject):
        rerun = Rerun(loss.subject, batch, gradients="edits")
        work.append((rerun, losses(loss, rerun.output, [survey.examples[place] for place in places])))
    optimizer = torch.optim.Adam(hard.parameters(), lr=learning_rate)
    order, rows = np.random.default_rng(survey.seed), []
    with torch.random.fork_rng(devices=[]), Counter("training gates", epochs * len(work)) as counter:
        torch.manual_seed(survey.seed)
        for epoch in range(epochs):
            seen = []
            for at in order.permutation(len(work)):
                rerun, lost = work[at]
                values = lost(rerun(gates_of(hard(), rerun.spots)))
                cost = values.mean() + penalty * hard.open.sum().to(values.device)
                (hard.log_a.grad,) = torch.autograd.grad(cost, [hard.log_a])  # the model's parameters get none
                optimizer.step()
                seen.append(values.detach())
                counter.advance(1)
            rows.append(
                {"epoch": epoch, "loss": float(torch.cat(seen).mean()), "open": float(hard.open.sum().detach())}
            )
    return hard, pd.DataFrame(rows)
