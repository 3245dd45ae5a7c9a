"""The main job: audit, report, diff."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import options
from regard.cli.config import take
from regard.cli.judging import subject_of
from regard.cli.shared import known, must_end_in, must_name, processes_of, read, recipe_of, several, wake
from regard.errors import InputError, StoreError, must_know
from regard.progress import Counter

if TYPE_CHECKING:
    from regard.audited import Audit
    from regard.auditing import Bench
    from regard.foreseeing import Foresight

NOT_MET, UNCLEAR = 1, 3  # exit codes
METHODS = "raw,rollout,grad_rollout"
REPORT = "report.html"  # in the folder of a run
RUN = Annotated[Path, typer.Argument(help="The folder of a run that is done: its --out.")]


def audit(
    model: options.MAYBE_MODEL = None,
    data: options.DATA = None,
    planted: options.PLANTED = None,
    recipe: options.RECIPE = None,
    recipe_options: options.RECIPE_OPTION = None,
    text_column: options.TEXT_COLUMN = None,
    label_column: options.LABEL_COLUMN = None,
    rationale_column: options.RATIONALE_COLUMN = None,
    methods: options.METHODS = [METHODS],  # noqa: B006 - typer reads it, and nobody writes to it
    trials: options.TRIALS = ["quick"],  # noqa: B006
    probes: options.PROBES = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "--examples", metavar="N", min=1, help="How many examples are drawn: 200 for quick, else 500."
        ),
    ] = None,
    seed: options.SEED = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The folder of the run; else runs/MODEL-DATA.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help=f"Write the report here; else {REPORT} in the folder.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A TOML file with the same names; command line and environment go first.",
            callback=take,
            is_eager=True,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell jobs, time, memory and disk.")] = False,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Criteria that the first method must meet, with commas; exit code 1 if not, 3 if unclear.",
        ),
    ] = None,
    redact: Annotated[bool, typer.Option("--redact", help="Leave texts out of every output.")] = False,
    shown: Annotated[int, typer.Option(metavar="N", min=0, help="How many examples the report shows.")] = 12,
    target: options.TARGET = None,
    similar_to: options.SIMILAR = None,
    how: options.HOW = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="How many examples run together.")] = 32,
    workers: options.WORKERS = None,
    threads: options.THREADS = None,
    runner: options.RUNNER = "local",
    address: options.ADDRESS = None,
    gpus_per_worker: options.GPUS = 0.0,
    timeout: options.TIMEOUT = None,
    over_limit: options.OVER_LIMIT = "error",
    on_bad: options.ON_BAD = "raise",
    trust_remote_code: options.TRUST = False,
    json: options.JSON = False,
) -> None:
    """Put the explanations of a model on trial, and judge them."""
    began = time.monotonic()
    must_name(model, data, planted, recipe)
    must_end_in(".html", "html", html)
    chosen, tried = several(methods or []), several(trials or [])
    probed = None if probes is None else [one for one in several(probes) if one != ("none", {})]
    _must_be_known(chosen, tried)
    for name, _ in probed or ():
        must_know("probe", name, known("probes"))
    folder = out or Path("runs") / _named(model or recipe, data, planted)
    if not dry_run:
        _must_be_free(folder, resume)
    columns = text_column, label_column, rationale_column
    read_from = None if data is None else read(data, *columns, on_bad, model, recipe)
    required = _criteria(require or [])
    from regard.jobs.running import runner_of

    some = processes_of(workers, runner, trust_remote_code)
    where = runner_of(runner, workers=some, address=address, gpus_per_worker=gpus_per_worker, timeout=timeout)
    wake()
    from regard.asked import PROBES, threads_of
    from regard.auditing import prepared
    from regard.trying import lab_for

    _must_be_tried(required, tried, recipe)
    lab = wanted = None
    threads = threads_of(folder) if resume and threads is None else threads
    with ExitStack() as stack:
        if recipe is not None:
            _join(stack, where.open(threads=threads), runner, address)
            made, within = recipe_of(recipe, model, recipe_options), None if dry_run else folder  # which writes nothing
            lab = lab_for(made, read_from, seed=seed, workers=workers, folder=within, runner=where)
            subject, read_from = lab.subject(), lab.test
        else:
            subject, read_from, wanted = subject_of(
                model, read_from, planted, seed, target=target, similar_to=similar_to, over_limit=over_limit,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        asked: Any = {"how": how, "limit": limit, "batch_size": batch_size, "seed": seed, "shown": shown,
                      "redact": redact, "runner": where, "command": command(), "threads": threads,
                      "probes": PROBES if probed is None else probed}  # fmt: skip
        named = tried[0][0] if _is_a_set(tried) else tried
        bench = prepared(subject, read_from, lab=lab, methods=chosen, trials=named, target=wanted, **asked)
        if not bench.called[0]:
            why = "; ".join(dict.fromkeys(f"{row['trial']}: {row['why']}" for row in bench.called[1]))
            raise InputError(f"nothing can run. {why}")
        steps = None
        if dry_run or not (resume or named == "quick"):  # a probe would take a good part of what a quick look takes
            before = time.monotonic() - began if dry_run else 0.0  # loading; a run that has begun has it behind it
            steps = _foretell(bench, before, json=json, dry_run=dry_run).steps
        if dry_run:
            return
        _join(stack, bench.open(), runner, address)
        found = bench.audit(folder, resume=resume, steps=steps)
    _hand_over(found, folder, html or folder / REPORT, json=json)
    raise typer.Exit(_code(found, required))


def _join(stack: ExitStack, where: AbstractContextManager[Any], runner: str, address: str | None) -> None:
    """Go where the work is done, in sight: it takes seconds."""
    what = "joining the cluster" if address else "starting Ray"
    with Counter(what, None, patience=0 if runner != "local" else math.inf):
        stack.enter_context(where)


def _must_be_known(methods: Sequence[tuple[str, Any]], trials: Sequence[tuple[str, Any]]) -> None:
    """Refuse unknown names by a look at folders; options are checked when the files are loaded."""
    if not methods or not trials:
        raise InputError("pass at least one of --methods and of --trials.")
    for name, _ in methods:
        must_know("method", name, known("methods"))
    if not _is_a_set(trials):
        for name, _ in trials:
            if name in ("quick", "all"):
                raise InputError(f"--trials {name} stands alone: leave the others out, or name each.")
            must_know("trial", name, known("trials"))


def _is_a_set(trials: Sequence[tuple[str, Any]]) -> bool:
    return len(trials) == 1 and trials[0][0] in ("quick", "all") and not trials[0][1]


def _named(model: str | None, data: Path | None, planted: str | None) -> str:
    """What a run is called, if nobody says."""
    if planted is not None:
        return f"planted-{planted}"
    parts = (Path(model or "").expanduser().resolve().name, (data or Path()).resolve().name.split(".")[0])
    return re.sub(r"[^\w.-]+", "_", "-".join(parts))


def _must_be_free(folder: Path, resume: bool) -> None:
    """Refuse at once what the store would refuse once the model is loaded."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"--out {folder} is a file. Choose a folder.")
    if not resume and (folder / "manifest.json").exists():
        raise StoreError(f"--out {folder} holds a run. Go on with it by --resume, or choose another --out.")


def _criteria(given: Sequence[str]) -> list[str]:
    """The names of criteria; "hard-to-manipulate" will do."""
    names = [re.sub(r"[-_ ]+", " ", one).strip() for text in given for one in text.split(",") if one.strip()]
    if names:
        from regard.judging import CRITERIA

        for name in names:
            must_know("require", name, [one.name for one in CRITERIA])
    return names


def _must_be_tried(required: Sequence[str], trials: Sequence[tuple[str, Any]], recipe: str | None) -> None:
    """Refuse to require what no trial of this audit could tell."""
    from regard.asked import QUICK
    from regard.judging import CRITERIA
    from regard.trying import trains

    names = {"all": known("trials"), "quick": [name for name, _ in QUICK]}.get(
        trials[0][0], [name for name, _ in trials]
    )
    for one in CRITERIA:
        if one.name in required and not {*one.trials} & {*names}:
            raise InputError(
                f"--require {one.name}: no trial of this audit tells. Add one to --trials: {', '.join(one.trials)}."
            )
        if one.name in required and not recipe and all(map(trains, one.trials)):
            raise InputError(f"--require {one.name}: {', '.join(one.trials)} trains models. Say how, by --recipe.")


def _foretell(bench: Bench, before: float, *, json: bool, dry_run: bool) -> Foresight:
    """What will run, and roughly how long: the result of a dry run, otherwise a line beside it."""
    from regard.cli.consoles import print_json, tell
    from regard.cli.scorecard import foreseen, show_foresight
    from regard.foreseeing import foresee

    found = foresee(bench)
    found = replace(found, seconds=before + found.seconds)
    if dry_run and json:
        plain = {"seconds": round(found.seconds, 1), "workers": found.workers, "driver": round(found.driver, 5),
                 "memory": found.memory, "disk": found.disk}  # fmt: skip
        tables = {name: getattr(found, name).astype(object) for name in ("jobs", "refused")}
        rows = {name: table.where(table.notna(), None).to_dict(orient="records") for name, table in tables.items()}
        print_json(plain | rows)
    elif dry_run:
        show_foresight(found)
    else:
        tell(foreseen(found), wrap=True)
    return found


def _hand_over(found: Audit, folder: Path, page: Path, *, json: bool) -> None:
    """The page, and the scorecard or the findings."""
    from regard.cli.consoles import print_json, tell
    from regard.cli.scorecard import show_audit

    if json:
        print_json(found.to_dict())
    else:
        show_audit(found)
    with Counter("writing the report", None):
        found.to_html(page)
    tell(f"report: {page}")
    tell(f"findings: {folder / 'findings.json'}")


def _code(found: Audit, required: Sequence[str]) -> int:
    """The exit code, and why it is not 0."""
    from regard.cli.consoles import tell

    if not found.findings:
        raise InputError("nothing ran: all trials were refused. Choose others by --trials, or other --data.")
    title = next(iter(found.methods))
    outcomes = {name: found.verdict()[name] for name in required}
    for name, outcome in outcomes.items():
        if outcome != "supported":
            tell(f"required, and {outcome}: {title} is {name}", "red" if outcome == "not supported" else "yellow")
    if "not supported" in outcomes.values():
        return NOT_MET
    return UNCLEAR if {*outcomes.values()} - {"supported"} else 0


def command() -> str:
    """What was typed."""
    import shlex

    return shlex.join(["regard", *sys.argv[1:]])


def report(
    run: RUN,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help=f"Write the report here; else {REPORT} in the folder.")
    ] = None,
    json: options.JSON = False,
) -> None:
    """Write the page of a run anew."""
    must_end_in(".html", "html", html)
    from regard.audited import load_audit
    from regard.cli.consoles import print_json, shown

    with Counter("writing the report", None, patience=0.5):
        page = load_audit(run).to_html(html or run / REPORT)
    size = page.stat().st_size
    if json:
        print_json({"path": str(page), "bytes": size})
    else:
        shown.print(f"{page} ({size / 1000:,.0f} kB)", markup=False, highlight=False, soft_wrap=True)


def diff(
    before: RUN,
    after: RUN,
    json: options.JSON = False,
) -> None:
    """Compare two runs, criterion by criterion."""
    from regard.audited import differences, load_audit
    from regard.cli.consoles import print_json
    from regard.cli.scorecard import show_differences

    with Counter("reading two runs", None, patience=0.5):
        one, other = load_audit(before), load_audit(after)
        table = differences(one, other)
    if json:
        print_json(table.astype(object).where(table.notna(), None).to_dict(orient="records"))
    else:
        itself = {found.trial for audit in (one, other) for title, found in audit.findings if title is None}
        show_differences(table, itself, before, after)
