"""Whatever the architecture: every site is seen and told apart, its weights are the model's, the model is untouched."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from architectures import ARCHITECTURES
from test_untouched import assert_same, state_of
from torch import Tensor

import regard

CASES = [(name, side) for name, architecture in ARCHITECTURES.items() for side in architecture.sides]
EAGER = [name for name, architecture in ARCHITECTURES.items() if architecture.package == "transformers"]

pytestmark = [
    # DeBERTa-v2 scripts two functions when its module is imported
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    # nn.TransformerEncoder runs on nested tensors when it is not traced and padded on the right
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def without_padding_rows(weights: Tensor, batch: regard.types.Batch) -> Tensor:
    """Padding rows are 0 by definition. The two sequences of a model differ in length, which tells them apart."""
    for sequence in (batch, batch.source):
        if sequence is not None and sequence.real.shape[1] == weights.shape[2]:
            return weights * sequence.real[:, None, :, None]
    assert weights.shape[2] == 1  # a model that computes the one row it reads
    return weights


def sharpness(weights: Tensor) -> float:
    """How far the weights are from being uniform over the keys that are seen."""
    seen = weights > 0
    return float((weights - weights.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1) * seen).abs().max())


def deviation(trace: regard.Trace, expected: list[tuple[str, Tensor]], batch: regard.types.Batch) -> float:
    """Of all weights from the expected ones; kinds and shapes must be right."""
    assert [site.kind for site in trace.sites] == [kind for kind, _ in expected]
    largest = 0.0
    for site, (_, weights) in zip(trace.sites, expected, strict=True):
        assert site.shape == weights.shape
        weights = without_padding_rows(weights, batch)
        assert sharpness(weights) > 0.1  # nearly uniform weights would prove little
        largest = max(largest, float((site.weights() - weights).abs().max()))
    return largest


@pytest.mark.parametrize(("name", "side"), CASES)
def test_trace_is_exact_and_the_model_untouched(name, side):
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.build(), architecture.inputs(side)
    subject = architecture.subject(model)
    batch = subject.encode(inputs)
    expected = architecture.expected(model, inputs)
    with torch.no_grad():
        plain = subject.forward(batch)
    before = state_of(model)
    t = regard.trace(subject, inputs)
    assert_same(before, state_of(model))
    if t.check.left_fast_path:
        assert architecture.package in ("torch", "pytorch-frame")
        torch.testing.assert_close(t.output, plain, atol=1e-5, rtol=0)
    else:
        assert torch.equal(t.output, plain)
    assert deviation(t, expected, batch) <= 1e-5
    assert t.check.readout == "measured"
    assert {entry.reason for entry in t.ignored} <= {"its result never multiplies values over the axis of the softmax"}


@pytest.mark.parametrize("side", ["left", None])
@pytest.mark.parametrize("name", EAGER)
def test_attention_written_out_by_the_model_is_recognised(name, side):
    """The same models on their eager backend, where nothing but the flow of data shows what is attention."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.build(), architecture.inputs(side if side in architecture.sides else None)
    expected = architecture.expected(model, inputs)
    getattr(model, "_orig_mod", model).set_attn_implementation("eager")
    subject = architecture.subject(model)
    assert deviation(regard.trace(subject, inputs), expected, subject.encode(inputs)) <= 1e-5


def test_the_table_has_what_makes_these_architectures_hard():
    def oracle(name: str) -> list[Tensor]:
        architecture = ARCHITECTURES[name]
        return [weights for _, weights in architecture.expected(architecture.build(), architecture.inputs(None))]

    def keys_of_last_row(name: str) -> list[int]:
        return [int((weights[0, 0, -1] > 0).sum()) for weights in oracle(name)]

    assert keys_of_last_row("Llama") == [9, 9]
    assert keys_of_last_row("Mistral") == [4, 4]  # the window
    for name in ("Gemma-2", "Gemma-3", "GPT-OSS"):
        assert keys_of_last_row(name) == [4, 9, 4, 9]
    assert keys_of_last_row("ModernBERT") == [9, 3, 3, 9]

    def largest_ratio(name: str) -> float:
        weights = torch.stack([weights[:, :, -1, -4:] for weights in oracle(name)])
        return float((weights.amax(-1) / weights.amin(-1)).log().max())

    assert largest_ratio("Gemma-2") <= 2.0001  # scores are within ±1
    assert largest_ratio("Gemma-3") > 3  # without soft-capping
    assert all(
        weights.sum(-1).min() < 0.1 < weights.sum(-1).max() < 1 for weights in oracle("GPT-OSS")
    )  # the sinks take their share


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is there")
def test_the_mock_that_timm_imports_is_gone_afterwards():
    import transformers

    ARCHITECTURES["timm's vision transformer"].build()
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    assert importlib.util.find_spec("torchvision") is None
    assert not transformers.utils.is_torchvision_available()
