"""The states between layers, against Hugging Face's own hidden states, and one block run again with a value missing.

States are compared on real rows, in float64, to 1e-6 of the largest.
"""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES
from literal import assert_near
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import errors
from regard.attention.blocks import block_of, find_blocks, without_value

# where each model has its blocks, and in them what makes the values: (module, columns)
VALUES = {
    "BERT": ("encoder.layer.{}", "attention.self.value", slice(None)),
    "DistilBERT": ("transformer.layer.{}", "attention.v_lin", slice(None)),
    "GPT-2": ("h.{}", "attn.c_attn", slice(64, 96)),
    "Llama": ("layers.{}", "self_attn.v_proj", slice(None)),
    "ALBERT": ("encoder.albert_layer_groups.0", "albert_layers.0.attention.value", slice(None)),
}
FINAL = {"GPT-2": "ln_f", "Llama": "norm"}  # the last of their hidden states has gone through it


class Case:
    """A model in float64, its trace and blocks, and its own hidden states."""

    def __init__(self, name, side):
        torch.manual_seed(0)
        architecture = ARCHITECTURES[name]
        self.name, self.model, self.inputs = name, architecture.build().double(), architecture.inputs(side)
        self.subject = architecture.subject(self.model)
        self.trace = regard.trace(self.subject, self.inputs)
        self.blocks, _ = find_blocks(self.trace)
        self.states = self.hidden_states()

    def hidden_states(self):
        kept = []
        twin = copy.deepcopy(self.model)
        if self.name in FINAL:
            twin.get_submodule(FINAL[self.name]).register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        with torch.no_grad():
            states = list(twin(**self.inputs, output_hidden_states=True).hidden_states)
        return states[:-1] + kept if kept else states


@pytest.fixture(scope="module", params=[(name, side) for name in VALUES for side in ("left", "right", None)], ids=str)
def case(request):
    return Case(*request.param)


def test_states_before_and_after_are_the_models_own_hidden_states(case):
    real = case.trace.real
    assert sorted(case.blocks) == [0, 1]
    for layer, block in case.blocks.items():
        assert_near(block.before[real], case.states[layer][real])
        assert_near(block.after[real], case.states[layer + 1][real])
        assert block_of(case.trace, case.blocks, case.trace.sites[layer]) is block


def test_a_block_run_again_gives_the_same(case):
    for block in find_blocks(case.trace)[0].values():  # a cache that it was given changes as it is run
        with torch.no_grad():
            again = block.again()
        assert_near((again[0] if isinstance(again, tuple) else again)[case.trace.real], block.after[case.trace.real])


def test_a_missing_value_is_a_row_of_zeros_in_the_value_projection(case):
    """In one call of the block; ALBERT has one module for all layers."""
    path, place, columns = VALUES[case.name]
    real = case.trace.real
    for layer in (0, 1):
        for key in (0, 4, 8):
            twin = copy.deepcopy(case.model)
            block = twin.get_submodule(path.format(layer))
            calls, kept = [], []

            def zeroed(_, __, output, layer=layer, key=key, calls=calls):
                calls.append(1)
                if case.name != "ALBERT" or len(calls) == layer + 1:
                    output = output.clone()
                    output[:, key, columns] = 0
                return output

            block.get_submodule(place).register_forward_hook(zeroed)
            block.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output))
            with torch.no_grad():
                twin(**case.inputs)
            expected = kept[layer if case.name == "ALBERT" else 0]
            expected = expected[0] if isinstance(expected, tuple) else expected
            found = without_value(case.trace, case.blocks[layer], case.trace.sites[layer], key)
            assert_near(found[real], expected[real])


def test_the_leaf_is_what_goes_into_the_first_block(case):
    blocks, leaf = find_blocks(case.trace, leaf=case.blocks[0].call)
    assert_near(leaf[case.trace.real], case.states[0][case.trace.real])
    assert (leaf.requires_grad, leaf.is_leaf) == (True, True)
    (gradient,) = torch.autograd.grad((blocks[1].after[:, -1] * torch.linspace(0, 1, 32)).sum(), [leaf])
    assert float(gradient.abs().max()) > 1e-3
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_the_model_is_afterwards_as_it_was(case):
    before = copy.deepcopy(case.model.state_dict())
    find_blocks(case.trace, leaf=case.blocks[0].call)
    without_value(case.trace, case.blocks[1], case.trace.sites[1], 3)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all("forward" not in vars(module) for module in case.model.modules())
    assert not torch.is_grad_enabled() or torch.zeros(1, requires_grad=True).add(1).requires_grad


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [2, 4])
@pytest.mark.parametrize("batch_first", [True, False])
def test_examples_or_rows_first(batch_first, examples):
    """States are (example, row, channel) in both layouts, also where there are as many examples as rows."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()

    def forward(model, x):
        return model(x)[:, 0] if batch_first else model(x.transpose(0, 1))[0]

    subject = regard.module(model, forward, features=list("abcd"), readout="first", output="embedding")
    x = torch.randn(examples, 4, 16, dtype=torch.float64)
    blocks, _ = find_blocks(regard.trace(subject, x))
    states = [x]
    for part in model.layers:
        went_in = states[-1] if batch_first else states[-1].transpose(0, 1)
        came_out = part(went_in)
        states.append(came_out if batch_first else came_out.transpose(0, 1))
    for number in (0, 1):
        assert_near(blocks[number].before, states[number])
        assert_near(blocks[number].after, states[number + 1])


def test_each_attention_of_a_decoder_has_a_block_of_its_own():
    """T5: the halves of a decoder's layer, with the residual connection in each; an encoder's layer is whole."""
    architecture = ARCHITECTURES["T5"]
    model = architecture.build().double()
    inputs = architecture.inputs("right")
    trace = regard.trace(architecture.subject(model), inputs)
    blocks, _ = find_blocks(trace)
    kept = []
    places = [*model.encoder.block, *(part for block in model.decoder.block for part in block.layer[:2])]
    for module in places:
        module.register_forward_hook(
            lambda _, __, output: kept.append(output[0] if isinstance(output, tuple) else output)
        )
    with torch.no_grad():
        model(**inputs)
    assert sorted(blocks) == list(range(6))
    for site, expected in zip(trace.sites, kept, strict=True):
        assert_near(blocks[site.index].after[site.real], expected[site.real])


# --- what is refused ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, residual):
        super().__init__()
        self.qkv, self.out, self.residual = nn.Linear(16, 48), nn.Linear(16, 16), residual

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + mixed if self.residual else mixed


class Model(nn.Module):
    """The residual connection is inside of the attention's module, or outside of any but the model itself."""

    def __init__(self, residual):
        super().__init__()
        self.layers = nn.ModuleList([Attention(residual), Attention(residual)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if layer.residual else x + layer(x)
        return x.mean(1)


def handmade(residual):
    torch.manual_seed(2)
    model = Model(residual).double().eval()
    subject = regard.module(
        model, lambda model, x: model(x), features=list("abcde"), readout="mean", output="embedding"
    )
    trace = regard.trace(subject, torch.randn(3, 5, 16, dtype=torch.float64))
    return trace, find_blocks(trace)[0]


def test_a_block_must_hold_the_residual_connection():
    trace, blocks = handmade(True)
    for site in trace.sites:
        assert block_of(trace, blocks, site) is blocks[site.index]
    trace, blocks = handmade(False)
    for site in trace.sites:
        with pytest.raises(
            errors.NotServed, match=f"residual connection around site {site.index} .*is in no submodule"
        ):
            block_of(trace, blocks, site)


def test_a_model_that_is_one_module_has_no_blocks():
    torch.manual_seed(2)
    model = Attention(True).double().eval()
    subject = regard.module(
        model, lambda model, x: model(x).mean(1), features=list("abcde"), readout="mean", output="embedding"
    )
    trace = regard.trace(subject, torch.randn(3, 5, 16, dtype=torch.float64))
    blocks, _ = find_blocks(trace)
    assert blocks == {}
    with pytest.raises(errors.NotServed, match="no submodule holds site 0 .*together with its residual connection"):
        block_of(trace, blocks, trace.sites[0])
