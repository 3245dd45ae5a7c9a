"""Jain & Wallace on the Stanford Sentiment Treebank: does attention agree with gradients and leave-one-out?

    make bench-sst                      5 seeds, with and without GloVe (20 minutes)
    python benchmarks/sst.py --seeds 1

A BiLSTM with additive attention is trained as they did (protocol §1.1–1.3), and explained on the test sentences of more
than five words. Kendall's τ-b is computed for each sentence: attention – gradient (with detached weights), attention –
leave-one-out, gradient – leave-one-out; over all, and by predicted class. Published: their table 2 (BiLSTM, fastText),
and the results that are committed in their repository.

NOTE[DIFF] vectors are GloVe's of 100 dimensions, or random ones of 300, uniform in ±0.25; theirs are fastText's. The
best epoch is that of the best accuracy on the development set, and three worse ones end it; theirs is by ROC-AUC. Words
are as the data has them, lower-cased.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import regard
from regard.data import Dataset, Example

DATA = Path(__file__).parents[2] / "shared/data"
PAIRS = (("raw", "gradient"), ("raw", "leave_one_out"), ("gradient", "leave_one_out"))
OPTIONS: dict[str, dict[str, Any]] = {"raw": {}, "gradient": {"through_attention": False}, "leave_one_out": {}}
PUBLISHED = {  # class: (τ attention–gradient, τ attention–leave-one-out, τ gradient–leave-one-out)
    "all": "committed: .351 / .291 / .656", "0": "paper: .40 / .34 / –", "1": "paper: .38 / .33 / –",
}  # fmt: skip
console = Console()


def sentences(split: str) -> Dataset:
    lines = (DATA / f"sst/stsa.binary.{split}").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" ", 1) for line in lines]
    return Dataset.of([Example(text, label, split=split) for label, text in pairs if len(text.split()) > 5])


def subject_for(train: Dataset, seed: int, *, glove: bool) -> Any:
    counts = Counter(word for one in train for word in one.words)
    words = ["<pad>", "<unk>", "<sos>", "<eos>", *sorted(counts)]
    torch.manual_seed(seed)
    model = regard.models.AttentionClassifier(words=len(words), embedding=100 if glove else 300, hidden=128)
    vocabulary = {word: index for index, word in enumerate(words)}
    model.encoder.embedding.weight.data.uniform_(-0.25, 0.25)[0] = 0  # N(0, 1) would saturate the LSTM
    if glove:
        known = (DATA / "glove/words.txt").read_text(encoding="utf-8").splitlines()
        vectors = torch.from_numpy(np.load(DATA / "glove/vectors.npy").astype("float32"))
        for place, word in enumerate(known):
            if word in vocabulary:
                model.encoder.embedding.weight.data[vocabulary[word]] = vectors[place]
    return regard.pooled(model, vocabulary, labels=["0", "1"])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with amsgrad; attention has no weight decay."""
    attention = [p for name, p in model.named_parameters() if name.startswith(("inner", "outer"))]
    rest = [p for name, p in model.named_parameters() if not name.startswith(("inner", "outer"))]
    groups = [{"params": rest, "weight_decay": 1e-5}, {"params": attention, "weight_decay": 0.0}]
    return torch.optim.Adam(groups, lr=1e-3, amsgrad=True)


def correlations(subject: Any, test: Dataset) -> pd.DataFrame:
    """A row for each sentence: its predicted class, and τ of each pair."""
    texts = test.inputs()
    scores, classes = {}, []
    for method, options in OPTIONS.items():
        whys = regard.explain(subject, texts, method=method, batch_size=64, **options)
        scores[method] = [why.scores[1:-1] for why in whys]  # without the marks of start and end
        classes = [why.target for why in whys]
    rows = [
        {"class": said} | {f"{a} – {b}": regard.measures.kendall(scores[a][i], scores[b][i]).value for a, b in PAIRS}
        for i, said in enumerate(classes)
    ]
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    asked = parser.parse_args()
    if not (DATA / "sst").exists():
        console.print(f"{DATA / 'sst'} is not there: nothing to measure.")
        return
    train, dev, test = (sentences(split) for split in ("train", "dev", "test"))
    names = [f"{a} – {b}" for a, b in PAIRS]
    for glove in (False, True):
        found = []
        for seed in range(asked.seeds):
            subject = subject_for(train, seed, glove=glove)
            history = regard.fit(
                subject, train, validation=dev, epochs=asked.epochs, patience=3, optimizer=optimizer, seed=seed
            )
            best = int(history["validation"].argmax())
            frame = correlations(subject, test)
            right = np.mean([said == one.label for said, one in zip(frame["class"], test, strict=True)])
            console.print(f"glove={glove} seed {seed}: best epoch {best}, test accuracy {right:.3f}, "
                          + ", ".join(f"{name} {frame[name].mean():.3f}" for name in names))  # fmt: skip
            found.append(frame.assign(seed=seed, accuracy=right))
        every = pd.concat(found)
        vectors = "GloVe, 100" if glove else "random, 300"
        table = Table(
            title=f"SST, BiLSTM, {vectors} dimensions: mean τ ± sd over {asked.seeds} seeds (sd over sentences)"
        )
        for column in ("predicted", *names, "published"):
            table.add_column(column)
        for which in ("all", "0", "1"):
            part = every if which == "all" else every[every["class"] == which]
            cells = []
            for name in names:
                means = part.groupby("seed")[name].mean()
                undefined = f", {int(part[name].isna().sum())} undefined" if part[name].isna().any() else ""
                cells.append(f"{means.mean():.3f} ± {means.std(ddof=0):.3f} ({part[name].std():.3f}{undefined})")
            table.add_row(which, *cells, PUBLISHED[which])
        console.print(table)


if __name__ == "__main__":
    main()
