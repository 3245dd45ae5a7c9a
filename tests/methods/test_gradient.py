"""Gradients of tokens against models that are given embeddings, and attention that is written out.

For each text alone, in float64, the embeddings of its tokens are a leaf, and its own code makes of them what it makes
of ids. Where weights are constants, attention is the softmax written here, detached. The dot product with x is also the
slope of y along x, which finite differences give without any gradient.
"""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import assert_close, bert, encoded, gpt2, llama, seeded, t5
from torch import nn

import regard
from regard import errors

TEXTS = ["a moving film", "dull, and it never ends: an unbelievably overlong movie", "so", "so so film so"]
CONSTANT = pytest.mark.parametrize("through_attention", [True, False], ids=["through attention", "constant weights"])
SIDES = pytest.mark.parametrize(("build", "side"), [(llama, "left"), (llama, "right"), (gpt2, "left")])


# --- models whose attention is written out --------------------------------------------------------------------------


def literal(module, query, key, value, attention_mask, scaling=None, position_bias=None, **_):
    """Attention of one text without padding, with what the `twin` of a model says of it."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * scaling + (0 if position_bias is None else position_bias)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if module.looks_back else seen
    seen[:, list(module.gone)] = False
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)  # a row without keys is 0
    weights = weights.detach() if module.constant else weights
    return (weights @ value).transpose(1, 2).contiguous(), weights


hf.AttentionInterface.register("literal", literal)
TWINS = WeakKeyDictionary()


def twin(model, *, gone=(), constant=False):
    """The same weights, with attention written out; keys that are gone are those of the source, where there is one."""
    if model not in TWINS:
        TWINS[model] = copy.deepcopy(model)
        TWINS[model].set_attn_implementation("literal")
    other = TWINS[model]
    causal = isinstance(model, (hf.LlamaForCausalLM, hf.GPT2LMHeadModel))
    for name, module in other.named_modules():
        own = "decoder" in name and name.endswith("SelfAttention")  # of T5
        module.looks_back, module.constant, module.gone = causal or own, constant, () if own else gone
    return other


def probability(logits):
    """Of what is predicted."""
    return logits.softmax(-1).max()


def sizes(scalar, leaves, norm="dot"):
    """For each leaf ``(1, row, channel)`` one number a row."""
    found = torch.autograd.grad(scalar, leaves)
    if norm == "l2":
        return [slope[0].norm(dim=-1) for slope in found]
    return [(slope * x).sum(-1)[0].abs().detach() for slope, x in zip(found, leaves, strict=True)]


def embedded(model, ids):
    return model.get_input_embeddings()(ids).detach().requires_grad_()


def of_text(model, tokenizer, text, *, constant=False, norm="dot", scalar=probability, types=True):
    """A BERT, a Llama or a GPT-2, of which the scalar takes the last row of its logits."""
    inputs = encoded(tokenizer, text, return_token_type_ids=types)
    x = embedded(model, inputs.pop("input_ids"))
    logits = twin(model, constant=constant)(inputs_embeds=x, **inputs).logits[0]
    return sizes(scalar(logits if logits.dim() == 1 else logits[-1]), [x], norm)[0]


def assert_each(found, expected):
    for why, one in zip(found, expected, strict=True):
        assert_close(why.scores, one)


# --- texts ----------------------------------------------------------------------------------------------------------


@CONSTANT
@pytest.mark.parametrize("norm", ["dot", "l2"])
def test_a_classifier(subject, model, tokenizer, norm, through_attention):
    found = regard.explain(subject, TEXTS, method="gradient", norm=norm, through_attention=through_attention)
    assert_each(found, [of_text(model, tokenizer, text, constant=not through_attention, norm=norm) for text in TEXTS])


@CONSTANT
@SIDES
def test_a_decoder(tokenizer, build, side, through_attention):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    found = regard.explain(subject, TEXTS, method="gradient", through_attention=through_attention)
    expected = [of_text(model, tokenizer, text, constant=not through_attention, types=False) for text in TEXTS]
    assert_each(found, expected)
    alone = [regard.explain(subject, text, method="gradient", through_attention=through_attention) for text in TEXTS]
    assert_each(alone, expected)


@CONSTANT
@pytest.mark.parametrize("build", [bert, llama])
def test_it_is_the_slope_along_x(tokenizer, build, through_attention):
    """(y(x + h·x_t) − y(x − h·x_t)) / 2h, with the weights of y(x) where they are constants."""
    model = build(tokenizer)
    inputs = encoded(tokenizer, "so dull film", return_token_type_ids=build is bert)
    x = embedded(model, inputs.pop("input_ids")).detach()
    subject = (regard.text if build is bert else regard.causal)(model, tokenizer)
    other = twin(model)
    kept, step = [], 1e-5

    def keep(module, query, key, value, attention_mask, **options):
        out, weights = literal(module, query, key, value, attention_mask, **options)
        kept.append(weights)
        return out, weights

    def frozen(module, query, key, value, attention_mask, **_):
        share = query.shape[1] // value.shape[1]
        weights = next(weights_again)
        return (weights @ value.repeat_interleave(share, 1)).transpose(1, 2).contiguous(), weights

    def y(x):
        logits = other(inputs_embeds=x, **inputs).logits[0]
        return (logits if logits.dim() == 1 else logits[-1]).softmax(-1)[target]

    target = 0
    with torch.no_grad():
        hf.AttentionInterface.register("literal", keep)
        y(x)
        hf.AttentionInterface.register("literal", literal if through_attention else frozen)
        expected = []
        for row in range(x.shape[1]):
            values = []
            for sign in (1, -1):
                weights_again = iter(kept)
                moved = x.clone()
                moved[:, row] *= 1 + sign * step
                values.append(y(moved))
            expected.append(abs(values[0] - values[1]) / (2 * step))
        hf.AttentionInterface.register("literal", literal)
    why = regard.explain(subject, "so dull film", method="gradient", target=target, through_attention=through_attention)
    np.testing.assert_allclose(why.scores, expected, rtol=0, atol=1e-5 * max(expected))


def test_targets_and_what_is_explained_of_them(subject, model, tokenizer):
    for of, function in (("logit", lambda x: x), ("logprob", lambda x: x.log_softmax(-1))):
        found = regard.explain(subject, TEXTS, method="gradient", of=of, target=[2, (0, 1), 1, 0])
        scalars = (lambda x: x[2], lambda x: x[0] - x[1], lambda x: x[1], lambda x: x[0])
        assert_each(found, [
            of_text(model, tokenizer, text, scalar=lambda logits, f=function, g=scalar: g(f(logits)))
            for text, scalar in zip(TEXTS, scalars, strict=True)
        ])  # fmt: skip


@pytest.mark.parametrize("heads", ["several labels", "a number"])
def test_other_heads(tokenizer, heads):
    kind = {"problem_type": "multi_label_classification"} if heads == "several labels" else {"num_labels": 1}
    model = seeded(lambda: hf.BertForSequenceClassification(hf.BertConfig(
        **bert(tokenizer).config.to_diff_dict() | {"num_labels": 3} | kind
    )))  # fmt: skip
    function = (lambda x: x.sigmoid()[1]) if heads == "several labels" else (lambda x: x[0])
    target = 1 if heads == "several labels" else None
    found = regard.explain(regard.text(model, tokenizer), TEXTS, method="gradient", target=target)
    assert_each(found, [of_text(model, tokenizer, text, scalar=function) for text in TEXTS])


def test_a_plain_encoder_and_a_function_of_its_output(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="mean")
    found = regard.explain(subject, TEXTS, method="gradient", target=lambda output: output[:, 3])
    for why, text in zip(found, TEXTS, strict=True):
        inputs = encoded(tokenizer, text)
        x = embedded(model, inputs.pop("input_ids"))
        assert_close(why.scores, sizes(model(inputs_embeds=x, **inputs).last_hidden_state[0].mean(0)[3], [x])[0])
    with pytest.raises(errors.WrongTarget, match="needs a function"):
        regard.explain(subject, TEXTS, method="gradient")


def test_a_verbalizer(tokenizer):
    model = llama(tokenizer)
    subject = regard.causal(model, tokenizer, verbalizer={"positive": "good", "negative": "bad"})
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("good", "bad")]
    found = regard.explain(subject, TEXTS, method="gradient", target="negative")
    assert_each(found, [
        of_text(model, tokenizer, text, scalar=lambda logits: logits[ids].softmax(-1)[1], types=False) for text in TEXTS
    ])  # fmt: skip


def test_each_token_of_a_continuation(tokenizer):
    """Over its prefix alone, which is cut in the middle of a word."""
    model = llama(tokenizer)
    subject = regard.causal(model, tokenizer)
    prompt = tokenizer("so dull")["input_ids"]
    later = tokenizer("overlong film", add_special_tokens=False)["input_ids"]
    assert len(later) == 3
    found = regard.explain(subject, "so dull", method="gradient", continuation="overlong film")
    for place, why in enumerate(found):
        x = embedded(model, torch.tensor([prompt + later[:place]]))
        chance = twin(model)(inputs_embeds=x).logits[0, -1].softmax(-1)[later[place]]
        assert_close(why.scores, sizes(chance, [x])[0])


# --- two sequences --------------------------------------------------------------------------------------------------


@CONSTANT
def test_an_encoder_decoder(tokenizer, through_attention):
    """Both sequences, in a batch in which both are padded; the produced token is the target."""
    model = t5(tokenizer)
    subject = regard.seq2seq(model, tokenizer)
    pairs = [("a moving film", "so it is"), ("so", "dull"), ("dull, it never ends", "it is an unbelievably overlong")]
    found = regard.explain(subject, pairs, method="gradient", through_attention=through_attention)
    for why, (source, text) in zip(found, pairs, strict=True):
        ids, said = tokenizer(source)["input_ids"], tokenizer(text)["input_ids"]
        taken = [model.config.decoder_start_token_id, *said[:-1]]
        x, z = (embedded(model, torch.tensor([some])) for some in (ids, taken))
        logits = twin(model, constant=not through_attention)(inputs_embeds=x, decoder_inputs_embeds=z).logits[0, -1]
        assert why.parts == {"source": len(ids), "produced": len(taken)}
        assert_close(why.scores, torch.cat(sizes(logits.softmax(-1)[said[-1]], [x, z])))


# --- pooled encoders ------------------------------------------------------------------------------------------------

WORDS = ["so good the awful film", "good", "dull so so"]
MARKS = ["<pad>", "<unk>", "<sos>", "<eos>"]


def lstm(marks, **options):
    """A small LSTM with attention, its vocabulary, and whether texts are put between marks."""
    names = [*(MARKS if marks else MARKS[:2]), *sorted({*" ".join(WORDS).split()})]
    vocabulary = {name: index for index, name in enumerate(names)}
    sizes = {"words": len(names), "embedding": 12, "hidden": 8} | options
    model = seeded(lambda: regard.models.AttentionClassifier(**sizes))
    model.outer.weight.data *= 9  # far from uniform
    return model, vocabulary


def ids_of_words(vocabulary, text):
    marks = [[vocabulary[mark]] if mark in vocabulary else [] for mark in MARKS[2:]]
    return marks[0] + [vocabulary[word] for word in text.split()] + marks[1]


def pooled_logits(model, x, attended, *, constant=False):
    """What `models.AttentionClassifier` computes of one text, from its embeddings ``(1, row, channel)``."""
    states, _ = model.encoder.body(x)
    scores = model.outer(model.inner(states).tanh()).mT  # example attention row
    hidden = torch.ones(x.shape[1], dtype=torch.bool)
    hidden[attended] = False
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    context = (weights.detach() if constant else weights) @ states
    if model.task == "multilabel":
        return ((context * model.decoder.weight).sum(-1) + model.decoder.bias)[0]
    return model.decoder(context[:, 0])[0]


@CONSTANT
@pytest.mark.parametrize("marks", [False, True], ids=["words alone", "between marks"])
@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_an_lstm_as_in_the_paper(task, marks, through_attention):
    """The sigmoid of the binary output, of the class that is predicted; constants are the paper's weights."""
    model, vocabulary = lstm(marks, task=task, classes=1 if task == "binary" else 3)
    subject = regard.pooled(model, vocabulary)
    target = 1 if task == "multilabel" else None
    found = regard.explain(subject, WORDS, method="gradient", target=target, through_attention=through_attention)
    for why, text in zip(found, WORDS, strict=True):
        x = model.encoder.embedding(torch.tensor([ids_of_words(vocabulary, text)])).detach().requires_grad_()
        attended = slice(1, -1) if marks else slice(None)
        logits = pooled_logits(model, x, attended, constant=not through_attention)
        if task == "binary":
            chance = torch.cat([-logits, logits]).sigmoid().max()
        else:
            chance = logits.softmax(-1).max() if task == "multiclass" else logits.sigmoid()[1]
        assert_close(why.scores, sizes(chance, [x])[0])


def test_a_query_that_says_the_same_is_not_the_text():
    names = ["<pad>", "<unk>", "so", "good", "dull"]
    vocabulary = {name: index for index, name in enumerate(names)}
    model = seeded(lambda: regard.models.AttentionClassifier(
        words=5, task="pair", classes=3, embedding=12, hidden=8, encoder="lstm"
    ))  # fmt: skip
    subject = regard.pooled(model, vocabulary)
    for query in ("so good", "so dull"):
        why = regard.explain(subject, ("so good", query), method="gradient")
        step, values = 1e-5, []
        ids, asked = (torch.tensor([[vocabulary[word] for word in text.split()]]) for text in ("so good", query))
        for row in range(2):
            for scale in (1 + step, 1 - step):
                other = copy.deepcopy(model)
                plain = other.encoder.embedding.forward

                def moved(ids, row=row, scale=scale, plain=plain):
                    x = plain(ids).clone()
                    x[:, row] *= scale
                    return x

                other.encoder.embedding.forward = moved
                real = torch.ones_like(ids).bool()
                with torch.no_grad():
                    values.append(other(ids, real, real, asked, real).softmax(-1)[0])
        target = model(ids, real, real, asked, real).argmax()
        expected = [abs(values[2 * row][target] - values[2 * row + 1][target]) / (2 * step) for row in range(2)]
        np.testing.assert_allclose(why.scores, expected, rtol=0, atol=1e-5 * max(expected))


# --- pictures and tables: the first state of the rows ---------------------------------------------------------------


def vit(**options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = seeded(lambda: hf.ViTForImageClassification(
        hf.ViTConfig(**sizes, patch_size=8, image_size=(16, 24), num_labels=3, initializer_range=0.3, **options)
    ))  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter *= 2  # far from uniform
    return model


def pictures(count=2):
    return torch.rand(count, 3, 16, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@CONSTANT
def test_a_picture(through_attention):
    model = vit()
    found = regard.explain(regard.image(model), pictures(), method="gradient", through_attention=through_attention)
    other = twin(model, constant=not through_attention)
    for why, picture in zip(found, pictures(), strict=True):
        x = model.vit.embeddings(picture[None]).detach().requires_grad_()
        other.vit.embeddings.forward = lambda *_, x=x, **__: x
        assert_close(why.scores, sizes(probability(other(picture[None]).logits[0]), [x])[0])


def table(**options):
    """rtdl's FT-Transformer over four columns; its baseline, and its inputs."""
    from rtdl_revisiting_models import FTTransformer

    model = seeded(lambda: FTTransformer(
        n_cont_features=4, cat_cardinalities=[], d_out=3, n_blocks=2, d_block=16, attention_n_heads=2,
        attention_dropout=0.2, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.1, residual_dropout=0.0,
    ))  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2
    subject = regard.module(
        model, lambda model, x: model(x, None), features=["[CLS]", *"abcd"], special_features=["[CLS]"],
        readout="first", **options,
    )  # fmt: skip
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, subject, x


def test_a_table():
    model, subject, x = table()
    for why, row in zip(regard.explain(subject, x, method="gradient"), x, strict=True):
        state = torch.cat([model.cls_embedding((1,)), model.cont_embeddings(row[None])], 1).detach().requires_grad_()
        assert_close(why.scores, sizes(probability(model.backbone(state)[0]), [state])[0])


class TwoTables(nn.Module):
    """Ids that two tables embed, over which one attention runs; positions are a third."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.position = nn.Embedding(9, 4), nn.Embedding(9, 2), nn.Embedding(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids, x=None):
        if x is None:
            first, second = self.first(ids), self.second(ids)
            first += 0.5  # written into
            x = torch.cat([first, second], -1)
        z = x + self.position(torch.arange(ids.shape[1]).expand_as(ids))
        return self.head(nn.functional.scaled_dot_product_attention(z, z, z)[:, 0])


def test_what_several_tables_make_of_an_id_lies_side_by_side():
    model = seeded(TwoTables)
    subject = regard.module(model, lambda model, ids: model(ids), features=list("abcde"), readout="first")
    ids = torch.tensor([[3, 1, 4, 1, 5], [8, 7, 0, 0, 2]])
    for why, one in zip(regard.explain(subject, ids, method="gradient"), ids, strict=True):
        first, second = (part(one)[None].detach().requires_grad_() for part in (model.first, model.second))
        chance = probability(model(one[None], torch.cat([first + 0.5, second], -1))[0])
        assert_close(why.scores, sum((slope * x).sum(-1)[0] for slope, x in zip(
            torch.autograd.grad(chance, [first, second]), (first, second), strict=True
        )).abs())  # fmt: skip


class Layers(nn.Module):
    """Torch's own layers, of one sequence or two, which take examples first or rows first."""

    def __init__(self, *, two, batch_first):
        super().__init__()
        layer, stack = (
            (nn.TransformerDecoderLayer, nn.TransformerDecoder) if two else (nn.TransformerEncoderLayer, nn.TransformerEncoder)
        )  # fmt: skip
        still = {} if two else {"enable_nested_tensor": False}
        self.body = stack(layer(8, 2, 12, dropout=0.0, batch_first=batch_first), 2, **still)
        self.batch_first = batch_first

    def forward(self, *sequences):
        if self.batch_first:
            return self.body(*sequences)[:, 0]
        return self.body(*(one.transpose(0, 1) for one in sequences))[0]


@pytest.mark.parametrize("two", [False, True], ids=["one sequence", "two"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("examples", [1, 3, 4, 6])
def test_states_with_examples_or_rows_first(two, batch_first, examples):
    """Also where there are as many examples as rows, so that shapes do not tell which come first."""
    model = seeded(lambda: Layers(two=two, batch_first=batch_first))
    subject = regard.module(
        model, lambda model, *x: model(*x), features=list("abcd"), readout="first",
        source=list("uvwxyz") if two else None,
    )  # fmt: skip
    given = [torch.randn(examples, rows, 8, dtype=torch.float64) for rows in ((4, 6) if two else (4,))]
    for example, why in enumerate(regard.explain(subject, tuple(given), method="gradient", norm="l2", target=2)):
        x = [one[example : example + 1].clone().requires_grad_() for one in given]
        assert why.parts == ({"source": 6, "produced": 4} if two else {"input": 4})
        assert_close(why.scores, torch.cat(sizes(model(*x)[0].softmax(-1)[2], x, "l2")[::-1]))


def test_regions_of_a_picture_beside_a_text(two_streams):
    """Of tokens the embeddings, of regions what the model is given."""
    model, subject, inputs = two_streams
    found = regard.explain(subject, inputs, method="gradient", target=lambda output: output[:, 3])
    for example, why in enumerate(found):
        one = {name: x[example : example + 1] for name, x in inputs.items()}
        words = model.embeddings.word_embeddings(one.pop("input_ids")).detach().requires_grad_()
        regions = one.pop("visual_feats").clone().requires_grad_()
        value = model(inputs_embeds=words, visual_feats=regions, **one).pooled_output[0, 3]
        assert_close(why.scores, torch.cat(sizes(value, [regions, words])))


class Captions(nn.Module):
    """Rows without ids that look at a source of ids."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, x, ids):
        z = self.embedding(ids)
        return self.head(nn.functional.scaled_dot_product_attention(x, z, z)[:, 0])


def test_only_a_source_has_ids():
    model = seeded(Captions)
    subject = regard.module(
        model, lambda model, x, ids: model(x, ids), features=["x", "y"], source=list("abc"), readout="first"
    )
    x, ids = torch.randn(2, 2, 6, dtype=torch.float64), torch.tensor([[3, 1, 4], [1, 5, 8]])
    for why, one, query in zip(regard.explain(subject, (x, ids), method="gradient"), ids, x, strict=True):
        assert why.parts == {"source": 3}
        z = model.embedding(one)[None].detach().requires_grad_()
        mixed = nn.functional.scaled_dot_product_attention(query[None], z, z)[:, 0]
        assert_close(why.scores, sizes(probability(model.head(mixed)[0]), [z])[0])


# --- what is there or not ---------------------------------------------------------------------------------------------


def test_parameters_that_are_frozen(model, tokenizer):
    frozen = copy.deepcopy(model).requires_grad_(False)
    found = regard.explain(regard.text(frozen, tokenizer), TEXTS, method="gradient")
    assert_each(found, [of_text(model, tokenizer, text) for text in TEXTS])
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_half_precision(model, tokenizer):
    """Eight bits: within 5 % of the largest."""
    half = regard.text(copy.deepcopy(model).to(torch.bfloat16), tokenizer)
    for norm in ("dot", "l2"):
        for why, text in zip(regard.explain(half, TEXTS, method="gradient", norm=norm), TEXTS, strict=True):
            expected = of_text(
                model, tokenizer, text, norm=norm, scalar=lambda x, t=why.target: x.softmax(-1)[int(t[-1])]
            )
            assert why.scores.dtype == np.float32
            np.testing.assert_allclose(why.scores, expected.detach(), rtol=0, atol=0.05 * float(expected.max()))


def test_no_gradients(subject):
    with torch.inference_mode(), pytest.raises(errors.NoGradient, match="gradient: inside torch.inference_mode"):
        regard.explain(subject, "so", method="gradient")
    with pytest.raises(errors.NoGradient, match="does not depend differentiably on the input.*Methods without"):
        regard.explain(subject, "so", method="gradient", target=lambda output: output.detach()[:, 0])
    with torch.no_grad():
        assert regard.explain(subject, "so", method="gradient").scores.any()


@pytest.mark.filterwarnings("ignore")  # torch has much to say about integers
@pytest.mark.parametrize("method", ["gradient", "integrated_gradients"])
def test_an_integer_quantised_model_has_none(model, tokenizer, method):
    small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model).float(), {nn.Linear})
    with pytest.raises(errors.NoGradient, match="integer-quantised"):
        regard.explain(regard.text(small, tokenizer, readout="first"), "so", method=method)


def test_options_that_are_refused(subject):
    with pytest.raises(errors.OptionError, match="norm='l1' is not known. Choose one of 'dot', 'l2'"):
        regard.explain(subject, "so", method="gradient", norm="l1")
