"""SAINT: attention over the columns of a row, and over the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import InputError, TooLarge, at_least_one, choose

PER_NUMBER = 100  # hidden units of the MLP that each number has of its own
MOST = 200_000_000  # parameters of a block that looks at other rows


class NumberEmbedding(nn.Module):
    """Each number to a vector, by an MLP of its own with one hidden layer: ``(example, number)`` → ``(…, channel)``."""

    def __init__(self, numbers: int, width: int) -> None:
        super().__init__()
        reach = PER_NUMBER**-0.5  # as nn.Linear begins; the first layer has one input
        self.first = nn.Parameter(torch.empty(2, numbers, PER_NUMBER).uniform_(-1, 1))  # weight, bias
        self.second = nn.Parameter(torch.empty(numbers, PER_NUMBER, width).uniform_(-reach, reach))
        self.bias = nn.Parameter(torch.empty(numbers, width).uniform_(-reach, reach))

    def forward(self, numbers: Tensor) -> Tensor:
        """``(example, number, channel)``."""
        hidden = (numbers.unsqueeze(-1) * self.first[0] + self.first[1]).relu()
        return torch.einsum("enh,nhc->enc", hidden, self.second) + self.bias


class Block(nn.Module):
    """Attention, then a gated feed-forward layer: x̂ = norm(x), x ← x̂ + f(x̂) for each. Shape: ``(…, row, channel)``."""

    def __init__(self, width: int, heads: int, head_width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width)
        self.rise, self.fall = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = self.before_attention(x)
        pattern = "... row (qkv head channel) -> qkv ... head row channel"
        query, key, value = rearrange(self.qkv(x), pattern, qkv=3, head=self.heads)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = self.before_feed(x + self.out(rearrange(mixed, "... head row channel -> ... row (head channel)")))
        values, gates = self.rise(x).chunk(2, dim=-1)
        fed: Tensor = self.fall(self.dropout(values * F.gelu(gates)))
        return x + fed


class SAINT(nn.Module):
    """Numbers and categories as rows after [CLS]; blocks mix a row's columns, and each column's rows of the batch.

    Where it looks at other rows, an example is one long vector of all its columns, and its output depends on which
    examples are in the batch: run alone, an example sees itself only.

    Args:
        numbers: how many columns of numbers.
        cardinalities: of each category column, how many codes it has; code 0 is one of them.
        outputs: how many logits, read from [CLS]: after attention over columns from no other row, but each block that
            looks at samples is dense over all columns of an example, so that all of them are read before it.
        attention: over the ``columns`` of an example, over ``samples`` (the examples of a batch), or ``both`` in turn.
        width: channels of a column's state.
        depth: how many blocks of each kind; None: 6 over columns alone, otherwise 1, as the authors have it.
        heads: of attention, 16 channels each over columns and 64 each over samples.
        dropout: of feed-forward layers.

    Shape: numbers ``(example, number)`` and codes ``(example, category)`` → ``(example, output)``.
    The rows that attention over columns runs over are [CLS], the numbers, the categories.

    Protocol: Somepalli et al. 2021, `somepalli2021saint`. NOTE[DIFF]: like the authors' code, and unlike their
    equation 1, each layer's input is normed, the residual included, and no attention weight is dropped. Without their
    pre-training. They begin with 4 heads and a dropout of 0.8 where samples are looked at.

    Example:
        >>> model = SAINT(2, [3, 5], 4).eval()
        >>> model(torch.randn(6, 2), torch.tensor([[0, 4]] * 6)).shape
        torch.Size([6, 4])
    """

    offsets: Tensor

    def __init__(
        self,
        numbers: int,
        cardinalities: Sequence[int],
        outputs: int,
        *,
        attention: Literal["both", "columns", "samples"] = "both",
        width: int = 32,
        depth: int | None = None,
        heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        choose("attention", attention, ("both", "columns", "samples"))
        for name, size in (("width", width), ("depth", 1 if depth is None else depth), ("heads", heads)):
            at_least_one(name, size)
        rows = 1 + numbers + len(cardinalities)
        if rows == 1:
            raise InputError("numbers=0, cardinalities=[]: a table without columns.")
        if attention != "columns" and 12 * (rows * width) ** 2 > MOST:
            raise TooLarge(
                f"attention={attention!r} with {rows - 1} columns of width={width} would need "
                f"{12 * (rows * width) ** 2:.1e} parameters in each block that looks at other rows. "
                "Use attention='columns', a smaller width or fewer columns."
            )
        starts = [sum(cardinalities[:column]) for column in range(len(cardinalities))]
        self.register_buffer("offsets", torch.tensor(starts, dtype=torch.long), persistent=False)
        self.takes = (numbers, tuple(cardinalities))
        self.cls = nn.Parameter(torch.randn(1, width))
        self.numbers = NumberEmbedding(numbers, width)
        self.values = nn.Embedding(sum(cardinalities), width)
        self.attention = attention
        kinds = ["columns", "samples"] if attention == "both" else [attention]
        depth = depth or (6 if attention == "columns" else 1)
        self.kinds = depth * kinds
        self.blocks = nn.ModuleList(
            Block(width, heads, 16, dropout) if kind == "columns" else Block(rows * width, heads, 64, dropout)
            for kind in self.kinds
        )
        self.head = nn.Sequential(nn.Linear(width, 1000), nn.ReLU(), nn.Linear(1000, outputs))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Logits ``(example, output)``."""
        cls = self.cls.expand(len(numbers), 1, -1)
        x = torch.cat([cls, self.numbers(numbers), self.values(codes + self.offsets)], dim=1)  # example row channel
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            if kind == "columns":
                x = block(x)
            else:
                rows = rearrange(x, "example row channel -> 1 1 example (row channel)")
                x = rearrange(block(rows), "1 1 example (row channel) -> example row channel", row=x.shape[1])
        logits: Tensor = self.head(x[:, 0])
        return logits
