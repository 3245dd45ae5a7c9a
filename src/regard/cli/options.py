"""Options that several commands have: one set of names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.shared import RECIPES, TASKS, known


def methods() -> list[str]:
    """For the shell to complete."""
    return known("methods")


def trials() -> list[str]:
    """For the shell to complete."""
    return ["quick", "all", *known("trials")]


def probes() -> list[str]:
    """For the shell to complete."""
    return known("probes")


def recipes() -> list[str]:
    """For the shell to complete."""
    return [*RECIPES]


def tasks() -> list[str]:
    """For the shell to complete."""
    return [*TASKS]


MODEL = Annotated[str, typer.Option(metavar="TEXT", help="A local folder, a GGUF file, or a hub name.")]
TRUST = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
TARGET = Annotated[str | None, typer.Option(metavar="TEXT", help="A label, token or class number; else the predicted.")]
SIMILAR = Annotated[
    str | None, typer.Option(metavar="TEXT", help="For plain encoders: explain the similarity to this text or picture.")
]
OVER_LIMIT = Annotated[
    str, typer.Option(metavar="TEXT", help="A text over the model's limit: 'error', 'truncate' or 'allow'.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
MAYBE_MODEL = Annotated[
    str | None, typer.Option("--model", metavar="TEXT", help="A local folder, a GGUF file, or a hub name.")
]
DATA = Annotated[
    Path | None, typer.Option(metavar="PATH", help="A .csv, .tsv, .jsonl or .parquet file, or an ERASER folder.")
]
RECIPE = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Train models, to try more of them: {', '.join(RECIPES)}. --model is what is fine-tuned.",
        autocompletion=recipes,
    ),
]
RECIPE_OPTION = Annotated[
    list[str] | None,
    typer.Option("--recipe-option", metavar="TEXT", help="An option of it, name=value; may be given several times."),
]
PLANTED = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help=f"Instead: train a small model on a task whose truth is known: {', '.join(TASKS)}.",
        autocompletion=tasks,
    ),
]
TEXT_COLUMN = Annotated[
    str | None,
    typer.Option(
        "--text-column", "--text", metavar="TEXT", help="The column of texts (also --text); else one of a usual name."
    ),
]
LABEL_COLUMN = Annotated[
    str | None,
    typer.Option(
        "--label-column",
        "--target-column",
        "--label",
        metavar="TEXT",
        help="The column of labels (also --target-column, --label); else one of a usual name.",
    ),
]
RATIONALE_COLUMN = Annotated[
    str | None,
    typer.Option(
        "--rationale-column",
        "--rationale",
        metavar="TEXT",
        help="The column of rationales (also --rationale); else one of a usual name.",
    ),
]
HOW = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Words are removed by 'delete', 'mask', 'pad' or 'attention'.")
]
ON_BAD = Annotated[str, typer.Option(metavar="TEXT", help="Rows that cannot be used: 'raise' or 'skip'.")]
SEED = Annotated[int, typer.Option(metavar="N", min=0, help="Of everything that is drawn by lot.")]
LIMIT = Annotated[
    int,
    typer.Option(
        "--limit", "--examples", metavar="N", min=1, help="How many examples are drawn from the data (also --examples)."
    ),
]
PAGE = Annotated[Path | None, typer.Option(metavar="PATH", help="Write a page with tables and pictures here.")]
METHOD = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="The explanation on trial: a method, or method:option=value,…; else raw.",
        autocompletion=methods,
    ),
]
METHODS = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--method",
        metavar="TEXT",
        help="Methods, or method:option=value, with commas (also --method).",
        autocompletion=methods,
    ),
]
TRIALS = Annotated[
    list[str] | None,
    typer.Option(
        "--trials", "--trial", metavar="NAMES", autocompletion=trials,
        help="'quick' (a choice of five), 'all', or names with commas, or name:option=value.",
    ),
]  # fmt: skip
PROBES = Annotated[
    list[str] | None,
    typer.Option(
        "--probes", "--probe", metavar="NAMES", autocompletion=probes,
        help="Of heads and layers: names from `regard probes` with commas, or name:option=value; else a first look.",
    ),
]  # fmt: skip
OPTION = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="TEXT", help="An option of it, name=value; may be given several times."),
]
WORKERS = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="How many processes, each with the model; else as many as fit."),
]
RUNNER = Annotated[str, typer.Option(metavar="TEXT", help="Where they run: 'local', or 'ray' (needs regard[ray]).")]
ADDRESS = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Of a Ray cluster: 'auto', 'host:port', 'ray://host:port'; else one is started."),
]
GPUS = Annotated[float, typer.Option(metavar="X", min=0.0, help="GPUs of each process on Ray; 0.5: two share one.")]
TIMEOUT = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="After which a batch on Ray is given up and tried again; else an hour."),
]
THREADS = Annotated[int | None, typer.Option(metavar="N", min=1, help="Of each process; else the cores are shared.")]
