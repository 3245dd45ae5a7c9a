"""Attention-pooled encoders, as in Jain & Wallace (2019), and what was proposed to make their attention explain."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.errors import InputError, OptionError, choose, within

Task = Literal["binary", "multiclass", "multilabel", "pair", "choice"]
OUTPUT = {"binary": "binary", "multilabel": "sigmoid"}  # all others: softmax
ENCODERS = ("lstm", "forward", "orthogonal", "cnn", "projection")
MASKED = 0.15  # share of the words that are to be guessed


class Encoder(nn.Module):
    """Token ids to states: an LSTM (both ways, forward, or forward and orthogonal), a CNN, or a projection.

    Shape: ``(example, row)`` → ``(example, row, channel)`` with 2·hidden channels for LSTMs, else hidden. Padding is on
    the right; its states are 0.
    """

    def __init__(self, kind: str, *, words: int, embedding: int, hidden: int, padding: int) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(words, embedding, padding_idx=padding)
        self.channels = hidden if kind in ("cnn", "projection") else 2 * hidden
        if kind == "lstm":
            self.body: nn.Module = nn.LSTM(embedding, hidden, batch_first=True, bidirectional=True)
        elif kind in ("forward", "orthogonal"):
            self.body = nn.LSTM(embedding, 2 * hidden, batch_first=True)
        elif kind == "cnn":
            self.body = nn.ModuleList(
                nn.Conv1d(embedding, hidden // 4, width, padding="same") for width in (1, 3, 5, 7)
            )
        else:
            self.body = nn.Linear(embedding, hidden)

    def forward(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """States of all rows, and one summary: the LSTM's last states, the CNN's maxima, the projection's mean."""
        x = self.embedding(ids)  # example row embedding
        shown = real.unsqueeze(-1)
        if self.kind == "orthogonal":
            states = orthogonal(cast(nn.LSTM, self.body), x) * shown
            return states, states[torch.arange(len(ids), device=ids.device), real.sum(-1) - 1]
        if isinstance(self.body, nn.LSTM):
            packed = pack_padded_sequence(x, real.sum(-1).cpu(), batch_first=True, enforce_sorted=False)
            states, (last, _) = self.body(packed)
            states, _ = pad_packed_sequence(states, batch_first=True, total_length=ids.shape[1])
            return states, torch.cat([*last], dim=-1)
        if isinstance(self.body, nn.ModuleList):
            x = x.mT  # example embedding row
            states = torch.cat([conv(x).relu() for conv in self.body], dim=1).mT * shown
            return states, states.amax(1)
        states = self.body(x).tanh() * shown
        return states, states.sum(1) / shown.sum(1)


def orthogonal(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """An LSTM whose new state is made orthogonal to the mean of those before: h_t ← h_t − (h_tᵀm / mᵀm) m.

    With m = Σ_s<t h_s / (t + 1), t from 0. The next step sees the state so changed.

    Shape: ``(example, row, embedding)`` → ``(example, row, channel)``.

    Protocol: Mohankumar et al. 2020, `mohankumar2020towards`. NOTE[DIFF]: the first state is 0, as in torch; in their
    code it is random, also when the model is tested.
    """
    of_input, of_state, *biases = lstm.all_weights[0]
    inputs = F.linear(x.transpose(0, 1), of_input, biases[0] + biases[1])  # row example (gate channel)
    state = x.new_zeros(len(x), lstm.hidden_size)
    cell, total = torch.zeros_like(state), torch.zeros_like(state)
    states = []
    for step, given in enumerate(inputs.unbind()):
        enter, keep, new, leave = torch.addmm(given, state, of_state.T).chunk(4, dim=-1)
        cell = keep.sigmoid() * cell + enter.sigmoid() * new.tanh()
        state = leave.sigmoid() * cell.tanh()
        mean = total / (step + 1)
        state = state - (state * mean).sum(-1, True) / (mean.square().sum(-1, True) + 1e-6) * mean
        total = total + state
        states.append(state)
    return torch.stack(states, dim=1)


def conicity(states: Tensor, attend: Tensor) -> Tensor:
    """How narrow the cone is that an example's states lie in: the mean of |cos(h_t, mean h)|, ``(example,)``, 0 to 1.

    Args:
        states: ``(example, row, channel)``, such as ``model.encoder(ids, real)[0]``.
        attend: ``(example, row)``, the rows that count.

    Protocol: Mohankumar et al. 2020, `mohankumar2020towards`; the absolute value is that of their code.

    Example:
        >>> conicity(torch.eye(4).unsqueeze(0), torch.ones(1, 4, dtype=torch.bool))
        tensor([0.5000])
    """
    centre = _mean(states.mT, attend.unsqueeze(1))  # example channel
    return _mean(F.cosine_similarity(states, centre.unsqueeze(1), dim=-1).abs(), attend)


def _mean(values: Tensor, attend: Tensor) -> Tensor:
    """Mean of the last axis, over the rows that count; 0 where there are none."""
    return (values * attend).sum(-1) / attend.sum(-1).clamp(min=1)


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
        encoder: ``lstm`` reads both ways, ``forward`` one way, with as many channels; ``orthogonal`` is ``forward``
            with states that are orthogonal to the mean of those before; ``cnn``; ``projection`` mixes nothing.
        diversity: how much the states' `conicity` adds to the loss; 0.5 in the paper.
        tying: how much it adds that states are far from their words' embeddings: the mean of ‖h_t − e_t‖².
        masked: how much it adds that hidden words, 15 %, cannot be guessed from their states: the cross-entropy.
        mask_id: the id that hides them, in a pass of its own; that of "<unk>" by default.

    In training ``penalty`` is the sum of what these three add, for the batch that was last seen: means over the words
    attended to (not the query's), then over examples; over all hidden words for ``masked``. Otherwise it is None.

    Protocol: Jain & Wallace 2019, `jain2019attention`. NOTE[DIFF]: ``multilabel`` with one attention for each
    label is not in their code. ``orthogonal`` and ``diversity``: Mohankumar et al. 2020, `mohankumar2020towards`.
    ``tying`` and ``masked``: Tutek & Šnajder 2020, `tutek2020staying`. NOTE[DIFF]: where states are not as wide as
    embeddings, e_t is a learned linear map of the embedding. NOTE[DIFF]: each hidden word becomes "<unk>".
    """

    penalty: Tensor | None

    def __init__(
        self,
        *,
        words: int,
        encoder: Literal["lstm", "forward", "orthogonal", "cnn", "projection"] = "lstm",
        attention: Literal["tanh", "dot"] = "tanh",
        task: Task = "binary",
        classes: int = 1,
        embedding: int = 300,
        hidden: int = 128,
        padding: int = 0,
        diversity: float = 0.0,
        tying: float = 0.0,
        masked: float = 0.0,
        mask_id: int = 1,
    ) -> None:
        super().__init__()
        choose("encoder", encoder, ENCODERS)
        choose("attention", attention, ("tanh", "dot"))
        choose("task", task, ("binary", "multiclass", "multilabel", "pair", "choice"))
        if (classes == 1) != (task == "binary"):
            raise InputError(f"classes={classes} does not fit task={task!r}: a binary task has one logit, others more.")
        self.diversity = within("diversity", diversity, 0, math.inf, ends="[)")
        self.tying = within("tying", tying, 0, math.inf, ends="[)")
        self.masked = within("masked", masked, 0, math.inf, ends="[)")
        if self.masked and mask_id not in range(words):
            raise OptionError(f"mask_id={mask_id!r} is no word of words={words}. Pass the id of '<unk>'.")
        self.penalty, self.mask_id = None, mask_id
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
        if self.tying:
            self.tie = nn.Identity() if embedding == width else nn.Linear(embedding, width, bias=False)
        if self.masked:
            self.guess = nn.Linear(width, words)

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
        self.penalty = self._penalty(states, ids, real, attend) if self.training else None
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

    def _penalty(self, states: Tensor, ids: Tensor, real: Tensor, attend: Tensor) -> Tensor | None:
        """What is added to the loss of a batch; None if that is nothing."""
        terms = []
        if self.diversity:
            terms.append(self.diversity * conicity(states, attend).mean())
        if self.tying:
            apart = (states - self.tie(self.encoder.embedding(ids))).square().sum(-1)  # example row
            terms.append(self.tying * _mean(apart, attend).mean())
        if self.masked:
            hidden = attend & (torch.rand(ids.shape, device=ids.device) < MASKED)
            without, _ = self.encoder(ids.masked_fill(hidden, self.mask_id), real)
            surprise = F.cross_entropy(self.guess(without[hidden]), ids[hidden], reduction="sum")
            terms.append(self.masked * surprise / hidden.sum().clamp(min=1))  # perhaps no word of short texts is hidden
        return torch.stack(terms).sum() if terms else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"penalty": None}  # a tensor that has a graph cannot be copied
