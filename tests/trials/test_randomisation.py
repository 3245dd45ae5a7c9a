"""Weights drawn anew: what is a layer, that copies are right, that the user's model is not written to, and τ by hand."""

from __future__ import annotations

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from polar import KINDS, SMALL, examples, of_kind, toy
from torch import nn

import regard
from regard import errors
from regard.attention.lookalikes import layers, lookalike, redrawn
from regard.data import Dataset
from regard.trials import randomisation as trial


def tau_b(x, y):
    """Kendall's τ-b, pair by pair."""
    pairs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in itertools.combinations(range(len(x)), 2)]
    both = sum(a * b for a, b in pairs)
    return both / math.sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))


def written(subject, instead):
    """A true copy of the model, with other numbers written into its parameters; they are given by name."""
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        for name, tensor in instead.items():
            model.get_parameter(name).copy_(tensor)
    return model


def frozen(model):
    """All that a model is made of: which tensors, their numbers, modes, hooks and attributes."""
    tensors = dict(itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers()))
    return (
        {name: (id(one), one.requires_grad, one._version, one.detach().clone()) for name, one in tensors.items()},
        {
            name: (id(one), one.training, sorted(vars(one)), len(one._forward_hooks))
            for name, one in model.named_modules()
        },
    )


def same(one, other):
    return one[1] == other[1] and all(
        a[:3] == b[:3] and a[3].equal(b[3]) for a, b in zip(one[0].values(), other[0].values(), strict=True)
    )


# --- where it must support its claim, and where not -------------------------------------------------------------------


def test_attention_that_follows_learned_words_is_another_one():
    finding = regard.trial(toy("decisive"), examples(), "randomisation")
    assert finding.supported is True
    assert finding.interval.high < 0.3
    assert finding.interval.n == 40


def test_attention_that_depends_on_the_position_alone_stays():
    finding = regard.trial(toy("positional"), examples(), "randomisation")
    assert finding.supported is False
    assert finding.statistic == 1
    assert finding.margin.value == -0.5


def test_an_explanation_that_does_not_look_at_the_model_stays():
    finding = regard.trial(toy("decisive"), examples(), "randomisation", method="random")
    assert finding.supported is False
    assert finding.statistic == 1


def test_a_threshold_inside_the_interval_is_inconclusive():
    finding = regard.trial(toy("positional"), examples(), "randomisation", method="leave_one_out")
    middle = (finding.interval.low + finding.interval.high) / 2
    again = regard.trial(toy("positional"), examples(), "randomisation", method="leave_one_out", most=middle)
    assert again.supported is None


def test_a_small_bert(tokenizer):
    subject, data = of_kind("BERT", tokenizer, 24)
    finding = regard.trial(subject, data, "randomisation")
    assert finding.supported is True
    cascading, independent = finding.tables["cascading"], finding.tables["independent"]
    assert len(cascading) == len(independent) == 3, "two layers of attention"
    assert cascading["tau"][0] == independent["tau"][0] == 1, "what comes after the last attention does not move it"
    assert cascading["tau"][1] < 0.5
    assert cascading["modules"].tolist() == finding.settings["layers"]
    assert cascading["modules"][0].endswith("classifier")


# --- the statistic, by hand -------------------------------------------------------------------------------------------


def test_tau_of_a_toy_by_hand():
    subject, data = toy("decisive"), list(examples(12))
    finding = regard.trial(subject, Dataset.of(data), "randomisation", draws=2)
    table = subject.model.scores.weight[:, 0]
    drawn = [redrawn(subject, (0, draw))["scores.weight"][:, 0] for draw in (1, 2)]
    for (_, row), one in zip(finding.values.iterrows(), data, strict=True):
        ids = torch.tensor([subject.vocabulary[word] for word in one.input.split()])
        before, *after = [x[ids].double().softmax(-1).tolist() for x in (table, *drawn)]
        taus = [tau_b(before, other) for other in after]
        assert row["tau"] == pytest.approx(np.mean(taus), abs=1e-9)
        assert row["cascading 2 tau"] == row["independent 2 tau"] == pytest.approx(taus[0], abs=1e-9)
        assert row["draw 2 tau"] == pytest.approx(taus[1], abs=1e-9)
        assert row["cascading 1 tau"] == pytest.approx(1, abs=1e-12)
        top = math.ceil(len(ids) / 5)
        tops = [set(np.argsort(x)[-top:].tolist()) for x in (before, after[0])]
        assert row["cascading 2 top_k"] == pytest.approx(len(tops[0] & tops[1]) / top)
    assert finding.statistic == pytest.approx(finding.values["tau"].mean())


def test_depths_of_a_bert_by_hand(tokenizer):
    """Attention as eager Hugging Face has it, of copies whose parameters were written over."""
    subject, data = of_kind("BERT", tokenizer, 6)
    finding = regard.trial(subject, data, "randomisation", draws=1)
    cut = layers(subject, subject.encode("so so good"))[::-1]
    drawn = redrawn(subject, (0, 1))

    def looks(model, text):
        model.set_attn_implementation("eager")
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            row = model(**encoded, output_attentions=True).attentions[-1][0].mean(0)[0]
        words = encoded.word_ids()
        return [float(sum(row[at] for at, of in enumerate(words) if of == word)) for word in range(len(text.split()))]

    for number in (1, 2, 3):
        parts = {"cascading": cut[:number], "independent": cut[number - 1 : number]}
        for how, some in parts.items():
            other = written(subject, {name: drawn[name] for one in some for name in one.parameters})
            for (_, row), one in zip(finding.values.iterrows(), data, strict=True):
                expected = tau_b(looks(copy.deepcopy(subject.model), one.input), looks(other, one.input))
                assert row[f"{how} {number} tau"] == pytest.approx(expected, abs=1e-6)


def test_random_weights_have_the_mean_and_deviation_of_the_tensor(tokenizer):
    subject, _ = of_kind("BERT", tokenizer)
    name = "bert.embeddings.word_embeddings.weight"
    drawn, again, other = (redrawn(subject, seed) for seed in ((0, 1), (0, 1), (1, 1)))
    own = subject.model.get_parameter(name).data
    own += 3
    moved = redrawn(subject, (0, 1))[name]
    assert drawn[name].equal(again[name])
    assert not drawn[name].equal(other[name])
    assert moved.mean() == pytest.approx(float(own.mean()), abs=0.01)
    assert moved.std() == pytest.approx(float(own.std()), rel=0.01)
    ones = "bert.embeddings.LayerNorm.weight"
    assert drawn[ones].eq(1).all(), "what does not vary stays"


# --- what is a layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_is_in_one_layer(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer, 5)
    one = next(iter(data)).input
    batch = subject.encode(regard.training.as_inputs([one]))
    named = [name for layer in layers(subject, batch) for name in layer.parameters]
    assert sorted(named) == sorted(name for name, _ in subject.model.named_parameters())


def test_what_a_model_uses_last_is_the_top(tokenizer):
    subject, _ = of_kind("decoder", tokenizer)
    bottom, middle, top = layers(subject, subject.encode("so so good"))
    assert "transformer.wte.weight" in top.parameters, "the output is read with the same tensor"
    assert "transformer.wpe.weight" in bottom.parameters
    assert "transformer.h.1.attn.c_attn.weight" in middle.parameters
    assert "transformer.h.0.attn.c_proj.weight" in middle.parameters


def test_a_module_that_runs_many_times_belongs_to_its_last_call(tokenizer):
    sizes = {**SMALL, "embedding_size": 16, "num_hidden_layers": 3}
    model = hf.AlbertForSequenceClassification(hf.AlbertConfig(vocab_size=len(tokenizer), **sizes)).eval()
    subject = regard.text(model, tokenizer)
    found = {name: place for place, one in enumerate(layers(subject, subject.encode("so"))) for name in one.parameters}
    shared = "albert.encoder.albert_layer_groups.0.albert_layers.0."
    assert found["albert.embeddings.word_embeddings.weight"] == 0
    assert found[f"{shared}attention.query.weight"] == 1, "before the third site; before the second runs nothing else"
    assert found[f"{shared}ffn.weight"] == found["classifier.weight"] == 2


def test_neighbours_are_one_layer_where_there_are_many(tokenizer):
    subject, data = of_kind("BERT", tokenizer, 6)
    three, two = (layers(subject, subject.encode("so"), most) for most in (3, 2))
    assert [len(one.parameters) for one in two] == [
        len((*three[0].parameters, *three[1].parameters)),
        len(three[2].parameters),
    ]
    assert two[1] == three[2]
    assert two[0].name == f"{three[0].name.split(' … ')[0]} … {three[1].name.split(' … ')[1]}"
    finding = regard.trial(subject, data, "randomisation", draws=1, depths=1)
    assert len(finding.settings["layers"]) == 1
    assert finding.values["tau"].equals(regard.trial(subject, data, "randomisation", draws=1).values["tau"])


class Stacked(nn.Module):
    """A start row of its own, and torch's encoder, whose attention owns a projection that is never called."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(8))
        self.up = nn.Linear(1, 8)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        )
        self.down = nn.Linear(8, 2)

    def forward(self, x):
        rows = torch.cat([self.start.expand(len(x), 1, 8), self.up(x[..., None])], 1)
        return self.down(self.body(rows)[:, 0])


def stacked():
    return regard.module(Stacked().eval(), lambda model, x: model(x), features=["[CLS]", *"abc"], readout="first",
                         special_features=["[CLS]"])  # fmt: skip


def test_what_is_not_called_belongs_to_what_is_around_it():
    subject = stacked()
    found = {
        name: place
        for place, one in enumerate(layers(subject, subject.encode(torch.ones(2, 3))))
        for name in one.parameters
    }
    assert found["start"] == found["up.weight"] == 0
    assert [found[f"body.layers.{layer}.self_attn.out_proj.weight"] for layer in (0, 1)] == [0, 1]
    assert [found[f"body.layers.{layer}.linear1.weight"] for layer in (0, 1)] == [1, 2]
    assert found["down.weight"] == 2


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "torch's encoder"])
def test_a_lookalike_is_a_model_whose_parameters_were_written_over(kind, tokenizer):
    if kind == "torch's encoder":
        subject, batch = stacked(), stacked().encode(torch.randn(3, 3))
    else:
        subject, data = of_kind(kind, tokenizer, 5)
        batch = subject.encode(regard.training.as_inputs([one.input for one in data]))
    before, drawn = frozen(subject.model), redrawn(subject, (0, 1))
    some = {name: drawn[name] for name in [*drawn][::2]}
    twin = lookalike(subject, some)
    with torch.no_grad():
        own, output = subject.forward(batch), twin.forward(batch)
        assert not output.equal(own), "it must be able to fail"
        kept = subject.model
        object.__setattr__(subject, "model", written(subject, some))
        assert subject.forward(batch).equal(output)
        object.__setattr__(subject, "model", kept)
        assert subject.forward(batch).equal(own)
    assert same(frozen(subject.model), before)
    others = dict(twin.model.named_parameters())
    for name, parameter in subject.model.named_parameters():
        assert (others[name] is parameter) == (name not in some), "what is not drawn is shared"
    assert not {id(one) for one in twin.model.modules()} & {id(one) for one in subject.model.modules()}


def test_a_compiled_model_gets_the_same_numbers():
    subject = toy("decisive")
    wrapped = nn.Module()
    wrapped._orig_mod = subject.model  # as torch.compile has it
    drawn, others = redrawn(subject, (0, 1)), redrawn(SimpleNamespace(model=wrapped), (0, 1))
    assert all(others[f"_orig_mod.{name}"].equal(one) for name, one in drawn.items())


def test_the_model_is_not_written_to(tokenizer, monkeypatch):
    subject, data = of_kind("BERT", tokenizer, 6)
    subject.model.train()
    subject.model.bert.pooler.eval()
    before = frozen(subject.model)
    finding = regard.trial(subject, data, "randomisation", method="gradient")
    assert finding.interval.n == 6
    assert same(frozen(subject.model), before)
    calls = []

    def broken(*given):
        calls.append(given)
        if len(calls) == 3:
            raise ValueError("on the way")
        return known(*given)

    known = trial.alike
    monkeypatch.setattr(trial, "alike", broken)
    with pytest.raises(ValueError, match="on the way"):
        regard.trial(subject, data, "randomisation")
    assert len(calls) == 3
    assert same(frozen(subject.model), before)


# --- other subjects, seeds, batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "raw") for kind in KINDS),
        *itertools.product(("pooled LSTM", "BERT", "table"), ("gradient", "leave_one_out")),
    ],
)
def test_every_kind_of_subject(kind, method, tokenizer):
    subject, data = of_kind(kind, tokenizer, 6)
    finding = regard.trial(subject, data, "randomisation", method=method, draws=1)
    assert len(finding.values) == 6
    assert not finding.failed
    assert finding.interval.n + finding.interval.undefined == 6
    assert finding.statistic < 0.9
    for table in finding.tables.values():
        assert len(table) == len(finding.settings["layers"]) >= 2


def test_what_is_explained_stays_what_the_model_predicts(tokenizer, monkeypatch):
    subject, data = of_kind("BERT", tokenizer, 8)
    asked = []
    known = trial.sizes
    monkeypatch.setattr(
        trial, "sizes", lambda part, job, trace: asked.append(trace.score.index) or known(part, job, trace)
    )
    finding = regard.trial(subject, data, "randomisation", method="gradient")
    assert len(set(asked)) == 1
    assert {subject.head.name(index) for index in asked[0]} == set(finding.values["predicted"])


def test_seeds_and_batches(tokenizer):
    subject, data = of_kind("BERT", tokenizer, 6)
    found, again, other = (
        regard.trial(subject, data, "randomisation", draws=2, seed=seed).values for seed in (0, 0, 1)
    )
    assert found.equals(again)
    assert not np.allclose(found["tau"], other["tau"])
    alone = regard.trial(subject, data, "randomisation", draws=2, batch_size=1).values
    numbers = found.columns[2:]
    np.testing.assert_allclose(found[numbers].astype(float), alone[numbers].astype(float), atol=1e-5)


def test_it_can_be_kept_and_drawn(tmp_path):
    finding = regard.trial(toy("decisive"), examples(8), "randomisation", draws=1)
    again = regard.load_finding(finding.save(tmp_path / "finding.json"))
    assert again.interval == finding.interval
    assert again.to_html(tmp_path / "finding.html").stat().st_size > 1000


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"most": 1.5}, {"most": -1}, {"draws": 0}, {"draws": 1.5}, {"depths": 0}, {"most": math.nan}]
)
def test_options_out_of_range(options):
    (name,) = options
    with pytest.raises(errors.OptionError, match=name):
        regard.trial(toy("decisive"), examples(8), "randomisation", **options)


def test_a_constant_explanation_has_no_order():
    with pytest.raises(errors.InputError, match="method='uniform' gives all words of an example the same score"):
        regard.trial(toy("decisive"), examples(8), "randomisation", method="uniform")


def test_examples_of_one_word_are_counted():
    texts = ["good", *[one.input for one in examples(8)]]
    finding = regard.trial(toy("decisive"), texts, "randomisation")
    assert (finding.interval.n, finding.interval.undefined) == (8, 1)
    assert len(finding.values) == 9


def test_a_subject_that_calls_another_model_cannot_be_served():
    model = Stacked().eval()
    subject = regard.module(model, lambda _, x: model(x), features=["[CLS]", *"abc"], readout="first")
    rows = np.random.default_rng(0).normal(size=(6, 3))
    data = Dataset.of([regard.data.Example(dict(zip("abc", row, strict=True))) for row in rows.tolist()])
    object.__setattr__(subject, "special_features", frozenset(["[CLS]"]))
    with pytest.raises(errors.NotServed, match="in a way that a copy of it cannot replace"):
        regard.trial(subject, data, "randomisation")


def test_models_that_cannot_be_drawn_or_copied():
    subject = toy("decisive")
    subject.model.readout.__class__ = type("Linear", (nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic"})
    with pytest.raises(errors.NotServed, match="readout is an integer-quantised Linear"):
        regard.trial(subject, examples(8), "randomisation")
    subject = toy("decisive")
    subject.model.register_parameter("codes", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    with pytest.raises(errors.NotServed, match="codes holds whole numbers"):
        regard.trial(subject, examples(8), "randomisation")
    subject = toy("decisive")
    subject.model.stream = (one for one in "ab")
    with pytest.raises(errors.NotServed, match="Pool cannot be copied: TypeError"):
        regard.trial(subject, examples(8), "randomisation")
