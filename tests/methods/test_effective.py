"""Effective attention against a full SVD of T = V·W_O: A minus its projection on the left null space.

Everything is in float64, and for each row over the keys that it sees; numbers agree to 1e-6 of the largest.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import assert_close, bert, encoded, gpt2, llama
from test_norm import lively, opened, rolled
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import errors

LONG = "dull, and it never ends: an unbelievably overlong movie, so so, but a moving film in the end"
SHORT = "a moving film"
TEXTS = [LONG, SHORT, "so it never ends, and it is as long as the other films are"]
CHANNELS = 8  # of a head
BUILDS = {"BERT": bert, "GPT-2": gpt2, "Llama": llama}


def null_space(t):
    """An orthonormal basis of {a : aᵀT = 0}, in columns: the left singular vectors without a singular value."""
    u, sizes, _ = np.linalg.svd(np.asarray(t), full_matrices=True)
    rank = int((sizes > 1e-10 * sizes[0]).sum())
    return u[:, rank:]


def effective(layer, *, causal):
    """A − A·U₀U₀ᵀ, row by row over the keys that the row sees; and how many dimensions U₀ has: ``(head, query)``."""
    heads, queries, keys = layer.weights.shape
    found, sizes = np.zeros((heads, queries, keys)), np.zeros((heads, queries), dtype=int)
    for head, query in np.ndindex(heads, queries):
        seen = query + 1 if causal else keys
        nothing = null_space(layer.f[head, :seen])
        row = layer.weights[head, query, :seen].numpy()
        found[head, query, :seen] = row - row @ nothing @ nothing.T
        sizes[head, query] = nothing.shape[1]
    return torch.tensor(found), sizes


@pytest.fixture(scope="module", params=BUILDS)
def case(request, tokenizer):
    """A subject, the row that is read, the layers of each text, and for each layer effective attention and U₀'s size."""
    torch.manual_seed(11)
    model = lively(BUILDS[request.param](tokenizer))
    causal = request.param != "BERT"
    texts = [opened(model, tokenizer, text) for text in TEXTS]
    expected = [[effective(layer, causal=causal) for layer in layers] for layers in texts]
    wrap = regard.causal if causal else regard.text
    return wrap(model, tokenizer), -1 if causal else 0, texts, expected


def test_the_readouts_row_of_the_last_layer(case):
    subject, row, texts, expected = case
    for why, layers, each in zip(regard.explain(subject, TEXTS, method="effective"), texts, expected, strict=True):
        assert_close(why.scores, each[-1][0].mean(0)[row])
        plain = layers[-1].weights.mean(0)[row]
        assert (len(plain) > CHANNELS) == (float((torch.tensor(why.scores) - plain).abs().max()) > 1e-3)


def test_it_has_the_same_effect(case):
    """A⊥T = AT, though A⊥ is not A and not a distribution."""
    subject, _, texts, _ = case
    found = regard.explain(subject, TEXTS, method="effective", per_layer=True, per_head=True, matrix=True)
    for why, layers in zip(found, texts, strict=True):
        for number, layer in enumerate(layers):
            assert_close(torch.tensor(why.scores[number]) @ layer.f, layer.weights @ layer.f)
    assert found[0].scores.min() < -1e-3
    assert np.abs(found[0].scores.sum(-1) - 1).max() > 1e-3


def test_all_layers_heads_and_rows(case):
    subject, row, _, expected = case
    whole = regard.explain(subject, TEXTS, method="effective", per_layer=True, per_head=True, matrix=True)
    heads = regard.explain(subject, TEXTS, method="effective", per_head=True)
    matrices = regard.explain(subject, TEXTS, method="effective", matrix=True)
    layers = regard.explain(subject, TEXTS, method="effective", per_layer=True)
    for number, each in enumerate(expected):
        all_of_it = torch.stack([one for one, _ in each])  # layer head query key
        assert whole[number].axes == ("layer", "head", "query", "token")
        assert_close(whole[number].scores, all_of_it)
        assert_close(heads[number].scores, all_of_it[-1, :, row])
        assert_close(matrices[number].scores, all_of_it[-1].mean(0))
        assert_close(layers[number].scores, all_of_it.mean(1)[:, row])


def test_one_layer_their_mean_and_their_product(case):
    subject, row, _, expected = case
    found = {
        layers: regard.explain(subject, TEXTS, method="effective", layers=layers)
        for layers in (0, 1, "mean", "rollout")
    }
    product = regard.explain(subject, TEXTS, method="effective", layers="rollout", matrix=True)
    for number, each in enumerate(expected):
        means = torch.stack([one.mean(0) for one, _ in each])  # layer query key
        for layer in (0, 1):
            assert_close(found[layer][number].scores, means[layer, row])
        assert_close(found["mean"][number].scores, means.mean(0)[row])
        assert_close(found["rollout"][number].scores, rolled(list(means), 0.5)[row])
        assert_close(product[number].scores, rolled(list(means), 0.5))


def test_the_null_space_has_as_many_dimensions_as_keys_without_rank(case):
    subject, row, texts, expected = case
    found = regard.explain(subject, TEXTS, method="effective")
    for why, layers, each in zip(found, texts, expected, strict=True):
        null, keys = why.facts["null_space"], layers[0].weights.shape[-1]
        assert null.shape == (3, 4), "layer head"
        np.testing.assert_array_equal(null, [sizes[:, row] for _, sizes in each])
        np.testing.assert_array_equal(null, max(keys - CHANNELS, 0))
        assert bool(why.facts["identifiable"]) == (keys <= CHANNELS)
    assert [bool(why.facts["identifiable"]) for why in found] == [False, True, False]


def test_a_short_text_is_identifiable_and_its_effective_attention_is_attention(case):
    """Also beside longer ones: padding makes no null space."""
    subject, _, texts, _ = case
    for inputs in (SHORT, TEXTS):
        why = regard.explain(subject, inputs, method="effective", per_layer=True, per_head=True, matrix=True)
        why = why[1] if isinstance(why, list) else why
        assert (why.facts["null_space"] == 0).all()
        assert why.facts["identifiable"]
        assert_close(why.scores, torch.stack([layer.weights for layer in texts[1]]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(tokenizer, side):
    subject = regard.causal(lively(llama(tokenizer)), tokenizer, padding_side=side)
    for why, text in zip(regard.explain(subject, TEXTS, method="effective", matrix=True), TEXTS, strict=True):
        alone = regard.explain(subject, text, method="effective", matrix=True)
        assert_close(why.scores, alone.scores)
        np.testing.assert_array_equal(why.facts["null_space"], alone.facts["null_space"])


@pytest.mark.parametrize("build", [bert, gpt2])
def test_a_model_that_forms_its_weights_itself(tokenizer, build):
    """Keys that are hidden have weight 0 there, and no mask is seen."""
    model = lively(build(tokenizer))
    model.set_attn_implementation("eager")
    subject = (regard.text if build is bert else regard.causal)(model, tokenizer)
    found = regard.explain(subject, TEXTS, method="effective", per_head=True, matrix=True)
    for why, text in zip(found, TEXTS, strict=True):
        expected, sizes = effective(opened(model, tokenizer, text)[-1], causal=build is gpt2)
        assert_close(why.scores, expected)
        np.testing.assert_array_equal(why.facts["null_space"][-1], sizes[:, 0 if build is bert else -1])


# --- the rank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_projection_of_low_rank(tokenizer, rank, dtype):
    """T cannot have a higher rank than the head's part of W_O: its null space is larger, also for few tokens."""
    model = bert(tokenizer)
    last = model.bert.encoder.layer[-1].attention.output.dense.weight
    with torch.no_grad():
        for head in last.split(CHANNELS, 1):
            head.copy_(torch.randn(32, rank, dtype=head.dtype) @ torch.randn(rank, CHANNELS, dtype=head.dtype))
    subject = regard.text(model.to(dtype), tokenizer)
    for text in (SHORT, LONG):
        layer = opened(model.double(), tokenizer, text)[-1]
        keys = layer.weights.shape[-1]
        model.to(dtype)
        why = regard.explain(subject, text, method="effective", per_head=True)
        np.testing.assert_array_equal(why.facts["null_space"][-1], keys - min(rank, keys))
        assert not why.facts["identifiable"] or keys <= rank
        projected = torch.linalg.svd(layer.f)[0][..., :rank]  # head key rank
        expected = (layer.weights[:, :1] @ projected @ projected.mT)[:, 0]
        if dtype == torch.float64:
            assert_close(why.scores, expected)
        else:  # as near as float32 takes weights and values
            np.testing.assert_allclose(why.scores, expected, atol=1e-4)


def test_a_head_that_hands_on_nothing(tokenizer):
    """W_O = 0: all of it is null space, and no attention is effective."""
    model = bert(tokenizer)
    torch.nn.init.zeros_(model.bert.encoder.layer[-1].attention.output.dense.weight)
    why = regard.explain(regard.text(model, tokenizer, readout="first"), SHORT, method="effective")
    assert (why.scores == 0).all()
    assert (why.facts["null_space"][-1] == 5).all()
    assert not why.facts["identifiable"]


# --- readouts of several rows ---------------------------------------------------------------------------------------


def test_mean_pooling_averages_the_rows(tokenizer):
    model = lively(bert(tokenizer, hf.BertModel))
    subject = regard.text(model, tokenizer, readout="mean")
    for why, text in zip(regard.explain(subject, TEXTS, method="effective"), TEXTS, strict=True):
        expected, sizes = effective(opened(model, tokenizer, text)[-1], causal=False)
        assert_close(why.scores, expected.mean((0, 1)))
        np.testing.assert_array_equal(why.facts["null_space"][-1], sizes[:, 0])


def test_identifiable_means_all_rows_of_the_readout(tokenizer):
    """With causal attention the first row sees one key and is always identifiable; the later ones are not."""
    model = gpt2(tokenizer).transformer
    subject = regard.text(model, tokenizer, readout="mean")
    why = regard.explain(subject, LONG, method="effective")
    layers = opened(model, tokenizer, LONG, encoded(tokenizer, LONG))  # with token types, as it is read here
    expected, sizes = effective(layers[-1], causal=True)
    assert_close(why.scores, expected.mean((0, 1)))
    assert sizes[:, 0].max() == 0 < sizes[:, -1].min()
    assert not why.facts["identifiable"]


# --- where no projection is known -----------------------------------------------------------------------------------


class Bare(nn.Module):
    """One head, whose result is read as it is."""

    def forward(self, x):
        return scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0, 0]


def test_without_a_projection_t_is_v():
    subject = regard.module(
        Bare(), lambda model, x: model(x), features=list("abcdef"), readout="first", output="embedding"
    )
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    for example, why in enumerate(regard.explain(subject, x, method="effective")):
        row = (x[example, 0] @ x[example].T / 2).softmax(-1).numpy()
        nothing = null_space(x[example])
        assert_close(why.scores, row - row @ nothing @ nothing.T)
        assert (why.facts["null_space"] == 2).all()


def test_options_that_are_refused(case):
    subject, _, _, _ = case
    with pytest.raises(
        errors.OptionError, match="layers='first' is not known. Choose one of 'last', 'mean', 'rollout'"
    ):
        regard.explain(subject, SHORT, method="effective", layers="first")
    with pytest.raises(errors.OptionError, match="per_head=True: a rollout multiplies the mean over heads"):
        regard.explain(subject, SHORT, method="effective", layers="rollout", per_head=True)
    with pytest.raises(errors.NoSuchPart, match="3"):
        regard.explain(subject, SHORT, method="effective", layers=3)
