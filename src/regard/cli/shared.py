"""What several commands do with their arguments. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import json as jsons
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import InputError, must_know, nearest
from regard.locating import columns_of, locate
from regard.progress import Counter

if TYPE_CHECKING:
    from regard.types import Subject

COMMA = re.compile(r",(?![^\[]*\])")  # not one within a list
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
# `regard.data.planted` is slow to import; a test holds this list against it.
TASKS = ("keyword", "columns", "copies", "copied_columns", "shortcut", "position", "xor", "two_facts", "negation")
RECIPES = ("attention_classifier", "fine_tune", "ft_transformer")  # of `regard.recipes`; the same test


def known(folder: str) -> list[str]:
    """The names of all "methods", "trials" or "probes": those of the folder's files and of other packages."""
    import pkgutil
    from importlib import import_module
    from importlib.metadata import entry_points

    inside = pkgutil.iter_modules(import_module(f"regard.{folder}").__path__)
    outside = entry_points(group=f"regard.{folder}")
    return [*(one.name for one in inside), *(one.value.rsplit(".", 1)[-1] for one in outside)]


def option(given: str) -> tuple[str, Any]:
    """``name=value``; numbers, true, false and null are what they look like."""
    name, equals, value = given.partition("=")
    if not equals:
        raise InputError(f"{given!r} is not name=value, as an option is given.")
    try:
        return name.replace("-", "_"), jsons.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name.replace("-", "_"), value


def several(given: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """``name,name:option=value,option=value,name`` and several of these; an option belongs to the name before it.

    Example:
        >>> several(["raw,gradient:norm=l2,of=logit", "rollout"])
        [('raw', {}), ('gradient', {'norm': 'l2', 'of': 'logit'}), ('rollout', {})]
        >>> several(["adversary:lambdas=[0,0.1],seeds=3"])
        [('adversary', {'lambdas': [0, 0.1], 'seeds': 3})]
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for piece in (one.strip() for text in given for one in COMMA.split(text)):
        name, colon, rest = piece.partition(":")
        if not colon and "=" in piece:
            if not found:
                raise InputError(f"{piece!r} is an option of nothing: write name:{piece}.")
            found[-1][1].update([option(piece)])
        elif piece:
            found.append((name, dict([option(rest)] if rest else [])))
    return found


def must_end_in(suffix: str, name: str, path: Path | None) -> None:
    """Refuse a file of another kind."""
    if path is not None and path.suffix != suffix:
        raise InputError(f"--{name} {path} must end in {suffix}.")


def must_be_table(data: Path) -> None:
    """Refuse a path that is no file of rows."""
    if not data.is_file():
        raise InputError(f"--data {data} is not a file. It takes {', '.join(TABLES)}.")


def must_name(model: str | None, data: Path | None, planted: str | None, *recipes: str | None) -> None:
    """Refuse what is named twice, not at all, or not there; before anything heavy is imported.

    Commands that take a recipe pass it, also where there is none.
    """
    recipe = next(iter(recipes), None)
    if recipe is not None:
        must_know("recipe", recipe, RECIPES)
        if data is None or planted is not None:
            raise InputError(f"--recipe {recipe} needs --data to train models on, and no --planted.")
        if (model is None) == (recipe == "fine_tune"):
            step = "needs --model, the checkpoint to begin with" if model is None else "takes no --model: it builds one"
            raise InputError(f"--recipe {recipe} {step}.")
    elif (planted is None) == (model is None or data is None) or (planted and (model or data)):
        others = ", --recipe and --data," * bool(recipes) or ","
        raise InputError(f"pass --model and --data{others} or --planted alone: what is to be tried on what.")
    if planted is not None:
        must_know("task", planted, TASKS)
    if data is not None and not data.exists():
        raise InputError(f"--data {data} does not exist. It takes {', '.join(TABLES)} or an ERASER folder.")
    if model is not None and columns_of(model) is None:
        locate(model)


def read(
    data: Path, text: str | None, label: str | None, rationale: str | None, on_bad: Any, model: str | None = None,
    recipe: str | None = None,
) -> Any:  # fmt: skip
    """The data of a file, or of an ERASER folder; of a model for tables the columns that it knows."""
    columns = None if model is None else columns_of(model)
    with Counter(f"reading {data}", None, patience=0):
        from regard.data import read, read_eraser

        if recipe == "ft_transformer":
            columns = _all_but(data, label)
        if columns is not None:
            _must_have(data, model, columns, label)
        found = (
            read_eraser(data, on_bad=on_bad)
            if data.is_dir()
            else read(data, text=text, columns=columns, label=label, rationale=rationale, on_bad=on_bad)
        )
        return replace(found, source=str(data))


def _all_but(data: Path, label: str | None) -> list[str]:
    """The columns of a table from which a model learns."""
    from regard.data.sources import open_source

    must_be_table(data)
    there = open_source(data, "utf-8").columns
    if label is None:
        raise InputError("--recipe ft_transformer learns to predict a column: name it by --target-column.")
    must_know("target_column", label, there)
    return [name for name in there if name not in (label, "split")]


def _must_have(data: Path, model: str | None, columns: list[str], label: str | None) -> None:
    """Refuse data without a column that the model was trained on, or without the one that is asked for."""
    from regard.data.sources import open_source

    must_be_table(data)
    there = open_source(data, "utf-8").columns
    for name in columns:
        if there and name not in there:
            others = [one for one in there if one not in columns]
            raise InputError(
                f"--data {data} has no column {name!r}, which {model} was trained on.{nearest(name, others)} "
                "Rename or add it."
            )
    if there and label is not None:
        must_know("target_column", label, there)


def recipe_of(name: str, model: str | None, given: Iterable[str] | None) -> Any:
    """A ready-made recipe, with options."""
    from inspect import signature

    from regard.errors import OptionError
    from regard.recipes import READY

    make: Any = READY[name]
    options = dict(map(option, given or ()))
    there = [one for one in signature(make).parameters if one not in ("path", "keep")]
    for one in options:
        must_know("recipe-option", one, there)
    try:
        return make(model, **options) if name == "fine_tune" else make(**options)
    except TypeError as problem:
        raise OptionError(f"--recipe-option: {problem}.") from None


def processes_of(workers: int | None, runner: str, trust_remote_code: bool) -> int | None:
    """How many processes; None: as many as fit. Code that came with a checkpoint cannot be sent to another one."""
    return workers or (1 if trust_remote_code and runner == "local" else None)


def wake() -> None:
    """Import what takes seconds, in sight."""
    with Counter("starting torch", None, patience=0):
        import regard.diagnosis
        import regard.subjects  # noqa: F401


def open_model(model: str, *, over_limit: Any = "error", trust_remote_code: bool) -> Subject:
    """The model, loaded."""
    if columns_of(model) is not None:
        return _open_estimator(model)
    locate(model)
    wake()
    from regard.subjects import open_subject

    # What is downloaded has bars of its own.
    with Counter(f"loading {model}", None, patience=0 if Path(model).expanduser().exists() else math.inf):
        return open_subject(model, over_limit=over_limit, trust_remote_code=trust_remote_code)


def _open_estimator(model: str) -> Subject:
    with Counter(f"loading {model}", None, patience=0):
        from regard.estimators import load

        opened: Subject = load(model).subject_
        return opened


def asked_of(
    model: str, target: str | None, similar_to: str | None, over_limit: str, trust_remote_code: bool
) -> tuple[Any, Any]:
    """The model, and what is explained of it."""
    subject = open_model(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
    if target is None and similar_to is None and not subject.predicts:
        raise InputError(f"{model} has no classes to explain. Pass --similar-to TEXT.")
    return subject, target_of(subject, target, similar_to)


def target_of(subject: Any, target: str | None, similar_to: str | None) -> Any:
    """What is explained: a class by number, a label or token by name, or the similarity to another input."""
    if similar_to is not None:
        if not hasattr(subject, "similarity"):
            raise InputError(f"--similar-to {similar_to}: this model gives no vector to compare. Use --target.")
        return subject.similarity(similar_to)
    if target is not None and target.isdigit() and not hasattr(subject, "produce"):
        return int(target)
    return target
