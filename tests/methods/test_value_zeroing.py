"""Value zeroing against the paper's own recipe: a hook sets one row of a value projection to zero, in one layer.

The state after that layer is compared with what it was by 1 − cos, and rows are divided by their sums; one example at a
time in float64. Numbers agree to 1e-6 of the largest.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import SMALL, assert_close, bert, encoded, gpt2, ids_of, llama, seeded, t5
from test_norm import rolled
from torch import nn

import regard
from regard import errors

TEXTS = ["dull, and it never ends", "so so", "a moving film"]


def distances(run, place, after, keys, columns=slice(None)):
    """``(query, key)``: how far row q of what ``after`` returns moves when row k of what ``place`` returns is zero."""

    def state(key):
        def zeroed(_, __, output):
            output = output.clone()
            if key is not None:
                output[:, key, columns] = 0
            return output

        kept = []
        hooks = [
            place.register_forward_hook(zeroed),
            after.register_forward_hook(lambda _, __, output: kept.append(output)),
        ]
        with torch.no_grad():
            run()
        for hook in hooks:
            hook.remove()
        (found,) = kept
        return (found[0] if isinstance(found, tuple) else found)[0]

    before = state(None)
    found = []
    for key in range(keys):
        one = state(key)
        found.append(1 - (one * before).sum(-1) / (one.norm(dim=-1) * before.norm(dim=-1)))
    matrix = torch.stack(found, 1)
    return matrix / matrix.sum(-1, keepdim=True)


def layers_of(model, tokenizer, text, *, types=False):
    """The matrix of each layer of a BERT, a GPT-2 or a Llama; ``types``: with token types, as `regard.text` reads."""
    base = model.base_model
    encoder = hasattr(base, "encoder")
    inputs = encoded(tokenizer, text, return_token_type_ids=encoder or types)
    keys = inputs["input_ids"].shape[1]
    found = []
    for block in base.encoder.layer if encoder else base.h if hasattr(base, "h") else base.layers:
        if hasattr(block, "attn"):
            place, columns = block.attn.c_attn, slice(64, 96)  # queries, keys, values
        else:
            place = block.self_attn.v_proj if hasattr(block, "self_attn") else block.attention.self.value
            columns = slice(None)
        found.append(distances(lambda: model(**inputs), place, block, keys, columns))
    return torch.stack(found)


BUILDS = {"BERT": bert, "GPT-2": gpt2, "Llama": llama}


@pytest.fixture(scope="module", params=BUILDS)
def case(request, tokenizer):
    """A subject, the row that is read, and the matrices of each text: ``(layer, query, key)``."""
    model = BUILDS[request.param](tokenizer)
    wrap, row = (regard.text, 0) if request.param == "BERT" else (regard.causal, -1)
    return wrap(model, tokenizer), row, [layers_of(model, tokenizer, text) for text in TEXTS]


def explained(subject, **options):
    return regard.explain(subject, TEXTS, method="value_zeroing", **options)


def test_the_row_that_is_read_after_the_last_layer(case):
    subject, row, expected = case
    for why, matrices in zip(explained(subject), expected, strict=True):
        assert_close(why.scores, matrices[-1, row])
        assert why.scores.sum() == pytest.approx(1)


def test_layers_their_mean_and_their_product(case):
    """A rollout takes the matrices as they are: the residual connection is part of the layer."""
    subject, row, expected = case
    found = {layers: explained(subject, layers=layers) for layers in (0, 1, 2, "mean", "rollout")}
    each = explained(subject, per_layer=True)
    for number, matrices in enumerate(expected):
        for layer in range(3):
            assert_close(found[layer][number].scores, matrices[layer, row])
        assert_close(found["mean"][number].scores, matrices.mean(0)[row])
        assert_close(found["rollout"][number].scores, rolled(list(matrices), 0.0)[row])
        assert_close(each[number].scores, matrices[:, row])


def test_all_rows(case):
    subject, _, expected = case
    whole, last = explained(subject, per_layer=True, matrix=True), explained(subject, matrix=True)
    product = explained(subject, layers="rollout", matrix=True)
    for number, matrices in enumerate(expected):
        assert whole[number].axes == ("layer", "query", "token")
        assert_close(whole[number].scores, matrices)
        assert_close(last[number].scores, matrices[-1])
        assert_close(product[number].scores, rolled(list(matrices), 0.0))


def test_what_a_row_cannot_see_does_not_move_it(tokenizer):
    """Exactly zero above the diagonal: rounding makes no distance."""
    for side in ("left", "right"):
        subject = regard.causal(llama(tokenizer), tokenizer, padding_side=side)
        for why in explained(subject, matrix=True):
            assert (np.triu(why.scores, 1) == 0).all()
            assert (np.diag(why.scores) > 0).all()


def test_mean_pooling_averages_the_rows(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    found = explained(regard.text(model, tokenizer, readout="mean"))
    for why, text in zip(found, TEXTS, strict=True):
        assert_close(why.scores, layers_of(model, tokenizer, text)[-1].mean(0))


def test_a_decoder_that_classifies_and_keeps_a_cache(tokenizer):
    """Its layers are given a cache, to which each further run of a layer would add."""
    config = hf.GPT2Config(**ids_of(tokenizer), **SMALL, num_labels=3)
    model = seeded(lambda: hf.GPT2ForSequenceClassification(config))
    subject = regard.text(model, tokenizer)
    for inputs in (TEXTS[:1], TEXTS):
        found = regard.explain(subject, inputs, method="value_zeroing", per_layer=True, matrix=True)
        for why, text in zip(found, inputs, strict=True):
            assert_close(why.scores, layers_of(model, tokenizer, text, types=True))


@pytest.mark.parametrize("build", [bert, gpt2])
def test_a_model_that_forms_its_weights_itself(tokenizer, build):
    model = build(tokenizer)
    expected = [layers_of(model, tokenizer, text) for text in TEXTS]
    model.set_attn_implementation("eager")
    subject = (regard.text if build is bert else regard.causal)(model, tokenizer)
    for why, matrices in zip(explained(subject, per_layer=True, matrix=True), expected, strict=True):
        assert_close(why.scores, matrices)


def test_a_layer_that_is_called_again_and_again(tokenizer):
    """ALBERT: one module, three calls. Written out by calling it so often."""
    config = hf.AlbertConfig(vocab_size=len(tokenizer), embedding_size=16, num_labels=3, **SMALL)
    model = seeded(lambda: hf.AlbertForSequenceClassification(config))
    group = model.albert.encoder.albert_layer_groups[0]
    value = group.albert_layers[0].attention.value
    found = explained(regard.text(model, tokenizer), per_layer=True, matrix=True)
    for why, text in zip(found, TEXTS, strict=True):
        inputs = encoded(tokenizer, text)
        states = []
        hook = group.register_forward_pre_hook(lambda _, args, states=states: states.append(args[0]))
        model(**inputs)
        hook.remove()
        matrices = [
            distances(lambda x=x: group(x), value, group, inputs["input_ids"].shape[1]) for x in states
        ]  # fmt: skip
        assert_close(why.scores, torch.stack(matrices))


# --- two sequences --------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_layer_by_layer(tokenizer):
    """In a decoder each of the two attentions has a residual connection and a state after it of its own."""
    model = t5(tokenizer)
    subject = regard.seq2seq(model, tokenizer)
    source, text = "a moving film", "so it is, and it never ends"
    said = tokenizer(text)["input_ids"]
    inputs = encoded(tokenizer, source, return_token_type_ids=False)
    inputs["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id, *said[:-1]]])
    own, cross = [], []
    for block in model.decoder.block:
        own.append(distances(lambda: model(**inputs), block.layer[0].SelfAttention.v, block.layer[0], len(said)))
        keys = inputs["input_ids"].shape[1]
        cross.append(distances(lambda: model(**inputs), block.layer[1].EncDecAttention.v, block.layer[1], keys))
    whole = regard.explain(subject, (source, text), method="value_zeroing", per_layer=True)
    last = regard.explain(subject, (source, text), method="value_zeroing")
    assert whole.parts == {"source": keys, "produced": len(said)}
    assert last.parts == {"source": keys}, "the last attention of a decoder looks at the source"
    assert_close(whole.scores[:, :keys], torch.stack(cross)[:, -1])
    assert_close(whole.scores[:, keys:], torch.stack(own)[:, -1])
    assert_close(last.scores, cross[-1][-1])
    for site, expected in ((2, own[0]), (3, cross[0]), (4, own[1]), (5, cross[1])):
        found = regard.explain(subject, (source, text), method="value_zeroing", layers=site, matrix=True)
        assert_close(found.scores, expected)


def test_an_encoder_of_two_stacks_is_not_read(tokenizer):
    subject = regard.seq2seq(t5(tokenizer), tokenizer)
    with pytest.raises(
        errors.NotServed, match="layer 0 .*does not have the readout among its queries. Those have: 2, 3"
    ):
        regard.explain(subject, ("so", "it is"), method="value_zeroing", layers=0)


# --- torch's own layers ---------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Two of torch's layers, read from the first row."""

    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, **options)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rows_first = not options["batch_first"]

    def forward(self, x):
        return self.body(x.transpose(0, 1))[0] if self.rows_first else self.body(x)[:, 0]

    def matrices(self, x):
        """``x`` is one example, ``(row, channel)``; values are made here, where one can be set to zero."""
        found = []
        for layer in self.body.layers:
            states = [self.state(layer, x, key) for key in (None, *range(len(x)))]
            before, x = states[0], states[0]
            far = [1 - nn.functional.cosine_similarity(before, one, dim=-1) for one in states[1:]]
            found.append(torch.stack(far, 1) / torch.stack(far, 1).sum(-1, keepdim=True))
        return torch.stack(found)

    def state(self, layer, x, key):
        weight, bias = layer.self_attn.in_proj_weight.chunk(3), layer.self_attn.in_proj_bias.chunk(3)
        q, k, v = (x @ w.T + b for w, b in zip(weight, bias, strict=True))
        if key is not None:
            v = v.index_fill(0, torch.tensor([key]), 0.0)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(0, 1) for part in (q, k, v))
        mixed = ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = layer.norm1(x + layer.self_attn.out_proj(mixed))
        return layer.norm2(x + layer.linear2(layer.linear1(x).relu())).detach()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("examples", [1, 3, 6])
def test_torchs_layers_with_examples_or_rows_first(batch_first, examples):
    """Also where there are as many examples as rows, so that shapes do not tell which come first."""
    torch.manual_seed(5)
    rows, model = 6, Encoder(batch_first=batch_first).double().eval()
    subject = regard.module(
        model, lambda model, x: model(x), features=list("abcdef"), readout="first", output="embedding"
    )
    x = torch.randn(examples, rows, 16, dtype=torch.float64)
    found = regard.explain(subject, x, method="value_zeroing", per_layer=True, matrix=True)
    for example, why in enumerate(found):
        assert_close(why.scores, model.matrices(x[example]))


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(subject, inputs, match):
    with pytest.raises(errors.NotServed, match=f"^value_zeroing: {match}.*Methods that can: ") as caught:
        regard.explain(subject, inputs, method="value_zeroing")
    able = str(caught.value).partition("Methods that can: ")[2].rstrip(".").split(", ")
    assert "value_zeroing" not in able, "what has just been refused is not among those that can"


def test_a_residual_connection_outside_of_any_submodule():
    """rtdl's FT-Transformer adds it in the loop over its blocks, so no call has the state after a layer."""
    from rtdl_revisiting_models import FTTransformer

    torch.manual_seed(0)
    model = FTTransformer(
        n_cont_features=3, cat_cardinalities=[4] * 2, d_out=3, n_blocks=2, d_block=32, attention_n_heads=4,
        attention_dropout=0.2, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.1, residual_dropout=0.0,
    ).eval()  # fmt: skip
    subject = regard.module(
        model, lambda model, numbers, categories: model(numbers, categories), features=["[CLS]", *"abcde"],
        readout="first",
    )  # fmt: skip
    inputs = (torch.randn(3, 3), torch.randint(0, 4, (3, 2)))
    for layers in ("last", 0, "mean"):
        with pytest.raises(errors.NotServed, match="^value_zeroing: .*residual connection"):
            regard.explain(subject, inputs, method="value_zeroing", layers=layers)
    refused(subject, inputs, ".*residual connection")


def test_the_two_attentions_of_a_layer_in_one_module(tokenizer):
    """BART adds both residual connections in the layer that holds both sites, so no call has the state in between."""
    stacks = {f"{stack}_{part}": 2 for stack in ("encoder", "decoder") for part in ("layers", "attention_heads")}
    start = {"decoder_start_token_id": tokenizer.cls_token_id, "tie_word_embeddings": False}
    config = hf.BartConfig(**ids_of(tokenizer), **start, **stacks, d_model=32, encoder_ffn_dim=40, decoder_ffn_dim=40)
    subject = regard.seq2seq(seeded(lambda: hf.BartForConditionalGeneration(config)), tokenizer)
    refused(subject, ("a moving film", "so it is"), "the residual connection around site 5 .*is in no submodule")


def test_a_pool_has_no_state_after_it():
    refused(
        regard.pooled(regard.models.toys.decisive()), "so good the awful",
        "site 0 .*is not in a layer that turns rows into rows",
    )  # fmt: skip


def test_options_that_are_refused(case):
    subject, _, _ = case
    with pytest.raises(errors.OptionError, match="layers='first' is not known"):
        explained(subject, layers="first")
    with pytest.raises(errors.NoSuchPart, match="3"):
        explained(subject, layers=3)
    with pytest.raises(errors.OptionError, match="per_head=True: value_zeroing has no such option"):
        explained(subject, per_head=True)
