"""Texts of words with a known polarity, one subject of each kind, and what a small BERT says, written out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import transformers as hf

import regard
from regard.data import Dataset, Example
from regard.models.toys import POLARITY
from regard.subjects.scratch import scratch_table

PLAIN = [word for word, value in POLARITY.items() if abs(value) < 0.1 and word[0] != "<"]
SIDES = {
    "positive": [word for word, value in POLARITY.items() if value > 0.1],
    "negative": [word for word, value in POLARITY.items() if value < -0.1],
}
LONG = ("unbelievably", "overlong")  # of several pieces each
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
         "max_position_embeddings": 64, "initializer_range": 0.3}  # fmt: skip
COLUMNS = list("abcdef")


def examples(count: int = 40, *, labels: bool = True, more: tuple[str, ...] = ()) -> Dataset:
    """Distinct words, of which one to three have a polarity, all of the same sign: these are the rationale."""
    draws = random.Random(0)
    made = []
    for place in range(count):
        label = [*SIDES][place % 2]
        words = draws.sample(PLAIN, draws.randint(3, 6)) + draws.sample(SIDES[label], draws.randint(1, 3))
        draws.shuffle(words)
        words += more if place % 3 else ()
        reasons = tuple(abs(POLARITY.get(word, 0)) > 0.1 for word in words)
        made.append(Example(" ".join(words), label if labels else None, reasons, id=f"t{place}"))
    return Dataset.of(made)


def toy(name: str) -> Any:
    """A hand-wired model."""
    return regard.pooled(getattr(regard.models.toys, name)())


# --- one subject of each kind ----------------------------------------------------------------------------------------


def seeded(build: Any) -> Any:
    torch.manual_seed(5)
    return build().eval().double()


def ids_of(tokenizer: Any) -> dict[str, int]:
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.cls_token_id,
            "eos_token_id": tokenizer.sep_token_id}  # fmt: skip


def bert(tokenizer: Any, labels: int = 3) -> Any:
    """Different attention everywhere, and all classes are predicted of some texts."""
    config = hf.BertConfig(vocab_size=len(tokenizer), num_labels=labels, **SMALL)
    model = seeded(lambda: hf.BertForSequenceClassification(config))
    with torch.no_grad():
        logits = [model(**tokenizer(one.input, return_tensors="pt")).logits[0] for one in examples(12)]
        model.classifier.bias -= torch.stack(logits).mean(0)
    return model


def lstm(_: Any) -> Any:
    model = seeded(lambda: regard.models.AttentionClassifier(words=len(POLARITY), embedding=12, hidden=8))
    model.outer.weight.data *= 9
    return regard.pooled(model, {word: place for place, word in enumerate(POLARITY)})


def decoder(tokenizer: Any) -> Any:
    model = seeded(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**ids_of(tokenizer), **SMALL)))
    return regard.causal(model, tokenizer, verbalizer={"positive": "good", "negative": "bad"})


def translator(tokenizer: Any) -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
    start = {"decoder_start_token_id": tokenizer.cls_token_id, "tie_word_embeddings": False, "initializer_factor": 2.0}
    model = seeded(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**ids_of(tokenizer), **sizes, **start)))
    model.lm_head.weight.data *= 0.05
    return regard.seq2seq(model, tokenizer)


def table(_: Any) -> Any:
    subject = scratch_table(COLUMNS, ["negative", "positive"], torch.zeros(len(COLUMNS)))
    subject.model.double()
    return subject


def regression(_: Any) -> Any:
    """Read from all rows alike, nothing to put in the place of a column: weights are taken off it."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = seeded(
        lambda: torch.nn.ModuleDict({"up": torch.nn.Linear(1, 8), "mix": layer, "down": torch.nn.Linear(8, 1)})
    )
    return regard.module(
        model, lambda model, x: model["down"](model["mix"](model["up"](x[..., None])).mean(1)), features=COLUMNS,
        readout="mean", output="regression",
    )  # fmt: skip


KINDS = {
    "pooled LSTM": lstm, "BERT": lambda tokenizer: regard.text(bert(tokenizer), tokenizer), "decoder": decoder,
    "encoder–decoder": translator, "table": table, "regression": regression,
}  # fmt: skip


def of_kind(kind: str, tokenizer: Any, count: int = 12) -> tuple[Any, Dataset]:
    """A subject, and examples with rationales for it."""
    subject = KINDS[kind](tokenizer)
    if kind in ("table", "regression"):
        rows = np.random.default_rng(0).normal(size=(count, len(COLUMNS)))
        marks = (True, True, *[False] * (len(COLUMNS) - 2))
        return subject, Dataset.of(
            [Example(dict(zip(COLUMNS, row, strict=True)), None, marks) for row in rows.tolist()]
        )
    some = examples(count, labels=False, more=LONG if kind != "pooled LSTM" else ())
    if kind == "encoder–decoder":
        return subject, Dataset.of([
            Example((one.input, "so good"), None, (*one.rationale, False, False), id=one.id) for one in some
        ])  # fmt: skip
    return subject, some


# --- a small BERT, written out ---------------------------------------------------------------------------------------


class Literal:
    """What the model says of one text, alone and without padding."""

    def __init__(self, model: Any, tokenizer: Any, text: str) -> None:
        encoded = tokenizer(text)
        self.model, self.ids = model, encoded["input_ids"]
        self.pieces = [
            [place for place, word in enumerate(encoded.word_ids()) if word == number]
            for number in range(len(text.split()))
        ]
        self.before = self.probabilities(self.ids)
        self.said = int(self.before.argmax())

    def probabilities(self, ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids])).logits[0].softmax(-1).numpy()

    def without(self, words: Any) -> np.ndarray:
        """The probabilities when all pieces of these words are deleted."""
        gone = {place for word in words for place in self.pieces[word]}
        return self.probabilities([one for place, one in enumerate(self.ids) if place not in gone])

    def raw(self) -> np.ndarray:
        """Last layer, row of [CLS], mean over heads, pieces summed."""
        self.model.set_attn_implementation("eager")
        with torch.no_grad():
            weights = self.model(input_ids=torch.tensor([self.ids]), output_attentions=True).attentions[-1]
        self.model.set_attn_implementation("sdpa")
        return np.array([weights[0, :, 0, pieces].mean(0).sum().item() for pieces in self.pieces])
