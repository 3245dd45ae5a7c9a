"""The command line: arguments in, tables or JSON out. No logic."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import regard
from regard.cli import helps, options
from regard.cli.showing import (
    show_comparison,
    show_diagnosis,
    show_explanation,
    show_finding,
    show_methods,
    show_sites,
    show_trials,
    shown,
    told,
)  # fmt: skip
from regard.data import read
from regard.errors import InputError, RegardError
from regard.subjects import open_subject
from regard.types import Subject

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
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


@app.command("trace", help=helps.TRACE_HELP)
def _trace(
    model: options.MODEL,
    text: Annotated[list[str] | None, typer.Option(help="A text to run it on; may be given several times.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to run it on; may be given several times.")] = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    as_json: options.AS_JSON = False,
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


@app.command("explain", help=helps.EXPLAIN_HELP)
def _explain(
    model: options.MODEL,
    method: Annotated[str, typer.Option(help="A name from `regard methods`.")],
    text: Annotated[list[str] | None, typer.Option(help="A text to explain; may be given several times.")] = None,
    texts: Annotated[Path | None, typer.Option(help="A file of texts, a line each; '-': standard input.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to explain; may be given several times.")] = None,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
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
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    as_json: options.AS_JSON = False,
) -> None:
    if sum(given is not None for given in (text, texts, image)) != 1:
        raise InputError("pass one of --text, --texts and --image: what is to be explained.")
    if html is not None and html.suffix != ".html":
        raise InputError(f"--html {html} must end in .html.")
    chosen = regard.catalog.method_named(method)
    given = chosen.chosen(dict(map(_option, option or ())))
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
            whys = regard.explain(subject, inputs, **settings, **given)
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
        raise InputError(f"--option {given!r} is not name=value.")
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


@app.command("compare", help=helps.COMPARE_HELP)
def _compare(
    model: options.MAYBE_MODEL = None,
    data: options.DATA = None,
    planted: options.PLANTED = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method, or method:option=value,…; may be given several times.")
    ] = None,
    text: options.TEXT_COLUMN = None,
    label: options.LABEL_COLUMN = None,
    rationale: options.RATIONALE_COLUMN = None,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
    examples: options.EXAMPLES = 200,
    how: options.HOW = None,
    on_bad: options.ON_BAD = "raise",
    seed: options.SEED = 0,
    html: options.PAGE = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    as_json: options.AS_JSON = False,
) -> None:
    _must_name(model, data, planted, html)
    methods = None if method is None else [_method(one) for one in method]
    if planted is not None:
        found = regard.compare_planted(planted, methods=methods, examples=examples, seed=seed)
    else:
        read_from = _read(data, text, label, rationale, on_bad)
        subject, wanted = _asked(model, target, similar_to, over_limit, trust_remote_code)
        asked: Any = {"methods": methods, "examples": examples, "how": how, "seed": seed}
        found = regard.compare(subject, read_from, target=wanted, **asked)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        show_comparison(found)
    _write(found, html)


@app.command("trial", help=helps.TRIAL_HELP)
def _trial(
    name: Annotated[str, typer.Argument(help="A name from `regard trials`.")],
    model: options.MAYBE_MODEL = None,
    data: options.DATA = None,
    planted: options.PLANTED = None,
    method: Annotated[
        str | None, typer.Option(help="The explanation on trial: a method, or method:option=value,…; else raw.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the trial, name=value; may be given several times.")
    ] = None,
    sites: Annotated[
        str, typer.Option(help="Which attention is edited: 'last', 'all', or numbers and names, with commas.")
    ] = "last",
    text: options.TEXT_COLUMN = None,
    label: options.LABEL_COLUMN = None,
    rationale: options.RATIONALE_COLUMN = None,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
    examples: options.EXAMPLES = 200,
    how: options.HOW = None,
    on_bad: options.ON_BAD = "raise",
    seed: options.SEED = 0,
    html: options.PAGE = None,
    save: Annotated[Path | None, typer.Option(help="Write the finding with its raw values here, as .json.")] = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    as_json: options.AS_JSON = False,
) -> None:
    _must_name(model, data, planted, html)
    given = dict(map(_option, option or ()))
    regard.trying.trial_named(name).chosen(given)
    if save is not None and save.suffix != ".json":
        raise InputError(f"--save {save} must end in .json.")
    asked: Any = {"method": method and _method(method), "examples": examples, "how": how, "seed": seed, **given}
    asked["sites"] = (
        sites if sites in ("last", "all") else [int(one) if one.isdigit() else one for one in sites.split(",")]
    )
    if planted is not None:
        subject, read_from = regard.training.fit_planted(planted, seed=seed)
        wanted = None
    else:
        read_from = _read(data, text, label, rationale, on_bad)
        subject, wanted = _asked(model, target, similar_to, over_limit, trust_remote_code)
    with _unlogged():  # warnings are part of what is shown
        found = regard.trial(subject, read_from, name, target=wanted, **asked)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        show_finding(found)
    _write(found, html)
    if save is not None:
        found.save(save)
        told.print(f"written: {save}", style="dim", markup=False, highlight=False, soft_wrap=True)


@app.command("trials", help=helps.TRIALS_HELP)
def _trials(as_json: options.AS_JSON = False) -> None:
    rows = regard.list_trials().to_dict(orient="records")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return
    show_trials(rows)


def _must_name(model: str | None, data: Path | None, planted: str | None, html: Path | None) -> None:
    """Refuse what is named twice, or not at all."""
    if (planted is None) == (model is None or data is None) or (planted and (model or data)):
        raise InputError("pass --model and --data, or --planted alone: what is to be tried on what.")
    if html is not None and html.suffix != ".html":
        raise InputError(f"--html {html} must end in .html.")


def _read(data: Path | None, text: str | None, label: str | None, rationale: str | None, on_bad: str) -> Any:
    """The data of a file, or of an ERASER folder."""
    assert data is not None
    columns: Any = {"text": text, "label": label, "rationale": rationale, "on_bad": on_bad}
    return regard.data.read_eraser(data, on_bad=on_bad) if data.is_dir() else read(data, **columns)  # type: ignore[arg-type]


def _asked(
    model: str | None, target: str | None, similar_to: str | None, over_limit: str, trust_remote_code: bool
) -> tuple[Any, Any]:
    """The model, and what is explained of it."""
    assert model is not None
    subject = _opened(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
    if target is None and similar_to is None and not subject.predicts:
        raise InputError(f"{model} has no classes to explain. Pass --similar-to TEXT.")
    return subject, _target(subject, target, similar_to)


def _write(found: Any, html: Path | None) -> None:
    if html is not None:
        found.to_html(html)
        told.print(f"written: {html}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _method(given: str) -> tuple[str, dict[str, Any]]:
    """``name`` or ``name:option=value,option=value``."""
    name, _, rest = given.partition(":")
    return name, dict(_option(one) for one in rest.split(",") if one)


@app.command("methods", help=helps.METHODS_HELP)
def _methods(as_json: options.AS_JSON = False) -> None:
    rows = regard.list_methods().to_dict(orient="records")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return
    show_methods(rows)


@app.command("doctor", help=helps.DOCTOR_HELP)
def _doctor(
    model: options.MODEL,
    text: Annotated[list[str] | None, typer.Option(help="A text to try; may be given several times.")] = None,
    image: Annotated[list[str] | None, typer.Option(help="A picture to try; may be given several times.")] = None,
    trust_remote_code: options.TRUST = False,
    as_json: options.AS_JSON = False,
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
def _unlogged() -> Iterator[None]:
    """No warnings on stderr, for the length of a block."""
    logger = logging.getLogger("regard")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


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
    except (RegardError, OSError) as problem:
        told.print(f"error: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
