"""One loop that fits a subject's model to data, for whatever aim."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.edits import Sites
from regard.attention.learning import Look, Watch
from regard.checkpointing import Memory
from regard.data import Dataset, Example
from regard.data.planted import Planted, plant
from regard.errors import EmptyInput, InputError, NonFinite, NotServed, OptionError, WrongTarget, at_least_one
from regard.jobs.running import Runner
from regard.memory import processes, weight
from regard.progress import Counter
from regard.types import Batch, Subject

UNDECIDED = 0.2  # share of a planted training set without a cause: a model that has none left does not know
LOOKAHEAD = 16  # batches whose examples are sorted by length among themselves
PROBED = 3  # examples that tell which attention there is; few, so that they are hardly as many as heads
AT_ONCE = 64  # examples that are run together where nothing is learned


def shared_out(runner: Runner, threads: int | None, model: Any) -> tuple[Runner, int]:
    """Where units of a model run, and how many threads each process has, where nobody said."""
    if runner.workers is None and runner.kind == "local":
        runner = replace(runner, workers=processes(weight(model)))
    cores = torch.get_num_threads() if runner.workers and runner.address is None else 1  # of others nothing is known
    return runner, threads or max(1, cores // (runner.workers or 1))


@contextmanager
def threaded(count: int) -> Iterator[None]:
    """So many threads of torch, for the length of a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def settled(seed: int, **devices: Any) -> Iterator[None]:
    """All generators that a process has begin at a seed, and are afterwards as they were.

    Units share processes: what one of them drew must not change what another does. Ours draw from torch's only.
    """
    before = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        with torch.random.fork_rng(**devices):
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@dataclass(eq=False)
class Step:
    """What a loss is made of: some examples, and what the model said and where it looked.

    Args:
        subject: what is trained.
        examples: those of the batch.
        places: their numbers among all examples that are learned from, or held out.
        batch: the same, as the model takes them.
        output: what it said, with its graph.
        watch: what has seen its attention; None: nothing has.
    """

    subject: Any
    examples: Sequence[Example]
    places: Sequence[int]
    batch: Batch
    output: Tensor
    watch: Watch | None

    @cached_property
    def looks(self) -> list[Look]:
        """Where each of the sites that the aim names looked; with the graph."""
        if self.watch is None:
            raise OptionError("sites=None: attention was not watched. Name sites, such as 'last', to learn from it.")
        return self.watch.looks()

    @cached_property
    def usual(self) -> Tensor:
        """Cross-entropy (of a number: the squared error), and what the model itself adds to it."""
        own = getattr(self.subject, "loss", None)
        loss: Tensor = (
            _loss(self.subject, self.output, self.examples) if own is None else own(self.output, self.examples)
        )
        penalty = getattr(self.subject.model, "penalty", None)
        return loss if penalty is None else loss + penalty


@dataclass(frozen=True, eq=False)
class Aim:
    """What a model is trained for; the usual is to predict labels.

    Args:
        sites: whose attention the loss looks at: "last", "all", numbers and names; None: it looks at none.
        uniform: at which sites attention is uniform, from the first step on and for good; None: at none.
        extra: what is added to the usual loss.
    """

    sites: Sites = None
    uniform: Sites = None
    extra: Callable[[Step], Tensor] | None = None

    def pupil(self, subject: Any, examples: Sequence[Example]) -> Pupil:
        """The subject, watched where that is needed; the examples tell which attention there is."""
        if self.sites is None and self.uniform is None:
            return Pupil(subject, None)
        few, sites = inputs_of(examples[:PROBED]), "last" if self.sites is None else self.sites
        return Pupil(subject, Watch(subject, few, sites=sites, uniform=self.uniform))

    def learner(
        self, model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What is trained, and what trains it."""
        return model, make(model)

    def loss(self, step: Step) -> Tensor:
        """What is minimised: a mean over the examples of the step."""
        return step.usual if self.extra is None else step.usual + self.extra(step)

    def quality(self, pupil: Pupil, examples: Sequence[Example]) -> float:
        """How good the model is on examples that are held out; the best epoch is kept."""
        return float(pupil.fits(examples).mean())


@dataclass(frozen=True, eq=False)
class Pupil:
    """A subject that is trained: it runs as the aim wants, also where nothing is learned.

    Args:
        subject: what is trained.
        watch: runs it with its attention seen or made uniform; None: it runs by itself.
    """

    subject: Any
    watch: Watch | None

    def step(self, examples: Sequence[Example], places: Sequence[int]) -> Step:
        """Run some of the examples."""
        some = [examples[place] for place in places]
        batch = self.subject.encode(inputs_of(some))
        output = self.subject.forward(batch) if self.watch is None else self.watch(batch)
        return Step(self.subject, some, places, batch, output, self.watch)

    @torch.no_grad()
    def steps(self, examples: Sequence[Example]) -> Iterator[Step]:
        """Run all examples, those of like lengths together; the model is in eval mode."""
        self.subject.model.eval()
        order = sorted(range(len(examples)), key=lambda place: length_of(examples[place]))
        for start in range(0, len(order), AT_ONCE):
            yield self.step(examples, order[start : start + AT_ONCE])

    def fits(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """``(example,)``: how right the model is on each, in their order."""
        found: dict[int, float] = {}
        for step in self.steps(examples):
            found |= dict(zip(step.places, fits(self.subject, step.output, step.examples), strict=True))
        return np.array([found[place] for place in range(len(examples))])

    def outputs(self, examples: Sequence[Example]) -> Tensor:
        """``(example, class)``, in their order."""
        found: dict[int, Tensor] = {}
        for step in self.steps(examples):
            found |= dict(zip(step.places, step.output, strict=True))
        return torch.stack([found[place] for place in range(len(examples))])


def fit(
    subject: Subject,
    data: Dataset,
    *,
    validation: Dataset | None = None,
    epochs: int = 5,
    patience: int | None = None,
    batch_size: int = 32,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    seed: int = 0,
    aim: Aim | None = None,
    checkpoint: str | Path | None = None,
) -> pd.DataFrame:
    """Train the subject's model, in place.

    Args:
        subject: what is trained; its model ends in eval mode.
        data: texts, pairs or rows, with labels.
        validation: after each epoch the model is tried on these; it ends as it was when it was most accurate (for a
            regression: when its error was least), for the last time.
        epochs: how often all data are seen.
        patience: stop after so many epochs in which validation has not become better; None: never.
        batch_size: examples in a step.
        optimizer: makes one for the model; None: AdamW with a learning rate of 1e-3.
        seed: of the order of examples, and of dropout. The model is initialised before.
        aim: what it is trained for; None: to predict the labels. ``regard.training.Aim(sites="last", extra=…)`` adds a
            loss of attention to that.
        checkpoint: a .safetensors file in which the state after each epoch is kept; where it is there already, training
            goes on from it, to the same bits.

    Returns:
        A row for each epoch: its number, the mean loss, and the accuracy (or minus the squared error) on validation.
    """
    examples, aim = labelled(data), aim or Aim()
    held = None if validation is None else labelled(validation)
    at_least_one("epochs", epochs)
    at_least_one("batch_size", batch_size)
    make = optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    model, pupil = subject.model, aim.pupil(subject, examples)
    with torch.random.fork_rng(), Counter("training", epochs * len(examples)) as counter:
        torch.manual_seed(seed)
        whole, trainer = aim.learner(model, make)
        memory = Memory(whole, trainer, np.random.default_rng(seed), None if checkpoint is None else Path(checkpoint))
        memory.recall()
        counter.advance(len(memory.rows) * len(examples))
        while len(memory.rows) < epochs and (held is None or memory.since != patience):
            total = 0.0
            whole.train()
            for places in _shuffled(examples, batch_size, memory.order):
                try:
                    loss = aim.loss(pupil.step(examples, places))
                except NonFinite:  # seen where attention is watched
                    raise Diverged(len(memory.rows), memory.rows) from None
                memory.optimizer.zero_grad()
                loss.backward()
                memory.optimizer.step()
                total += float(loss.detach()) * len(places)
                counter.advance(len(places))
                if not math.isfinite(total):
                    raise Diverged(len(memory.rows), memory.rows)
            whole.eval()
            row: dict[str, Any] = {"epoch": len(memory.rows), "loss": total / len(examples)}
            if held is not None:
                row["validation"] = aim.quality(pupil, held)
            memory.keep(row, row.get("validation"))
    memory.best_again()
    whole.eval()
    return pd.DataFrame(memory.rows)


class Diverged(NonFinite):
    """The loss became NaN or Inf; `rows` is what there was of the history."""

    def __init__(self, epoch: int, rows: Sequence[dict[str, Any]]) -> None:
        super().__init__(f"the loss became NaN or Inf in epoch {epoch}: training diverged. Lower the learning rate.")
        self.rows = [*rows]


def fit_planted(task: str, *, train: int = 2000, epochs: int = 20, seed: int = 0) -> tuple[Any, Planted]:
    """A small model that has learned a planted task, and the task.

    Args:
        task: a name from `regard.data.planted.TASKS`.
        train: how many examples the model learns from.
        epochs: of training; fewer where it does not become better.
        seed: of data and model.
    """
    from regard.subjects.scratch import scratch_table, scratch_text  # loads models of transformers, for seconds

    made = plant(task, train=train, undecided=UNDECIDED, seed=seed)
    labels = [str(label) for label in made.train.labels]
    subject: Any
    if made.train.kind == "table":
        columns = made.train.frame()[list(made.train.columns)]
        subject = scratch_table(made.train.columns, labels, torch.tensor(columns.mean().to_numpy()), seed=seed)
    else:
        subject = scratch_text(made.train.inputs(), labels, seed=seed)
    fit(subject, made.train, validation=made.held_out, epochs=epochs, patience=2, seed=seed)
    return subject, made


def predict(subject: Subject, inputs: Sequence[Any]) -> list[str]:
    """The name of the class that is predicted for each input."""
    return [name for output in _outputs(subject, inputs) for name in subject.score(output, None, "logit").names]


def _outputs(subject: Subject, inputs: Sequence[Any]) -> Iterator[Tensor]:
    with torch.no_grad():
        for start in range(0, len(inputs), AT_ONCE):
            yield subject.forward(subject.encode(as_inputs(inputs[start : start + AT_ONCE])))


def inputs_of(examples: Iterable[Example]) -> Any:
    """What a subject is given: a list of texts or pairs, or a table."""
    return as_inputs([example.input for example in examples])


def as_inputs(inputs: Sequence[Any]) -> Any:
    """Rows as a table; texts and pairs as they are."""
    listed = list(inputs)
    return pd.DataFrame(listed) if isinstance(listed[0], dict) else listed


def labelled(data: Iterable[Example]) -> list[Example]:
    """All examples; each must have a label."""
    examples = list(data)
    if not examples:
        raise EmptyInput("data holds no examples.")
    missing = [number for number, example in enumerate(examples) if example.label is None]
    if missing:
        raise InputError(
            f"data: {len(missing)} examples have no label, the first is number {missing[0]}. Name their column: "
            "regard.data.read(…, label=…), or --label-column."
        )
    return examples


def _shuffled(examples: list[Example], size: int, order: np.random.Generator) -> Iterable[list[int]]:
    """Batches of like lengths, in random order, by the places of their examples."""
    places = order.permutation(len(examples)).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(places), size * LOOKAHEAD):
        some = sorted(places[start : start + size * LOOKAHEAD], key=lambda place: length_of(examples[place]))
        batches += [some[i : i + size] for i in range(0, len(some), size)]
    return [batches[i] for i in order.permutation(len(batches))]


def length_of(example: Example) -> int:
    """In letters; rows of a table are all alike."""
    return len(" ".join(example.input)) if isinstance(example.input, tuple) else len(example.input)


def _loss(subject: Any, output: Tensor, examples: Sequence[Example]) -> Tensor:
    head = subject.head
    if head.kind == "sigmoid":
        raise NotServed("an example has one label here, and the head of this model has several at a time.")
    if head.kind == "regression":
        return F.mse_loss(output[:, 0], _numbers([example.label for example in examples]).to(output))
    index = torch.tensor([class_of(head, example.label) for example in examples], device=output.device)
    if head.kind == "binary":
        return F.binary_cross_entropy_with_logits(output[:, 0], index.to(output))
    return F.cross_entropy(output, index)


def class_of(head: Any, label: Any) -> int:
    """The number of the class that a label names, or else is."""
    try:
        return int(head.find(str(label)))
    except WrongTarget:
        if isinstance(label, int):
            return label
        raise


def fits(subject: Any, output: Tensor, examples: Sequence[Example]) -> NDArray[np.float64]:
    """``(example,)``: 1 where the class is right, else 0; of a regression minus the squared error.

    A subject that is judged in another way has a function of this name.
    """
    if hasattr(subject, "fits"):
        return np.asarray(subject.fits(output, examples))
    head, labels = subject.head, [one.label for one in examples]
    if head.kind == "regression":
        return -((output[:, 0].double() - _numbers(labels).to(output.device)) ** 2).numpy(force=True)
    said = head.columns(output, "logit").argmax(-1).numpy(force=True)
    return np.asarray(said == [class_of(head, label) for label in labels], dtype=np.float64)


def _numbers(labels: Sequence[Any]) -> Tensor:
    return torch.tensor([float(label) for label in labels], dtype=torch.float64)
