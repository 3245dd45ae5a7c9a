"""Commands that put explanations side by side or on trial: compare, trial, trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import options
from regard.cli.shared import (
    asked_of,
    known,
    must_end_in,
    must_name,
    option,
    processes_of,
    read,
    recipe_of,
    several,
    wake,
)
from regard.errors import InputError, must_know
from regard.progress import Counter, unlogged


def compare(
    model: options.MAYBE_MODEL = None,
    data: options.DATA = None,
    planted: options.PLANTED = None,
    methods: options.METHODS = None,
    text_column: options.TEXT_COLUMN = None,
    label_column: options.LABEL_COLUMN = None,
    rationale_column: options.RATIONALE_COLUMN = None,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
    limit: options.LIMIT = 200,
    how: options.HOW = None,
    on_bad: options.ON_BAD = "raise",
    seed: options.SEED = 0,
    html: options.PAGE = None,
    workers: options.WORKERS = None,
    threads: options.THREADS = None,
    runner: options.RUNNER = "local",
    address: options.ADDRESS = None,
    gpus_per_worker: options.GPUS = 0.0,
    timeout: options.TIMEOUT = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    json: options.JSON = False,
) -> None:
    """Put methods side by side."""
    must_name(model, data, planted)
    must_end_in(".html", "html", html)
    where: Any = {"address": address, "gpus_per_worker": gpus_per_worker, "timeout": timeout,
                  "workers": processes_of(workers, runner, trust_remote_code)}  # fmt: skip
    from regard.jobs.running import runner_of

    runner_of(runner, **where)  # before anything is loaded
    if planted is not None and (workers or runner != "local"):
        raise InputError("--planted trains one small model and compares here: leave --workers and --runner out.")
    chosen = None if methods is None else several(methods)
    for name, _ in chosen or ():
        must_know("method", name, known("methods"))
    if planted is not None:
        wake()
        from regard.comparing import compare_planted

        with Counter("comparing", None):
            found = compare_planted(planted, methods=chosen, examples=limit, seed=seed)
    else:
        assert model is not None
        assert data is not None
        read_from = read(data, text_column, label_column, rationale_column, on_bad, model)
        subject, wanted = asked_of(model, target, similar_to, over_limit, trust_remote_code)
        from regard.comparing import compare as compare_them

        asked: Any = {"methods": chosen, "examples": limit, "how": how, "seed": seed, "threads": threads}
        with Counter("comparing", None):
            found = compare_them(subject, read_from, target=wanted, runner=runner, **asked, **where)
    from regard.cli.consoles import print_json, tell_written
    from regard.cli.showing import show_comparison

    print_json(found.to_dict()) if json else show_comparison(found)
    if html is not None:
        found.to_html(html)
        tell_written(html)


def trial(
    name: Annotated[str, typer.Argument(help="A name from `regard trials`.", autocompletion=options.trials)],
    model: options.MAYBE_MODEL = None,
    data: options.DATA = None,
    planted: options.PLANTED = None,
    recipe: options.RECIPE = None,
    recipe_options: options.RECIPE_OPTION = None,
    method: options.METHOD = None,
    options_: options.OPTION = None,
    sites: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Which attention is edited: 'last', 'all', or numbers and names, with commas."
        ),
    ] = "last",
    text_column: options.TEXT_COLUMN = None,
    label_column: options.LABEL_COLUMN = None,
    rationale_column: options.RATIONALE_COLUMN = None,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
    limit: options.LIMIT = 200,
    how: options.HOW = None,
    on_bad: options.ON_BAD = "raise",
    seed: options.SEED = 0,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="How many models are trained at a time.")] = 1,
    html: options.PAGE = None,
    save: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the finding with its raw values here, as .json.")
    ] = None,
    over_limit: options.OVER_LIMIT = "error",
    trust_remote_code: options.TRUST = False,
    json: options.JSON = False,
) -> None:
    """Put attention on trial."""
    must_name(model, data, planted, recipe)
    must_end_in(".html", "html", html)
    must_end_in(".json", "save", save)
    must_know("trial", name, known("trials"))
    given = dict(map(option, options_ or ()))
    by = several([method])[0] if method else None
    if by is not None:
        must_know("method", by[0], known("methods"))
    columns = text_column, label_column, rationale_column
    read_from = None if data is None else read(data, *columns, on_bad, model, recipe)
    wake()
    from regard.trying import trial as put_on_trial
    from regard.trying import trial_named

    trial_named(name).chosen(given)
    asked: Any = {"method": by, "examples": limit, "how": how, "seed": seed, **given}
    asked["sites"] = (
        sites if sites in ("last", "all") else [int(one) if one.isdigit() else one for one in sites.split(",")]
    )
    if recipe is not None:
        subject, wanted, asked["workers"] = recipe_of(recipe, model, recipe_options), None, workers
    else:
        subject, read_from, wanted = subject_of(
            model, read_from, planted, seed, target=target, similar_to=similar_to, over_limit=over_limit,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    with unlogged(), Counter(name, None):
        found = put_on_trial(subject, read_from, name, target=wanted, **asked)
    from regard.cli.consoles import print_json, tell_written
    from regard.cli.showing import show_finding

    print_json(found.to_dict()) if json else show_finding(found)
    if html is not None:
        found.to_html(html)
        tell_written(html)
    if save is not None:
        found.save(save)
        tell_written(save)


def subject_of(
    model: str | None,
    data: Any,
    planted: str | None,
    seed: int,
    *,
    target: str | None,
    similar_to: str | None,
    over_limit: str,
    trust_remote_code: bool,
) -> tuple[Any, Any, Any]:
    """What is on trial: a model that is loaded or trained, its data, and what is explained."""
    if planted is None:
        assert model is not None
        subject, wanted = asked_of(model, target, similar_to, over_limit, trust_remote_code)
        return subject, data, wanted
    from regard.training import fit_planted

    with Counter(f"training a model on {planted}", None, patience=0):
        subject, made = fit_planted(planted, seed=seed)
    return subject, replace(made, test=replace(made.test, source=f"the planted task {planted}")), None


def trials(json: options.JSON = False) -> None:
    """List the trials."""
    wake()
    from regard.cli.consoles import print_json
    from regard.cli.showing import show_trials
    from regard.trying import list_trials

    rows = list_trials().to_dict(orient="records")
    print_json(rows) if json else show_trials(rows)
