"""The verb heads: means and intervals against literal loops, the loss that importance is about, and bad input."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard import errors, surveying
from regard.data import Dataset, Example
from regard.glimpses import Sums, copies, loss_of

sys.path.insert(0, str(Path(__file__).parent / "methods"))
from oracles import bert, llama

TEXTS = ["a moving film, and dull .", "so so", "dull, and it never ends!", "it is so", "a film"]


@pytest.fixture(scope="module")
def subject(tokenizer):
    return regard.text(bert(tokenizer), tokenizer)


def test_means_and_intervals_are_a_literal_poisson_bootstrap(subject):
    draws, seed = 30, 4
    done = regard.heads(subject, TEXTS, probes=["entropy"], draws=draws, seed=seed, examples=None, batch_size=2)
    singles = np.stack(
        [regard.heads(subject, [text], probes=["entropy"], draws=1)["entropy"].values["value"] for text in TEXTS]
    )  # example head
    np.testing.assert_allclose(done["entropy"].values["value"], singles.mean(0), rtol=1e-9)
    lots = [np.random.default_rng((seed, place)).poisson(1.0, draws) for place in range(len(TEXTS))]
    again = []
    for draw in range(draws):
        repeated = [one for one, lot in zip(singles, lots, strict=True) for _ in range(lot[draw])]
        again.append(np.mean(repeated if repeated else singles, axis=0))
    low, high = np.quantile(again, [0.025, 0.975], axis=0)
    np.testing.assert_allclose(done["entropy"].values["low"], low, rtol=1e-9)
    np.testing.assert_allclose(done["entropy"].values["high"], high, rtol=1e-9)
    assert (high > low).all()


def test_sums_leave_out_what_is_not_defined():
    values = np.array([[1.0, np.nan], [3.0, np.nan], [np.nan, np.nan]])
    sums = Sums()
    for places in ([2], [0, 1]):
        sums.add(values[places], copies(places, 6, 0))
    found = sums.means()
    assert found[0, 0] == 2
    assert np.isnan(found[:, 1]).all()
    assert np.isfinite(found[:, 0]).all(), "a draw without any is all of them"


def test_the_order_of_examples_does_not_change_means(subject):
    probes = ["entropy", "distance", "positional", "importance"]
    one, other = (regard.heads(subject, some, probes=probes, examples=None) for some in (TEXTS, TEXTS[::-1]))
    for probe in probes:
        np.testing.assert_allclose(one[probe].values["value"], other[probe].values["value"], rtol=0, atol=1e-12)


def test_one_trace_is_alive_at_a_time(subject, monkeypatch):
    alive, most = weakref.WeakSet(), []
    plain = surveying.trace

    def counting(*args, **options):
        gc.collect()
        most.append(len(alive))
        made = plain(*args, **options)
        alive.add(made)
        return made

    monkeypatch.setattr(surveying, "trace", counting)
    regard.heads(subject, TEXTS, probes=["entropy", "importance"], batch_size=1, examples=None)
    assert len(most) == 1 + len(TEXTS)
    assert max(most) <= 1  # the first, which tells what heads there are, may still be there; none adds up


def gates(model, inputs, loss):
    """|∂loss/∂ξ| ``(layer, head)`` by a factor on what each head hands to its output projection; one text alone."""
    blocks = getattr(model, "bert", None)
    places = [layer.attention.output.dense for layer in blocks.encoder.layer] if blocks else [
        layer.self_attn.o_proj for layer in model.model.layers
    ]  # fmt: skip
    heads, factors, hooks = model.config.num_attention_heads, [], []
    for place in places:
        factor = torch.ones(heads, dtype=torch.float64, requires_grad=True)
        factors.append(factor)

        def gated(_, args, factor=factor):
            x = args[0]
            return ((x.unflatten(-1, (heads, -1)) * factor[:, None]).flatten(-2), *args[1:])

        hooks.append(place.register_forward_pre_hook(gated))
    try:
        found = torch.autograd.grad(loss(model(**inputs).logits), factors)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found).abs().numpy()


def normed(means):
    return (means / np.sqrt((means**2).sum(1, keepdims=True))).ravel()


def test_importance_is_the_gate_gradient_of_the_cross_entropy_of_labels(subject, tokenizer):
    labels = [2, 0, 1, 2, 1]
    data = Dataset.of([Example(text, label) for text, label in zip(TEXTS, labels, strict=True)])
    means = np.mean([
        gates(subject.model, dict(tokenizer(text, return_tensors="pt")),
              lambda logits, label=label: torch.nn.functional.cross_entropy(logits, torch.tensor([label])))
        for text, label in zip(TEXTS, labels, strict=True)
    ], axis=0)  # fmt: skip
    found = regard.heads(subject, data, probes=["importance"], draws=3)["importance"]
    np.testing.assert_allclose(found.values["value"], normed(means), rtol=1e-7)
    assert "cross-entropy" in found.about


@pytest.mark.parametrize("side", ["left", "right"])
def test_language_models_lose_what_each_token_of_the_text_costs(tokenizer, side):
    model = llama(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    loss = loss_of(subject, [Example(text) for text in TEXTS])
    batch = loss.subject.encode(TEXTS)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]

    def literal(logits, said):
        return -sum(logits[0, at].log_softmax(-1)[said[at + 1]] for at in range(len(said) - 1)) / (len(said) - 1)

    with torch.no_grad():
        wanted = [literal(model(torch.tensor([said])).logits, said) for said in ids]
        values = loss.values(loss.subject.forward(batch), [Example(text) for text in TEXTS])
    np.testing.assert_allclose(values, wanted, rtol=1e-9)
    means = np.mean([
        gates(model, {"input_ids": torch.tensor([said])}, lambda logits, said=said: literal(logits, said)) for said in ids
    ], axis=0)  # fmt: skip
    found = regard.heads(subject, TEXTS, probes=["importance"], draws=3)["importance"]
    np.testing.assert_allclose(found.values["value"], normed(means), rtol=1e-6)


def test_regression_loses_the_squared_error(tokenizer):
    model = bert(tokenizer)
    model.classifier = torch.nn.Linear(32, 1).double()
    model.config.id2label, model.config.problem_type = {0: "score"}, "regression"
    subject = regard.text(model, tokenizer)
    data = [Example(text, label) for text, label in zip(TEXTS, [1.5, -2.0, 0.25, 3.0, 1.0], strict=True)]
    loss = loss_of(subject, data)
    assert loss.about == "squared error"
    with torch.no_grad():
        output = subject.forward(subject.encode(TEXTS))
        values = loss.values(output, data)
    np.testing.assert_allclose(values, [(float(y) - one.label) ** 2 for y, one in zip(output[:, 0], data, strict=True)])


def test_a_plain_encoder_needs_a_target(tokenizer, minilm):
    with pytest.raises(errors.NotServed, match="target="):
        regard.heads(minilm, TEXTS[:2], probes=["importance"])
    done = regard.heads(minilm, TEXTS[:2], probes=["entropy", "importance"], draws=2)
    assert [*done.probed] == ["entropy"]
    assert "target=" in done.refused["importance"]
    done = regard.heads(minilm, TEXTS[:2], probes=["importance"], target=lambda output: output.sum(-1), draws=2)
    assert np.isfinite(done["importance"].values["value"]).all()


def test_what_is_drawn_and_said_about_it(subject):
    done = regard.heads(subject, TEXTS, probes=["entropy"], examples=2, draws=2)
    assert done.settings["examples"] == 2
    assert done.settings["of"] == len(TEXTS)
    assert regard.heads(subject, TEXTS, probes=["entropy"], examples=None, draws=2).settings["examples"] == len(TEXTS)


def test_bad_input(subject):
    with pytest.raises(errors.OptionError, match="probes is empty"):
        regard.heads(subject, TEXTS, probes=[])
    with pytest.raises(errors.OptionError, match="entrop.*Did you mean 'entropy'"):
        regard.heads(subject, TEXTS, probes=["entrop"])
    with pytest.raises(errors.InputError):
        regard.heads(subject, [], probes=["entropy"])
    for options in ({"examples": 0}, {"draws": -1}, {"batch_size": 0}, {"seed": "x"}):
        with pytest.raises(errors.OptionError, match=next(iter(options))):
            regard.heads(subject, TEXTS, probes=["entropy"], **options)
    with pytest.raises(errors.RegardError):
        regard.heads("bert", TEXTS)
