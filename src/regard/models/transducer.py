"""A recurrent encoder–decoder that rewrites texts, for the sequence tasks of Pruthi et al. (2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.data.transduction import vocabulary
from regard.errors import at_least_one, within


class Transducer(nn.Module):
    """A bidirectional GRU over the source, a GRU over the target, and one attention of the second over the first.

    α_t = softmax(s_tᵀ W h / √d), c_t = Σ_i α_ti h_i, ŷ_t = V tanh(U [c_t, s_t]): s_t are the decoder's states, which
    begin with a summary of the encoder's last ones, h those of the encoder.

    NOTE[DIFF] The authors attend before each recurrent step, with additive scores, and feed the context back
    (Bahdanau); here attention comes after the recurrence (Luong), so that all steps run at once. In training they force
    half of the target words, and their texts have start and end marks; here all are forced, and only the target has a
    mark, that of its start. One embedding serves both sides.

    Args:
        words: size of the vocabulary.
        embedding: channels of a word.
        hidden: channels of the decoder, and of each direction of the encoder.
        dropout: of embeddings.
        padding: the id whose embedding is zero.

    Protocol: Pruthi et al. 2020, `pruthi2020learning`.
    """

    def __init__(
        self, *, words: int, embedding: int = 64, hidden: int = 64, dropout: float = 0.0, padding: int = 0
    ) -> None:
        super().__init__()
        for name, value in (("words", words), ("embedding", embedding), ("hidden", hidden)):
            at_least_one(name, value)
        self.embedding = nn.Embedding(words, embedding, padding_idx=padding)
        self.dropout = nn.Dropout(within("dropout", dropout, 0, 1, ends="[)"))
        self.encoder = nn.GRU(embedding, hidden, batch_first=True, bidirectional=True)
        self.first = nn.Linear(2 * hidden, hidden)
        self.decoder = nn.GRU(embedding, hidden, batch_first=True)
        self.keys = nn.Linear(2 * hidden, hidden, bias=False)
        self.mixed = nn.Linear(3 * hidden, hidden)
        self.output = nn.Linear(hidden, words)

    def forward(self, source: Tensor, source_real: Tensor, taken: Tensor) -> Tensor:
        """Logits ``(example, step, word)``.

        Args:
            source: ``(example, row)`` ids.
            source_real: ``(example, row)``, False at padding.
            taken: ``(example, step)`` ids: what the decoder is given at each step, the word before.
        """
        x = self.dropout(self.embedding(source))
        packed = pack_padded_sequence(x, source_real.sum(-1).cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])  # example row channel
        first = self.first(torch.cat([last[0], last[1]], dim=-1)).tanh()
        steps, _ = self.decoder(self.dropout(self.embedding(taken)), first[None])  # example step channel
        scores = steps @ self.keys(states).mT / math.sqrt(steps.shape[-1])  # example step row
        context = scores.masked_fill(~source_real.unsqueeze(1), -math.inf).softmax(-1) @ states
        logits: Tensor = self.output(self.mixed(torch.cat([context, steps], dim=-1)).tanh())
        return logits


def scratch_transducer(
    words: int = 20, *, embedding: int = 64, hidden: int = 64, dropout: float = 0.0, seed: int = 0
) -> Transducer:
    """A `Transducer` with random weights for so many words of `regard.data.transduction`, whose ids are those there."""
    size = len(vocabulary(words))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transducer(words=size, embedding=embedding, hidden=hidden, dropout=dropout).eval()
