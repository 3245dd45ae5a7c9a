"""Shuffled attention against every order that there is, and against models whose answer is known."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from polar import KINDS, LONG, bert, examples, of_kind, toy

import regard
from regard.data import Dataset, Example
from regard.errors import OptionError
from regard.models.toys import POLARITY

TEXTS = ["so good", "bad film plot", "the awful so nice", "superb the slow is dull", "moving"]
STEEPNESS = 1.25


def numbered(texts):
    return Dataset.of([Example(text, id=str(place)) for place, text in enumerate(texts)])


def literal(text):
    """Weights and values of the decisive toy, and ŷ, in float64."""
    values = np.array([POLARITY[word] for word in text.split()])
    weights = np.exp(6 * np.abs(values))
    weights /= weights.sum()
    return weights, values, lambda other: 1 / (1 + np.exp(-STEEPNESS * (other @ values)))


def spied(subject, texts, n, seed=0, **options):
    """The weights that the trial's edit makes, ``(variant, example, head, row, key)``; its batch begins with the longest."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    seen = []

    def spy(weights, place):
        seen.append(weights.clone())
        return weights

    rerun = regard.attention.Rerun(subject, [texts[place] for place in order])
    last = rerun.spots[-1].index
    edits = [regard.edits.permute(seed, sites=[last], **options), regard.edits.custom(spy, sites=last, rows="readout")]
    rerun(edits, variants=n)
    return order, torch.cat(seen).double().numpy()


def test_attention_that_decides_is_noticed():
    found = regard.trial(toy("decisive"), examples(), "permutation", n=50)
    assert found.supported is True
    assert found.margin.low == pytest.approx(found.interval.low - 0.05)
    assert found.reference["attention removed"].low > 0.05
    assert "unused" not in found.sentence


def test_attention_that_is_irrelevant_is_not_and_is_said_to_be_unused():
    found = regard.trial(toy("irrelevant"), examples(), "permutation", n=50)
    assert found.supported is False, "the claim is false, whatever the reason"
    assert found.statistic == pytest.approx(0, abs=1e-6)
    assert "The site is unused" in found.sentence


def test_a_site_whose_removal_is_not_noticed_may_still_be_used():
    """Attention looks at a word that says nothing: without it the output is the same, shuffled it is not."""
    polarity = torch.tensor([*POLARITY.values()])
    scores = torch.where(polarity == 0, 6.0, 0.0)
    pool = regard.models.toys.Pool(scores, polarity[:, None], 0 * polarity, torch.tensor([STEEPNESS]))
    texts = ["so good moving superb", "bad so dull awful", "awful dull so", "moving superb so"] * 10
    found = regard.trial(regard.pooled(pool), numbered(texts), "permutation", n=50)
    assert found.reference["attention removed"].high < 0.05
    assert found.supported is True
    assert "unused" not in found.sentence


def test_the_median_of_many_shuffles_is_that_of_all_orders():
    """In float64; of 2,000 draws the median lies between the 45th and the 55th percentile (4.5 standard errors)."""
    subject = regard.pooled(regard.models.toys.decisive().double())
    found = regard.trial(subject, numbered(TEXTS), "permutation", n=2000).values
    for row, text in zip(found.itertuples(), TEXTS, strict=True):
        weights, _, output = literal(text)
        every = np.array(
            [abs(output(weights[list(order)]) - output(weights)) for order in permutations(range(len(weights)))]
        )
        low, high = np.quantile(every, [0.45, 0.55], method="inverted_cdf")
        if len(weights) > 1:
            assert low - 1e-6 <= row.moved <= high + 1e-6
            assert row.most == pytest.approx(every.max(), abs=1e-6), "2,000 draws of at most 120 orders see them all"
        else:
            assert np.isnan(row.moved), "a single word cannot be shuffled"
        assert row.largest == pytest.approx(weights.max(), abs=1e-6)
        assert row.removed == pytest.approx(abs(0.5 - output(weights)), abs=1e-6)


def test_each_shuffle_keeps_the_weights_and_gives_the_output_that_follows():
    subject = regard.pooled(regard.models.toys.decisive().double())
    found = regard.trial(subject, numbered(TEXTS), "permutation", n=30, seed=4).values
    order, seen = spied(subject, TEXTS, 30, seed=4)
    for at, place in enumerate(order):
        weights, values, output = literal(TEXTS[place])
        shuffled = seen[:, at, 0, 0, : len(values)]
        np.testing.assert_allclose(np.sort(shuffled, -1), np.sort(weights)[None].repeat(30, 0), atol=1e-6)
        assert not seen[:, at, 0, 0, len(values) :].any(), "padding gets nothing"
        moved = [abs(output(one) - output(weights)) for one in shuffled]
        alone = np.nan if len(values) == 1 else 0.0
        assert found["moved"][place] == pytest.approx(np.median(moved) + alone, abs=1e-6, nan_ok=True)
        assert found["most"][place] == pytest.approx(np.max(moved) + alone, abs=1e-6, nan_ok=True)


@pytest.fixture(scope="module")
def small(tokenizer):
    return bert(tokenizer)


def test_of_several_heads_the_mean_is_shown_and_special_tokens_keep_their_weight(tokenizer, small):
    subject = regard.text(small, tokenizer)
    data = examples(8, more=LONG)
    texts = [one.input for one in data]
    found = regard.trial(subject, data, "permutation", n=6).values
    order, seen = spied(subject, texts, 6)
    apart = 0
    small.set_attn_implementation("eager")
    for at, place in enumerate(order):
        encoded = tokenizer(texts[place], return_tensors="pt")
        with torch.no_grad():
            run = small(**encoded, output_attentions=True)
        weights = run.attentions[-1][0, :, 0].numpy()  # head key
        inside = weights[:, 1:-1]
        assert found["largest"][place] == pytest.approx(inside.mean(0).max(), abs=1e-6)
        assert found["predicted"][place] == f"LABEL_{int(run.logits.argmax())}"
        shuffled = seen[:, at, :, 0, : weights.shape[1]]
        np.testing.assert_allclose(shuffled[..., [0, -1]], weights[None][..., [0, -1]].repeat(6, 0), atol=1e-6)
        np.testing.assert_allclose(np.sort(shuffled[..., 1:-1]), np.sort(inside)[None].repeat(6, 0), atol=1e-6)
        ranks = shuffled[..., 1:-1].argsort(-1).argsort(-1), inside.argsort(-1).argsort(-1)[None]
        moves = [np.take_along_axis(ranks[0], ranks[1].argsort(-1), -1)]
        apart += (moves[0][:, :1] != moves[0][:, 1:]).any()
    small.set_attn_implementation("sdpa")
    assert apart == len(order), "each head has its own order"


def test_shared_is_one_order_for_all_heads(tokenizer, small):
    subject = regard.text(small, tokenizer)
    data = examples(8)
    own, shared = (regard.trial(subject, data, "permutation", n=6, shared=shared) for shared in (False, True))
    assert not np.allclose(own.values["moved"], shared.values["moved"])
    assert own.values["largest"].tolist() == shared.values["largest"].tolist()
    assert shared.settings["edited"] == [
        {"site": "bert.encoder.layer.1.attention.self", "kind": "self", "heads": 4, "rows": "readout"}
    ]


def test_all_sites_are_more_than_the_last(tokenizer, small):
    found = regard.trial(regard.text(small, tokenizer), examples(6), "permutation", n=4, sites="all")
    assert [one["site"].split(".")[3] for one in found.settings["edited"]] == ["0", "1"]


def test_the_largest_weights_fall_into_four_bins_and_one_is_in_the_last():
    """A single word has all the weight; the borders belong to the bin above them."""
    polarity = torch.tensor([*POLARITY.values()])
    pool = regard.models.toys.Pool(0 * polarity, polarity[:, None], 0 * polarity, torch.tensor([STEEPNESS]))
    texts = ["good", "bad", "good so", "bad so", "good so the", "good so the is", "bad so the is", "good so the is and"]
    found = regard.trial(regard.pooled(pool), numbered(texts), "permutation", n=9)
    assert found.values["bin"].tolist() == [
        "0.75–1", "0.75–1", "0.5–0.75", "0.5–0.75", "0.25–0.5", "0.25–0.5", "0.25–0.5", "0–0.25",
    ]  # fmt: skip
    table = found.tables["by class and largest weight"]
    assert table.columns.tolist() == ["predicted", "bin", "median", "count"]
    assert table["count"].sum() == len(texts) - 2, "a single word cannot be shuffled, and is undefined"
    for row in table.itertuples():
        some = found.values.query(f"predicted == {row.predicted!r} and bin == {row.bin!r}")["moved"]
        assert row.count == some.count()
        assert row.median == pytest.approx(np.median(some), nan_ok=True)
    assert found.values["moved"][:2].isna().all()
    assert found.interval.undefined == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_subject(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer)
    found, again, other = (regard.trial(subject, data, "permutation", n=5, seed=seed) for seed in (0, 0, 1))
    assert found.to_dict() == again.to_dict()
    assert len(found.values) == len(data)
    assert found.values["moved"].between(0, np.inf).all()
    assert found.statistic > 0
    assert found.values["moved"].tolist() != other.values["moved"].tolist()
    unit = "standard deviations" if kind == "regression" else "total variation"
    assert unit in found.sentence


def test_what_has_no_lots_in_it_does_not_depend_on_the_batch(tokenizer, small):
    subject, data = regard.text(small, tokenizer), examples(9, more=LONG)
    one, many = (regard.trial(subject, data, "permutation", n=3, batch_size=size).values for size in (1, 32))
    for column in ("removed", "largest"):
        np.testing.assert_allclose(one[column], many[column], atol=1e-5)
    assert one["predicted"].tolist() == many["predicted"].tolist()


def test_sites_that_look_at_something_else_have_no_largest_weight(tokenizer):
    subject, data = of_kind("encoder–decoder", tokenizer)
    found = regard.trial(subject, data, "permutation", n=2, sites="all")
    assert found.values["largest"].isna().all()
    assert (found.values["moved"] > 0).any()
    assert {one["rows"] for one in found.settings["edited"]} == {"all", "readout"}, "an encoder has no row that is read"


@pytest.mark.parametrize("options", [{"n": 0}, {"n": 1.5}, {"epsilon": 0}, {"epsilon": 1.0}, {"epsilon": float("nan")}])
def test_options_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(OptionError, match=f"{name}={value!r}"):
        regard.trial(toy("decisive"), examples(), "permutation", **options)
