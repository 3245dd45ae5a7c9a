"""Hidden token attribution against full Jacobians, and identifiability where its answer is known.

Jacobians are those of ``torch.autograd.functional.jacobian`` through the model's own layers, one example at a time in
float64; shares agree to 1e-6 of the largest.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import assert_close, bert, encoded, gpt2, llama, t5
from torch import nn
from torch.autograd.functional import jacobian

import regard
from regard import errors

TEXTS = ["and it never ends", "so"]


def states_of(model, tokenizer, text):
    """What goes into the first layer, and the function that gives the states after each layer from it."""
    base = model.base_model
    blocks = base.encoder.layer if hasattr(base, "encoder") else base.h if hasattr(base, "h") else base.layers
    inputs = encoded(tokenizer, text, return_token_type_ids=hasattr(base, "encoder"))
    kept = []
    handle = blocks[0].register_forward_pre_hook(
        lambda _, args, kwargs: kept.append((args[0], kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()

    def layers(x, count):
        """The model from its first layer on, with another state in place of the one that it would have there."""
        found = []
        put = blocks[0].register_forward_pre_hook(lambda _, args: (x, *args[1:]))
        hooks = [block.register_forward_hook(lambda _, __, out: found.append(out)) for block in blocks]
        model(**inputs)
        for hook in (put, *hooks):
            hook.remove()
        state = found[count]
        return state[0] if isinstance(state, tuple) else state

    return kept[0][0], layers, len(blocks)


def shares(model, tokenizer, text):
    """‖∂e_q/∂x_i‖ with rows divided by their sums, after each layer: ``(layer, query, input)``."""
    x, layers, count = states_of(model, tokenizer, text)
    found = []
    for number in range(count):
        whole = jacobian(lambda x, number=number: layers(x, number)[0], x)[:, :, 0]  # query channel input channel
        norms = whole.square().sum((1, 3)).sqrt()
        found.append(norms / norms.sum(-1, keepdim=True))
    return torch.stack(found)


BUILDS = {"BERT": bert, "GPT-2": gpt2, "Llama": llama}


@pytest.fixture(scope="module", params=BUILDS)
def case(request, tokenizer):
    """A subject, the row that is read, and the shares in each text."""
    model = BUILDS[request.param](tokenizer)
    wrap, row = (regard.text, 0) if request.param == "BERT" else (regard.causal, -1)
    return wrap(model, tokenizer), row, [shares(model, tokenizer, text) for text in TEXTS]


def explained(subject, **options):
    return regard.explain(subject, TEXTS, method="token_mixing", **options)


# --- hidden token attribution ---------------------------------------------------------------------------------------


def test_shares_of_the_inputs_in_the_readout(case):
    subject, row, expected = case
    for why, each in zip(explained(subject), expected, strict=True):
        assert_close(why.scores, each[-1, row])
        assert why.scores.sum() == pytest.approx(1)


def test_after_each_layer_and_for_each_row(case):
    subject, row, expected = case
    layers, matrices, both = (
        explained(subject, **options)
        for options in ({"per_layer": True}, {"matrix": True}, {"per_layer": True, "matrix": True})
    )
    for number, each in enumerate(expected):
        assert_close(layers[number].scores, each[:, row])
        assert_close(matrices[number].scores, each[-1])
        assert both[number].axes == ("layer", "query", "token")
        assert_close(both[number].scores, each)


def test_mean_pooling_averages_the_shares_of_the_rows(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="mean")
    for why, text in zip(explained(subject), TEXTS, strict=True):
        assert_close(why.scores, shares(model, tokenizer, text)[-1].mean(0))


@pytest.mark.parametrize("examples", [2, 5])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_layers_with_examples_or_rows_first(batch_first, examples):
    """Also where there are as many examples as rows."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()

    def forward(model, x):
        return model(x)[:, 0] if batch_first else model(x.transpose(0, 1))[0]

    subject = regard.module(model, forward, features=list("abcde"), readout="first", output="embedding")
    x = torch.randn(examples, 5, 16, dtype=torch.float64)
    found = regard.explain(subject, x, method="token_mixing", matrix=True)
    for why, one in zip(found, x, strict=True):
        alone = (lambda y: model(y[None])[0]) if batch_first else (lambda y: model(y[:, None])[:, 0])
        norms = jacobian(alone, one).square().sum((1, 3)).sqrt()
        assert_close(why.scores, norms / norms.sum(-1, keepdim=True))


def test_an_example_alone_or_beside_a_longer_one(case):
    subject, _, _ = case
    alone = regard.explain(subject, TEXTS[1], method="token_mixing", per_layer=True, matrix=True)
    assert_close(explained(subject, per_layer=True, matrix=True)[1].scores, alone.scores)


# --- probes ---------------------------------------------------------------------------------------------------------


def test_many_probes_come_near_and_more_come_nearer(case):
    subject, row, expected = case
    gaps = {}
    for probes in (16, 2048):
        found = explained(subject, probes=probes)
        gaps[probes] = max(
            float(np.abs(why.scores - each[-1, row].numpy()).max()) for why, each in zip(found, expected, strict=True)
        )
    largest = max(float(each[-1, row].max()) for each in expected)
    assert gaps[2048] < 0.03 * largest
    assert gaps[2048] < gaps[16] / 3


def test_probes_are_drawn_by_the_seed(case):
    subject, _, _ = case
    one, again, other = (explained(subject, probes=8, seed=seed)[0].scores for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-4
    torch.manual_seed(99)
    np.testing.assert_array_equal(explained(subject, probes=8, seed=3)[0].scores, one)


def test_without_probes_the_seed_changes_nothing(case):
    subject, _, _ = case
    np.testing.assert_array_equal(explained(subject, seed=1)[0].scores, explained(subject, seed=2)[0].scores)


@pytest.mark.parametrize(
    ("probes", "said"),
    [
        (0, "probes=0 must be 1 or more"),
        (-3, "probes=-3 must be 1 or more"),
        (1.5, "probes=1.5 must be a whole number"),
    ],
)
def test_numbers_of_probes_that_are_refused(case, probes, said):
    with pytest.raises(errors.OptionError, match=said):
        explained(case[0], probes=probes)


def test_what_has_no_one_sequence_is_refused(tokenizer):
    with pytest.raises(errors.NotServed, match="token_mixing: hidden token attribution follows one sequence.*Methods"):
        regard.explain(regard.seq2seq(t5(tokenizer), tokenizer), ("so", "it is"), method="token_mixing")
    with pytest.raises(errors.NotServed, match="token_mixing: .*Methods that can: .*raw") as caught:
        regard.explain(regard.pooled(regard.models.toys.decisive()), "so good the", method="token_mixing")
    assert "token_mixing" not in str(caught.value).partition("Methods that can: ")[2]


def test_states_without_their_residual_connection_are_refused():
    """rtdl's FT-Transformer adds it in the loop over its blocks: no call has the state after a layer.

    What its attention modules return is not that state, and gradients to what goes into them miss the residual stream.
    """
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
    for options in ({}, {"per_layer": True}, {"matrix": True}):
        with pytest.raises(errors.NotServed, match="^token_mixing: .*residual connection"):
            regard.explain(subject, inputs, method="token_mixing", **options)


# --- identifiability ------------------------------------------------------------------------------------------------

VOCABULARY = "a moving film dull and it never ends an overlong movie so but in the end was good bad fair old new"
WORDS = VOCABULARY.split()


def texts(count, seed=0):
    """Of four to twelve different words each."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.permutation(WORDS)[: draw.integers(4, 13)]) for _ in range(count)]


def unmixed(tokenizer):
    """A GPT-2 of which neither attention nor perceptrons hand anything on: states stay what they were."""
    model = gpt2(tokenizer)
    for block in model.transformer.h:
        for part in (block.attn.c_proj, block.mlp.c_proj):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    return model


class After(nn.Module):
    """A block, and something that is done to its states."""

    def __init__(self, block, change):
        super().__init__()
        self.block, self.change = block, change

    def forward(self, x, *args, **kwargs):
        return self.change(self.block(x, *args, **kwargs))


def test_a_model_that_does_not_mix_keeps_every_token(tokenizer):
    subject = regard.causal(unmixed(tokenizer), tokenizer)
    found = regard.identifiability(subject, texts(12))
    assert list(found.columns) == ["layer", "recover", "rate", "chance", "tokens"]
    assert list(found["layer"]) == [0, 0, 1, 1, 2, 2]
    assert list(found["recover"]) == ["nearest", "linear"] * 3
    nearest = found[found["recover"] == "nearest"]
    assert (nearest["rate"] == 1).all()
    assert (found["chance"] < 0.25).all()


def test_the_rate_drops_where_tokens_are_destroyed(tokenizer):
    """After the second of three layers states lie on one line: of each example, two tokens at most are nearest to any."""
    model = unmixed(tokenizer)
    model.transformer.h[1] = After(model.transformer.h[1], lambda x: x[..., :1] * torch.linspace(1, 2, 32).to(x))
    subject = regard.causal(model, tokenizer)
    found = regard.identifiability(subject, texts(10), recover=("nearest", "linear", "mlp"), held_out=0.5)
    assert (found["tokens"] > 5 * 6).all()
    for _, row in found.iterrows():
        if row["recover"] == "nearest":
            assert row["rate"] == 1 if row["layer"] == 0 else row["rate"] <= 5 * 2 / row["tokens"]
        elif row["layer"] > 0:
            assert row["rate"] < 0.5


def test_a_map_is_learned_where_states_are_turned(tokenizer):
    """A rotation hides tokens from the nearest neighbour, not from a linear map, on texts that it has not seen."""
    model = unmixed(tokenizer)
    turn = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0]
    model.transformer.h[0] = After(model.transformer.h[0], lambda x: x @ turn)
    found = regard.identifiability(regard.causal(model, tokenizer), texts(40), recover=["nearest", "linear", "mlp"])
    rate = found[found["layer"] == 0].set_index("recover")["rate"]
    assert rate["nearest"] < 0.5
    assert rate["linear"] > 0.95
    assert rate["mlp"] > rate["nearest"]


def literal_rate(model, tokenizer, some, layer):
    """Nearest neighbours by cosine, one token at a time."""
    hits = []
    for text in some:
        x, layers, _ = states_of(model, tokenizer, text)
        with torch.no_grad():
            states = layers(x, layer)[0]
        for place, state in enumerate(states):
            near = [float(state @ one / state.norm() / one.norm()) for one in x[0]]
            hits.append(max(range(len(near)), key=near.__getitem__) == place)
    return float(np.mean(hits)), len(hits)


def test_rates_are_those_of_the_held_out_examples(tokenizer):
    """Which examples these are is told by the number of tokens: no two subsets of these texts have the same."""
    model = gpt2(tokenizer)
    subject = regard.causal(model, tokenizer)
    some = [" ".join(WORDS[:count]) for count in (1, 2, 4, 8, 16)]
    lengths = [len(tokenizer(text)["input_ids"]) for text in some]
    seen = set()
    for seed in range(4):
        found = regard.identifiability(subject, some, held_out=0.4, recover="nearest", seed=seed)
        (tokens,) = set(found["tokens"])
        (chosen,) = [(i, j) for i in range(5) for j in range(i) if lengths[i] + lengths[j] == tokens]
        seen.add(chosen)
        for layer in range(3):
            rate, count = literal_rate(model, tokenizer, [some[i] for i in chosen], layer)
            row = found[found["layer"] == layer].iloc[0]
            assert (row["rate"], row["tokens"]) == (pytest.approx(rate), count)
            assert row["chance"] == pytest.approx(sum(1 for _ in chosen) / tokens)
        assert found.equals(regard.identifiability(subject, some, held_out=0.4, recover="nearest", seed=seed))
    assert len(seen) > 1, "another seed, another split"


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        (["so"], {}, "inputs has 1 examples.*two or more"),
        ([], {}, "inputs has 0 examples"),
        (["so", "it"], {"held_out": 0.0}, "held_out=0.0.*a share in"),
        (["so", "it"], {"held_out": 1.0}, "held_out=1.0"),
        (["so", "it"], {"recover": "magic"}, "recover='magic' is not known. Choose one of 'nearest', 'linear', 'mlp'"),
        (["so", "it"], {"recover": ["nearest", "far"]}, "recover='far' is not known"),
    ],
)
def test_what_is_refused(tokenizer, inputs, options, said):
    with pytest.raises(errors.InputError, match=said):
        regard.identifiability(regard.text(bert(tokenizer), tokenizer), inputs, **options)


def test_subjects_without_one_stream_of_states_are_refused(tokenizer):
    with pytest.raises(errors.NotServed, match="follows one sequence through self-attention"):
        regard.identifiability(regard.pooled(regard.models.toys.decisive()), ["so good", "the awful"])
    with pytest.raises(errors.NotServed):
        regard.identifiability(
            regard.seq2seq(t5(tokenizer), tokenizer), [("a moving film", "so"), ("dull", "so it is")]
        )
