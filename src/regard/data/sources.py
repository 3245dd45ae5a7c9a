"""Rows from files, frames and iterables, one after the other; what is wrong with one is told in its place."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import IO, Any

import pandas as pd

from regard.errors import EmptyInput, InputError, OptionError

# What bytes become that are not in the encoding: lone surrogates, which no text holds.
UNDECODED = re.compile("[\ud800-\udfff]")
ENDINGS = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz", ".parquet")
MARKED = (".conllu", ".conllu.gz", ".json")  # these have readers of their own: `regard.data.marked`


class Unusable(Exception):
    """A row that cannot be used: the kind of problem, to be counted by, and the problem."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


Record = Mapping[str, Any] | Unusable


@dataclass(frozen=True)
class Source:
    """Where rows come from.

    Args:
        name: for messages.
        columns: their names; none if there are no rows, or only bad ones.
        records: begins the rows anew.
        typed: whether cells are of the type they should have; in CSV all are texts.
    """

    name: str
    columns: tuple[str, ...]
    records: Callable[[], Iterator[Record]]
    typed: bool = True

    @property
    def listed(self) -> str:
        """The columns, for messages."""
        return ", ".join(repr(column) for column in self.columns)


def open_source(source: Any, encoding: str) -> Source:
    """Whatever was passed to `read`, as rows."""
    if isinstance(source, (str, os.PathLike)):
        return _open_file(Path(source), encoding)
    name = f"source (a {type(source).__name__})"
    if isinstance(source, pd.DataFrame):
        columns = _distinct(name, [str(column) for column in source.columns])
        tuples = source.itertuples
        return Source(name, columns, lambda: (dict(zip(columns, row, strict=True)) for row in tuples(False, None)))
    if isinstance(source, Mapping):
        raise InputError(f"{name} has the keys {', '.join(map(repr, source))}. Pass one of its values: source['…'].")
    if not isinstance(source, Iterable):
        raise InputError(f"{name} gives no rows. Pass a path, a DataFrame, a dataset or a list.")
    held = list(source) if iter(source) is source else source  # a generator gives its rows only once
    return _named_in_rows(name, lambda: map(_record, held))


def read_json(path: Path, encoding: str = "utf-8") -> Iterator[Record]:
    """The object on each line that is not blank."""
    with opened(path, encoding, "\n") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Unusable("not JSON", f"does not parse as JSON: {error}")
            else:
                yield found if isinstance(found, dict) else Unusable("no object", f"{short(found)} is no JSON object")


def file_at(path: Path, encoding: str) -> str:
    """What messages call a file; it must be there, and the encoding known."""
    name = f"source={str(path)!r}"
    if path.is_dir():
        raise InputError(f"{name} is a folder. Pass one of its files; read_eraser reads folders in ERASER's format.")
    if not path.exists():
        raise InputError(f"{name} is not there. Check the path: it was looked for from {str(Path.cwd())!r}.")
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise OptionError(f"encoding={encoding!r} is not known. Try 'utf-8', 'latin-1' or 'cp1252'.") from None
    return name


def _open_file(path: Path, encoding: str) -> Source:
    name = file_at(path, encoding)
    ending = next((ending for ending in ENDINGS if path.name.lower().endswith(ending)), "")
    if not ending:
        raise InputError(f"{name} ends in none of {', '.join((*ENDINGS, *MARKED))}. Convert it, or pass a DataFrame.")
    if ending == ".parquet":
        return _open_parquet(name, path)
    if ending.startswith(".jsonl"):
        return _named_in_rows(name, lambda: read_json(path, encoding))
    delimiter = "," if ending.startswith(".csv") else "\t"
    header = next(_read_csv(path, encoding, delimiter), None)
    if header is None:
        raise EmptyInput(f"{name} is empty. Pass a file with a header and at least one row.")
    if isinstance(header, Unusable) or UNDECODED.search("".join(header)):
        raise InputError(f"{name} has a header that cannot be read in encoding={encoding!r}. Name its encoding.")
    columns = _distinct(name, [cell.strip() for cell in header])
    return Source(name, columns, lambda: _csv_records(path, encoding, delimiter, columns), typed=False)


def _csv_records(path: Path, encoding: str, delimiter: str, columns: tuple[str, ...]) -> Iterator[Record]:
    for cells in islice(_read_csv(path, encoding, delimiter), 1, None):
        if isinstance(cells, Unusable):
            yield cells
        elif len(cells) != len(columns):
            yield Unusable("ragged", f"has {len(cells)} fields; the header has {len(columns)}")
        elif delimiter == "\t" and any("\t" in cell for cell in cells):
            # Many TSV files do not mean their quotes, and one that opens a cell would swallow the rows up to the next.
            yield Unusable(
                "quoted tabs", "holds a tab within quotes. If the quotes are not meant, pass "
                "pandas.read_csv(path, sep='\\t', quoting=3)",
            )  # fmt: skip
        else:
            yield dict(zip(columns, cells, strict=True))


def _read_csv(path: Path, encoding: str, delimiter: str) -> Iterator[list[str] | Unusable]:
    """The cells of each row that is not blank, with the header."""
    with opened(path, encoding, "") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        while True:
            try:
                if cells := next(rows):
                    yield cells
            except StopIteration:
                return
            except csv.Error as error:
                yield Unusable("broken CSV", f"does not parse: {error}. Write long or quoted texts as JSONL")


@contextmanager
def opened(path: Path, encoding: str, newline: str) -> Iterator[IO[str]]:
    """The file as text; bytes that are not in the encoding become what `UNDECODED` finds."""
    encoding = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding  # Excel begins with a mark
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rt", encoding=encoding, errors="surrogateescape", newline=newline) as file:
            yield file
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        raise InputError(f"source={str(path)!r} cannot be read: {error}. Check the file and its encoding.") from error


def _open_parquet(name: str, path: Path) -> Source:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f"{name} needs pyarrow: pip install 'regard[parquet]'.") from None
    broken = (ValueError, OSError, OverflowError, import_module("pyarrow").ArrowException)

    def records() -> Iterator[Record]:
        try:
            with parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
        except broken as error:
            raise InputError(f"{name} is damaged: {' '.join(str(error).split())}. Write it anew.") from error

    try:
        columns = parquet.read_schema(path).names
    except broken as error:
        raise InputError(f"{name} is no Parquet file: {error}") from None
    return Source(name, _distinct(name, columns), records)


def _record(row: Any) -> Record:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, (tuple, list)) and len(row) == 2:
        return {"text": row[0], "label": row[1]}
    return Unusable("no row", f"{short(row)} is neither a mapping nor a text nor (text, label)")


def _named_in_rows(name: str, records: Callable[[], Iterator[Record]]) -> Source:
    """The source, its columns named by the first thousand rows: not every row needs to have all."""
    mappings = (record for record in records() if not isinstance(record, Unusable))
    columns = dict.fromkeys(str(column) for record in islice(mappings, 1000) for column in record)
    return Source(name, tuple(columns), records)


def _distinct(name: str, columns: list[str]) -> tuple[str, ...]:
    twice = [column for place, column in enumerate(columns) if column in columns[:place]]
    if twice:
        raise InputError(f"{name} has more than one column {twice[0]!r}. Give each a name of its own.")
    return tuple(columns)
