"""What was proposed to make attention explain: orthogonal states, diverse states, tied states, guessed words."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import regard
from regard import errors
from regard.models import AttentionClassifier, conicity
from regard.models.classifier import MASKED

VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<unk>", "<sos>", "<eos>", *"abcdefgh"])}
TASKS = {"binary": 1, "multiclass": 3, "multilabel": 3, "pair": 3, "choice": 8}
NEW = ["forward", "orthogonal"]
FACTORS = {"diversity": 0.5, "tying": 0.2, "masked": 0.3}


def make(encoder="orthogonal", **options):
    torch.manual_seed(0)
    sizes = {"words": len(VOCABULARY), "embedding": 10, "hidden": 4}
    return AttentionClassifier(encoder=encoder, **sizes | options).double()


def batch(*lengths, rows=None):
    """Random words between start and end marks, padded to the longest: ids, real, attend."""
    rows = rows or max(lengths)
    ids = torch.zeros(len(lengths), rows, dtype=torch.long)
    source = torch.Generator().manual_seed(7)
    for example, length in enumerate(lengths):
        ids[example, :length] = torch.randint(4, len(VOCABULARY), (length,), generator=source)
        ids[example, 0], ids[example, length - 1] = VOCABULARY["<sos>"], VOCABULARY["<eos>"]
    return ids, ids > 0, ids > 3


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


@torch.no_grad()
def literal_states(encoder, words, *, orthogonal):
    """An LSTM over one text, step by step and unit by unit, in Python's own float64."""
    lstm, size = encoder.body, encoder.channels
    by_input, by_state = lstm.weight_ih_l0.tolist(), lstm.weight_hh_l0.tolist()
    bias = (lstm.bias_ih_l0 + lstm.bias_hh_l0).tolist()
    h, c, states = [0.0] * size, [0.0] * size, []
    for t, word in enumerate(words):
        x = encoder.embedding.weight[word].tolist()
        gates = [dot(by_input[g], x) + dot(by_state[g], h) + bias[g] for g in range(4 * size)]
        for unit in range(size):
            i, f, g, o = (gates[part * size + unit] for part in range(4))
            c[unit] = sigmoid(f) * c[unit] + sigmoid(i) * math.tanh(g)
            h[unit] = sigmoid(o) * math.tanh(c[unit])
        if orthogonal:
            m = [sum(state[unit] for state in states) / (t + 1) for unit in range(size)]
            share = dot(h, m) / (dot(m, m) + 1e-6)
            h = [h[unit] - share * m[unit] for unit in range(size)]
        states.append([*h])
    return torch.tensor(states, dtype=torch.float64)


def literal_conicity(states):
    """Of the states of one text, word by word."""
    states = states.tolist()
    mean = [sum(column) / len(states) for column in zip(*states, strict=True)]
    cosines = [dot(h, mean) / math.sqrt(dot(h, h) * dot(mean, mean)) for h in states]
    return sum(abs(cosine) for cosine in cosines) / len(cosines)


@pytest.mark.parametrize("encoder", NEW)
def test_states_are_those_of_the_recurrence_written_out(encoder):
    model = make(encoder)
    ids, real, _ = batch(9, 4, 6)
    states, summary = model.encoder(ids, real)
    assert states.shape == (3, 9, 8)
    for example, length in enumerate(real.sum(-1).tolist()):
        expected = literal_states(model.encoder, ids[example, :length].tolist(), orthogonal=encoder == "orthogonal")
        torch.testing.assert_close(states[example, :length], expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(summary[example], expected[-1], atol=1e-12, rtol=0)
        assert states[example, length:].count_nonzero() == 0


def test_each_state_is_orthogonal_to_the_mean_of_those_before():
    orthogonal, forward = make("orthogonal"), make("forward")
    forward.load_state_dict(orthogonal.state_dict())  # one layout of parameters
    ids, real, _ = batch(9)

    def cosine(model):
        states = model.encoder(ids, real)[0][0]
        return max(torch.cosine_similarity(states[t], states[:t].mean(0), dim=0).abs().item() for t in range(1, 9))

    assert cosine(orthogonal) < 1e-2  # not 0: 1e-6 is added to mᵀm
    assert cosine(forward) > 0.3


@pytest.mark.parametrize("encoder", NEW)
def test_sizes_are_those_of_the_paper(encoder):
    model = AttentionClassifier(words=20, encoder=encoder)
    assert model.encoder.channels == 256
    assert model.encoder.body.hidden_size == 256
    assert not model.encoder.body.bidirectional


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("encoder", NEW)
def test_a_trace_finds_one_pool(encoder, task):
    model = make(encoder, task=task, classes=TASKS[task], **FACTORS).train()
    subject = regard.pooled(model, VOCABULARY, labels=list("abcdefgh") if task == "choice" else None)
    texts = ["a b c d", "e f a"]
    inputs = list(zip(texts, ["a x", "b c d"], strict=True)) if task in ("pair", "choice") else texts
    found = regard.trace(subject, inputs, gradients=True)
    (site,) = found.sites
    assert site.kind == "pool"
    assert found.ignored == ()
    encoded = subject.encode(inputs).inputs
    states, _ = model.encoder(encoded["ids"], encoded["real"])
    torch.testing.assert_close(site.values[:, 0], states, atol=1e-6, rtol=0, check_dtype=False)
    assert site.gradients().isfinite().all()
    assert site.gradients().count_nonzero()
    assert model.penalty is None  # a trace runs in eval mode


@pytest.mark.parametrize("encoder", NEW)
def test_padding_changes_nothing(encoder):
    model = make(encoder, diversity=0.5, tying=0.2).train()
    narrow, wide = batch(5, 3), batch(5, 3, rows=11)
    logits = model(*narrow)
    penalty = model.penalty
    torch.testing.assert_close(model(*wide), logits, atol=1e-12, rtol=0)
    torch.testing.assert_close(model.penalty, penalty, atol=1e-12, rtol=0)
    subject = regard.pooled(model, VOCABULARY)
    together = regard.trace(subject, ["a b c d e f g", "e f a"]).output
    alone = [regard.trace(subject, text).output[0] for text in ("a b c d e f g", "e f a")]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-12, rtol=0)
    asked = make(encoder, task="pair", classes=3)
    (query, shown, _), (longer, shown_longer, _) = batch(4, 6), batch(4, 6, rows=9)
    torch.testing.assert_close(asked(*narrow, query, shown), asked(*wide, longer, shown_longer), atol=1e-12, rtol=0)


def test_conicity_is_what_its_formula_says():
    torch.manual_seed(1)
    states = torch.randn(3, 6, 5, dtype=torch.float64) + 0.3
    attend = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]).bool()
    found = conicity(states, attend)
    expected = [literal_conicity(states[example][attend[example]]) for example in range(3)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert found[2] == pytest.approx(1)  # a single word is its own mean
    same = states[:, :1].expand(-1, 6, -1)
    torch.testing.assert_close(conicity(same, attend), torch.ones(3, dtype=torch.float64))
    assert conicity(states, torch.zeros_like(attend)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("encoder", ["lstm", "forward", "orthogonal", "cnn", "projection"])
def test_diversity_adds_the_mean_conicity(encoder):
    model = make(encoder, diversity=0.5).train()
    ids, real, attend = batch(8, 5)
    model(ids, real, attend)
    states, _ = model.encoder(ids, real)
    expected = sum(literal_conicity(states[example][attend[example]]) for example in range(2)) / 2
    assert model.penalty.item() == pytest.approx(0.5 * expected, abs=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("embedding", [10, 8])
@pytest.mark.parametrize("encoder", NEW)
def test_tying_adds_how_far_states_are_from_their_words(encoder, embedding):
    model = make(encoder, tying=0.2, embedding=embedding).train()
    ids, real, attend = batch(8, 5, 3)
    model(ids, real, attend)
    assert ("tie.weight" in model.state_dict()) == (embedding != 8)  # as wide as the states: as they are
    examples = []
    for example in range(3):
        words = ids[example, : int(real[example].sum())].tolist()
        states = literal_states(model.encoder, words, orthogonal=encoder == "orthogonal").tolist()
        apart = []
        for row, word in enumerate(words):
            if attend[example, row]:
                e = model.encoder.embedding.weight[word].tolist()
                e = e if embedding == 8 else [dot(weights, e) for weights in model.tie.weight.tolist()]
                apart.append(sum((a - b) ** 2 for a, b in zip(states[row], e, strict=True)))
        examples.append(sum(apart) / len(apart))
    assert model.penalty.item() == pytest.approx(0.2 * sum(examples) / 3, abs=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("encoder", NEW)
def test_masked_adds_the_surprise_at_hidden_words(encoder):
    model = make(encoder, masked=0.3, mask_id=1).train()
    ids, real, attend = batch(12, 9, 10, 12)
    torch.manual_seed(5)
    logits = model(ids, real, attend)
    torch.manual_seed(5)
    drawn = torch.rand(ids.shape)
    surprises = []
    for example in range(len(ids)):
        words = ids[example, : int(real[example].sum())].tolist()
        hidden = [row for row in range(len(words)) if attend[example, row] and drawn[example, row] < 0.15]
        seen = [1 if row in hidden else word for row, word in enumerate(words)]
        states = literal_states(model.encoder, seen, orthogonal=encoder == "orthogonal").tolist()
        for row in hidden:
            weights, biases = model.guess.weight.tolist(), model.guess.bias.tolist()
            scores = [dot(w, states[row]) + b for w, b in zip(weights, biases, strict=True)]
            surprises.append(math.log(sum(math.exp(score) for score in scores)) - scores[words[row]])
    assert len(surprises) > 2
    assert model.penalty.item() == pytest.approx(0.3 * sum(surprises) / len(surprises), abs=1e-10)
    torch.testing.assert_close(model.eval()(ids, real, attend), logits)  # the prediction is from all words


def test_about_15_percent_of_words_are_hidden_and_no_marks(monkeypatch):
    model = make("projection", masked=1.0, mask_id=1).train()
    seen = []
    whole = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda ids, real: seen.append(ids) or whole(ids, real))
    ids, real, attend = batch(*[400, 300] * 20)
    model(ids, real, attend)
    hidden = seen[1] != seen[0]
    assert (seen[1][hidden] == 1).all()
    assert not (hidden & ~attend).any()
    assert float(hidden[attend].double().mean()) == pytest.approx(MASKED, abs=0.01)


def test_no_hidden_word_adds_nothing(monkeypatch):
    model = make(masked=1.0).train()
    monkeypatch.setattr(torch, "rand", lambda shape, device: torch.ones(shape))
    model(*batch(5, 3))
    assert model.penalty.item() == 0
    model.penalty.backward()
    assert all(w.grad is None or w.grad.isfinite().all() for w in model.parameters())


def test_penalties_add_up():
    model = make(**FACTORS).train()

    def penalty(**factors):
        for name in FACTORS:
            setattr(model, name, factors.get(name, 0.0))
        torch.manual_seed(5)
        model(*batch(9, 12, 7))
        return model.penalty.item()

    assert penalty(**FACTORS) == pytest.approx(sum(penalty(**{name: FACTORS[name]}) for name in FACTORS), abs=1e-12)


@pytest.mark.parametrize("encoder", ["lstm", "forward", "orthogonal", "cnn", "projection"])
def test_gradients_flow(encoder):
    model = make(encoder, **FACTORS).train()
    ids, real, attend = batch(9, 12, 7)
    loss = model(ids, real, attend).square().sum()
    (loss + model.penalty).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.count_nonzero(), name
    if encoder == "orthogonal":
        states = model.encoder(ids, real)[0]
        last = torch.autograd.grad(states[1, -1].sum(), model.encoder.embedding.weight)[0]
        assert last[ids[1, 0]].count_nonzero()  # through all steps


def test_gradients_of_orthogonal_states_are_right():
    model = make(hidden=2, embedding=3)
    ids, real, attend = batch(5, 3)
    points = [weight for name, weight in model.named_parameters() if "body" in name]

    def run(*weights):
        named = dict(zip([name for name, _ in model.named_parameters() if "body" in name], weights, strict=True))
        return torch.func.functional_call(model, named, (ids, real, attend))

    assert torch.autograd.gradcheck(run, points)


def test_training_with_a_penalty_lowers_it():
    model = make("forward", diversity=1.0).train()
    inputs = batch(12, 9, 7, 10)
    steps = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for _ in range(30):
        model(*inputs)
        steps.zero_grad()
        model.penalty.backward()
        steps.step()
        seen.append(model.penalty.item())
    assert seen[-1] < 0.8 * seen[0]


def test_penalty_is_there_in_training_only():
    inputs = batch(5, 4)
    model = make(**FACTORS)
    assert model.penalty is None
    model.train()(*inputs)
    assert model.penalty.shape == ()
    assert model.penalty.requires_grad
    model.eval()(*inputs)
    assert model.penalty is None
    plain = make().train()
    plain(*inputs)
    assert plain.penalty is None


def test_a_model_in_training_can_be_copied():
    inputs = batch(5, 4)
    model = make(**FACTORS).train()
    model(*inputs)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert other.penalty is None
        assert other.training
        assert torch.equal(other.eval()(*inputs), copy.deepcopy(model).eval()(*inputs))
    assert model.penalty is not None
    assert not [name for name in model.state_dict() if "penalty" in name]


KEYS = ["inner.weight", "inner.bias", "outer.weight", "decoder.weight", "decoder.bias"]
LSTM = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]


def test_models_without_these_options_are_what_they_were():
    both = LSTM + [f"{name}_reverse" for name in LSTM]
    bodies = {
        "lstm": both,
        "forward": LSTM,
        "orthogonal": LSTM,
        "cnn": [f"{place}.{part}" for place in range(4) for part in ("weight", "bias")],
        "projection": ["weight", "bias"],
    }
    for encoder, body in bodies.items():
        names = ["encoder.embedding.weight", *(f"encoder.body.{name}" for name in body), *KEYS]
        assert [*make(encoder).state_dict()] == names
    torch.manual_seed(3)
    model = AttentionClassifier(words=9, embedding=6, hidden=4)
    after = torch.rand(1)
    torch.manual_seed(3)
    layers = [nn.Embedding(9, 6, padding_idx=0), nn.LSTM(6, 4, bidirectional=True)]
    layers += [nn.Linear(8, 4), nn.Linear(4, 1, bias=False), nn.Linear(8, 1)]
    expected = [weight for layer in layers for weight in layer.state_dict().values()]
    for found, wanted in zip(model.state_dict().values(), expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(after, torch.rand(1))  # no number was drawn besides


def test_options_add_their_own_parameters_after_all_others():
    plain = make().state_dict()
    model = make(**FACTORS).state_dict()
    assert set(model) - set(plain) == {"tie.weight", "guess.weight", "guess.bias"}
    assert all(torch.equal(model[name], plain[name]) for name in plain)
    assert set(make(diversity=0.5).state_dict()) == set(plain)


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan, "much", None, True])
def test_bad_factors_are_refused(name, value):
    with pytest.raises(errors.OptionError, match=f"{name}={value!r} must be a number 0 or more"):
        make(**{name: value})


def test_other_refusals():
    with pytest.raises(errors.OptionError, match="encoder='gru' is not known.*'forward', 'orthogonal'"):
        make("gru")
    for bad in (12, -1):
        with pytest.raises(errors.OptionError, match=f"mask_id={bad} is no word of words=12. Pass the id of '<unk>'"):
            make(masked=0.1, mask_id=bad)
    make(mask_id=12)  # nobody asks
