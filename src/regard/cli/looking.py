"""Commands that look at a model: doctor, trace, explain, methods."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import options
from regard.cli.shared import known, must_end_in, open_model, option, target_of, wake
from regard.errors import InputError, must_know
from regard.progress import Counter

if TYPE_CHECKING:
    from regard.explanation import Explanation
    from regard.types import Subject

STAND_IN = "The quick brown fox jumps over the lazy dog."


def trace(
    model: options.MODEL,
    text: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text to run it on; may be given several times.")
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A picture to run it on; may be given several times.")
    ] = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    json: options.JSON = False,
) -> None:
    """Run a model once, and show its sites."""
    if not text and not image:
        raise InputError("there is nothing to run the model on: pass --text, or --image to one that looks at pictures.")
    subject = open_model(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
    inputs, _ = _inputs(subject, model, text, image)
    from regard.attention import trace
    from regard.cli.consoles import print_json
    from regard.cli.showing import show_sites

    with Counter("tracing", None):
        traced = trace(subject, inputs)
        frame = traced.frame()
        rows = frame.astype(object).where(frame.notna(), None).to_dict(orient="records")  # JSON has no NaN
    if not json:
        show_sites(model, rows, traced.ignored)
        return
    ignored = [vars(entry) for entry in traced.ignored]
    print_json({"model": model, "special": traced.special, "readout": traced.check.readout,
                "error": traced.check.error, "sites": rows, "ignored": ignored})  # fmt: skip


def explain(
    model: options.MODEL,
    method: Annotated[
        str, typer.Option(metavar="TEXT", help="A name from `regard methods`.", autocompletion=options.methods)
    ],
    text: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text to explain; may be given several times.")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A file of texts, a line each; '-': standard input.")
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A picture to explain; may be given several times.")
    ] = None,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
    of: Annotated[
        str | None, typer.Option(metavar="TEXT", help="'logit', 'probability' or 'logprob'; else the paper's.")
    ] = None,
    options_: options.OPTION = None,
    generate: Annotated[
        int | None, typer.Option(metavar="N", help="Explain each of so many tokens that follow.")
    ] = None,
    continuation: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Explain each token of this continuation.")
    ] = None,
    special: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Special tokens: 'keep', 'drop' or 'renormalise'.")
    ] = None,
    sink: Annotated[
        str, typer.Option(metavar="TEXT", help="The first token of a decoder: 'keep', 'drop' or 'renormalise'.")
    ] = "keep",
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many words the table shows.")] = 10,
    html: options.PAGE = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    json: options.JSON = False,
) -> None:
    """Attribute predictions to what was read."""
    if sum(given is not None for given in (text, texts, image)) != 1:
        raise InputError("pass one of --text, --texts and --image: what is to be explained.")
    must_end_in(".html", "html", html)
    must_know("method", method, known("methods"))
    given = dict(map(option, options_ or ()))
    wake()
    from regard.catalog import method_named

    chosen = method_named(method)
    wanted = chosen.chosen(given)
    subject: Any = open_model(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
    chunks: Iterable[Any] = [_inputs(subject, model, text, image)[0]] if texts is None else _lines(texts)
    explains_a_number = chosen.family == "reference" or "gradients" in chosen.needs
    if target is None and similar_to is None and not subject.predicts and explains_a_number:
        raise InputError(f"--method {method} explains a number, and {model} has no classes. Pass --similar-to TEXT.")
    settings: dict[str, Any] = {
        "method": method, "target": target_of(subject, target, similar_to), "of": of, "special": special, "sink": sink,
        "generate": generate, "continuation": continuation, **wanted,
    }  # fmt: skip
    found = _explained(subject, chunks, settings, keep=html is not None, top=None if json else top)
    if html:
        _write_page(found, html)


def _explained(
    subject: Any, chunks: Iterable[Any], settings: dict[str, Any], *, keep: bool, top: int | None
) -> list[Explanation]:
    """Explain and print, some inputs at a time; ``top=None``: as lines of JSON."""
    import json as jsons

    from regard.cli.showing import show_explanation
    from regard.explaining import explain

    found: list[Explanation] = []
    alone = settings["generate"] is not None or settings["continuation"] is not None
    for chunk in chunks:
        for inputs in chunk if alone else [chunk]:
            with Counter("explaining", None):
                whys = explain(subject, inputs, **settings)
            for why in whys:
                if top is None:
                    sys.stdout.write(jsons.dumps(why.to_dict(), ensure_ascii=False) + "\n")
                else:
                    show_explanation(why, top)
            found += whys if keep else []
    return found


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


def _write_page(found: list[Explanation], path: Path) -> None:
    from regard import draw
    from regard.cli.consoles import tell_written

    if len(found) == 1:
        found[0].to_html(path)
    else:
        parts = [(f"{number}. {why.target}", [why.plot()]) for number, why in enumerate(found, 1)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw.page(f"{len(found)} explanations", found[0].method, parts), encoding="utf-8")
    tell_written(path)


def methods(json: options.JSON = False) -> None:
    """List the methods."""
    wake()
    from regard.catalog import list_methods
    from regard.cli.consoles import print_json
    from regard.cli.showing import show_methods

    rows = list_methods().to_dict(orient="records")
    print_json(rows) if json else show_methods(rows)


def doctor(
    model: options.MODEL,
    text: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text to try; may be given several times.")
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A picture to try; may be given several times.")
    ] = None,
    trust_remote_code: options.TRUST = False,
    json: options.JSON = False,
) -> None:
    """Find out what can be asked of a model."""
    subject = open_model(model, trust_remote_code=trust_remote_code)
    inputs, named = _inputs(subject, model, text, image)
    from regard.cli.consoles import print_json
    from regard.cli.showing import show_diagnosis
    from regard.diagnosis import diagnose

    with Counter("examining", None, patience=0.5):
        found = diagnose(subject, inputs)
    if json:
        print_json({"path": model, "tried on": named, **found.to_dict()})
    else:
        show_diagnosis(model, named, found)
    if not found.works:
        raise typer.Exit(1)


def _inputs(subject: Subject, model: str, text: list[str] | None, image: list[str] | None) -> tuple[Any, str]:
    """What to try, or a stand-in, and what to call it."""
    import numpy as np

    columns = getattr(getattr(subject, "schema", None), "columns", None)
    if columns is not None:
        if given := text or image:
            raise InputError(
                f"{given[0]!r}: {model} reads rows of a table. Use regard audit --model {model} --data FILE."
            )
        return _typical(columns), "two rows made of what is usual in its columns"
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


def _typical(columns: Any) -> Any:
    """Two rows with what a table's columns usually hold."""
    import pandas as pd

    def cells(one: Any) -> list[Any]:
        return [one.center, one.center + one.scale] if one.kind == "number" else [one.categories[0], one.categories[-1]]

    return pd.DataFrame({one.name: cells(one) for one in columns})
