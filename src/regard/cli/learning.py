"""Train a model for tables: fit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import options
from regard.cli.shared import must_be_table
from regard.errors import InputError, choose, must_know
from regard.progress import Counter

MODELS = {"ft_transformer": "FTTransformer", "tab_transformer": "TabTransformer", "saint": "SAINT"}
FEWEST = 8  # rows, some of which are held out, twice
MOST_CLASSES = 20  # numbers with more values than these are a quantity, if nobody says otherwise
HELD = "held_out.csv"  # in the folder of the model: rows that it has not seen


def fit(
    data: Annotated[Path, typer.Option(metavar="PATH", help="A .csv, .tsv, .jsonl or .parquet file.")],
    target_column: Annotated[str, typer.Option(metavar="TEXT", help="The column that is to be predicted.")],
    out: Annotated[Path, typer.Option(metavar="PATH", help="The folder in which the model is saved.")],
    model: Annotated[
        str, typer.Option(metavar="TEXT", help=f"{', '.join(MODELS)}.", autocompletion=lambda: [*MODELS])
    ] = "ft_transformer",
    columns: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help="What it learns from, with commas; else all others.")
    ] = None,
    categories: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Columns of numbers that only name something, with commas."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="'classification' or 'regression'; else by what the target holds."),
    ] = None,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="At most; it stops when it gets no better.")] = 100,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many rows are drawn; else all.")] = None,
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", min=0.01, max=0.9, help="Rows for the score, and for an audit.")
    ] = 0.2,
    seed: options.SEED = 0,
    on_bad: options.ON_BAD = "raise",
    json: options.JSON = False,
) -> None:
    """Train a model for tables, and save it."""
    must_know("model", model, MODELS)
    if task is not None:
        choose("task", task, ("classification", "regression"))
    must_be_table(data)
    if (out / "estimator.json").exists():
        raise InputError(f"--out {out} holds a model. Choose another folder.")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file. Choose a folder.")
    frame, target = _read(data, target_column, _names(columns), on_bad, limit, seed)
    if len(frame) < FEWEST:
        raise InputError(f"--data {data} has {len(frame)} rows: too few to learn from. Give {FEWEST} or more.")
    kind = task or ("regression" if _is_quantity(target) else "classification")
    with Counter("starting torch", None, patience=0):
        from sklearn.model_selection import train_test_split

        from regard import estimators
    name = MODELS[model] + ("Classifier" if kind == "classification" else "Regressor")
    if not hasattr(estimators, name):
        raise InputError(f"--model {model} has no {kind} here. Use ft_transformer.")
    asked = _names(categories)
    estimator = getattr(estimators, name)(
        epochs=epochs, random_state=seed, categories=asked and [*asked, *frame.select_dtypes(exclude="number").columns]
    )
    train, test, known, wanted = train_test_split(frame, target, test_size=held_out, random_state=seed)
    estimator.fit(train, known)
    measure, score = _scored(kind, wanted, estimator.predict(test))
    usual = known.mode()[0] if kind == "classification" else known.mean()
    always = f"(always {usual:.6g})" if kind == "regression" else f"(always {usual})"
    _, by_usual = _scored(kind, wanted, usual)
    estimator.save(out)
    test.assign(**{target_column: wanted}).to_csv(out / HELD, index=False)
    facts = {
        "model": name, "columns": frame.shape[1], "trained on": len(train), "epochs": len(estimator.history_),
        "held out": len(test), measure: round(score, 4), always: round(by_usual, 4),
    }  # fmt: skip
    _tell(out, facts, target_column, json=json)


def _names(given: Sequence[str] | None) -> list[str] | None:
    return None if given is None else [name.strip() for one in given for name in one.split(",") if name.strip()]


def _read(
    data: Path, target: str, columns: list[str] | None, on_bad: Any, limit: int | None, seed: int
) -> tuple[Any, Any]:
    """The rows, and what is to be predicted of each."""
    with Counter(f"reading {data}", None, patience=0):
        import pandas as pd

        from regard.data import read
        from regard.data.sources import open_source

        there = open_source(data, "utf-8").columns
        must_know("target_column", target, there)
        found = read(data, columns=columns or [name for name in there if name != target], label=target, on_bad=on_bad)
        found = found if limit is None else found.sample(limit, seed=seed)
        examples = [*found]
        frame = pd.DataFrame([one.input for one in examples], columns=[*found.columns])
        return frame, pd.Series([one.label for one in examples])


def _is_quantity(target: Any) -> bool:
    """Whether a column of labels is rather a number than a class."""
    return bool(target.dtype.kind == "f" or (target.dtype.kind == "i" and target.nunique() > MOST_CLASSES))


def _scored(kind: str, wanted: Any, said: Any) -> tuple[str, float]:
    if kind == "classification":
        return "accuracy", float((wanted.to_numpy() == said).mean())
    return "RMSE", float(((wanted.to_numpy() - said) ** 2).mean() ** 0.5)


def _tell(out: Path, facts: dict[str, Any], target: str, *, json: bool) -> None:
    from regard.cli.consoles import print_json, shown, tell

    if json:
        print_json({**facts, "path": str(out)})
    else:
        for name, value in facts.items():
            shown.print(f"{name:<16}{value:,}" if isinstance(value, int) else f"{name:<16}{value}", highlight=False)
    tell(f"saved: {out}")
    command = ["regard", "audit", "--model", str(out), "--data", str(out / HELD), "--target-column", target]
    tell(f"audit it: {shlex.join(command)}")
