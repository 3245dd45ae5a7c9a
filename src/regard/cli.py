"""The command line: arguments in, tables or JSON out. No logic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import regard
from regard.diagnosis import Diagnosis
from regard.errors import InputError, RegardError
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

DOCTOR_HELP = """Find out what regard can do with your model, how exactly, and at what cost. Start here.

The model is traced, differentiated and edited on a text or picture of yours, or on a stand-in. Exit code 1 if something
does not work.

Examples:

* `regard doctor --model path/to/classifier`
* `regard doctor --model SmolLM2.gguf --text "The capital of France is" --json`
* `regard doctor --model path/to/vit --image cat.png`
"""
STAND_IN = "The quick brown fox jumps over the lazy dog."


def _version(wanted: bool) -> None:
    if wanted:
        shown.print(f"regard {regard.__version__}", highlight=False)
        raise typer.Exit


@app.callback(help=(regard.__doc__ or "") + "\n\nStart with: `regard doctor --model PATH`")
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
        frame = traced.frame()
        rows = frame.astype(object).where(frame.notna(), None).to_dict(orient="records")  # JSON has no NaN
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
        looks = ("–", "–") if row["entropy"] is None else (f"{row['entropy']:.2f}", f"{row['special_share']:.0%}")
        numbers = (*looks, f"{row['error']:.0e}")
        table.add_row(row["site"], row["kind"], str(row["heads"]), shape, *numbers)
    shown.print(table)
    shown.print(
        "shape: examples × heads × queries × keys. entropy (nats; 0: one key) and special (share on special tokens): "
        "as seen from the readout, mean over heads and texts (–: its rows are not the readout's). error: "
        "max |A·V − output| / max |output|.",
        style="dim",
    )
    for entry in traced.ignored:
        shown.print(f"ignored {entry.name} {entry.shape}: {entry.reason}", style="dim", markup=False)


@app.command("doctor", help=DOCTOR_HELP)
def _doctor(
    model: Annotated[str, typer.Option(help="A local folder, a GGUF file, or a hub name.")],
    text: Annotated[list[str] | None, typer.Option(help="A text to try; may be given several times.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to try; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a page.")] = False,
) -> None:
    if told.is_terminal:
        told.print(f"loading {model}", style="dim", markup=False, highlight=False)
    subject = open_subject(model)
    sees = hasattr(subject, "picture")
    if image and not sees:
        raise InputError(f"--image {image[0]}: {model} reads texts. Pass --text.")
    if text and sees:
        raise InputError(f"--text {text[0]!r}: {model} looks at pictures. Pass --image.")
    with _waiting("examining"):
        found = regard.diagnose(subject, image or np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
                                if sees else text or STAND_IN)  # fmt: skip
    if as_json:
        sys.stdout.write(json.dumps({"path": model, **found.to_dict()}, indent=2) + "\n")
    else:
        _show(model, found)
    if not found.works:
        raise typer.Exit(1)


def _show(model: str, found: Diagnosis) -> None:
    """The page of `regard doctor`."""
    facts = found.model
    lines = {
        "model": f"{facts['class']}, {facts['parameters'] / 1e6:,.1f} M parameters, {facts['precision']}, on "
        f"{facts['device']}; attention backend: {facts['backend']}",
        "tried on": f"{found.examples[0]} example(s) of up to {found.examples[1]} rows; a forward pass takes "
        f"{1000 * found.seconds:.0f} ms",
        "readout": found.readout,
        "error": "nothing was traced"
        if found.error is None
        else f"{found.error:.0e} (max |A·V − output| / max |output|)",
    }
    shown.print(model, style="bold", markup=False, highlight=False, soft_wrap=True)
    facts_table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, line in lines.items():
        facts_table.add_row(Text(name, style="dim"), Text(line))
    shown.print(facts_table)
    shown.print()
    sites = Table(box=None, padding=(0, 2, 0, 0), title="attention sites", title_justify="left")
    for column in ("kind", "number", "heads", "shape", "weights", "names"):
        sites.add_column(column, no_wrap=column != "names", overflow="fold")
    for row in found.sites.to_dict(orient="records"):
        names = row["first"] if row["number"] == 1 else f"{row['first']} … {row['last']}"
        shape = "×".join(map(str, row["shape"]))
        sites.add_row(row["kind"], str(row["number"]), str(row["heads"]), shape, row["weights"], Text(names))
    shown.print(sites if found.sites.size else Text("attention sites: none"))
    for entry in found.ignored:
        shown.print(f"ignored {entry.name} {entry.shape}: {entry.reason}", style="dim", markup=False)
    shown.print()
    abilities = Table(box=None, padding=(0, 2, 0, 0), title="what it can serve", title_justify="left")
    for column, wraps in (
        ("", False),
        ("", False),
        ("cost", False),
        ("for methods and trials such as", True),
        ("measured", True),
    ):
        abilities.add_column(column, no_wrap=not wraps)
    for ability in found.abilities:
        mark = Text("yes", style="green") if ability.works else Text("no", style="red")
        cost = "" if ability.passes is None else f"{ability.passes:.1f} passes"
        abilities.add_row(ability.name, mark, cost, ability.serves, ability.said if ability.works else "see below")
    shown.print(abilities)
    shown.print("cost: in plain forward passes on these examples, as measured once", style="dim")
    for line in found.advice:
        shown.print()
        shown.print(Text("→ " + line))


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
