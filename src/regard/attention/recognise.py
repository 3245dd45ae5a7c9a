"""Hand-written attention, recognised by its data flow and not by any name.

    scores = q @ kᵀ …            a product of two activations, scaled, masked, reshaped
    weights = softmax(scores)    → dropout, casts, reshapes, head-folding
    out = weights @ values       matmul, bmm, einsum, or a product that is summed

A softmax whose result is contracted with values over the axis it was taken over is attention if its scores are
a product of two activations. If they are not (additive attention, a learned query), the same flow is also that
of a soft mixture of experts or of a scalar mix of layers; then it is attention only where the contracted axis
is one that the subject has declared as rows of the input. What cannot be told apart is listed, never guessed.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.attention.sharding import offloaded, part_here
from regard.attention.sources import HIDDEN
from regard.types import Batch


def _names(listed: str) -> set[str]:
    return set(listed.split())


CONTRACT = _names("matmul rmatmul bmm mm einsum baddbmm")
MULTIPLY = _names("mul rmul imul multiply")
# What leaves the weights what they are, up to shape, type and masking.
CARRY_WEIGHTS = MULTIPLY | _names(
    "view reshape view_as reshape_as permute transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze expand "
    "expand_as broadcast_to flatten unflatten t T mT contiguous clone getitem narrow chunk split unbind "
    "repeat_interleave to type type_as float double half bfloat16 dropout masked_fill where nan_to_num div truediv "
    "itruediv"
)
SCALE = MULTIPLY | _names("div truediv itruediv dropout")  # … and their axes
# What leaves scores a function of one product of activations, element by element.
CARRY_SCORES = CARRY_WEIGHTS | _names(
    "add radd iadd sub rsub isub neg rdiv rtruediv tanh clamp clip clamp_min clamp_max cat concat tril triu gather pad "
    "sqrt exp pow"
)
FOLLOWED = CONTRACT | CARRY_SCORES | {"softmax", "sum"}


@dataclass(frozen=True)
class Ignored:
    """A softmax that was seen and not taken for attention, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass
class Flow:
    """A softmax on its way to the values."""

    name: str
    shape: tuple[int, ...]
    size: int  # of the axis the softmax was taken over
    product: bool  # the scores are a product of two activations
    reason: str | None = None  # why it cannot be attention, where the softmax itself shows it
    refused: str | None = None  # why its last use was not
    settled: bool = False  # one of its uses was attention


@dataclass(frozen=True)
class Mix:
    """Weights × values in normal form: ``(*lead, query, key)``, ``(*lead, key, channel)``, and their product."""

    weights: Tensor
    values: Tensor
    out: Tensor
    flow: Flow
    arrange_out: Callable[[Tensor], Tensor]  # what brings the call's own result into that form
    shared: bool  # the first axis, which is examples, is one of the values, too
    visible: Tensor | None = None  # as the weights, 0 where a key may not be seen


class Follower:
    """Follows softmax results through one forward pass until they mix values."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.products = WeakIdKeyDictionary()  # scores: tensor → True
        self.flows = WeakIdKeyDictionary()  # weights and what carries them: tensor → Flow
        self.weighted = WeakIdKeyDictionary()  # weights ∘ values, not yet summed: tensor → (weights, values)
        self.softmaxed = WeakIdKeyDictionary()  # scores → (axis, Flow) of the softmax already taken of them
        self.seen: list[Flow] = []
        self.visible = WeakIdKeyDictionary()  # weights and what carries them → 1 where a key may be seen, else 0
        self.looks_for_masks = False

    def follow(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, site_name: Any) -> Mix | None:
        """Look at one torch function call; return a `Mix` when it completes a softmax-weighted sum."""
        if name == "softmax":
            self._start(args, kwargs, result, site_name())
            return None
        if name in CONTRACT:
            return self._contract(name, args, kwargs, result)
        if name == "sum":
            return self._sum(args, kwargs, result)
        if self.products.data or self.flows.data:  # most calls of a fused model end here
            self._carry(func, name, args, kwargs, result)
        return None

    def ignored(self) -> tuple[Ignored, ...]:
        """What was seen and never became a site."""
        never = "its result never multiplies values over the axis of the softmax"
        return tuple(
            Ignored(flow.name, flow.shape, flow.reason or flow.refused or never)
            for flow in self.seen
            if not flow.settled
        )

    def follows(self, tensor: Tensor) -> bool:
        """Whether a tensor is on its way to become attention: scores, or weights that have not met their values."""
        flow = self.flows.get(tensor)
        return tensor in self.products or (flow is not None and not flow.settled)

    @cached_property
    def fixed(self) -> set[int]:
        """Where parameters and buffers lie; most models, which are fused, never ask."""
        tensors = map(part_here, [*self.model.parameters(), *self.model.buffers()])
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or buffer of the model, or a view of one."""
        if self.offloaded:  # weights are brought here and taken away again as the model runs
            vars(self).pop("fixed", None)
        return part_here(tensor).untyped_storage().data_ptr() in self.fixed

    @cached_property
    def offloaded(self) -> bool:
        """Whether some weights are kept elsewhere until they are needed."""
        return offloaded(self.model)

    def _start(self, args: Any, kwargs: Any, result: Tensor, name: str) -> None:
        (scores,) = tensors_in(args, kwargs)
        axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        if axis is None or not scores.dim():
            return
        flow = Flow(name, tuple(result.shape), result.shape[axis], scores in self.products)
        if self.is_fixed(scores):
            flow.reason = "the softmax is of parameters: its weights do not depend on the input"
        before = self.softmaxed.get(scores)
        if before is not None and before[0] != axis % scores.dim() and not flow.product:
            # the mark of a soft mixture of experts: dispatch and combine are softmaxes of the same scores
            flow.reason = before[1].reason = (
                "the same scores are also normalised over another axis: a soft mixture of experts"
            )
        self.softmaxed[scores] = (axis % scores.dim(), flow)
        self.flows[result] = flow
        if self.looks_for_masks:
            below = scores.detach() - scores.detach().amax(axis, keepdim=True)
            self.visible[result] = (below > HIDDEN).to(result.dtype)
        self.seen.append(flow)

    def _carry(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        tensors = list(tensors_in(args, kwargs))
        results = list(tensors_in((result,), {}))
        if any(tensor in self.products for tensor in tensors):
            for made in results:
                self.products[made] = True
        if name not in CARRY_WEIGHTS:
            return
        for tensor in tensors:
            flow = self.flows.get(tensor)
            if flow is None:
                continue
            for made in results:
                self.flows[made] = flow
            if tensor in self.visible:
                self._carry_visible(func, name, args, kwargs, tensor, results)
            if name in MULTIPLY and len(tensors) == 2:
                other = tensors[1] if tensor is tensors[0] else tensors[0]
                self.weighted[results[0]] = (tensor, other)
            return

    def _carry_visible(
        self, func: Any, name: str, args: Any, kwargs: Any, tensor: Tensor, results: list[Tensor]
    ) -> None:
        """What happens to the axes of weights happens to what says which of them may be seen."""
        twin = self.visible[tensor]
        moved = twin
        if name not in SCALE:
            with torch.no_grad():
                moved = func(*[twin if arg is tensor else arg for arg in args], **kwargs)
        for made, visible in zip(results, tensors_in((moved,), {}), strict=False):
            if visible.shape == made.shape:
                self.visible[made] = visible

    def _contract(self, name: str, args: Any, kwargs: Any, result: Tensor) -> Mix | None:
        operands = list(tensors_in(args, kwargs))[name == "baddbmm" :]  # the first of baddbmm is what is added
        if len(operands) != 2:
            return None
        if not any(self.is_fixed(tensor) for tensor in operands):
            self.products[result] = True
        first, second = operands
        if name == "rmatmul":
            first, second = second, first
        flow = self.flows.get(first) or self.flows.get(second)
        if flow is None or name == "baddbmm":
            return None
        einsum = name == "einsum"
        labels = einsum_labels(args[0], first, second) if einsum else matmul_labels(first, second, result)
        if labels is None:
            return None
        one, two, out = labels
        if first in self.flows:
            return normal_form(first, one, second, two, result, out, flow, self.visible.get(first))
        return normal_form(second, two, first, one, result, out, flow, self.visible.get(second))

    def _sum(self, args: Any, kwargs: Any, result: Tensor) -> Mix | None:
        product: Tensor = args[0] if args else kwargs["input"]
        pair = self.weighted.get(product)
        axes = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
        axes = [axes] if isinstance(axes, int) else axes
        if pair is None or axes is None or len(axes) != 1:
            return None
        weights, values = pair
        letters = string.ascii_letters[: product.dim()]
        axis = axes[0] % product.dim()
        kept = letters[:axis] + ("." if result.dim() == product.dim() else "") + letters[axis + 1 :]  # keepdim
        one, w = _broadcast(weights, letters, product)
        two, v = _broadcast(values, letters, product)
        visible = self.visible.get(weights)
        visible = visible if visible is None else _broadcast(visible, letters, product)[0]
        return normal_form(one, w, two, v, result, kept, self.flows[weights], visible)


def tensors_in(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of a call, also in lists and tuples."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (entry for entry in value if isinstance(entry, Tensor))


def einsum_labels(equation: Any, first: Tensor, second: Tensor) -> tuple[str, str, str] | None:
    """The labels of both operands and of the result, with an ellipsis written out."""
    if not isinstance(equation, str) or "->" not in equation or equation.count(",") != 1:
        return None
    terms, out = equation.replace(" ", "").split("->")
    one, two = terms.split(",")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    widths = [x.dim() - len(term) + 3 for x, term in ((first, one), (second, two)) if "..." in term]
    dots = "".join(spare[: max(widths, default=0)])

    def write_out(term: str, width: int) -> str:
        return term.replace("...", dots[len(dots) - width :])

    return (
        write_out(one, first.dim() - len(one) + 3),
        write_out(two, second.dim() - len(two) + 3),
        write_out(out, len(dots)),
    )


def matmul_labels(first: Tensor, second: Tensor, result: Tensor) -> tuple[str, str, str] | None:
    """The labels of a matrix product; leading axes are shared from the right."""
    if first.dim() < 2 or second.dim() < 2:
        return None
    lead = string.ascii_lowercase[: result.dim() - 2]
    one = lead[len(lead) - first.dim() + 2 :] if first.dim() > 2 else ""
    two = lead[len(lead) - second.dim() + 2 :] if second.dim() > 2 else ""
    return one + "XY", two + "YZ", lead + "XZ"


def _broadcast(operand: Tensor, letters: str, product: Tensor) -> tuple[Tensor, str]:
    """Drop the axes of an operand that were only broadcast into the product, and label the others."""
    offset = product.dim() - operand.dim()
    labels, keep = "", operand
    for axis in reversed(range(operand.dim())):
        if operand.shape[axis] == 1 and product.shape[axis + offset] > 1:
            keep = keep.squeeze(axis)
        else:
            labels = letters[axis + offset] + labels
    return keep, labels


def normal_form(
    weights: Tensor, w: str, values: Tensor, v: str, out: Tensor, o: str, flow: Flow, visible: Tensor | None
) -> Mix | None:
    """Bring a contraction, given by the labels of its axes, into the normal form of a `Mix`.

    Axes that the values do not have are queries; of several, the last is, and the others are heads that share their
    values. An axis labelled "." is what keepdim left.
    """
    sizes = {label: size for label, size in zip(o, out.shape, strict=True) if label != "."}
    summed = [label for label in w if label in v and label not in o]
    query = [label for label in w if label in o and label not in v][-1:]
    lead = [label for label in sizes if label in w and label not in query]
    channel = [label for label in o if label in v and label not in w]
    if len(summed) != 1 or len(set(w)) != len(w) or {*w, *v} != {*lead, *query, *channel, *summed}:
        return None
    shape = [sizes[label] for label in lead]

    def arrange(x: Tensor, labels: str, *last: list[str]) -> Tensor:
        if "." in labels:
            x, labels = x.squeeze(labels.index(".")), labels.replace(".", "")
        for label in lead:
            if label not in labels:  # heads that share these values
                x, labels = x.unsqueeze(0), label + labels
        x = x.permute([labels.index(label) for label in (*lead, *(label for part in last for label in part))])
        x = x.expand(*shape, *x.shape[len(shape) :])
        for position, part in enumerate(last, start=len(shape)):
            if len(part) == 0:
                x = x.unsqueeze(position)
            elif len(part) > 1:
                x = x.flatten(position, position + len(part) - 1)
        return x

    def arrange_out(x: Tensor) -> Tensor:
        return arrange(x, o, query, channel)

    mix = Mix(
        weights=arrange(weights, w, query, summed),
        values=arrange(values, v, summed, channel),
        out=arrange_out(out),
        flow=flow,
        arrange_out=arrange_out,
        shared=not lead or lead[0] in v,
        visible=None if visible is None else arrange(visible, w, query, summed),
    )
    return mix if mix.weights.shape[-1] <= flow.size else None


def why_not(mix: Mix, batch: Batch, fixed: bool) -> str | None:
    """The reason why a mix is not attention over the rows of the input, or None if it is."""
    lengths, (query, key) = batch.lengths, mix.weights.shape[-2:]
    mass = float(mix.weights.detach().sum(-1).amax())
    if mix.flow.reason:
        return mix.flow.reason
    if not mix.shared:
        return "the values are the same for every example: they do not depend on the input"
    if fixed:
        return "the values are parameters: they do not depend on the input"
    if mass > 1.02:
        return f"the weights of a row sum to {mass:.3g}: it is not over the axis of the softmax that they mix"
    known = query == 1 or query in (*lengths, *batch.queries)
    rows = " or ".join(map(str, lengths))
    if mix.flow.product:
        return None if known else f"its {query} queries are not rows of the input, which has {rows}"
    if key not in lengths:
        return f"it mixes {key} things, and the input has {rows} rows"
    if not known:
        return f"{query} learned queries: attention pools and mixtures of experts look the same here"
    lead = mix.weights.shape[:-2] or (1,)
    if lead[0] != len(batch) or any(size in lengths and size > 1 for size in lead[1:]):
        return f"it mixes {key} things for each row: a mixture of experts looks the same"
    return None
