"""From a model's output and what the user names to the one scalar that is explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from regard.errors import SubjectError, WrongTarget
from regard.types import Of, Score, Target, Targets, one_by_one


@dataclass(frozen=True)
class Head:
    """What the columns of an output are.

    Args:
        kind: ``softmax`` (one of many), ``sigmoid`` (a column for each label), ``binary`` (a single logit for two
            classes), ``regression`` (a number), or ``embedding`` (no classes: the user names the target).
        find: the column of a class name, label or token; raises `WrongTarget`.
        name: what a column is called.
        size: the number of classes, where it is known.
    """

    kind: Literal["softmax", "sigmoid", "binary", "regression", "embedding"]
    find: Callable[[str], int]
    name: Callable[[int], str]
    size: int | None = None

    def columns(self, output: Tensor, of: Of) -> Tensor:
        """``(example, class)``: logit, probability or log-probability of every class."""
        wanted = 1 if self.kind == "binary" else self.size or output.shape[-1]
        if output.shape[-1] != wanted:
            raise SubjectError(
                f"the model's output has {output.shape[-1]} columns, but a {self.kind} head"
                + (f" with {self.size} labels" if self.size else "")
                + f" has {wanted}. Check labels= and output=."
            )
        if self.kind == "binary":
            output = torch.cat([-output, output], dim=-1)
        if of == "logit":
            return output
        if self.kind == "softmax":
            return output.softmax(-1) if of == "probability" else output.log_softmax(-1)
        if self.kind in ("sigmoid", "binary"):
            return output.sigmoid() if of == "probability" else torch.nn.functional.logsigmoid(output)
        raise WrongTarget(f"of={of!r}: a {self.kind} output has no probabilities. Use of='logit'.")

    def apart(self, output: Tensor, other: Tensor) -> Tensor:
        """``(example,)``: ½ Σ_c |p_c − q_c|, the total variation between two outputs; of several labels the mean."""
        both = (self.columns(output, "probability") - self.columns(other, "probability")).abs()
        return both.mean(-1) if self.kind == "sigmoid" else both.sum(-1) / 2


def named_head(kind: Literal["softmax", "sigmoid", "binary", "regression"], labels: tuple[str, ...]) -> Head:
    """A head whose columns have names."""
    return Head(kind, partial(_place, labels), partial(_label, labels), len(labels))


def _place(labels: tuple[str, ...], label: str) -> int:
    if label not in labels:
        raise WrongTarget(f"target={label!r} is not a label of this model. It has {listed(labels)}.")
    return labels.index(label)


def _label(labels: tuple[str, ...], place: int) -> str:
    return labels[place]


def no_place(label: str) -> int:
    """Of a label where there are none."""
    return -1


def score(head: Head, output: Tensor, target: Targets, of: Of) -> Score:
    """The scalar of each example: the predicted class, a class, the difference of two, or a function."""
    if callable(target):
        return _called(output, target)
    if head.kind == "embedding":
        raise WrongTarget(
            f"target={target!r}: a plain encoder has no classes, so it needs a function of its output as target. "
            "subject.similarity(…), to another input, is a ready-made one."
        )
    columns = head.columns(output, of)
    entries = one_by_one(target, len(columns))
    if not any(isinstance(entry, tuple) or callable(entry) for entry in entries):  # all at once: tables have many rows
        said, width = columns.argmax(-1).tolist(), columns.shape[1]
        places = [
            place if entry is None else _column(head, entry, width) for place, entry in zip(said, entries, strict=True)
        ]
        chosen = columns.gather(1, torch.tensor(places, device=columns.device)[:, None])[:, 0]
        return Score(chosen, tuple(map(head.name, places)), tuple(places))
    values: list[Tensor] = []
    names: list[str] = []
    indices: list[int | None] = []
    for row, entry in zip(columns, entries, strict=True):
        if callable(entry):
            raise WrongTarget("target: a function takes the whole output; pass it alone, not in a list.")
        if isinstance(entry, tuple):
            if len(entry) != 2:
                raise WrongTarget(f"target={entry!r}: a contrastive target is a pair (this, rather than that).")
            this, that = (_column(head, part, len(row)) for part in entry)
            values.append(row[this] - row[that])
            names.append(f"{head.name(this)} rather than {head.name(that)}")
            indices.append(None)
        else:
            index = int(row.argmax()) if entry is None else _column(head, entry, len(row))
            values.append(row[index])
            names.append(head.name(index))
            indices.append(index)
    return Score(torch.stack(values), tuple(names), tuple(indices))


def similarity_to(other: Tensor, name: str) -> Callable[[Tensor], Tensor]:
    """A target for embeddings: their cosine similarity to another one."""
    similarity = partial(_similarity, other)
    similarity.__name__ = f"similarity to {name}"  # type: ignore[attr-defined]
    return similarity


def _similarity(other: Tensor, output: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(output, other.to(output), dim=-1)


def _called(output: Tensor, target: Callable[[Tensor], Tensor]) -> Score:
    values = target(output)
    name = getattr(target, "__name__", type(target).__name__)
    if not isinstance(values, Tensor) or values.shape != output.shape[:1]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise WrongTarget(
            f"the target function {name} returned {got}; it must return one number for each example, "
            f"a tensor of shape {tuple(output.shape[:1])}."
        )
    return Score(values, (name,) * len(output), (None,) * len(output))


def _column(head: Head, entry: Target, size: int) -> int:
    if isinstance(entry, str):
        return head.find(entry)
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise WrongTarget(f"target={entry!r} is neither a class index nor a name, pair, function or None.")
    if not 0 <= entry < size:
        raise WrongTarget(f"target={entry} is not there: the output has classes 0 to {size - 1}.")
    return entry


def listed(names: tuple[str, ...], most: int = 10) -> str:
    """Names for an error message, cut when there are many."""
    more = f", … ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more
