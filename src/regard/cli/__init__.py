"""The command line: arguments in, tables or JSON out. No logic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import regard
from regard.cli.showing import (
    show_comparison,
    show_diagnosis,
    show_explanation,
    show_methods,
    show_sites,
    shown,
    told,
)  # fmt: skip
from regard.data import read
from regard.data.planted import TASKS
from regard.errors import InputError, RegardError
from regard.subjects import open_subject
from regard.types import Subject

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
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
EXPLAIN_HELP = """Attribute a prediction to the words of a text, or the patches of a picture.

Examples:

* `regard explain --model path/to/classifier --text "a moving film" --method grad_rollout --target good`
* `regard explain --model path/to/encoder --text "a moving film" --method norm --option layers=rollout --html why.html`
* `regard explain --model SmolLM2.gguf --text "The capital of France is" --method grad_rollout --generate 5`
* `regard explain --model path/to/classifier --texts reviews.txt --method rollout --json > explanations.jsonl`
"""
METHODS_HELP = """List the methods: what each computes, what it needs and costs, and where it was published.

Examples:

* `regard methods`
* `regard methods --json`
"""
COMPARE_HELP = """Put methods side by side on your data: which agree, and which point at words that matter?

Examples:

* `regard compare --model path/to/classifier --data reviews.csv --html comparison.html`
* `regard compare --model path/to/classifier --data posts.jsonl --method rollout --method leave_one_out`
* `regard compare --model path/to/classifier --data reviews.csv --method gradient:norm=l2,through_attention=false`
* `regard compare --planted shortcut`
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
TARGET = Annotated[str | None, typer.Option(help="A label, token or class number; else the predicted.")]
SIMILAR = Annotated[
    str | None, typer.Option(help="For plain encoders: explain the similarity to this text or picture.")
]
OVER_LIMIT = Annotated[str, typer.Option(help="A text over the model's limit: 'error', 'truncate' or 'allow'.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("trace", help=TRACE_HELP)
def _trace(
    model: MODEL,
    text: Annotated[list[str] | None, typer.Option(help="A text to run it on; may be given several times.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to run it on; may be given several times.")] = None,
    over_limit: OVER_LIMIT = "error",
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
    show_sites(model, rows, traced.ignored)


@app.command("explain", help=EXPLAIN_HELP)
def _explain(
    model: MODEL,
    method: Annotated[str, typer.Option(help="A name from `regard methods`.")],
    text: Annotated[list[str] | None, typer.Option(help="A text to explain; may be given several times.")] = None,
    texts: Annotated[Path | None, typer.Option(help="A file of texts, a line each; '-': standard input.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to explain; may be given several times.")] = None,
    target: TARGET = None,
    similar_to: SIMILAR = None,
    of: Annotated[str | None, typer.Option(help="'logit', 'probability' or 'logprob'; else the paper's.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the method, name=value; may be given several times.")
    ] = None,
    generate: Annotated[int | None, typer.Option(help="Explain each of so many tokens that follow.")] = None,
    continuation: Annotated[str | None, typer.Option(help="Explain each token of this continuation.")] = None,
    special: Annotated[str | None, typer.Option(help="Special tokens: 'keep', 'drop' or 'renormalise'.")] = None,
    sink: Annotated[str, typer.Option(help="The first token of a decoder: 'keep', 'drop' or 'renormalise'.")] = "keep",
    top: Annotated[int, typer.Option(min=1, help="How many words the table shows.")] = 10,
    html: Annotated[Path | None, typer.Option(help="Write a page with the pictures here.")] = None,
    over_limit: OVER_LIMIT = "error",
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    if sum(given is not None for given in (text, texts, image)) != 1:
        raise InputError("pass one of --text, --texts and --image: what is to be explained.")
    if html is not None and html.suffix != ".html":
        raise InputError(f"--html {html} must end in .html.")
    chosen = regard.catalog.method_named(method)
    options = chosen.chosen(dict(map(_option, option or ())))
    subject: Any = _opened(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
    if texts is None:
        chunks: Iterable[Any] = [_inputs(subject, model, text, image)[0]]
    else:
        chunks = _lines(texts)
    explains_a_number = chosen.family == "reference" or "gradients" in chosen.needs
    if target is None and similar_to is None and not subject.predicts and explains_a_number:
        raise InputError(f"--method {method} explains a number, and {model} has no classes. Pass --similar-to TEXT.")
    wanted = _target(subject, target, similar_to)
    settings: dict[str, Any] = {"method": method, "target": wanted, "of": of, "special": special, "sink": sink,
                                "generate": generate, "continuation": continuation}  # fmt: skip
    found: list[regard.Explanation] = []
    for chunk in chunks:
        for inputs in chunk if generate is not None or continuation is not None else [chunk]:
            whys = regard.explain(subject, inputs, **settings, **options)
            for why in whys:
                if as_json:
                    sys.stdout.write(json.dumps(why.to_dict(), ensure_ascii=False) + "\n")
                else:
                    show_explanation(why, top)
            found += whys if html else []
    if html:
        _write_page(found, html)
        told.print(f"written: {html}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _target(subject: Any, target: str | None, similar_to: str | None) -> Any:
    """What is explained: a class by number, a label or token by name, or the similarity to another input."""
    if similar_to is not None:
        return subject.similarity(similar_to)
    if target is not None and target.isdigit() and not hasattr(subject, "produce"):
        return int(target)
    return target


def _option(given: str) -> tuple[str, Any]:
    """``name=value``; numbers, true, false and null are what they look like."""
    name, equals, value = given.partition("=")
    if not equals:
        raise InputError(f"--option {given!r} is not name=value, such as layers=rollout.")
    try:
        return name.replace("-", "_"), json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name.replace("-", "_"), value


def _lines(path: Path) -> Iterator[list[str]]:
    """The texts of a file, some at a time."""
    try:
        with nullcontext(sys.stdin) if str(path) == "-" else path.open(encoding="utf-8") as file:
            lines = (line.rstrip("\r\n") for line in file)
            filled = (line for line in lines if line.strip())
            while some := list(islice(filled, 32)):
                yield some
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"--texts {path}: cannot be read: {problem}. It takes a text file in UTF-8.") from None


def _write_page(found: list[regard.Explanation], path: Path) -> None:
    if len(found) == 1:
        found[0].to_html(path)
        return
    parts = [(f"{number}. {why.target}", [why.plot()]) for number, why in enumerate(found, 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(regard.draw.page(f"{len(found)} explanations", found[0].method, parts), encoding="utf-8")


@app.command("compare", help=COMPARE_HELP)
def _compare(
    model: Annotated[str | None, typer.Option(help="A local folder, a GGUF file, or a hub name.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="A .csv, .tsv, .jsonl or .parquet file, or an ERASER folder.")
    ] = None,
    planted: Annotated[
        str | None,
        typer.Option(help=f"Instead: train a small model on a task whose truth is known: {', '.join(TASKS)}."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method, or method:option=value,…; may be given several times.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column of texts.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of labels.")] = None,
    rationale: Annotated[str | None, typer.Option(help="The column of rationales.")] = None,
    target: TARGET = None,
    similar_to: SIMILAR = None,
    examples: Annotated[int, typer.Option(help="How many examples are drawn from the data.")] = 200,
    how: Annotated[
        str | None, typer.Option(help="Words are removed by 'delete', 'mask', 'pad' or 'attention'.")
    ] = None,
    on_bad: Annotated[str, typer.Option(help="Rows that cannot be used: 'raise' or 'skip'.")] = "raise",
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn by lot.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write a page with tables and pictures here.")] = None,
    over_limit: OVER_LIMIT = "error",
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    if (planted is None) == (model is None or data is None) or (planted and (model or data)):
        raise InputError("pass --model and --data, or --planted alone: what is to be compared on what.")
    if html is not None and html.suffix != ".html":
        raise InputError(f"--html {html} must end in .html.")
    methods = None if method is None else [_method(one) for one in method]
    if planted is not None:
        found = regard.compare_planted(planted, methods=methods, examples=examples, seed=seed)
    else:
        options: Any = {"text": text, "label": label, "rationale": rationale, "on_bad": on_bad}
        assert model is not None
        assert data is not None
        read_from = regard.data.read_eraser(data, on_bad=on_bad) if data.is_dir() else read(data, **options)  # type: ignore[arg-type]
        subject = _opened(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
        if target is None and similar_to is None and not subject.predicts:
            raise InputError(f"{model} has no classes to explain. Pass --similar-to TEXT.")
        asked: Any = {"methods": methods, "examples": examples, "how": how, "seed": seed}
        found = regard.compare(subject, read_from, target=_target(subject, target, similar_to), **asked)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        show_comparison(found)
    if html:
        found.to_html(html)
        told.print(f"written: {html}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _method(given: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name:option=value,option=value``."""
    name, _, options = given.partition(":")
    return name, dict(_option(one) for one in options.split(",") if one)


@app.command("methods", help=METHODS_HELP)
def _methods(as_json: AS_JSON = False) -> None:
    rows = regard.list_methods().to_dict(orient="records")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return
    show_methods(rows)


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
        show_diagnosis(model, named, found)
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
