"""How much of the prediction does a single weight of a head account for?"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.attention import Trace
from regard.attention.integrating import Rule
from regard.glimpses import Survey
from regard.mattering import integrated_peaks
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "largest integrated attribution of a weight"
NEEDS = ("weights", "gradients", "reruns")
CITE = "hao2021self"


def cannot(subject: Any, trace: Trace) -> str | None:
    """Attention is scaled in all examples at once: what they see of each other would be scaled, too."""
    if any(site.kind == "samples" for site in trace.sites):
        return "its examples look at each other: attention within one of them cannot be scaled alone."
    return None


def integrated(survey: Survey, *, steps: int = 20, rule: Rule = "midpoint") -> Probed:
    """I_h = E_x[max_qk Attr_h(A)_qk], Attr_h(A) = A_h ⊙ ∫₀¹ ∂F(αA)/∂A_h dα (AttAttr, Hao et al. 2021).

    F is the probability of the predicted class (of a decoder: of the next token); all heads of a layer are scaled
    together, one layer at a time. The largest is that of real rows, over the keys that the mask lets them see.

    NOTE[DIFF] the rule is the midpoint, which is nearer to the integral than the authors' left sum of 20 steps; they
    take the first 200 examples of development, here examples are drawn by lot.

    Args:
        survey: the case.
        steps: of the integral.
        rule: "midpoint", "left" or "right".
    """
    drawn = survey.drawn(integrated_peaks(survey, steps, rule))
    values = tabled(survey.index, drawn)
    most = values.iloc[int(np.nanargmax(values["value"]))]
    what = "what is explained" if survey.scalar == "logit" else "the probability of what is predicted"
    sentence = (
        f"Single weights matter most in head {most['head']} of layer {most['layer']}: in the mean over examples the "
        f"largest accounts for {most['value']:.3g} [{most['low']:.3g}, {most['high']:.3g}] of {what}."
    )
    return Probed("integrated", f"{ABOUT} ({what})", values, sentence, drawn=drawn)
