"""Weights that are learned from: the same as a trace has, with their graph, in train mode too."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn

import regard
from regard.attention.learning import Watch
from regard.errors import NoSuchPart, NotServed
from regard.subjects.scratch import scratch_text

TEXTS = ["a good film so dull", "bad", "a film bad so so good"]
WORDS = {
    word: place
    for place, word in enumerate(["<pad>", "<unk>", "<sos>", "<eos>", *["a", "good", "film", "so", "dull", "bad"]])
}
TABLE = pd.DataFrame({"a": [0.1, -2.0, 3.0, 0.5, 1.0], "b": [1.0, 0.0, -1.0, 2.0, 0.3], "c": ["x", "y", "x", "y", "x"]})


def pooled():
    torch.manual_seed(0)
    return regard.pooled(regard.models.AttentionClassifier(words=len(WORDS), embedding=8, hidden=4), WORDS)


def bert():
    return scratch_text(TEXTS, ["negative", "positive"])


def table():
    model = regard.estimators.FTTransformerClassifier(blocks=2, width=16, epochs=1)
    return model.fit(TABLE, [0, 1, 0, 1, 0]).subject_


SUBJECTS = {"pooled": (pooled, TEXTS), "bert": (bert, TEXTS), "table": (table, TABLE)}


@pytest.fixture(params=SUBJECTS)
def both(request):
    make, inputs = SUBJECTS[request.param]
    return make(), inputs


def test_outputs_and_weights_are_those_of_a_trace(both):
    subject, inputs = both
    batch = subject.encode(inputs)
    watch = Watch(subject, inputs, sites="all")
    subject.model.eval()
    t = regard.trace(subject, batch)
    torch.testing.assert_close(watch(batch), t.output, rtol=0, atol=1e-6)
    for site, look in zip(t.sites, watch.looks(), strict=True):
        torch.testing.assert_close(look.heads, site.pull(t.readout, per_head=True), rtol=0, atol=1e-6)
        torch.testing.assert_close(look.mean, site.pull(t.readout), rtol=0, atol=1e-6)
        torch.testing.assert_close(look.read.sum(-1), torch.ones(len(batch)))


def test_uniform_is_that_of_the_edit(both):
    subject, inputs = both
    batch = subject.encode(inputs)
    watch = Watch(subject, inputs, uniform="all")
    subject.model.eval()
    plain = watch(batch)
    torch.testing.assert_close(plain, regard.intervene(subject, batch, [regard.edits.uniform()]), rtol=0, atol=1e-5)
    assert not torch.equal(plain, regard.trace(subject, batch).output)


def test_gradients_of_weights_are_those_of_finite_differences():
    subject = pooled()
    subject.model.double()
    watch, batch = Watch(subject, TEXTS), subject.encode(TEXTS)

    def loss():
        watch(batch)
        return (watch.looks()[0].mean ** 2).sum()

    parameter = subject.model.inner.weight
    (gradient,) = torch.autograd.grad(loss(), [parameter])
    with torch.no_grad():
        for at in ((0, 0), (1, 3)):
            parameter[at] += 1e-6
            up = float(loss())
            parameter[at] -= 2e-6
            down = float(loss())
            parameter[at] += 1e-6
            assert float(gradient[at]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-9)


class Dropping(nn.Module):
    """Hand-written attention that drops half of its weights."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1, 4), nn.Linear(4, 2)
        self.seen = None

    def forward(self, x):
        h = self.up(x[..., None])
        weights = nn.functional.dropout((h @ h.mT).softmax(-1), 0.5, self.training)
        self.seen = weights
        return self.down((weights @ h).mean(1))


def test_what_drops_out_drops_out_and_the_weights_are_whole():
    torch.manual_seed(0)
    subject = regard.module(Dropping(), lambda model, x: model(x), features=list("abcdef"), readout="mean")
    rows = pd.DataFrame(torch.randn(4, 6).numpy(), columns=list("abcdef"))
    batch = subject.encode(rows)
    watch = Watch(subject, rows.head(3))
    subject.model.train()
    outputs = torch.stack([watch(batch).detach() for _ in range(400)])
    weights = watch.looks()[0].weights
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert outputs.std(0).max() > 0.01, "each pass drops others"
    torch.manual_seed(1)
    plain = torch.stack([subject.forward(batch).detach() for _ in range(400)])
    torch.testing.assert_close(outputs.mean(0), plain.mean(0), rtol=0, atol=4 * float(plain.std() / 20))
    torch.testing.assert_close(outputs.std(0), plain.std(0), rtol=0.2, atol=0.01)


def test_the_model_stays_in_its_mode_and_is_told_from_others():
    subject = bert()
    watch = Watch(subject, TEXTS)
    subject.model.train()
    watch(subject.encode(TEXTS))
    assert subject.model.training
    assert watch.sites == [1]
    with pytest.raises(NoSuchPart, match="sites=7 is not there"):
        Watch(subject, TEXTS, sites=7)
    subject.model.gradient_checkpointing_enable()
    with pytest.raises(NotServed, match="checkpoints its activations"):
        Watch(subject, TEXTS)
