"""Noise that leaves the decision as it is: what trembles and how much, τ by hand, and where explanations must not stay."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from polar import KINDS, examples, of_kind, toy
from scipy import stats
from torch import nn

import regard
from regard import errors
from regard.attention.entrance import Entrance
from regard.attention.lookalikes import Trembling, dropouts, dropping
from regard.data import Dataset, Example
from regard.models.toys import POLARITY, Pool
from regard.subjects.scratch import scratch_table

LIKED = ("nice", "good", "moving", "superb")


def noise_of(tables, size, seed, words=None):
    """For each table the noise that its words are given, or some of them."""
    noise = [torch.zeros_like(one) for one in tables]
    with torch.no_grad(), Trembling(tables, size, seed):
        for one, table in zip(noise, tables, strict=True):
            some = torch.arange(len(table)) if words is None else words
            one[some] = F.embedding(some, table) - table[some]
    return noise


def shaken(model, noise):
    """A true copy of a toy, with noise written into its tables."""
    model = copy.deepcopy(model)
    for table, one in zip((model.scores, model.values, model.direct), noise, strict=True):
        table.weight.data += one
    return model


def orders(count):
    """Texts of the same four words, all of which say the same."""
    draws = np.random.default_rng(0)
    return [" ".join(draws.permutation(LIKED)) for _ in range(count)]


def liking(scores):
    """Attention with these scores over four words with the same value: the decision is always the same."""
    table = torch.tensor([scores[LIKED.index(word)] if word in LIKED else -scores[-1] for word in POLARITY])
    values = torch.tensor([[0.6]] * len(POLARITY))
    return regard.pooled(Pool(table, values, torch.zeros(len(POLARITY)), torch.tensor([1.25])))


# --- where it must support its claim, and where not -------------------------------------------------------------------


def test_moderate_attention_stays():
    finding = regard.trial(toy("decisive"), examples(), "stability")
    assert finding.supported is True
    assert finding.interval.low > 0.7
    assert finding.interval.n == 40
    assert 0 < finding.values["noise moved"].mean() < 0.05
    assert (finding.values["noise stayed"] == 10).all()


def test_steep_attention_between_equals_does_not_stay():
    texts = orders(30)
    steep = regard.trial(liking([60.0, 60.1, 60.2, 60.3]), texts, "stability")
    assert steep.supported is False
    assert steep.interval.high < 0.5
    assert (steep.values["noise stayed"] == 10).all(), "the decision is the same"
    assert set(steep.values["predicted"]) == {"positive"}
    apart = regard.trial(liking([-60.0, -20.0, 20.0, 60.0]), texts, "stability")
    assert apart.supported is True, "as steep, but not between equals"


class Halves(nn.Module):
    """Of two words each has its score in a channel of its own, behind a dropout; the values are all the same."""

    labels, output, takes_query, attentions = ("negative", "positive"), "binary", False, 1

    def __init__(self, rate=0.5):
        super().__init__()
        self.vocabulary = {"<pad>": 0, "<unk>": 1, "left": 2, "right": 3, "both": 4}
        self.table = nn.Embedding.from_pretrained(torch.tensor([[0, 0], [0, 0], [2.0, 0], [0, 1.5], [1.2, 1.2]]))
        self.dropout = nn.Dropout(rate)
        self.values = nn.Embedding.from_pretrained(torch.full((5, 1), 0.5))

    def forward(self, ids, real, attend):
        scores = self.dropout(self.table(ids)).sum(-1).masked_fill(~attend, -torch.inf)
        return (scores.softmax(-1).unsqueeze(1) @ self.values(ids)).squeeze(1)


def test_under_dropout_the_worse_of_both_counts():
    texts = ["left right both", "right both left", "both left right"] * 4
    finding = regard.trial(regard.pooled(Halves()), texts, "stability")
    assert finding.settings["dropout modules"] == ["dropout"]
    assert finding.reference["noise"].low > 0.9
    assert finding.interval == finding.reference["dropout"]
    assert finding.supported is False
    without = regard.trial(regard.pooled(Halves()), texts, "stability", dropout=False)
    assert without.supported is True
    assert without.settings["dropout modules"] == []
    assert "dropout tau" not in without.values


# --- the statistic, by hand -------------------------------------------------------------------------------------------


def test_tau_of_a_toy_by_hand():
    """Every run is a model of its own, into whose tables the noise was written."""
    subject, data = toy("decisive"), [*examples(8), Example("good bad"), Example("nice slow the")]
    finding = regard.trial(subject, Dataset.of(data), "stability", noise=0.3, repeats=5)
    tables = [subject.model.scores.weight, subject.model.values.weight, subject.model.direct.weight]
    models = [shaken(subject.model, noise_of(tables, 0.3, (0, number))).double() for number in range(5)]
    left = 0
    for (_, row), one in zip(finding.values.iterrows(), data, strict=True):
        ids = torch.tensor([[subject.vocabulary[word] for word in one.input.split()]])

        def run(model, ids=ids):
            real = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                return model.scores(ids)[0, :, 0].softmax(-1), model(ids, real, real).sigmoid().item()

        before, said = run(copy.deepcopy(subject.model).double())
        runs = [run(model) for model in models]
        stayed = [weights for weights, now in runs if (now > 0.5) == (said > 0.5)]
        assert row["noise stayed"] == len(stayed)
        assert row["noise moved"] == pytest.approx(np.mean([abs(now - said) for _, now in runs]), abs=1e-6)
        taus = [stats.kendalltau(before, weights).statistic for weights in stayed]
        assert row["noise tau"] == pytest.approx(np.mean(taus) if taus else math.nan, abs=1e-9, nan_ok=True)
        left += 5 - len(stayed)
    assert left > 0, "some decision must have changed"
    assert finding.statistic == pytest.approx(finding.values["noise tau"].mean())


def test_noise_has_the_size_that_was_asked_for():
    torch.manual_seed(0)
    table = 3 * torch.randn(2000, 16) + 5
    (noise,), (again,), (other,) = (noise_of([table], 0.05, seed) for seed in ((0, 1), (0, 1), (0, 2)))
    assert noise.std() == pytest.approx(0.05 * float(table.std()), rel=0.01)
    assert noise.mean() == pytest.approx(0, abs=0.005)
    assert noise.equal(again)
    assert not noise.equal(other)
    with Trembling([table], 0.05, (0, 1)):
        assert F.embedding(torch.tensor([[7, 3]]), table).sub(table[[7, 3]]).allclose(noise[[7, 3]])
        assert F.embedding(torch.tensor([1]), table + 0).equal(table[[1]]), "another table, of positions say, stays"


@pytest.mark.parametrize("method", ["raw", "gradient", "leave_one_out", "integrated_gradients", "attention_gradient"])
def test_what_a_method_runs_is_one_model(method):
    """Whatever it takes out or differentiates by, it sees the same noise on the same words."""
    subject = toy("decisive")
    text = "the film is moving and so good"
    tables = Entrance(subject, subject.encode(text)).tables
    assert [id(one) for one in tables] == [
        id(one.weight) for one in (subject.model.scores, subject.model.values, subject.model.direct)
    ]
    with Trembling(tables, 0.2, (0, 3)):
        found = regard.explain(subject, text, method=method)
    other = regard.pooled(shaken(subject.model, noise_of(tables, 0.2, (0, 3))))
    expected = regard.explain(other, text, method=method)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)
    assert not np.allclose(found.scores, regard.explain(subject, text, method=method).scores, atol=1e-4)


def test_a_table_that_also_reads_the_output_trembles_only_at_the_entrance(tokenizer):
    subject, _ = of_kind("decoder", tokenizer)
    batch = subject.encode("so so good")
    (table,) = Entrance(subject, batch).tables
    assert table is subject.model.lm_head.weight
    (noise,) = noise_of([table], 0.5, (0, 0), batch.inputs["input_ids"].unique())
    with torch.no_grad():
        with Trembling([table], 0.5, (0, 0)):
            found = subject.forward(batch)
        other = copy.deepcopy(subject.model)
        other.transformer.wte.weight = nn.Parameter(table + noise)
        object.__setattr__(subject, "model", other)
        assert found.allclose(subject.forward(batch), atol=1e-6)


# --- tables -----------------------------------------------------------------------------------------------------------


def rows(columns):
    return Dataset.of([Example(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)])


def test_tables_tremble_within_the_precision_of_a_column(monkeypatch):
    draws = np.random.default_rng(0)
    data = rows({
        "age": draws.integers(18, 80, 30).tolist(), "price": draws.uniform(0, 9, 30).round(2).tolist(),
        "exact": draws.normal(size=30).tolist(), "flag": draws.integers(0, 2, 30).tolist(),
        "far": [round(x, 1) * 1e6 for x in draws.normal(size=30).tolist()],
    })  # fmt: skip
    names = ["age", "price", "exact", "flag", "far"]
    subject = scratch_table(names, ["no", "yes"], torch.zeros(5))
    seen = []
    known = type(subject).columns_of
    monkeypatch.setattr(type(subject), "columns_of", lambda self, table: seen.append(table) or known(self, table))
    finding = regard.trial(subject, data, "stability", repeats=3, batch_size=30)
    widths = finding.settings["noise within ±"]
    assert widths == {"age": 0.5, "price": 0.005, "exact": 5e-7, "far": 0.5}
    clean, *noisy = seen
    assert len(noisy) == 3
    for table in noisy:
        for name in names:
            apart = (table[name] - clean[name]).abs()
            assert apart.max() <= widths.get(name, 0) * 1.0001
            assert apart.max() >= widths.get(name, 0) * 0.8
    assert not noisy[0].equals(noisy[1])


def test_a_table_of_flags_has_no_precision():
    data = rows({name: [0, 1] * 5 for name in "abc"})
    with pytest.raises(errors.NotServed, match="no column of the table has numbers of more than two values"):
        regard.trial(scratch_table("abc", ["no", "yes"], torch.zeros(3)), data, "stability")


# --- dropout ----------------------------------------------------------------------------------------------------------


class Weighed(Halves):
    """Dropout of attention weights, which is no tremor of the model: the weights that are shown would be others."""

    def __init__(self):
        super().__init__()
        self.of_weights = nn.Dropout(0.5)
        self.off = nn.Dropout(0.0)

    def forward(self, ids, real, attend):
        scores = self.off(self.dropout(input=self.table(ids))).sum(-1).masked_fill(~attend, -torch.inf)
        return (self.of_weights(scores.softmax(-1)).unsqueeze(1) @ self.values(ids)).squeeze(1)


def test_which_modules_drop():
    subject = regard.pooled(Weighed())
    assert list(dropouts(subject, subject.encode(["left right both", "both"]))) == ["dropout"]


def test_a_module_drops_the_same_channels_of_all_rows():
    module, x = nn.Dropout(0.3).eval(), torch.ones(4, 5, 1000)
    with dropping({"here": module}, (0, 1)):
        out, again = module(x), module(input=x[:1, :2])
    kept = out[0, 0] > 0
    assert kept.float().mean() == pytest.approx(0.7, abs=0.05)
    assert out.eq(torch.where(kept, 1 / 0.7, 0.0)).all()
    assert out[:1, :2].equal(again)
    with dropping({"here": module}, (0, 2)):
        assert not module(x).equal(out)
    with dropping({"there": module}, (0, 1)):
        assert not module(x).equal(out)
    assert module(x) is x
    assert "forward" not in vars(module)
    pictures, channels = torch.ones(2, 400, 3, 3), nn.Dropout2d(0.5).eval()
    with dropping({"here": channels}, (0, 1)):
        shown = channels(pictures)
    assert shown.amax((2, 3)).equal(shown.amin((2, 3)))
    assert shown.amax((2, 3))[0].eq(0).float().mean() == pytest.approx(0.5, abs=0.1)


def test_the_fast_path_does_not_go_around_dropout():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.5).eval()
    subject = regard.module(layer, lambda model, x: model(x)[:, 0], features="abc", readout="first")
    batch = subject.encode(torch.randn(2, 3, 8))
    found = dropouts(subject, batch)
    assert list(found) == ["dropout1", "dropout", "dropout2"]
    with torch.no_grad():
        plain = subject.forward(batch)
        with dropping(found, (0, 1)):
            one = subject.forward(batch)
            assert one.equal(subject.forward(batch)), "one model, however often it runs"
    traced = regard.trace(subject, batch, target=0).output
    assert not one.allclose(plain)
    assert plain.allclose(traced, atol=1e-6)


# --- other subjects, seeds, batches, the model -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "raw") for kind in KINDS),
        *itertools.product(("pooled LSTM", "BERT", "table", "decoder"), ("gradient", "leave_one_out")),
    ],
)
def test_every_kind_of_subject(kind, method, tokenizer):
    subject, data = of_kind(kind, tokenizer, 6)
    finding = regard.trial(subject, data, "stability", method=method, repeats=2)
    assert len(finding.values) == 6
    assert not finding.failed
    assert finding.interval.n + finding.interval.undefined == 6
    if kind != "encoder–decoder":  # untrained, and steep: it chooses among 30,000 tokens that are all alike
        assert finding.reference["noise"].value > 0.7
    assert finding.values["noise moved"].max() > 0
    drops = kind in ("BERT", "decoder", "encoder–decoder")
    assert bool(finding.settings["dropout modules"]) == drops == ("dropout tau" in finding.values)
    assert finding.interval == min(
        (finding.reference[name] for name in ("noise", "dropout") if name in finding.reference),
        key=lambda one: one.value,
    )


def test_a_bert_by_hand(tokenizer):
    """A copy with noise in its table, traced as a model of its own."""
    subject, data = of_kind("BERT", tokenizer, 6)
    finding = regard.trial(subject, data, "stability", dropout=False, repeats=2, noise=0.5)
    words = subject.model.bert.embeddings.word_embeddings
    used = torch.tensor(tokenizer(" ".join(one.input for one in data))["input_ids"]).unique()
    taus, others = [], []
    for number in range(2):
        model = copy.deepcopy(subject.model)
        model.bert.embeddings.word_embeddings.weight.data += noise_of([words.weight], 0.5, (0, number), used)[0]
        others.append(regard.text(model, tokenizer))
    for one in data:
        why = regard.explain(subject, one.input, method="raw", special="drop")
        label, before = why.target, why.words()["score"]
        runs = []
        for other in others:
            if regard.explain(other, one.input, method="raw").target == label:
                again = regard.explain(other, one.input, method="raw", special="drop").words()["score"]
                runs.append(stats.kendalltau(before, again).statistic)
        taus.append(np.mean(runs) if runs else np.nan)
    np.testing.assert_allclose(finding.values["noise tau"], taus, atol=1e-9)


def test_seeds_and_batches(tokenizer):
    subject, data = of_kind("BERT", tokenizer, 6)
    found, again, other = (regard.trial(subject, data, "stability", repeats=2, seed=seed).values for seed in (0, 0, 1))
    assert found.equals(again)
    assert not np.allclose(found["noise moved"], other["noise moved"])
    assert not np.allclose(found["dropout moved"], other["dropout moved"])
    alone = regard.trial(subject, data, "stability", repeats=2, batch_size=1).values
    numbers = found.columns[2:]
    np.testing.assert_allclose(found[numbers].astype(float), alone[numbers].astype(float), atol=1e-5)
    subject, data = of_kind("table", tokenizer, 6)
    found, alone = (regard.trial(subject, data, "stability", repeats=2, batch_size=size).values for size in (6, 1))
    np.testing.assert_allclose(found["noise moved"], alone["noise moved"], rtol=1e-4)


def test_the_model_is_as_it_was(tokenizer, monkeypatch):
    subject, data = of_kind("BERT", tokenizer, 6)
    subject.model.train()
    before = {name: (id(one), one._version, one.detach().clone()) for name, one in subject.model.named_parameters()}
    regard.trial(subject, data, "stability", repeats=2)
    monkeypatch.setattr("regard.trials.stability.alike", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        regard.trial(subject, data, "stability", repeats=2)
    for name, one in subject.model.named_parameters():
        known = before[name]
        assert (id(one), one._version) == known[:2]
        assert one.equal(known[2])
    assert all(one.training and "forward" not in vars(one) for one in subject.model.modules())


def test_it_can_be_kept_and_drawn(tmp_path):
    finding = regard.trial(toy("decisive"), examples(8), "stability", repeats=2)
    again = regard.load_finding(finding.save(tmp_path / "finding.json"))
    assert again.interval == finding.interval
    assert again.to_html(tmp_path / "finding.html").stat().st_size > 1000


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"noise": 0}, {"noise": math.inf}, {"noise": math.nan}, {"repeats": 0}, {"least": 1}, {"least": -2}]
)
def test_options_out_of_range(options):
    (name,) = options
    with pytest.raises(errors.OptionError, match=name):
        regard.trial(toy("decisive"), examples(8), "stability", **options)


def test_a_constant_explanation_has_no_order():
    with pytest.raises(errors.InputError, match="method='uniform' gives all words of an example the same score"):
        regard.trial(toy("decisive"), examples(8), "stability", method="uniform", repeats=2)


def test_a_model_that_looks_nothing_up_cannot_be_served():
    class Counted(Halves):
        def forward(self, ids, real, attend):
            states = F.one_hot(ids, 5).float() @ self.table.weight
            return (states.sum(-1).masked_fill(~attend, -torch.inf).softmax(-1).unsqueeze(1) @ states)[:, 0, :1]

    with pytest.raises(errors.NotServed):
        regard.trial(regard.pooled(Counted()), ["left right both"] * 6, "stability")


def test_predictions_that_never_stay_are_said():
    class Swinging(Halves):
        """The noise decides: without any the first class, with any at all, above or below, the second."""

        def forward(self, ids, real, attend):
            weights = self.table(ids).sum(-1).masked_fill(~attend, -torch.inf).softmax(-1)
            context = (weights.unsqueeze(1) @ self.values(ids)).squeeze(1)
            return 1e3 * (context - 0.5).abs() - 1e-3

    model = Swinging()
    model.values.weight.data = torch.tensor([[0.4], [0.6], [0.5], [0.5], [0.5]])
    with pytest.raises(errors.InputError, match="noise=0.2: in no run did the prediction stay"):
        regard.trial(regard.pooled(model), ["left right both"] * 6, "stability", noise=0.2, dropout=False)
