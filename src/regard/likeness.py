"""How alike two explanations of the same examples are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.attention import Trace
from regard.cases import Array, Case, Part
from regard.errors import InputError
from regard.explaining import Job
from regard.measures import kendall, overlap
from regard.wording import on_words


def sizes(part: Part, job: Job, trace: Trace) -> list[Array]:
    """Of each example the size of the score of each word."""
    whys = job.explained(trace)
    return [np.abs(on_words(why, one)) for why, one in zip(whys, part.features, strict=True)]


def alike(name: str, ones: Sequence[Array], others: Sequence[Array]) -> dict[str, Any]:
    """Columns "… tau" and "… top_k", ``(example,)``: Kendall's τ, and the overlap of the top fifth."""
    both = [*zip(ones, others, strict=True)]
    tops = [overlap(one, other, k=math.ceil(len(one) / 5)) for one, other in both]
    return {f"{name} tau": np.array([kendall(*pair).value for pair in both]), f"{name} top_k": np.array(tops)}


def chance(case: Case, part: Part, trace: Trace) -> dict[str, Any]:
    """Columns "random tau" and "random top_k": the random control beside itself under another seed."""
    one, other = (sizes(part, job, trace) for job in case.lots(2).values())
    return alike("random", one, other)


def must_be_defined(case: Case, taus: pd.Series[float]) -> None:
    """Refuse explanations that nowhere have an order."""
    if taus.isna().all():
        raise InputError(
            f"method={case.job.method.name!r} gives all words of an example the same score, in all examples: there is "
            "no order that could change. Try another method, or longer inputs."
        )
