"""Importance of heads: autograd of the loss by a gate on each head, written out, in float64, one text at a time."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn import functional as F

import regard
from regard import errors
from regard.data import Dataset, Example
from regard.probes.importance import importance

sys.path.insert(0, str(Path(__file__).parents[1] / "methods"))
from oracles import SMALL, bert, encoded, llama, seeded

TEXTS = ["a moving film", "dull, and it never ends: an unbelievably overlong film", "so it is", "no"]
HEADS, SIZE = 4, 8


def projections(model):
    """What takes the heads of each layer, side by side."""
    names = ("attention.output.dense", "self_attn.o_proj")
    return [module for name, module in model.named_modules() if name.endswith(names)]


@contextmanager
def gated(model):
    """Gates of 1, ``(layer, head)``, on what each head hands on."""
    modules = projections(model)
    gates = torch.ones(len(modules), HEADS, dtype=torch.float64, requires_grad=True)
    hooks = [
        module.register_forward_pre_hook(lambda _, args, gate=gate: (args[0] * gate.repeat_interleave(SIZE),))
        for module, gate in zip(modules, gates, strict=True)
    ]
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()


def literal(model, losses):
    """I_h = E|∂L/∂ξ_h|, of length 1 in each layer; ``losses`` gives that of each example in turn."""
    slopes = []
    for loss in losses:
        with gated(model) as gates:
            slopes.append(torch.autograd.grad(loss(), gates)[0].abs())
    mean = torch.stack(slopes).mean(0)
    return (mean / mean.norm(dim=1, keepdim=True)).flatten().numpy()


def must_agree(subject, data, wanted, about):
    found = regard.heads(subject, data, probes="importance", draws=5)["importance"]
    assert found.about == f"gate gradient, of length 1 in each layer ({about})"
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(found.values["value"], wanted, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.values.groupby("layer")["value"].apply(lambda x: (x**2).sum()), 1)


@pytest.mark.parametrize("named", [True, False])
def test_of_a_classifier_by_its_labels(tokenizer, named):
    model, labels = bert(tokenizer), [2, 0, 1, 1]
    wanted = literal(model, [
        lambda text=text, label=label: F.cross_entropy(model(**encoded(tokenizer, text)).logits, torch.tensor([label]))
        for text, label in zip(TEXTS, labels, strict=True)
    ])  # fmt: skip
    data = Dataset.of([Example(x, f"LABEL_{y}" if named else y) for x, y in zip(TEXTS, labels, strict=True)])
    must_agree(regard.text(model, tokenizer), data, wanted, "cross-entropy of the labels")


def test_of_a_classifier_without_labels_by_what_it_says(tokenizer):
    model = bert(tokenizer)
    wanted = literal(
        model,
        [lambda text=text: -model(**encoded(tokenizer, text)).logits.log_softmax(-1).max() for text in TEXTS],
    )
    must_agree(regard.text(model, tokenizer), TEXTS, wanted, "−log p of what is predicted")


def test_of_a_regression_by_its_squared_error(tokenizer):
    options, labels = SMALL | {"vocab_size": len(tokenizer), "num_labels": 1}, [0.3, -2.5, 1, 4]
    model = seeded(lambda: hf.BertForSequenceClassification(hf.BertConfig(**options, problem_type="regression")))
    wanted = literal(model, [
        lambda text=text, label=label: (model(**encoded(tokenizer, text)).logits[0, 0] - label) ** 2
        for text, label in zip(TEXTS, labels, strict=True)
    ])  # fmt: skip
    data = Dataset.of([Example(text, label) for text, label in zip(TEXTS, labels, strict=True)])
    must_agree(regard.text(model, tokenizer), data, wanted, "squared error")


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_language_model_by_its_whole_text(tokenizer, side):
    model = llama(tokenizer)

    def loss(text):
        ids = encoded(tokenizer, text)["input_ids"]
        logits = model(input_ids=ids).logits[0]
        return torch.stack([-logits[row].log_softmax(-1)[ids[0, row + 1]] for row in range(ids.shape[1] - 1)]).mean()

    wanted = literal(model, [lambda text=text: loss(text) for text in TEXTS])
    subject = regard.causal(model, tokenizer, padding_side=side)
    must_agree(subject, TEXTS, wanted, "−log p of a token, mean over the text")


def test_of_a_target_that_was_named(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    wanted = literal(
        model, [lambda text=text: model(**encoded(tokenizer, text)).last_hidden_state[0, 0, 3] for text in TEXTS]
    )
    subject = regard.text(model, tokenizer, readout="first")
    found = regard.heads(subject, TEXTS, probes="importance", target=lambda output: output[:, 3], draws=5)["importance"]
    np.testing.assert_allclose(found.values["value"], wanted, rtol=0, atol=1e-9)


def test_the_only_head_that_is_heard_is_the_only_one_that_matters(tokenizer):
    """What the others hand on is multiplied by 0 in the output projection."""
    model, heard = bert(tokenizer), [2, 0, 3]
    for module, head in zip(projections(model), heard, strict=True):
        kept = torch.zeros(HEADS, dtype=torch.float64).index_fill(0, torch.tensor(head), 1).repeat_interleave(SIZE)
        module.weight.data *= kept
    found = regard.heads(regard.text(model, tokenizer), TEXTS, probes="importance", draws=5)["importance"]
    grid = found.values.pivot(index="layer", columns="head", values="value").to_numpy()
    np.testing.assert_array_equal(grid, np.eye(HEADS)[heard])


def test_layers_that_are_not_heard_at_all_are_0_and_not_undefined(tokenizer):
    model = bert(tokenizer)
    projections(model)[1].weight.data.zero_()
    found = regard.heads(regard.text(model, tokenizer), TEXTS, probes="importance", draws=5)["importance"]
    of_layer = found.values.groupby("layer")["value"].apply(lambda x: (x**2).sum())
    np.testing.assert_allclose(of_layer, [1, 0, 1])


def test_a_trace_without_gradients_is_refused(tokenizer):
    trace = regard.trace(regard.text(bert(tokenizer), tokenizer), TEXTS)
    with pytest.raises(errors.NoGradient, match="trace with gradients=True"):
        importance(trace, trace.sites[0])
