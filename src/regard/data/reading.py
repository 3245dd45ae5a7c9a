"""Read examples; rows that cannot be used are reported, all at once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, Literal, TypeVar, cast

import pandas as pd

from regard import progress
from regard.data.dataset import MANY, BadRow, Dataset, Example, Kind, Label, sort_labels
from regard.data.marked import marked_rows
from regard.data.sources import UNDECODED, Record, Source, Unusable, open_source
from regard.errors import EmptyInput, InputError, OptionError, choose

# Names under which columns are looked for, in this order, whatever their case.
PAIRS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("text1", "text2"),
    ("first", "second"), ("question", "passage"), ("question", "context"), ("question", "sentence"),
)  # fmt: skip
TEXTS = ("text", "sentence", "review", "document", "content", "comment", "tweet", "post", "passage")
OTHERS = {
    "label": ("label", "target", "class", "y"),
    "rationale": ("rationale", "rationales", "mask"),
    "split": ("split",),
    "id": ("id", "idx"),
}
LISTED = 20  # bad rows that an error lists
NUMBER = re.compile(r"\s*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
WHOLE = re.compile(r"\s*[+-]?[0-9]+(\.0*)?\s*")

OnBad = Literal["raise", "skip"]
Walk = Callable[[], Iterator[tuple[int, Example | Unusable]]]
Item = TypeVar("Item")


def read(
    source: Any,
    *,
    text: str | None = None,
    pair: tuple[str, str] | None = None,
    columns: Sequence[str] | None = None,
    label: str | None = None,
    rationale: str | None = None,
    split: str | None = None,
    id: str | None = None,  # noqa: A002
    labels: Iterable[Label] | None = None,
    on_bad: OnBad = "raise",
    encoding: str = "utf-8",
) -> Dataset:
    """Read texts, pairs of texts or rows of a table, each with what is known about it.

    Files are never held in memory: they are gone through for the types of labels and cells, to check each row, and
    whenever the dataset is iterated over.

    Args:
        source: path of a .csv, .tsv or .jsonl file (also with .gz) or of a .parquet file; of a file in which people
            marked something (CoNLL-U, GAP, facts as .json: see `regard.data.marked`); a DataFrame; a
            `datasets.Dataset`; anything that gives mappings, texts or (text, label) tuples. What can be gone through
            only once is held in memory.
        text: name of the column of texts. None: found under a usual name, if there is no usual pair.
        pair: names of two columns of texts. None: found under usual names.
        columns: names of the columns that make a table.
        label: name of the column of labels. None: "label", "target", "class" or "y", if there is one. In CSV they
            are numbers if all of them are.
        rationale: name of the column of reasons: for each word between white space 0 or 1, or a list of [start, end)
            pairs of words; lists or JSON. None: "rationale", "rationales" or "mask", if there is one.
        split: name of the column that says which split a row belongs to. None: "split", if there is one.
        id: name of the column of names. None: "id" or "idx"; without one, the row's number.
        labels: those that the model knows; a row with another one is bad.
        on_bad: "raise" reports all rows that cannot be used in one error; "skip" leaves them out and lists them in
            `Dataset.skipped`.
        encoding: of .csv, .tsv and .jsonl files.

    Raises:
        EmptyInput: there are no rows, or none that can be used.
        InputError: the source cannot be read, a column is not there, or there are bad rows.

    Example:
        >>> read([("a dull film", "bad"), ("so moving", "good")])
        Dataset(text; 2 examples; labels 'bad', 'good')
    """
    choose("on_bad", on_bad, ("raise", "skip"))
    given = {"text": text, "pair": pair, "columns": columns, "label": label, "rationale": rationale, "split": split}
    given["id"] = id
    marked = marked_rows(source, encoding, {name: value for name, value in given.items() if value is not None})
    if marked is not None:
        return gather(marked[1], name=marked[0], on_bad=on_bad)
    opened = open_source(source, encoding)
    if not opened.columns:  # so there are no rows, or only bad ones
        none = Unusable("no cells", "has no cells")
        return gather(
            lambda: ((row, bad if isinstance(bad, Unusable) else none) for row, bad in enumerate(opened.records(), 1)),
            name=opened.name, on_bad=on_bad,
        )  # fmt: skip
    kind, inputs = _inputs(opened, {"text": text, "pair": pair, "columns": columns})
    named = {"label": label, "rationale": rationale, "split": split, "id": id}
    others = {option: _find(opened, option, given, inputs) for option, given in named.items()}
    known = None if labels is None else {key: one for one in labels for key in (str(one), one)}
    table = inputs if kind == "table" else ()
    reader = _Reader(kind, inputs, others, known, _types(opened, table, others["label"]))
    return gather(lambda: reader.walk(opened.records()), name=opened.name, on_bad=on_bad, columns=table)


def gather(walk: Walk, *, name: str, on_bad: OnBad, columns: tuple[str, ...] = ()) -> Dataset:
    """Check all rows once, and make a dataset that goes through them again each time, without the bad ones.

    Args:
        walk: begins anew to give each row's number, and its example or why there is none.
        name: of the source, for messages.
        on_bad: "raise" or "skip".
        columns: of a table.
    """
    kind: Kind = "text"
    sizes: Counter[str | None] = Counter()
    labels: set[Label] = set()
    problems: Counter[str] = Counter()
    bad: list[BadRow] = []
    for row, found in _watched(walk(), "reading rows"):
        if isinstance(found, Example):
            kind = found.kind
            sizes[found.split] += 1
            if found.label is not None and len(labels) <= MANY:
                labels.add(found.label)
        else:
            problems[found.kind] += 1
            if on_bad == "skip" or len(bad) < LISTED:
                bad.append(BadRow(row, str(found)))
    if bad and (on_bad == "raise" or not sizes):
        raise (InputError if on_bad == "raise" else EmptyInput)(_report(name, bad, problems, sizes.total()))
    if not sizes:
        raise EmptyInput(f"{name} holds no rows of data. Pass one that has at least one.")
    return Dataset(
        lambda: (found for _, found in walk() if isinstance(found, Example)), kind, sizes,
        columns=columns, labels=sort_labels(labels), skipped=tuple(bad),
    )  # fmt: skip


def to_mask(cell: Any, size: int, unit: str = "words") -> tuple[bool, ...]:
    """The mask over so many words that a cell holds: as 0 or 1 for each, or as [start, end) pairs.

    Example:
        >>> to_mask("[[1, 3]]", 4)
        (False, True, True, False)
    """
    try:
        entries = _plain(json.loads(cell) if isinstance(cell, str) else cell)
        if isinstance(entries, (str, Mapping)):
            raise TypeError
        entries = [list(entry) if isinstance(entry, (list, tuple)) else entry for entry in map(_plain, entries)]
    except (ValueError, TypeError, RecursionError):
        raise Unusable("bad rationales", f"its rationale {short(cell)} is not a list") from None
    if all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        for start, end in entries:  # an empty one marks no word; ERASER's reviews have some
            if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= size):
                raise Unusable("bad rationales", f"its rationale [{start}, {end}) is not within its {size} {unit}")
        inside = {place for start, end in entries for place in range(start, end)}
        return tuple(place in inside for place in range(size))
    if len(entries) != size:
        raise Unusable("bad rationales", f"its rationale has {len(entries)} entries for {size} {unit}")
    if not all(entry in (0, 1) for entry in entries):
        raise Unusable("bad rationales", f"its rationale {short(cell)} holds neither 0 and 1 nor [start, end) pairs")
    return tuple(bool(entry) for entry in entries)


@dataclass(frozen=True)
class _Reader:
    """Makes rows into examples.

    Args:
        kind: of the examples.
        inputs: columns that the input is made of.
        others: columns of label, rationale, split and id.
        known: the labels that the model knows, under themselves and as texts.
        types: of the cells of a column: "text", "number" or, in CSV, "whole" and "fraction".
    """

    kind: Kind
    inputs: tuple[str, ...]
    others: Mapping[str, str | None]
    known: Mapping[Any, Label] | None
    types: Mapping[str, str]

    def walk(self, records: Iterator[Record]) -> Iterator[tuple[int, Example | Unusable]]:
        """Each row's number, and its example or why there is none."""
        for row, record in enumerate(records, 1):
            try:
                yield row, record if isinstance(record, Unusable) else self.example(row, record)
            except Unusable as problem:
                yield row, problem

    def example(self, row: int, record: Mapping[str, Any]) -> Example:
        """One row."""
        cells = {option: None if name is None else _cell(record, name) for option, name in self.others.items()}
        split = None if cells["split"] is None else str(cells["split"])
        name = str(row if cells["id"] is None else cells["id"])
        example = Example(self.input(record), self.label(cells["label"]), None, split, name)
        if cells["rationale"] is None:
            return example
        unit = "columns" if self.kind == "table" else "words"
        return replace(example, rationale=to_mask(cells["rationale"], len(example.words), unit))

    def input(self, record: Mapping[str, Any]) -> Any:
        """The text, the pair or the row of the table."""
        cells = {name: _cell(record, name) for name in self.inputs}
        if self.kind == "table":
            if all(cell is None for cell in cells.values()):
                raise Unusable("missing or empty", "all of its columns are missing or empty")
            return {  # what is missing is for the model to deal with
                name: None if cell is None else _typed(cell, self.types[name], name) for name, cell in cells.items()
            }
        for name, cell in cells.items():
            if cell is None:
                raise _missing(name)
            if not isinstance(cell, str):
                raise Unusable("no text", f"{name!r} holds {short(cell)}, a {type(cell).__name__} and not a text")
        return tuple(cells.values()) if self.kind == "pair" else cells[self.inputs[0]]

    def label(self, cell: Any) -> Label | None:
        """The label, as the model calls it if that is known."""
        name = self.others["label"]
        if name is None:
            return None
        label: Label = _typed(cell, self.types[name], name)
        if self.known is None:
            return label
        if label not in self.known and str(cell) not in self.known:
            choices = ", ".join(dict.fromkeys(repr(one) for one in self.known.values()))
            raise Unusable("unknown labels", f"label {label!r} is not one the model knows: {choices}")
        return self.known.get(label, self.known.get(str(cell)))


def _inputs(source: Source, options: Mapping[str, Any]) -> tuple[Kind, tuple[str, ...]]:
    """What kind of input there is, and the columns it is made of."""
    given = {option: value for option, value in options.items() if value is not None}
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} are given, but an input is one of text, pair and columns.")
    for option, value in given.items():
        names = (value,) if isinstance(value, str) else tuple(value)
        if not names or len(names) != {"text": 1, "pair": 2}.get(option, len(set(names))):
            wanted = {"text": "one column", "pair": "two columns"}.get(option, "at least one column, and each once")
            raise OptionError(f"{option}={value!r} must name {wanted}.")
        for name in names:
            _find(source, option, name, ())
        return cast(Kind, "table" if option == "columns" else option), names
    lower = {name.lower(): name for name in reversed(source.columns)}
    for usual in (*PAIRS, *((name,) for name in TEXTS)):
        if all(name in lower for name in usual):
            return "pair" if len(usual) == 2 else "text", tuple(lower[name] for name in usual)
    raise InputError(
        f"{source.name} has the columns {source.listed}, none of them with a usual name for texts. Say which to read: "
        "text='…', pair=('…', '…'), or columns=['…', …] for a table. On the command line: --text-column, or a --model "
        "for tables, as `regard fit` writes them."
    )


def _find(source: Source, option: str, given: str | None, inputs: tuple[str, ...]) -> str | None:
    """The column of that name; if none is given, one of a usual name that the input is not made of."""
    if given is None:
        lower = {name.lower(): name for name in reversed(source.columns) if name not in inputs}
        return next((lower[name] for name in OTHERS[option] if name in lower), None)
    if given not in source.columns:
        raise InputError(f"{option}={given!r} is not a column of {source.name}. There are {source.listed}.")
    if given in inputs:
        raise OptionError(f"{option}={given!r} is part of the input, so the model would see it. Name another column.")
    return given


def _types(source: Source, table: tuple[str, ...], label: str | None) -> dict[str, str]:
    """What the cells of the table and the labels are, by a pass over all rows.

    Labels are numbers if all are. Cells of a column are numbers if more than half are: then the others are bad.
    """
    names = table if label is None else (*table, label)
    found: dict[str, Counter[str]] = {name: Counter() for name in names}
    for record in _watched(source.records() if names else iter(()), "looking at columns"):
        if isinstance(record, Unusable):
            continue
        for name in names:
            cell = _plain(record.get(name))
            if isinstance(cell, str) and cell.strip():
                number = not source.typed and NUMBER.fullmatch(cell)
                found[name]["text" if not number else "whole" if WHOLE.fullmatch(cell) else "fraction"] += 1
            elif isinstance(cell, (int, float)) and not pd.isna(cell):
                found[name]["number"] += 1
    types = {}
    for name, counts in found.items():
        numeric = not counts["text"] if name == label else counts["text"] < counts.total() / 2
        numbers = "number" if source.typed else "fraction" if counts["fraction"] else "whole"
        types[name] = numbers if numeric else "text"
    return types


def _typed(cell: Any, kind: str, name: str) -> Any:
    """The cell as what its column holds."""
    if cell is None:
        raise _missing(name)
    if not isinstance(cell, (str, int, float)):
        raise Unusable("neither number nor text", f"{name!r} holds {short(cell)}, a {type(cell).__name__}")
    if kind == "text":
        return str(cell)
    if not isinstance(cell, str):
        return cell
    if kind == "number" or not NUMBER.fullmatch(cell):
        raise Unusable("no number", f"{name!r} holds {short(cell)}, and most of its cells are numbers")
    try:
        return float(cell) if kind == "fraction" else int(cell.partition(".")[0])
    except ValueError:  # Python reads no more than 4300 digits
        raise Unusable("no number", f"{name!r} holds {short(cell)}, a number with {len(cell)} digits") from None


def _cell(record: Mapping[str, Any], name: str) -> Any:
    """What a cell holds; None where it is missing, blank or NaN."""
    cell = _plain(record.get(name))
    if not isinstance(cell, str):
        return None if pd.api.types.is_scalar(cell) and pd.isna(cell) else cell
    if not cell.isascii() and UNDECODED.search(cell):
        raise Unusable("not in the encoding", f"{name!r} holds bytes that are not in the encoding: {short(cell)}")
    return cell if cell.strip() else None


def _plain(cell: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's own."""
    return cell.tolist() if hasattr(cell, "tolist") else cell


def _missing(name: str) -> Unusable:
    return Unusable("missing or empty", f"{name!r} is missing or empty")


def _report(name: str, bad: list[BadRow], problems: Counter[str], good: int) -> str:
    """What is wrong with the rows: counts by kind of problem, and the first of them one by one."""
    count = problems.total()
    kinds = ", ".join(f"{number} {kind}" for kind, number in problems.most_common())
    lines = [f"{name}: {count} of {count + good} rows cannot be used ({kinds})."]
    lines += [f"  row {one.row}: {one.problem}" for one in bad[:LISTED]]
    lines += [f"  … and {count - LISTED} more"] if count > LISTED else []
    step = (
        "Correct them, or leave them out: regard.data.read(…, on_bad='skip'), --on-bad skip."
        if good
        else "There is no other row."
    )
    return "\n".join([*lines, f"Rows are counted from 1, without header and blank lines. {step}"])


def _watched(items: Iterator[Item], what: str) -> Iterator[Item]:
    """The same items, with a bar if it takes long."""
    with progress.Counter(what, None) as counter:
        for number, item in enumerate(items, 1):
            yield item
            if number % 1000 == 0:
                counter.advance(1000)
