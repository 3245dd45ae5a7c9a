"""From rows to the words that a person sees: scores of tokens, and rationales between white space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from regard.data import Example
from regard.errors import InputError, NotServed
from regard.explanation import Explanation
from regard.types import JOIN, Features


def on_words(why: Explanation, features: Features) -> NDArray[np.float64]:
    """The scores of an explanation on the words of what can be removed: pieces are summed, special tokens left out.

    Words that no row stands for are left out, too: ``features.present`` has those that are there.
    """
    if why.axes != ("token",):
        raise InputError(
            f"{why.method} has scores with axes {why.axes}. Compare methods without per_layer and the like."
        )
    if "produced" in why.parts and "source" not in why.parts:
        raise NotServed(f"{why.method} has scores for what was produced only, and what can be removed is the source.")
    totals = np.zeros(len(features.present.words))
    for score, word in zip(why.scores.tolist(), why.features.present.word, strict=True):
        if word is not None and word < len(totals):  # what was produced comes after the source, and is not removed
            totals[word] += score
    return totals


def truth_on(example: Example, words: Sequence[str]) -> NDArray[np.bool_] | None:
    """A rationale, which is about words between white space, on the words that the model has.

    A word of the model's belongs to it if one of its letters does. A model that was given only the beginning of a text
    has the beginning of the rationale; signs that its tokenizer drops (joiners, say) are passed over.
    """
    if example.rationale is None:
        return None
    if example.words == tuple(words):
        return np.array(example.rationale)
    if example.kind == "table":
        return _truth_on_columns(example, words)
    letters = [(letter, mask) for word, mask in zip(example.words, example.rationale, strict=True) for letter in word]
    found, at = [], 0
    for word in words:
        marked = False
        for letter in "".join(word.split()):
            while at < len(letters) and letters[at][0] != letter and not letters[at][0].isalnum():
                at += 1
            if at == len(letters) or letters[at][0] != letter:
                raise InputError(
                    f"the words of example {example.id or example.input!r} are not those that the model sees (there is "
                    f"no {word!r}), so its rationale cannot be put on them. Leave rationales out, or clean the text."
                )
            marked |= letters[at][1]
            at += 1
        found.append(marked)
    return np.array(found)


def _truth_on_columns(example: Example, words: Sequence[str]) -> NDArray[np.bool_]:
    """The same for columns, which are found by their names; several that share a row are one word."""
    assert example.rationale is not None
    marked = dict(zip(example.words, example.rationale, strict=True))
    groups = [(word,) if word in marked else tuple(word.split(JOIN)) for word in words]
    if odd := [name for group in groups for name in group if name not in marked]:
        raise InputError(f"example {example.id or example.input!r} has no column {odd[0]!r}, which the model has.")
    return np.array([any(marked[name] for name in group) for group in groups])
