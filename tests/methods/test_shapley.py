"""Shapley values against all coalitions of up to five words, and samples against orders that are drawn here.

What a coalition is worth is found by running its text alone, in float64; words in no coalition are removed by hand.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import chain, combinations

import numpy as np
import pytest
import torch
from oracles import assert_close, bert, llama, t5
from test_gradient import WORDS, ids_of_words, lstm, pictures, pooled_logits, table, twin, vit
from test_leave_one_out import less, logits_of, on_tokens, places, said_by, without

import regard
from regard import errors

TEXTS = ["dull, an overlong movie", "so", "so so film", "it ends"]


def exact(count, worth):
    """Σ_S |S|!(n−|S|−1)!/n! · (y(S ∪ t) − y(S)), for each of so many players; ``worth`` takes a frozenset."""
    values = np.zeros(count)
    for player in range(count):
        others = [other for other in range(count) if other != player]
        for some in chain.from_iterable(combinations(others, size) for size in range(count)):
            share = math.factorial(len(some)) * math.factorial(count - len(some) - 1) / math.factorial(count)
            values[player] += share * (worth(frozenset(some) | {player}) - worth(frozenset(some)))
    return values


def marginals(count, worth, samples, seed):
    """``(sample, player)``: what each adds in orders that are drawn as said."""
    found = np.zeros((samples, count))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for sample in range(samples):
            there: frozenset[int] = frozenset()
            for player in torch.randperm(count).tolist():
                found[sample, player] = worth(there | {player}) - worth(there)
                there |= {player}
    return found


def game_of(model, tokenizer, text, how, scalar=None):
    """The players of a text, and what a coalition is worth: the probability of what is predicted of the whole."""
    encoding = tokenizer(text)
    ids, players = encoding["input_ids"], places(encoding)
    first = int(logits_of(model, ids).argmax())
    scalar = scalar or (lambda logits: logits.softmax(-1)[first])

    @cache
    def worth(there):
        gone = [row for player, rows in enumerate(players) if player not in there for row in rows]
        return float(scalar(without(model, tokenizer, ids, gone, how)))

    return len(ids), players, worth


def explained(subject, inputs, **options):
    return regard.explain(subject, inputs, method="shapley", **options)


def assert_drawn(why, count, players, worth, samples, seed):
    """Scores, standard errors and how many coalitions were run, of orders that are drawn here."""
    drawn = marginals(len(players), worth, samples, seed)
    if len(players) == 1:
        drawn = drawn[:2]
    assert_close(why.scores, on_tokens(count, players, drawn.mean(0)))
    errors_ = drawn.std(0, ddof=1) / len(drawn) ** 0.5
    np.testing.assert_allclose(
        why.facts["standard_error"], on_tokens(count, players, errors_), rtol=0, atol=1e-6 * np.abs(drawn).max()
    )


@pytest.mark.parametrize("how", ["delete", "mask", "pad", "attention"])
def test_orders_are_drawn_by_the_seed(subject, model, tokenizer, how):
    found = explained(subject, TEXTS, samples=6, seed=3, how=how)
    for why, text in zip(found, TEXTS, strict=True):
        count, players, worth = game_of(model, tokenizer, text, how)
        assert_drawn(why, count, players, worth, 6, 3)
        assert why.scores[[0, -1]].tolist() == [0, 0], "special tokens always take part"
        assert why.facts["evaluations"] == worth.cache_info().currsize
        assert why.seed == 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder(tokenizer, side):
    model = llama(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    for batched in (True, False):
        found = explained(subject, TEXTS, samples=3) if batched else [explained(subject, x, samples=3) for x in TEXTS]
        for why, text in zip(found, TEXTS, strict=True):
            assert_drawn(why, *game_of(model, tokenizer, text, "delete"), 3, 0)


@pytest.mark.parametrize(("algorithm", "samples"), [("sampling", 600), ("kernel", 2500)])
def test_many_samples_come_near_all_coalitions(subject, model, tokenizer, algorithm, samples):
    """Within four standard errors, which are small; what all words have together is what they share."""
    texts = [TEXTS[0], *TEXTS[2:]]
    found = explained(subject, texts, algorithm=algorithm, samples=samples, target=1, of="logit")
    for why, text in zip(found, texts, strict=True):
        count, players, worth = game_of(model, tokenizer, text, "delete", lambda logits: logits[1])
        values = exact(len(players), worth)
        expected = on_tokens(count, players, values)
        spread = why.facts["standard_error"]
        assert (np.abs(why.scores - expected) <= 4 * spread + 1e-6).all()
        assert spread.max() < 0.1 * np.abs(values).max()
        together = worth(frozenset(range(len(players)))) - worth(frozenset())
        assert why.scores.sum() == pytest.approx(together, abs=1e-3 * np.abs(values).max())
        assert why.facts["evaluations"] == 2 ** len(players)


def test_two_words_have_two_orders(subject, model, tokenizer):
    """Of which one is drawn so often, the other so often: the mean of these."""
    count, players, worth = game_of(model, tokenizer, "it ends", "delete")
    values = exact(2, worth)
    drawn = marginals(2, worth, 40, 0)
    assert 5 < (drawn[:, 0] == drawn[0, 0]).sum() < 35
    why = explained(subject, "it ends", samples=40)
    assert_close(why.scores, on_tokens(count, players, drawn.mean(0)))
    assert np.abs(why.scores - on_tokens(count, players, values)).max() < 4 * why.facts["standard_error"].max()


class Sums(torch.nn.Module):
    """Its logit is the sum of what its words are worth, whatever attention says: 1, 2, 4, …, and 0.5 for any other."""

    output, labels, classes = "binary", ["no", "yes"], 1

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(7, 1)
        self.table.weight.data = torch.tensor([[0.0], [0.5], [1], [2], [4], [8], [16]])

    def forward(self, ids, real, attend):
        x = self.table(ids)
        weights = x[..., 0].masked_fill(~attend, -torch.inf).softmax(-1)
        return (x * attend[..., None]).sum(1) + 0 * (weights[:, None] @ x)[:, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("algorithm", "samples", "tolerance"), [("sampling", 2, 0), ("kernel", 60, 1e-4)])
def test_in_a_sum_every_word_has_what_it_adds(algorithm, samples, tolerance):
    """In whatever order, and without any error; the kernel is fitted in float32."""
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<unk>", *"abcde"])}
    subject = regard.pooled(Sums().double(), vocabulary)
    options = {"algorithm": algorithm, "samples": samples, "of": "logit", "target": "yes"}
    for how, other in (("delete", 0), ("pad", 0), ("mask", 0.5)):
        found = explained(subject, ["a b c d e", "c", "a a d"], how=how, **options)
        worths = ([1, 2, 4, 8, 16], [4], [1, 1, 8])
        for why, worth in zip(found, worths, strict=True):
            np.testing.assert_allclose(why.scores, np.array(worth) - other, rtol=0, atol=tolerance)
            np.testing.assert_allclose(why.facts["standard_error"], 0, atol=tolerance)


# --- other subjects -------------------------------------------------------------------------------------------------


def test_an_encoder_decoder(tokenizer):
    model = t5(tokenizer)
    pairs = [("a moving film", "so it is"), ("so", "dull")]
    found = explained(regard.seq2seq(model, tokenizer), pairs, samples=3)
    for why, (source, text) in zip(found, pairs, strict=True):
        encoding, said = tokenizer(source), tokenizer(text)["input_ids"]
        taken, players = [model.config.decoder_start_token_id, *said[:-1]], places(encoding)

        def worth(there, ids=encoding["input_ids"], taken=taken, players=players, token=said[-1]):
            gone = [row for player, rows in enumerate(players) if player not in there for row in rows]
            return float(said_by(model, ids, taken, gone, "delete", tokenizer).softmax(-1)[token])

        assert why.parts == {"source": len(encoding["input_ids"])}
        assert_drawn(why, len(encoding["input_ids"]), players, worth, 3, 0)


@pytest.mark.parametrize("marks", [False, True], ids=["words alone", "between marks"])
@pytest.mark.parametrize("how", ["mask", "attention"])
def test_an_lstm(how, marks):
    model, vocabulary = lstm(marks)
    found = explained(regard.pooled(model, vocabulary), WORDS, how=how, samples=3, target="1")
    for why, text in zip(found, WORDS, strict=True):
        ids = ids_of_words(vocabulary, text)
        rows = list(range(1, len(ids) - 1) if marks else range(len(ids)))

        def worth(there, ids=ids, rows=rows):
            gone = [row for player, row in enumerate(rows) if player not in there]
            attended = [row for row in rows if row not in gone] if how == "attention" else rows
            if how == "mask":
                ids = [vocabulary["<unk>"] if row in gone else one for row, one in enumerate(ids)]
            with torch.no_grad():
                return float(pooled_logits(model, model.encoder.embedding(torch.tensor([ids])), attended).sigmoid())

        assert_drawn(why, len(ids), [[row] for row in rows], worth, 3, 0)


def test_a_picture_and_a_table():
    model = vit()
    (why,) = explained(regard.image(model), pictures(1), samples=2, how="attention", target=1)

    @torch.no_grad()
    def patches(there):
        gone = [1 + player for player in range(6) if player not in there]
        return float(twin(model, gone=gone)(pictures(1)).logits[0].softmax(-1)[1])

    assert_drawn(why, 7, [[row] for row in range(1, 7)], patches, 2, 0)
    mean = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    model, subject, rows = table(baseline=mean)
    for why, row in zip(explained(subject, rows, samples=2, target=1), rows, strict=True):

        @torch.no_grad()
        def columns(there, row=row):
            given = torch.where(torch.tensor([column in there for column in range(4)]), row, mean)
            return float(model(given[None], None)[0].softmax(-1)[1])

        assert_drawn(why, 5, [[1], [2], [3], [4]], columns, 2, 0)


def test_tokens_are_players_where_they_are_asked_for(subject, model, tokenizer):
    why = explained(subject, TEXTS[0], unit="token", samples=3)
    encoding = tokenizer(TEXTS[0])
    ids, players = encoding["input_ids"], places(encoding, "token")
    first = int(logits_of(model, ids).argmax())
    assert len(players) > len(places(encoding))

    def worth(there):
        gone = [row for player, (row,) in enumerate(players) if player not in there]
        return float(logits_of(model, less(ids, gone, "delete", tokenizer)).softmax(-1)[first])

    assert_drawn(why, len(ids), players, worth, 3, 0)


def test_each_token_of_a_continuation(tokenizer):
    """What comes later is no player: nothing is run for it, and a word that is cut has its whole value."""
    model = llama(tokenizer)
    prompt = tokenizer("so dull")["input_ids"]
    later = tokenizer("overlong film", add_special_tokens=False)["input_ids"]
    found = explained(regard.causal(model, tokenizer), "so dull", continuation="overlong film", samples=3)
    words = [[1], [2], [4, 5], [6]]
    for place, why in enumerate(found):
        ids = prompt + later[:place]
        players = [[row for row in rows if row < len(ids)] for rows in words if rows[0] < len(ids)]

        @cache
        def worth(there, ids=tuple(ids), players=players, token=later[place]):
            gone = [row for player, rows in enumerate(players) if player not in there for row in rows]
            return float(logits_of(model, less(ids, gone, "delete", tokenizer)).softmax(-1)[token])

        assert_drawn(why, len(ids), players, worth, 3, 0)
        assert why.facts["evaluations"] == worth.cache_info().currsize


# --- the rest -------------------------------------------------------------------------------------------------------


def test_seeds(subject):
    for algorithm, samples in (("sampling", 2), ("kernel", 40)):
        options = {"algorithm": algorithm, "samples": samples}
        one, again, other = (explained(subject, TEXTS[0], seed=seed, **options).scores for seed in (1, 1, 2))
        assert np.array_equal(one, again)
        assert not np.allclose(one, other)


def test_a_single_word_takes_no_samples(subject, model, tokenizer):
    for algorithm in ("sampling", "kernel"):
        why = explained(subject, "so", algorithm=algorithm, samples=2)
        _, _, worth = game_of(model, tokenizer, "so", "delete")
        assert_close(why.scores, [0, worth(frozenset({0})) - worth(frozenset()), 0])
        assert why.facts["standard_error"].tolist() == [0, 0, 0]
        assert why.facts["evaluations"] == 2


def test_half_precision(tokenizer):
    half = regard.text(bert(tokenizer).to(torch.bfloat16), tokenizer)
    for why in explained(half, TEXTS[:2], samples=2):
        assert why.scores.dtype == np.float32
        assert np.abs(why.scores).max() > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algorithm": "exact"}, "algorithm='exact' is not known. Choose one of 'sampling', 'kernel'"),
        ({"unit": "line"}, "unit='line' is not known"),
        ({"how": "drop"}, "how='drop' is not known"),
        ({"samples": 1}, "samples=1 must be 2 or more"),
        ({"samples": 2.5}, "samples=2.5"),
        ({"seed": -1}, "seed=-1 0 or more"),
        ({"algorithm": "kernel"}, "samples=25 are too few to fit the kernel to 5 features: pass 30 or more"),
    ],
)
def test_options_that_are_refused(subject, options, said):
    with pytest.raises(errors.OptionError, match=said):
        explained(subject, "dull, an overlong movie", **options)
