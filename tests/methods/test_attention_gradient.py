"""Attention times gradient against autograd through eager attention weights."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from oracles import (
    TEXTS,
    assert_close,
    attend,
    bert,
    classified,
    continued,
    encoded,
    gpt2,
    llama,
    produced,
    t5,
)  # fmt: skip

import regard
from regard import errors


@pytest.fixture(scope="module")
def products(model, tokenizer):
    """For each text A ⊙ ∇A of each layer."""
    return [classified(model, tokenizer, text).products for text in TEXTS]


def test_the_oracle_is_what_retain_grad_says(model, tokenizer):
    """The gradients of the oracle, by backward() and retain_grad() in place of autograd.grad."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    output = twin(**encoded(tokenizer, TEXTS[0]), output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits[0].max().backward()
    for weights, gradient in zip(output.attentions, classified(model, tokenizer, TEXTS[0]).gradients, strict=True):
        assert_close(weights.grad[0], gradient)


def test_the_last_layers_row_of_cls(subject, products):
    for why, layers in zip(
        regard.explain(subject, TEXTS, method="attention_gradient", of="logit"), products, strict=True
    ):
        assert_close(why.scores, layers[-1].mean(0)[0])
    assert any(layers[-1].mean(0)[0].min() < 0 < layers[-1].mean(0)[0].max() for layers in products), "it is signed"


def test_absolute_values_are_taken_of_each_head(subject, products):
    found = regard.explain(subject, TEXTS, method="attention_gradient", of="logit", absolute=True)
    for why, layers in zip(found, products, strict=True):
        assert_close(why.scores, layers[-1].abs().mean(0)[0])
        assert (layers[-1].abs().mean(0)[0] - layers[-1].mean(0)[0].abs()).max() > 1e-3 * why.scores.max()


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_layer(subject, products, layer, absolute):
    options = {"layers": layer, "absolute": absolute}
    for why, layers in zip(
        regard.explain(subject, TEXTS, method="attention_gradient", of="logit", **options), products, strict=True
    ):
        product = layers[layer].abs() if absolute else layers[layer]
        row = product.mean(0)[0]
        assert row.abs().max() > 0
        assert_close(why.scores, row)


@pytest.mark.parametrize("absolute", [False, True])
def test_the_mean_over_layers(subject, products, absolute):
    options = {"layers": "mean", "absolute": absolute}
    for why, layers in zip(
        regard.explain(subject, TEXTS, method="attention_gradient", of="logit", **options), products, strict=True
    ):
        rows = [(product.abs() if absolute else product).mean(0)[0] for product in layers]
        assert_close(why.scores, sum(rows) / len(rows))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("matrix", [False, True])
def test_the_rollout(subject, products, absolute, matrix):
    """(½I + ½ mean_h(A ⊙ ∇A)_L) ··· (½I + ½ mean_h(A ⊙ ∇A)_1)."""
    options = {"layers": "rollout", "absolute": absolute, "matrix": matrix}
    for why, layers in zip(
        regard.explain(subject, TEXTS, method="attention_gradient", of="logit", **options), products, strict=True
    ):
        identity = rolled = torch.eye(layers[0].shape[-1], dtype=torch.float64)
        for product in layers:
            rolled = (0.5 * identity + 0.5 * (product.abs() if absolute else product).mean(0)) @ rolled
        assert_close(why.scores, rolled if matrix else rolled[0])


def test_all_layers_heads_and_queries(subject, products):
    every = torch.stack(products[1])  # layer head query key
    expected = {
        ("layer",): every[:, :, 0].mean(1),
        ("head",): every[-1, :, 0],
        ("query",): every[-1].mean(0),
        ("layer", "head", "query"): every,
    }
    for axes, numbers in expected.items():
        asked = {"per_layer": "layer" in axes, "per_head": "head" in axes, "matrix": "query" in axes}
        why = regard.explain(subject, TEXTS, method="attention_gradient", of="logit", **asked)[1]
        assert why.axes == (*axes, "token")
        assert_close(why.scores, numbers)


def test_another_target(subject, model, tokenizer):
    found = regard.explain(subject, TEXTS, method="attention_gradient", of="logit", target=[2, 0, 1])
    for why, text, target in zip(found, TEXTS, [2, 0, 1], strict=True):
        assert_close(why.scores, classified(model, tokenizer, text, target).products[-1].mean(0)[0])


def test_the_default_is_the_probability_of_the_predicted_class_as_serrano_and_smith_have_it(subject, model, tokenizer):
    """Their orders are by α and ∂p_ŷ/∂α: decision 11 has the probability as this paper's scalar."""
    for why, text in zip(regard.explain(subject, TEXTS, method="attention_gradient"), TEXTS, strict=True):
        run = attend(model, encoded(tokenizer, text), lambda output: output.logits[0].softmax(-1).max())
        assert why.of == "probability"
        assert_close(why.scores, run.products[-1].mean(0)[0])


@pytest.mark.parametrize("of", ["probability", "logprob"])
def test_another_function_of_the_output(subject, model, tokenizer, of):
    functions = {
        "probability": lambda output: output.logits[0].softmax(-1).max(),
        "logprob": lambda output: output.logits[0].log_softmax(-1).max(),
    }
    for why, text in zip(regard.explain(subject, TEXTS, method="attention_gradient", of=of), TEXTS, strict=True):
        assert_close(why.scores, attend(model, encoded(tokenizer, text), functions[of]).products[-1].mean(0)[0])
        assert why.of == of


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_in_a_padded_batch(tokenizer, build, side):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    last = regard.explain(subject, TEXTS, method="attention_gradient", of="logit")
    mean = regard.explain(
        subject, TEXTS, method="attention_gradient", of="logit", layers="mean", absolute=True, matrix=True
    )
    for text, why, matrix in zip(TEXTS, last, mean, strict=True):
        layers = continued(model, tokenizer, text).products
        assert_close(why.scores, layers[-1].mean(0)[-1])
        assert_close(matrix.scores, torch.stack([product.abs().mean(0) for product in layers]).mean(0))


def test_mean_pooling_averages_the_rows(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="mean")
    weights = torch.linspace(-1, 2, 32, dtype=torch.float64)

    def target(embedding):
        return embedding @ weights

    found = regard.explain(subject, TEXTS, method="attention_gradient", of="logit", layers=1, target=target)
    for why, text in zip(found, TEXTS, strict=True):
        run = attend(model, encoded(tokenizer, text), lambda output: output.last_hidden_state[0].mean(0) @ weights)
        assert_close(why.scores, run.products[1].mean(0).mean(0))


def test_a_pool():
    """ŷ = 1.25 · Σ α_t polarity_t, so α ⊙ ∂ŷ/∂α = 1.25 · α_t polarity_t, with the sign of the class explained."""
    text = "so good the awful so"
    model = regard.models.toys.decisive().double()
    subject = regard.pooled(model)
    ids = [model.vocabulary[word] for word in text.split()]
    alpha = model.scores.weight[ids, 0].softmax(0)
    for label, sign in (("negative", -1), ("positive", 1)):
        why = regard.explain(subject, text, method="attention_gradient", of="logit", target=label)
        assert_close(why.scores, sign * alpha * model.values.weight[ids, 0] * model.readout.weight[0, 0])


def test_an_encoder_decoder(tokenizer):
    model = t5(tokenizer)
    pairs = [("a moving film", "so it is"), ("so", "dull"), ("dull, and it never ends", "it is moving")]
    subject = regard.seq2seq(model, tokenizer)
    last = regard.explain(subject, pairs, method="attention_gradient", of="logit")
    for why, pair in zip(last, pairs, strict=True):
        run, kinds = produced(model, tokenizer, *pair)
        assert kinds[-1] == "rows source"
        assert_close(why.scores, run.products[-1].mean(0)[-1])


def test_what_is_not_there_is_refused(subject):
    with pytest.raises(
        errors.OptionError, match="layers='first' is not known. Choose one of 'last', 'mean', 'rollout'"
    ):
        regard.explain(subject, TEXTS[0], method="attention_gradient", of="logit", layers="first")
    with pytest.raises(errors.NoSuchPart, match="site 3 is not there"):
        regard.explain(subject, TEXTS[0], method="attention_gradient", of="logit", layers=3)
    with pytest.raises(errors.OptionError, match="per_head=True: a rollout multiplies the mean over heads"):
        regard.explain(subject, TEXTS[0], method="attention_gradient", of="logit", layers="rollout", per_head=True)


def test_a_target_without_a_gradient_is_refused_with_methods_that_need_none(subject):
    with pytest.raises(errors.NoGradient, match="attention_gradient: .*Methods without gradients: .*rollout"):
        regard.explain(
            subject, TEXTS[0], method="attention_gradient", of="logit", target=lambda output: output.detach()[:, 0]
        )
