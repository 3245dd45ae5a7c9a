"""The first layer's attention against the column sums and the diagonal of what eager attention shows."""

from __future__ import annotations

import pytest
import torch
from oracles import TEXTS, assert_close, bert, classified, continued, gpt2, llama, produced, t5

import regard
from regard import errors


@pytest.fixture(scope="module")
def model(tokenizer):
    return bert(tokenizer)


def test_columns_are_summed_over_real_rows(model, tokenizer):
    subject = regard.text(model, tokenizer)
    for why, text in zip(regard.explain(subject, TEXTS, method="first_layer"), TEXTS, strict=True):
        first = classified(model, tokenizer, text).weights[0]  # head query key
        heads, rows, keys = first.shape
        expected = [sum(first[h, q, k] for h in range(heads) for q in range(rows)) / heads for k in range(keys)]
        assert_close(why.scores, torch.stack(expected))
        assert why.scores.sum() == pytest.approx(rows)


def test_the_diagonal(model, tokenizer):
    subject = regard.text(model, tokenizer)
    for why, text in zip(regard.explain(subject, TEXTS, method="first_layer", reduce="diagonal"), TEXTS, strict=True):
        first = classified(model, tokenizer, text).weights[0]
        assert_close(why.scores, torch.stack([first[:, k, k].mean() for k in range(first.shape[-1])]))


def test_heads_apart_sum_to_what_the_authors_have(model, tokenizer):
    """Borisov et al. sum over heads; regard takes their mean."""
    subject = regard.text(model, tokenizer)
    first = classified(model, tokenizer, TEXTS[1]).weights[0]
    for reduce, expected in {"column": first.sum(1), "diagonal": first.diagonal(dim1=1, dim2=2)}.items():
        apart = regard.explain(subject, TEXTS, method="first_layer", reduce=reduce, per_head=True)[1]
        assert apart.axes == ("head", "token")
        assert_close(apart.scores, expected)
        together = regard.explain(subject, TEXTS, method="first_layer", reduce=reduce)[1]
        assert_close(together.scores * len(first), expected.sum(0))


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder(tokenizer, build, side):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    column = regard.explain(subject, TEXTS, method="first_layer")
    diagonal = regard.explain(subject, TEXTS, method="first_layer", reduce="diagonal")
    for text, summed, own in zip(TEXTS, column, diagonal, strict=True):
        first = continued(model, tokenizer, text).weights[0].mean(0)
        assert_close(summed.scores, first.sum(0))
        assert_close(own.scores, first.diagonal())
        assert own.scores[0] == pytest.approx(1), "the first token of a decoder sees itself alone"


def test_an_encoder_decoder_has_the_sources_first_layer(tokenizer):
    model = t5(tokenizer)
    pairs = [("a moving film", "so it is"), ("so", "dull")]
    for why, pair in zip(regard.explain(regard.seq2seq(model, tokenizer), pairs, method="first_layer"), pairs, strict=True):  # fmt: skip
        run, kinds = produced(model, tokenizer, *pair)
        assert kinds[0] == "source source"
        assert_close(why.scores, run.weights[0].mean(0).sum(0))
        assert list(why.parts) == ["source"]


def test_a_pool_has_no_row_for_each_feature():
    subject = regard.pooled(regard.models.toys.decisive())
    with pytest.raises(errors.NotServed, match="first_layer: .*row for each feature.*Methods that can: .*raw"):
        regard.explain(subject, "so good", method="first_layer")


def test_unknown_reductions_are_refused(model, tokenizer):
    with pytest.raises(errors.OptionError, match="reduce='row' is not known. Choose one of 'column', 'diagonal'"):
        regard.explain(regard.text(model, tokenizer), TEXTS, method="first_layer", reduce="row")
