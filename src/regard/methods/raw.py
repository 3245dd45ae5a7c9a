"""Attention itself."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from regard.attention import Part, Site, Trace
from regard.attention.paths import from_layers, no_layers
from regard.attention.sites import Weigh
from regard.errors import NoSuchPart, OptionError, choose, whole_numbers
from regard.types import Scores

FAMILY = "attention"
NEEDS = ("weights",)
CITE = "jain2019attention"
FORMULA = "r·Ā_l"
PASSES = "1 forward"
OF = "logit"
cannot = no_layers


def raw(
    trace: Trace,
    *,
    layer: int | Literal["last"] = "last",
    heads: Literal["mean", "max", "min"] | int = "mean",
    per_layer: bool = False,
    per_head: bool = False,
    matrix: bool = False,
) -> Scores:
    """The attention that the readout pays in one layer: r·Ā_l, ``(example, key)``.

    The default is what most heat maps show: the row of [CLS], or of the last token, in the last layer, mean over heads.
    Differs from the papers nowhere.

    Args:
        trace: what was traced.
        layer: "last", or the number of a site.
        heads: "mean", "max" or "min" over heads, or the number of one.
        per_layer: all layers: ``(layer, key)``.
        per_head: all heads: ``(head, key)``.
        matrix: all queries: ``(query, key)``.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> why = regard.explain(subject, "so so good so", method="raw")
        >>> why.features.tokens[why.scores.argmax()]
        'good'
    """
    if heads not in ("mean", "max", "min") and isinstance(heads, str):
        raise OptionError(f"heads={heads!r} is not known. Choose 'mean', 'max', 'min', or the number of a head.")
    if isinstance(layer, str):
        choose("layer", layer, ("last",))

    def extreme(tile: Tensor, part: Part) -> Tensor:
        return tile.amax(1, keepdim=True) if heads == "max" else tile.amin(1, keepdim=True)

    def weigh_at(site: Site) -> Weigh | None:
        return extreme if heads in ("max", "min") and not per_head else None

    one = None if isinstance(heads, str) or per_head else whole_numbers("heads", heads)[0]
    found = from_layers(
        trace, weigh_at, layers=layer, per_layer=per_layer, per_head=per_head or one is not None, matrix=matrix,
        together=heads if heads in ("max", "min") and not per_head else False,
    )  # fmt: skip
    if one is None:
        return found
    axis = 1 + found.axes.index("head")
    rows, source = (part if part is None else _head(part, axis, one) for part in (found.rows, found.source))
    return Scores(rows, source, tuple(name for name in found.axes if name != "head"))


def _head(numbers: Tensor, axis: int, head: int) -> Tensor:
    count = numbers.shape[axis]
    if not -count <= head < count:
        raise NoSuchPart(f"heads={head} is not there: there are heads 0 to {count - 1}.")
    return numbers.select(axis, head)
