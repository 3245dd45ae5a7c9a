"""Edits made by hand: the oracle for `regard.intervene`, which it knows nothing of.

A model runs with its attention written out, and the weights of one site are replaced where they come out of the
softmax. Of regard it takes no more than the function that calls a model on its inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, redispatch_function

# weights ``(example, head, query, key)`` and which keys each row may see, to other weights
Change = Callable[[Tensor, Tensor], Tensor]


def assert_near(found: Tensor, expected: Tensor) -> None:
    """To a millionth of the largest number."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    gap, largest = float((found - expected).abs().max()), float(expected.abs().max())
    assert gap <= 1e-6 * largest


def squared(weights: Tensor, *_: Any) -> Tensor:
    """Sharper weights: hidden keys stay at 0, and rows keep their sum. Also an edit for regard."""
    square = weights**2
    return square / square.sum(-1, keepdim=True).clamp_min(1e-30) * weights.sum(-1, keepdim=True)


def evened(weights: Tensor, seen: Tensor) -> Tensor:
    """The same for all keys that are seen; rows keep their sum."""
    return seen / seen.sum(-1, keepdim=True).clamp_min(1) * weights.sum(-1, keepdim=True)


class Literal(TorchFunctionMode):
    """Changes the weights of one site, for the length of one forward pass.

    Args:
        expected: the weights of all sites, ``(example, head, query, key)``, in order of execution.
        site: number of the one whose weights are changed.
        change: what is done to them.
        heads: in which heads; None: in all.
    """

    def __init__(self, expected: list[Tensor], site: int, change: Change, heads: list[int] | None) -> None:
        super().__init__()
        self.expected, self.site, self.change, self.heads = expected, site, change, heads
        self.met = 0  # sites so far

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            with self:  # what it calls is what we want to see
                return redispatch_function(func, types, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self.written_out(*args, **kwargs)
        result = func(*args, **kwargs)
        return self.changed(args[0], result) if name == "softmax" else result

    def written_out(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        assert not dropout_p
        scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.changed(scores, scores.softmax(-1)) @ value

    def changed(self, scores: Tensor, weights: Tensor) -> Tensor:
        """The result of a softmax, changed if it is that of the site; other softmaxes (of experts) differ in shape."""
        if self.met == len(self.expected):
            return weights
        shape = _, heads, query, key = self.expected[self.met].shape
        more = weights.shape[-1] - key  # 1 where a sink takes part in the softmax, and is dropped after it
        if weights.dim() < 3 or weights.shape[-2] != query or more not in (0, 1):
            return weights
        self.met += 1
        if self.met != self.site + 1:
            return weights
        old = weights[..., :key].reshape(shape)  # heads may be folded into the examples
        # it is the right softmax, and heads are where we take them to be
        torch.testing.assert_close(old.detach(), self.expected[self.site], atol=1e-5, rtol=0)
        new = self.change(old, scores[..., :key].reshape(shape) > -1e30)  # masks are -inf, or float32's lowest number
        if self.heads is not None:
            kept = [head for head in range(heads) if head not in self.heads]
            new = new.index_copy(1, torch.tensor(kept), old[:, kept])
        return torch.cat([new.reshape(*weights.shape[:-1], key), weights[..., key:]], -1)


class Case:
    """A model of the table, its inputs, and what it says when they are run as they are.

    Args:
        name: of the architecture.
        side: on which the inputs are padded.
    """

    def __init__(self, name: str, side: str | None) -> None:
        self.name, self.architecture = name, ARCHITECTURES[name]
        self.model: Any = self.architecture.build()
        self.inputs = self.architecture.inputs(side)
        self.subject = self.architecture.subject(self.model)
        sites = self.architecture.expected(self.model, self.inputs)
        self.kinds, self.expected = [kind for kind, _ in sites], [weights for _, weights in sites]
        with torch.no_grad():
            self.plain = self.subject.forward(self.subject.encode(self.inputs))

    @property
    def tried(self) -> list[int]:
        """The first site, one in the middle and the last."""
        return sorted({0, len(self.expected) // 2, len(self.expected) - 1})

    @cached_property
    def twin(self) -> nn.Module:
        """The same weights with attention written out, where the model can be asked for that; never compiled."""
        twin = copy.deepcopy(getattr(self.model, "_orig_mod", self.model))
        if self.architecture.package == "transformers":
            twin.set_attn_implementation("eager")
        return twin

    def literally(
        self, site: int, change: Change, heads: list[int] | None = None, *, gradients: bool = False
    ) -> Tensor:
        """What the model says when the weights of one site are changed by hand. Padding rows, too: nobody sees them."""
        subject = self.architecture.subject(self.twin)
        mode = Literal(self.expected, site, change, heads)
        with torch.set_grad_enabled(gradients), mode:
            output = subject.forward(subject.encode(self.inputs))
        assert mode.met == len(self.expected)
        return output

    def alone(self, example: int) -> Case:
        """The same model on one of its examples."""
        case = copy.copy(self)
        case.inputs = {name: values[example : example + 1] for name, values in self.inputs.items()}
        case.expected = [weights[example : example + 1] for weights in self.expected]
        case.plain = self.plain[example : example + 1]
        return case


def gap(found: Tensor, expected: Tensor) -> float:
    """The largest deviation, in units of the largest number expected, or of 1 if that is larger."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1))
