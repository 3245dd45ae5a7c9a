"""What comprehensiveness and sufficiency share: words are removed, in the order of an explanation and by lot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.cases import Case, Part
from regard.erasing import BINS, erased
from regard.errors import OptionError, within
from regard.measures import bootstrap


def falls(case: Case, removed: bool, bins: Sequence[float], repeats: int) -> tuple[pd.DataFrame, dict[str, Any]]:
    """How far what is explained falls without the words that the explanation ranks highest, or with these alone.

    A regression has no side to fall to: its change counts by its size, in standard deviations.

    Args:
        case: what is on trial.
        removed: the words are removed; or all others.
        bins: how many words, as shares of all.
        repeats: how often the random control is drawn.

    Returns:
        A row for each example: "method" and "random", means over bins, and both for each bin. And what else the finding
        shows of it.
    """
    if isinstance(bins, str) or not isinstance(bins, Sequence) or not bins:
        raise OptionError(f"bins={bins!r} must be shares of the words, such as {[*BINS]}.")
    for share in bins:
        within("bins", share, 0, 1, ends="(]")
    jobs = {"method": case.job, **case.lots(repeats)}
    how: list[str] = []

    def work(part: Part) -> dict[str, Sequence[Any]]:
        how[:] = [part.how]
        scores = part.scores(jobs)
        (fallen,) = erased(part.values, part.features, scores, part.ids, bins, part.how, case.seed, (removed,))
        sizes = np.stack([*fallen.values()]) / case.scale  # job example bin
        sizes = np.abs(sizes) if case.head == "regression" else sizes
        both = {"method": sizes[0], "random": sizes[1:].mean(0)}
        of_bins = {f"{name} {share:g}": one[:, at] for name, one in both.items() for at, share in enumerate(bins)}
        return {**{name: one.mean(1) for name, one in both.items()}, **of_bins}

    values, failed = case.each("removing words", work)
    curve = []
    for share in bins:
        for name in ("method", "random"):
            one = bootstrap(values[f"{name} {share:g}"], seed=case.seed)
            curve.append({"share": share, "by": name, "fall": one.value, "fall_low": one.low, "fall_high": one.high})
    title = f"fall by share {'removed' if removed else 'kept'}"
    chart = {"kind": "lines", "table": "curve", "x": "share", "y": "fall", "by": "by"}
    tables = {"curve": pd.DataFrame(curve)}
    return values, {"failed": failed, "tables": tables, "charts": {title: chart}, "settings": {"how": how[0]}}
