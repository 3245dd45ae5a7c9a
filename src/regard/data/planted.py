"""Tasks whose true cause is known because we planted it, to test whether explanations find it.

A model that solves such a task may still use something else than we meant: `confirm` changes the causes one by one and
says which of them the model uses. It is these with which its explanations are to be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.data.dataset import Dataset, Example
from regard.data.words import CLAUSES, JOINS, OPENINGS, PLAIN, SIDES
from regard.errors import InputError, OptionError, choose, whole_numbers

LABELS = ("negative", "positive")
COLUMNS = tuple("abcdefgh")
MARGIN = 0.25  # how far what decides is from the threshold, so that a model can be right on all
ODD = 100  # where there is a shortcut, it misleads in one of so many examples of training
SOLVED, USED, NEUTRAL = 0.95, 0.9, 0.05  # what `confirm` asks for: accuracy, flips of a cause, flips of what is none

# By task: the names of its causes, and when the label is positive. From what asks least of a model to what asks most.
_RULES: dict[str, tuple[tuple[str, ...], str]] = {
    "keyword": (("keyword",), "a musical instrument is named, and not a tool."),
    "columns": (("columns",), "the sum of the columns {} and {} is above 0."),
    "copies": (("copies",), "a musical instrument is named, and not a tool; either is named three times."),
    "copied_columns": (("copies",), "the columns {}, {} and {}, which are copies, are above 0."),
    "shortcut": (
        ("cause", "shortcut"),
        "both colours are warm or both are cold; but in training friday goes with positive and monday with negative.",
    ),
    "position": (("first",), "the first of the two instruments or tools that are named is an instrument."),
    "xor": (("first", "second"), "one of the columns {} and {} is above 0 and the other below."),
    "two_facts": (("first", "second"), "both colours are warm or both are cold."),
    "negation": (("keyword", "negation"), "something was liked without a negation before it, or disliked with one."),
}
TASKS: tuple[str, ...] = tuple(_RULES)


@dataclass(frozen=True, eq=False)
class Planted:
    """A task with its true causes. All from `test` on has an entry for each test example, in the same order.

    A mask has an entry for each word or column. The rationale of an example is the mask of what decides its label.

    Args:
        task: its name.
        says: the rule, in one sentence.
        seed: what it was drawn with.
        train: examples to learn from.
        held_out: examples drawn as those of `train` were, none of which is there: they tell whether a model has solved
            the task. They are those of `test`, except where there is a shortcut: it agrees with the label in 99 % of
            the examples of `train` and `held_out`, and in 50 % of those of `test`.
        test: examples to explain, none of which is in `train`.
        causes: for each cause, the masks. A negation that is not there is masked nowhere.
        changed: for each cause, the examples with it changed such that the rule gives the other label, which they have
            (of a shortcut: the label that its own rule gives). Only what is under the mask differs; but where there
            is no negation, one takes the place of the adverb before the keyword.
        kept: for each copy of a redundant cause, the examples without it: some other thing, or 0, takes its place. The
            label is the same, since any other copy suffices. Empty for tasks without copies.
        neutral: the examples with one word or column that is no cause exchanged for another of its kind. The later
            keyword of "position", which looks like a cause and is none, is always the one, and changes its side.
    """

    task: str
    says: str
    seed: int
    train: Dataset
    held_out: Dataset
    test: Dataset
    causes: Mapping[str, tuple[tuple[bool, ...], ...]]
    changed: Mapping[str, Dataset]
    kept: Mapping[str, Dataset]
    neutral: Dataset


@dataclass(frozen=True)
class Confirmation:
    """Whether a model may serve as ground truth, and of what. Flips are shares of the test examples that it got right.

    Args:
        accuracy: on `Planted.held_out`.
        flips: for each cause, how often the prediction changes with it.
        neutral_flips: how often it changes with what is no cause.
        kept_flips: for each copy of a redundant cause, how often it changes without that copy.
        uses: the causes whose change flips at least 90 % of the predictions.
        confirmed: the task is solved (accuracy of at least 95 %), at least one cause is used, and what should not
            matter flips at most 5 %. A single copy should not: a model that reads only that one has another truth.
        truth: for each test example the union of the masks of `uses`: what the model uses, not what we meant.
        says: all this in a sentence.
    """

    accuracy: float
    flips: Mapping[str, float]
    neutral_flips: float
    kept_flips: Mapping[str, float]
    uses: tuple[str, ...]
    confirmed: bool
    truth: tuple[tuple[bool, ...], ...]
    says: str


def plant(task: str, *, train: int = 2000, test: int = 500, undecided: float = 0.0, seed: int = 0) -> Planted:
    """A task whose true cause is known. Classes are balanced, and what is no cause is independent of the label.

    Args:
        task: one of `TASKS`.
        train: number of examples to learn from, at least 2.
        test: number of examples to explain, at least 2.
        undecided: share of the training examples that have no cause left (words are taken out, numbers are 0), each
            of them there with both labels. A model that has seen these does not know, rather than fall back on one of
            the labels, when a cause is removed: so that it shows in both.
        seed: 0 or more. Which columns of a table decide is drawn, too.

    Example:
        >>> found = plant("keyword", train=10, test=4)
        >>> found.says
        'The label is positive if a musical instrument is named, and not a tool.'
        >>> example = next(iter(found.test))
        >>> [word for word, causal in zip(example.words, example.rationale) if causal]
        ['trumpet']
    """
    choose("task", task, TASKS)
    if not 0 <= undecided < 1:
        raise OptionError(f"undecided={undecided!r} must be a share of the training examples, from 0 to less than 1.")
    train, test, seed = _at_least(2, "train", train), _at_least(2, "test", test), _at_least(0, "seed", seed)
    rng = Random(f"{task} {seed}")
    names, rule = _RULES[task]
    draw = partial(_sentence, rng, task)
    if task not in CLAUSES:
        places = sorted(rng.sample(range(len(COLUMNS)), rule.count("{}")))
        rule = rule.format(*(COLUMNS[place] for place in places))
        draw = partial(_row, rng, task, dict(zip(places, names * len(places), strict=False)))

    learned = _several(draw, train, rng, odd=ODD)
    count = round(undecided * train / 2) * 2
    learned[:count] = [_erased(learned[place // 2], place % 2) for place in range(count)]
    tested = _several(draw, test, rng, odd=2, but=learned)
    more = _several(draw, test, rng, odd=ODD, but=learned + tested) if "shortcut" in names else []

    meant = [name for name in names if name != "shortcut"]
    to_explain = _dataset(tested, meant, "test")
    copies = range(len(tested[0].places("copies")))
    return Planted(
        task,
        f"The label is positive if {rule}",
        seed,
        train=_dataset(learned, meant, "train"),
        held_out=_dataset(more, meant, "held_out") if more else to_explain,
        test=to_explain,
        causes={name: tuple(one.mask([name]) for one in tested) for name in names},
        changed={
            name: _dataset([_changed(one, name, rng) for one in tested], meant if name in meant else [name], "test")
            for name in names
        },
        kept={f"copy {n + 1}": _dataset([_without(one, n, rng) for one in tested], meant, "test") for n in copies},
        neutral=_dataset([_exchanged(one, rng) for one in tested], meant, "test"),
    )


def confirm(planted: Planted, predict: Callable[[list[Any]], Sequence[str]]) -> Confirmation:
    """Whether a model that was trained on a planted task may serve as ground truth, and which causes it uses.

    Args:
        planted: the task.
        predict: from a list of inputs (texts, or rows that map columns to numbers) to a label for each.

    Example:
        >>> found = confirm(plant("keyword", train=10, test=20), lambda texts: ["positive"] * len(texts))
        >>> found.confirmed, found.accuracy, found.uses
        (False, 0.5, ())
    """
    said = _predicted(predict, planted.test)
    right = said == _labels(planted.test)

    def flips(data: Dataset) -> float:
        changes = (_predicted(predict, data) != said)[right]
        return float(changes.mean()) if changes.size else 0.0

    accuracy = float((_predicted(predict, planted.held_out) == _labels(planted.held_out)).mean())
    caused = {name: flips(data) for name, data in planted.changed.items()}
    kept = {name: flips(data) for name, data in planted.kept.items()}
    neutral = flips(planted.neutral)
    uses = tuple(name for name, share in caused.items() if share >= USED)
    most = max([neutral, *kept.values()])
    confirmed = accuracy >= SOLVED and bool(uses) and most <= NEUTRAL
    masks = ([[name in uses and one for one in mask] for mask in planted.causes[name]] for name in planted.causes)
    truth = tuple(tuple(map(any, zip(*of_example, strict=True))) for of_example in zip(*masks, strict=True))
    says = (
        f"Accuracy {accuracy:.1%}; it uses {' and '.join(uses) or 'none of the causes'}; what should not matter flips "
        f"{most:.1%} of its decisions: it {'may' if confirmed else 'may not'} serve as ground truth."
    )
    return Confirmation(accuracy, caused, neutral, kept, uses, confirmed, truth, says.replace("%", " %"))


def _at_least(least: int, name: str, value: Any) -> int:
    numbers = whole_numbers(name, value)
    if len(numbers) != 1 or numbers[0] < least:
        raise OptionError(f"{name}={value!r} must be one whole number, {least} or more.")
    return numbers[0]


def _labels(data: Dataset) -> NDArray[np.str_]:
    return np.array([str(example.label) for example in data])


def _predicted(predict: Callable[[list[Any]], Sequence[str]], data: Dataset) -> NDArray[np.str_]:
    """The label that is predicted for each example, checked."""
    labels = list(predict(data.inputs()))
    if len(labels) != len(data):
        raise InputError(f"predict gave {len(labels)} labels for {len(data)} inputs. Return one for each.")
    for label in labels:
        if not isinstance(label, str) or label not in LABELS:
            raise InputError(f"predict gave {label!r}, which is no label. Return {LABELS[0]!r} or {LABELS[1]!r}.")
    return np.array(labels)


# --- drawing ---------------------------------------------------------------------------------------------------------


class _Drawn(NamedTuple):
    """An example by its cells, words or numbers. Kinds: "" for what is never exchanged. Roles: "" for none."""

    cells: list[Any]
    kinds: list[str]
    roles: list[str]
    label: int

    def places(self, role: str) -> list[int]:
        return [place for place, one in enumerate(self.roles) if one == role]

    def mask(self, roles: Iterable[str]) -> tuple[bool, ...]:
        """The cells that have one of these roles and play it; a copy that is gone, or an adverb, does not."""
        cells = zip(self.cells, self.kinds, self.roles, strict=True)
        return tuple(role in roles and _side(cell, kind) is not None for cell, kind, role in cells)

    def put(self, places: Sequence[int], cell: Any) -> _Drawn:
        return self._replace(cells=[cell if place in places else old for place, old in enumerate(self.cells)])


def _several(
    draw: Callable[..., _Drawn], count: int, rng: Random, *, odd: int, but: Iterable[_Drawn] = ()
) -> list[_Drawn]:
    """So many examples, balanced, none as in ``but``; a shortcut misleads in one of ``odd`` of each label."""
    seen = {tuple(one.cells) for one in but}
    found: list[_Drawn] = []
    for number in rng.sample(range(count), count):
        of_label, label = divmod(number, 2)
        one = None
        while one is None or tuple(one.cells) in seen:
            one = draw(label, agrees=of_label % odd < odd - 1)
        found.append(one)
    return found


def _dataset(drawn: Sequence[_Drawn], roles: Iterable[str], split: str) -> Dataset:
    """The examples, with the masks of these roles."""

    def shown(cells: list[Any]) -> str | dict[str, float]:
        return " ".join(cells) if isinstance(cells[0], str) else dict(zip(COLUMNS, cells, strict=True))

    return Dataset.of([
        Example(shown(one.cells), LABELS[one.label], one.mask(roles), split, f"{split}-{number}")
        for number, one in enumerate(drawn)
    ])  # fmt: skip


def _sentence(rng: Random, task: str, label: int, *, agrees: bool) -> _Drawn:
    """A sentence with that label; where there is a shortcut, it agrees with the label or does not."""
    slots = _slots(rng, task, label, agrees)
    clauses = [rng.choice(patterns) for patterns in rng.sample(CLAUSES[task], len(CLAUSES[task]))]
    start, end = rng.choice(OPENINGS) if len(clauses) < 3 else "", "."
    if task == "shortcut":
        start, end = ("on {day} ,", end) if rng.getrandbits(1) else (start, "on {day} .")
    joined = clauses[0] + "".join(f" {rng.choice(JOINS)} {clause}" for clause in clauses[1:])
    one = _Drawn([], [], [], label)
    for token in f"{start} {joined} {end}".split():
        kind = token.strip("{}") if token[0] == "{" else ""
        role, word = slots[kind].pop(0) if kind in SIDES else ("", rng.choice(PLAIN[kind]) if kind else token)
        one.cells.append(word)
        one.kinds.append(kind)
        one.roles.append(role)
    return one


def _slots(rng: Random, task: str, label: int, agrees: bool) -> dict[str, list[tuple[str, str]]]:
    """The words that decide, by kind and in the order in which they are read: the role and the word of each."""
    lot = rng.getrandbits(1)

    def of(kind: str, side: int) -> str:
        return rng.choice(SIDES[kind][side])

    match task:
        case "keyword":
            return {"keyword": [("keyword", of("keyword", label))]}
        case "copies":
            return {"keyword": [("copies", of("keyword", label))] * 3}
        case "position":
            return {"keyword": [("first", of("keyword", label)), ("later", of("keyword", lot))]}
        case "negation":
            feeling = of("feeling", label ^ lot)
            return {"negation": [("negation", of("negation", lot))], "feeling": [("keyword", feeling)]}
    first, second = _RULES[task][0] if task == "two_facts" else ("cause", "cause")
    return {
        "colour": [(first, of("colour", lot)), (second, of("colour", lot if label else 1 - lot))],
        "day": [("shortcut", of("day", label if agrees else 1 - label))],
    }


def _row(rng: Random, task: str, roles: dict[int, str], label: int, *, agrees: bool) -> _Drawn:
    """A row of a table with that label."""
    listed = [roles.get(place, "") for place in range(len(COLUMNS))]
    one = _Drawn([_number(rng) for _ in COLUMNS], ["number" for _ in COLUMNS], listed, label)
    first, second, *_ = roles
    if task == "copied_columns":
        one = one.put(list(roles), one.cells[first])
    while task == "columns" and abs(one.cells[first] + one.cells[second]) < MARGIN:
        one = one.put([first], _number(rng))
    a, b = one.cells[first], one.cells[second]
    positive = a * b < 0 if task == "xor" else a + b > 0
    return one if positive == label else _changed(one, roles[first], rng)._replace(label=label)


def _number(rng: Random) -> float:
    return round(rng.choice((-1, 1)) * (MARGIN + abs(rng.gauss(0, 1))), 4)


# --- changing --------------------------------------------------------------------------------------------------------


def _side(cell: Any, kind: str) -> int | None:
    """The side that a cell is on, 0 or 1; None for one that takes no side: 0, a thing, an adverb for a negation."""
    if kind == "number":
        return int(cell > 0) if cell else None
    return next((side for side, words in enumerate(SIDES[kind]) if cell in words and cell not in PLAIN["adverb"]), None)


def _changed(one: _Drawn, role: str, rng: Random) -> _Drawn:
    """With a cause on the other side, and the label that this gives."""
    places = one.places(role)
    kind = one.kinds[places[0]]
    if kind == "number":
        cells = [-cell if place in places else cell for place, cell in enumerate(one.cells)]
        return one._replace(cells=cells, label=1 - one.label)
    if role == "cause":  # one of the two colours: with both on the other side they would be as alike as before
        places = [rng.choice(places)]
    side = 1 - (_side(one.cells[places[0]], kind) or 0)
    changed = one.put(places, rng.choice(SIDES[kind][side]))  # the same word for all copies
    return changed._replace(label=side if role == "shortcut" else 1 - one.label)


def _without(one: _Drawn, copy: int, rng: Random) -> _Drawn:
    """With one copy of a redundant cause gone."""
    place = one.places("copies")[copy]
    return one.put([place], 0.0 if one.kinds[place] == "number" else rng.choice(PLAIN["thing"]))


def _erased(one: _Drawn, label: int) -> _Drawn:
    """With no cause left, and any label."""
    if "number" in one.kinds:
        numbers = [0.0 if role else cell for cell, role in zip(one.cells, one.roles, strict=True)]
        return one._replace(cells=numbers, roles=[""] * len(numbers), label=label)
    kept = [place for place, role in enumerate(one.roles) if not role]
    cells, kinds = ([some[place] for place in kept] for some in (one.cells, one.kinds))
    return _Drawn(cells, kinds, [""] * len(kept), label)


def _exchanged(one: _Drawn, rng: Random) -> _Drawn:
    """With something exchanged that is no cause."""
    if "later" in one.roles:
        return _changed(one, "later", rng)._replace(label=one.label)
    causal = one.mask({*one.roles} - {""})
    place = rng.choice([place for place, kind in enumerate(one.kinds) if kind and not causal[place]])
    kind = "adverb" if one.kinds[place] == "negation" else one.kinds[place]
    new = one.cells[place]
    while new == one.cells[place]:
        new = _number(rng) if kind == "number" else rng.choice(PLAIN[kind])
    return one.put([place], new)
