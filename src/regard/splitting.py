"""What models learn from, are stopped by, and are judged by: three parts of the data that never mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.data import Dataset, Example
from regard.errors import InputError, WrongTarget
from regard.training import class_of, labelled

SPLITS = ("train", "dev", "test")
FEWEST = {"train": 10, "dev": 5, "test": 5}
SHARES = {"dev": 0.1, "test": 0.2}  # of data that come without splits
NAMES = {
    "train": ("train", "training"), "dev": ("dev", "development", "validation", "valid", "val"), "test": ("test",),
}  # fmt: skip


def splits_of(data: Dataset, seed: int) -> dict[str, tuple[Example, ...]]:
    """The three parts of the data: those it comes with, or drawn by lot, of each class alike.

    Without a development set a tenth of what is learned from becomes one; without any split a fifth is for testing.
    """
    examples = labelled(data)
    named = [replace(one, id=one.id or str(place)) for place, one in enumerate(examples)]
    parts = {split: [one for one in named if one.split in NAMES[split]] for split in SPLITS}
    if data.splits and not (parts["train"] and parts["test"]):
        there = ", ".join(map(repr, data.splits))
        raise InputError(
            f"data has the splits {there}: there must be 'train' and 'test', or none. 'dev' may be missing."
        )
    if not data.splits:
        parts["train"] = named
        parts["train"], parts["test"] = _drawn(parts["train"], SHARES["test"], seed)
    if not parts["dev"]:
        parts["train"], parts["dev"] = _drawn(parts["train"], SHARES["dev"] / (1 - SHARES["test"]), seed)
    for split, least in FEWEST.items():
        if len(parts[split]) < least:
            raise InputError(
                f"data holds {len(named)} examples, of which {len(parts[split])} are for {split}: too few to train and "
                f"judge models ({least} at least). Pass more, or say by a column 'split' what is train, dev and test."
            )
    return {split: tuple(parts[split]) for split in SPLITS}


def _drawn(examples: list[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """What stays, and the share that is drawn by lot: of each class alike, as far as it goes."""
    lots = np.random.default_rng(seed).random(len(examples))
    classes = [str(one.label) for one in examples]
    few = len({*classes}) <= len(examples) // 10  # else they are numbers
    order = sorted(range(len(examples)), key=lambda place: (classes[place] if few else "", lots[place]))
    count = round(share * len(examples))
    steps = (np.arange(count) + 0.5) * len(examples) / max(count, 1)
    chosen = {order[int(step)] for step in steps}
    return ([one for place, one in enumerate(examples) if place not in chosen],
            [one for place, one in enumerate(examples) if place in chosen])  # fmt: skip


def must_fit(head: Any, parts: Mapping[str, Sequence[Example]]) -> None:
    """Refuse labels that the model has no class for, before anything is trained."""
    classes = 2 if head.kind == "binary" else head.size
    names = {head.name(place) for place in range(classes or 0)}
    by_name = any(str(one.label) in names for some in parts.values() for one in some)  # then 0 is no place
    odd: dict[str, str] = {}
    for split, some in parts.items():
        for one in some:
            try:
                known = 0 <= class_of(head, one.label) < (classes or np.inf)
            except WrongTarget:
                known = False
            known = known and (not by_name or str(one.label) in names)
            if not known:
                odd.setdefault(repr(one.label), split)
    if odd:
        there = ", ".join(repr(head.name(place)) for place in range(min(classes or 0, 10)))
        listed = ", ".join(f"{label} (in {split})" for label, split in [*odd.items()][:5])
        numbers = all(label.replace(".", "").replace("-", "").replace("e", "").isdigit() for label in odd)
        hint = " Numbers that are to be predicted need a recipe with regression=True." if numbers else ""
        raise InputError(f"{len(odd)} labels do not fit the head of the model: {listed}. It has {there}.{hint}")


def standardised(parts: Mapping[str, tuple[Example, ...]]) -> dict[str, tuple[Example, ...]]:
    """Numbers to predict, in standard deviations of those that are learned from."""
    try:
        known = np.array([float(one.label) for one in parts["train"]])  # type: ignore[arg-type]
        mean, sd = float(known.mean()), float(known.std()) or 1.0
        return {
            split: tuple(replace(one, label=(float(one.label) - mean) / sd) for one in some)  # type: ignore[arg-type]
            for split, some in parts.items()
        }
    except ValueError as problem:
        raise InputError(f"labels must be numbers for a regression: {problem}.") from None
