"""The records that travel between rooms, and what a subject must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from regard.errors import WrongTarget

if TYPE_CHECKING:
    from torch import Tensor, nn

Special = Literal["keep", "drop", "renormalise"]
Of = Literal["logit", "probability", "logprob"]
How = Literal["delete", "mask", "pad", "attention"]
# One target for all examples: a class index or name, a token, a (this, rather than that) pair, a function of
# the output; or a list of these, one for each example.
Target = int | str | tuple[int | str, int | str] | Callable[["Tensor"], "Tensor"] | None
Targets = Target | list[Target]
JOIN = " + "  # between the names of columns that share a row


@dataclass(frozen=True)
class Features:
    """What a person sees of one example: its tokens, their rows, and the words they belong to.

    Keyed by position, so a word that occurs twice is two words.

    Args:
        tokens: one string for each real row (padding has none).
        rows: the row of each token in the model's tensors.
        words: the words of the raw input, in order.
        word: for each token the index of its word; ``None`` for special tokens.
        grid: rows × columns, where the words are the patches of a picture, row by row.
        reason: why some words have no row, as the columns of a table that the model does not attend to.
        spans: for each token which letters of the text it stands for, ``(start, end)``; () where that is not known.
    """

    tokens: tuple[str, ...]
    rows: tuple[int, ...]
    words: tuple[str, ...]
    word: tuple[int | None, ...]
    grid: tuple[int, int] | None = None
    reason: str = ""
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def named(cls, names: Sequence[str], rows: Sequence[int], special: Collection[str]) -> Features:
        """Features that are whole words or columns: one token each, but for the special ones."""
        words = tuple(name for name in names if name not in special)
        count = iter(range(len(words)))
        word = tuple(None if name in special else next(count) for name in names)
        return cls(tuple(names), tuple(rows), words, word)

    def until(self, row: int | None) -> Features:
        """The tokens up to a row, and their words; None: all of them."""
        if row is None or not self.rows or self.rows[-1] <= row:
            return self
        count = sum(one <= row for one in self.rows)
        tokens, word = self.tokens[:count], self.word[:count]
        words = list(self.words[: max((one + 1 for one in word if one is not None), default=0)])
        if words and len(words) - 1 in self.word[count:]:  # it ends in the middle of a word
            pieces = [token for token, one in zip(tokens, word, strict=True) if one == len(words) - 1]
            words[-1] = "".join(piece.removeprefix("##") for piece in pieces).strip()  # as WordPiece marks them
        return Features(
            tokens, self.rows[:count], tuple(words), word, reason=self.reason, spans=self.spans[:count]
        )  # fmt: skip

    def followed_by(self, other: Features) -> Features:
        """These, and after them those of another sequence."""
        count = len(self.words)
        word = tuple(None if one is None else one + count for one in other.word)
        after = tuple(row + 1 + max(self.rows, default=-1) for row in other.rows)
        words, reason = self.words + other.words, self.reason or other.reason
        return Features(self.tokens + other.tokens, self.rows + after, words, self.word + word, reason=reason)

    @property
    def absent(self) -> tuple[str, ...]:
        """The words that no row stands for: nothing can be said of them."""
        return tuple(name for place, name in enumerate(self.words) if place not in self.word)

    @property
    def left_out(self) -> str:
        """Which words no row stands for, and why, in words; "" if there are none."""
        return f"{', '.join(self.absent)} ({self.reason or 'no row stands for it'})" if self.absent else ""

    @property
    def present(self) -> Features:
        """The same without the words that no row stands for."""
        if not self.absent:
            return self
        kept = sorted({word for word in self.word if word is not None})
        word = tuple(None if one is None else kept.index(one) for one in self.word)
        return replace(self, words=tuple(self.words[place] for place in kept), word=word)

    @property
    def special(self) -> tuple[bool, ...]:
        """For each token, whether it is special: it stands for no part of the raw input."""
        return tuple(word is None for word in self.word)

    @property
    def rows_of_words(self) -> tuple[tuple[int, ...], ...]:
        """For each word the rows of its tokens."""
        pairs = list(zip(self.rows, self.word, strict=True))
        return tuple(tuple(row for row, word in pairs if word == index) for index in range(len(self.words)))


@dataclass(frozen=True, repr=False)
class Source:
    """A second sequence that attention runs over: what an encoder read, the regions of a picture.

    Args:
        real: ``(example, row)``, False at padding.
        features: one record for each example.
    """

    real: Tensor
    features: tuple[Features, ...]


@dataclass(frozen=True, repr=False)
class Batch:
    """Encoded examples: what the model is called with, and how its rows are to be read.

    Args:
        inputs: what the subject's forward takes; the first axis of tensors is examples.
        real: ``(example, row)``, False at padding: the rows that the prediction is read from are among these.
        features: one record for each example.
        queries: numbers of query rows that attention pools may have, besides 1 and ``lengths``.
        source: the second sequence of models that have two.
        said: for each example the class that is explained unless a target is given; None: the one that is predicted.
            A text may have been produced that is not what the model finds most probable.
    """

    inputs: Mapping[str, Any]
    real: Tensor
    features: tuple[Features, ...]
    queries: tuple[int, ...] = ()
    source: Source | None = None
    said: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.features)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sequence lengths that attention may run over: of the rows, and of the source."""
        return (self.real.shape[1],) if self.source is None else (self.real.shape[1], self.source.real.shape[1])

    def sequence_of(self, rows: int) -> Batch | Source | None:
        """The one of the two sequences that has so many rows."""
        both = (self, self.source)
        return next((one for one in both if one is not None and one.real.shape[1] == rows), None)

    def pick(self, examples: Sequence[int]) -> Batch:
        """The batch of these examples, in this order, padded as they were here; one may be there several times."""
        size, wanted = len(self), list(examples)
        inputs = {
            name: value[wanted] if getattr(value, "ndim", 0) and len(value) == size else value
            for name, value in self.inputs.items()
        }
        source = self.source and Source(self.source.real[wanted], tuple(self.source.features[i] for i in wanted))
        features = tuple(self.features[i] for i in wanted)
        said = self.said and tuple(self.said[i] for i in wanted)
        return Batch(inputs, self.real[wanted], features, self.queries, source, said)

    def explained(self, target: Targets) -> Targets:
        """The target, or what was said where there is none."""
        if self.said is None or not (target is None or isinstance(target, list)):
            return target
        return [
            said if one is None else one for said, one in zip(self.said, one_by_one(target, len(self)), strict=True)
        ]


@dataclass(frozen=True)
class Score:
    """The scalar that is explained, for each example.

    Args:
        values: ``(example,)``, differentiable when the output is.
        names: what it is, in words, for each example.
        index: the class of each example, ``None`` where the target is not one class.
    """

    values: Tensor
    names: tuple[str, ...]
    index: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Scores:
    """What a method gives: numbers for the rows of the input, of its source, or of both.

    Args:
        rows: ``(example, *axes, row)``; None if the method says nothing about them.
        source: the same for the second sequence.
        axes: names of the axes in between: "layer", "head", "query".
        facts: what else was found out, ``(example, …)`` for each name.
        errors: the standard error of each number, where lots were drawn.
    """

    rows: Tensor | None
    source: Tensor | None = None
    axes: tuple[str, ...] = ()
    facts: Mapping[str, Tensor] = field(default_factory=dict)
    errors: Tensor | None = None


class Vocabulary(NamedTuple):
    """What texts may be made of, for subjects that take the numbers of tokens: they have ``of_ids(ids)``, a batch.

    Args:
        ids: numbers of all tokens that are not special.
        begin: number of the token that a text begins with; None: of no special one.
    """

    ids: Tensor
    begin: int | None


class Subject(Protocol):
    """A model, and how raw inputs become tensors, features, a readout and a scalar."""

    @property
    def model(self) -> nn.Module:
        """The model. It is never changed and never moved."""
        ...

    @property
    def special(self) -> Special:
        """What explanations do with special tokens."""
        ...

    @property
    def predicts(self) -> bool:
        """Whether there is a predicted class; a plain encoder has none and needs a target."""
        ...

    def encode(self, inputs: Any) -> Batch:
        """Turn raw inputs into a batch."""
        ...

    def probe(self, batch: Batch) -> Batch:
        """A small batch on which the readout can be measured; ``batch.pick([0])`` will do."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Run the model: ``(example, class)`` logits, or an embedding."""
        ...

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch without some rows ``(example, row)``, those of its source where it has one.

        ``gone`` may hold nothing: "delete" then only takes out padding that is not needed. Raises `NotServed` for what
        cannot be done; "attention" is never asked for.
        """
        ...

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        ...

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: from which rows of the last site the prediction is read; sums to 1."""
        ...


def one_by_one(target: Targets, size: int) -> Sequence[Target]:
    """Spread a target over ``size`` examples; a list must already have one for each."""
    if not isinstance(target, list):
        return [target] * size
    if len(target) != size:
        raise WrongTarget(
            f"target has {len(target)} entries for {size} examples. Pass one for each example, or a single one for all."
        )
    return target
