"""What can be read off hidden states: vectors of words and of readouts, layer by layer, and probes trained on them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.aligning import pieces_of, unaligned
from regard.attention import Site, Trace, trace
from regard.attention.outlets import layout_of
from regard.attention.state_edits import At
from regard.data import Example, Word
from regard.glimpses import Survey
from regard.progress import Counter
from regard.types import Batch

ENTRANCE = -1  # in the place of a layer: the vectors that the input enters as
ROOM = 512 * 2**20  # bytes of vectors that are held at a time; for more layers the model runs again
FAR, TINY = 10, 1e-12  # times the median length: a sink; a length that is none
STEPS = {"linear": 2000, "mlp": 1000}
SETTINGS = {"C": 0.1, "hidden": 64, "alpha": 1.0}  # of the linear probe; units and weight decay of the MLP
UNITS = {"tags": "words", "relations": "arcs", "class": "examples"}
Reader = Literal["linear", "mlp"]
READERS: tuple[Reader, ...] = ("linear", "mlp")
Floats = NDArray[np.float32]
Whole = NDArray[np.int64]
Marks = NDArray[np.bool_]
Hits = dict[str, Marks]  # of "accuracy", and of "control": (reader, layer, scored item), whether it was right


@dataclass(frozen=True, eq=False)
class Task:
    """What is to be read off vectors: a label for each item.

    Args:
        name: "tags", "relations" or "class".
        layers: where.
        vectors: ``(item, part)``: numbers of those that are put side by side.
        labels: ``(item,)``: numbers of what they are.
        names: of these numbers.
        types: ``(item,)``: numbers of word types, which the control task is about; None: there are none.
        example: ``(item,)``: the place of its example.
        trains: ``(item,)``: whether probes are trained on it; on the others they are scored.
    """

    name: str
    layers: Sequence[int]
    vectors: Whole
    labels: Whole
    names: Sequence[str]
    types: Whole | None
    example: Whole
    trains: Marks

    @property
    def shares(self) -> NDArray[np.float64]:
        """``(label,)``: how often each is there among those that probes are trained on."""
        return np.asarray(np.bincount(self.labels[self.trains], minlength=len(self.names)) / self.trains.sum())

    @property
    def seen(self) -> Marks:
        """``(scored item,)``: whether its type is there among those that probes are trained on."""
        if self.types is None:
            return np.zeros(int((~self.trains).sum()), dtype=bool)
        return np.isin(self.types[~self.trains], self.types[self.trains])

    def control(self, seed: int) -> Whole:
        """``(item,)``: labels by lot, one for each type (Hewitt & Liang 2019); without types they are permuted."""
        lots = np.random.default_rng(seed)
        if self.types is None:
            return np.asarray(lots.permutation(self.labels))
        return np.asarray(lots.choice(len(self.names), size=self.types.max() + 1, p=self.shares)[self.types])


def words_of(example: Example) -> Sequence[Word]:
    """The words of a sentence of CoNLL-U; of other data there are none."""
    words: Sequence[Word] = example.marks.get("words", ())
    return words


def stateful(subject: Any, seen: Trace) -> tuple[list[Site], list[str]]:
    """The sites at which rows of the input look at one another and whose block has a state; why others have none."""
    layout = layout_of(subject, seen.batch)
    sites = [site for site in seen.sites if site.kind in ("self", "encoder")]
    lacking = [why for site in sites if isinstance(why := layout[site.index, "block"], str)]
    return [site for site in sites if not isinstance(layout[site.index, "block"], str)], lacking


def drawn_by_words(survey: Survey, most: int) -> Survey:
    """As many of the sentences, by lot, as have so many words; an example without words counts as one."""
    order = np.random.default_rng(survey.seed).permutation(len(survey.examples))
    size = np.array([max(1, len(words_of(one))) for one in survey.examples])
    kept = order[: max(2, int((size[order].cumsum() <= most).sum()))]
    return replace(survey, examples=tuple(survey.examples[place] for place in sorted(kept)))


def aligned(survey: Survey) -> tuple[list[Marks], tuple[str, ...]]:
    """Of each sentence which of its words have a token; and what to warn of where some have none."""
    known = [np.zeros(len(words_of(one)), dtype=bool) for one in survey.examples]
    for places, batch in survey.batches("aligning words"):
        found = _pieces(batch, [survey.examples[place] for place in places]).any(-1).numpy()
        for at, place in enumerate(places):
            known[place] = found[at, : len(known[place])]
    total = sum(map(len, known))
    return known, unaligned(total - int(sum(one.sum() for one in known)), total, "words")


def task_of(
    survey: Survey, name: str, layers: Sequence[int], known: Sequence[Marks], train: Collection[int], least: int
) -> tuple[Task | None, str]:
    """A task without the labels that too few have; and which these are. None: there are not two others.

    Args:
        survey: the examples.
        name: "tags", "relations" or "class".
        layers: where.
        known: of each sentence which of its words have a vector.
        train: places of the examples that probes are trained on.
        least: how many items a label must have among those, and among the others.
    """
    items = [*_items(survey.examples, name, known)]
    count = pd.crosstab([one[1] for one in items], [one[3] in train for one in items])
    fewest = count.reindex(columns=[True, False], fill_value=0).min(axis=1)
    few = ", ".join(f"{label} ({number})" for label, number in fewest[fewest < least].items())
    names = [str(label) for label in fewest[fewest >= least].index]
    if len(names) < 2:
        return None, (
            f"there are too few examples: two labels must have {least} {UNITS[name]} in each half of them. Fewer have "
            f"{few or 'none'}. Pass more (examples=None takes all), or a smaller least."
        )
    parts, labels, types, places = zip(*(one for one in items if one[1] in names), strict=True)
    task = Task(
        name, layers, np.array(parts), np.array([names.index(one) for one in labels]), names,
        None if name == "class" else np.unique(types, return_inverse=True)[1],
        np.array(places), np.array([one in train for one in places]),
    )  # fmt: skip
    return task, few and (
        f"labels with fewer than {least} {UNITS[name]} in one half are left out, with {len(items) - len(labels):,} of "
        f"{len(items):,} {UNITS[name]}: {few}."
    )


def _items(
    examples: Sequence[Example], name: str, known: Sequence[Marks]
) -> Iterator[tuple[tuple[int, ...], str, str, int]]:
    """Numbers of vectors, label, type, place of the example."""
    starts = _starts(examples)
    for place, one in enumerate(examples):
        start, words = int(starts[place]), words_of(one)
        if name == "class":
            if one.label is not None:
                yield (start + len(words),), str(one.label), "", place
            continue
        for at, word in enumerate(words):
            kind = word.form.lower()
            if name == "tags" and known[place][at]:
                yield (start + at,), word.tag, kind, place
            elif name == "relations" and word.head >= 0 and known[place][at] and known[place][word.head]:
                yield (start + at, start + word.head), word.relation, kind, place


def state_at(seen: Trace, layer: int) -> Tensor:
    """``(example, row, channel)``: after a block, or at the entrance; of the source, where there is one."""
    if layer == ENTRANCE:
        return seen.state("rows" if seen.batch.source is None else "source", "entrance")
    return seen.state(layer, "block")


def vectors(survey: Survey, layers: Sequence[int], width: int) -> Iterator[tuple[int, Floats, Floats]]:
    """Layer by layer ``(vector, channel)``, of each example those of its words, then that of its readout; and lengths.

    Rows have length 1, as norms make them nearly: else a few that are a hundred times as long (attention sinks) would
    set the scale for all. A word is the mean over its rows, zeros if it has none. A readout is Σ_row r_row x_row; zeros
    where the prediction is not read from these rows. All that are held at a time take at most 512 MB, or are one layer.
    """
    starts = _starts(survey.examples)
    at_once = max(1, ROOM // (4 * width * int(starts[-1])))
    for first in range(0, len(layers), at_once):
        some = layers[first : first + at_once]
        kinds: list[At] = [*(("entrance",) if ENTRANCE in some else ()), *(("block",) if max(some) >= 0 else ())]
        held: dict[int, Floats] = {}  # the length of its rows comes last
        for places, batch in survey.batches("reading states"):
            examples = [survey.examples[place] for place in places]
            seen, pieces = trace(survey.subject, batch, states=kinds), _pieces(batch, examples)
            mean = pieces / pieces.sum(-1, keepdim=True).clamp_min(1)
            for layer in some:
                state = state_at(seen, layer).float().cpu()
                long = state.norm(dim=-1, keepdim=True)
                state = torch.cat([state / long.clamp_min(TINY), long], -1)
                if layer not in held:
                    held[layer] = np.zeros((int(starts[-1]), state.shape[-1]), dtype=np.float32)
                words = mean @ state if mean.shape[-1] == state.shape[1] else None
                read = seen.readout.to(state) if seen.readout.shape == state.shape[:2] else None
                for at, (place, one) in enumerate(zip(places, examples, strict=True)):
                    start, stop = starts[place], starts[place] + len(words_of(one))
                    held[layer][start:stop] = 0.0 if words is None else words[at, : stop - start]
                    held[layer][stop] = 0.0 if read is None else read[at] @ state[at]
        for layer in some:
            found = held.pop(layer)
            yield layer, found[:, :-1], found[:, -1]


def _starts(examples: Sequence[Example]) -> Whole:
    """The number of the first vector of each example; last, of all vectors."""
    return np.cumsum([0, *(len(words_of(one)) + 1 for one in examples)])


def _pieces(batch: Batch, examples: Sequence[Example]) -> Tensor:
    """``(example, word, row)``: 1 where a row is a token of a word."""
    spans = [[(word.start, word.end) for word in words_of(one)] for one in examples]
    if not any(spans):
        return torch.zeros(len(examples), 0, batch.real.shape[1])
    return pieces_of(batch, [str(one.input) for one in examples], spans)


def trained(
    survey: Survey, seen: Trace, tasks: list[Task], readers: list[Reader], control: bool
) -> tuple[list[Hits], list[str]]:
    """Of each task what probes of all layers read; and what to warn of: sinks, and probes that did not converge.

    Args:
        survey: the examples.
        seen: some of them, with states.
        tasks: what is to be read.
        readers: which probes.
        control: whether the control tasks are learned, too.
    """
    truths = [{"accuracy": one.labels} | ({"control": one.control(survey.seed)} if control else {}) for one in tasks]
    found: list[Hits] = [
        {what: np.zeros((len(readers), len(task.layers), len(task.seen)), dtype=bool) for what in truth}
        for task, truth in zip(tasks, truths, strict=True)
    ]
    layers = sorted({layer for one in tasks for layer in one.layers})
    width = max(state_at(seen, layer).shape[-1] for layer in layers)
    fits, late = (1 + control) * sum(len(one.layers) for one in tasks), dict.fromkeys(readers, 0)
    sinks: dict[int, float] = {}  # share of vectors that are far longer than others
    with Counter("training probes", fits * len(readers)) as counter:
        for layer, held, long in vectors(survey, layers, width):
            mine = long[np.unique(np.concatenate([task.vectors.ravel() for task in tasks if layer in task.layers]))]
            sinks[layer] = float((mine > FAR * np.median(mine)).mean())
            for task, truth, hits in zip(tasks, truths, found, strict=True):
                for what in truth if layer in task.layers else ():
                    for at, reader in enumerate(readers):
                        right, done = read_off(task, truth[what], held, reader, survey.seed)
                        hits[what][at, task.layers.index(layer)] = right
                        late[reader] += not done
                        counter.advance()
    said = "{} of {} {} probes had not converged after {:,} steps: their numbers may be too low."
    return found, [*_sunk(sinks), *(said.format(late[one], fits, one, STEPS[one]) for one in readers if late[one])]


def _sunk(sinks: Mapping[int, float]) -> Iterator[str]:
    if some := {layer: share for layer, share in sinks.items() if share}:
        yield (
            f"Up to {max(some.values()):.1%} of the vectors are more than {FAR} times as long as the median (attention "
            f"sinks), at {len(some)} of {len(sinks)} layers ({min(some)} to {max(some)}): what they hold besides is "
            "hardly readable there, which is not to say that others lose it."
        )


def read_off(task: Task, labels: Whole, held: Floats, reader: Reader, seed: int) -> tuple[Marks, bool]:
    """``(scored item,)``: whether a probe that is trained on the others says its label; and if training converged.

    Numbers have mean 0 and variance 1 over the items that the probe is trained on.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.preprocessing import StandardScaler

    learned, asked = labels[task.trains], labels[~task.trains]
    if (learned == learned[0]).all():  # a control task of few types may have one label: there is nothing to learn
        return asked == learned[0], True
    x = held[task.vectors].reshape(len(task.vectors), -1)
    scaler = StandardScaler().fit(x[task.trains])
    probe = _probe(reader, seed)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ConvergenceWarning)
        probe.fit(scaler.transform(x[task.trains]), learned)
    late = any(issubclass(one.category, ConvergenceWarning) for one in raised)
    return np.asarray(probe.predict(scaler.transform(x[~task.trains])) == asked), not late


def _probe(reader: Reader, seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    if reader == "linear":
        return LogisticRegression(C=SETTINGS["C"], max_iter=STEPS[reader])
    lot = int(np.random.default_rng(seed).integers(2**31))
    return MLPClassifier(
        (int(SETTINGS["hidden"]),), alpha=SETTINGS["alpha"], max_iter=STEPS[reader], tol=1e-3, random_state=lot
    )
