"""A BERT whose heads are wired: a word "3_7" is the fourth of its sentence, and hangs on the eighth."""

from __future__ import annotations

import numpy as np
import torch

from regard.data import Dataset, Example, Word
from regard.subjects.scratch import scratch_text

SIZE = 16  # of a head: as many words may a sentence have


def sentences(count, seed=0, relations=("one", "two"), tags=("NOUN", "VERB")):
    lots, found = np.random.default_rng(seed), []
    for number in range(count):
        size = int(lots.integers(5, 12))
        heads = [-1, *(int(lots.choice([j for j in range(size) if j != i])) for i in range(1, size))]
        forms = [f"{i}_{max(head, 0)}" for i, head in enumerate(heads)]
        words, at = [], 0
        for i, (form, head) in enumerate(zip(forms, heads, strict=True)):
            relation = "root" if head < 0 else str(lots.choice(relations))
            words.append(Word(form, at, at + len(form), tags[i % len(tags)], head, relation))
            at += len(form) + 1
        found.append(Example(" ".join(forms), id=str(number), marks={"words": tuple(words)}))
    return Dataset.of(found)


def untrained(layers=2):
    every = [f"{i}_{j}" for i in range(SIZE) for j in range(SIZE)]
    return scratch_text(every, ["no", "yes"], layers=layers)


def wired():
    """Layer 0, head 0: each word looks at its head. Head 1: each word looks at its dependents. The others: at all."""
    subject = untrained(layers=1)
    bert = subject.model.bert
    vocabulary = subject.tokenizer.get_vocab()
    with torch.no_grad():
        for table in (bert.embeddings.word_embeddings, bert.embeddings.position_embeddings,
                      bert.embeddings.token_type_embeddings):  # fmt: skip
            table.weight.zero_()
        for word, place in vocabulary.items():
            if "_" in word:
                own, head = map(int, word.split("_"))
                bert.embeddings.word_embeddings.weight[place, own] = 1.0
                bert.embeddings.word_embeddings.weight[place, SIZE + head] = 1.0
        part = bert.encoder.layer[0].attention.self
        for one in (part.query, part.key):
            one.weight.zero_()
            one.bias.zero_()
        eye = torch.eye(SIZE)
        part.query.weight[:SIZE, SIZE : 2 * SIZE] = 2 * eye
        part.key.weight[:SIZE, :SIZE] = eye
        part.query.weight[SIZE : 2 * SIZE, :SIZE] = 2 * eye
        part.key.weight[SIZE : 2 * SIZE, SIZE : 2 * SIZE] = eye
    return subject
