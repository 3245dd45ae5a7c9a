"""One loop that fits a subject's model to data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data import Dataset, Example
from regard.data.planted import Planted, plant
from regard.errors import EmptyInput, InputError, WrongTarget
from regard.progress import Counter
from regard.types import Subject

UNDECIDED = 0.2  # share of a planted training set without a cause: a model that has none left does not know
LOOKAHEAD = 16  # batches whose examples are sorted by length among themselves


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
) -> pd.DataFrame:
    """Train the subject's model, in place, to predict the labels of the data.

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

    Returns:
        A row for each epoch: its number, the mean loss, and the accuracy (or minus the squared error) on validation.
    """
    examples = _labelled(data)
    held = None if validation is None else _labelled(validation)
    make = optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    model, order = subject.model, np.random.default_rng(seed)
    steps = make(model)
    rows: list[dict[str, Any]] = []
    best: tuple[float, dict[str, Any] | None] = (-np.inf, None)
    since = 0
    with torch.random.fork_rng(), Counter("training", epochs * len(examples)) as counter:
        torch.manual_seed(seed)
        for epoch in range(epochs):
            model.train()
            total = 0.0
            for some in _shuffled(examples, batch_size, order):
                loss = _loss(subject, subject.forward(subject.encode(inputs_of(some))), some)
                steps.zero_grad()
                loss.backward()
                steps.step()
                total += float(loss.detach()) * len(some)
                counter.advance(len(some))
            model.eval()
            row: dict[str, Any] = {"epoch": epoch, "loss": total / len(examples)}
            rows.append(row)
            if held is not None:
                row["validation"] = quality = _quality(subject, held)
                since = 0 if quality > best[0] else since + 1
                if quality >= best[0]:
                    best = quality, copy.deepcopy(model.state_dict())
                if since == patience:
                    break
    if best[1] is not None:
        model.load_state_dict(best[1])
    return pd.DataFrame(rows)


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
        for start in range(0, len(inputs), 64):
            yield subject.forward(subject.encode(as_inputs(inputs[start : start + 64])))


def inputs_of(examples: Iterable[Example]) -> Any:
    """What a subject is given: a list of texts or pairs, or a table."""
    return as_inputs([example.input for example in examples])


def as_inputs(inputs: Sequence[Any]) -> Any:
    """Rows as a table; texts and pairs as they are."""
    listed = list(inputs)
    return pd.DataFrame(listed) if isinstance(listed[0], dict) else listed


def _labelled(data: Dataset) -> list[Example]:
    examples = list(data)
    if not examples:
        raise EmptyInput("data holds no examples.")
    missing = [number for number, example in enumerate(examples) if example.label is None]
    if missing:
        raise InputError(f"data: {len(missing)} examples have no label, the first is number {missing[0]}.")
    return examples


def _shuffled(examples: list[Example], size: int, order: np.random.Generator) -> Iterable[list[Example]]:
    """Batches of like lengths, in random order."""
    places = order.permutation(len(examples))
    batches = []
    for start in range(0, len(places), size * LOOKAHEAD):
        some = sorted((examples[i] for i in places[start : start + size * LOOKAHEAD]), key=length_of)
        batches += [some[i : i + size] for i in range(0, len(some), size)]
    return [batches[i] for i in order.permutation(len(batches))]


def length_of(example: Example) -> int:
    """In letters; rows of a table are all alike."""
    return len(" ".join(example.input)) if isinstance(example.input, tuple) else len(example.input)


def _loss(subject: Any, output: Tensor, examples: list[Example]) -> Tensor:
    head = subject.head
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


def _quality(subject: Any, examples: list[Example]) -> float:
    """Accuracy; of a regression minus the mean squared error."""
    head, labels = subject.head, [one.label for one in examples]
    inputs = [one.input for one in examples]
    if head.kind == "regression":
        return -float(F.mse_loss(torch.cat([*_outputs(subject, inputs)])[:, 0].double(), _numbers(labels)))
    wanted = [head.name(class_of(head, label)) for label in labels]
    return float(np.mean([said == name for said, name in zip(predict(subject, inputs), wanted, strict=True)]))


def _numbers(labels: Sequence[Any]) -> Tensor:
    return torch.tensor([float(label) for label in labels], dtype=torch.float64)
