"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.data.planted import TASKS

MODEL = Annotated[str, typer.Option(help="A local folder, a GGUF file, or a hub name.")]
TRUST = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
TARGET = Annotated[str | None, typer.Option(help="A label, token or class number; else the predicted.")]
SIMILAR = Annotated[
    str | None, typer.Option(help="For plain encoders: explain the similarity to this text or picture.")
]
OVER_LIMIT = Annotated[str, typer.Option(help="A text over the model's limit: 'error', 'truncate' or 'allow'.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
MAYBE_MODEL = Annotated[str | None, typer.Option("--model", help="A local folder, a GGUF file, or a hub name.")]
DATA = Annotated[Path | None, typer.Option(help="A .csv, .tsv, .jsonl or .parquet file, or an ERASER folder.")]
PLANTED = Annotated[
    str | None,
    typer.Option(help=f"Instead: train a small model on a task whose truth is known: {', '.join(TASKS)}."),
]
TEXT_COLUMN = Annotated[str | None, typer.Option("--text", help="The column of texts.")]
LABEL_COLUMN = Annotated[str | None, typer.Option("--label", help="The column of labels.")]
RATIONALE_COLUMN = Annotated[str | None, typer.Option("--rationale", help="The column of rationales.")]
HOW = Annotated[str | None, typer.Option(help="Words are removed by 'delete', 'mask', 'pad' or 'attention'.")]
ON_BAD = Annotated[str, typer.Option(help="Rows that cannot be used: 'raise' or 'skip'.")]
SEED = Annotated[int, typer.Option(min=0, help="Of everything that is drawn by lot.")]
EXAMPLES = Annotated[int, typer.Option(help="How many examples are drawn from the data.")]
PAGE = Annotated[Path | None, typer.Option(help="Write a page with tables and pictures here.")]
