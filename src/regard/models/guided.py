"""A model that sees no context, and is told where to look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn


class Columns(nn.Module):
    """The cells of a row of a table as vectors, each by itself: a number scales one, a category has its own.

    Args:
        numbers: how many columns are numbers.
        cardinalities: of the others, how many codes each has.
        rows: of each row of attention the place of its column, numbers first; −1: it has none, as [CLS].
        width: channels.
    """

    def __init__(self, numbers: int, cardinalities: Sequence[int], rows: Sequence[int], width: int) -> None:
        super().__init__()
        self.rows = [*rows]
        self.slope = nn.Parameter(torch.randn(numbers, width) / math.sqrt(width))
        self.start = nn.Parameter(torch.randn(numbers, width) / math.sqrt(width))
        self.codes = nn.ModuleList(nn.Embedding(size, width) for size in cardinalities)

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """``(example, row, channel)``."""
        cells = [numbers[..., None] * self.slope + self.start]
        cells += [embed(codes[:, place])[:, None] for place, embed in enumerate(self.codes)]
        nothing = cells[0].new_zeros(len(numbers), 1, self.slope.shape[1])
        return torch.cat([*cells, nothing], 1)[:, self.rows]


class GuidedMLP(nn.Module):
    """Each word by itself through a layer, mixed by weights that come from elsewhere, or by its own.

    h_t = tanh(W x_t + b), c = Σ α_t h_t, ŷ = W' c. Without weights it learns its own: α = softmax(vᵀ tanh(W'' h_t)).

    Args:
        tokens: makes vectors of what it is given, each row by itself: ``(example, row, width)``.
        width: channels of these vectors.
        outputs: columns of the output.
        hidden: channels of h.

    Protocol: Wiegreffe & Pinter 2019, `wiegreffe2019attention`.
    """

    def __init__(self, tokens: nn.Module, *, width: int, outputs: int, hidden: int = 128) -> None:
        super().__init__()
        self.tokens = tokens
        self.layer = nn.Linear(width, hidden)
        self.inner = nn.Linear(hidden, hidden // 2)
        self.outer = nn.Linear(hidden // 2, 1, bias=False)
        self.decoder = nn.Linear(hidden, outputs)

    def forward(self, *inputs: Tensor, attend: Tensor, weights: Tensor | None = None) -> Tensor:
        """Logits ``(example, class)``.

        Args:
            inputs: what ``tokens`` takes.
            attend: ``(example, row)``, True where a row may be looked at.
            weights: ``(example, row)``; None: its own.
        """
        states = self.layer(self.tokens(*inputs)).tanh()  # example row channel
        if weights is None:
            scores = self.outer(self.inner(states).tanh())[..., 0]
            weights = scores.masked_fill(~attend, -math.inf).softmax(-1)
        context = torch.einsum("er,erc->ec", weights.to(states), states)
        return cast(Tensor, self.decoder(context))
