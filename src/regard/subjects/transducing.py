"""Recurrent encoder–decoders that rewrite texts by a rule, so that the true alignment is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from regard.data import Example, transduction
from regard.data.transduction import PADDING, START, TASKS
from regard.errors import InputError, NotServed, OptionError, WrongTarget, choose, nearest
from regard.subjects import targets
from regard.subjects.tokens import as_list, described, device_of, spread
from regard.types import Batch, Features, How, Of, Score, Source, Special, Targets

AT_ONCE = 64  # examples whose quality is told in one pass


@dataclass(frozen=True, eq=False)
class TransducerSubject:
    """A `regard.models.Transducer` with its vocabulary and its task. Made by `transducer`.

    What it says is a word for each row of the target, so there is no single class: what is explained is a function of
    its output.
    """

    model: nn.Module
    vocabulary: Mapping[str, int]
    task: str
    special: ClassVar[Special] = "keep"
    head: ClassVar[targets.Head] = targets.Head("embedding", targets.no_place, str)

    __repr__ = described

    @property
    def predicts(self) -> bool:
        """There is a word for each row, and not one class."""
        return False

    def encode(self, inputs: Any) -> Batch:
        """(source, target) pairs, texts of words between white space, to tensors on the model's device.

        Row t of the decoder takes the word before and predicts word t of the target; row 0 takes the start mark. Where
        both sequences have as many rows, the source gets one masked row more, by which attention is told apart.
        """
        pairs = self._pairs(inputs)
        sources, said = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        taken = [[START, *words[:-1]] for words in said]
        rows, target_rows = (max(map(len, texts)) for texts in (sources, taken))
        source, source_real = self._padded(sources, rows + (rows == target_rows))
        ids, real = self._padded(taken, target_rows)
        features = tuple(Features.named(words, range(len(words)), ()) for words in sources)
        return Batch(
            {"source": source, "source_real": source_real, "taken": ids},
            real,
            tuple(Features.named(words, range(len(words)), (START,)) for words in taken),
            source=Source(source_real, features),
        )

    def probe(self, batch: Batch) -> Batch:
        """The first example."""
        return batch.pick([0])

    def forward(self, batch: Batch) -> Tensor:
        """``(example, row, word)`` logits; 0 at rows that are padding, which nothing is read from."""
        logits = cast(Tensor, self.model(**batch.inputs))
        return logits.masked_fill(~batch.real.unsqueeze(-1).to(logits.device), 0)

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """Not served: without a word there is another target, not another decision."""
        raise NotServed(
            f"how={how!r}: words cannot be removed from texts that are rewritten word by word. Use how='attention'."
        )

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain: a function of the output."""
        if not callable(target):
            raise WrongTarget(
                f"target={target!r}: this model says a word for each row of its target, so it needs a function as "
                "target, from its output (example, row, word) to one number for each example."
            )
        return targets.score(self.head, output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: all rows of the target alike."""
        return spread("mean", batch.real)

    def loss(self, output: Tensor, examples: Sequence[Example]) -> Tensor:
        """The mean cross-entropy of all words of the targets, of what `forward` gave for these examples."""
        wanted, real = self._wanted(examples)
        if output.shape[:2] != real.shape:
            raise InputError(
                f"output has shape {tuple(output.shape)}, but the {len(examples)} examples have up to {real.shape[1]} "
                "target words. Pass what forward gave for the same examples."
            )
        real = real.to(output.device)
        return F.cross_entropy(output[real], wanted.to(output.device)[real])

    def fits(self, output: Tensor, examples: Sequence[Example]) -> NDArray[np.float64]:
        """``(example,)``: the share of target words that are most probable in their row, given those before them."""
        wanted, real = self._wanted(examples)
        right = (output.argmax(-1).to(wanted.device) == wanted) & real
        return np.asarray((right.sum(-1) / real.sum(-1)).double().numpy(force=True))

    def aligned(self, batch: Batch) -> Tensor:
        """``(example, row, source row)``: True at the source word that each word of the target comes from."""
        assert batch.source is not None
        found = torch.zeros(*batch.real.shape, batch.source.real.shape[1], dtype=torch.bool)
        lengths = zip(batch.real.sum(-1).tolist(), batch.source.real.sum(-1).tolist(), strict=True)
        for example, (rows, source_rows) in enumerate(lengths):
            if rows != source_rows:
                raise InputError(
                    f"inputs[{example}]: the source has {source_rows} words and the target {rows}; by the rule "
                    f"{self.task!r} they have the same number, so these are not aligned."
                )
            found[example, range(rows), transduction.aligned(self.task, rows)] = True
        return found.to(batch.real.device)

    def _pairs(self, inputs: Any) -> list[tuple[list[str], list[str]]]:
        """The words of each source and target, all of which are known."""
        words = [name for name in self.vocabulary if name not in (PADDING, START)]
        pairs = []
        for number, pair in enumerate(as_list(inputs)):
            if not isinstance(pair, tuple):
                raise InputError(f"inputs[{number}]={pair!r} is one text: pass (source, target) pairs.")
            source, target = (text.split() for text in pair)
            for word in (*source, *target):
                if word not in self.vocabulary or word in (PADDING, START):
                    raise InputError(
                        f"inputs[{number}]: the word {word!r} is not known.{nearest(word, words)} "
                        f"There are {targets.listed(tuple(words))}."
                    )
            pairs.append((source, target))
        return pairs

    def _wanted(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """The ids of the targets, and where they are: ``(example, row)``."""
        for number, one in enumerate(examples):
            if isinstance(one.input, tuple) and one.label not in (None, one.input[1]):
                raise InputError(
                    f"examples[{number}]: its label {one.label!r} is not its target {one.input[1]!r}: what the decoder "
                    "is given is what it learns to say."
                )
        said = [target for _, target in self._pairs([one.input for one in examples])]
        return self._padded(said, max(map(len, said)))

    def _padded(self, texts: list[list[str]], rows: int) -> tuple[Tensor, Tensor]:
        """Ids and padding mask, both ``(example, row)``, with so many rows."""
        listed = [torch.tensor([self.vocabulary[word] for word in words]) for words in texts]
        ids = pad_sequence(listed, batch_first=True, padding_value=self.vocabulary[PADDING])
        ids = F.pad(ids, (0, rows - ids.shape[1]), value=self.vocabulary[PADDING])
        real = torch.arange(rows) < torch.tensor([len(words) for words in texts])[:, None]
        device = device_of(self.model)
        return ids.to(device), real.to(device)


def transducer(model: nn.Module, vocabulary: Mapping[str, int], task: str) -> TransducerSubject:
    """An encoder–decoder on (source, target) pairs as a subject, whose true alignment is that of a task.

    Args:
        model: a `regard.models.Transducer`, or what is called as it is: ``model(source=, source_real=, taken=)``.
        vocabulary: words to ids; "<pad>" and "<sos>" must be among them. `regard.data.transduction.vocabulary` has one.
        task: "copy", "reverse" or "flip": what the targets of its inputs are to their sources.

    Example:
        >>> import regard
        >>> from regard.data.transduction import transduce, vocabulary
        >>> from regard.models import scratch_transducer
        >>> subject = transducer(scratch_transducer(words=20), vocabulary(20), "reverse")
        >>> t = regard.trace(subject, transduce("reverse", 3).inputs())
        >>> t.sites
        (Site(0, 'Transducer', 'cross', shape=(3, 1, 8, 9)),)
    """
    choose("task", task, TASKS)
    if not isinstance(vocabulary, Mapping) or not {PADDING, START} <= {*vocabulary} or len(vocabulary) < 3:
        raise OptionError("vocabulary must map words to ids, '<pad>' and '<sos>' among them.")
    rows = getattr(getattr(model, "embedding", None), "num_embeddings", None)
    most = max(vocabulary.values())
    if rows is not None and most >= rows:
        raise OptionError(f"vocabulary has ids up to {most}, but the model embeds {rows} words: it is another model's.")
    return TransducerSubject(model, dict(vocabulary), task)
