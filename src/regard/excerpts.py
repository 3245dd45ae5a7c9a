"""What a batch takes of the data, so that it can run where the rest is not."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data import Example
from regard.jobs.plan import Unit

REPEATS = 5  # cells of other rows that are put in the place of each


@dataclass(frozen=True, eq=False)
class Excerpt:
    """Some of many examples. They keep the numbers and names that they have among all, and so their results.

    Its length is that of all, and what is iterated over is what is at hand.

    Args:
        places: the numbers of those that run together.
        held: by number, these and others that take part.
        names: by number, what they are called.
        of: how many there are in all.
    """

    places: tuple[int, ...]
    held: Mapping[int, Example] = field(repr=False)
    names: Mapping[int, str] = field(repr=False)
    of: int

    def __len__(self) -> int:
        return self.of

    def __iter__(self) -> Iterator[Example]:
        return iter(self.held.values())

    def __getitem__(self, place: int) -> Example:
        return self.held[place]


@dataclass(frozen=True, eq=False)
class Parcel:
    """A unit of work with what it takes of the data.

    Args:
        unit: what is to be done.
        examples: what it is done with.
        target: what is explained: of all the same, or of each by its number.
    """

    unit: Unit
    examples: Excerpt
    target: Any


def parcels(units: Sequence[Unit], drawn: Any, names: Any, seed: int) -> list[Parcel]:
    """Units with what they take of the examples that were drawn; of a table also rows of which they borrow cells."""
    made: dict[tuple[int, ...], tuple[Excerpt, Any]] = {}
    for places in dict.fromkeys(unit.places for unit in units):
        kept = [*places]
        if drawn.kind == "table":
            kept += others([names[place] for place in places], len(drawn.examples), seed).ravel().tolist()
        held = {place: drawn.examples[place] for place in kept}
        some = Excerpt(places, held, {place: names[place] for place in held}, len(drawn.examples))
        given = drawn.target
        made[places] = some, {place: given[place] for place in places} if isinstance(given, list) else given
    return [Parcel(unit, *made[unit.places]) for unit in units]


def others(names: Iterable[str], count: int, seed: int) -> NDArray[np.int64]:
    """``(example, repeat)``: the numbers of other rows, of so many, drawn for examples of these names."""
    seeds = [[seed, zlib.crc32(name.encode(errors="surrogatepass"))] for name in names]
    return np.array([np.random.default_rng(one).integers(count, size=REPEATS) for one in seeds])


def numbered(examples: Any) -> Iterable[tuple[int, Example]]:
    """The examples that are at hand, with their numbers among all."""
    return examples.held.items() if isinstance(examples, Excerpt) else enumerate(examples)
