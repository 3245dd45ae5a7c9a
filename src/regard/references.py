"""What importances of columns are held against: permuted columns, columns left out, models trained without them.

These ask an estimator of scikit-learn for its score; they know nothing of attention.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.inspection import permutation_importance as permuted
from sklearn.metrics import check_scoring
from sklearn.model_selection import train_test_split

from regard.errors import EmptyInput, InputError, OptionError, at_least_one, choose, nearest, within
from regard.measures import bootstrap
from regard.progress import Counter

log = logging.getLogger("regard")
Array = NDArray[np.float64]
Scoring = str | Callable[[Any, pd.DataFrame, Any], float] | None


@dataclass(frozen=True, eq=False)
class Reference:
    """How much a model needs each column, or group of columns: how far its score falls without it.

    Args:
        name: what it is called in tables.
        groups: by name, the columns that were treated together; of single columns each is its own group.
        repeats: ``(group, repeat)``: how far the score fell.
        score: what it fell from.
        settings: what was asked for.
    """

    name: str
    groups: Mapping[str, tuple[str, ...]]
    repeats: Array
    score: float
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, given: Reference | pd.Series[float]) -> Reference:
        """A number for each column, by name, as a reference without repeats."""
        if isinstance(given, Reference):
            return given
        if not isinstance(given, pd.Series):
            raise InputError(f"references: {given!r} is none. Pass a Series with a number for each column, or a name.")
        if not given.index.is_unique:
            twice = given.index[given.index.duplicated()][0]
            raise InputError(f"references: {given.name!r} has {twice!r} more than once.")
        groups = {str(name): (str(name),) for name in given.index}
        name = "reference" if given.name is None else str(given.name)
        return cls(name, groups, np.asarray(given, dtype=np.float64)[:, None], np.nan, {})

    def __repr__(self) -> str:
        return f"Reference({self.name!r}, {len(self.groups)} columns or groups, score {self.score:.4g})"

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each column: its name, the mean fall of the score, the interval over repeats, its rank; sorted."""
        rows = []
        for name, falls in zip(self.groups, self.repeats, strict=True):
            found = bootstrap(falls, seed=int(self.settings.get("seed", 0))).unless_single
            rows.append({"column": name, "value": found.value, "low": found.low, "high": found.high})
        table = pd.DataFrame(rows).sort_values("value", ascending=False, kind="stable", ignore_index=True)
        return table.assign(rank=table["value"].rank(ascending=False, method="min"))

    def drawn(self, draws: int, seed: int) -> Array:
        """``(1 + draw, group)``: the mean over repeats, then means over repeats that are drawn again."""
        count = self.repeats.shape[1]
        times = np.random.default_rng(seed).multinomial(count, [1 / count] * count, draws)
        return np.asarray(np.vstack([np.ones(count), times]) @ self.repeats.T / count)


def permutation_importance(
    estimator: Any, frame: pd.DataFrame, target: Any, *, repeats: int = 5,
    groups: Mapping[str, Sequence[str]] | None = None, scoring: Scoring = None, seed: int = 0,
) -> Reference:  # fmt: skip
    """How far the score falls when a column is shuffled: scikit-learn's `permutation_importance`, for groups, too.

    Shuffled columns that depend on one another make rows that do not exist: put such columns into a group.

    Args:
        estimator: fitted.
        frame: the rows that it is tried on.
        target: what it should say of each.
        repeats: how often each column is shuffled.
        groups: by name, columns that are shuffled together, as one; columns in no group stay by themselves.
        scoring: as in scikit-learn; None: the estimator's own.
        seed: of the shuffles.

    Example:
        >>> import pandas as pd
        >>> from sklearn.linear_model import LinearRegression
        >>> frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "b": [1.0, 0, 1, 0]})
        >>> found = permutation_importance(LinearRegression().fit(frame, frame["a"]), frame, frame["a"])
        >>> found.frame["column"].tolist()
        ['a', 'b']
    """
    at_least_one("repeats", repeats)
    parts = _grouped(_table(frame, target), groups)
    scorer = check_scoring(estimator, scoring=scoring)
    # scikit-learn shuffles a column of row numbers for each group; the cells of the group follow them.
    places = pd.DataFrame({name: np.arange(len(frame)) for name in parts})
    with Counter("permuting columns", 1 + len(parts) * repeats) as counter:

        def score(model: Any, numbers: pd.DataFrame, wanted: Any) -> float:
            mixed = frame.copy()
            for name, columns in parts.items():
                moved = numbers[name].to_numpy()
                if (moved != places[name].to_numpy()).any():
                    for column in columns:
                        mixed[column] = frame[column].iloc[moved].set_axis(frame.index)
            found = float(scorer(model, mixed, wanted))
            counter.advance()
            return found

        found = permuted(estimator, places, target, scoring=score, n_repeats=repeats, random_state=seed)
    before = float(scorer(estimator, frame, target))
    settings = {"repeats": repeats, "seed": seed, "rows": len(frame), "scoring": _said(scoring)}
    return Reference("permutation", parts, found.importances, before, settings)


def leave_one_column_out(
    estimator: Any, frame: pd.DataFrame, target: Any, *, by: Literal["mean", "missing"] = "mean",
    groups: Mapping[str, Sequence[str]] | None = None, scoring: Scoring = None,
) -> Reference:  # fmt: skip
    """How far the score falls when all cells of a column are the same, or missing; the model is not trained again.

    Args:
        estimator: fitted.
        frame: the rows that it is tried on.
        target: what it should say of each.
        by: what takes the place of the cells: the "mean" of numbers and the most frequent category; or "missing".
        groups: by name, columns that are left out together.
        scoring: as in scikit-learn; None: the estimator's own.
    """
    choose("by", by, ("mean", "missing"))
    parts = _grouped(_table(frame, target), groups)
    scorer = check_scoring(estimator, scoring=scoring)
    known = getattr(getattr(estimator, "schema_", None), "categories", ())  # numbers that only name something
    before = float(scorer(estimator, frame, target))
    falls = []
    with Counter("leaving out columns", len(parts)) as counter:
        for columns in parts.values():
            without = frame.copy()
            for name in columns:
                without[name] = _constant(frame[name], by, category=name in known)
            falls.append([before - float(scorer(estimator, without, target))])
            counter.advance()
    settings = {"by": by, "rows": len(frame), "scoring": _said(scoring)}
    return Reference(f"without, {by}", parts, np.array(falls), before, settings)


def remove_and_retrain(
    make_estimator: Callable[[], Any], frame: pd.DataFrame, target: Any, order: Sequence[str], *,
    most_relevant_first: bool = True, share: float = 0.1, repeats: int = 1, steps: int | None = None,
    scoring: Scoring = None, most_minutes: float | None = None, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Take columns away one after the other, train anew each time, and see how the score falls (Borisov et al.).

    The number of trainings is said before the first one, and after it how long all will take.

    Args:
        make_estimator: makes an estimator that is not fitted.
        frame: all rows.
        target: what is to be learned of each.
        order: the columns, the most important first; an `Importance` has them in ``.wide().index``.
        most_relevant_first: False: begin with the least important.
        share: of the rows that the score is taken on; the others are trained on.
        repeats: how often all of it is done, each time on another part.
        steps: how many columns are taken away; None: all but one.
        scoring: as in scikit-learn; None: the estimator's own.
        most_minutes: refuse, after the first training, if all would take longer.
        seed: of the parts.

    Returns:
        A row for each number of removed columns: the last "column" that went, "score", "score_low", "score_high" over
        repeats, and "n". ``attrs["seconds"]`` has what it took.
    """
    at_least_one("repeats", repeats)
    within("share", share, 0, 1)
    if not callable(make_estimator):
        raise OptionError(f"make_estimator={make_estimator!r} must make an estimator: lambda: clone(estimator), say.")
    _table(frame, target)
    if sorted(order) != sorted(frame.columns):
        raise InputError(f"order={[*order]!r} must name each column of the frame once: {[*frame.columns]}.")
    count = at_least_one("steps", len(order) - 1 if steps is None else steps, len(order) - 1)
    removed = [*order][:count] if most_relevant_first else [*order][::-1][:count]
    fits = (count + 1) * repeats
    log.warning("remove_and_retrain: %d trainings, %d of each kind", fits, repeats)
    scores = np.zeros((count + 1, repeats))
    began = time.monotonic()
    with Counter("training without columns", fits) as counter:
        for repeat in range(repeats):
            train, test, known, wanted = train_test_split(frame, target, test_size=share, random_state=seed + repeat)
            for gone in range(count + 1):
                kept = [name for name in frame.columns if name not in removed[:gone]]
                try:
                    estimator = make_estimator().fit(train[kept], known)
                except InputError as problem:
                    if gone == 0:
                        raise
                    log.warning("remove_and_retrain ends with %d columns removed: %s", gone - 1, problem)
                    count = gone - 1
                    break
                scores[gone, repeat] = check_scoring(estimator, scoring=scoring)(estimator, test[kept], wanted)
                if counter.done == 0:
                    _afford((time.monotonic() - began) * (fits - 1) / 60, fits, most_minutes)
                counter.advance()
    rows = [
        {"removed columns": gone, "column": "" if gone == 0 else removed[gone - 1]}
        | bootstrap(scores[gone], seed=seed).unless_single.cells("score") | {"n": repeats}
        for gone in range(count + 1)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    table.attrs["seconds"] = time.monotonic() - began
    return table


def _afford(minutes: float, fits: int, most: float | None) -> None:
    """Say how long it will take, or refuse."""
    said = f"{fits - 1} more trainings, about {minutes:.3g} minutes if each takes as long as the first"
    if most is not None and minutes > most:
        raise OptionError(f"most_minutes={most:g}: {said}. Allow more, or pass steps=, fewer repeats, fewer rows.")
    log.warning("remove_and_retrain: %s", said)


def _table(frame: pd.DataFrame, target: Any) -> list[str]:
    """The columns; refused if it is no table with a target for each row."""
    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"frame is a {type(frame).__name__}: pass a pandas DataFrame, whose columns have names.")
    if not len(frame):
        raise EmptyInput("frame holds no rows.")
    if len(target) != len(frame):
        raise InputError(f"target has {len(target)} entries for {len(frame)} rows. Pass one for each.")
    return [*frame.columns]


def _grouped(columns: Sequence[str], groups: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """All groups, in the order of their first columns; what is in none is by itself."""
    owner: dict[str, str] = {}
    for name, some in (groups or {}).items():
        if name in columns and name not in some:
            raise OptionError(f"groups: {name!r} is a column that is not in the group of that name. Call it otherwise.")
        for column in [some] if isinstance(some, str) else some:
            if column not in columns:
                raise OptionError(f"groups[{name!r}]: {column!r} is no column.{nearest(column, columns)}")
            if owner.setdefault(column, name) != name:
                raise OptionError(f"groups: {column!r} is in {owner[column]!r} and in {name!r}. Leave it in one.")
    found: dict[str, list[str]] = {}
    for column in columns:
        found.setdefault(owner.get(column, column), []).append(column)
    return {name: tuple(some) for name, some in found.items()}


def _constant(cells: pd.Series[Any], by: str, *, category: bool) -> Any:
    """What takes the place of all cells."""
    numbers = pd.api.types.is_numeric_dtype(cells) and not pd.api.types.is_bool_dtype(cells)
    if by == "missing" or not cells.notna().any():
        return np.nan if numbers else None
    return cells.mean() if numbers and not category else cells.mode().iloc[0]


def _said(scoring: Scoring) -> str:
    return scoring if isinstance(scoring, str) else getattr(scoring, "__name__", "the estimator's own")
