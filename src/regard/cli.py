"""The command line: arguments in, tables or JSON out. No logic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import regard
from regard.errors import RegardError
from regard.subjects import open_subject

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
shown = Console()
# Progress and complaints go to stderr, so that stdout can be piped.
told = Console(stderr=True)

TRACE_HELP = """Run a model once on your texts and show what each of its attention sites did.

Examples:

* `regard trace --model path/to/classifier --text "a moving film"`
* `regard trace --model SmolLM2.gguf --text "The capital of France is" --json`
* `regard trace --model org/name --text "first" --text "second" --over-limit truncate`
"""


def _version(wanted: bool) -> None:
    if wanted:
        shown.print(f"regard {regard.__version__}", highlight=False)
        raise typer.Exit


@app.callback(help=(regard.__doc__ or "") + '\n\nStart with: `regard trace --model PATH --text "a moving film"`')
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command("trace", help=TRACE_HELP)
def _trace(
    model: Annotated[str, typer.Option(help="A local folder, a GGUF file, or a hub name.")],
    text: Annotated[list[str], typer.Option(help="A text to run the model on; may be given several times.")],
    over_limit: Annotated[
        str, typer.Option(help="A text over the model's limit is an 'error', 'truncate'd or 'allow'ed.")
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    if told.is_terminal:  # transformers draws its own progress bars
        told.print(f"loading {model}", style="dim", markup=False, highlight=False)
    subject = open_subject(model, over_limit=over_limit)  # type: ignore[arg-type]  # it refuses other values
    with _waiting("tracing"):
        traced = regard.trace(subject, text)
        rows = traced.frame().to_dict(orient="records")
    if as_json:
        ignored = [vars(entry) for entry in traced.ignored]
        report = {"model": model, "special": traced.special, "readout": traced.check.readout,
                  "error": traced.check.error, "sites": rows, "ignored": ignored}  # fmt: skip
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    shown.print(f"{len(rows)} attention sites in {model}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("site", overflow="fold")  # the only one that may be folded: numbers stay whole
    for column in ("kind", "heads", "shape", "entropy", "special", "error"):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for row in rows:
        shape = "×".join(map(str, row["shape"]))
        numbers = (f"{row['entropy']:.2f}", f"{row['special_share']:.0%}", f"{row['error']:.0e}")
        table.add_row(row["site"], row["kind"], str(row["heads"]), shape, *numbers)
    shown.print(table)
    shown.print(
        "shape: examples × heads × queries × keys. entropy (nats; 0: one key) and special (share on special tokens): "
        "as seen from the readout, mean over heads and texts. error: max |A·V − output| / max |output|.",
        style="dim",
    )
    for entry in traced.ignored:
        shown.print(f"ignored {entry.name} {entry.shape}: {entry.reason}", style="dim", markup=False)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A spinner on stderr where somebody can see it."""
    if not told.is_terminal:
        yield
        return
    with told.status(what):
        yield


def main() -> None:
    """Run the command line; what regard refuses is one line on stderr and exit code 2."""
    try:
        app()
    except RegardError as problem:
        told.print(f"error: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
