"""Induction heads: found in the wired model and in SmolLM2, and shown to be what they are called by taking them away.

    python benchmarks/circuits.py
    python benchmarks/circuits.py --sequences 10 --draws 5

The heads are chosen on other random texts than they are judged by. Random tokens come twice; the loss is the mean of
−log p over those tokens of the second half whose predecessor was there before. The top induction heads are taken away
(what they hand on is multiplied by 0), and so are as many other heads of the same layers, drawn at random, several
times. Intervals of 95 % are over texts; for random heads they are of the mean over draws, with the worst draw beside.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

import regard
from regard.attention import Rerun
from regard.circuits import random_text
from regard.models import toys
from tracing import subject_and_prompt

AT_ONCE = 10  # texts
Head = tuple[int, int]
console = Console()


def wired() -> None:
    """The two heads of the hand-wired model."""
    rows = [str(row) for row in range(48)]
    subject = regard.module(
        toys.induction(), lambda model, ids: model(ids)[:, -1], features=rows, readout="last", vocabulary=16
    )
    ids = pd.DataFrame(torch.randint(16, (8, 48), generator=torch.Generator().manual_seed(0)).numpy(), columns=rows)
    asked: list[Any] = [
        ("induction", {"tokens": 12}),
        ("duplicate", {"tokens": 12}),
        "previous",
        "copying",
        "composition",
    ]
    found = regard.heads(subject, regard.data.read(ids, columns=rows), probes=asked)
    console.print("\nThe wired model")
    for name, one in found.probed.items():
        console.print(f"  {name}: {one.values['value'].round(3).tolist()} {one.sentence}", highlight=False)


def losses(subject: Any, ids: torch.Tensor, tokens: int, without: list[list[Head]]) -> np.ndarray:
    """``(removal, text)``: the mean loss on the second half, without some heads; first of the whole model."""
    found = []
    first = ids.shape[1] - tokens  # the row of the first token that comes again
    for some in ids.split(AT_ONCE):
        again = Rerun(subject.whole(), subject.of_ids(some))
        outputs = [again.output, *(again(gates(heads)) for heads in without)]
        found.append(torch.stack([-output[:, first:-1].mean(-1) for output in outputs]))
    return torch.cat(found, 1).double().numpy()


def gates(heads: list[Head]) -> list[Any]:
    layers = sorted({layer for layer, _ in heads})
    return [regard.edits.gate([head for at, head in heads if at == layer], 0.0, sites=layer) for layer in layers]


def others(top: list[Head], heads: int, lots: np.random.Generator) -> list[Head]:
    """As many heads of each layer, none of them among the top ones."""
    drawn = []
    for layer, count in Counter(layer for layer, _ in top).items():
        free = [head for head in range(heads) if (layer, head) not in top]
        drawn += [(layer, int(head)) for head in lots.choice(free, count, replace=False)]
    return drawn


def interval(values: np.ndarray, lots: np.random.Generator) -> str:
    """Mean over texts with its interval."""
    means = values[lots.integers(0, len(values), (2000, len(values)))].mean(1)
    return f"{values.mean():.3f} [{np.quantile(means, 0.025):.3f}, {np.quantile(means, 0.975):.3f}]"


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--pictures", type=Path, help="a folder for the grid of scores")
    options = parser.parse_args()
    wired()
    subject, _ = subject_and_prompt(1)
    begun = time.perf_counter()
    probes = ["induction", "duplicate", "copying", "direct_copying", "composition"]
    found = regard.heads(subject, ["The capital of France is Paris.", "So it goes."], probes=probes)
    console.print(f"\nSmolLM2, {time.perf_counter() - begun:.0f} s")
    for name, one in found.probed.items():
        console.print(f"  {name}: {one.sentence}", *one.warnings, highlight=False)
    scores = found.frame().sort_values("induction", ascending=False)
    shown = ["layer", "head", "induction", "induction_low", "induction_high", "duplicate", "copying", "direct_copying"]
    console.print(scores[shown].head(15).round(2).to_string(index=False), highlight=False)
    if options.pictures is not None:
        found.plot("induction").save(options.pictures / "induction-smollm2.svg")
    top = [(int(layer), int(head)) for layer, head in scores[["layer", "head"]].head(options.top).to_numpy()]
    lots = np.random.default_rng(0)
    random = [others(top, int(found.index["head"].max()) + 1, lots) for _ in range(options.draws)]
    ids = random_text(subject, tokens=options.tokens, repeats=2, sequences=options.sequences, seed=1)
    whole, without, *rest = losses(subject, ids, options.tokens, [top, *random])
    table = Table(title=f"loss on the second half, {options.sequences} texts of 2 × {options.tokens} random tokens")
    for column in ("heads taken away", "loss", "increase", "worst draw"):
        table.add_column(column)
    table.add_row("none", interval(whole, lots), "", "")
    named = ", ".join(f"{layer}.{head}" for layer, head in top)
    table.add_row(named, interval(without, lots), interval(without - whole, lots), "")
    each = np.stack(rest)
    worst = max(each.mean(1) - whole.mean())
    table.add_row(f"{options.top} others of these layers, {options.draws} draws", interval(each.mean(0), lots),
                  interval(each.mean(0) - whole, lots), f"{worst:.3f}")  # fmt: skip
    console.print(table)
    console.print(f"chance: {np.log(len(subject.vocabulary.ids)):.2f}; {time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
