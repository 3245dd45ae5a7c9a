"""Does a head write what it reads?"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.circuits import ends, reads, unknown, wired
from regard.glimpses import Survey
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "Σλ / Σ|λ| over eigenvalues of the OV circuit"
NEEDS = ("projections",)
CITE = "elhage2021mathematical"
cannot = unknown


def copying(survey: Survey) -> Probed:
    """Σλ / Σ|λ| over the eigenvalues λ of W_U W_O W_V W_E, from token read to token written (Elhage et al. 2021).

    1: every token raises its own logit and those of its kin, −1: it lowers them. The vocabulary is never squared: the
    non-zero eigenvalues of (W_U W_O)(W_V W_E) are those of (W_V W_E)(W_U W_O), channel × channel. Norms before W_V and
    before W_U are folded in (see `regard.circuits`); layers in between are left out, as in the paper. A circuit that is
    all zero has 0. Heads that share their values differ by W_O alone.

    NOTE[DIFF] Where there is no unembedding, as in encoders and tables, the circuit is W_O W_V, from state to state:
    does a head add to a row more of what it read? Sites that read one stream and write another are not defined.
    """
    seen, found = wired(survey), ends(survey)
    between = None if found is None else found[0].T @ found[1]  # state state
    values, undefined = [], []
    for site in seen.sites:
        read = reads(site, "value")
        if site.onward is None or read is None or site.kind in ("cross", "pool", "samples"):
            values.append(torch.full((site.heads,), torch.nan))
            undefined.append(site.name)
            continue
        within = read if between is None else read @ between
        values.append(score(within @ site.onward.projection.to(within).mT))
    drawn = torch.cat([one.double().cpu() for one in values]).numpy()[None]
    path = "of W_O W_V: there is no unembedding" if between is None else "of W_U W_O W_V W_E"
    positive, count = int((drawn > 0).sum()), int(np.isfinite(drawn).sum())
    sentence = f"{positive} of {count} heads have more positive than negative eigenvalues, by size ({path})."
    note = f"Not defined at {', '.join(undefined)}: its maps are not known, or it reads one stream and writes another."
    return Probed("", "", tabled(survey.index, drawn), sentence, warnings=(note,) if undefined else ())


def score(circuit: Tensor) -> Tensor:
    """``(head, channel, channel)`` to ``(head,)``: Σλ / Σ|λ|."""
    eigenvalues: Tensor = torch.linalg.eigvals(circuit)
    total = eigenvalues.abs().sum(-1)
    return eigenvalues.real.sum(-1) / total.where(total > 0, 1.0)
