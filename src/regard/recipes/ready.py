"""Ready-made recipes: attention-pooled encoders, fine-tuned classifiers, FT-Transformers, small encoder–decoders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import nn

from regard.data import Dataset
from regard.errors import InputError, OptionError, at_least_one, choose
from regard.models import AttentionClassifier
from regard.recipes.core import AdamW, Recipe, recipe
from regard.types import Subject

MARKS = ("<pad>", "<unk>", "<sos>", "<eos>")


@dataclass(frozen=True)
class PooledAdam:
    """Jain & Wallace's: Adam with amsgrad; attention has no weight decay."""

    learning_rate: float = 1e-3
    weight_decay: float = 1e-5

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        """One for this model."""
        named = [(name.startswith(("inner", "outer")), one) for name, one in model.named_parameters()]
        groups = [
            {"params": [one for attends, one in named if not attends], "weight_decay": self.weight_decay},
            {"params": [one for attends, one in named if attends], "weight_decay": 0.0},
        ]
        return torch.optim.Adam(groups, lr=self.learning_rate, amsgrad=True)


@dataclass(frozen=True)
class ColumnsAdam:
    """rtdl's: AdamW without decay of biases, norms and embeddings, where the model says which these are."""

    learning_rate: float
    weight_decay: float = 1e-5

    def __call__(self, model: Any) -> torch.optim.Optimizer:
        """One for this model."""
        groups = model.make_parameter_groups() if hasattr(model, "make_parameter_groups") else model.parameters()
        return torch.optim.AdamW(groups, lr=self.learning_rate, weight_decay=self.weight_decay)


@dataclass(frozen=True, eq=False)
class _Pooled:
    vectors: Mapping[str, Any] | None
    least: int
    options: Mapping[str, Any]

    def __call__(self, train: Dataset, seed: int) -> Subject:
        from regard.subjects import pooled  # loads transformers, for seconds

        if train.kind != "text":
            raise InputError(f"attention_classifier learns from texts, and the data are {train.kind}s.")
        counts = Counter(word for one in train for word in one.words)
        words = [*MARKS, *sorted(word for word, count in counts.items() if count >= self.least and word not in MARKS)]
        labels = names_of(train)
        width = None if self.vectors is None else _width(self.vectors, words)
        sizes = {"embedding": width} if width else {}
        task: dict[str, Any] = {} if len(labels) == 2 else {"task": "multiclass", "classes": len(labels)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AttentionClassifier(words=len(words), **{**self.options, **sizes, **task})
            table = model.encoder.embedding.weight.data
            table.uniform_(-0.25, 0.25)[0] = 0  # N(0, 1) would saturate the LSTM
        for place, word in enumerate(words):
            if self.vectors is not None and word in self.vectors:
                table[place] = torch.as_tensor(np.asarray(self.vectors[word], dtype=np.float32))
        return pooled(model.eval(), {word: place for place, word in enumerate(words)}, labels=labels)


def attention_classifier(
    *,
    encoder: Literal["lstm", "cnn", "projection", "forward", "orthogonal"] = "lstm",
    attention: Literal["tanh", "dot"] = "tanh",
    vectors: Mapping[str, Any] | str | Path | None = None,
    embedding: int = 300,
    hidden: int = 128,
    diversity: float = 0.0,
    tying: float = 0.0,
    masked: float = 0.0,
    least: int = 1,
    epochs: int = 8,
    patience: int = 3,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    keep: str | Path | None = None,
) -> Recipe:
    """Attention-pooled encoders on the words of texts, as Jain & Wallace trained them.

    Args:
        encoder: "lstm" (bidirectional), "cnn", "projection" (no context), "forward" or "orthogonal" (one direction).
        attention: "tanh" (additive) or "dot".
        vectors: of words, to begin with: by word, or a text file with a word and its numbers in each line, as GloVe's.
            None: random ones.
        embedding: channels of the embeddings, where no vectors are given.
        hidden: channels of the encoder; the LSTMs have twice as many.
        diversity: factor of conicity in the loss (Mohankumar et al. 2020).
        tying: factor of how far states are from their words' embeddings (Tutek & Šnajder 2020).
        masked: factor of a masked language model (the same).
        least: how often a word must occur to be known.
        epochs: how often all examples are seen, at most.
        patience: stop after so many epochs in which the development set has become no better.
        batch_size: examples in a step.
        learning_rate: of Adam with amsgrad.
        keep: see `regard.recipe`.

    NOTE[DIFF] the best epoch is that of the best accuracy on development; Jain & Wallace take ROC-AUC, Wiegreffe &
    Pinter the test set. Classes are not weighted.
    """
    at_least_one("least", least)
    given: dict[str, Any] = {
        "encoder": encoder, "attention": attention, "embedding": at_least_one("embedding", embedding),
        "hidden": at_least_one("hidden", hidden), "diversity": diversity, "tying": tying, "masked": masked,
    }  # fmt: skip
    known = _read_vectors(vectors) if isinstance(vectors, (str, Path)) else vectors
    AttentionClassifier(words=len(MARKS), **given)  # refuses what cannot be built before anything else is done
    course = {"epochs": epochs, "patience": patience, "batch_size": batch_size, "optimizer": PooledAdam(learning_rate)}
    return recipe(_Pooled(known, least, given), course, name="attention_classifier", keep=keep)


def _width(vectors: Mapping[str, Any], words: list[str]) -> int:
    """How many numbers the vectors of these words have: all the same."""
    widths = {len(vectors[word]) for word in words if word in vectors}
    if len(widths) != 1:
        found = "none of the words of the data" if not widths else f"vectors of {sorted(widths)} numbers"
        raise InputError(f"vectors has {found}. Each word has one, and all are of the same length.")
    return widths.pop()


@dataclass(frozen=True)
class _FineTuned:
    path: str
    files: str  # a hash of the checkpoint, where it is at hand: another one may come to lie there
    tokens: int
    freeze: bool
    regression: bool
    trust_remote_code: bool

    def __call__(self, train: Dataset, seed: int) -> Subject:
        from regard.subjects import text
        from regard.subjects.loading import fresh_classifier

        if train.kind == "table":
            raise InputError("fine_tune learns from texts or pairs, and the data are rows of a table.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, tokenizer = fresh_classifier(
                self.path, None if self.regression else names_of(train), tokens=self.tokens,
                trust_remote_code=self.trust_remote_code,
            )  # fmt: skip
        if self.freeze and (table := model.get_input_embeddings()) is not None:
            table.requires_grad_(False)
        return text(model.eval(), tokenizer, over_limit="truncate")


def fine_tune(
    path: str | Path,
    *,
    tokens: int = 128,
    freeze: bool = True,
    regression: bool = False,
    epochs: int = 3,
    patience: int = 1,
    batch_size: int = 16,
    learning_rate: float = 5e-5,
    trust_remote_code: bool = False,
    keep: str | Path | None = None,
) -> Recipe:
    """A text classifier, fine-tuned from a pre-trained encoder.

    Args:
        path: a local folder or a hub name: the checkpoint **before** fine-tuning. One that has learned the task already
            would have nothing to learn.
        tokens: longer texts are truncated.
        freeze: leave the embeddings of words as they are.
        regression: labels are numbers.
        epochs: how often all examples are seen, at most.
        patience: stop after so many epochs in which the development set has become no better.
        batch_size: examples in a step.
        learning_rate: of AdamW.
        trust_remote_code: run Python code that comes with the checkpoint.
        keep: see `regard.recipe`.
    """
    from regard.locating import locate

    locate(path)
    build = _FineTuned(
        str(path), _of_files(path), at_least_one("tokens", tokens), freeze, regression, trust_remote_code
    )
    course = {"epochs": epochs, "patience": patience, "batch_size": batch_size, "optimizer": AdamW(learning_rate)}
    return recipe(build, course, name="fine_tune", keep=keep)


def _of_files(path: str | Path) -> str:
    kept, folder = blake2b(digest_size=16), Path(path).expanduser()
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"))):
        with file.open("rb") as opened:
            kept.update(file.name.encode() + file_digest(opened, "sha256").digest())
    return kept.hexdigest() if folder.is_dir() else ""


@dataclass(frozen=True)
class _Tabular:
    kind: str
    options: tuple[tuple[str, Any], ...]

    def __call__(self, train: Dataset, seed: int) -> Subject:
        from regard import estimators
        from regard.data.schema import Schema

        if train.kind != "table":
            raise InputError(f"{self.kind} learns from rows of a table, and the data are {train.kind}s.")
        one: Any = getattr(estimators, self.kind)(**dict(self.options))
        one.schema_ = Schema.of(pd.DataFrame([example.input for example in train]))
        if regresses := self.kind.endswith("Regressor"):
            one.target_mean_, one.target_sd_ = 0.0, 1.0
        else:
            one.classes_ = np.array(names_of(train), dtype=object)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            one.model_ = one._model(1 if regresses else len(one.classes_)).eval()
        return one.subject_  # type: ignore[no-any-return]


def ft_transformer(
    *,
    blocks: int = 3,
    width: int | None = None,
    regression: bool = False,
    epochs: int = 50,
    patience: int = 8,
    batch_size: int = 256,
    learning_rate: float = 1e-4,
    keep: str | Path | None = None,
) -> Recipe:
    """FT-Transformer on the rows of a table, as `regard.estimators.FTTransformerClassifier` builds it.

    Args:
        blocks: 1 to 6.
        width: channels of a column's state, a multiple of 8; None: rtdl's default for so many blocks.
        regression: labels are numbers.
        epochs: how often all rows are seen, at most.
        patience: stop after so many epochs in which the development set has become no better.
        batch_size: rows in a step.
        learning_rate: of AdamW.
        keep: see `regard.recipe`.
    """
    kind = "FTTransformerRegressor" if regression else "FTTransformerClassifier"
    at_least_one("blocks", blocks, 6)
    if width is not None and at_least_one("width", width) % 8:
        raise OptionError(f"width={width} must be a multiple of 8, its heads.")
    build = _Tabular(
        kind, (("blocks", blocks), ("width", width), ("batch_size", at_least_one("batch_size", batch_size)))
    )
    course = {"epochs": epochs, "patience": patience, "batch_size": batch_size, "optimizer": ColumnsAdam(learning_rate)}
    return recipe(build, course, name="ft_transformer", keep=keep)


@dataclass(frozen=True)
class _Sequences:
    task: str
    words: int
    sizes: tuple[tuple[str, int], ...]

    def __call__(self, train: Dataset, seed: int) -> Subject:
        from regard.data.transduction import vocabulary
        from regard.models import scratch_transducer
        from regard.subjects.transducing import transducer

        model = scratch_transducer(self.words, seed=seed, **dict(self.sizes))
        return transducer(model, vocabulary(self.words), self.task)


def sequences(
    task: Literal["copy", "reverse", "flip"],
    *,
    words: int = 20,
    embedding: int = 64,
    hidden: int = 64,
    epochs: int = 10,
    patience: int = 3,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    keep: str | Path | None = None,
) -> Recipe:
    """Small encoder–decoders on sequences whose alignment is known, for the trial `deceive` (Pruthi et al. 2020).

    Data come from ``regard.data.transduction.transduce(task, count, words=words)``.

    Args:
        task: "copy", "reverse", or "flip": words change places in pairs.
        words: how many there are.
        embedding: channels of the embeddings.
        hidden: channels of the GRUs.
        epochs: how often all examples are seen, at most.
        patience: stop after so many epochs in which the development set has become no better.
        batch_size: examples in a step.
        learning_rate: of AdamW.
        keep: see `regard.recipe`.
    """
    from regard.data.transduction import TASKS

    choose("task", task, TASKS)
    sizes = (("embedding", at_least_one("embedding", embedding)), ("hidden", at_least_one("hidden", hidden)))
    course = {"epochs": epochs, "patience": patience, "batch_size": batch_size, "learning_rate": learning_rate}
    return recipe(_Sequences(task, at_least_one("words", words), sizes), course, name=f"sequences, {task}", keep=keep)


READY = {"attention_classifier": attention_classifier, "fine_tune": fine_tune, "ft_transformer": ft_transformer}
# Which of them makes models like a subject's.
FITS = {
    "PooledSubject": "attention_classifier()",
    "TextSubject": "fine_tune(path)",
    "TabularSubject": "ft_transformer()",
}


def names_of(train: Dataset) -> list[str]:
    """The names of the classes."""
    names = [str(label) for label in train.labels]
    if len(names) < 2:
        raise InputError(f"the data have {len(names)} classes ({', '.join(names) or 'no labels'}): a model needs two.")
    return names


def _read_vectors(path: str | Path) -> dict[str, Any]:
    """A word and its numbers in each line."""
    found: dict[str, Any] = {}
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                word, *numbers = line.rstrip().split(" ")
                if len(numbers) < 2:  # a head line, as word2vec has it
                    continue
                found[word] = np.array(numbers, dtype=np.float32)
                if len(found[word]) != len(next(iter(found.values()))):
                    raise InputError(f"vectors={str(path)!r}, line {number}: not as many numbers as in the first.")
    except (OSError, ValueError) as problem:
        raise InputError(
            f"vectors={str(path)!r} cannot be read: {problem}. Each line is a word and its numbers."
        ) from None
    if not found:
        raise InputError(f"vectors={str(path)!r} holds none.")
    return found
