"""The command line: arguments in, tables or JSON out. No logic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import regard
from regard.diagnosis import Diagnosis
from regard.errors import InputError, RegardError
from regard.subjects import open_subject
from regard.types import Subject

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


MODEL = Annotated[str, typer.Option(help="A local folder, a GGUF file, or a hub name.")]
TRUST = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("trace", help=TRACE_HELP)
def _trace(
    model: MODEL,
    text: Annotated[list[str] | None, typer.Option(help="A text to run it on; may be given several times.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to run it on; may be given several times.")] = None,
    over_limit: Annotated[
        str, typer.Option(help="A text over the model's limit is an 'error', 'truncate'd or 'allow'ed.")
    ] = "error",
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    if not text and not image:
        raise InputError("there is nothing to run the model on: pass --text, or --image to one that looks at pictures.")
    subject = _opened(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
    inputs, _ = _inputs(subject, model, text, image)
    with _waiting("tracing"):
        traced = regard.trace(subject, inputs)
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
    model: MODEL,
    text: Annotated[list[str] | None, typer.Option(help="A text to try; may be given several times.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to try; may be given several times.")] = None,
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    subject = _opened(model, trust_remote_code=trust_remote_code)
    inputs, named = _inputs(subject, model, text, image)
    with _waiting("examining"):
        found = regard.diagnose(subject, inputs)
    if as_json:
        sys.stdout.write(json.dumps({"path": model, "tried on": named, **found.to_dict()}, indent=2) + "\n")
    else:
        _show(model, named, found)
    if not found.works:
        raise typer.Exit(1)


def _inputs(subject: Subject, model: str, text: list[str] | None, image: list[str] | None) -> tuple[Any, str]:
    """What to try, or a stand-in, and what to call it."""
    sees = hasattr(subject, "picture")
    if image and not sees:
        raise InputError(f"--image {image[0]}: {model} reads texts. Pass --text.")
    if text and sees:
        raise InputError(f"--text {text[0]!r}: {model} looks at pictures. Pass --image.")
    given = image if sees else text
    if given:
        return given, ", ".join(map(repr, given))
    if sees:
        return np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), "a picture of noise"
    return STAND_IN, repr(STAND_IN)


def _show(model: str, named: str, found: Diagnosis) -> None:
    """The page of `regard doctor`."""
    facts = found.model
    saved = facts["saved as"]
    kind = (
        facts["class"] if saved in (None, facts["class"]) else f"{facts['class']} (saved as {saved}: without its head)"
    )
    count = facts["parameters"]
    size = f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}"
    lines = {
        "model": f"{kind}, {size} parameters, {facts['precision']}, on {facts['device']}; "
        f"attention: {facts['backend']}",
        "tried on": f"{named}: examples {found.examples[0]}, rows up to {found.examples[1]}; a forward pass takes "
        f"{1000 * found.seconds:.0f} ms",
        "readout": found.readout,
        "error": "–" if found.error is None else f"{found.error:.0e} between recomputed weights × values and the model",
    }
    shown.print(model, style="bold", markup=False, highlight=False, soft_wrap=True)
    facts_table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, line in lines.items():
        facts_table.add_row(Text(name, style="dim"), Text(line))
    shown.print(facts_table)
    shown.print("\nattention sites" if len(found.sites) else "\nattention sites: none", style="bold", highlight=False)
    for row in found.sites.to_dict(orient="records"):
        shape = "×".join(map(str, row["shape"]))
        line = f"{row['number']} {row['kind']}, {row['heads']} heads, {shape}, {row['weights']}: {row['names']}"
        shown.print(Padding(Text(line), (0, 0, 0, 2)))
    if len(found.sites):
        shown.print("  shape: examples × heads × queries × keys", style="dim", highlight=False)
    for entry in found.ignored:
        shown.print(Padding(Text(f"ignored: {entry.name} {entry.shape}: {entry.reason}", style="dim"), (0, 0, 0, 2)))
    shown.print("\nwhat it can serve", style="bold", highlight=False)
    abilities = Table(box=None, padding=(0, 0, 0, 2))
    abilities.add_column("", no_wrap=True)
    abilities.add_column("", no_wrap=True)
    abilities.add_column("passes", justify="right", no_wrap=True)
    abilities.add_column("needed by methods and trials such as", overflow="fold")
    abilities.add_column("measured", overflow="fold")
    for ability in found.abilities:
        mark = Text("yes", style="green") if ability.works else Text("no", style="red")
        cost = "" if ability.passes is None else f"{ability.passes:.1f}"
        abilities.add_row(ability.name, mark, cost, ability.serves, ability.said if ability.works else "see below")
    shown.print(abilities)
    shown.print("  passes: the cost, in plain forward passes on these examples", style="dim", highlight=False)
    for line in found.advice:
        shown.print(Text("\n→ " + line))


def _opened(model: str, *, over_limit: str = "error", trust_remote_code: bool) -> Subject:
    if told.is_terminal:  # transformers draws its own progress bars
        told.print(f"loading {model}", style="dim", markup=False, highlight=False)
    # open_subject refuses other values of over_limit
    return open_subject(model, over_limit=over_limit, trust_remote_code=trust_remote_code)  # type: ignore[arg-type]


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
