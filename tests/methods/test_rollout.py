"""Attention rollout against the paper's product of row-normalised matrices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as hf
from oracles import (
    REGIONS,
    ROWS,
    SMALL,
    TEXTS,
    assert_close,
    attend,
    bert,
    classified,
    continued,
    encoded,
    gpt2,
    ids_of,
    in_both_streams,
    llama,
    produced,
    seeded,
    t5,
)  # fmt: skip
from torch import nn

import regard
from regard import errors


def paper(layers):
    """Abnar & Zuidema: W = mean over heads, A = W + I with rows divided by their sums; R_1 = A_1, R_l = A_l R_{l−1}."""
    product = None
    for weights in layers:
        added = weights.mean(0) + torch.eye(weights.shape[-1], dtype=weights.dtype)
        normalised = added / added.sum(-1, keepdim=True)
        product = normalised if product is None else normalised @ product
    return product


def mixed(layers, alpha):
    """(αI + (1−α)Ā_L) ··· (αI + (1−α)Ā_1)."""
    product = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype)
    for weights in layers:
        product = (alpha * torch.eye(len(product), dtype=product.dtype) + (1 - alpha) * weights.mean(0)) @ product
    return product


@pytest.fixture(scope="module")
def weights(model, tokenizer):
    return [classified(model, tokenizer, text).weights for text in TEXTS]


def test_the_row_of_cls(subject, weights):
    for why, layers in zip(regard.explain(subject, TEXTS, method="rollout"), weights, strict=True):
        assert_close(why.scores, paper(layers)[0])
        assert why.scores.sum() == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0, 0.2, 0.5, 0.9, 1.0])
def test_the_share_of_the_residual(subject, weights, alpha):
    for why, layers in zip(regard.explain(subject, TEXTS, method="rollout", alpha=alpha), weights, strict=True):
        assert_close(why.scores, mixed(layers, alpha)[0])


def test_adding_is_two_to_the_number_of_layers_times_mixing(subject, weights):
    added = regard.explain(subject, TEXTS, method="rollout", residual="add")
    for plain, more, layers in zip(regard.explain(subject, TEXTS, method="rollout"), added, weights, strict=True):
        assert_close(more.scores, 2 ** len(layers) * plain.scores)
        product = torch.eye(layers[0].shape[-1], dtype=torch.float64)
        for one in layers:
            product = product + one.mean(0) @ product
        assert_close(more.scores, product[0])


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_start_layer_leaves_out_those_before(subject, weights, start):
    for why, layers in zip(regard.explain(subject, TEXTS, method="rollout", start_layer=start), weights, strict=True):
        assert_close(why.scores, paper(layers[start:])[0])


@pytest.mark.parametrize("start", [0, 1])
def test_up_to_each_layer(subject, weights, start):
    found = regard.explain(subject, TEXTS, method="rollout", per_layer=True, start_layer=start)
    for why, layers in zip(found, weights, strict=True):
        assert why.axes == ("layer", "token")
        assert_close(why.scores, torch.stack([paper(layers[start:end])[0] for end in range(start + 1, 4)]))


def test_the_whole_matrix(subject, weights):
    found = regard.explain(subject, TEXTS, method="rollout", matrix=True, alpha=0.3)
    each = regard.explain(subject, TEXTS, method="rollout", matrix=True, per_layer=True)
    for why, upto, layers in zip(found, each, weights, strict=True):
        assert why.axes == ("query", "token")
        assert why.queries == why.features.tokens
        assert_close(why.scores, mixed(layers, 0.3))
        assert upto.axes == ("layer", "query", "token")
        assert_close(upto.scores, torch.stack([paper(layers[:end]) for end in range(1, 4)]))


def test_a_float64_model_is_multiplied_in_float64(subject, weights):
    """To 1e-12 of the largest, which float32 cannot reach; also where the share has no exact binary form."""
    for options in ({}, {"alpha": 0.3}, {"alpha": 0.3, "matrix": True}):
        why = regard.explain(subject, TEXTS[0], method="rollout", **options)
        expected = mixed(weights[0], options.get("alpha", 0.5))
        assert str(why.scores.dtype) == "float64", options
        found, expected = torch.as_tensor(why.scores), expected if "matrix" in options else expected[0]
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_also_with_grouped_queries(tokenizer, build, side):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    whole = regard.explain(subject, TEXTS, method="rollout", matrix=True)
    for text, why, matrix in zip(TEXTS, regard.explain(subject, TEXTS, method="rollout"), whole, strict=True):
        expected = paper(continued(model, tokenizer, text).weights)
        assert_close(why.scores, expected[-1])
        assert_close(matrix.scores, expected)


def test_what_a_sink_logit_took_is_not_given_back(tokenizer):
    """GPT-OSS: rows of Ā sum to less than 1; αI + (1−α)Ā as it stands, where the paper would normalise rows."""
    config = {**ids_of(tokenizer), **SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}
    config |= {"num_experts_per_tok": 1, "layer_types": ["full_attention"] * 3}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    model = seeded(lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**config)))
    model.set_experts_implementation("eager")  # the default has no float64
    why = regard.explain(regard.causal(model, tokenizer), TEXTS, method="rollout")[1]
    layers = continued(model, tokenizer, TEXTS[1]).weights
    assert float(layers[0].sum(-1).max()) < 0.99
    assert_close(why.scores, mixed(layers, 0.5)[-1])
    assert why.scores.sum() < 0.9


def test_mean_pooling_averages_therows(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="mean")
    for why, text in zip(regard.explain(subject, TEXTS, method="rollout"), TEXTS, strict=True):
        run = attend(model, encoded(tokenizer, text), lambda output: output.last_hidden_state.sum())
        assert_close(why.scores, paper(run.weights).mean(0))


# --- two sequences --------------------------------------------------------------------------------------------------


def on_both(weights, kind, rows, source, alpha):
    """What a layer does to the rows and the source, one after the other in a sequence of ``rows + source``.

    The queries keep α of what they had and take 1 − α from the keys; the other sequence stays as it is.
    """
    queries, keys = ({"rows": slice(0, rows), "source": slice(rows, rows + source)}[name] for name in kind.split())
    block = torch.eye(rows + source, dtype=weights.dtype)
    block[queries, queries] *= alpha
    block[queries, keys] += (1 - alpha) * weights.mean(0)
    return block


@pytest.mark.parametrize("options", [{}, {"alpha": 0.2}, {"start_layer": 1}, {"start_layer": 3, "alpha": 0.7}])
def test_an_encoder_decoder_is_a_product_of_blocks(tokenizer, options):
    model = t5(tokenizer)
    pairs = [("a moving film", "so it is"), ("so", "dull"), ("dull, and it never ends", "it is moving")]
    found = regard.explain(regard.seq2seq(model, tokenizer), pairs, method="rollout", **options)
    for why, pair in zip(found, pairs, strict=True):
        run, kinds = produced(model, tokenizer, *pair)
        rows, source = run.weights[-1].shape[1:]
        product = torch.eye(rows + source, dtype=torch.float64)
        for weights, kind in list(zip(run.weights, kinds, strict=True))[options.get("start_layer", 0) :]:
            product = on_both(weights, kind, rows, source, options.get("alpha", 0.5)) @ product
        byrows, by_source = product[rows - 1].split([rows, source])
        assert_close(why.scores, torch.cat([by_source, byrows]))
        assert why.scores.sum() == pytest.approx(1), "every block is row-stochastic, so nothing is lost"


def test_both_directions_of_a_co_attention_are_one_block(two_streams):
    """LXMERT: text and picture look at each other's state before the layer, so one matrix holds both directions."""
    model, subject, inputs = two_streams
    found = regard.explain(subject, inputs, method="rollout", alpha=0.4)
    identity = torch.eye(ROWS + REGIONS, dtype=torch.float64)
    for example, why in enumerate(found):
        runs = in_both_streams(model, {name: tensor[example : example + 1] for name, tensor in inputs.items()})

        def own(name, where, runs=runs):
            return on_both(runs[name].weights[0], where, ROWS, REGIONS, 0.4)

        blocks = [own(f"layer.{layer}.attention.self", "rows rows") for layer in range(2)]
        blocks += [own(f"r_layers.{layer}.attention.self", "source source") for layer in range(3)]
        for layer in range(3):
            both = 0.4 * identity
            to_picture, to_text = runs[f"x_layers.{layer}.visual_attention.att"].weights
            both[:ROWS, ROWS:] = 0.6 * to_picture.mean(0)
            both[ROWS:, :ROWS] = 0.6 * to_text.mean(0)
            blocks += [both, own(f"x_layers.{layer}.lang_self_att.self", "rows rows")]
            blocks += [own(f"x_layers.{layer}.visn_self_att.self", "source source")]
        product = identity
        for block in blocks:
            product = block @ product
        assert_close(why.scores, torch.cat([product[0, ROWS:], product[0, :ROWS]]))
        assert why.scores.sum() == pytest.approx(1)


# --- attention that pools -------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Two self-attention layers, then an attention with learned scores over the rows."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.0)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores, self.head = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x, real):
        hidden = self.body(x, src_key_padding_mask=~real)
        scores = self.scores(hidden).mT.masked_fill(~real[:, None], -torch.inf)
        return self.head((scores.softmax(-1) @ hidden)[:, 0])

    def written_out(self, x):
        """One example: the weights of each layer, ``(head, query, key)``, then those of the pool, ``(row,)``."""
        found = []
        for layer in self.body.layers:
            attended, weights = layer.self_attn(x, x, x, need_weights=True, average_attn_weights=False)
            x = layer.norm1(x + attended)
            x = layer.norm2(x + layer.linear2(layer.linear1(x).relu()))
            found.append(weights[0].detach())
        return found, self.scores(x)[0, :, 0].softmax(0).detach()


def test_a_pool_on_top_of_layers_takes_all():
    rows = 6
    torch.manual_seed(2)
    model = Pooled().double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 3
    subject = regard.module(
        model, lambda model, x, real: model(x, real), features=[f"row {i}" for i in range(rows)], readout="pool",
        padding=lambda x, real: real,
    )  # fmt: skip
    x, real = torch.randn(3, rows, 16).double(), torch.arange(rows) < torch.tensor([[4], [6], [2]])
    for options, product in (
        ({}, paper),
        ({"alpha": 0.8}, partial(mixed, alpha=0.8)),
        ({"residual": "add"}, lambda layers: 4 * paper(layers)),
    ):
        found = regard.explain(subject, (x, real), method="rollout", **options)
        for example, why in enumerate(found):
            layers, pool = model.written_out(x[example : example + 1, real[example]])
            assert_close(why.scores, pool @ product(layers))


@pytest.mark.parametrize("text", ["so good the awful", "so good the", "good"])
def test_a_pool_alone_is_its_attention(text):
    """Where nothing comes before the pool, the rollout is the attention itself, whatever α is."""
    subject = regard.pooled(regard.models.toys.decisive().double())
    raw = regard.explain(subject, text, method="raw")
    for options in ({}, {"alpha": 0.9}, {"residual": "add"}):
        assert_close(regard.explain(subject, text, method="rollout", **options).scores, raw.scores)


@pytest.mark.parametrize("words", [1, 2, 3, 4, 5])
def test_a_pool_with_as_many_attentions_as_words(words):
    """Three labels, each with an attention of its own, and texts of about as many words."""
    vocabulary = {"<pad>": 0, "<unk>": 1, "a": 2, "b": 3, "c": 4}
    torch.manual_seed(3)
    model = regard.models.AttentionClassifier(words=5, embedding=12, hidden=8, task="multilabel", classes=3)
    model.outer.weight.data *= 9  # far from uniform
    subject = regard.pooled(model.double().eval(), vocabulary)
    text = " ".join("abcab"[:words])
    for label in range(3):
        raw, rolled = (regard.explain(subject, text, method=method, target=label) for method in ("raw", "rollout"))
        assert_close(rolled.scores, raw.scores)


@pytest.mark.parametrize("method", ["rollout", "grad_rollout"])
def test_a_pool_asked_by_a_query_over_a_single_word(method):
    """One word alone, and beside a longer text: attention over it is the same pool in both."""
    vocabulary = {"<pad>": 0, "<unk>": 1, "a": 2, "b": 3, "c": 4}
    torch.manual_seed(3)
    model = regard.models.AttentionClassifier(words=5, embedding=12, hidden=8, task="pair", attention="dot", classes=3)
    subject = regard.pooled(model.double().eval(), vocabulary)
    options = {"residual": "add"} if method == "rollout" else {}
    alone = regard.explain(subject, ("a", "b c"), method=method, **options)
    beside, _ = regard.explain(subject, [("a", "b c"), ("a b c", "b")], method=method, **options)
    assert alone.scores.tolist() == pytest.approx(beside.scores.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 1.5}, "alpha=1.5 must be between 0 and 1"),
        ({"residual": "plus"}, "residual='plus' is not known"),
        ({"start_layer": 3}, "start_layer=3 is not there: there are layers 0 to 2"),
        ({"start_layer": -1}, "start_layer=-1 is not there"),
    ],
)
def test_what_is_out_of_range_is_refused(subject, options, said):
    with pytest.raises(errors.OptionError, match=said):
        regard.explain(subject, TEXTS[0], method="rollout", **options)


def test_what_two_sequences_do_not_have_is_refused(tokenizer):
    subject = regard.seq2seq(t5(tokenizer), tokenizer)
    with pytest.raises(errors.OptionError, match="per_layer=True: .*two sequences"):
        regard.explain(subject, ("so", "it is"), method="rollout", per_layer=True)
    with pytest.raises(errors.NotServed, match="rollout: matrix=True: .*Methods that can"):
        regard.explain(subject, ("so", "it is"), method="rollout", matrix=True)
