"""The mean over layers and heads against eager attention, and the ranking of features it was made for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import TEXTS, assert_close, bert, classified, continued, gpt2, llama, produced, t5
from rtdl_revisiting_models import FTTransformer

import regard
from regard import errors

NUMBERS, CATEGORIES = ["age", "income", "height"], ["job", "town"]


def mean_of_layers_and_heads(layers, row):
    """1/(L·H) Σ_l Σ_h A_l^h[row], number by number."""
    every = [weights[head, row] for weights in layers for head in range(len(weights))]
    return sum(every) / len(every)


def test_bert(tokenizer):
    model = bert(tokenizer)
    subject = regard.text(model, tokenizer)
    for why, text in zip(regard.explain(subject, TEXTS, method="average"), TEXTS, strict=True):
        assert_close(why.scores, mean_of_layers_and_heads(classified(model, tokenizer, text).weights, 0))


@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_decoder_padded_on_the_left(tokenizer, build):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer)
    for why, text in zip(regard.explain(subject, TEXTS, method="average"), TEXTS, strict=True):
        assert_close(why.scores, mean_of_layers_and_heads(continued(model, tokenizer, text).weights, -1))


def test_an_encoder_decoder_averages_over_all_layers_that_are_read(tokenizer):
    model = t5(tokenizer)
    pairs = [("a moving film", "so it is"), ("so", "dull")]
    for why, pair in zip(regard.explain(regard.seq2seq(model, tokenizer), pairs, method="average"), pairs, strict=True):
        run, kinds = produced(model, tokenizer, *pair)
        some = {
            wanted: [w for w, kind in zip(run.weights, kinds, strict=True) if kind == wanted]
            for wanted in ("rows source", "rows rows")
        }
        total = sum(map(len, some.values()))
        parts = [mean_of_layers_and_heads(weights, -1) * len(weights) / total for weights in some.values()]
        assert_close(why.scores, torch.cat(parts))
        assert why.scores.sum() == pytest.approx(1)


def test_features_of_an_ft_transformer_are_ranked_as_gorishniy_et_al_do():
    """p = 1/n Σ_i 1/(L·H) Σ_l Σ_h p_ihl, p_ihl the row of [CLS]; the last block computes that row alone."""
    torch.manual_seed(0)
    model = FTTransformer(
        n_cont_features=len(NUMBERS), cat_cardinalities=[4] * len(CATEGORIES), d_out=3, n_blocks=3, d_block=32,
        attention_n_heads=4, attention_dropout=0.2, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.1, residual_dropout=0.0,
    ).eval().double()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 3  # attention that is nearly uniform would prove little
    subject = regard.module(
        model, lambda model, numbers, categories: model(numbers, categories),
        features=["[CLS]", *NUMBERS, *CATEGORIES], special_features=["[CLS]"], readout="first", special="drop",
    )  # fmt: skip
    numbers, categories = torch.randn(5, len(NUMBERS)).double(), torch.randint(0, 4, (5, len(CATEGORIES)))
    found = regard.explain(subject, (numbers, categories), method="average")

    kept: list[torch.Tensor] = []  # what each attention hands to its dropout: (example · head, query, key)
    hooks = [
        module.dropout.register_forward_hook(lambda _, args, __: kept.append(args[0].detach()))
        for module in model.modules()
        if type(module).__name__ == "MultiheadAttention"
    ]
    model(numbers, categories)
    for hook in hooks:
        hook.remove()
    rows = [weights.unflatten(0, (5, 4))[:, :, 0] for weights in kept]  # example head key
    assert len(rows) == 3
    expected = torch.stack(rows).mean(2).mean(0)
    assert_close([why.scores for why in found], expected)

    overall = regard.Explanation.mean(found)
    assert_close(overall.scores, expected.mean(0))
    table = overall.words()
    assert table["word"].tolist() == [*NUMBERS, *CATEGORIES], "[CLS] is dropped, as the authors do"
    assert_close(table["score"].to_numpy(), expected.mean(0)[1:])
    assert np.argsort(table["score"]).tolist() == expected.mean(0)[1:].argsort().tolist()


def test_a_pool_is_its_own_average():
    subject = regard.pooled(regard.models.toys.decisive().double())
    raw, average = (regard.explain(subject, "so good the awful", method=method) for method in ("raw", "average"))
    assert_close(average.scores, raw.scores)


def test_it_has_no_options(tokenizer):
    with pytest.raises(errors.OptionError, match="layers='last': average has no such option. It has none"):
        regard.explain(regard.text(bert(tokenizer), tokenizer), TEXTS, method="average", layers="last")
