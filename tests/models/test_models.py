"""Attention-pooled encoders and hand-wired toys: known answers."""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard import errors
from regard.models import AttentionClassifier, toys

VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<unk>", "<sos>", "<eos>", *"abcdefgh"])}
TASKS = {"binary": 1, "multiclass": 3, "multilabel": 3, "pair": 3, "choice": 8}


def inputs_for(task):
    if task in ("pair", "choice"):
        return [("a b c d", "a x"), ("e f a", "b c d")]
    return ["a b c d", "e f a"]


def make(encoder, attention, task):
    torch.manual_seed(0)
    model = AttentionClassifier(
        words=len(VOCABULARY),
        encoder=encoder,
        attention=attention,
        task=task,
        classes=TASKS[task],
        embedding=10,
        hidden=16,
    )
    labels = list("abcdefgh") if task == "choice" else None
    return regard.pooled(model, VOCABULARY, labels=labels)


@torch.no_grad()
def literal_weights(model, batch):
    """α written out word by word, in float64, from the formulas of the docstring."""
    model = model.double()
    states, _ = model.encoder(batch.inputs["ids"], batch.inputs["real"])
    query = None
    if model.takes_query:
        _, query = model.query_encoder(batch.inputs["query"], batch.inputs["query_real"])
    weights = torch.zeros(len(batch), model.attentions, states.shape[1], dtype=torch.float64)
    for example in range(len(batch)):
        for attention in range(model.attentions):
            scores = {}
            for row in range(states.shape[1]):
                if not batch.inputs["attend"][example, row]:
                    continue
                h = states[example, row]
                if model.attention == "dot":
                    w = query[example] if query is not None else model.outer.weight[attention]
                    scores[row] = float(h @ w) / math.sqrt(len(h))
                else:
                    inner = model.inner.weight @ h + model.inner.bias
                    if query is not None:
                        inner = inner + model.inner_query.weight @ query[example]
                    scores[row] = float(model.outer.weight[attention] @ inner.tanh())
            total = sum(math.exp(score) for score in scores.values())
            for row, score in scores.items():
                weights[example, attention, row] = math.exp(score) / total
    return weights


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("attention", ["tanh", "dot"])
@pytest.mark.parametrize("encoder", ["lstm", "cnn", "projection"])
def test_attention_is_what_the_formulas_say(encoder, attention, task):
    subject = make(encoder, attention, task)
    t = regard.trace(subject, inputs_for(task), gradients=True)
    (site,) = t.sites
    assert site.kind == "pool"
    assert site.shape == (2, 1, 3 if task == "multilabel" else 1, 6)
    expected = literal_weights(subject.model, subject.encode(inputs_for(task)))
    torch.testing.assert_close(site.weights()[:, 0].double(), expected, atol=1e-6, rtol=0)
    assert t.features[0].tokens == ("<sos>", "a", "b", "c", "d", "<eos>")
    assert t.features[0].words == ("a", "b", "c", "d")
    assert site.weights()[..., 0].count_nonzero() == 0  # <sos> never gets weight
    assert t.ignored == ()


@pytest.mark.parametrize("encoder", ["lstm", "cnn", "projection"])
def test_padding_changes_nothing(encoder):
    subject = make(encoder, "tanh", "binary")
    together = regard.trace(subject, ["a b c d e f g", "e f a"]).output
    alone = [regard.trace(subject, text).output[0] for text in ("a b c d e f g", "e f a")]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-6, rtol=0)


def test_sizes_are_those_of_the_paper():
    model = AttentionClassifier(words=100)
    assert model.encoder.channels == 256
    assert model.inner.weight.shape == (128, 256)
    assert model.outer.bias is None
    cnn = AttentionClassifier(words=100, encoder="cnn")
    assert [conv.weight.shape for conv in cnn.encoder.body] == [(32, 300, width) for width in (1, 3, 5, 7)]
    assert AttentionClassifier(words=100, encoder="projection").encoder.channels == 128


def test_one_attention_for_each_label_is_read_by_its_label():
    subject = make("lstm", "tanh", "multilabel")
    t = regard.trace(subject, ["a b c d", "e f a"], target=["2", "0"])
    assert t.readout.tolist() == [[0, 0, 1], [1, 0, 0]]
    torch.testing.assert_close(t.sites[0].pull(t.readout)[0], t.sites[0].weights(rows=2)[0, 0, 0])
    both = regard.trace(subject, "a b c d", target=lambda output: output.sum(-1))
    torch.testing.assert_close(both.readout, torch.full((1, 3), 1 / 3))


def test_as_many_labels_as_words_are_not_taken_for_padding():
    torch.manual_seed(0)
    model = AttentionClassifier(words=len(VOCABULARY), task="multilabel", classes=6, embedding=10, hidden=16)
    subject = regard.pooled(model, VOCABULARY)
    together = regard.trace(subject, ["a b c d", "e f"], target="5")  # six rows with <sos> and <eos>, six labels
    alone = regard.trace(subject, "e f", target="5")
    looks = together.sites[0].pull(together.readout)[1]
    torch.testing.assert_close(looks[:4], alone.sites[0].pull(alone.readout)[0], atol=1e-6, rtol=0)
    assert float(looks.sum()) == pytest.approx(1)


def test_only_candidates_can_be_the_answer():
    subject = make("lstm", "tanh", "choice")
    t = regard.trace(subject, [("a b c d", "a x"), ("e f a", "b c d")], of="probability")
    probability = t.output.softmax(-1)
    assert probability[0, 4:].count_nonzero() == 0
    assert probability[1, [1, 2, 3, 6, 7]].count_nonzero() == 0
    assert {t.score.names[0]} <= set("abcd")


def test_an_encoder_of_your_own():
    model = AttentionClassifier(words=len(VOCABULARY), embedding=10, hidden=16)
    own = regard.pooled(
        model,
        VOCABULARY,
        forward=lambda m, ids, attend: m(ids, ids != 0, attend),
        output="binary",
        labels=["no", "yes"],
    )
    assert torch.equal(regard.trace(own, "a b").output, regard.trace(regard.pooled(model, VOCABULARY), "a b").output)


def test_refusals():
    with pytest.raises(errors.InputError, match="classes=3 does not fit task='binary'"):
        AttentionClassifier(words=10, classes=3)
    with pytest.raises(errors.OptionError, match="encoder='gru'"):
        AttentionClassifier(words=10, encoder="gru")
    with pytest.raises(errors.OptionError, match="'<pad>' and '<unk>'"):
        regard.pooled(AttentionClassifier(words=10), {"a": 0})
    with pytest.raises(errors.SubjectError, match="single texts"):
        regard.trace(make("lstm", "tanh", "binary"), [("a", "b")])
    with pytest.raises(errors.SubjectError, match="pairs"):
        regard.trace(make("lstm", "tanh", "pair"), "a")
    with pytest.raises(errors.EmptyInput, match=r"inputs\[1\] has no words"):
        regard.trace(regard.pooled(toys.decisive(), tokenize=lambda text: text.split("-")[1:]), ["a-b", "a"])
    with pytest.raises(errors.OptionError, match="output"):
        regard.pooled(torch.nn.Linear(2, 2), VOCABULARY)


TEXTS = ["the film is superb and moving", "the plot is dull and awful so so", "so nice", "bad"]


@pytest.mark.parametrize("toy", [toys.decisive, toys.irrelevant, toys.positional])
def test_toys_do_not_saturate(toy):
    probability = regard.trace(regard.pooled(toy()), TEXTS).output.sigmoid()
    assert ((probability > 0.2) & (probability < 0.8)).all()


def test_in_the_decisive_toy_attention_is_the_decision():
    t = regard.trace(regard.pooled(toys.decisive()), TEXTS)
    polarity = torch.tensor([[toys.POLARITY[word] for word in TEXTS[0].split()]])
    weights = t.sites[0].weights()[:1, 0, 0, :6]
    torch.testing.assert_close(t.output[:1, 0], toys.STEEPNESS * (weights * polarity).sum(-1))
    assert weights[0].argmax() == 3  # superb
    assert (t.output[:, 0] > 0).tolist() == [True, False, True, False]


def test_in_the_irrelevant_toy_no_attention_gives_another_output():
    subject = regard.pooled(toys.irrelevant())
    t = regard.trace(subject, TEXTS, gradients=True)
    assert t.sites[0].gradients().count_nonzero() == 0
    weights = t.sites[0].weights()
    other = torch.rand_like(weights).where(t.real[:, None, None], 0)
    other = other / other.sum(-1, keepdim=True)
    assert (other - weights).abs().max() > 0.1
    for any_weights in (weights, other):
        context = (any_weights @ t.sites[0].values)[:, 0, 0]
        assert subject.model.readout(context).abs().max() < 1e-6
    assert (t.output[:, 0] > 0).tolist() == [True, False, True, False]  # and yet it decides


def test_in_the_positional_toy_words_do_not_matter():
    subject = regard.pooled(toys.positional())
    one, other = (regard.trace(subject, text).sites[0].weights() for text in ("so bad film", "superb and moving"))
    torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert (one[0, 0, 0].diff() < 0).all()


def test_the_induction_head_continues_what_it_has_seen():
    model = toys.induction(tokens=16, positions=32)
    ids = torch.stack([torch.randperm(16)[:12] for _ in range(8)])
    ids = torch.cat([ids, ids[:, :5]], -1)  # the first five letters come again
    t = regard.trace(
        regard.module(model, lambda m, x: m(x)[:, -1], features=[str(i) for i in range(17)], readout="last"), ids
    )
    assert t.output.argmax(-1).tolist() == ids[:, 5].tolist()
    previous = t.sites[0].weights(heads=0)[:, 0]
    assert previous.diagonal(-1, 1, 2).min() > 0.99  # each position looks at the one before
    induction = t.sites[1].weights(heads=0, rows=-1)[:, 0, 0]
    assert induction[:, 5].min() > 0.99  # … and the last at what came after its first occurrence
    idle = t.sites[1].weights(heads=1, rows=-1)[:, 0, 0]
    torch.testing.assert_close(idle, torch.full((8, 17), 1 / 17))
