"""What models are trained for, besides predicting labels: the same by other attention, hiding words, being guided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import punctuation
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.attention.learning import Look
from regard.data import Example
from regard.errors import InputError, NotServed
from regard.models.guided import Columns, GuidedMLP
from regard.training import Aim, Pupil, Step, inputs_of
from regard.types import Batch, Features
from regard.wording import truth_on

TINY = 1e-10  # inside logarithms
WIDTH = 64  # channels of a column, where no embedding is at hand
Mask = str | Sequence[str] | Callable[[str], bool]


@dataclass(frozen=True, eq=False)
class Known:
    """What the base said of an example: its output, and by site the weights of its words."""

    output: Tensor
    looks: Tensor


@dataclass(frozen=True, eq=False)
class Against(Aim):
    """The same output by other attention: TVD(ŷ, ŷ_base) − λ · KL(α ‖ α_base), a mean over examples.

    α is the map that people are shown: the mean over heads, on words, divided by its sum; with several sites KL is a
    mean over them.

    NOTE[DIFF] the authors' TVD of a binary output is half of it, so that their λ is half of ours; they sum over a
    batch, weigh classes, and stop by the loss of training. We stop by the same loss on development.

    Args:
        factor: λ.
        known: by identity of the example, what the base said of it.
    """

    factor: float = 0.0
    known: Mapping[int, Known] = field(default_factory=dict)

    def loss(self, step: Step) -> Tensor:
        """Nothing of the labels."""
        known = [self.known[id(one)] for one in step.examples]
        base = torch.stack([one.output for one in known]).to(step.output)
        far = torch.stack([
            kl(on_words_of(step.batch, look), padded([one.looks[place] for one in known], step.batch, look))
            for place, look in enumerate(step.looks)
        ]).mean(0)  # fmt: skip
        return (moved(step.subject.head, step.output, base) - self.factor * far).mean()

    def quality(self, pupil: Pupil, examples: Sequence[Example]) -> float:
        """Minus the same loss."""
        losses = [(float(self.loss(step)), len(step.examples)) for step in pupil.steps(examples)]
        return -sum(loss * count for loss, count in losses) / len(examples)


@dataclass(frozen=True, eq=False)
class Hide(Aim):
    """The usual loss, and −λ log(1 − αᵀm): attention must not be on what is impermissible.

    Args:
        factor: λ.
        mask: what is impermissible: words, "rationale", or a rule. Not asked for where the subject knows it.
        heads: "mean": the mean over heads of what each is punished by; "max": that of the head which has most.
    """

    factor: float = 0.0
    mask: Mask = ()
    heads: Literal["mean", "max"] = "mean"

    def loss(self, step: Step) -> Tensor:
        """With several sites the mean of their penalties."""
        if not self.factor:
            return step.usual
        penalties = []
        for look in step.looks:
            mass = mass_on(look, impermissible(step.subject, step.batch, step.examples, look, self.mask))
            each = -torch.log((1 - mass).clamp_min(TINY))  # example head
            penalties.append(each.mean(1) if self.heads == "mean" else each.amax(1))
        return step.usual + self.factor * torch.stack(penalties).mean()


@dataclass(frozen=True, eq=False)
class Guided(Aim):
    """A model without context that is told where to look.

    Args:
        base: reads the examples.
        by: "uniform", "own" or "given".
        known: by identity of the example, where the base looked.
    """

    base: Any = None
    by: str = "own"
    known: Mapping[int, Known] = field(default_factory=dict)

    def pupil(self, subject: Any, examples: Sequence[Example]) -> Pupil:
        """One that looks where it is told."""
        return GuidedPupil(subject, None, self)


@dataclass(frozen=True, eq=False)
class GuidedPupil(Pupil):
    """Runs the model on what the base reads, with weights from elsewhere."""

    aim: Guided = field(default_factory=Guided)

    def step(self, examples: Sequence[Example], places: Sequence[int]) -> Step:
        """Run some of the examples."""
        some, aim = [examples[place] for place in places], self.aim
        batch = aim.base.encode(inputs_of(some))
        attend = words_in(batch, batch.real.shape[1])
        given = None
        if aim.by == "uniform":
            given = attend / attend.sum(-1, keepdim=True).clamp_min(1)
        elif aim.by == "given":
            given = spread([normalised(aim.known[id(one)].looks.mean(0)) for one in some], attend)
        inputs = [batch.inputs[name] for name in self.subject.inputs]
        output = self.subject.model(*inputs, attend=attend, weights=given)
        return Step(self.subject, some, places, batch, output, None)


@dataclass(frozen=True, eq=False)
class GuideSubject:
    """What training asks of a model that sees no context."""

    model: GuidedMLP
    head: Any
    inputs: tuple[str, ...]


def guide_for(subject: Any, seed: int) -> GuideSubject:
    """A model without context for what a subject reads: it begins with the same embeddings, or with columns."""
    head = subject.head
    outputs = 1 if head.kind in ("binary", "regression") else head.size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if hasattr(subject, "schema"):
            cells = [*subject.schema.numbers, *subject.schema.categories]
            if odd := [name for name in subject.features.present.words if name not in cells]:
                raise NotServed(f"guide: {odd[0]!r} is no single column: several share a row of attention.")
            rows = [cells.index(token) if token in cells else -1 for token in subject.features.tokens]
            columns = Columns(len(subject.schema.numbers), subject.schema.cardinalities, rows, WIDTH)
            return GuideSubject(GuidedMLP(columns, width=WIDTH, outputs=outputs), head, ("numbers", "codes"))
        model = subject.model
        table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        table = table if table is not None else getattr(getattr(model, "encoder", None), "embedding", None)
        if isinstance(table, nn.Embedding):
            start = table.weight.detach().clone()
            own = nn.Embedding.from_pretrained(start, freeze=not table.weight.requires_grad)
        elif hasattr(subject, "vocabulary"):
            own = nn.Embedding(1 + max(subject.vocabulary.values()), WIDTH)
        else:
            raise NotServed(f"guide: {type(subject).__name__} has no embeddings of words to begin with.")
        inputs = ("input_ids",) if hasattr(subject, "tokenizer") else ("ids",)
        return GuideSubject(GuidedMLP(own, width=own.embedding_dim, outputs=outputs), head, inputs)


def features_of(batch: Batch) -> list[Features]:
    """What a person sees of each example; of its source where it has one."""
    return [one.present for one in (batch.source or batch).features]


def words_in(batch: Batch, keys: int) -> Tensor:
    """``(example, key)``: True at words, that is not at special tokens nor padding."""
    sequence = batch.sequence_of(keys)
    if sequence is None:
        raise NotServed(f"attention over {keys} keys is not over the rows of the input.")
    seen = torch.zeros(len(batch), keys, dtype=torch.bool, device=batch.real.device)
    for example, one in enumerate(sequence.features):
        seen[example, [row for row, word in zip(one.rows, one.word, strict=True) if word is not None]] = True
    return seen


def on_words_of(batch: Batch, look: Look) -> Tensor:
    """``(example, key)``: the map that people are shown, on words, divided by its sum."""
    return normalised(look.mean * words_in(batch, look.weights.shape[-1]))


def padded(looks: Sequence[Tensor], batch: Batch, look: Look) -> Tensor:
    """``(example, key)``: what the base gave the words of each, divided by its sum."""
    return spread(list(map(normalised, looks)), words_in(batch, look.weights.shape[-1])).to(look.weights)


def normalised(weights: Tensor) -> Tensor:
    """Weights ``(…, word)`` divided by their sum."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(TINY)


def spread(values: Sequence[Tensor], seen: Tensor) -> Tensor:
    """``(example, key)``: values of words where there are words, 0 elsewhere."""
    result = torch.zeros(seen.shape, dtype=values[0].dtype, device=seen.device)
    result[seen] = torch.cat([*values]).to(seen.device)
    return result


def kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one ‖ other) of distributions ``(example, key)``, in nats; both are kept off 0."""
    return (one * ((one + TINY).log() - (other + TINY).log())).sum(-1)


def moved(head: Any, output: Tensor, other: Tensor) -> Tensor:
    """``(example,)``: the total variation between two outputs; of numbers, which are in sds, their distance."""
    return cast(Tensor, (output - other)[:, 0].abs() if head.kind == "regression" else head.apart(output, other))


def mass_on(look: Look, gone: Tensor) -> Tensor:
    """``(example, head)``: how much of attention is on what is True in ``(example, row or 1, key)``."""
    every = gone.to(look.weights).expand(*look.read.shape, -1)
    return torch.einsum("er,ehrk,erk->eh", look.read, look.weights, every)


def impermissible(subject: Any, batch: Batch, examples: Sequence[Example], look: Look, mask: Mask) -> Tensor:
    """``(example, row or 1, key)``: True at keys that attention should not be seen on."""
    if hasattr(subject, "aligned"):  # of a sequence that is written another word at each step
        at = look.rows[..., None].expand(-1, -1, look.weights.shape[-1])
        return cast(Tensor, subject.aligned(batch).gather(1, at))
    keys = look.weights.shape[-1]
    gone = torch.zeros(len(batch), 1, keys, dtype=torch.bool, device=batch.real.device)
    sequence = batch.sequence_of(keys)
    assert sequence is not None
    for place, (example, one) in enumerate(zip(examples, sequence.features, strict=True)):
        flags = flagged(example, one.words, mask)
        rows = [row for row, word in zip(one.rows, one.word, strict=True) if word is not None and flags[word]]
        gone[place, 0, rows] = True
    return gone


def flagged(example: Example, words: Sequence[str], mask: Mask) -> NDArray[np.bool_]:
    """Which words are impermissible: those listed, those of the rationale column, or those of which a rule says so."""
    if isinstance(mask, str):
        marked = truth_on(example, words)
        if marked is None:
            raise InputError(f"mask={mask!r}: example {example.id!r} has no rationale to say which words are meant.")
        return marked
    if callable(mask):
        return np.array([bool(mask(word)) for word in words], dtype=bool)
    listed = {word.lower() for word in mask}
    # "he," is "he", where words are what stands between white space
    return np.array([bool({word.lower(), word.strip(punctuation).lower()} & listed) for word in words], dtype=bool)
