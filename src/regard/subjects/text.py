"""Text classifiers and sentence encoders of the Hugging Face kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.attention import measure_readout
from regard.attention.running import undisturbed
from regard.errors import ReadoutMismatch, SubjectError, choose
from regard.locating import is_gguf
from regard.subjects import targets
from regard.subjects.loading import Task, expected, load, sentence_pooling, sourced
from regard.subjects.tokens import (
    PROBE,
    OverLimit,
    Reader,
    Text,
    check_options,
    check_vocabulary,
    described,
    device_of,
    position_limit,
    spread,
)
from regard.types import Batch, How, Of, Score, Special, Targets

Reading = Literal["first", "last", "mean"]


@dataclass(frozen=True, eq=False)
class TextSubject:
    """A sequence classifier or a plain encoder, with its tokenizer. Made by `regard.text`."""

    model: nn.Module
    reader: Reader
    declared: Reading | None
    pooling: Reading | None  # of a plain encoder, as its folder says
    special: Special

    __repr__ = described

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.reader.tokenizer

    @property
    def predicts(self) -> bool:
        """A classifier predicts a class; a plain encoder needs a target."""
        return self.head.kind != "embedding"

    def encode(self, inputs: Any) -> Batch:
        """Texts, or pairs of texts, to tensors on the model's device."""
        tensors, features = self.reader.read(inputs, device_of(self.model))
        real = tensors["attention_mask"].bool()
        return Batch(tensors, real, features)

    def probe(self, batch: Batch) -> Batch:
        """Two short texts, one of them padded."""
        return self.encode(PROBE)

    def forward(self, batch: Batch) -> Tensor:
        """``(example, class)`` logits; for a plain encoder the pooled ``(example, channel)`` embedding."""
        output = self.model(**batch.inputs)
        if (logits := getattr(output, "logits", None)) is not None:
            return checked_logits(logits, self.model)
        hidden: Tensor = output.last_hidden_state
        pooling = spread(self.declared or self.pooling or "mean", batch.real)
        return torch.einsum("er,erc->ec", pooling.to(hidden), hidden)

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch without some rows ``(example, row)``."""
        return self.reader.without(batch, gone, how)

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        return targets.score(self.head, output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: where the prediction is read."""
        return spread(self.reading, batch.real)

    def similarity(self, text: Text) -> Callable[[Tensor], Tensor]:
        """A target for plain encoders: cosine similarity of the embedding to that of another text."""
        with torch.no_grad(), undisturbed(self.model):
            other = self.forward(self.encode(text))
        return targets.similarity_to(other, repr(text))

    @cached_property
    def head(self) -> targets.Head:
        """What the columns of the output are; found by running the model on a short text."""
        try:
            with torch.no_grad(), undisturbed(self.model):
                output = self.model(**self.encode(PROBE).inputs)
        except ValueError as problem:  # a classifier that cannot find padding, for one
            raise SubjectError(f"{type(self.model).__name__} cannot run on two texts: {problem}") from problem
        if getattr(output, "logits", None) is None:
            if getattr(output, "last_hidden_state", None) is None:
                raise SubjectError(
                    f"{type(self.model).__name__} returns neither logits nor last_hidden_state. Use regard.module."
                )
            return targets.Head("embedding", targets.no_place, str)
        return classifier_head(self.model, checked_logits(output.logits, self.model).shape[-1])

    @cached_property
    def reading(self) -> Reading:
        """From which row the prediction is read: as declared, or measured by which rows move the output."""
        if self.declared is not None:
            return self.declared
        if not self.predicts:
            return self.pooling or "mean"
        probe = self.encode(PROBE)
        rows, _ = measure_readout(self, probe)
        readings: tuple[Reading, ...] = ("first", "last", "mean")
        for reading in readings:
            if rows is not None and torch.equal(spread(reading, probe.real) > 0, rows):
                return reading
        raise ReadoutMismatch(
            "the rows that move the output are neither the first, the last nor all real ones, so the readout cannot "
            "be told. Pass readout='first', 'last' or 'mean', or use regard.module."
        )


@sourced
def text(
    model: nn.Module | str | Path,
    tokenizer: Any = None,
    *,
    readout: Reading | None = None,
    special: Special = "keep",
    over_limit: OverLimit = "error",
    padding_side: Literal["left", "right"] = "right",
    trust_remote_code: bool = False,
) -> TextSubject:
    """A sequence classifier (single texts or pairs) or a plain text encoder as a subject.

    Args:
        model: a live Hugging Face model, a local folder, a GGUF file (read as a plain encoder), or a hub name.
        tokenizer: its tokenizer; loaded from beside the model when that is a path or name.
        readout: where the prediction is read: "first" token, "last" token, "mean" of all. None: measured for a
            classifier; for a plain encoder what its sentence-transformers folder says, otherwise "mean".
        special: what explanations do with special tokens: "keep", "drop", or "renormalise" over the others.
        over_limit: a text with more tokens than the model takes is an "error", "truncate"d, or "allow"ed.
        padding_side: where shorter texts are padded.
        trust_remote_code: run Python code that comes with the checkpoint.

    Example::

        subject = regard.text("path/to/my-classifier")
        regard.trace(subject, ["a moving film", "dull"])
    """
    if readout is not None:
        choose("readout", readout, ("first", "last", "mean"))
    check_options(special, over_limit, padding_side)
    gguf = isinstance(model, (str, Path)) and is_gguf(model)
    task: Task = "encode" if gguf else expected(model, ("classify", "encode"), trust_remote_code=trust_remote_code)
    live, tokenizer = load(model, tokenizer, task, trust_remote_code=trust_remote_code)
    check_vocabulary(live, tokenizer)
    reader = Reader(tokenizer, position_limit(live, tokenizer), over_limit, padding_side)
    return TextSubject(live, reader, readout, sentence_pooling(model), special)


def checked_logits(logits: Tensor, model: nn.Module) -> Tensor:
    """Logits of a classifier have two axes."""
    if logits.dim() != 2:
        raise SubjectError(
            f"{type(model).__name__} returns logits of shape {tuple(logits.shape)}, not (example, class). "
            "Use regard.causal for next-token models, regard.module for anything else."
        )
    return logits


def classifier_head(model: nn.Module, size: int, labels: tuple[str, ...] | None = None) -> targets.Head:
    """The head of a classifier with so many classes, as its config describes them; labels may have other names."""
    config = getattr(model, "config", None)
    named = getattr(config, "id2label", None) or {}
    labels = labels or tuple(str(named.get(index, index)) for index in range(size))
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return targets.named_head("sigmoid", labels)
    return targets.named_head("regression" if size == 1 else "softmax", labels)
