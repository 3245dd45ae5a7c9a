"""Jain & Wallace, and Serrano & Smith, on the Stanford Sentiment Treebank: their experiments as trials.

    make bench-sst                                  5 seeds, with and without GloVe
    python benchmarks/sst.py --seeds 1 --adversarial 100
    python benchmarks/sst.py --audit runs/sst       the report of one model, by all trials

A BiLSTM with additive attention is trained as Jain & Wallace did (protocol §1.1–1.3), and tried on the test sentences
of more than five words. For each seed: `agreement` (Kendall's τ of attention, gradient with detached weights,
leave-one-out), `permutation` (100 of them), `adversarial` (5 × 500 steps, on the first so many sentences) and
`erasure`; then how far attention differs between seeds. Published: Jain & Wallace's table 2 (BiLSTM, fastText), what is
committed in their repository (all), and their figures.

NOTE[DIFF] vectors are GloVe's of 100 dimensions, or random ones of 300, uniform in ±0.25; theirs are fastText's. The
best epoch is that of the best accuracy on the development set, and three worse ones end it; theirs is by ROC-AUC. Words
are as the data has them, lower-cased.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

import regard
from regard.data import Dataset, Example

DATA = Path(__file__).parents[2] / "shared/data"
BINS = ("0–0.25", "0.25–0.5", "0.5–0.75", "0.75–1")
# By what is measured and predicted class: tables 2, graph_outputs (all) and figures of Jain & Wallace.
PUBLISHED = {
    "τ(attention, gradient)": {"all": ".351", "0": ".40", "1": ".38"},
    "τ(attention, leave-one-out)": {"all": ".291", "0": ".34", "1": ".33"},
    "τ(gradient, leave-one-out)": {"all": ".656"},
    **{f"permutation, median Δŷ, max α in {weights}": dict(zip("01", row, strict=True)) for weights, row in zip(
        BINS, ((".027", ".032"), (".047", ".035"), (".079", ".062"), (".107", "–")), strict=True)},
    "adversarial, mean ε-max JSD": {"0": ".480", "1": ".493"},
    "adversarial, share with JSD > 0.6": {"0": ".13", "1": ".17"},
}  # fmt: skip
console = Console()


def sentences(split: str) -> Dataset:
    lines = (DATA / f"sst/stsa.binary.{split}").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" ", 1) for line in lines]
    return Dataset.of([Example(text, label, split=split) for label, text in pairs if len(text.split()) > 5])


def vectors(data: Dataset) -> dict[str, Any]:
    """GloVe's, of the words that are there."""
    words = {word for one in data for word in one.words}
    known = (DATA / "glove/words.txt").read_text(encoding="utf-8").splitlines()
    rows = np.load(DATA / "glove/vectors.npy").astype("float32")
    return {word: row for word, row in zip(known, rows, strict=True) if word in words}


def measured(subject: Any, test: Dataset, seed: int, adversarial: int) -> pd.DataFrame:
    """A row for each number: what it is, of which predicted class, and its value."""
    asked: Any = {"examples": None, "batch_size": 128, "seed": seed}
    agreement, permutation, erasure = (
        regard.trial(subject, test, name, **asked) for name in ("agreement", "permutation", "erasure")
    )
    other = regard.trial(subject, Dataset.of(list(test)[:adversarial]), "adversarial", **asked)
    rows = []
    for which in ("all", "0", "1"):
        of = {
            one.trial: one.values if which == "all" else one.values.query(f"predicted == '{which}'")
            for one in (agreement, permutation, erasure, other)
        }
        columns = {
            "τ(attention, gradient)": of["agreement"]["tau_gradient"],
            "τ(attention, leave-one-out)": of["agreement"]["tau_leave_one_out"],
            "τ(gradient, leave-one-out)": of["agreement"]["ceiling"],
            "adversarial, mean ε-max JSD": of["adversarial"]["epsilon_max_jsd"],
            "adversarial, share with JSD > 0.6": of["adversarial"]["epsilon_max_jsd"] > 0.6,
        }
        for order in ("gradient", "attention_gradient", "attention", "random"):
            removed, never = (of["erasure"][f"{order}_{what}"] for what in ("removed", "never"))
            columns[f"erasure, share removed by {order} (never flipped: all)"] = removed.fillna(0) * (1 - never) + never
        rows += [{"what": name, "class": which, "value": values.mean()} for name, values in columns.items()]
        for weights in BINS:
            some = of["permutation"].query(f"bin == '{weights}'")["moved"]
            name = f"permutation, median Δŷ, max α in {weights}"
            rows.append({"what": name, "class": which, "value": some.median() if len(some) >= 10 else np.nan})
    return pd.DataFrame(rows)


def between(maps: list[list[Any]]) -> str:
    """How far attention differs between seeds."""
    pairs = [
        regard.measures.jsd(x, y).item()
        for one, other in combinations(maps, 2)
        for x, y in zip(one, other, strict=True)
    ]
    return f"mean {np.mean(pairs):.3f}, 95th percentile {np.percentile(pairs, 95):.3f}" if pairs else "one seed only"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--adversarial", type=int, default=500, help="sentences for the adversaries")
    parser.add_argument("--audit", metavar="FOLDER", help="only train one model and audit it, on 200 sentences")
    asked = parser.parse_args()
    if not (DATA / "sst").exists():
        console.print(f"{DATA / 'sst'} is not there: nothing to measure.")
        return
    train, dev, test = (sentences(split) for split in ("train", "dev", "test"))
    known = vectors(train)
    recipe = regard.recipes.attention_classifier(vectors=known)
    fitted: Any = {**recipe.fit, "validation": dev, "epochs": asked.epochs}
    if asked.audit:
        subject = recipe.build(train, 0)
        regard.fit(subject, train, **fitted)
        named = replace(test, source="SST, test sentences")
        found = regard.audit(subject, named, methods=["raw", "gradient"], trials="all", limit=200, out=asked.audit)
        console.print(found.frame.drop(columns="sentence").to_string())
        found.to_html(Path(asked.audit) / "report.html")
        return
    for glove in (True, False):
        frames, maps, accuracies = [], [], []
        recipe = regard.recipes.attention_classifier(vectors=known if glove else None)
        for seed in range(asked.seeds):
            subject = recipe.build(train, seed)
            history = regard.fit(subject, train, seed=seed, **fitted)
            best = int(history["validation"].argmax())
            frame = measured(subject, test, seed, asked.adversarial)
            whys = regard.explain(subject, test.inputs(), method="raw", batch_size=128)
            maps.append([why.scores[1:-1] / why.scores[1:-1].sum() for why in whys])
            accuracies.append(np.mean([why.target == one.label for why, one in zip(whys, test, strict=True)]))
            console.print(f"glove={glove} seed {seed}: best epoch {best}, test accuracy {accuracies[-1]:.3f}")
            frames.append(frame.assign(seed=seed))
        every = pd.concat(frames).groupby(["what", "class"], sort=False)["value"].agg(["mean", "std"])
        begun = "GloVe, 100" if glove else "random, 300"
        table = Table(
            title=f"SST, BiLSTM, {begun} dimensions, {len(test)} sentences: mean over {asked.seeds} seeds ± sd, and "
            f"[published]; accuracy {np.mean(accuracies):.3f}"
        )
        for column in ("", "all", "predicted 0", "predicted 1"):
            table.add_column(column)
        for what in every.index.unique("what"):
            cells = []
            for which in ("all", "0", "1"):
                mean, deviation = every.loc[(what, which)]
                published = PUBLISHED.get(what, {}).get(which)
                cell = "–" if np.isnan(mean) else f"{mean:.3f} ± {0 if np.isnan(deviation) else deviation:.3f}"
                cells.append(cell + (f" \\[{published}]" if published else ""))
            table.add_row(what, *cells)
        console.print(table)
        console.print(f"attention between seeds, JSD: {between(maps)}")


if __name__ == "__main__":
    main()
