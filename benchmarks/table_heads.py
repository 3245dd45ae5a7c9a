"""Heads of tabular transformers: which columns they look at, which matter, and whether seeds agree about it.

    python benchmarks/table_heads.py            FT-Transformer, TabTransformer and SAINT on Adult, 3 seeds each
    python benchmarks/table_heads.py --seeds 5 --rows 20000

Of each model: accuracy, how many heads have a column of their own (`columns`), which columns these are, how far gate
gradients and ablation agree, and the largest share of heads that can go for less than one point (`pruning`). Between
seeds: the profiles of heads over columns, matched one to one within each layer so that they are most alike (heads have
no order), as 1 − JSD / ln 2; beside it the same where the columns of one model were shuffled for each head, which is
what matching alone gives; and Spearman's ρ between seeds of what columns all heads together look at.
"""

from __future__ import annotations

import argparse
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from scipy.optimize import linear_sum_assignment

import regard
from regard.estimators import FTTransformerClassifier, SAINTClassifier, TabTransformerClassifier
from regard.measures import bootstrap, jsd, spearman

DATA = Path(__file__).parents[2] / "shared/data/tabular/adult"
MODELS: dict[str, Any] = {
    "FT-Transformer": FTTransformerClassifier, "TabTransformer": TabTransformerClassifier, "SAINT": SAINTClassifier,
}  # fmt: skip
console = Console(highlight=False, soft_wrap=True)


def profiles(found: regard.Heads) -> dict[int, np.ndarray[Any, Any]]:
    """By layer ``(head, column)``; layers that look at no column are left out."""
    shares = found["columns"].tables["shares"]
    names = [one for one in shares.columns if one not in ("layer", "site", "kind", "head")]
    layers = {int(str(layer)): some[names] for layer, some in shares.groupby("layer")}
    return {layer: some.to_numpy() for layer, some in layers.items() if some.notna().all(axis=None)}


def alike(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Mean 1 − JSD / ln 2 of the heads of two layers, matched so that it is largest."""
    table = np.array([[1 - float(jsd(x, y)) / math.log(2) for y in other] for x in one])
    return float(table[linear_sum_assignment(-table)].mean())


def between(models: list[dict[int, np.ndarray[Any, Any]]], lots: np.random.Generator) -> dict[str, Any]:
    """How alike the heads of two seeds are, beside what shuffled columns give, over pairs of seeds and layers."""
    seen, chance, overall = [], [], []
    for one, other in combinations(models, 2):
        for layer in one:
            seen.append(alike(one[layer], other[layer]))
            chance.append(alike(one[layer], np.stack([lots.permutation(head) for head in other[layer]])))
        whole = [np.concatenate([*model.values()]).mean(0) for model in (one, other)]
        overall.append(spearman(*whole).value)
    found = bootstrap(np.array(seen) - np.array(chance))
    return {
        "matched heads": np.mean(seen),
        "shuffled": np.mean(chance),
        "above": found,
        "ρ of all heads": np.mean(overall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=10)
    asked = parser.parse_args()
    if not DATA.is_dir():
        console.print(f"{DATA} is not there: nothing to measure.")
        return
    train, test = (pd.read_csv(DATA / f"{part}.csv", na_values="?") for part in ("train", "test"))
    train, test = train.sample(asked.rows, random_state=0), test.sample(1000, random_state=0)
    target = train.columns[-1]
    columns = [*train.columns[:-1]]
    held = regard.data.read(test, columns=columns, label=target)
    for name, make in MODELS.items():
        found = []
        for seed in range(asked.seeds):
            model = make(epochs=asked.epochs, random_state=seed).fit(train[columns], train[target])
            probes: Any = ["columns", "importance", ("pruning", {"by": ["importance"], "random": 3, "steps": 8})]
            heads = regard.heads(model.subject_, held, probes=probes, examples=400)
            found.append(heads)
            console.print(f"{name}, seed {seed}: accuracy {model.score(test[columns], test[target]):.3f}; "
                          f"{heads['columns'].sentence} {heads['pruning'].sentence}")  # fmt: skip
            console.print(
                heads["columns"].tables["shares"].groupby("layer").mean(numeric_only=True).round(3).to_string()
            )
        numbers = between([profiles(one) for one in found], np.random.default_rng(0))
        console.print(f"{name}, between seeds: {numbers}\n")


if __name__ == "__main__":
    main()
