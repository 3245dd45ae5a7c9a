"""Edits on real subjects: toys whose answer can be written down, pooled encoders, MiniLM and SmolLM2."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import edits
from regard.attention import Rerun
from regard.models import AttentionClassifier, toys

TEXT = "the film is moving and the plot is dull"
VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<unk>", "<sos>", "<eos>", *"abcdefgh"])}


def test_the_decision_of_a_toy_follows_the_weights_it_is_given():
    """logit = 1.25 · Σ α_t · polarity_t, so every edit has an answer that can be written down."""
    subject = regard.pooled(toys.decisive())
    polarity = torch.tensor([toys.POLARITY[word] for word in TEXT.split()])
    alpha = regard.trace(subject, TEXT).sites[0].weights()[0, 0, 0]

    def logit(weights: torch.Tensor) -> torch.Tensor:
        return toys.STEEPNESS * (weights * polarity).sum().view(1, 1)

    even = torch.full_like(alpha, 1 / len(alpha))
    only = torch.nn.functional.one_hot(torch.tensor(3), len(alpha)).float()
    without = alpha.index_fill(0, torch.tensor([3]), 0)
    for edit, weights in (
        (edits.uniform(), even),
        (edits.replace(only), only),
        (edits.zero(3), without / without.sum()),
        (edits.zero(3, renormalise=False), without),
        (edits.scale(0.5), alpha / 2),
        (edits.gate(0, 0.25), alpha / 4),
        (edits.detach(), alpha),
        (edits.custom(lambda weights, place: weights.flip(-1)), alpha.flip(-1)),
    ):
        torch.testing.assert_close(regard.intervene(subject, TEXT, edit), logit(weights), atol=1e-6, rtol=0)
    permuted = regard.intervene(subject, TEXT, edits.permute(0), variants=200)[:, 0, 0]
    assert permuted.std() > 0.1
    # a uniformly random permutation gives each word the mean weight
    assert abs(float(permuted.mean() - logit(even))) < 3 * float(permuted.std()) / 200**0.5


def test_no_edit_moves_a_model_whose_attention_does_not_matter():
    subject = regard.pooled(toys.irrelevant())
    plain = regard.intervene(subject, TEXT, [])
    for edit in (edits.uniform(), edits.permute(1), edits.zero([0, 1])):
        torch.testing.assert_close(regard.intervene(subject, TEXT, edit), plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("encoder", ["lstm", "cnn", "projection"])
@pytest.mark.parametrize("task", ["binary", "multilabel", "pair"])
def test_pooled_encoders_are_edited_and_replayed(encoder, task):
    torch.manual_seed(0)
    model = AttentionClassifier(
        words=len(VOCABULARY), encoder=encoder, attention="tanh", task=task, classes=1 if task == "binary" else 3,
        embedding=10, hidden=16,
    )  # fmt: skip
    subject = regard.pooled(model, VOCABULARY)
    inputs = [("a b c d", "a b"), ("e f a", "b c d")] if task == "pair" else ["a b c d", "e f a"]
    rerun = Rerun(subject, inputs)
    many = rerun(edits.permute(0), variants=6)
    assert rerun.upstream[0].recording is not None
    assert rerun.upstream[0].recording.outputs  # the encoder is not run again
    torch.testing.assert_close(
        many, Rerun(subject, inputs, replay=False)(edits.permute(0), variants=6), atol=1e-6, rtol=0
    )
    assert many.std(0).max() > 1e-4
    # start and end marks get no weight, so none is moved to them
    seen = []
    regard.intervene(
        subject, inputs, [edits.permute(0), edits.custom(lambda weights, place: seen.append(weights) or weights)]
    )
    marks = torch.tensor([[True, False, False, False, False, True], [True, False, False, False, True, True]])
    assert (seen[0] * marks[:, None, None]).abs().max() == 0


def test_permutations_are_fair_and_independent(minilm):
    """Over many variants every key gets every weight equally often; heads and variants have their own."""
    seen = []
    spy = edits.custom(lambda weights, place: seen.append(weights) or weights, sites=2, rows=[1])
    shuffled = edits.permute(5, sites=2, rows=[1])
    plain = regard.trace(minilm, "a moving film about two dull lives").sites[2].weights(rows=[1])
    regard.intervene(minilm, "a moving film about two dull lives", [shuffled, spy], variants=400)
    weights = torch.cat(seen)[:, 0, :, 0]  # variant head key
    moved = weights[..., 1:-1]  # special tokens keep their weight
    torch.testing.assert_close(weights[:, :, [0, -1]], plain[:, :, 0, [0, -1]].expand(400, -1, -1), atol=1e-6, rtol=0)
    mean, spread = moved.mean(0), moved.std(0) / 400**0.5
    expected = plain[0, :, 0, 1:-1].mean(-1, keepdim=True)
    assert ((mean - expected).abs() < 5 * spread + 1e-6).all()
    places = moved.argmax(-1)  # where the largest weight has gone
    assert (places[:, 0] == places[:, 1]).float().mean() < 0.3  # one seventh by chance
    shared = []
    keep = edits.custom(lambda weights, place: shared.append(weights) or weights, sites=2, rows=[1])
    regard.intervene(
        minilm, "a moving film about two dull lives", [edits.permute(5, shared=True, sites=2, rows=[1]), keep]
    )
    order = shared[0][0, :, 0, 1:-1].argsort(-1)
    original = plain[0, :, 0, 1:-1].argsort(-1)
    moves = [dict(zip(original[head].tolist(), order[head].tolist(), strict=True)) for head in range(12)]
    assert all(move == moves[0] for move in moves)


@pytest.mark.parametrize("site", [0, 3, 5])
def test_minilm_replayed_is_minilm_run(minilm_path, site):
    subject = regard.text(minilm_path, readout="first")
    texts = ["a moving film", "dull, and it never ends"]
    edit = edits.permute(3, sites=site)
    rerun = Rerun(subject, texts)
    on = rerun(edit, variants=8)
    assert rerun.upstream[site].recording is not None
    off = Rerun(subject, texts, replay=False)(edit, variants=8)
    assert (on - off).abs().max() <= 1e-6 * off.abs().max()
    singles = torch.stack([regard.intervene(subject, text, edit, variants=8)[:, 0] for text in texts[1:]])
    assert singles.shape == (1, 8, 384)


def test_smollm_is_edited_by_names_and_replayed_in_the_middle(smollm):
    prompt = "The capital of France is"
    name = "model.layers.15.self_attn"
    rerun = Rerun(smollm, prompt)
    on = rerun(edits.permute(0, sites=name), variants=5)
    assert (
        len(rerun.upstream[15].recording.outputs) >= 15
    )  # the layers before it, and the queries, keys and values of its own
    off = Rerun(smollm, prompt, replay=False)(edits.permute(0, sites=name), variants=5)
    # matrix products round differently in batches of other sizes, and 15 layers follow: that is what may differ
    rounding = (off[0] - Rerun(smollm, prompt)(edits.permute(0, sites=name))).abs().max()
    assert 0 < rounding < 1e-4
    assert (on - off).abs().max() <= 2 * rounding
    assert (on - rerun.output).abs().max() > 0.01
    same = rerun(edits.custom(lambda weights, place: weights))
    torch.testing.assert_close(same, rerun.output, atol=1e-4, rtol=0)
