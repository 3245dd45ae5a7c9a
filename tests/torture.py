"""Everything that can happen to a run, many times over: ``make torture``. Stops at the first thing that is not as it should be.

::

    python tests/torture.py                          # all parts, in full
    python tests/torture.py store crash --share 0.1  # two of them, with a tenth of the numbers
"""

from __future__ import annotations

import argparse
import errno
import logging
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest import mock

for folder in ("jobs", "data"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from faults import (  # noqa: E402
    crash_everywhere,
    damage,
    damaged_start,
    extended_start,
    fresh_folder,
    jobs_of,
    kill_often,
    kill_store,
    killed,
    refuse_everywhere,
)


def store(share: float, seed: int) -> dict[str, int]:
    """1,000 kills of a process that writes a store."""
    return kill_store(round(1000 * share), random.Random(seed))


def crash(share: float, seed: int) -> dict[str, int]:
    """A crash at every file operation, in all models, and a refusal of every file operation."""
    figures: Counter[str] = Counter()
    for number in range(max(1, round(6 * share))):
        jobs = jobs_of(seed + number, 6)
        for prepare in (lambda run: set(), damaged_start(jobs), extended_start(jobs)):
            figures.update(crash_everywhere(jobs, random.Random(seed), prepare=prepare))
        for error in (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT):
            figures.update(refuse_everywhere(jobs, error))
    return dict(figures)


def damages(share: float, seed: int) -> dict[str, int]:
    """10,000 damaged files of runs."""
    figures: Counter[str] = Counter()
    for number in range(20):  # runs to be damaged
        figures.update(damage(max(1, round(500 * share)), random.Random(seed + number)))
    return dict(figures)


def fuzzed(share: float, seed: int) -> dict[str, int]:
    """100,000 changed data files."""
    chunks = [(max(1, round(1000 * share)), seed + number) for number in range(100)]
    figures: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for found in pool.imap_unordered(_fuzz, chunks):
            figures.update(found)
    return {"files": figures.total(), **figures}


def _fuzz(chunk: tuple[int, int]) -> dict[str, int]:
    from fuzzing import fuzz

    with fresh_folder() as folder:
        return fuzz(*chunk, folder)


def command(share: float, seed: int) -> dict[str, int]:
    """200 kills of ``regard audit``, on a small model; each time it goes on until it is done."""
    times, rng = round(200 * share), random.Random(seed)
    figures = {"kills": 0, "kills between the first record and done": 0, "runs": 0}
    with fresh_folder() as top:
        model = _small_model(top / "model")
        _import_all()
        began = time.monotonic()
        jobs, _ = killed(lambda tell: _command(model, top / "undisturbed", tell), 0, math.inf)
        took = time.monotonic() - began
        expected = (top / "undisturbed" / "findings.json").read_bytes()
        while figures["kills"] < times:
            run = top / f"run{figures['runs']}"
            target = partial(_command, model, run)
            _, kills, midway = kill_often(run, len(jobs), target, took, times - figures["kills"], rng)
            killed(target, 0, math.inf)
            assert (run / "findings.json").read_bytes() == expected, f"{run}: other findings than undisturbed"
            assert (run / "report.html").exists()
            for name, number in zip(figures, (kills, midway, 1), strict=True):
                figures[name] += number
    return figures | {"jobs in a run": len(jobs), "seconds of a run": round(took)}


def _import_all() -> None:
    """Before the first fork, so that each process starts at once. Nothing runs here: threads do not outlive a fork."""
    for name in ("altair", "vl_convert", "regard.auditing", "regard.cli", "regard.report"):
        import_module(name)
    import regard

    regard.list_methods(), regard.list_trials()


def _command(model: Path, run: Path, tell: Callable[[str], None]) -> None:
    """The command, as a shell would start it; tells each job that is kept."""
    import torch

    from regard.cli import main
    from regard.jobs.store import Store

    def told(store: Store, job: str, *more: object) -> None:
        add(store, job, *more)
        tell(job)

    torch.set_num_threads(1)
    add = Store.add
    sys.argv = [
        "regard", "audit", "--model", str(model), "--data", str(model / "data.jsonl"), "--out", str(run), "--resume",
        "--methods", "raw,rollout", "--trials", "permutation,comprehensiveness", "--limit", "12", "--batch-size", "3",
        "--shown", "2", "--threads", "1",
    ]  # fmt: skip
    with (
        open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere),
        mock.patch.object(Store, "add", told),
    ):  # fmt: skip
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"exit code {end.code}") from end


def _small_model(folder: Path) -> Path:
    """A small BERT in a folder, with its tokenizer and a few examples."""
    import regard
    from regard.data.planted import plant
    from regard.subjects.scratch import scratch_text

    made = plant("keyword", train=200, test=12, undecided=0.2)
    subject = scratch_text(made.train.inputs(), ["negative", "positive"])
    regard.fit(subject, made.train, epochs=1)
    subject.model.save_pretrained(folder)
    subject.tokenizer.save_pretrained(folder)
    made.test.frame().to_json(folder / "data.jsonl", orient="records", lines=True)
    return folder


# The command comes last: what it imports starts threads, and nothing should be forked after that without need.
PARTS = {"store": store, "crash": crash, "damage": damages, "fuzz": fuzzed, "command": command}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts; none: all")
    parser.add_argument("--share", type=float, default=1.0, help="of the full numbers")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.getLogger("regard").addHandler(logging.NullHandler())  # damage is told many times
    for name in asked.parts or PARTS:
        began = time.monotonic()
        figures = PARTS[name](asked.share, asked.seed)
        listed = ", ".join(f"{number:,} {what}" for what, number in figures.items())
        print(f"{name}: {listed} ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
