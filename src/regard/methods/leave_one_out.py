"""How does the prediction change when a word is not there?"""

from __future__ import annotations

from typing import Literal

from regard.attention import Trace
from regard.erasing import Unit, Values, on_units, possible, removable, scores_of, units, without
from regard.errors import choose
from regard.types import How, Scores

FAMILY = "reference"
NEEDS = ("reruns",)
CITE = "jain2019attention"
FORMULA = "TVD(y(x), y(x without t))"
PASSES = "1 forward; 1 forward a word"
OF = "probability"


def leave_one_out(
    trace: Trace, *, how: How | None = None, unit: Unit = "word", effect: Literal["tvd", "signed"] = "tvd"
) -> Scores:
    """The effect of removing one feature: ``(example, row)``.

    Features are removed at the level of ids. The tokens of a word are removed together, and share its effect; special
    tokens are never removed, and score 0. Of models with two sequences those of the source are removed.

    NOTE[DIFF] for a binary output the total variation is |Δŷ|, as in Jain & Wallace; they sum over classes, which is
    twice the total variation. A regression has |Δŷ|, in its own unit; several labels have the mean over them.

    Args:
        trace: what was traced, with a target.
        how: "delete" (later tokens move up), "mask" or "pad" (another token in its place), "attention" (no weight at
            any site; everything stays in its place). None: the first of these that the model can.
        unit: "word" or "token".
        effect: "tvd": total variation between the outputs; "signed": by how much what is explained falls.
    """
    choose("unit", unit, ("word", "token"))
    choose("effect", effect, ("tvd", "signed"))
    how = possible(trace.subject, trace.batch, how)
    removals = [(example, rows) for example, one in enumerate(removable(trace)) for rows in units(one, unit)]
    values = Values(trace)
    effects = without(trace.subject, trace.batch, removals, how, values.moved if effect == "tvd" else values.fallen)
    numbers = [(*removal, number) for removal, number in zip(removals, effects, strict=True)]
    return scores_of(trace, on_units(trace, numbers))
