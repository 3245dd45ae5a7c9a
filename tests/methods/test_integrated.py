"""AttAttr against its Riemann sum written out: attention of one layer is scaled by hand, and differentiated by itself.

The model's attention is replaced, in the test, by a function that multiplies the weights of one layer by α and makes
them the leaf of a graph. One example at a time, in float64; attributions agree to 1e-6 of the largest.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import assert_close, bert, encoded, gpt2, llama

import regard
from regard import errors

TEXTS = ["dull, and it never ends", "so so"]  # the second is padded beside the first
STEPS = 6
PLACES = {"midpoint": 0.5, "left": 0.0, "right": 1.0}


class Hand:
    """Which of the layers is scaled, and by how much; what its weights are then, and which have been seen."""

    def __init__(self, layer=None, alpha=1.0):
        self.layer, self.alpha, self.leaf, self.seen = layer, alpha, None, []


HAND = Hand()


def scaled_by_hand(module, query, key, value, attention_mask, scaling=None, **_):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if getattr(module, "is_causal", False):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    HAND.seen.append(weights.detach())
    if len(HAND.seen) - 1 == HAND.layer:
        weights = HAND.leaf = (HAND.alpha * weights.detach()).requires_grad_()
    return (weights @ value).transpose(1, 2).contiguous(), weights


hf.AttentionInterface.register("scaled by hand", scaled_by_hand)


class Oracle:
    """F and its attributions, for one text."""

    def __init__(self, model, tokenizer, text, read=lambda output: output.logits[0].softmax(-1), target=None):
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("scaled by hand")
        types = hasattr(model.base_model, "encoder")
        self.inputs, self.read = encoded(tokenizer, text, return_token_type_ids=types), read
        self.target = None
        predicted = int(self.at(None)[1].argmax())
        self.target = predicted if target is None else target
        self.weights = [weights[0] for weights in HAND.seen]  # head query key

    def at(self, layer, alpha=1.0):
        """F(αA) and what it is one of."""
        global HAND
        HAND = Hand(layer, alpha)
        everything = self.read(self.model(**self.inputs))
        return None if self.target is None else everything[self.target], everything.detach()

    def attributions(self, layer, steps, rule="midpoint"):
        """A ⊙ 1/m Σ_k ∂F(α_kA)/∂A, ``(head, query, key)``."""
        total = torch.zeros_like(self.weights[layer])
        for step in range(steps):
            value, _ = self.at(layer, (step + PLACES[rule]) / steps)
            total += torch.autograd.grad(value, HAND.leaf)[0][0] / steps
        return self.weights[layer] * total

    def change(self, layer):
        return float((self.at(layer)[0] - self.at(layer, 0.0)[0]).detach())


@pytest.fixture(scope="module")
def oracles(model, tokenizer):
    return [Oracle(model, tokenizer, text) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(oracles):
    """For each text all layers, by the default rule: ``(layer, head, query, key)``."""
    return [torch.stack([oracle.attributions(layer, STEPS) for layer in range(3)]) for oracle in oracles]


def explained(subject, **options):
    return regard.explain(subject, TEXTS, method="integrated", **{"steps": STEPS, **options})


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", PLACES)
@pytest.mark.parametrize("steps", [1, 5])
def test_each_rule_of_the_sum(subject, oracles, rule, steps):
    for why, oracle in zip(explained(subject, rule=rule, steps=steps), oracles, strict=True):
        assert_close(why.scores, oracle.attributions(2, steps, rule).sum(0)[0])


def test_the_default_is_the_probability_of_what_is_predicted(model, subject, oracles, tokenizer):
    for why, oracle in zip(regard.explain(subject, TEXTS, method="integrated"), oracles, strict=True):
        assert why.of == "probability"
        assert (why.options["steps"], why.options["rule"]) == (20, "midpoint")
        probabilities = oracle.at(None)[1]
        assert why.value == pytest.approx(float(probabilities.max()))
        assert why.value == why.probability
        assert why.target == model.config.id2label[oracle.target]
        assert_close(why.scores, oracle.attributions(2, 20).sum(0)[0])


@pytest.mark.parametrize("of", ["logit", "logprob"])
def test_other_scalars_and_another_target(model, subject, tokenizer, of):
    read = (lambda output: output.logits[0]) if of == "logit" else (lambda output: output.logits[0].log_softmax(-1))
    for why, text in zip(explained(subject, of=of, target=[1, 2]), TEXTS, strict=True):
        oracle = Oracle(model, tokenizer, text, read, 1 + TEXTS.index(text))
        assert_close(why.scores, oracle.attributions(2, STEPS).sum(0)[0])


def test_layers(subject, expected):
    found = {layers: explained(subject, layers=layers) for layers in ("last", 0, 1, 2, "mean", "rollout")}
    each = explained(subject, per_layer=True)
    for number, all_of_it in enumerate(expected):
        summed = all_of_it.sum(1)  # layer query key
        for layer in range(3):
            assert_close(found[layer][number].scores, summed[layer, 0])
        np.testing.assert_array_equal(found["last"][number].scores, found[2][number].scores)
        assert_close(found["mean"][number].scores, summed.mean(0)[0])
        assert_close(each[number].scores, summed[:, 0])
        product = torch.eye(summed.shape[-1], dtype=torch.float64)
        for matrix in summed:
            product = 0.5 * product + 0.5 * matrix @ product
        assert_close(found["rollout"][number].scores, product[0])


def test_heads_and_rows(subject, expected):
    heads, matrices = explained(subject, per_head=True, layers=1), explained(subject, matrix=True, layers=1)
    whole = explained(subject, per_layer=True, per_head=True, matrix=True)
    for number, all_of_it in enumerate(expected):
        assert heads[number].axes == ("head", "token")
        assert_close(heads[number].scores, all_of_it[1, :, 0])
        assert_close(matrices[number].scores, all_of_it[1].sum(0))
        assert whole[number].axes == ("layer", "head", "query", "token")
        assert_close(whole[number].scores, all_of_it)


def test_only_the_row_that_is_read_matters_in_the_last_layer(subject):
    """And all of them before it: what one row takes there reaches the readout later."""
    for why in explained(subject, matrix=True, per_layer=True):
        assert np.abs(why.scores[2, 1:]).max() == 0
        assert np.abs(why.scores[:2, 1:]).max() > 1e-3 * np.abs(why.scores).max()


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_decoder_also_with_grouped_queries(tokenizer, build, layer):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer)
    found = explained(subject, layers=layer, per_head=True)
    for why, text in zip(found, TEXTS, strict=True):
        oracle = Oracle(model, tokenizer, text, lambda output: output.logits[0, -1].softmax(-1))
        assert why.value == pytest.approx(float(oracle.at(None)[0].detach()), rel=1e-6)
        assert_close(why.scores, oracle.attributions(layer, STEPS)[:, -1])


def test_a_model_that_forms_its_weights_itself(tokenizer, expected):
    model = bert(tokenizer)
    model.set_attn_implementation("eager")
    for why, all_of_it in zip(explained(regard.text(model, tokenizer), layers=1), expected, strict=True):
        assert_close(why.scores, all_of_it[1].sum(0)[0])


# --- completeness ---------------------------------------------------------------------------------------------------


def test_facts(subject, oracles, expected):
    for why, oracle, all_of_it in zip(explained(subject, per_layer=True), oracles, expected, strict=True):
        changes = np.array([oracle.change(layer) for layer in range(3)])
        assert_close(why.facts["change"], changes)
        errors_of = np.abs(all_of_it.sum((1, 2, 3)).numpy() - changes)
        np.testing.assert_allclose(
            why.facts["completeness_error"], errors_of, rtol=0, atol=1e-6 * np.abs(changes).max()
        )
    for why, all_of_it in zip(explained(subject, layers=1), oracles, strict=True):
        assert why.facts["change"].shape == why.facts["completeness_error"].shape == (1,)
        assert_close(why.facts["change"], [all_of_it.change(1)])


@pytest.mark.parametrize(("rule", "order"), [("midpoint", 2), ("left", 1), ("right", 1)])
def test_the_sum_becomes_the_integral_as_steps_grow(subject, rule, order):
    """Twice the steps: half the error, or a quarter of it by the midpoint rule."""
    many = {
        steps: np.array(
            [why.facts["completeness_error"] for why in explained(subject, rule=rule, steps=steps, layers=1)]
        )
        for steps in (32, 64, 128)
    }
    for few, more in ((32, 64), (64, 128)):
        np.testing.assert_allclose(many[few] / many[more], 2**order, rtol=0.1)
    changes = [abs(why.facts["change"]) for why in explained(subject, layers=1)]
    assert (many[128] < (1e-3 if order == 2 else 0.05) * np.array(changes)).all()


# --- the tree -------------------------------------------------------------------------------------------------------


def test_all_layers_and_rows_draw_the_tree(subject):
    for why in explained(subject, per_layer=True, matrix=True):
        assert why.axes == ("layer", "query", "token")
        page = why.plot("tree")._repr_html_()
        assert page == why.plot()._repr_html_(), "it is what is drawn unless another picture is asked for"
        assert "integrated" in page
        assert all(token.strip("#") in page for token in why.features.tokens)


def test_there_is_no_tree_without_layers(subject):
    with pytest.raises(
        errors.OptionError, match="kind='tree': with axes .'query', 'token'. there are the pictures map"
    ):
        explained(subject, matrix=True)[0].plot("tree")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"steps": 2.5}, "steps=2.5 must be a whole number"),
        ({"rule": "trapezoid"}, "rule='trapezoid' is not known. Choose one of 'midpoint', 'left', 'right'"),
        ({"layers": "all"}, "layers='all' is not known"),
        ({"layers": "rollout", "per_head": True}, "a rollout multiplies the mean over heads"),
    ],
)
def test_options_that_are_refused(subject, options, said):
    with pytest.raises(errors.OptionError, match=said):
        explained(subject, **options)


def test_without_a_target_there_is_nothing_to_integrate(tokenizer):
    subject = regard.text(bert(tokenizer, hf.BertModel), tokenizer)
    with pytest.raises(errors.WrongTarget, match="target=None: a plain encoder has no classes"):
        explained(subject)
    summed = explained(subject, of="logit", target=lambda output: output[:, 0])
    assert np.abs(summed[0].scores).max() > 0
