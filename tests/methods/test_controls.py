"""The controls, which do not look at the model: random, uniform, position."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from oracles import TEXTS, assert_close, bert, t5

import regard
from regard import errors

PAIRS = [("a moving film", "so it is"), ("so", "dull"), ("dull, and it never ends", "it is moving")]


@pytest.fixture(scope="module")
def subject(tokenizer):
    return regard.text(bert(tokenizer), tokenizer)


@pytest.fixture(scope="module")
def translator(tokenizer):
    return regard.seq2seq(t5(tokenizer), tokenizer)


def test_uniform_gives_every_token_the_same_share(subject):
    for why in regard.explain(subject, TEXTS, method="uniform"):
        assert_close(why.scores, [1 / len(why.features.tokens)] * len(why.features.tokens))


def test_uniform_gives_every_token_of_two_sequences_the_same_share(translator):
    """ "Every token alike": whichever sequence it is of, and however long the other is."""
    for why in regard.explain(translator, PAIRS, method="uniform"):
        assert_close(why.scores, [why.scores[0]] * len(why.features.tokens))


def test_position_falls_in_equal_steps_from_the_first_to_the_last(subject):
    for why in regard.explain(subject, TEXTS, method="position"):
        count = len(why.features.tokens)
        shares = np.array([count - place for place in range(count)], dtype=float)
        assert_close(why.scores, shares / shares.sum())
        assert (np.diff(why.scores) < 0).all()


def test_position_falls_within_each_of_two_sequences(translator):
    for why in regard.explain(translator, PAIRS, method="position"):
        source = why.parts["source"]
        for part in (why.scores[:source], why.scores[source:]):
            assert (np.diff(part) < 0).all()
            np.testing.assert_allclose(np.diff(part), np.diff(part)[0], rtol=0, atol=1e-6)


def test_random_numbers_are_uniform_between_0_and_1(subject):
    texts = ["a moving film that never ends, so dull"]
    drawn = np.concatenate([
        regard.explain(subject, texts, method="random", seed=seed)[0].words()["score"] for seed in range(40)
    ])  # fmt: skip
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(np.unique(drawn)) == len(drawn) > 300
    # a mean of n uniform numbers has standard error √(1/12n); five of them
    assert abs(drawn.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(drawn))
    assert abs((drawn < 0.25).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / len(drawn))


def test_random_depends_on_the_seed_and_the_tokens_and_not_on_the_batch(subject):
    together = regard.explain(subject, TEXTS, method="random", seed=3)
    for text, why in zip(TEXTS, together, strict=True):
        alone = regard.explain(subject, text, method="random", seed=3)
        assert np.array_equal(alone.scores, why.scores)
        assert alone.seed == 3
    other = regard.explain(subject, TEXTS, method="random", seed=4)
    assert not any(np.array_equal(a.scores, b.scores) for a, b in zip(together, other, strict=True))
    default = regard.explain(subject, TEXTS[0], method="random")
    assert np.array_equal(default.scores, regard.explain(subject, TEXTS[0], method="random", seed=0).scores)
    swapped = regard.explain(subject, ["film moving a", "a moving film"], method="random", seed=3)
    assert not np.array_equal(swapped[0].scores, swapped[1].scores)


def test_random_is_the_same_in_every_process(subject):
    """Drawn by a generator seeded with the seed and a checksum of the tokens: nothing that Python salts, or time."""
    for why in regard.explain(subject, TEXTS, method="random", seed=6):
        checksum = zlib.crc32("\0".join(why.features.tokens).encode())
        lots = np.random.default_rng([6, checksum]).random(len(why.features.tokens))
        words = np.array([-1 if word is None else word for word in why.features.word])
        expected = [
            lots[at] if word < 0 else lots[np.flatnonzero(words == word)[0]] / (words == word).sum()
            for at, word in enumerate(words)
        ]
        assert_close(why.scores, expected)


def test_random_knows_nothing_of_pieces(subject):
    """A word of many pieces gets no more than others: chance must not find rare words."""
    text = "so unbelievably so"
    drawn = [regard.explain(subject, text, method="random", seed=seed, special="drop") for seed in range(200)]
    assert drawn[0].features.word.count(1) > 1
    words = np.stack([why.words()["score"] for why in drawn])
    assert abs(words[:, 1].mean() - words[:, 0].mean()) < 5 * np.sqrt(2 / 12 / 200)
    assert words[:, 1].max() < 1


def test_random_draws_for_both_sequences(translator):
    (why,) = regard.explain(translator, [PAIRS[0]], method="random", seed=1)
    words = {word for word in why.features.word if word is not None}
    special = why.features.word.count(None)
    assert len(np.unique(why.scores)) == len(words) + special
    assert len(why.scores) == sum(why.parts.values())


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, None])
def test_seeds_that_are_none_are_refused(subject, seed):
    with pytest.raises(errors.OptionError, match="seed="):
        regard.explain(subject, TEXTS[0], method="random", seed=seed)


def test_controls_need_no_attention_that_the_readout_asks():
    """They serve what others cannot: a pool has no rows, and no layers."""
    subject = regard.pooled(regard.models.toys.decisive())
    for method in ("random", "uniform", "position"):
        why = regard.explain(subject, "so good so", method=method)
        assert why.scores.shape == (3,)
        assert (why.scores >= 0).all()
