"""Erased attention, one weight after the other and one text at a time, against the paper's definition written out."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest
import torch
from polar import KINDS, LONG, bert, examples, of_kind, toy

import regard
from regard.data import Dataset, Example
from regard.errors import InputError, NotServed, OptionError
from regard.measures import jsd
from regard.models.toys import POLARITY, Pool

ORDERS = ("attention", "gradient", "attention_gradient")
WORDS = [word for word in POLARITY if word[0] != "<"]


def mixed(count=40, least=1, most=9, seed=0):
    """Texts that speak for both sides."""
    draws = random.Random(seed)
    texts = [" ".join(draws.sample(WORDS, draws.randint(least, most))) for _ in range(count)]
    return Dataset.of([Example(text, id=f"t{place}") for place, text in enumerate(texts)])


def wired(seed=0):
    """Scores and values of all words drawn by lot, so that no two are alike; a part of the logit goes past attention."""
    draws = np.random.default_rng(seed)
    size = len(POLARITY)
    values = torch.tensor(draws.normal(size=(size, 2)))
    pool = Pool(
        torch.tensor(draws.normal(size=size)),
        values,
        torch.tensor(0.2 * draws.normal(size=size)),
        torch.tensor([0.9, -0.5]).double(),
    )
    return pool.double()


# --- the definition, written out ------------------------------------------------------------------------------------


def erased(weights, keys):
    """Weights ``(…, key)`` without some keys, the others divided by their sum; all 0 if none is left."""
    left = weights.clone()
    left[..., list(keys)] = 0
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.where(total > 0, 1.0), 0.0)


def until_flipped(run, weights, order):
    """How many keys go, in this order, until the most probable class is another; None: it never is."""
    said = int(run(weights).argmax())
    for count in range(1, len(order) + 1):
        if int(run(erased(weights, order[:count])).argmax()) != said:
            return count
    return None


def rankings(run, weights, inside):
    """The paper's orders of the keys ``inside``: α, ∂p/∂α and their product, the sum over heads and rows."""
    leaf = weights.clone().requires_grad_()
    chances = run(leaf)
    (slope,) = torch.autograd.grad(chances.max(), leaf)
    numbers = {"attention": weights, "gradient": slope, "attention_gradient": weights * slope}
    return {
        name: sorted(inside, key=lambda key: -float(one.flatten(0, -2).sum(0)[key])) for name, one in numbers.items()
    }


def of_pool(pool, text):
    """What a pool says given its weights ``(1, key)``, and the weights."""
    ids = torch.tensor([pool.vocabulary[word] for word in text.split()])
    weights = pool.scores(ids).squeeze(-1).softmax(-1)[None]

    def run(given):
        logit = (given @ pool.values(ids)) @ pool.readout.weight[0] + pool.direct(ids).mean()
        return torch.cat([-logit, logit]).sigmoid()

    return run, weights, range(len(ids))


def of_bert(model, tokenizer, text):
    """The same of a BERT: the weights of [CLS] in its last layer, ``(head, key)``; its other rows stay as they are."""
    encoded = tokenizer(text, return_tensors="pt")
    before = model(**encoded, output_hidden_states=True).hidden_states[-2].detach()
    layer = model.bert.encoder.layer[-1]
    own = layer.attention.self
    q, k, v = (
        part(before)[0].unflatten(-1, (own.num_attention_heads, -1)).transpose(0, 1)
        for part in (own.query, own.key, own.value)
    )
    every = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).detach()  # head query key

    def run(given):
        weights = torch.cat([given[:, None], every[:, 1:]], 1)
        after = layer.attention.output((weights @ v).transpose(0, 1).flatten(1)[None], before)
        state = layer.output(layer.intermediate(after), after)
        return model.classifier(model.bert.pooler(state))[0].softmax(-1)

    return run, every[:, 0], range(1, every.shape[-1] - 1)


def assert_as_written_out(values, each, orders=ORDERS):
    """Every share and every single weight of ``values`` against ``each``: (run, weights, keys) of each example."""
    flips = 0
    for row, (run, weights, inside) in zip(values.itertuples(), each, strict=True):
        assert row.features == len(inside)
        for name, order in rankings(run, weights, inside).items():
            count = until_flipped(run, weights, order)
            flips += count is not None
            assert getattr(row, f"{name}_never") == (count is None)
            expected = np.nan if count is None else count / len(inside)
            assert getattr(row, f"{name}_removed") == pytest.approx(expected, nan_ok=True)
    assert 0.2 < flips / (len(values) * len(orders)) < 0.95, "some flip, and some never do"


@pytest.fixture(scope="module")
def pool():
    return wired()


@pytest.fixture(scope="module")
def small(tokenizer):
    """A small BERT whose classes are close to each other, so that decisions can flip."""
    model = bert(tokenizer)
    with torch.no_grad():
        said = [model(**tokenizer(one.input, return_tensors="pt")).logits[0] for one in examples(14, more=LONG)]
        model.classifier.bias -= torch.stack(said).mean(0)
    return model


def test_what_attention_ranks_high_decides():
    found = regard.trial(toy("decisive"), mixed(), "erasure")
    assert found.supported is True
    assert found.margin == found.interval
    table = found.tables["orders"].set_index("order")
    assert table.loc["attention", "removed"] < table.loc["random", "removed"]
    assert found.values["largest_flips"].mean() > found.values["other_flips"].mean()


def test_attention_that_looks_at_what_does_not_matter_is_slower_than_chance():
    """The less a word says, the more weight it has."""
    polarity = torch.tensor([*POLARITY.values()])
    wrong = Pool(-3 * polarity.abs(), polarity[:, None], 0 * polarity, torch.tensor([1.25]))
    found = regard.trial(regard.pooled(wrong), mixed(100), "erasure")
    assert found.supported is False
    assert found.interval.high < 0
    assert found.reference["by gradient"].low > 0, "another order of the same weights is sooner than chance"


def test_a_decision_that_attention_cannot_flip_tells_nothing():
    found = regard.trial(toy("irrelevant"), mixed(), "erasure")
    assert found.supported is None
    assert found.needed is None, "no number of examples would tell"
    assert "The decision never flipped" in found.sentence
    assert (found.tables["orders"]["never_flipped"] == 1).all()
    assert found.tables["orders"]["removed_if_flipped"].isna().all()


def test_a_pool_as_written_out(pool):
    data = mixed()
    found = regard.trial(regard.pooled(pool), data, "erasure")
    assert_as_written_out(found.values, [of_pool(pool, one.input) for one in data])


def test_several_heads_as_written_out(tokenizer, small):
    data = examples(14, more=LONG)
    found = regard.trial(regard.text(small, tokenizer), data, "erasure")
    assert_as_written_out(found.values, [of_bert(small, tokenizer, one.input) for one in data])
    assert found.settings["edited"] == [
        {"site": "bert.encoder.layer.1.attention.self", "kind": "self", "heads": 4, "rows": "readout"}
    ]


class Mean(torch.nn.Module):
    """Two heads over the columns of a table; the prediction is read from all rows alike."""

    def __init__(self):
        super().__init__()
        draws = np.random.default_rng(2)
        self.parts = torch.nn.ParameterList([torch.tensor(draws.normal(size=(2, 6, 3))) for _ in range(3)])
        self.place = torch.nn.Parameter(torch.tensor(0.3 * draws.normal(size=(5, 5))))
        self.down = torch.nn.Parameter(torch.tensor(draws.normal(size=(6, 3))))
        self.bias = torch.nn.Parameter(torch.tensor([-1.0, 0.0, 0.0]).double())

    def rows(self, x):
        return torch.cat([x[..., None], self.place.expand(*x.shape[:-1], 5, 5)], -1)[..., None, :, :]

    def forward(self, x):
        q, k, v = (self.rows(x) @ part for part in self.parts)  # example head row channel
        return self.read((q @ k.mT).softmax(-1) @ v)

    def read(self, mixed):
        return mixed.transpose(-3, -2).flatten(-2).mean(-2) @ self.down + self.bias


def test_several_rows_that_are_read_as_written_out():
    model = Mean().eval()
    columns = list("abcde")
    subject = regard.module(model, lambda model, x: model(x), features=columns, readout="mean", labels=list("xyz"))
    rows = 2 * np.random.default_rng(3).normal(size=(30, 5))
    data = Dataset.of(
        [Example(dict(zip(columns, row, strict=True)), id=str(at)) for at, row in enumerate(rows.tolist())]
    )
    found = regard.trial(subject, data, "erasure")
    each = []
    for row in torch.tensor(rows):
        q, k, v = (model.rows(row) @ part for part in model.parts)
        weights = (q @ k.mT).softmax(-1).detach()  # head row key
        each.append((lambda given, v=v: model.read(given @ v).softmax(-1), weights, range(5)))
    assert_as_written_out(found.values, each)


def test_random_orders_are_all_orders(pool):
    """Of 200 shuffles of up to four words, the mean share is that of all orders, within five standard errors."""
    data = mixed(12, most=4, seed=5)
    found = regard.trial(regard.pooled(pool), data, "erasure", orders=["attention"], repeats=200).values
    for row, one in zip(found.itertuples(), data, strict=True):
        run, weights, inside = of_pool(pool, one.input)
        counts = [until_flipped(run, weights, list(order)) for order in permutations(inside)]
        flipped = [count / len(inside) for count in counts if count is not None]
        never = 1 - len(flipped) / len(counts)
        assert row.random_never == pytest.approx(never, abs=5 * np.sqrt(never * (1 - never) / 200) + 1e-9)
        if flipped:
            error = np.std(flipped) / np.sqrt(200 * (1 - never))
            assert row.random_removed == pytest.approx(np.mean(flipped), abs=5 * error + 1e-9)
        else:
            assert np.isnan(row.random_removed)


def test_never_flipped_counts_as_all_and_the_authors_mean_is_beside_it(pool):
    found = regard.trial(regard.pooled(pool), mixed(), "erasure")
    values, table = found.values, found.tables["orders"].set_index("order")
    ours = {name: values[f"{name}_removed"].fillna(1) for name in ORDERS}
    ours["random"] = (1 - values["random_never"]) * values["random_removed"].fillna(0) + values["random_never"]
    assert 0 < table.loc["attention", "never_flipped"] < 1
    for name, numbers in ours.items():
        assert table.loc[name, "removed"] == pytest.approx(numbers.mean())
        assert table.loc[name, "removed_if_flipped"] == pytest.approx(values[f"{name}_removed"].mean())
        assert table.loc[name, "never_flipped"] == pytest.approx(values[f"{name}_never"].mean())
        assert table.loc[name, "removed_low"] <= table.loc[name, "removed"] <= table.loc[name, "removed_high"]
    assert found.statistic == pytest.approx((ours["random"] - ours["attention"]).mean())
    assert found.reference["by gradient"].value == pytest.approx((ours["random"] - ours["gradient"]).mean())
    judged = regard.trial(regard.pooled(pool), mixed(), "erasure", judged="gradient")
    assert judged.statistic == pytest.approx(found.reference["by gradient"].value)


def test_a_single_weight_as_written_out(pool):
    data = mixed()
    found = regard.trial(regard.pooled(pool), data, "erasure")
    pairs = []
    for row, one in zip(found.values.itertuples(), data, strict=True):
        run, weights, inside = of_pool(pool, one.input)
        if len(inside) == 1:
            assert np.isnan([row.largest_flips, row.other_flips, row.delta_js, row.delta_alpha]).all()
            continue
        top = int(weights[0].argmax())
        # which other one was drawn is seen from its weight: no two are alike
        gaps = [abs(float(weights[0, top] - weights[0, key]) - row.delta_alpha) if key != top else 9 for key in inside]
        other = int(np.argmin(gaps))
        assert gaps[other] < 1e-6
        before, first, second = (
            run(one).detach().numpy() for one in (weights, erased(weights, [top]), erased(weights, [other]))
        )
        assert row.delta_js == pytest.approx(jsd(before, first) - jsd(before, second), abs=1e-7)
        pairs.append((first.argmax() != before.argmax(), second.argmax() != before.argmax()))
        assert (row.largest_flips, row.other_flips) == pairs[-1]
    table = found.tables["single weights"].set_index(["largest_flips", "other_flips"])["examples"]
    assert len(table) == 4
    for both, count in table.items():
        assert count == sum(pair == both for pair in pairs)
    assert table.sum() == len(pairs) < len(data)
    assert table[1.0, 0.0] > 0


def test_a_method_of_the_catalog_gives_an_order(pool):
    subject = regard.pooled(pool)
    data = mixed(20, least=2)
    found = regard.trial(subject, data, "erasure", orders=["leave_one_out"], judged="raw")
    assert found.tables["orders"]["order"].tolist() == ["raw", "leave_one_out", "random"]
    plain = regard.trial(subject, data, "erasure", orders=["random"])
    assert found.values["raw_removed"].equals(plain.values["attention_removed"]), "raw is attention at the last site"
    for row, one in zip(found.values.itertuples(), data, strict=True):
        run, weights, _ = of_pool(pool, one.input)
        scores = regard.explain(subject, one.input, method="leave_one_out").scores
        count = until_flipped(run, weights, np.argsort(-scores).tolist())
        assert row.leave_one_out_removed == pytest.approx(np.nan if count is None else count / len(scores), nan_ok=True)


def test_a_constant_order_is_a_random_one(pool):
    """Over several seeds the mean difference is 0, within four standard errors; at most one of eight calls it more."""
    some = [
        regard.trial(regard.pooled(pool), mixed(least=4), "erasure", orders=[], judged="uniform", repeats=2, seed=seed)
        for seed in range(8)
    ]
    differences = np.concatenate([found.values["sooner"] for found in some])
    assert abs(differences.mean()) < 4 * differences.std() / np.sqrt(len(differences))
    assert differences.std() > 0.1, "orders matter here"
    assert sum(found.supported is True for found in some) <= 1


def test_the_same_keys_go_at_all_sites(tokenizer, small):
    subject, data = regard.text(small, tokenizer), examples(14, more=LONG)
    both, last = (regard.trial(subject, data, "erasure", sites=sites) for sites in ("all", "last"))
    assert len(both.settings["edited"]) == 2
    assert not both.values["attention_removed"].equals(last.values["attention_removed"])
    first = both.values.iloc[0]
    encoded = subject.encode(next(iter(data)).input)
    weights = torch.stack([site.weights()[0, :, 0].mean(0) for site in regard.trace(subject, encoded).sites]).mean(0)
    order = sorted(range(1, len(weights) - 1), key=lambda key: -float(weights[key]))
    said = subject.forward(encoded).argmax()
    flips = [
        count for count in range(1, len(order) + 1)
        if regard.intervene(subject, encoded, regard.edits.zero(order[:count])).argmax() != said
    ]  # fmt: skip
    assert first["attention_removed"] == pytest.approx(flips[0] / len(order) if flips else np.nan, nan_ok=True)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "regression"])
def test_every_kind_of_subject_and_the_batch_does_not_matter(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer, count=5)
    one, many = (regard.trial(subject, data, "erasure", batch_size=size, repeats=1) for size in (1, 32))
    assert len(many.values) == len(data)
    numbers = many.values.select_dtypes("number")
    np.testing.assert_allclose(one.values[numbers.columns], numbers, atol=1e-5)
    for name in (*ORDERS, "random"):
        assert many.values[f"{name}_removed"].dropna().between(0, 1, inclusive="right").all()
    assert many.values["features"].min() >= 3


def test_what_draws_lots_follows_the_seed(pool):
    subject, data = regard.pooled(pool), mixed()
    first, second = (regard.trial(subject, data, "erasure", seed=seed).values for seed in (0, 1))
    assert first["attention_removed"].equals(second["attention_removed"])
    assert not first["random_removed"].equals(second["random_removed"])


def test_what_cannot_be_served(tokenizer):
    subject, data = of_kind("regression", tokenizer)
    with pytest.raises(NotServed, match="no decision that could change"):
        regard.trial(subject, data, "erasure")
    subject, data = of_kind("encoder–decoder", tokenizer)
    with pytest.raises(NotServed, match="which are not the .* rows of features"):
        regard.trial(subject, data, "erasure", sites="all")
    with pytest.raises(NotServed, match="does not have the readout among its queries"):
        regard.trial(subject, data, "erasure", sites=[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"orders": "attention"}, "orders='attention' must be a list"),
        ({"orders": ["atention"]}, "order='atention' is not known. Did you mean 'attention'"),
        ({"judged": "random"}, "judged='random'"),
        ({"judged": "rolout"}, "judged='rolout' is not known. Did you mean 'rollout'"),
        ({"repeats": 0}, "repeats=0"),
        ({"repeats": 1.5}, "repeats=1.5"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(OptionError, match=said):
        regard.trial(toy("decisive"), mixed(), "erasure", **options)


def test_words_that_the_model_never_sees_are_refused():
    with pytest.raises(InputError):
        regard.trial(toy("decisive"), [""] * 10, "erasure")
