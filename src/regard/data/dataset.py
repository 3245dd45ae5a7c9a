"""Examples: texts, pairs of texts or rows of a table, with their labels and the reasons people gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Literal

import numpy as np
import pandas as pd

from regard.errors import EmptyInput, InputError, OptionError, at_least_one

Kind = Literal["text", "pair", "table"]
Label = str | int | float
MANY = 10_000  # with more distinct labels than these they are a quantity, and are not listed


@dataclass(frozen=True)
class Example:
    """One input with what is known about it.

    Args:
        input: a text, a pair of texts, or a row of a table.
        label: the class or the number to be predicted.
        rationale: whether people named it as a reason, for each of `words`.
        split: "train", "test" or whatever the source calls it.
        id: its name in the source; where the source has none, `read` gives the number of the row.
        marks: what else people have marked, by name: "words" with their syntax, "mentions", "facts"; see
            `regard.data.marked`.
    """

    input: str | tuple[str, str] | Mapping[str, Any]
    label: Label | None = None
    rationale: tuple[bool, ...] | None = None
    split: str | None = None
    id: str = ""
    marks: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def kind(self) -> Kind:
        """What the input is: "text", "pair" or "table"."""
        return "text" if isinstance(self.input, str) else "pair" if isinstance(self.input, tuple) else "table"

    @property
    def words(self) -> tuple[str, ...]:
        """What the rationale is about: columns, or words between white space; of a pair the first's, then the second's.

        Example:
            >>> Example(("a dull film", "is it good")).words
            ('a', 'dull', 'film', 'is', 'it', 'good')
        """
        if isinstance(self.input, Mapping):
            return tuple(self.input)
        texts = (self.input,) if isinstance(self.input, str) else self.input
        return tuple(word for text in texts for word in text.split())


@dataclass(frozen=True)
class BadRow:
    """A row that could not be used.

    Args:
        row: its number among the rows of data, from 1: header and blank lines are not counted, and a quoted cell that
            runs over several lines is still one row.
        problem: what is wrong with it.
    """

    row: int
    problem: str


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Examples of one kind. Iterating streams them anew each time; a file is never held whole.

    Args:
        stream: begins the examples anew.
        kind: "text", "pair" or "table".
        sizes: number of examples of each split; None stands for those that belong to none.
        columns: names of the columns of a table.
        labels: the distinct labels, sorted; () if there are none, or more than 10,000. Those of a part of the examples
            are those of all: what there is to choose from does not change with the split.
        skipped: the rows of the source that could not be used.
        source: what the source is called, where somebody said so.
    """

    stream: Callable[[], Iterator[Example]]
    kind: Kind
    sizes: Mapping[str | None, int]
    columns: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    skipped: tuple[BadRow, ...] = ()
    source: str = ""

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def __iter__(self) -> Iterator[Example]:
        return self.stream()

    def __repr__(self) -> str:
        labels = ", ".join(repr(label) for label in self.labels[:5]) + (", …" if len(self.labels) > 5 else "")
        parts = [self.kind, f"{len(self)} examples", f"labels {labels}" if labels else "no labels listed"]
        parts += [f"splits {', '.join(self.splits)}"] if self.splits else []
        parts += [f"{len(self.skipped)} rows skipped"] if self.skipped else []
        return f"Dataset({'; '.join(parts)})"

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Dataset:
        """The examples, in memory.

        Example:
            >>> Dataset.of([Example("a dull film", "bad", (False, True, False)), Example("so moving", "good")])
            Dataset(text; 2 examples; labels 'bad', 'good')
        """
        held = list(examples)
        if not held:
            raise EmptyInput("examples is empty. Pass at least one Example.")
        for place, example in enumerate(held):
            if wrong := _problem(example, held[0]):
                raise InputError(f"examples[{place}]: {wrong}.")
        columns = held[0].words if held[0].kind == "table" else ()
        labels = sort_labels({example.label for example in held if example.label is not None})
        sizes = Counter(example.split for example in held)
        return cls(lambda: iter(held), held[0].kind, sizes, columns=columns, labels=labels)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits, in the order of the source."""
        return tuple(split for split in self.sizes if split is not None)

    def where(self, *, split: str) -> Dataset:
        """Only the examples of one split; they are still streamed from the source."""
        if split not in self.splits:
            there = f"Choose one of {', '.join(map(repr, self.splits))}." if self.splits else "There are no splits."
            raise OptionError(f"split={split!r} is not known. {there}")
        examples = self.stream
        return replace(
            self, stream=lambda: (one for one in examples() if one.split == split), sizes={split: self.sizes[split]}
        )

    def sample(self, size: int, *, seed: int = 0) -> Dataset:
        """So many examples by lot, in the order of the source and held in memory; all of them if there are fewer."""
        if at_least_one("size", size) >= len(self):
            return self
        chosen = set(self.places(size, seed=seed))
        held = list(compress(self, (place in chosen for place in range(len(self)))))
        return replace(self, stream=lambda: iter(held), sizes=Counter(example.split for example in held))

    def places(self, size: int, *, seed: int = 0) -> list[int]:
        """Which examples `sample` draws: their numbers, in order."""
        if size >= len(self):
            return [*range(len(self))]
        return sorted(np.random.default_rng(seed).choice(len(self), size, replace=False, shuffle=False).tolist())

    def inputs(self) -> list[Any]:
        """All inputs: texts, pairs or rows."""
        return [example.input for example in self]

    def frame(self) -> pd.DataFrame:
        """A row for each example: "text", "first" and "second", or the columns; then what else is known.

        Those are "label", "rationale" (0 or 1 for each word), "split" and "id", where there are any. A table that has
        a column of this name keeps it; then what is known goes by the name with a "_" behind.
        """
        rows = []
        for example in self:
            table: dict[str, Any] = {"text": example.input}
            if isinstance(example.input, tuple):
                table = dict(zip(("first", "second"), example.input, strict=True))
            elif isinstance(example.input, Mapping):
                table = dict(example.input)
            # 0 and 1, so that what is written to a CSV from here can be read again.
            mask = None if example.rationale is None else [int(entry) for entry in example.rationale]
            known = {"label": example.label, "rationale": mask, "split": example.split, "id": example.id or None}
            rows.append(table | {name + "_" * (name in table): value for name, value in known.items()})
        frame = pd.DataFrame(rows)
        return frame.drop(columns=[name for name in frame.columns[-4:] if frame[name].isna().all()])


def _problem(example: Example, first: Example) -> str:
    """What is wrong with an example, given the first of its dataset; "" if nothing is."""
    given: Any = example.input
    texts = () if isinstance(given, Mapping) else (given,) if isinstance(given, str) else given
    if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
        return f"input={given!r} is neither a text nor a tuple of two nor a mapping"
    if example.kind != first.kind:
        return f"its input is a {example.kind}, that of the first a {first.kind}: a dataset is of one kind"
    if example.kind == "table" and example.words != first.words:
        return f"its columns are {', '.join(example.words)}; those of the first are {', '.join(first.words)}"
    if example.kind == "pair" and len(texts) != 2:
        return f"a pair has 2 texts, this one {len(texts)}"
    if not all(text.split() for text in texts):
        return "its text is empty"
    if example.rationale is not None and len(example.rationale) != len(example.words):
        unit = "columns" if example.kind == "table" else "words"
        return f"its rationale has {len(example.rationale)} entries for {len(example.words)} {unit}"
    return ""


def sort_labels(labels: set[Label]) -> tuple[Label, ...]:
    """Sorted, numbers before texts; none where there are too many to be classes."""
    return tuple(sorted(labels, key=lambda label: (isinstance(label, str), label))) if len(labels) <= MANY else ()
