"""Which columns of a table does a head look at?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from regard.attention import Site, Trace, trace
from regard.glimpses import Survey
from regard.measures import jsd
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "divergence of where a head looks, over columns, from all columns alike (JSD, at most 0.693)"
NEEDS = ("weights",)
CITE = "gorishniy2021revisiting"
LEAST = 2.0  # times what a column would have if all were looked at alike, to be called the head's own


def cannot(subject: Any, trace: Trace) -> str | None:
    """Columns are the same for all examples; words are not."""
    first, *others = trace.features
    alike = others and all(one.words == first.words for one in others)
    if not hasattr(subject, "schema") and not alike:  # one example alone does not tell
        return "it is about tables: the examples do not have the same columns."
    return None if any(map(trace.reads, trace.sites)) else "no attention of this model is read from its rows."


def columns(survey: Survey) -> Probed:
    """Σ_q r_q A^h_q, summed over the rows of each column, divided by its sum: ``(head, column)``, a mean over examples.

    r is the readout: [CLS] of an FT-Transformer, all columns of a TabTransformer. Special rows are left out. The number
    of a head is how far that profile is from 1/columns; a column is the head's own if it has twice that share at least.
    Attention between examples (SAINT) looks at no column: not defined. "not explored systematically", says the
    literature, so no number is published.
    """
    names: tuple[str, ...] = ()
    found = np.zeros((len(survey.examples), len(survey.index), 0))
    for places, batch in survey.batches("looking at columns"):
        seen = trace(survey.subject, batch)
        if not names:
            names = seen.features[0].present.words
            found = np.full((len(survey.examples), len(survey.index), len(names)), np.nan)
        found[places] = np.concatenate([_profiles(seen, site, len(names)) for site in seen.sites], 1)
    means = survey.drawn(found)  # draw head column
    even = np.full(len(names), 1 / len(names))
    there = np.isfinite(means).all(-1)  # draw head
    drawn = np.where(there, 0.0, np.nan)
    drawn[there] = jsd(means[there], even)
    shares = pd.DataFrame(means[0], columns=[*names])
    labels = [
        "" if np.isnan(one).any() or one.max() * len(names) < LEAST else names[int(one.argmax())] for one in means[0]
    ]
    own = sum(map(bool, labels))
    table = pd.concat([survey.index, shares], axis=1)
    often = pd.Series([one for one in labels if one], dtype=object).value_counts()
    most = ", ".join(f"{name} ({count})" for name, count in often.head(3).items())
    sentence = f"{own} of {len(labels)} heads have a column of their own" + (f", most often {most}." if own else ".")
    return Probed("", "", tabled(survey.index, drawn, labels), sentence, {"shares": table}, drawn=drawn)


def _profiles(seen: Trace, site: Site, columns: int) -> np.ndarray[Any, Any]:
    """``(example, head, column)``: shares that sum to 1."""
    if not seen.reads(site) or site.kind == "samples":
        return np.full((len(seen.batch), site.heads, columns), np.nan)
    looks = site.pull(seen.readout, per_head=True).double()  # example head row
    rows = seen.features[0].present.rows_of_words
    shares = torch.stack([looks[..., list(some)].sum(-1) for some in rows], -1)
    return np.asarray((shares / shares.sum(-1, keepdim=True)).numpy(force=True))
