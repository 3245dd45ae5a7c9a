"""Attention-pooled encoders: words in, one distribution over them, a prediction out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from regard.errors import EmptyInput, OptionError, SubjectError, choose
from regard.subjects import targets
from regard.subjects.removing import replaced, shortened
from regard.subjects.tokens import as_list, described, device_of
from regard.types import Batch, Features, How, Of, Score, Special, Targets

Output = Literal["binary", "softmax", "sigmoid", "regression"]


@dataclass(frozen=True, eq=False)
class PooledSubject:
    """An attention-pooled encoder with its vocabulary. Made by `regard.pooled`."""

    model: nn.Module
    vocabulary: Mapping[str, int]
    split: Callable[[str], Sequence[str]]
    call: Callable[..., Tensor] | None
    labels: tuple[str, ...]
    head: targets.Head
    special: Special

    __repr__ = described

    @property
    def attentions(self) -> int:
        """Number of attention distributions: one for each label, or one."""
        return int(getattr(self.model, "attentions", 1))

    @property
    def predicts(self) -> bool:
        """There is always a most probable one."""
        return True

    def encode(self, inputs: Any) -> Batch:
        """Texts, or (text, query) pairs, to ids and masks; start and end marks are added where there are some."""
        texts = as_list(inputs)
        takes_query = bool(getattr(self.model, "takes_query", False))
        if any(isinstance(text, tuple) != takes_query for text in texts):
            wanted = "(text, query) pairs" if takes_query else "single texts"
            raise SubjectError(f"inputs: {type(self.model).__name__} takes {wanted}.")
        contexts = [self.split(text if isinstance(text, str) else text[0]) for text in texts]
        if not all(contexts):
            raise EmptyInput(f"inputs[{[bool(words) for words in contexts].index(False)}] has no words.")
        marked = [self._marked(words) for words in contexts]
        device = device_of(self.model)
        ids, real = self._padded(marked, device)
        attend = real & ~torch.isin(ids, torch.tensor(sorted(self._marks().values()), dtype=torch.long, device=device))
        tensors = {"ids": ids, "real": real, "attend": attend}
        if takes_query:
            questions = [self._marked(self.split(text[1])) for text in texts if isinstance(text, tuple)]
            tensors["query"], tensors["query_real"] = self._padded(questions, device)
            if getattr(self.model, "task", None) == "choice":
                tensors["candidates"] = self._candidates(contexts, device)
        features = tuple(Features.named(words, range(len(words)), self._marks()) for words in marked)
        return Batch(tensors, real, features, queries=(self.attentions,))

    def probe(self, batch: Batch) -> Batch:
        """The first example."""
        return batch.pick([0])

    def forward(self, batch: Batch) -> Tensor:
        """``(example, class)`` logits."""
        if self.call is not None:
            return self.call(self.model, batch.inputs["ids"], batch.inputs["attend"])
        return cast(Tensor, self.model(**batch.inputs))

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch with some rows ``(example, row)`` deleted, or "<unk>" or "<pad>" in their place."""
        if how == "delete":
            fill = {"ids": self.vocabulary["<pad>"], "real": 0, "attend": 0}
            return shortened(batch, gone, fill, needed=batch.inputs["attend"])
        return replaced(batch, gone, "ids", self.vocabulary["<unk>" if how == "mask" else "<pad>"])

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        return targets.score(self.head, output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, attention)``: the single distribution, or that of the label that is explained."""
        even = torch.full((len(batch), self.attentions), 1 / self.attentions, device=batch.real.device)
        if self.attentions == 1 or score is None:
            return even
        rows = range(self.attentions)
        one_hot = [[float(row == index) for row in rows] if index is not None else None for index in score.index]
        return torch.stack(
            [even[i] if row is None else torch.tensor(row, device=even.device) for i, row in enumerate(one_hot)]
        )

    def _marks(self) -> dict[str, int]:
        return {mark: self.vocabulary[mark] for mark in ("<sos>", "<eos>") if mark in self.vocabulary}

    def _marked(self, words: Sequence[str]) -> list[str]:
        marks = self._marks()
        return [*(["<sos>"] if "<sos>" in marks else []), *words, *(["<eos>"] if "<eos>" in marks else [])]

    def _padded(self, texts: list[list[str]], device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and padding mask, both ``(example, row)``."""
        unknown = self.vocabulary["<unk>"]
        rows = [torch.tensor([self.vocabulary.get(word, unknown) for word in words]) for words in texts]
        padding = self.vocabulary["<pad>"]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(words) for words in texts])
        return ids.to(device), (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)

    def _candidates(self, contexts: list[Sequence[str]], device: torch.device) -> Tensor:
        """A class can be the answer if its name occurs in the text."""
        return torch.tensor([[label in set(words) for label in self.labels] for words in contexts], device=device)


def pooled(
    model: nn.Module,
    vocabulary: Mapping[str, int] | None = None,
    *,
    tokenize: Callable[[str], Sequence[str]] = str.split,
    forward: Callable[..., Tensor] | None = None,
    labels: Sequence[str] | None = None,
    output: Output | None = None,
    special: Special = "keep",
) -> PooledSubject:
    """An attention-pooled encoder as a subject: `regard.models.AttentionClassifier`, a toy, or your own.

    Args:
        model: the module.
        vocabulary: words to ids; "<pad>" and "<unk>" must be among them. Where "<sos>" and "<eos>" are, they are put
            around each text and never attended to. None: the model's own ``vocabulary``.
        tokenize: a text to words.
        forward: ``forward(model, ids, attend)`` returns ``(example, class)``; for models of your own.
        labels: names of the classes. For "choice" tasks: the possible answers, candidates where they occur in the text.
        output: what the columns of the output are: "binary", "softmax", "sigmoid" or "regression". None: the
            model's own ``output``.
        special: what explanations do with start and end marks: "keep", "drop", or "renormalise" over the others.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> t = regard.trace(subject, "the film is superb")
        >>> t.score.names
        ('positive',)
    """
    choose("special", special, ("keep", "drop", "renormalise"))
    vocabulary = vocabulary if vocabulary is not None else getattr(model, "vocabulary", None)
    if vocabulary is None or "<pad>" not in vocabulary or "<unk>" not in vocabulary:
        raise OptionError("vocabulary must map words to ids, '<pad>' and '<unk>' among them.")
    kind = output or getattr(model, "output", None)
    if kind is None:
        raise OptionError("output: say what the model's output is: 'binary', 'softmax', 'sigmoid' or 'regression'.")
    kind = cast(Output, choose("output", kind, ("binary", "softmax", "sigmoid", "regression")))
    named = labels if labels is not None else getattr(model, "labels", None)
    if named is None:
        size = int(getattr(model, "classes", 1))
        named = [str(index) for index in range(2 if kind == "binary" else size)]
    names = tuple(named)
    return PooledSubject(
        model, dict(vocabulary), tokenize, forward, names, targets.named_head(kind, names), special
    )  # fmt: skip
