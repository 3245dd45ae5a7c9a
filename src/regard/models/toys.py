"""Hand-wired models with known answers: tests, docs and trials live on these.

=================  =======================================================================================
`decisive`         attention *is* the decision: ŷ = Σ α_t · polarity_t, and α follows |polarity|
`irrelevant`       attention is provably irrelevant: all values are the same vector, so A·V does not depend on A
`positional`       attention depends on the position alone
`induction`        two layers with a previous-token head and a true induction head
=================  =======================================================================================

Logits are kept within ±1.3, so probabilities stay between .2 and .8 and nothing saturates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POLARITY = {
    "<pad>": 0.0, "<unk>": 0.0, "so": 0.0, "the": 0.02, "film": 0.05, "is": -0.02, "and": 0.01, "plot": -0.04,
    "nice": 0.35, "good": 0.6, "moving": 0.8, "superb": 1.0, "slow": -0.35, "bad": -0.6, "dull": -0.8, "awful": -1.0,
}  # fmt: skip
STEEPNESS = 1.25


class Pool(nn.Module):
    """One attention over words, from a table of scores and a table of values.

    Args:
        scores: e of each word; ``slope`` adds −slope · position.
        values: ``(word, channel)``: what attention mixes.
        direct: contribution of each word to the logit that does not pass through attention.
        readout: ``(channel,)``: logit = readout · Σ α_t v_t + mean of direct.
    """

    output = "binary"
    takes_query = False
    attentions = 1
    labels = ("negative", "positive")

    def __init__(self, scores: Tensor, values: Tensor, direct: Tensor, readout: Tensor, slope: float = 0.0) -> None:
        super().__init__()
        self.vocabulary = {word: index for index, word in enumerate(POLARITY)}
        self.scores = nn.Embedding.from_pretrained(scores[:, None])
        self.values = nn.Embedding.from_pretrained(values)
        self.direct = nn.Embedding.from_pretrained(direct[:, None])
        self.readout = nn.Linear(len(readout), 1, bias=False)
        self.readout.weight.data = readout[None]
        self.slope = slope

    def forward(self, ids: Tensor, real: Tensor, attend: Tensor) -> Tensor:
        """``(example, 1)`` logit of "positive"."""
        position = torch.arange(ids.shape[1], device=ids.device)
        scores = self.scores(ids).squeeze(-1) - self.slope * position
        weights = scores.masked_fill(~attend, -torch.inf).softmax(-1)
        context = weights.unsqueeze(1) @ self.values(ids)  # example 1 channel
        direct = (self.direct(ids).squeeze(-1) * real).sum(-1) / real.sum(-1)
        logit: Tensor = self.readout(context.squeeze(1)) + direct.unsqueeze(-1)
        return logit


def decisive() -> Pool:
    """Attention is the decision: weight follows |polarity|, the value is the polarity, nothing else is added."""
    polarity = torch.tensor(list(POLARITY.values()))
    return Pool(6 * polarity.abs(), polarity[:, None], 0 * polarity, torch.tensor([STEEPNESS]))


def irrelevant() -> Pool:
    """Attention cannot matter: every value is (1, 1), so Σ α_t v_t = (1, 1) for any α, and the readout cancels it.

    The decision is the mean polarity, which does not pass through attention; attention prefers function words.
    """
    polarity = torch.tensor(list(POLARITY.values()))
    values = torch.ones(len(polarity), 2)
    return Pool(4 * (1 - polarity.abs()), values, STEEPNESS * polarity, torch.tensor([1.0, -1.0]))


def positional() -> Pool:
    """Attention depends on the position alone (earlier is more); the values are polarities."""
    polarity = torch.tensor(list(POLARITY.values()))
    return Pool(0 * polarity, polarity[:, None], 0 * polarity, torch.tensor([STEEPNESS]), slope=0.7)


class Induction(nn.Module):
    """Two attention layers that continue repeated sequences: … A B … A → B.

    The residual stream has four slots: the token, its position, the previous token, the prediction. Head 0 of
    layer 0 attends from each position to the one before and copies its token into the third slot. Head 0 of layer 1
    attends from a token to positions whose *previous* token is the same, and copies their token into the fourth.
    Head 1 of each layer attends to everything alike and writes nothing.

    Shape: ``(example, row)`` ids → ``(example, row, token)`` next-token logits.
    """

    def __init__(self, tokens: int = 16, positions: int = 64, sharpness: float = 40.0) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions
        slots = {"token": tokens, "position": positions, "previous": tokens, "prediction": tokens}
        starts = dict(zip(slots, torch.tensor([0, *slots.values()]).cumsum(0).tolist(), strict=False))
        width = sum(slots.values())

        def select(slot: str) -> Tensor:  # (slot, width): reads one slot of the stream
            chosen = torch.zeros(slots[slot], width)
            chosen[:, starts[slot] : starts[slot] + slots[slot]] = torch.eye(slots[slot])
            return chosen

        token, position, previous, prediction = (select(slot) for slot in slots)
        shift = torch.diag(torch.ones(positions - 1), 1) @ position  # position i asks for position i − 1
        self.layers = nn.ModuleList(
            [
                Layer(query=sharpness * shift, key=position, value=token, out=previous.T),
                Layer(query=sharpness * token, key=previous, value=token, out=prediction.T),
            ]
        )
        self.register_buffer("unembed", prediction)
        self.register_buffer("embed_token", token)
        self.register_buffer("embed_position", position)
        self.unembed: Tensor
        self.embed_token: Tensor
        self.embed_position: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        """Next-token logits of every position."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed_token[ids] + self.embed_position[positions]
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.unembed.T


class Layer(nn.Module):
    """Causal attention with a wired head and an idle one, whose queries and output are zero."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        super().__init__()
        width, idle = max(len(query), len(value)), {"query": 0, "key": 1, "value": 1, "out": 0}
        for name, weight in {"query": query, "key": key, "value": value, "out": out.T}.items():
            wired = F.pad(weight, (0, 0, 0, width - len(weight)))  # equal sizes for the kernel
            self.register_buffer(name, torch.cat([wired, idle[name] * wired]))  # (head · channel, width of the stream)
        self.query: Tensor
        self.key: Tensor
        self.value: Tensor
        self.out: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """What the heads write into the stream."""
        q, k, v = (
            (x @ weight.T).unflatten(-1, (2, -1)).transpose(1, 2) for weight in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)  # example head row channel
        return mixed.transpose(1, 2).flatten(2) @ self.out


def induction(tokens: int = 16, positions: int = 64) -> Induction:
    """Two layers with a true induction head; ``tokens`` letters, texts of up to ``positions`` of them."""
    return Induction(tokens, positions)
