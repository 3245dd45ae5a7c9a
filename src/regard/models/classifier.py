"""Attention-pooled encoders, as in Jain & Wallace (2019)."""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.errors import InputError, choose

Task = Literal["binary", "multiclass", "multilabel", "pair", "choice"]
OUTPUT = {"binary": "binary", "multilabel": "sigmoid"}  # all others: softmax


class Encoder(nn.Module):
    """Token ids to states: a bidirectional LSTM, a CNN, or a projection that mixes nothing.

    Shape: ``(example, row)`` → ``(example, row, channel)`` with 2·hidden channels for the LSTM, else hidden.
    """

    def __init__(self, kind: str, *, words: int, embedding: int, hidden: int, padding: int) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(words, embedding, padding_idx=padding)
        self.channels = 2 * hidden if kind == "lstm" else hidden
        if kind == "lstm":
            self.body: nn.Module = nn.LSTM(embedding, hidden, batch_first=True, bidirectional=True)
        elif kind == "cnn":
            self.body = nn.ModuleList(
                nn.Conv1d(embedding, hidden // 4, width, padding="same") for width in (1, 3, 5, 7)
            )
        else:
            self.body = nn.Linear(embedding, hidden)

    def forward(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """States of all rows, and one summary: the LSTM's last states, the CNN's maxima, the projection's mean."""
        x = self.embedding(ids)  # example row embedding
        if isinstance(self.body, nn.LSTM):
            packed = pack_padded_sequence(x, real.sum(-1).cpu(), batch_first=True, enforce_sorted=False)
            states, (last, _) = self.body(packed)
            states, _ = pad_packed_sequence(states, batch_first=True, total_length=ids.shape[1])
            return states, torch.cat([last[0], last[1]], dim=-1)
        shown = real.unsqueeze(-1)
        if isinstance(self.body, nn.ModuleList):
            x = x.mT  # example embedding row
            states = torch.cat([conv(x).relu() for conv in self.body], dim=1).mT * shown
            return states, states.amax(1)
        states = self.body(x).tanh() * shown
        return states, states.sum(1) / shown.sum(1)


class AttentionClassifier(nn.Module):
    """Encoder → attention over its states → linear decoder.

    The smallest models in which attention is asked for an explanation: α = softmax(e), c = Σ α_t h_t, ŷ = W c.

    * ``tanh`` (additive): e_t = vᵀ tanh(W h_t + b); with a query tanh(W₁ h_t + W₂ q).
    * ``dot``: e_t = wᵀ h_t / √H with a learned w; with a query h_tᵀ q / √H.

    Args:
        words: size of the vocabulary; ``padding`` is the id whose embedding is zero.
        task: ``binary`` (one logit), ``multiclass``, ``multilabel`` (one attention for each label), ``pair`` (a second
            text is the query) or ``choice`` (a query, and only candidates can be the answer).
        classes: number of classes, labels or possible answers; 1 for ``binary``.

    Protocol: Jain & Wallace 2019, `jain2019attention`. NOTE[DIFF]: ``multilabel`` with one attention for each
    label is not in their code.
    """

    def __init__(
        self,
        *,
        words: int,
        encoder: Literal["lstm", "cnn", "projection"] = "lstm",
        attention: Literal["tanh", "dot"] = "tanh",
        task: Task = "binary",
        classes: int = 1,
        embedding: int = 300,
        hidden: int = 128,
        padding: int = 0,
    ) -> None:
        super().__init__()
        choose("encoder", encoder, ("lstm", "cnn", "projection"))
        choose("attention", attention, ("tanh", "dot"))
        choose("task", task, ("binary", "multiclass", "multilabel", "pair", "choice"))
        if (classes == 1) != (task == "binary"):
            raise InputError(f"classes={classes} does not fit task={task!r}: a binary task has one logit, others more.")
        self.task, self.attention, self.classes = task, attention, classes
        self.output = OUTPUT.get(task, "softmax")
        self.takes_query = task in ("pair", "choice")
        sizes = {"words": words, "embedding": embedding, "hidden": hidden, "padding": padding}
        self.encoder = Encoder(encoder, **sizes)
        width = self.encoder.channels
        self.attentions = classes if task == "multilabel" else 1
        if self.takes_query:
            self.query_encoder = Encoder(encoder, **sizes)
            self.from_context = nn.Linear(width, width // 2, bias=False)
            self.from_query = nn.Linear(width, width // 2)
        if attention == "tanh":
            self.inner = nn.Linear(width, width // 2)
            self.inner_query = nn.Linear(width, width // 2, bias=False) if self.takes_query else None
            self.outer = nn.Linear(width // 2, self.attentions, bias=False)
        elif not self.takes_query:
            self.outer = nn.Linear(width, self.attentions, bias=False)
        self.decoder = nn.Linear(width // 2 if self.takes_query else width, classes)

    def forward(
        self,
        ids: Tensor,
        real: Tensor,
        attend: Tensor,
        query: Tensor | None = None,
        query_real: Tensor | None = None,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(example, class)``.

        Args:
            ids: ``(example, row)`` token ids.
            real: ``(example, row)``, False at padding.
            attend: ``(example, row)``, False also at start and end marks, which never get weight.
            query: ``(example, row)`` token ids of the second text.
            query_real: its padding mask.
            candidates: ``(example, class)``, True where a class can be the answer.
        """
        states, _ = self.encoder(ids, real)
        summary = None
        if self.takes_query:
            if query is None or query_real is None:
                raise InputError(f"task={self.task!r} needs a query beside each text.")
            _, summary = self.query_encoder(query, query_real)
        scores = self._scores(states, summary)  # example attention row
        weights = scores.masked_fill(~attend.unsqueeze(1), -math.inf).softmax(-1)
        context = weights @ states  # example attention channel
        if self.task == "multilabel":
            per_label: Tensor = (context * self.decoder.weight).sum(-1) + self.decoder.bias
            return per_label
        context = context.squeeze(1)
        if summary is not None:
            context = (self.from_context(context) + self.from_query(summary)).tanh()
        logits: Tensor = self.decoder(context)
        if candidates is not None:
            logits = logits.masked_fill(~candidates, torch.finfo(logits.dtype).min)
        return logits

    def _scores(self, states: Tensor, query: Tensor | None) -> Tensor:
        """``(example, attention, row)`` scores before the mask and the softmax."""
        width = states.shape[-1]
        if self.attention == "dot":
            if query is not None:
                return query.unsqueeze(1) @ states.mT / math.sqrt(width)
            return cast(Tensor, self.outer(states)).mT / math.sqrt(width)
        inner = self.inner(states)
        if query is not None and self.inner_query is not None:
            inner = inner + self.inner_query(query).unsqueeze(1)
        return cast(Tensor, self.outer(inner.tanh())).mT
