"""Many examples, on disk: what is drawn of a large data set need not fit into memory."""

from __future__ import annotations

import pickle
import tempfile
import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, overload

from regard.data.dataset import Example

MOST_HELD = 5_000  # examples that are held in memory


def held(examples: Iterable[Example]) -> Sequence[Example]:
    """The examples, to be asked for by number: in memory if they are few, or else on disk."""
    stream = iter(examples)
    first = tuple(islice(stream, MOST_HELD + 1))
    if len(first) <= MOST_HELD:
        return first
    spooled = Spooled()
    spooled.extend(first)
    spooled.extend(stream)
    return spooled


class Spooled(Sequence[Example]):
    """Examples in a file without a name, which this process alone can read, and which is gone when it ends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="regard-")  # noqa: SIM115 - open as long as this is used
        weakref.finalize(self, self._file.close)
        self._starts = array("Q", [0])
        self._lock = threading.Lock()  # a file has one place where it is read

    def extend(self, examples: Iterable[Example]) -> None:
        """Some more, behind those that are there."""
        for one in examples:
            pickle.dump(one, self._file, pickle.HIGHEST_PROTOCOL)
            self._starts.append(self._file.tell())

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Example]: ...
    def __getitem__(self, place: Any) -> Any:
        """One, or several, by number."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        with self._lock:
            self._file.seek(self._starts[place % len(self)])
            return pickle.load(self._file)  # from this process, see above
