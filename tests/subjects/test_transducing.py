"""Texts rewritten by a rule: the data, what the decoder takes and says, where it looks, and what is refused."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

import regard
from regard import errors
from regard.data import Example
from regard.data.transduction import TASKS, aligned, transduce, vocabulary
from regard.models import Transducer, scratch_transducer
from regard.subjects.transducing import transducer

PAIRS = [("w3 w1 w2 w2", "w1 w3 w2 w2"), ("w5", "w5"), ("w0 w4 w0", "w4 w0 w0")]


def subject_for(task="flip", *, words=6, hidden=7, **options):
    return transducer(scratch_transducer(words, embedding=5, hidden=hidden, **options), vocabulary(words), task)


@pytest.fixture
def subject():
    return subject_for()


@pytest.mark.parametrize(
    ("task", "target", "places"),
    [
        ("copy", "w7 w3 w9 w3 w1", [0, 1, 2, 3, 4]),
        ("reverse", "w1 w3 w9 w3 w7", [4, 3, 2, 1, 0]),
        ("flip", "w3 w7 w3 w9 w1", [1, 0, 3, 2, 4]),
    ],
)
def test_targets_are_what_the_rules_say(task, target, places):
    source = ["w7", "w3", "w9", "w3", "w1"]
    assert aligned(task, 5) == places
    assert " ".join(source[place] for place in places) == target
    assert aligned(task, 4) == {"copy": [0, 1, 2, 3], "reverse": [3, 2, 1, 0], "flip": [1, 0, 3, 2]}[task]
    assert aligned(task, 1) == [0]
    for example in transduce(task, 200, words=10, shortest=1, longest=5, seed=3):
        source, target = (text.split() for text in example.input)
        rules = {
            "copy": source,
            "reverse": source[::-1],
            "flip": [word for start in range(0, len(source), 2) for word in source[start : start + 2][::-1]],
        }
        assert target == rules[task]
        assert example.label == example.input[1]


def test_data_are_drawn_evenly_and_the_same_for_a_seed():
    data = transduce("reverse", 1000, words=5, shortest=2, longest=4, seed=1)
    assert data.kind == "pair"
    assert list(data) == list(transduce("reverse", 1000, words=5, shortest=2, longest=4, seed=1))
    assert data.inputs() != transduce("reverse", 1000, words=5, shortest=2, longest=4, seed=2).inputs()
    sources = [source for source, _ in transduce("copy", 1000, words=5, shortest=2, longest=4, seed=1).inputs()]
    assert sources == [source for source, _ in data.inputs()], "the same for all tasks"
    lengths = Counter(len(source.split()) for source in sources)
    words = Counter(word for source in sources for word in source.split())
    assert sorted(lengths) == [2, 3, 4]
    assert min(lengths.values()) > 270
    assert sorted(words) == ["w0", "w1", "w2", "w3", "w4"]
    assert min(words.values()) > 500
    assert len({example.id for example in data}) == 1000


def test_the_decoder_takes_the_word_before(subject):
    batch = subject.encode(PAIRS)
    known = vocabulary(6)
    assert batch.inputs["taken"][0].tolist() == [known[word] for word in ("<sos>", "w1", "w3", "w2")]
    assert batch.inputs["taken"][1].tolist() == [known["<sos>"], 0, 0, 0]
    assert batch.inputs["source"][2].tolist() == [known["w0"], known["w4"], known["w0"], 0, 0]
    assert batch.real.sum(-1).tolist() == batch.source.real.sum(-1).tolist() == [4, 1, 3]
    assert batch.lengths == (4, 5), "told apart by lengths: the source has a masked row more"
    assert not batch.source.real[:, 4].any()
    assert batch.features[2].tokens == ("<sos>", "w4", "w0")
    assert batch.features[2].special == (True, False, False)
    assert batch.source.features[2].words == ("w0", "w4", "w0")
    assert subject.encode(("w1 w2", "w2 w1 w1")).lengths == (3, 2), "already different"


def test_no_row_sees_the_word_that_it_predicts(subject):
    """Another last word changes nothing, as the decoder never takes it; another word changes later rows only."""
    one, last, middle = (
        subject.forward(subject.encode(("w3 w1 w2", said))) for said in ("w1 w3 w2", "w1 w3 w5", "w1 w4 w2")
    )
    assert torch.equal(one, last)
    assert torch.equal(one[:, :2], middle[:, :2])
    assert not torch.allclose(one[:, 2], middle[:, 2])


def test_a_batch_says_what_its_examples_say_alone_however_padded(subject):
    together = subject.forward(subject.encode(PAIRS))
    assert together.shape == (3, 4, 8)
    for place, pair in enumerate(PAIRS):
        alone, count = subject.forward(subject.encode(pair)), len(pair[1].split())
        assert torch.allclose(together[place, :count], alone[0], atol=1e-6)
        assert not together[place, count:].any()
    batch = subject.encode(PAIRS)
    odd = {**batch.inputs, "source": batch.inputs["source"].masked_fill(~batch.source.real, 5),
           "taken": batch.inputs["taken"].masked_fill(~batch.real, 5)}  # fmt: skip
    assert torch.equal(
        subject.forward(regard.types.Batch(odd, batch.real, batch.features, source=batch.source)), together
    )


def written_out(model, source, taken):
    """Weights and logits of one example, row by row in double precision, with PyTorch's recurrence alone taken over."""
    states = model.encoder(model.embedding(source)[None])[0][0]
    first = (model.first.weight @ torch.cat([states[-1, :7], states[0, 7:]]) + model.first.bias).tanh()
    steps = model.decoder(model.embedding(taken)[None], first[None, None])[0][0]
    weights, logits = [], []
    for step in steps:
        scores = [float(step @ (model.keys.weight @ state)) / math.sqrt(7) for state in states]
        total = sum(math.exp(score) for score in scores)
        weights.append([math.exp(score) / total for score in scores])
        context = sum(weight * state for weight, state in zip(weights[-1], states, strict=True))
        inner = (model.mixed.weight @ torch.cat([context, step]) + model.mixed.bias).tanh()
        logits.append(model.output.weight @ inner + model.output.bias)
    return torch.tensor(weights, dtype=torch.float64), torch.stack(logits)


@torch.no_grad()
def test_a_trace_sees_one_site_and_its_weights_are_the_softmax(subject):
    subject.model.double()
    t = regard.trace(subject, PAIRS)
    (site,) = t.sites
    assert (site.kind, site.shape, t.ignored) == ("cross", (3, 1, 4, 5), ())
    assert t.check.error < 1e-12
    assert t.check.readout == "measured"
    assert torch.allclose(t.readout, torch.tensor([[1, 1, 1, 1], [4, 0, 0, 0], [4 / 3, 4 / 3, 4 / 3, 0]]) / 4)
    weights, batch = site.weights(), t.batch
    for place, (source, target) in enumerate(PAIRS):
        count = len(source.split())
        expected, logits = written_out(
            subject.model, batch.inputs["source"][place, :count], batch.inputs["taken"][place, : len(target.split())]
        )
        assert torch.allclose(weights[place, 0, :count, :count], expected, atol=1e-12)
        assert torch.allclose(t.output[place, :count], logits, atol=1e-12)
        assert not weights[place, 0, :, count:].any()
    assert (weights[0].max() - weights[0].min()) > 0.01, "weights that are all alike could not tell"


@pytest.mark.parametrize("pairs", [[("w1", "w1")], [("w1", "w1"), ("w2", "w2")], PAIRS * 2, [("w1 w2", "w1")]])
def test_a_trace_sees_one_site_whatever_the_sizes(pairs):
    subject = subject_for("copy")
    t = regard.trace(subject, pairs)
    assert [site.kind for site in t.sites] == ["cross"]
    assert t.check.error < 1e-5
    assert t.check.readout == "measured"


def test_attention_can_be_edited_and_explained(subject):
    even = regard.intervene(subject, PAIRS, regard.edits.uniform())
    plain = subject.forward(subject.encode(PAIRS))
    assert even.shape == plain.shape
    assert not torch.allclose(even[0], plain[0], atol=1e-4)
    assert torch.allclose(even[1], plain[1], atol=1e-6), "one word: there is nothing else to look at"
    first = regard.trace(subject, PAIRS, target=lambda output: output[:, 0, 3], gradients=True)
    assert torch.equal(first.score.values, plain[:, 0, 3].detach())
    gradients = first.sites[0].out_gradient
    assert gradients[:, :, 0].any()
    assert not gradients[:, :, 1:].any()


@pytest.mark.parametrize("task", TASKS)
def test_the_alignment_is_where_the_words_are(task):
    subject = subject_for(task)
    inputs = transduce(task, 8, words=6, shortest=1, longest=5, seed=2).inputs()
    batch = subject.encode(inputs)
    marks = subject.aligned(batch)
    assert marks.dtype == torch.bool
    assert marks.shape == (8, *batch.lengths)
    for pair, mark, real in zip(inputs, marks, batch.real, strict=True):
        source, target = (text.split() for text in pair)
        assert mark.sum(-1).tolist() == real.long().tolist()
        assert [source[int(row.nonzero())] for row in mark[: len(target)]] == target
        assert mark.nonzero()[:, 1].tolist() == aligned(task, len(source))
    with pytest.raises(errors.InputError, match="inputs\\[0\\]: the source has 2 words and the target 1"):
        subject.aligned(subject.encode(("w1 w2", "w1")))


def test_loss_is_a_mean_over_words_and_fits_one_for_each_example(subject):
    examples = [*transduce("flip", 100, words=6, shortest=1, longest=5)]  # more than run at once
    known, losses, right = vocabulary(6), [], []
    for example in examples:
        for row, word in zip(subject.forward(subject.encode(example.input))[0], example.label.split(), strict=True):
            losses.append(F.cross_entropy(row, torch.tensor(known[word])).item())
            right.append(int(row.argmax()) == known[word])
    output = subject.forward(subject.encode([one.input for one in examples]))
    assert subject.loss(output, examples).item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    shares = subject.fits(output, examples)
    at = 0
    for share, example in zip(shares, examples, strict=True):
        count = len(example.label.split())
        assert share == pytest.approx(sum(right[at : at + count]) / count)
        at += count
    assert 0 < sum(right) < len(right)
    leaf = output.detach().requires_grad_()
    subject.loss(leaf, examples).backward()
    assert not leaf.grad[~subject.encode([one.input for one in examples]).real].any()


def test_weights_are_drawn_from_the_seed_alone():
    before = torch.get_rng_state()
    one, same, other = (scratch_transducer(6, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["keys.weight"], other["keys.weight"])


def quality(subject, examples):
    return regard.training.Pupil(subject, None).fits(examples).mean()


def test_copying_is_learned_by_looking_at_what_is_copied():
    subject = subject_for("copy", words=10, hidden=32)
    examples, tested = (
        list(transduce("copy", size, words=10, shortest=4, longest=6, seed=size)) for size in (3000, 200)
    )
    steps = torch.optim.Adam(subject.model.parameters(), lr=3e-3)
    assert quality(subject, tested) < 0.3
    subject.model.train()
    for _ in range(8):
        for start in range(0, len(examples), 32):
            some = examples[start : start + 32]
            loss = subject.loss(subject.forward(subject.encode([one.input for one in some])), some)
            steps.zero_grad()
            loss.backward()
            steps.step()
    assert quality(subject, tested) > 0.95
    t = regard.trace(subject, [one.input for one in tested])
    looks = t.sites[0].weights()[:, 0]
    mass = looks[subject.aligned(t.batch)].mean()
    assert mass > 0.5
    even = regard.intervene(subject, t.batch, regard.edits.uniform())
    assert float(subject.loss(even, tested)) > 10 * float(subject.loss(t.output, tested))


@pytest.mark.parametrize(
    ("inputs", "error", "says"),
    [
        ([], errors.EmptyInput, "inputs is empty"),
        ("w1 w2", errors.InputError, "inputs[0]='w1 w2' is one text: pass (source, target) pairs"),
        ([PAIRS[0], "w1"], errors.InputError, "inputs[1]='w1' is one text"),
        ([PAIRS[0], ("w1", " ")], errors.EmptyInput, "inputs[1]=('w1', ' ') is empty"),
        ([("", "w1")], errors.EmptyInput, "inputs[0]=('', 'w1') is empty"),
        ([PAIRS[0], ("w1 w6", "w6 w1")], errors.InputError, "inputs[1]: the word 'w6' is not known"),
        (("w1", "W1"), errors.InputError, "the word 'W1' is not known. There are 'w0', 'w1', 'w2', 'w3', 'w4', 'w5'."),
        (("w1 <pad>", "w1 w2"), errors.InputError, "the word '<pad>' is not known"),
        (("w1", "<sos>"), errors.InputError, "the word '<sos>' is not known"),
        (("w1", "w1", "w1"), errors.InputError, "is not a text or a pair of texts"),
        ([("w1", 3)], errors.InputError, "inputs[0]=('w1', 3) is not a text or a pair of texts"),
        (None, errors.InputError, "inputs=None is not a text"),
    ],
)
def test_inputs_that_cannot_be_used(subject, inputs, error, says):
    with pytest.raises(error) as caught:
        subject.encode(inputs)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"task": "sort"}, "task='sort' is not known. Choose one of 'copy', 'reverse', 'flip'."),
        ({"count": 0}, "count=0 must be 1 or more"),
        ({"count": 2.5}, "count=2.5 must be 1 or more"),
        ({"words": 0}, "words=0 must be 1 or more"),
        ({"shortest": 0}, "shortest=0 must be 1 or more"),
        ({"longest": True}, "longest=True must be 1 or more"),
        ({"shortest": 9}, "shortest=9 must not be above longest=8"),
        ({"seed": -1}, "seed=-1 must be one whole number, 0 or more"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
    ],
)
def test_data_that_cannot_be_drawn(options, says):
    with pytest.raises(errors.OptionError) as caught:
        transduce(**{"task": "copy", "count": 3} | options)
    assert says in str(caught.value)


def test_options_that_cannot_be_used():
    model = scratch_transducer(6)
    for wrong in ({}, {"w1": 0}, {"<pad>": 0, "<sos>": 1}, None):
        with pytest.raises(errors.OptionError, match="vocabulary must map words to ids, '<pad>' and '<sos>' among"):
            transducer(model, wrong, "copy")
    with pytest.raises(errors.OptionError, match="ids up to 8, but the model embeds 8 words"):
        transducer(model, vocabulary(7), "copy")
    with pytest.raises(errors.OptionError, match="task='sort' is not known"):
        transducer(model, vocabulary(6), "sort")
    with pytest.raises(errors.OptionError, match="task='sort' is not known"):
        aligned("sort", 3)
    with pytest.raises(errors.OptionError, match="length=0 must be 1 or more"):
        aligned("copy", 0)
    with pytest.raises(errors.OptionError, match="words=0 must be 1 or more"):
        scratch_transducer(0)
    with pytest.raises(errors.OptionError, match="hidden=-3 must be 1 or more"):
        Transducer(words=5, hidden=-3)
    with pytest.raises(errors.OptionError, match="dropout=1 must be a number 0 or more, and below 1"):
        Transducer(words=5, dropout=1)


def test_what_is_not_served(subject):
    batch = subject.encode(PAIRS)
    output = subject.forward(batch)
    for target in (None, 3, "w1", [None] * 3):
        with pytest.raises(errors.WrongTarget, match="it needs a function as target"):
            subject.score(output, target, "logit")
    with pytest.raises(errors.WrongTarget, match="one number for each example"):
        subject.score(output, lambda output: output[:, 0], "logit")
    with pytest.raises(errors.NotServed, match="how='delete'.*Use how='attention'"):
        subject.without(batch, torch.zeros_like(batch.source.real), "delete")
    with pytest.raises(errors.InputError, match="output has shape .3, 4, 8., but the 1 examples have up to 1"):
        subject.loss(output, [Example(PAIRS[1])])
    with pytest.raises(errors.InputError, match="examples.0.: its label 'w1' is not its target 'w5'"):
        subject.loss(output, [Example(PAIRS[1], "w1")])
    assert repr(subject) == "TransducerSubject(Transducer)"
