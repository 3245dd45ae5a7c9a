"""Small recipes whose truth is known: attention that is the decision, and attention that is not needed.

In `Gate` each word has a value that is never trained, and a score that is: ŷ = σ(s Σ α_t v_t). Words of one half of the
vocabulary tell the label, those of the other half tell it wrong as often as not, and only attention can tell them apart.
In `Pointer` the word after "key" counts, which no model can know that sees each word by itself.
In `Decoupled` the value of every row is the mean of all telling words, so that any attention gives the same output.
"""

from __future__ import annotations

import random

import torch
from torch import nn

import regard
from regard.data import Dataset, Example

GOOD, BAD = [f"good{i}" for i in range(6)], [f"bad{i}" for i in range(6)]
NOISE = [f"loud{i}" for i in range(6)], [f"soft{i}" for i in range(6)]
PLAIN = [f"plain{i}" for i in range(6)]
WORDS = ["<pad>", "<unk>", *GOOD, *BAD, *NOISE[0], *NOISE[1], *PLAIN, "key"]
VOCABULARY = {word: place for place, word in enumerate(WORDS)}
VALUES = torch.tensor([1.0 if w in (*GOOD, *NOISE[0]) else -1.0 if w in (*BAD, *NOISE[1]) else 0.0 for w in WORDS])
TELLING = torch.tensor([1.0 if w in GOOD else -1.0 if w in BAD else 0.0 for w in WORDS])


class Gate(nn.Module):
    output = "binary"

    def __init__(self, seed: int, decoupled: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scores = nn.Embedding(len(WORDS), 1)
        self.scores.weight.data *= 2.0 if decoupled else 0.1
        self.decoupled = decoupled
        self.register_buffer("values", TELLING if decoupled else VALUES)
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, ids, real, attend):
        values = self.values[ids]
        if self.decoupled:
            values = (
                (values * real).sum(-1, keepdim=True) / values.abs().sum(-1, keepdim=True).clamp_min(1)
            ).expand_as(values)
        weights = self.scores(ids)[..., 0].masked_fill(~attend, -torch.inf).softmax(-1)
        return self.scale * (weights[:, None] @ values[..., None])[:, 0]


class Pointer(Gate):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, decoupled=False)
        self.values = TELLING
        self.after = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids, real, attend):
        pointed = nn.functional.pad(ids[:, :-1] == VOCABULARY["key"], (1, 0))
        scores = self.scores(ids)[..., 0] + self.after * pointed
        weights = scores.masked_fill(~attend, -torch.inf).softmax(-1)
        return self.scale * (weights[:, None] @ self.values[ids][..., None])[:, 0]


class Build:
    def __init__(self, decoupled: bool, pointer: bool = False) -> None:
        self.decoupled, self.pointer = decoupled, pointer

    def __call__(self, train, seed):
        with torch.random.fork_rng():
            model = Pointer(seed) if self.pointer else Gate(seed, self.decoupled)
            return regard.pooled(model, VOCABULARY, labels=["bad", "good"])


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def recipe(*, decoupled: bool = False, pointer: bool = False, epochs: int = 6, patience: int | None = 3, **more):
    return regard.recipe(
        Build(decoupled, pointer), {"epochs": epochs, "patience": patience, "optimizer": adam},
        name="decoupled" if decoupled else "gate", **more,
    )  # fmt: skip


def data(train: int = 200, dev: int = 60, test: int = 80, seed: int = 0, noise: int = 4) -> Dataset:
    """Two telling words of a text agree with the label; noisy words do not care."""
    draws, made = random.Random(seed), []
    for split, count in (("train", train), ("dev", dev), ("test", test)):
        for place in range(count):
            label = place % 2
            words = draws.sample(GOOD if label else BAD, 2) + draws.sample(PLAIN, 2)
            words += [word for side in draws.choices(NOISE, k=noise) for word in draws.sample(side, 1)]
            draws.shuffle(words)
            mask = tuple(word in (*GOOD, *BAD) for word in words)
            made.append(Example(" ".join(words), ["bad", "good"][label], mask, split, f"{split}{place}"))
    return Dataset.of(made)


def pointing(train: int = 200, dev: int = 60, test: int = 80, seed: int = 0) -> Dataset:
    """Of five telling words the one after "key" is right; the others do not care."""
    draws, made = random.Random(seed), []
    for split, count in (("train", train), ("dev", dev), ("test", test)):
        for place in range(count):
            label = place % 2
            words = [word for side in draws.choices((GOOD, BAD), k=4) for word in draws.sample(side, 1)]
            at = draws.randrange(5)
            words[at:at] = ["key", draws.choice(GOOD if label else BAD)]
            made.append(Example(" ".join(words), ["bad", "good"][label], None, split, f"{split}{place}"))
    return Dataset.of(made)
