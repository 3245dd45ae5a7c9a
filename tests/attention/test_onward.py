"""What becomes of a site's result: the output projection, the residual and the norm, against the modules themselves.

The projection is the weight of a module that is named here, the residual what a hook says goes into the block, the norm
the module that the sum goes through. Models run in float64, in batches of three; numbers agree to 1e-6 of the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from literal import assert_near
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard


@dataclass(frozen=True)
class Place:
    """Where a model has its parts, by the number of the layer."""

    block: str
    projection: str
    norm: str | None  # of the sum; None: the block is pre-norm
    weight: Callable[[Any], torch.Tensor] = lambda module: module.weight.T  # (input, output)


PLACES = {
    "BERT": Place("encoder.layer.{}", "attention.output.dense", "attention.output.LayerNorm"),
    "RoBERTa": Place("encoder.layer.{}", "attention.output.dense", "attention.output.LayerNorm"),
    "DistilBERT": Place("transformer.layer.{}", "attention.out_lin", "sa_layer_norm"),
    "GPT-2": Place("h.{}", "attn.c_proj", None, lambda module: module.weight),
    "Llama": Place("layers.{}", "self_attn.o_proj", None),
    "GPT-NeoX": Place("layers.{}", "attention.dense", None),
    "Phi": Place("layers.{}", "self_attn.dense", None),
    "ViT": Place("layers.{}", "attention.o_proj", None),
    "nn.TransformerEncoder": Place("layers.{}", "self_attn.out_proj", "norm1"),
    "nn.TransformerEncoder, rows first": Place("layers.{}", "self_attn.out_proj", "norm1"),
    "nn.TransformerEncoder, norm_first": Place("layers.{}", "self_attn.out_proj", None),
}
CASES = [(name, side) for name in PLACES for side in ARCHITECTURES[name].sides]


class Case:
    """A model in float64 with its inputs, what regard saw, and what hooks see."""

    def __init__(self, name, side):
        torch.manual_seed(0)
        architecture, self.place = ARCHITECTURES[name], PLACES[name]
        self.model = architecture.build().double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() == 1:  # a norm's weights are not all 1, nor are biases 0
                    parameter += 0.3 * torch.randn_like(parameter)
        self.inputs = {
            name: x.double() if x.is_floating_point() else x for name, x in architecture.inputs(side).items()
        }
        subject = architecture.subject(self.model)
        self.trace = regard.trace(subject, self.inputs, onward=True)
        self.before, self.sums = self.seen(subject, name)

    def part(self, layer, path):
        block = self.model.get_submodule(self.place.block.format(layer))
        return block.get_submodule(path)

    def seen(self, subject, name):
        """What goes into each block, and into the norm of each sum: ``(example, row, channel)``."""
        before, sums, hooks = [], [], []

        def examples_first(x):
            return (x.transpose(0, 1) if "rows first" in name else x).detach()

        def enter(_, args, kwargs):
            before.append(examples_first(args[0] if args else kwargs["hidden_states"]))

        for layer in range(2):
            hooks.append(self.part(layer, "").register_forward_pre_hook(enter, with_kwargs=True))
            if self.place.norm is not None:
                norm = self.part(layer, self.place.norm)
                hooks.append(norm.register_forward_pre_hook(lambda _, args: sums.append(examples_first(args[0]))))
        subject.forward(subject.encode(self.inputs))
        for hook in hooks:
            hook.remove()
        return before, sums


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, padding {case[1]}")
def case(request):
    return Case(*request.param)


def test_the_projection_of_each_head_is_a_part_of_the_modules_weight(case):
    for layer, site in enumerate(case.trace.sites):
        weight = case.place.weight(case.part(layer, case.place.projection))
        assert_near(site.onward.projection.flatten(0, 1), weight)
        assert site.onward.projection.shape[:2] == (site.heads, site.values.shape[-1])


def test_the_residual_is_what_went_into_the_block(case):
    for layer, site in enumerate(case.trace.sites):
        assert_near(site.onward.residual[site.real], case.before[layer][site.real])


def test_the_norm_is_that_of_the_sum_and_a_pre_norm_block_has_none(case):
    for layer, site in enumerate(case.trace.sites):
        if case.place.norm is None:
            known = site.onward.norm is not None
            assert not known, f"layer {layer} is not followed by a norm of its own"
            continue
        module = case.part(layer, case.place.norm)
        weight, epsilon = site.onward.norm
        assert_near(weight, module.weight)
        assert epsilon == module.eps
        assert_near(site.onward.total[site.real], case.sums[layer][site.real])


def test_nothing_is_followed_unless_it_is_asked_for():
    architecture = ARCHITECTURES["BERT"]
    found = regard.trace(architecture.subject(architecture.build()), architecture.inputs("right"))
    assert all(site.onward is None for site in found.sites)


# --- what stands in between -----------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention of two heads, in which something stands on the way to the sum."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.qkv, self.gate, self.out = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.other = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        what = self.what
        inside = self.norm(x) if "pre-norm" in what else x
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(inside).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v)  # example head row channel
        mixed = mixed.permute(0, 2, 3, 1) if what == "channels before heads" else mixed.transpose(1, 2)
        mixed = mixed.flatten(2)
        if what == "gated":
            mixed = mixed * self.gate(x).sigmoid()
        elif what == "gated in place":
            mixed.mul_(self.gate(x).sigmoid())
        elif what == "normed":
            mixed = self.norm(mixed)
        elif what == "halved":
            mixed = mixed / 2
        elif what == "with something added":
            mixed = mixed + self.gate(x)
        projected = mixed if what == "not projected" else self.out(mixed)
        if what == "gated after it":
            projected = projected * self.gate(x).sigmoid()
        elif what == "scaled as it is added":
            return torch.add(x, projected, alpha=0.5)
        elif what == "subtracted":
            return x - projected
        elif what == "not added":
            return projected
        return self.norm(x + projected) if "post-norm" in what else x + projected


class Stack(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.layers = nn.ModuleList([Layer(what), Layer(what)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


def stacked(what):
    torch.manual_seed(1)
    model = Stack(what).double().eval()
    subject = regard.module(
        model, lambda model, x: model(x), features=list("abcde"), readout="mean", output="embedding"
    )
    kept = []
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach().clone()))
    model(x)
    return model, kept, regard.trace(subject, x, onward=True)


@pytest.mark.parametrize(
    "what",
    [
        "gated", "gated in place", "normed", "halved", "with something added", "channels before heads",
        "not projected",
    ],
)  # fmt: skip
def test_nothing_is_known_where_something_stands_before_the_projection(what):
    _, _, found = stacked(what)
    assert [site.onward for site in found.sites] == [None, None]


@pytest.mark.parametrize("what", ["gated after it", "scaled as it is added", "subtracted", "not added"])
def test_no_residual_is_known_where_something_stands_before_the_sum(what):
    model, _, found = stacked(what)
    for layer, site in zip(model.layers, found.sites, strict=True):
        assert_near(site.onward.projection.flatten(0, 1), layer.out.weight.T)
        known = (site.onward.residual is not None, site.onward.norm is not None)
        assert known == (False, False)


@pytest.mark.parametrize("name", ["Gemma-2", "Gemma-3"])
def test_gemma_has_a_norm_between_projection_and_residual(name):
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    found = regard.trace(architecture.subject(model), architecture.inputs("right"), onward=True)
    for number, site in enumerate(found.sites):
        assert_near(site.onward.projection.flatten(0, 1), model.layers[number].self_attn.o_proj.weight.T)
        known = (site.onward.residual is not None, site.onward.norm is not None)
        assert known == (False, False)


@pytest.mark.parametrize("what", ["pre-norm", "post-norm", "neither"])
def test_layers_of_attention_alone(what):
    """Where no perceptron comes in between, the sum of one layer is the residual of the next."""
    model, before, found = stacked(what)
    for number, (layer, site) in enumerate(zip(model.layers, found.sites, strict=True)):
        assert_near(site.onward.projection.flatten(0, 1), layer.out.weight.T)
        known = site.onward.residual is not None
        assert known, f"layer {number}"
        assert_near(site.onward.residual, before[number])
        assert (site.onward.norm is not None) == (what == "post-norm")
