"""Readers of texts in which people marked something: syntax (CoNLL-U), whom a pronoun means (GAP), facts.

What is marked is in `Example.marks`, by name; places are letters of the input, ``(start, end)``:

    "words"     CoNLL-U: a tuple of `Word`, in the order of the sentence
    "mentions"  GAP: {"pronoun": (start, end), "A": (start, end), "B": (start, end)}; the label is "A", "B" or
                "neither": whom the pronoun means
    "facts"     facts: {"subject": (start, end), "answer": text}; the input is the prompt
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short
from typing import Any

from regard.data.dataset import Example
from regard.data.sources import MARKED, UNDECODED, Unusable, file_at, opened
from regard.errors import InputError, OptionError

COLUMNS = 10  # of CoNLL-U: number, form, lemma, tag, tag of the language, features, head, relation, more, notes
GAP = ("ID", "Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref")
ANSWERS = ("answer", "attribute", "object")  # what known_1000, CounterFact's heirs and LRE call it
Rows = Iterator[tuple[int, Example | Unusable]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Word:
    """A word of a sentence, and what it hangs on.

    Args:
        form: as CoNLL-U has it; "n't" of "don't".
        start: of its letters in the text.
        end: of its letters in the text. Words that share letters which cannot be told apart ("aux", which is "à les")
            all have the whole span.
        tag: its part of speech (UPOS).
        head: the number of the word that it hangs on, from 0; -1: the root.
        relation: to that word, with subtypes: "nmod:poss".
    """

    form: str
    start: int
    end: int
    tag: str
    head: int
    relation: str


def marked_rows(source: Any, encoding: str, named: Mapping[str, Any]) -> tuple[str, Callable[[], Rows]] | None:
    """The name of a file with marks, and what begins its rows anew; None: it is something else.

    It is one if it ends in .conllu, .conllu.gz or .json, or in .tsv and has the columns of GAP. Of these a column may
    be ``named``, and then it is read as a table.
    """
    if not isinstance(source, (str, os.PathLike)):
        return None
    path, lower = Path(source), Path(source).name.lower()
    if lower.endswith(MARKED):
        name = file_at(path, encoding)
        for option, value in named.items():
            raise OptionError(f"{option}={value!r} names a column, but {name} has none. Leave it out.")
        return name, lambda: (read_facts if lower.endswith(".json") else read_conllu)(path, encoding)
    if lower.endswith(".tsv") and path.is_file() and not named:
        name = file_at(path, encoding)
        with opened(path, encoding, "\n") as file:
            header = file.readline().rstrip("\r\n").split("\t")
        if set(GAP) <= set(header):
            return name, lambda: read_gap(path, encoding)
    return None


def read_conllu(path: Path, encoding: str = "utf-8") -> Rows:
    """Each sentence of a file of CoNLL-U: its number, and its example or why there is none, with the line."""
    for number, (comments, lines) in enumerate(_sentences(path, encoding), 1):
        try:
            yield number, _sentence(comments, lines, str(number))
        except Unusable as problem:
            yield number, problem


def read_gap(path: Path, encoding: str = "utf-8") -> Rows:
    """Each row of a file of GAP. Its quotes are letters as any others."""
    with opened(path, encoding, "\n") as file:
        header = file.readline().rstrip("\r\n").split("\t")
        for number, line in enumerate((one for one in file if one.strip()), 1):
            cells = line.rstrip("\r\n").split("\t")
            try:
                if len(cells) != len(header):
                    raise Unusable("ragged", f"has {len(cells)} fields; the header has {len(header)}")
                yield number, _ambiguous(dict(zip(header, cells, strict=True)))
            except Unusable as problem:
                yield number, problem


def read_facts(path: Path, encoding: str = "utf-8") -> Rows:
    """Each fact of a .json file: a list of objects with prompt, subject and answer (or "attribute", or "object").

    A prompt may hold "{}" in the place of its subject; else the subject is where it occurs first. A file of LRE, one
    relation with "samples", gives its first zero-shot template to all of them.
    """
    with opened(path, encoding, "\n") as file:
        try:
            held = json.load(file)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"source={str(path)!r} does not parse as JSON: {problem}.") from None
    template = None
    if isinstance(held, Mapping) and "samples" in held:
        template = next(iter(held.get("prompt_templates_zs") or held.get("prompt_templates") or ()), None)
        held = held["samples"]
    if not isinstance(held, list):
        raise InputError(
            f"source={str(path)!r} holds no facts: they are a list of objects with 'prompt', 'subject' and 'answer', "
            "or one with 'prompt_templates_zs' and 'samples'. Write other data as .jsonl."
        )
    for number, entry in enumerate(held, 1):
        try:
            yield number, _fact(entry, template, str(number))
        except Unusable as problem:
            yield number, problem


def _sentences(path: Path, encoding: str) -> Iterator[tuple[dict[str, str], list[tuple[int, list[str]]]]]:
    """Of each sentence its comments, and its lines in columns with their numbers."""
    comments: dict[str, str] = {}
    lines: list[tuple[int, list[str]]] = []
    with opened(path, encoding, "\n") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\r\n")
            if line.startswith("#") and not lines:
                name, _, value = line[1:].partition("=")
                comments[name.strip()] = value.strip()
            elif line.strip():
                lines.append((number, line.split("\t")))
            else:
                if lines:
                    yield comments, lines
                comments, lines = {}, []
    if lines:
        yield comments, lines


def _sentence(comments: dict[str, str], lines: list[tuple[int, list[str]]], name: str) -> Example:
    words: list[tuple[int, list[str]]] = []
    surfaces: list[tuple[int, list[str], int]] = []  # what is written: its line, and how many words it stands for
    inside = 0  # words that the last line of several words still stands for
    for line, cells in lines:
        if len(cells) != COLUMNS:
            raise _bad(line, "wrong columns", f"has {len(cells)} columns between tabs; CoNLL-U has {COLUMNS}")
        if UNDECODED.search("".join(cells)):
            raise _bad(line, "not in the encoding", "holds bytes that are not in the encoding")
        first, dash, last = cells[0].partition("-")
        if "." in cells[0]:  # an empty node: nothing is written
            continue
        if dash and first.isdecimal() and last.isdecimal() and int(first) == len(words) + 1 <= int(last):
            inside = int(last) - len(words)
            surfaces.append((line, cells, inside))
        elif cells[0] == str(len(words) + 1):
            words.append((line, cells))
            surfaces += [] if inside else [(line, cells, 1)]
            inside = max(inside - 1, 0)
        else:
            raise _bad(line, "wrong numbers", f"has the number {cells[0]!r}; word {len(words) + 1} is next")
    if not words or inside:
        raise _bad(lines[-1][0], "wrong numbers", "ends a sentence whose words are not all there")
    text = comments.get("text") or _spelled(surfaces)
    places = _places(text, surfaces, [cells[1] for _, cells in words])
    return Example(
        text, id=comments.get("sent_id") or name,
        marks={"words": tuple(_word(*one, span, len(words)) for one, span in zip(words, places, strict=True))},
    )  # fmt: skip


def _word(line: int, cells: list[str], span: Span, count: int) -> Word:
    head = cells[6]
    if not head.isdecimal() or int(head) > count:
        raise _bad(line, "no such head", f"has the head {head!r}, and its sentence the words 1 to {count}")
    if int(head) == int(cells[0]):
        raise _bad(line, "no such head", f"word {head} is its own head")
    return Word(cells[1], *span, cells[3], int(head) - 1, cells[7])


def _spelled(surfaces: list[tuple[int, list[str], int]]) -> str:
    """The text of a sentence that does not say it."""
    return "".join(
        cells[1] + ("" if "SpaceAfter=No" in cells[9].split("|") else " ") for _, cells, _ in surfaces
    ).strip()  # fmt: skip


def _places(text: str, surfaces: list[tuple[int, list[str], int]], forms: list[str]) -> list[Span]:
    """Where each word is in the text."""
    places: list[Span] = []
    at = 0
    for line, cells, count in surfaces:
        start = at + len(text[at:]) - len(text[at:].lstrip())
        at = start + len(cells[1])
        if not cells[1] or text[start:at] != cells[1]:
            raise _bad(line, "not in the text", f"{cells[1]!r} is not what the text says next: {short(text[start:])}")
        parts = forms[len(places) : len(places) + count]
        if "".join(parts) == cells[1]:
            ends = [start + sum(map(len, parts[:number])) for number in range(count + 1)]
            places += pairwise(ends)
        else:  # "aux" is "à les": which letters are whose cannot be said
            places += [(start, at)] * count
    return places


def _ambiguous(row: Mapping[str, str]) -> Example:
    """A row of GAP."""
    if UNDECODED.search(row["Text"]):
        raise Unusable("not in the encoding", "'Text' holds bytes that are not in the encoding")
    mentions = {}
    for name, column in {"pronoun": "Pronoun", "A": "A", "B": "B"}.items():
        offset, form = row[f"{column}-offset"], row[column]
        if not offset.isdecimal() or not form or not row["Text"].startswith(form, int(offset)):
            raise Unusable("wrong offsets", f"{column}={form!r} is not in 'Text' at {column}-offset={offset!r}")
        mentions[name] = (int(offset), int(offset) + len(form))
    means = {"TRUE": True, "FALSE": False}
    truth = [means.get(row[f"{name}-coref"].upper()) for name in "AB"]
    if None in truth or all(truth):
        raise Unusable("wrong labels", f"A-coref={row['A-coref']!r} and B-coref={row['B-coref']!r}: one may be TRUE")
    label = "A" if truth[0] else "B" if truth[1] else "neither"
    return Example(row["Text"], label, id=row["ID"], marks={"mentions": mentions})


def _fact(entry: Any, template: str | None, name: str) -> Example:
    if not isinstance(entry, Mapping):
        raise Unusable("no object", f"{short(entry)} is no JSON object")
    prompt, subject = entry.get("prompt", template), entry.get("subject")
    answer = next((entry[key] for key in ANSWERS if key in entry), None)
    for key, value in {"prompt": prompt, "subject": subject, "answer": answer}.items():
        if not isinstance(value, str) or not value.strip():
            raise Unusable("missing or empty", f"{key!r} is missing or holds no text: {short(value)}")
    prompt, subject = str(prompt), str(subject)
    start = prompt.find("{}")
    prompt = prompt.replace("{}", subject, 1)
    start = prompt.find(subject) if start < 0 else start
    if start < 0:
        raise Unusable("no subject", f"the subject {subject!r} does not occur in the prompt {short(prompt)}")
    return Example(prompt, id=name, marks={"facts": {"subject": (start, start + len(subject)), "answer": answer}})


def _bad(line: int, kind: str, problem: str) -> Unusable:
    return Unusable(kind, f"line {line}: {problem}")
