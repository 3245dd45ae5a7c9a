"""How much worse is the model without a head?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from regard.glimpses import Survey
from regard.mattering import How, gate_gradients, per_layer, rises
from regard.measures.ranks import spearman_drawn
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "rise of the loss without the head"
NEEDS = ("reruns", "gradients")
CITE = "michel2019sixteen"


def ablation(survey: Survey, *, how: How = "zero") -> Probed:
    """E_x[L(x without head h) − L(x)], and how well the gradient of a gate tells it.

    The table "agreement" has Spearman's ρ over heads between what is found by taking heads out and the cheap
    E_x|∂L/∂ξ_h| of the same examples, as it is and of length 1 in each layer. Two things can be told: the rise, which
    is below 0 for a head that harms, and E_x|L(x without head h) − L(x)|, of which the gradient is the first order.

    Args:
        survey: the case.
        how: "zero": the head hands on nothing (Michel et al. 2019); "mean": in every row its mean over all rows of the
            data; "uniform": it looks at all keys alike that the mask lets a row see (Kovaleva et al. 2019).
    """
    found, slopes = rises(survey, how), survey.drawn(gate_gradients(survey))
    drawn = survey.drawn(found)
    true = {"rise of the loss": drawn, "size of the change": survey.drawn(np.abs(found))}
    cheap = {"gate gradient": slopes, "of length 1 in each layer": per_layer(slopes, survey.index["layer"].to_numpy())}
    rows = [
        {"gradient": name, "ablation": what, **spearman_drawn(x, y), "heads": y.shape[1]}
        for name, x in cheap.items() for what, y in true.items()
        if y.shape[1] > 2 and np.ptp(x[0]) > 0 and np.ptp(y[0]) > 0
    ]  # fmt: skip
    agreement = pd.DataFrame(rows, columns=["gradient", "ablation", "spearman", "low", "high", "heads"])
    values = tabled(survey.index, drawn)
    return Probed(
        "ablation", f"{ABOUT} ({survey.loss.about})", values, _sentence(values, agreement),
        {"agreement": agreement, "size": tabled(survey.index, true["size of the change"])}, drawn=drawn,
    )  # fmt: skip


def _sentence(values: pd.DataFrame, agreement: pd.DataFrame) -> str:
    worst = values.iloc[int(values["value"].to_numpy().argmax())]
    worse, better = int((values["low"] > 0).sum()), int((values["high"] < 0).sum())
    said = (
        f"The loss rises most without head {worst['head']} of layer {worst['layer']}, by {worst['value']:.3g} "
        f"[{worst['low']:.3g}, {worst['high']:.3g}]. Of {len(values)} heads {worse} make it worse when they are taken "
        f"out and {better} make it better: their intervals, each taken alone, exclude 0."
    )
    if agreement.empty:
        return f"{said} With so few heads, or none that matters, the gradient of a gate cannot be held against it."
    told = [f"{one.spearman:.2f} [{one.low:.2f}, {one.high:.2f}] ({one.gradient})" for one in agreement.itertuples()
            if one.ablation == "rise of the loss"]  # fmt: skip
    return f"{said} Over heads the rise goes with the cheap gradient of a gate by ρ = {', '.join(told)}."
