"""TabTransformer: attention over the categories of a row; numbers join after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.errors import InputError, at_least_one


class TabTransformer(nn.Module):
    """A table's categories in context, beside its numbers, to logits.

    Each category becomes [c_column, w_value]: an eighth of its width tells the column, the rest the value. Transformer
    blocks (attention, then a feed-forward layer of four times the width; a layer norm after each sum) mix them. Their
    states and the layer-normed numbers, l values in all, go through an MLP of 4·l and 2·l hidden units.
    So attention says nothing about numbers.

    Args:
        numbers: how many columns of numbers; 0 will do.
        cardinalities: of each category column, how many codes it has; code 0 is one of them.
        outputs: how many logits.
        width: channels of a category's state; divisible by ``heads`` and by 8.
        depth: how many blocks.
        heads: of attention.
        dropout: of weights, of feed-forward layers and of what is added, in each block.

    Shape: numbers ``(example, number)`` and codes ``(example, category)`` → ``(example, output)``.

    Protocol: Huang et al. 2020, `huang2020tabtransformer`. NOTE[DIFF]: one number, or two, are not layer-normed,
    since nothing would be left of them, or the sign of their difference.

    Example:
        >>> model = TabTransformer(2, [3, 5], 4)
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
        width: int = 32,
        depth: int = 6,
        heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if not cardinalities:
            raise InputError(
                "cardinalities=[] leaves TabTransformer without a column to attend to: it attends to categories only. "
                "Use an FT-Transformer or SAINT for tables of numbers."
            )
        for name, size in (("width", width), ("depth", depth), ("heads", heads)):
            at_least_one(name, size)
        if width % heads or width % 8:
            raise InputError(f"width={width} must be divisible by heads={heads}, and by 8.")
        starts = [sum(cardinalities[:column]) for column in range(len(cardinalities))]
        self.register_buffer("offsets", torch.tensor(starts), persistent=False)
        self.takes = (numbers, tuple(cardinalities))
        self.values = nn.Embedding(sum(cardinalities), width - width // 8)
        self.columns = nn.Parameter(torch.randn(len(cardinalities), width // 8))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(numbers) if numbers > 2 else nn.Identity()
        size = width * len(cardinalities) + numbers
        self.head = nn.Sequential(
            nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, 2 * size), nn.ReLU(), nn.Linear(2 * size, outputs)
        )

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Logits ``(example, output)``."""
        columns = self.columns.expand(len(codes), -1, -1)
        states = torch.cat([columns, self.values(codes + self.offsets)], dim=-1)  # example category channel
        states = self.blocks(states)
        logits: Tensor = self.head(torch.cat([states.flatten(1), self.norm(numbers)], dim=-1))
        return logits
