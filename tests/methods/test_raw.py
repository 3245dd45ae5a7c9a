"""Raw attention against the rows that eager attention shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import TEXTS, assert_close, attend, bert, classified, continued, encoded, gpt2, llama, produced, t5

import regard
from regard import errors

VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<unk>", "<sos>", "<eos>", *"abcdefg"])}


@pytest.fixture(scope="module")
def oracle(model, tokenizer):
    return classified(model, tokenizer, TEXTS[1])


def test_the_last_layers_row_of_cls_mean_over_heads(subject, model, tokenizer):
    for why, text in zip(regard.explain(subject, TEXTS, method="raw"), TEXTS, strict=True):
        assert_close(why.scores, classified(model, tokenizer, text).weights[-1].mean(0)[0])
        assert why.axes == ("token",)


@pytest.mark.parametrize("layer", [0, 1, 2, -1])
@pytest.mark.parametrize("heads", ["mean", "max", "min", 0, 3, -1])
def test_a_layer_and_a_way_to_join_heads(subject, oracle, layer, heads):
    (why,) = regard.explain(subject, [TEXTS[1]], method="raw", layer=layer, heads=heads)
    row = oracle.weights[layer][:, 0]  # head key
    expected = row[heads] if isinstance(heads, int) else {"mean": row.mean, "max": row.amax, "min": row.amin}[heads](0)
    assert_close(why.scores, expected)


@pytest.mark.parametrize("heads", ["mean", "max", "min", 2])
def test_all_queries(subject, oracle, heads):
    why = regard.explain(subject, TEXTS, method="raw", heads=heads, layer=1, matrix=True)[1]
    every = oracle.weights[1]  # head query key
    expected = every[heads] if isinstance(heads, int) else {"mean": every.mean, "max": every.amax, "min": every.amin}[heads](0)  # fmt: skip
    assert_close(why.scores, expected)
    assert why.axes == ("query", "token")
    assert why.queries == why.features.tokens


def test_all_layers_and_all_heads(subject, oracle):
    every = torch.stack(oracle.weights)  # layer head query key
    expected = {
        ("layer",): every[:, :, 0].mean(1),
        ("head",): every[-1, :, 0],
        ("layer", "head"): every[:, :, 0],
        ("layer", "query"): every.mean(1),
        ("head", "query"): every[-1],
        ("layer", "head", "query"): every,
    }
    for axes, numbers in expected.items():
        asked = {"per_layer": "layer" in axes, "per_head": "head" in axes, "matrix": "query" in axes}
        why = regard.explain(subject, TEXTS, method="raw", **asked)[1]
        assert why.axes == (*axes, "token")
        assert_close(why.scores, numbers)
    extreme = regard.explain(subject, TEXTS, method="raw", heads="max", per_layer=True)[1]
    assert_close(extreme.scores, every[:, :, 0].amax(1))
    one = regard.explain(subject, TEXTS, method="raw", heads=1, per_layer=True, matrix=True)[1]
    assert_close(one.scores, every[:, 1])


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_tokens_row_of_a_decoder_in_a_padded_batch(tokenizer, build, side):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    for text, plain, extreme in zip(
        TEXTS,
        regard.explain(subject, TEXTS, method="raw"),
        regard.explain(subject, TEXTS, method="raw", layer=0, heads="min", matrix=True),
        strict=True,
    ):
        weights = continued(model, tokenizer, text).weights
        assert_close(plain.scores, weights[-1].mean(0)[-1])
        assert_close(extreme.scores, weights[0].amin(0))
        assert plain.scores.sum() == pytest.approx(1, abs=1e-6)


def test_mean_pooling_averages_the_rows(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="mean")
    found = regard.explain(subject, TEXTS, method="raw", heads="max")
    for why, text in zip(found, TEXTS, strict=True):
        run = attend(model, encoded(tokenizer, text), lambda output: output.last_hidden_state.sum())
        assert_close(why.scores, run.weights[-1].amax(0).mean(0))


def pooled_lstm(**options):
    torch.manual_seed(3)
    model = regard.models.AttentionClassifier(words=len(VOCABULARY), embedding=12, hidden=8, **options).double().eval()
    model.outer.weight.data *= 9  # far from uniform
    return model, regard.pooled(model, VOCABULARY)


def additive(model, text):
    """v·tanh(W h + b) under a softmax over the words between the marks, written out: ``(attention, row)``."""
    ids = torch.tensor([[VOCABULARY[word] for word in ("<sos>", *text.split(), "<eos>")]])
    states, _ = model.encoder(ids, torch.ones_like(ids, dtype=torch.bool))
    scores = torch.tanh(states[0] @ model.inner.weight.T + model.inner.bias) @ model.outer.weight.T  # row attention
    inside = scores[1:-1].exp()
    return torch.nn.functional.pad((inside / inside.sum(0)).T, (1, 1))


def test_a_pooled_lstm():
    texts = ["a b c d", "e", "g f e d c b a"]
    model, subject = pooled_lstm()
    for why, text in zip(regard.explain(subject, texts, method="raw"), texts, strict=True):
        (expected,) = additive(model, text)
        assert_close(why.scores, expected)
        assert why.scores[0] == why.scores[-1] == 0
        assert why.features.tokens == ("<sos>", *text.split(), "<eos>")


@pytest.mark.parametrize("text", ["a", "a b c", "g f e d c b a"])
def test_each_label_has_an_attention_of_its_own(text):
    """With marks, "a" has three rows, as many as there are attentions."""
    model, subject = pooled_lstm(task="multilabel", classes=3)
    for label in range(3):
        why = regard.explain(subject, text, method="raw", target=label)
        assert_close(why.scores, additive(model, text)[label])


def test_a_toy_whose_attention_follows_polarity():
    subject = regard.pooled(regard.models.toys.decisive().double())
    why = regard.explain(subject, "so good the awful so", method="raw")
    scores = np.exp(6 * np.abs([0.0, 0.6, 0.02, 1.0, 0.0]).astype(np.float32).astype(float))
    assert_close(why.scores, scores / scores.sum())


def test_an_encoder_decoder_shows_where_the_produced_token_looks_in_the_source(tokenizer):
    model = t5(tokenizer)
    subject = regard.seq2seq(model, tokenizer)
    pairs = [("a moving film", "so it is"), ("dull, and it never ends", "dull"), ("so", "it is moving")]
    found = regard.explain(subject, pairs, method="raw")
    layers = regard.explain(subject, pairs, method="raw", per_layer=True)
    for why, each, pair in zip(found, layers, pairs, strict=True):
        run, kinds = produced(model, tokenizer, *pair)
        assert_close(why.scores, run.weights[-1].mean(0)[-1])
        own, cross = (
            torch.stack([w.mean(0)[-1] for w, kind in zip(run.weights, kinds, strict=True) if kind == wanted])
            for wanted in ("rows rows", "rows source")
        )
        assert_close(each.scores, torch.cat([cross, own], -1))
        assert each.parts == {"source": cross.shape[1], "produced": own.shape[1]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": "sum"}, "heads='sum' is not known"),
        ({"heads": 4}, "heads=4 is not there: there are heads 0 to 3"),
        ({"layer": 3}, "site 3 is not there"),
        ({"layer": "first"}, r"\blayer='first' is not known"),
        ({"layer": "rollout"}, r"\blayer='rollout' is not known"),
    ],
)
def test_what_is_not_there_is_refused(subject, options, said):
    with pytest.raises(errors.InputError, match=said):
        regard.explain(subject, TEXTS[0], method="raw", **options)


def test_a_layer_that_the_readout_does_not_ask_is_refused(tokenizer):
    with pytest.raises(
        errors.NotServed, match="layer 0 .*does not have the readout among its queries.*Methods that can"
    ):
        regard.explain(regard.seq2seq(t5(tokenizer), tokenizer), ("so", "it is"), method="raw", layer=0)
