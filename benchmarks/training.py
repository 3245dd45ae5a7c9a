"""Experiments that train models: Wiegreffe & Pinter on SST, Pruthi et al. on gender, the same on MiniLM and a table.

    make bench-training                        all of it, for hours
    python benchmarks/training.py sst          BiLSTM on SST: 8 seeds, 8 λ
    python benchmarks/training.py gender       embedding and BiLSTM models that hide what they look at
    python benchmarks/training.py sequences    copy, reverse and flip with attention hidden
    python benchmarks/training.py minilm       MiniLM fine-tuned on 2,000 sentences: 3 seeds, 3 λ
    python benchmarks/training.py table        FT-Transformer on Adult
    python benchmarks/training.py improved     ways to improve attention, by the same trials
    python benchmarks/training.py cost         one training after the other, or two at a time

Every model is kept in the folder given by --keep, so a run that was stopped goes on, and none is trained twice.

Published: F1 of the BiLSTM on SST .831, with uniform attention .822 (a re-run: .8304, .8248), best epoch by test; the
gender task (accuracy, attention mass in %): Pruthi et al.'s table 3.

NOTE[DIFF] vectors are GloVe's of 100 dimensions; those of the papers are fastText's. λ of adversaries is twice theirs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

import regard
from regard.data import Dataset, Example

DATA = Path(__file__).parents[2] / "shared/data"
LAMBDAS = [0.0, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1]
console = Console(highlight=False, soft_wrap=True)


def sst() -> Dataset:
    examples = []
    for split in ("train", "dev", "test"):
        lines = (DATA / f"sst/stsa.binary.{split}").read_text(encoding="utf-8").splitlines()
        pairs = [line.split(" ", 1) for line in lines]
        examples += [
            Example(text, label, split=split, id=f"{split}-{place}")
            for place, (label, text) in enumerate(pairs)
            if len(text.split()) > 5
        ]
    return replace(Dataset.of(examples), source="SST")


def vectors(data: Dataset) -> dict[str, Any]:
    """GloVe's, of the words that are there."""
    words = {word for one in data for word in one.words}
    known = (DATA / "glove/words.txt").read_text(encoding="utf-8").splitlines()
    rows = np.load(DATA / "glove/vectors.npy").astype("float32")
    return {word: row for word, row in zip(known, rows, strict=True) if word in words}


def shown(finding: regard.Finding, folder: Path, name: str) -> None:
    """What came of it: printed, and kept with its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    finding.save(folder / f"{name}.json")
    finding.to_html(folder / f"{name}.html")
    console.print(f"[bold]{name}[/]: {finding.outcome}. {finding.sentence}")
    for table in ("models", "points", "hidden"):
        if table in finding.tables:
            console.print(finding.tables[table].to_string(float_format=lambda x: f"{x:.4f}"))


def run_sst(asked: Any) -> None:
    data = sst()
    recipe = regard.recipes.attention_classifier(vectors=vectors(data), epochs=20, patience=3, keep=asked.keep)
    many: Any = {"seeds": asked.seeds, "workers": asked.workers}
    for name, options in (
        ("uniform_trained", {}), ("seeds", {}), ("adversary", {"lambdas": LAMBDAS, "searched": 200}), ("guide", {}),
    ):  # fmt: skip
        began = time.monotonic()
        found = regard.trial(recipe, data, name, **many, **options)
        shown(found, asked.out, f"sst-{name}")
        console.print(f"({time.monotonic() - began:.0f} s)\n")
        if name == "uniform_trained":
            means = found.tables["models"].groupby("model")[["score", "f1"]].agg(["mean", "std"])
            console.print("published F1: base .831, uniform .822")
            console.print(means.to_string(float_format=lambda x: f"{x:.4f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = {name.removeprefix("run_"): one for name, one in globals().items() if name.startswith("run_")}
    parser.add_argument("which", nargs="*", choices=[*runs], help="else all")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", default="runs/training", help="where models are kept")
    parser.add_argument("--out", type=Path, default=Path("runs/training/findings"))
    asked = parser.parse_args()
    if not DATA.exists():
        console.print(f"{DATA} is not there: nothing to measure.")
        return
    for name in asked.which or runs:
        runs[name](asked)


if __name__ == "__main__":
    main()
