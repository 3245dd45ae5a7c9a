"""Gradient-weighted rollout against Chefer et al.'s rules, written out on eager weights and autograd's gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import (
    REGIONS,
    ROWS,
    TEXTS,
    assert_close,
    attend,
    bert,
    both_stacks,
    classified,
    continued,
    contrast,
    encoded,
    gpt2,
    in_both_streams,
    kinds_of,
    llama,
    produced,
    seeded,
    t5,
)  # fmt: skip

import regard
from regard import errors

GRID, QUERIES = (4, 3), 5


def rule_5(run):
    """Ā = mean_h((∇A ⊙ A)⁺), of each layer."""
    return [product.clamp(min=0).mean(0) for product in run.products]


def rule_6(layers):
    """R = I; R ← R + Ā R, in order of layers."""
    relevance = torch.eye(layers[0].shape[-1], dtype=torch.float64)
    for attention in layers:
        relevance = relevance + attention @ relevance
    return relevance


# --- one sequence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [None, 0, 1, 2])
def test_bert(subject, model, tokenizer, target):
    for why, text in zip(regard.explain(subject, TEXTS, method="grad_rollout", target=target), TEXTS, strict=True):
        expected = rule_6(rule_5(classified(model, tokenizer, text, target)))
        assert_close(why.scores, expected[0])
        assert why.of == "logit"


@pytest.mark.parametrize("start", [1, 2])
def test_a_start_layer(subject, model, tokenizer, start):
    for why, text in zip(regard.explain(subject, TEXTS, method="grad_rollout", start_layer=start), TEXTS, strict=True):
        assert_close(why.scores, rule_6(rule_5(classified(model, tokenizer, text))[start:])[0])


def test_the_whole_matrix(subject, model, tokenizer):
    for why, text in zip(regard.explain(subject, TEXTS, method="grad_rollout", matrix=True), TEXTS, strict=True):
        assert_close(why.scores, rule_6(rule_5(classified(model, tokenizer, text))))
        assert why.axes == ("query", "token")
        assert str(why.scores.dtype) == "float64"


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_in_a_padded_batch(tokenizer, build, side):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    whole = regard.explain(subject, TEXTS, method="grad_rollout", matrix=True)
    for text, why, matrix in zip(TEXTS, regard.explain(subject, TEXTS, method="grad_rollout"), whole, strict=True):
        expected = rule_6(rule_5(continued(model, tokenizer, text)))
        assert_close(why.scores, expected[-1])
        assert_close(matrix.scores, expected)


def test_mean_pooling_averages_the_rows(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="mean")
    weights = torch.linspace(-1, 2, 32, dtype=torch.float64)
    found = regard.explain(subject, TEXTS, method="grad_rollout", target=lambda embedding: embedding @ weights)
    for why, text in zip(found, TEXTS, strict=True):
        run = attend(model, encoded(tokenizer, text), lambda output: output.last_hidden_state[0].mean(0) @ weights)
        assert_close(why.scores, rule_6(rule_5(run)).mean(0))


def test_a_pool_takes_the_positive_part():
    model = regard.models.toys.decisive().double()
    text = "so good the awful so"
    ids = [model.vocabulary[word] for word in text.split()]
    alpha = model.scores.weight[ids, 0].softmax(0)
    for label, sign in (("negative", -1), ("positive", 1)):
        why = regard.explain(regard.pooled(model), text, method="grad_rollout", target=label)
        product = sign * alpha * model.values.weight[ids, 0] * model.readout.weight[0, 0]
        assert_close(why.scores, product.clamp(min=0))


def test_no_gradient_at_all_leaves_the_readout(subject):
    for why in regard.explain(subject, TEXTS, method="grad_rollout", target=lambda output: 0 * output[:, 0]):
        assert why.scores.tolist() == [1.0] + [0.0] * (len(why.scores) - 1)


# --- two sequences --------------------------------------------------------------------------------------------------


class Rules:
    """R of two sequences, s and q standing for either; ``guarded`` counts rows of R − I that were all zero."""

    def __init__(self, **sizes):
        names = list(sizes)
        self.other = dict(zip(names, reversed(names), strict=True))
        self.R = {
            (a, b): torch.eye(sizes[a], dtype=torch.float64) if a == b else torch.zeros(sizes[a], sizes[b]).double()
            for a in names
            for b in names
        }
        self.guarded = 0

    def self_attention(self, s, attention):
        q, R = self.other[s], self.R
        R[s, s] = R[s, s] + attention @ R[s, s]  # rule 6
        R[s, q] = R[s, q] + attention @ R[s, q]  # rule 7

    def normalised(self, s):
        """Rules 8 and 9, row by row."""
        rest = self.R[s, s] - torch.eye(len(self.R[s, s]), dtype=torch.float64)
        for row in rest:
            if row.sum() == 0:
                self.guarded += 1
            else:
                row /= row.sum()
        return rest + torch.eye(len(rest), dtype=torch.float64)

    def additions(self, s, attention):
        """Queries are of s, keys of the other sequence."""
        q = self.other[s]
        return {
            (s, q): self.normalised(s).T @ attention @ self.normalised(q),  # rule 10
            (s, s): attention @ self.R[q, s],  # rule 11
        }

    def cross_attention(self, *sides):
        """``(s, attention)`` of each side: all additions are computed before any is applied."""
        for added in [self.additions(s, attention) for s, attention in sides]:
            for where, term in added.items():
                self.R[where] = self.R[where] + term


def encoder_decoder(run, kinds, start=0):
    """The encoder by rule 6; in each block of the decoder rules 6 and 7, then rule 10."""
    rows, source = run.weights[-1].shape[1:]
    rules = Rules(rows=rows, source=source)
    for attention, kind in list(zip(rule_5(run), kinds, strict=True))[start:]:
        if kind == "rows source":
            rules.cross_attention(("rows", attention))
        else:
            rules.self_attention(kind.split()[0], attention)
    return rules


PAIRS = [("a moving film", "so it is"), ("so", "dull"), ("dull, and it never ends", "it is moving")]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_t5(tokenizer, start):
    model = t5(tokenizer)
    found = regard.explain(regard.seq2seq(model, tokenizer), PAIRS, method="grad_rollout", start_layer=start)
    for why, pair in zip(found, PAIRS, strict=True):
        R = encoder_decoder(*produced(model, tokenizer, *pair), start).R
        assert_close(why.scores, torch.cat([R["rows", "source"][-1], R["rows", "rows"][-1]]))


def test_rows_without_a_positive_gradient_stay_as_they_are(tokenizer):
    """With a single head, whole rows of (∇A ⊙ A)⁺ are zero, others are not: rule 8 must not divide by their sums."""
    model, guarded = t5(tokenizer, num_heads=1), 0
    for why, pair in zip(
        regard.explain(regard.seq2seq(model, tokenizer), PAIRS, method="grad_rollout"), PAIRS, strict=True
    ):
        rules = encoder_decoder(*produced(model, tokenizer, *pair))
        guarded += rules.guarded
        assert np.isfinite(why.scores).all()
        assert_close(why.scores, torch.cat([rules.R["rows", "source"][-1], rules.R["rows", "rows"][-1]]))
    assert guarded, "no example shows it"


def detr():
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    stacks = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "init_std": 0.2,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_queries": QUERIES,
    }  # fmt: skip
    model = seeded(lambda: hf.DetrForObjectDetection(hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, num_labels=3, **stacks,
    )))  # fmt: skip
    with torch.no_grad():
        for parameter in model.model.input_projection.parameters():
            parameter *= 0.05  # an untrained backbone gives large numbers
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter *= 4
    return model


@pytest.mark.parametrize("query", [0, 3])
def test_detr(query):
    """The relevance of patches for one object query, read from R^{qi}[query]."""
    model = detr()
    subject = regard.module(
        model, lambda model, pixels, mask: model(pixel_values=pixels, pixel_mask=mask).logits[:, query],
        features=[f"query {i}" for i in range(QUERIES)], readout=query,
        source=[f"patch {i}" for i in range(GRID[0] * GRID[1])],
        source_padding=lambda pixels, mask: mask[:, ::8, ::8].flatten(1).bool(),
    )  # fmt: skip
    pixels, mask = torch.randn(2, 3, 32, 24).double(), torch.ones(2, 32, 24).long()
    for why, one in zip(regard.explain(subject, (pixels, mask), method="grad_rollout"), pixels, strict=True):
        inputs = {"pixel_values": one[None], "pixel_mask": mask[:1]}
        run = attend(model, inputs, lambda output: output.logits[0, query].max(), both_stacks)
        R = encoder_decoder(run, kinds_of(run.output)).R
        assert_close(why.scores, torch.cat([R["rows", "source"][query], R["rows", "rows"][query]]))


# --- co-attention ---------------------------------------------------------------------------------------------------


def lxmert_rules(found, model):
    """As the authors go through LXMERT: text, picture, then in each cross layer both directions, then both selves."""
    rules = Rules(text=ROWS, picture=REGIONS)
    for layer in range(len(model.encoder.layer)):
        rules.self_attention("text", *found[f"layer.{layer}.attention.self"])
    for layer in range(len(model.encoder.r_layers)):
        rules.self_attention("picture", *found[f"r_layers.{layer}.attention.self"])
    for layer in range(len(model.encoder.x_layers)):
        # one module looks both ways: from the text first, then from the picture
        to_picture, to_text = found[f"x_layers.{layer}.visual_attention.att"]
        assert to_picture.shape == (ROWS, REGIONS)
        assert to_text.shape == (REGIONS, ROWS)
        rules.cross_attention(("text", to_picture), ("picture", to_text))
        rules.self_attention("text", *found[f"x_layers.{layer}.lang_self_att.self"])
        rules.self_attention("picture", *found[f"x_layers.{layer}.visn_self_att.self"])
    return rules


def positive_parts(model, inputs, example):
    """Rule 5 of each attention module, by its name."""
    alone = {name: tensor[example : example + 1] for name, tensor in inputs.items()}
    return {name: rule_5(run) for name, run in in_both_streams(model, alone).items()}


def test_lxmert(two_streams):
    model, subject, inputs = two_streams
    for example, why in enumerate(regard.explain(subject, inputs, method="grad_rollout", target=contrast)):
        R = lxmert_rules(positive_parts(model, inputs, example), model).R
        assert_close(why.scores, torch.cat([R["text", "picture"][0], R["text", "text"][0]]))
        assert why.parts == {"source": REGIONS, "produced": ROWS}


def test_the_order_of_co_attention_matters(two_streams, monkeypatch):
    """If additions were applied one by one, the answer would be another: the test above can tell."""
    model, _, inputs = two_streams
    found = positive_parts(model, inputs, 0)
    together = lxmert_rules(found, model).R["text", "picture"][0]

    def one_by_one(self, *sides):
        for s, attention in sides:
            for where, term in self.additions(s, attention).items():
                self.R[where] = self.R[where] + term

    monkeypatch.setattr(Rules, "cross_attention", one_by_one)
    apart = lxmert_rules(found, model).R["text", "picture"][0]
    assert (apart - together).abs().max() > 1e-3 * together.abs().max()


def test_no_gradient_at_all_gives_no_nan(two_streams):
    """Rule 8 divides by zero in every row; the relevance is that of the readout alone."""
    _, subject, inputs = two_streams
    for why in regard.explain(subject, inputs, method="grad_rollout", target=lambda output: 0 * output[:, 0]):
        assert np.isfinite(why.scores).all()
        assert why.scores.tolist() == [0.0] * REGIONS + [1.0] + [0.0] * (ROWS - 1)


def test_the_matrix_of_two_sequences_is_refused(two_streams):
    _, subject, inputs = two_streams
    with pytest.raises(errors.NotServed, match="grad_rollout: matrix=True: .*two sequences.*Methods that can"):
        regard.explain(subject, inputs, method="grad_rollout", target=contrast, matrix=True)
