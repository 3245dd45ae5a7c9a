"""Texts that are rewritten by a rule, so that it is known which source word each target word comes from."""

from __future__ import annotations

from random import Random

from regard.data.dataset import Dataset, Example
from regard.errors import OptionError, at_least_one, choose, whole_numbers

TASKS = ("copy", "reverse", "flip")
PADDING, START = "<pad>", "<sos>"  # no words of any text


def transduce(task: str, count: int, *, words: int = 20, shortest: int = 4, longest: int = 8, seed: int = 0) -> Dataset:
    """Pairs of a source and its target, which is also the label. Words and lengths are drawn evenly.

    The sources do not depend on the task: those of the same seed are the same for all three.

    Args:
        task: "copy"; "reverse"; or "flip", where each two words change places and an odd last one stays.
        count: number of examples.
        words: how many different ones there are: "w0", "w1", …
        shortest: words of the shortest text.
        longest: words of the longest text.
        seed: 0 or more.

    Example:
        >>> next(iter(transduce("flip", 1, shortest=5, longest=5))).input
        ('w8 w15 w1 w5 w9', 'w15 w8 w5 w1 w9')
    """
    choose("task", task, TASKS)
    count, words = at_least_one("count", count), at_least_one("words", words)
    shortest, longest = at_least_one("shortest", shortest), at_least_one("longest", longest)
    if shortest > longest:
        raise OptionError(f"shortest={shortest!r} must not be above longest={longest!r}.")
    numbers = whole_numbers("seed", seed)
    if len(numbers) != 1 or numbers[0] < 0:
        raise OptionError(f"seed={seed!r} must be one whole number, 0 or more.")
    rng = Random(f"transduction {numbers[0]}")
    examples = []
    for number in range(count):
        source = [f"w{rng.randrange(words)}" for _ in range(rng.randint(shortest, longest))]
        target = " ".join(source[place] for place in aligned(task, len(source)))
        examples.append(Example((" ".join(source), target), target, id=f"{task}-{number}"))
    return Dataset.of(examples)


def aligned(task: str, length: int) -> list[int]:
    """For each position of a target of this length the position of the source that its word comes from.

    Example:
        >>> aligned("flip", 5)
        [1, 0, 3, 2, 4]
    """
    choose("task", task, TASKS)
    places = range(at_least_one("length", length))
    if task == "flip":
        return [place ^ 1 if place ^ 1 < length else place for place in places]
    return [*places] if task == "copy" else [*reversed(places)]


def vocabulary(words: int = 20) -> dict[str, int]:
    """The ids of padding, the start mark and so many words.

    Example:
        >>> vocabulary(2)
        {'<pad>': 0, '<sos>': 1, 'w0': 2, 'w1': 3}
    """
    names = [PADDING, START, *(f"w{number}" for number in range(at_least_one("words", words)))]
    return {name: place for place, name in enumerate(names)}
