"""What comprehensiveness and sufficiency share: words are removed, in the order of an explanation and by lot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.cases import Array, Case, Part
from regard.erasing import BINS, erased
from regard.errors import OptionError, within
from regard.explaining import Job
from regard.finding import Finding, holds, said
from regard.measures import bootstrap, paired


def against_random(case: Case, name: str, bins: Sequence[float], repeats: int, *, removed: bool) -> Finding:
    """How far what is explained falls without the words that the explanation ranks highest, or with these alone.

    A regression has no side to fall to: its change counts by its size, in standard deviations.

    Args:
        case: what is on trial.
        name: of the trial.
        bins: how many words, as shares of all.
        repeats: how often the random control is drawn.
        removed: the words are removed, and a larger fall is better; or all others are, and a smaller one is.
    """
    if isinstance(bins, str) or not isinstance(bins, Sequence) or not bins:
        raise OptionError(f"bins={bins!r} must be shares of the words, such as {[*BINS]}.")
    for share in bins:
        within("bins", share, 0, 1, ends="(]")
    lots = case.lots(repeats)

    def fallen_by(part: Part, jobs: Mapping[str, Job]) -> Array:
        """``(example, bin)``, mean over jobs."""
        scores = part.scores(jobs)
        (fallen,) = erased(part.values, part.features, scores, part.ids, bins, part.how, case.seed, (removed,))
        sizes = np.stack([*fallen.values()]) / case.scale  # job example bin
        return np.asarray((np.abs(sizes) if case.head == "regression" else sizes).mean(0))

    def work(part: Part) -> dict[str, Sequence[Any]]:
        part.notes["how"] = part.how
        drawn = (name, *part.places, *bins, repeats)
        if drawn not in case.shelf:  # the control is the same, whatever explanation is on trial
            case.shelf[drawn] = fallen_by(part, lots)
        both = {"method": fallen_by(part, {"method": case.job}), "random": case.shelf[drawn]}
        of_bins = {f"{by} {share:g}": one[:, at] for by, one in both.items() for at, share in enumerate(bins)}
        return {**{by: one.mean(1) for by, one in both.items()}, **of_bins}

    values, failed = case.each("removing words", work)
    curve = []
    for share in bins:
        for by in ("method", "random"):
            one = bootstrap(values[f"{by} {share:g}"], seed=case.seed)
            curve.append({"share": share, "by": by, **one.cells("fall")})
    title = f"fall by share {'removed' if removed else 'kept'}"
    chart = {
        "kind": "lines", "table": "curve", "x": "share", "y": "fall", "by": "by",
        "caption": f"By share of words {'removed' if removed else 'kept'}; the method is {case.job.method.name}.",
    }  # fmt: skip
    interval, random = (bootstrap(values[by], seed=case.seed) for by in ("method", "random"))
    margin = paired(*(values[by] for by in (("method", "random") if removed else ("random", "method"))), seed=case.seed)
    first, other = (
        ("Without the words", "without as many random words")
        if removed
        else ("With nothing but the words", "with as many random words alone")
    )
    falls = {"regression": "changes, in standard deviations,", "embedding": "falls"}.get(
        case.head, "(probability) falls"
    )
    sentence = (
        f"{first} that {case.job.method.name} ranks highest, what is explained {falls} by {said(interval)}, mean over "
        f"{len(bins)} shares of the words and {interval.n} examples; {other} by {said(random)}. The difference is "
        f"{said(margin)}."
    )
    return Finding(
        name, name, interval, margin, holds(margin), sentence, values,
        reference={"random": random, "above random" if removed else "below random": margin}, failed=failed,
        tables={"curve": pd.DataFrame(curve)}, charts={title: chart}, settings={**values.attrs["notes"]},
    )  # fmt: skip
