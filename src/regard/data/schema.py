"""What the columns of a table are, learned from the frame that a model is trained on: names, means, categories."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard.errors import EmptyInput, InputError, OptionError, choose, nearest

log = logging.getLogger("regard")
MANY = 1000  # columns, from which on the cost of attention between all pairs of them is said
CONSTANT = "column %r is constant (%s): no model can learn from it. Drop it."
MANY_TEXTS = 50  # more of them, and in most rows another one, are rather texts than names of something
DISTINCT = 10  # texts that are nearly all numbers are numbers with something odd among them, if they are so many


@dataclass(frozen=True)
class Column:
    """One column, and how its cells become numbers.

    Args:
        name: as in the frame.
        kind: "number" or "category".
        center: the mean of a number, which stands in for cells that are missing.
        scale: its standard deviation; 1 where it is constant.
        categories: the known ones, in the order of their codes, which begin at 1.
    """

    name: str
    kind: Literal["number", "category"]
    center: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Encoded:
    """Rows of a table as a model takes them.

    Args:
        numbers: ``(row, number)`` float32, standardised; 0, the mean, where a cell is missing.
        codes: ``(row, category)`` int64; 0 where a cell is missing, or holds what was never seen.
    """

    numbers: NDArray[np.float32]
    codes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class Schema:
    """The columns that a model is trained on, in their order.

    Example:
        >>> import pandas as pd
        >>> schema = Schema.of(pd.DataFrame({"age": [20, 40], "sex": ["f", "m"]}))
        >>> schema.encode(pd.DataFrame({"sex": ["m", None], "age": [30, 40]})).codes.tolist()
        [[2], [0]]
    """

    columns: tuple[Column, ...]

    @classmethod
    def of(cls, frame: Any, *, categories: Sequence[str] | None = None) -> Schema:
        """Learn from the training frame.

        Args:
            frame: of pandas, or what has ``to_pandas()`` (polars, Arrow).
            categories: the columns that are no numbers; None: those of texts, categoricals and booleans.
        """
        frame = as_frame("frame", frame)
        if categories is not None:
            for name in categories:
                if name not in frame.columns:
                    raise OptionError(f"categories: {name!r} is no column.{nearest(name, frame.columns)}")
        if len(frame.columns) >= MANY:
            count = len(frame.columns)
            log.warning(
                "%d columns: each layer and head weighs all pairs of them, %.1f million weights (%.0f MB) a row. "
                "Choose some hundred columns, or expect long runs.", count, count**2 / 1e6, count**2 * 4 / 2**20,
            )  # fmt: skip
        return cls(tuple(_learned(frame[name], None if categories is None else name in categories) for name in frame))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns."""
        return tuple(column.name for column in self.columns)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that are numbers, in order."""
        return tuple(column.name for column in self.columns if column.kind == "number")

    @property
    def categories(self) -> tuple[str, ...]:
        """The columns that are categories, in order."""
        return tuple(column.name for column in self.columns if column.kind == "category")

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """How many codes each category has: the known ones, and 0 for "missing or never seen"."""
        return tuple(1 + len(column.categories) for column in self.columns if column.kind == "category")

    def encode(self, frame: Any, *, unseen: Literal["unknown", "error"] = "unknown") -> Encoded:
        """Rows as a model takes them; columns are found by their names, and additional ones are ignored.

        Args:
            frame: of pandas, or what has ``to_pandas()``.
            unseen: what to do with categories that were never seen: "unknown" gives them code 0, as missing ones have.
        """
        choose("unseen", unseen, ("unknown", "error"))
        frame = as_frame("frame", frame)
        if missing := [name for name in self.names if name not in frame.columns]:
            others = [name for name in frame.columns if name not in self.names]
            said = "; ".join(f"{name!r}.{nearest(name, others)}".removesuffix(".") for name in missing[:5])
            more = f" (and {len(missing) - 5} more)" if len(missing) > 5 else ""
            raise InputError(f"frame: columns that the model was trained on are not there: {said}{more}")
        numbers = [_standardised(frame[one.name], one) for one in self.columns if one.kind == "number"]
        codes = [_codes(frame[one.name], one, unseen) for one in self.columns if one.kind == "category"]
        size = (len(frame), 0)
        return Encoded(
            np.stack(numbers, 1) if numbers else np.zeros(size, np.float32),
            np.stack(codes, 1) if codes else np.zeros(size, np.int64),
        )

    def remarks(self, frame: Any) -> list[str]:
        """What of a table cannot be read: columns without a value, and categories that were never seen."""
        frame = as_frame("frame", frame)
        said = []
        for one in self.columns:
            cells = frame[one.name]
            there = int(cells.notna().sum())
            if not there:
                said.append(f"column {one.name!r} has no value in any row: it counts as missing everywhere.")
            elif one.kind == "category" and (odd := there - int((_codes(cells, one, "unknown") > 0).sum())):
                said.append(
                    f"column {one.name!r}: {odd} of {len(cells)} cells were never seen in training: they are missing."
                )
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"columns": [{**asdict(one), "categories": list(one.categories)} for one in self.columns]}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Schema:
        """What `to_dict` gave."""
        try:
            return cls(tuple(Column(**{**one, "categories": tuple(one["categories"])}) for one in plain["columns"]))
        except (KeyError, TypeError):
            raise InputError(f"{str(plain)[:80]!r} is not what Schema.to_dict gives.") from None


def as_frame(what: str, table: Any) -> pd.DataFrame:
    """A frame with at least one row, whose columns have names that are texts, each once."""
    frame = table.to_pandas() if hasattr(table, "to_pandas") else table
    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"{what} is a {type(table).__name__}, not a DataFrame of pandas or polars.")
    frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    if not len(frame) or not len(frame.columns):
        raise EmptyInput(f"{what} has {len(frame)} rows and {len(frame.columns)} columns: there is nothing in it.")
    if not frame.columns.is_unique:
        twice = sorted(set(frame.columns[frame.columns.duplicated()]))
        raise InputError(f"{what} has columns of the same name: {', '.join(map(repr, twice[:5]))}. Rename them.")
    return frame


def _learned(cells: pd.Series[Any], category: bool | None) -> Column:
    """What a column is; ``category``: None if that is not known."""
    name = str(cells.name)
    if not cells.notna().any():
        raise InputError(f"frame: column {name!r} has no value in any row: nothing can be learned of it. Drop it.")
    if category is None:
        category = _is_category(cells)
    if category:
        _, distinct = _distinct(cells)
        if len(distinct) == 1 and cells.notna().all():
            log.warning(CONSTANT, name, distinct[0])
        if len(distinct) > max(MANY_TEXTS, len(cells) / 2):
            log.warning("column %r has %d different texts in %d rows, and is taken for a category. Leave out what is "
                        "free text.", name, len(distinct), len(cells))  # fmt: skip
        return Column(name, "category", categories=tuple(sorted({text_of(cell) for cell in distinct})))
    numbers = _numbers(cells, learning=True)
    center, scale = float(np.nanmean(numbers)), float(np.nanstd(numbers))
    if scale <= 1e-12 * float(np.nanmax(np.abs(numbers))):
        log.warning(CONSTANT, name, f"{center:g}")
        scale = 1.0
    return Column(name, "number", center, scale)


def _is_category(cells: pd.Series[Any]) -> bool:
    """Whether a column holds texts, categoricals or booleans; refuses numbers with texts among them."""
    if isinstance(cells.dtype, pd.CategoricalDtype) or pd.api.types.is_bool_dtype(cells):
        return True
    if pd.api.types.is_numeric_dtype(cells):
        return False
    _, distinct = _distinct(cells)
    texts = [cell for cell in distinct if isinstance(cell, str)]
    odd = [cell for cell in texts if not _is_number(cell)]
    others = len(distinct) - len(texts)
    if not texts:
        return all(isinstance(cell, (bool, np.bool_)) for cell in distinct)
    nearly = len(distinct) - len(odd) > max(DISTINCT, 9 * len(odd))
    if (odd and nearly) or others:
        raise _text_among_numbers(cells, odd[0] if odd else texts[0], "If it is a category, name it in categories=.")
    return True


def _numbers(cells: pd.Series[Any], *, learning: bool = False) -> NDArray[np.float64]:
    """The cells of a numeric column; NaN where they are missing."""
    name = str(cells.name)
    if pd.api.types.is_datetime64_any_dtype(cells) or pd.api.types.is_timedelta64_dtype(cells):
        raise InputError(f"frame: column {name!r} holds times ({cells.dtype}). Turn them into numbers first.")
    if not pd.api.types.is_numeric_dtype(cells):
        _, distinct = _distinct(cells)
        if texts := [cell for cell in distinct if isinstance(cell, str)]:
            hint = "If it is a category, name it in categories=." if learning else "At training it held numbers."
            raise _text_among_numbers(cells, texts[0], hint)
    try:
        numbers = cells.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as problem:
        raise InputError(f"frame: column {name!r} must hold numbers: {problem}.") from None
    if np.isinf(numbers).any():
        row = int(np.isinf(numbers).argmax())
        raise InputError(f"frame: column {name!r} holds {numbers[row]} in row {row}. Leave such cells empty.")
    return numbers


def _standardised(cells: pd.Series[Any], column: Column) -> NDArray[np.float32]:
    """The cells in standard deviations from the mean; the mean where they are missing."""
    found = np.nan_to_num((_numbers(cells) - column.center) / column.scale, nan=0.0)
    if (far := np.abs(found) > np.finfo(np.float32).max).any():
        row = int(far.argmax())
        raise InputError(f"frame: column {column.name!r} holds {cells.iloc[row]:g} in row {row}: too large a number.")
    return found.astype(np.float32)


def _distinct(cells: pd.Series[Any]) -> tuple[NDArray[np.int64], Any]:
    """Of each cell the place of its value among those that there are (−1: missing), and these."""
    try:
        return pd.factorize(cells)
    except TypeError as problem:
        raise InputError(f"frame: column {str(cells.name)!r} holds more than single values: {problem}.") from None


def _codes(cells: pd.Series[Any], column: Column, unseen: str) -> NDArray[np.int64]:
    """The code of each cell; 0 where it is missing, or was never seen."""
    known = {category: 1 + place for place, category in enumerate(column.categories)}
    places, distinct = _distinct(cells)
    texts = [text_of(cell) for cell in distinct]
    strange = [text for text in texts if text not in known]
    if texts == strange != [] and pd.api.types.is_numeric_dtype(cells) and not any(map(_is_number, known)):
        raise InputError(
            f"frame: column {column.name!r} holds numbers such as {texts[0]}; at training it held "
            f"{_some(column.categories)}."
        )
    if strange and unseen == "error":
        raise InputError(
            f"frame: column {column.name!r} holds {_some(strange)}, which it did not at training (known: "
            f"{_some(column.categories)}). Use unseen='unknown' to treat such cells as missing."
        )
    table = np.array([*(known.get(text, 0) for text in texts), 0], np.int64)  # the last: factorize says −1 if missing
    return np.asarray(table[places])


def text_of(cell: Any) -> str:
    """A category by its name: 1 and 1.0 are one, since a column of whole numbers with a gap becomes one of floats."""
    if isinstance(cell, (float, np.floating)) and float(cell).is_integer():
        return str(int(cell))
    return str(cell)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_among_numbers(cells: pd.Series[Any], text: str, hint: str) -> InputError:
    row = int((cells == text).to_numpy().argmax())
    return InputError(
        f"frame: column {str(cells.name)!r} should hold numbers, and has the text {text!r} in row {row}. Make it a "
        f"number or leave it empty. {hint}"
    )


def _some(names: Sequence[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
