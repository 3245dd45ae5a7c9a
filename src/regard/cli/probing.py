"""Commands about heads and layers: heads, probes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import options
from regard.cli.shared import known, must_end_in, must_name, open_model, read, several, target_of, wake
from regard.errors import InputError, must_know
from regard.progress import unlogged


def heads(
    model: options.MODEL,
    data: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="A .csv, .tsv, .jsonl or .parquet file; .conllu, GAP's .tsv, facts as .json."
        ),
    ],
    probes: options.PROBES = None,
    text_column: options.TEXT_COLUMN = None,
    label_column: options.LABEL_COLUMN = None,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
    limit: options.LIMIT = 200,
    on_bad: options.ON_BAD = "raise",
    seed: options.SEED = 0,
    html: options.PAGE = None,
    save: Annotated[Path | None, typer.Option(metavar="PATH", help="Write all numbers here, as .json.")] = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    json: options.JSON = False,
) -> None:
    """Ask what the heads and layers of a model do."""
    must_name(model, data, None)
    must_end_in(".html", "html", html)
    must_end_in(".json", "save", save)
    chosen = None if probes is None else several(probes)
    if chosen == []:
        raise InputError(f"--probes {','.join(probes or ())!r} names none. `regard probes` lists them.")
    for name, _ in chosen or ():
        must_know("probe", name, known("probes"))
    read_from = read(data, text_column, label_column, None, on_bad, model)
    subject: Any = open_model(model, over_limit=over_limit, trust_remote_code=trust_remote_code)
    from regard.cli.consoles import print_json, tell_written
    from regard.cli.showing import show_heads
    from regard.surveying import DEFAULT
    from regard.surveying import heads as survey

    if target is not None and not subject.predicts:
        raise InputError(f"--target {target}: {model} has no classes. Pass --similar-to TEXT.")
    wanted = target_of(subject, target, similar_to)
    asked: Any = {"probes": chosen or DEFAULT, "examples": limit, "seed": seed, "target": wanted}
    with unlogged():
        found = survey(subject, read_from, **asked)
    print_json(found.to_dict()) if json else show_heads(found)
    for path, write in ((save, found.save), (html, found.to_html)):  # numbers first
        if path is not None:
            write(path)
            tell_written(path)


def probes(json: options.JSON = False) -> None:
    """List the probes."""
    wake()
    from regard.cli.consoles import print_json
    from regard.cli.showing import show_probes
    from regard.surveying import list_probes

    rows = list_probes().to_dict(orient="records")
    print_json(rows) if json else show_probes(rows)
