"""Where queries, keys and values come from, against the modules themselves: weights, biases, norms, and what was run.

Models run in float64, in batches of three; numbers agree to 1e-6 of the largest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from literal import assert_near
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard.models import toys


def separate(*names):
    """Three modules, one map each."""
    return lambda block: [(block.get_submodule(name).weight, block.get_submodule(name).bias) for name in names]


def in_proj(block):
    one = block.self_attn
    return list(zip(one.in_proj_weight.chunk(3), one.in_proj_bias.chunk(3), strict=True))


def conv1d(block):
    one = block.attn.c_attn
    return list(zip(one.weight.T.chunk(3), one.bias.chunk(3), strict=True))


# name → block, norm before the maps, query, key and value
PLACES: dict[str, Any] = {
    "BERT": ("encoder.layer.{}", None, separate(*(f"attention.self.{part}" for part in ("query", "key", "value")))),
    "DistilBERT": ("transformer.layer.{}", None, separate("attention.q_lin", "attention.k_lin", "attention.v_lin")),
    "GPT-2": ("h.{}", "ln_1", conv1d),
    "ViT": ("layers.{}", "layernorm_before", separate(*(f"attention.{part}_proj" for part in "qkv"))),
    "nn.TransformerEncoder": ("layers.{}", None, in_proj),
    "nn.TransformerEncoder, norm_first": ("layers.{}", "norm1", in_proj),
    "nn.TransformerEncoder, rows first": ("layers.{}", None, in_proj),
    "rtdl's FTTransformer": ("backbone.blocks.{}", "attention_normalization", separate(*(f"attention.W_{part}" for part in "qkv"))),
}  # fmt: skip
ROTARY = ["Llama", "Mistral", "GPT-NeoX", "Phi", "Gemma-2", "GPT-OSS", "ModernBERT"]
CASES = [(name, side) for name in PLACES for side in ARCHITECTURES[name].sides]


def traced(name, side, dtype=torch.float64):
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model = architecture.build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # a norm's weights are not all 1, nor are biases 0
                parameter += 0.3 * torch.randn_like(parameter)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in architecture.inputs(side).items()}
    return model, regard.trace(architecture.subject(model), inputs, inward=True)


@pytest.mark.parametrize(("name", "side"), CASES)
def test_each_head_has_its_part_of_the_modules_weights(name, side):
    model, seen = traced(name, side)
    block, norm, maps = PLACES[name]
    for layer, site in enumerate(seen.sites):
        module = model.get_submodule(block.format(layer))
        assert not site.inward.why
        for part, (weight, bias) in zip(("query", "key", "value"), maps(module), strict=True):
            found = getattr(site.inward, part)
            assert found.weight.shape[:2] == (site.heads, weight.shape[0] // site.heads)
            assert_near(found.weight.flatten(0, 1), weight)
            assert_near(found.bias.flatten(), bias)
            if norm is not None and hasattr(module, norm):
                assert_near(found.norm.weight, module.get_submodule(norm).weight)
                assert found.norm.centred


@pytest.mark.parametrize("name", ROTARY)
def test_what_was_rotated_is_no_linear_map_and_says_so(name):
    _, seen = traced(name, None, torch.float32)  # the experts of GPT-OSS have no float64
    for site in seen.sites:
        assert site.inward.query is None
        assert site.inward.key is None
        assert "rotary" in site.inward.why["query"]
        assert "rotary" in site.inward.why["key"]
        assert site.inward.value is not None


@pytest.mark.parametrize("side", ["left", "right"])
def test_heads_that_share_their_values_have_the_same_map(side):
    model, seen = traced("Llama", side)
    for layer, site in enumerate(seen.sites):
        block = model.layers[layer]
        expected = block.self_attn.v_proj.weight.unflatten(0, (2, -1)).repeat_interleave(2, 0)
        found = site.inward.value
        assert_near(found.weight, expected)
        assert found.bias is None
        assert_near(found.norm.weight, block.input_layernorm.weight)
        assert not found.norm.centred
        assert site.onward is not None


def test_as_many_examples_as_heads_that_share_their_values():
    """Which axis is examples is told by the values, of which there are fewer."""
    torch.manual_seed(0)
    model = ARCHITECTURES["Llama"].build()
    subject, ids = ARCHITECTURES["Llama"].subject(model), torch.randint(3, 50, (4, 9))
    found = regard.trace(subject, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).sites[0].weights()
    one = {"input_ids": ids[1:2], "attention_mask": torch.ones_like(ids[1:2])}
    torch.testing.assert_close(found[1:2], regard.trace(subject, one).sites[0].weights())


def test_gemma_adds_one_to_the_weight_of_its_norm():
    model, seen = traced("Gemma-2", None)
    assert_near(seen.sites[0].inward.value.norm.weight, 1 + model.layers[0].input_layernorm.weight)


def test_both_streams_of_an_encoder_decoder():
    model, seen = traced("T5", None)
    cross = [site for site in seen.sites if site.kind == "cross"]
    assert len(cross) == 2
    for layer, site in enumerate(cross):
        module = model.decoder.block[layer].layer[1].EncDecAttention
        for part, name in (("query", "q"), ("key", "k"), ("value", "v")):
            assert_near(getattr(site.inward, part).weight.flatten(0, 1), module.get_submodule(name).weight)
        assert_near(site.inward.key.norm.weight, model.encoder.final_layer_norm.weight)


def test_the_wired_induction_model():
    model = toys.induction()
    subject = regard.module(model, lambda m, x: m(x)[:, -1], features=[*"abcdef"], readout="last")
    seen = regard.trace(subject, torch.randint(16, (2, 6)), inward=True)
    for site, layer in zip(seen.sites, model.layers, strict=True):
        for part in ("query", "key", "value"):
            assert torch.equal(getattr(site.inward, part).weight.flatten(0, 1), getattr(layer, part))
        assert torch.equal(site.onward.projection.flatten(0, 1), layer.out)
        assert site.inward.value.norm is None


def test_a_real_model_whose_queries_are_grouped_and_rotated(smollm):
    site = regard.trace(smollm, ["The capital of France is", "so"], inward=True).sites[3]
    layer = smollm.model.model.layers[3]
    assert torch.equal(site.inward.value.weight[::3].flatten(0, 1), layer.self_attn.v_proj.weight)
    assert set(site.inward.why) == {"query", "key"}


def test_a_norm_folds_into_the_map():
    """W LN(x) σ = (W γ P) x up to what does not depend on x, P taking the mean away."""
    _, seen = traced("GPT-2", None)
    found = seen.sites[0].inward.value
    x = torch.randn(32, dtype=torch.float64)
    normed = (x - x.mean()) * found.norm.weight
    assert_near(found.folded @ x, found.weight @ normed)


def test_nothing_is_followed_unless_it_is_asked_for():
    architecture = ARCHITECTURES["BERT"]
    found = regard.trace(architecture.subject(architecture.build()), architecture.inputs("right"), onward=True)
    assert all(site.inward is None for site in found.sites)


# --- what stands in between -----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention of two heads, in which something is done to the values, or to how they are made."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.qk, self.v, self.out = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.table = nn.Parameter(torch.randn(16, 2, 8))

    def heads(self, x):
        return x.unflatten(-1, (2, -1)).transpose(1, 2)

    def forward(self, x):
        what = self.what
        q, k = self.qk(x).chunk(2, -1)
        v = self.v(x)
        if what == "normed":
            v = self.norm(v)
        elif what == "shifted":
            v = v.roll(1, 1)
        elif what == "added to":
            v = v + x
        elif what == "written into":
            v *= 0.5
            v[:, 2] = 0.0
        elif what == "half of it":
            v = v * 0.5
        elif what == "divided in place":
            v /= 4
        elif what == "two maps":
            v = self.out(torch.tanh(v))
        heads = [self.heads(one) for one in (q, k, v)]
        if what == "an einsum":
            heads[2] = torch.einsum("erd,dhc->ehrc", x, self.table)
        elif what == "channels reversed":
            heads[2] = self.heads(v.view(*v.shape[:2], 8, 2).transpose(-1, -2).reshape(v.shape))
        return self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def layered(what):
    torch.manual_seed(1)
    model = Layer(what).double().eval()
    subject = regard.module(model, lambda m, x: m(x).mean(1), features=[*"abcde"], readout="mean", output="embedding")
    (site,) = regard.trace(subject, torch.randn(3, 5, 16, dtype=torch.float64), inward=True).sites
    assert_near(site.inward.query.weight.flatten(0, 1), model.qk.weight[:16])
    assert_near(site.inward.key.bias.flatten(), model.qk.bias[16:])
    return model, site.inward


@pytest.mark.parametrize(
    ("what", "why"),
    [("normed", "layer_norm"), ("shifted", "roll"), ("added to", "add"), ("written into", "reproduce"),
     ("an einsum", "no linear map")],
)  # fmt: skip
def test_nothing_is_known_of_values_that_something_else_was_done_to(what, why):
    _, inward = layered(what)
    assert inward.value is None
    assert why in inward.why["value"]


@pytest.mark.parametrize(("what", "factor"), [("plain", 1), ("half of it", 0.5), ("divided in place", 0.25)])
def test_a_factor_belongs_to_the_map(what, factor):
    model, inward = layered(what)
    assert_near(inward.value.weight.flatten(0, 1), factor * model.v.weight)
    assert_near(inward.value.bias.flatten(), factor * model.v.bias)


def test_the_last_of_several_maps_is_meant():
    model, inward = layered("two maps")
    assert_near(inward.value.weight.flatten(0, 1), model.out.weight)


def test_channels_may_stand_in_any_order():
    model, inward = layered("channels reversed")
    order = torch.arange(16).view(8, 2).T.reshape(2, 8)
    assert_near(inward.value.weight, model.v.weight[order])


class WrittenOut(nn.Module):
    """Scores and sums that the model writes out itself."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (2, -1)) for one in (self.q, self.k, self.v))  # example row head channel
        if self.how == "einsum":
            weights = (torch.einsum("eqhc,ekhc->ehqk", q, k) / 3).softmax(-1)
            return torch.einsum("ehqk,ekhc->eqhc", weights, v).flatten(2)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        weights = (q @ k.mT / 3).softmax(-1)
        if self.how == "matmul":
            return (weights @ v).transpose(1, 2).flatten(2)
        return (weights[..., None] * v[:, :, None]).sum(-2).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["einsum", "matmul", "sum"])
def test_attention_that_is_written_out(how):
    torch.manual_seed(2)
    model = WrittenOut(how).double().eval()
    subject = regard.module(model, lambda m, x: m(x).mean(1), features=[*"abcde"], readout="mean", output="embedding")
    (site,) = regard.trace(subject, torch.randn(3, 5, 16, dtype=torch.float64), inward=True).sites
    for part in ("query", "key", "value"):
        if how == "sum" and part == "value":
            assert "summed" in site.inward.why[part]
            continue
        found = getattr(site.inward, part)
        assert_near(found.weight.flatten(0, 1), getattr(model, part[0]).weight)
        assert_near(found.bias.flatten(), getattr(model, part[0]).bias)
