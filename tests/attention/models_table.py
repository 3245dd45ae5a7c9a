"""Writes docs/models.md: what was measured on each architecture. Run it: ``python tests/attention/models_table.py``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from architectures import ARCHITECTURES
from literal import Case, gap, squared
from test_architectures import deviation

import regard
from regard.attention.intervening import Rerun
from regard.attention.sources import Fused

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

Measured on small random models of each architecture, in batches of three padded on each side that they take: how far
traced weights deviate from the model's own, how far the output with edited attention is from that of the same edit
written into the model's softmax by hand (relative to the largest output, or to 1), and whether variants of an edit come
out the same, to 1e-6, when what lies upstream is run once. The table is written by
`python tests/attention/models_table.py` from what happened: a model that fails stays in it and says so.

"""
COLUMNS = (
    "model", "package and version", "sites", "default backend", "trace deviation", "edit deviation", "replay",
    "padding verified",
)  # fmt: skip
EXACT = (1e-5, 1e-5, 1e-6)  # of trace, edit and replay: what deviates more is named


class FellBack(Exception):
    """Replay was not used: slower, and right."""


@dataclass
class Measured:
    """One kind of measurement on all sides: the largest deviation, and what went wrong instead of one."""

    limit: float
    largest: float = 0.0
    problems: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)  # sides on which nothing went wrong

    def take(self, side: str, measure: Callable[[], float]) -> None:
        """One measurement; whatever happens is written down."""
        try:
            found = measure()
        except FellBack as reason:
            self.problems.append(f"falls back: {reason}")
            self.passed.append(side)
        except Exception as problem:
            self.problems.append(f"{type(problem).__name__}: {problem}")
        else:
            self.largest = max(self.largest, found)
            if found <= self.limit:
                self.passed.append(side)
            else:
                self.problems.append(f"off by {found:.0e}, padding {side}")

    def __str__(self) -> str:
        said = "; ".join(dict.fromkeys(self.problems))
        return " ".join(said.replace("|", "/").split()) or (f"{self.largest:.0e}" if self.largest else "0")


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What regard says to its log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("regard")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def edit_deviation(case: Case) -> float:
    found = []
    for site in case.tried:
        for heads in (None, [1]):
            edit = regard.edits.custom(squared, sites=site, heads=heads)
            found.append(gap(regard.intervene(case.subject, case.inputs, edit), case.literally(site, squared, heads)))
    return max(found)


def replay_deviation(case: Case) -> float:
    found, reasons = [], []
    for site in case.tried:
        edit = regard.edits.permute(0, sites=site, rows="all")
        rerun = Rerun(case.subject, case.inputs)
        with heard() as said:
            replayed = rerun(edit, variants=5)
        if rerun.upstream[site].recording is None:
            reasons.append("; ".join(said).replace("replay is off: ", ""))
        found.append(gap(replayed, regard.intervene(case.subject, case.inputs, edit, variants=5, replay=False)))
    if reasons and max(found) <= EXACT[2]:
        raise FellBack("; ".join(dict.fromkeys(reasons)))
    return max(found)


def backend_of(case: Case, trace: regard.Trace) -> str:
    """By which function the sites ran, and whether transformers chose it."""
    if all(isinstance(site.source, Fused) for site in trace.sites):
        return "sdpa"
    config = getattr(case.model, "config", None)
    return "eager" if getattr(config, "_attn_implementation", None) == "eager" else "hand-written"


def measure(name: str) -> dict[str, str]:
    """A row of the table."""
    architecture = ARCHITECTURES[name]
    trace, edit, replay = kinds = [Measured(limit) for limit in EXACT]
    sites = backend = version = "?"
    for side in architecture.sides:
        word = side or "none"
        torch.manual_seed(0)
        try:
            version = importlib.metadata.version(architecture.package).partition("+")[0]  # without torch's "+cpu"
            case = Case(name, side)
        except Exception as problem:
            trace.problems.append(f"{type(problem).__name__}: {problem}")
            continue
        sites = ", ".join(f"{count} {kind}" for kind, count in Counter(case.kinds).items())

        def of_trace(case: Case = case) -> float:
            nonlocal backend
            found = regard.trace(case.subject, case.inputs)
            backend = backend_of(case, found)
            expected = list(zip(case.kinds, case.expected, strict=True))
            return deviation(found, expected, case.subject.encode(case.inputs))

        trace.take(word, of_trace)
        edit.take(word, lambda case=case: edit_deviation(case))
        replay.take(word, lambda case=case: replay_deviation(case))
    passed = [word for word in trace.passed if all(word in kind.passed for kind in kinds)]
    row = (
        name, f"{architecture.package} {version}", sites, backend, str(trace), str(edit),
        str(replay) if replay.problems or not replay.passed else "exact", ", ".join(passed) or "-",
    )  # fmt: skip
    return dict(zip(COLUMNS, row, strict=True))


def rows_of(page: str) -> list[dict[str, str]]:
    """The rows of the table on a page."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [dict(zip(COLUMNS, map(str.strip, line.strip("|").split("|")), strict=True)) for line in lines[2:]]


def main() -> None:
    warnings.simplefilter("ignore")
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for name in ARCHITECTURES:
        lines.append([*measure(name).values()])
        print(*lines[-1], sep=" | ", flush=True)
    PAGE.write_text(HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
