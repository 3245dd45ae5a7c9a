"""From letters to rows: by what a tokenizer tells, and where it tells nothing by looking."""

from __future__ import annotations

from dataclasses import replace

import pytest

import regard
from regard.aligning import pieces_of, rows_of, unaligned
from regard.errors import NotServed
from regard.types import Features

TEXT = "I don't  like Überraschungen, unbelievably!"
WORDS = ["I", "do", "n't", "like", "Überraschungen", ",", "unbelievably", "!"]


def spans_of(text, words):
    found, at = [], 0
    for word in words:
        start = text.index(word, at)
        found.append((start, at := start + len(word)))
    return found


@pytest.mark.parametrize("name", ["minilm", "smollm"])
def test_every_token_belongs_to_the_word_in_which_it_begins(name, request):
    subject = request.getfixturevalue(name)
    (features,) = subject.encode(TEXT).features
    assert features.spans
    spans = spans_of(TEXT, WORDS)
    found = rows_of(features, TEXT, spans)
    for row, (start, end), token, word in zip(
        features.rows, features.spans, features.tokens, features.word, strict=True
    ):
        begins = start + len(TEXT[start:end]) - len(TEXT[start:end].lstrip())
        wanted = [] if word is None or begins == end else [n for n, (a, b) in enumerate(spans) if a <= begins < b]
        assert [n for n, rows in enumerate(found) if row in rows] == wanted, token
    assert all(found[n] for n in (0, 3, 4, 5, 6, 7))
    assert len(found[4]) > 1


@pytest.mark.parametrize("name", ["minilm", "smollm"])
def test_looking_for_words_finds_what_the_tokenizer_tells(name, request):
    subject = request.getfixturevalue(name)
    text = "They liked the unbelievably overlong movie, and left."
    (features,) = subject.encode(text).features
    spans = spans_of(text, ["They", "liked", "the", "unbelievably", "overlong", "movie", ",", "and", "left", "."])
    told = rows_of(features, text, spans)
    assert all(told)
    assert rows_of(replace(features, spans=()), text, spans) == told


def test_a_pooled_subject_has_words_only():
    subject = regard.pooled(regard.models.toys.decisive())
    (features,) = subject.encode(["so so good so"]).features
    assert features.spans == ()
    assert rows_of(features, "so so good so", [(0, 2), (3, 5), (6, 10), (11, 13)]) == ((0,), (1,), (2,), (3,))


def test_spans_may_share_letters_and_white_space_belongs_to_nobody():
    features = Features(("[CLS]", " aux", " ", "gens"), (0, 1, 2, 3), ("aux", "gens"), (None, 0, 0, 1),
                        spans=((0, 0), (0, 4), (4, 5), (5, 9)))  # fmt: skip
    text = " aux gens"
    assert rows_of(features, text, [(1, 4), (1, 4), (5, 9), (4, 5)]) == ((1,), (1,), (3,), ())


def test_pieces_are_a_matrix_of_each_example(minilm):
    texts = ["unbelievably overlong", "so"]
    spans = [[(0, 12), (13, 21)], [(0, 2)]]
    batch = minilm.encode(texts)
    found = pieces_of(batch, texts, spans)
    assert found.shape == (2, 2, batch.real.shape[1])
    for place, (text, some) in enumerate(zip(texts, spans, strict=True)):
        for at, rows in enumerate(rows_of(batch.features[place], text, some)):
            assert rows
            assert tuple(found[place, at].nonzero().squeeze(-1).tolist()) == rows
    assert not found[1, 1].any()  # padding


def test_what_was_cut_has_no_rows_and_what_is_left_keeps_its_letters(minilm_path):
    subject = regard.text(minilm_path, over_limit="truncate")
    text = "so " * 600 + "good"
    (features,) = subject.encode(text).features
    assert rows_of(features, text, [(0, 2), (1800, 1804)]) == ((1,), ())
    assert features.until(5).spans == features.spans[:6]


def test_few_words_without_a_token_are_a_warning_and_many_an_error():
    assert unaligned(0, 10, "words") == ()
    assert "3 of 10 words" in unaligned(3, 10, "words")[0]
    with pytest.raises(NotServed, match="cannot align 6 of 10 words"):
        unaligned(6, 10, "words")
