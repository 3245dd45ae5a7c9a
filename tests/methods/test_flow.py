"""Attention flow against Edmonds–Karp on the layered graph, and what its numbers are in a game between tokens.

Capacities are those of the model's own eager attention, in float64; flows agree to 1e-6 of the largest.
"""

from __future__ import annotations

from itertools import combinations
from math import factorial

import networkx as nx
import numpy as np
import pytest
import torch
import transformers as hf
from networkx.algorithms.flow import edmonds_karp
from oracles import assert_close, attend, bert, classified, continued, encoded, gpt2, llama, t5
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import errors

TEXTS = ["a dull moving film", "so", "it ends"]  # six tokens with [CLS] and [SEP], three, four


def graph_of(layers, alpha=0.5):
    """A node for each (layer, row), the inputs in layer 0; from (l, q) to (l − 1, k) a pipe as wide as the weight is."""
    graph = nx.DiGraph()
    for number, mean in enumerate(layers, 1):
        wide = alpha * np.eye(len(mean)) + (1 - alpha) * np.asarray(mean)
        for query, key in np.ndindex(wide.shape):
            if wide[query, key] > 0:
                graph.add_edge((number, query), (number - 1, key), capacity=float(wide[query, key]))
    return graph


def maximum(graph, source, sink):
    if source not in graph or sink not in graph:
        return 0.0
    return nx.maximum_flow_value(graph, source, sink, flow_func=edmonds_karp)


def flows(layers, query, alpha=0.5):
    """From one row of the last layer to each input, as the paper has it."""
    graph = graph_of(layers, alpha)
    return [maximum(graph, (len(layers), query), (0, token)) for token in range(len(layers[0]))]


def pooled_flows(layers, readout, alpha=0.5):
    """From a source above the last layer, which feeds row q through a pipe of width r_q."""
    graph = graph_of(layers, alpha)
    for query, share in enumerate(readout):
        graph.add_edge("source", (len(layers), query), capacity=float(share))
    return [maximum(graph, "source", (0, token)) for token in range(len(layers[0]))]


def means(weights):
    """The mean over heads of each layer."""
    return [one.mean(0).numpy() for one in weights]


@pytest.fixture(scope="module")
def model(tokenizer):
    return bert(tokenizer, num_hidden_layers=2)


@pytest.fixture(scope="module")
def subject(model, tokenizer):
    return regard.text(model, tokenizer)


# --- the paper's numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.5, 0.1, 0.0])
def test_from_cls_through_two_layers_in_a_padded_batch(model, subject, tokenizer, alpha):
    found = regard.explain(subject, TEXTS, method="flow", alpha=alpha)
    assert [len(why.scores) for why in found] == [6, 3, 4]
    for why, text in zip(found, TEXTS, strict=True):
        assert_close(why.scores, flows(means(classified(model, tokenizer, text).weights), 0, alpha))
    assert_close(regard.explain(subject, TEXTS[0], method="flow", alpha=alpha).scores, found[0].scores)


def test_flow_is_not_rollout(subject):
    """Each token has the pipes to itself, so flows are no smaller than what rollout sends along all paths."""
    flow, rollout = (regard.explain(subject, TEXTS[0], method=method).scores for method in ("flow", "rollout"))
    assert (flow >= rollout - 1e-9).all()
    assert flow.sum() > rollout.sum() + 0.1


def test_with_no_attention_all_stays_where_it_is(subject):
    assert_close(regard.explain(subject, TEXTS[0], method="flow", alpha=1.0).scores, [1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_from_its_last_token(tokenizer, build, side):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    for why, text in zip(regard.explain(subject, TEXTS, method="flow"), TEXTS, strict=True):
        layers = means(continued(model, tokenizer, text).weights)
        assert_close(why.scores, flows(layers, len(layers[0]) - 1))


def test_mean_pooling_feeds_each_row_its_share(tokenizer):
    model = bert(tokenizer, hf.BertModel, num_hidden_layers=2)
    subject = regard.text(model, tokenizer, readout="mean")
    for why, text in zip(regard.explain(subject, TEXTS, method="flow", alpha=0.3), TEXTS, strict=True):
        run = attend(model, encoded(tokenizer, text), lambda output: output.last_hidden_state.sum())
        layers = means(run.weights)
        rows = len(layers[0])
        assert_close(why.scores, pooled_flows(layers, np.full(rows, 1 / rows), 0.3))
        assert why.scores.max() <= 1 + 1e-6, "no more reaches a token than leaves the source"


# --- what is refused ------------------------------------------------------------------------------------------------


def refusal(subject, inputs):
    with pytest.raises(errors.NotServed, match="^flow: site .*does not lead from rows to the same rows") as caught:
        regard.explain(subject, inputs, method="flow")
    able = str(caught.value).partition("Methods that can: ")[2].rstrip(".").split(", ")
    assert "flow" not in able
    for method in able:
        assert np.isfinite(regard.explain(subject, inputs, method=method).scores).all(), method
    return able


def test_a_pool_is_refused_and_those_that_are_named_can_do_it():
    able = refusal(regard.pooled(regard.models.toys.decisive()), "so good the awful")
    assert {"raw", "rollout"} <= {*able}


def test_an_encoder_decoder_is_refused_and_those_that_are_named_can_do_it(tokenizer):
    able = refusal(regard.seq2seq(t5(tokenizer).float(), tokenizer), ("a moving film", "so it is"))
    assert {"raw", "rollout", "grad_rollout"} <= {*able}


@pytest.mark.parametrize("alpha", [-0.1, 1.5, float("nan")])
def test_a_share_outside_of_0_to_1_is_refused(subject, alpha):
    with pytest.raises(errors.OptionError, match=f"alpha={alpha} must be between 0 and 1"):
        regard.explain(subject, TEXTS[0], method="flow", alpha=alpha)


# --- a game between tokens ------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Attention weights are what is passed: queries and keys are zero, and the mask is their logarithm."""

    def forward(self, x, weights):
        for layer in weights.unbind(1):  # example query key
            nothing = torch.zeros_like(x)[:, None]
            x = x + scaled_dot_product_attention(nothing, nothing, x[:, None], attn_mask=layer.log()[:, None])[:, 0]
        return x[:, 0]


def hand_made(*layers):
    """Flows as regard has them, read from the first row, and the layers themselves."""
    weights = torch.tensor(layers, dtype=torch.float64)
    rows = weights.shape[-1]
    subject = regard.module(
        ByHand().double(), lambda model, x, weights: model(x, weights), features=[f"t{i}" for i in range(rows)],
        readout="first", output="embedding",
    )  # fmt: skip
    x = torch.randn(1, rows, 5, dtype=torch.float64)
    (why,) = regard.explain(subject, (x, weights[None]), method="flow", alpha=0.0, target=lambda output: output.sum(-1))
    return why.scores, weights.numpy()


def payoff(graph, source, players):
    """What reaches a set of tokens when all of them may be used: a sink below them, behind pipes without end."""
    joined = graph.copy()
    joined.add_edges_from(((0, player), "sink") for player in players)  # no capacity: without end
    return maximum(joined, source, "sink") if players else 0.0


def shapley(graph, source, count):
    """Each player's marginal payoff, averaged over all orders of joining: all subsets, by brute force."""
    worth = {
        frozenset(some): payoff(graph, source, some)
        for size in range(count + 1)
        for some in combinations(range(count), size)
    }
    values = np.zeros(count)
    for some, before in worth.items():
        share = factorial(len(some)) * factorial(count - len(some) - 1) / factorial(count) if len(some) < count else 0
        for player in set(range(count)) - some:
            values[player] += share * (worth[some | {player}] - before)
    return values, worth[frozenset(range(count))]


def test_where_tokens_do_not_compete_flow_is_the_shapley_value():
    """Row 0 sends ¾ to row 1 and ¼ to row 2, and each of these has a token of its own below it."""
    found, layers = hand_made(
        [[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]],
        [[0, 0.75, 0.25, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    )
    values, everything = shapley(graph_of(layers, 0), (2, 0), 4)
    assert_close(found, [0, 0, 0.25, 0.75])
    assert_close(found, values)
    assert everything == pytest.approx(found.sum()), "what each gets alone adds up"


def test_where_tokens_compete_it_is_not():
    """Row 0 sends ½ to row 1; below that, tokens 0 and 1 each could take all of it, and do when they are alone."""
    found, layers = hand_made(
        [[0, 0, 1], [0.5, 0.5, 0], [0, 0, 1]],
        [[0, 0.5, 0.5], [0, 1, 0], [0, 0, 1]],
    )
    values, everything = shapley(graph_of(layers, 0), (2, 0), 3)
    assert_close(found, [0.5, 0.5, 0.5])
    assert_close(values, [0.25, 0.25, 0.5])
    assert everything == pytest.approx(values.sum()) == pytest.approx(1)
    assert np.abs(found - values).max() > 0.2


@pytest.mark.parametrize("text", TEXTS)
def test_in_a_model_flow_is_never_less_than_the_shapley_value(model, subject, tokenizer, text):
    """The first to join gains most: v is submodular. So flow is the Shapley value where v adds up, and else above it."""
    layers = means(classified(model, tokenizer, text).weights)
    found = regard.explain(subject, text, method="flow").scores
    values, everything = shapley(graph_of(layers), (2, 0), len(found))
    assert values.sum() == pytest.approx(everything) == pytest.approx(1)
    assert (found >= values - 1e-9).all()
    assert found.sum() > everything + 0.1, "tokens do compete in a transformer"


@pytest.mark.parametrize("rows", [3, 8])
def test_one_layer_is_attention_and_its_shapley_value(rows):
    """One layer has a pipe for each token, so flow, attention and Shapley value are the same."""
    layer = torch.rand(rows, rows, dtype=torch.float64).softmax(-1)
    found, layers = hand_made(layer.tolist())
    values, _ = shapley(graph_of(layers, 0), (1, 0), rows)
    assert_close(found, layer[0])
    assert_close(found, values)
