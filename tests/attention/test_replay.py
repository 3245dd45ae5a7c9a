"""Replay: what lies upstream of an edit is run once, and gives way where it cannot be right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from test_edits import WIDTH, Block, Model, inputs_of, subject_of
from torch import Tensor, nn

import regard
from regard import edits
from regard.attention import Rerun


@pytest.fixture
def small():
    return subject_of(Model().eval(), 4), inputs_of(2, 4)


class Awkward(nn.Module):
    """Parts that cannot be replayed: one writes into its input, one returns an object of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = Model(), Block(True, False)
        self.head = nn.Linear(WIDTH, 2)
        self.odd = Odd(how)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.first(x, real)
        made = self.odd(x)
        x = made.x if hasattr(made, "x") else x if made is None else made
        return self.head((x + self.second(x, real)).mean(1))


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> object:
        if self.how == "writes":
            x += x.mean(1, keepdim=True)
            return None
        if self.how == "object":
            return type("Thing", (), {"x": x * 2})()
        return x.transpose(0, 1).reshape(x.shape) if self.how == "mixes examples" else x


@pytest.mark.parametrize("how", ["writes", "object", "nothing", "mixes examples"])
def test_replay_gives_way_where_it_cannot_be_right(how, caplog):
    torch.manual_seed(0)
    subject = regard.module(
        Awkward(how).eval(), lambda model, x, real: model(x, real), features=list("abcd"), readout="mean", output="embedding",
        padding=lambda x, real: real,
    )  # fmt: skip
    inputs = (torch.randn(3, 4, WIDTH), torch.ones(3, 4, dtype=torch.bool))
    rerun = Rerun(subject, inputs)
    edit = edits.permute(1, sites=2)
    with caplog.at_level("DEBUG", "regard"):
        replayed = rerun(edit, variants=6)
    full = Rerun(subject, inputs, replay=False)(edit, variants=6)
    torch.testing.assert_close(replayed, full, atol=1e-6, rtol=0)
    used = rerun.upstream[2].recording is not None
    assert used == (how in ("nothing", "object"))
    assert ("replay is off" in caplog.text) == (how == "writes")
    assert ("run one by one" in caplog.text) == (how == "mixes examples")
    if how == "object":  # it is run; what lies before it is not
        assert not any(call[-1][0] == id(subject.model.odd) for call in rerun.upstream[2].recording.outputs)


def test_replay_is_proved_before_it_is_used(small, monkeypatch, caplog):
    """A recording that is wrong is noticed, and the model is run in full."""
    from regard.attention import replay

    subject, inputs = small
    expected = regard.intervene(subject, inputs, edits.permute(1, sites=1), variants=5)
    repeated = replay._repeated
    monkeypatch.setattr(replay, "_repeated", lambda leaf, axis, variants: repeated(leaf, axis, variants) * 1.01)
    with caplog.at_level("DEBUG", "regard"):
        again = regard.intervene(subject, inputs, edits.permute(1, sites=1), variants=5)
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)
    assert "replay is off: two variants do not give what they give when all is run" in caplog.text


class Between(nn.Module):
    """A module between the softmax and the values, or one that gives the scores: they are followed by identity."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.1) if how == "dropout" else nn.Identity()
        self.scores = Scores() if how == "scores" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = self.scores(q, k) if self.scores is not None else q @ k.mT
        return x + (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)


class Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


@pytest.mark.parametrize("how", ["dropout", "scores", "nothing"])
@pytest.mark.parametrize("site", [0, 1])
def test_an_edit_is_never_lost(how, site):
    """Four heads of four rows: only its data flow tells the softmax from a mixture of experts."""
    torch.manual_seed(0)
    model = nn.Sequential(Between(how), Between(how)).eval()
    subject = regard.module(
        model, lambda model, x: model(x).mean(1), features=list("abcd"), readout="mean", output="embedding"
    )
    x = torch.randn(2, 4, WIDTH)
    rerun = Rerun(subject, x)
    on = rerun(edits.uniform(sites=site), variants=5)
    off = Rerun(subject, x, replay=False)(edits.uniform(sites=site), variants=5)
    assert (on - rerun.output).abs().max() > 0.01
    torch.testing.assert_close(on, off, atol=1e-6, rtol=0)
    assert rerun.upstream[site].recording is not None


def test_a_site_that_is_not_reached_is_an_error(small):
    """A model that leaves early when its first attention is edited."""

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(True, False), Block(True, False)

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            made = self.one(x, real)
            return made.mean(1) if made.abs().max() > 100 else self.two(x + made, real).mean(1)

    subject = regard.module(
        Early().eval(), lambda model, x, real: model(x, real), features=list("abcd"), readout="mean", output="embedding"
    )
    with pytest.raises(regard.errors.NotReproduced, match=r"site 1 \(two\) was not reached.*another path"):
        regard.intervene(subject, small[1], [edits.scale(1e6, sites=0), edits.uniform(sites=1)])


def test_a_rerun_can_be_differentiated_again_and_again(small):
    subject, inputs = small
    rerun = Rerun(subject, inputs, gradients=True)
    found = []
    for _ in range(2):
        subject.model.zero_grad()
        rerun(edits.permute(0, sites=1), variants=5).sin().sum().backward()
        found.append(subject.model.blocks[0].q.weight.grad.clone())
    assert found[0].abs().max() > 0
    assert torch.equal(*found)
    subject.model.requires_grad_(False)
    frozen = Rerun(subject, inputs, gradients=True)
    gate = torch.ones(3, requires_grad=True)
    for _ in range(2):
        frozen(edits.gate(None, gate, sites=1), variants=5).sin().sum().backward()
    assert gate.grad.abs().max() > 0


def test_threads_may_replay_the_same_model(small):
    subject, inputs = small

    def run() -> Tensor:
        return regard.intervene(subject, inputs, edits.permute(1, sites=1), variants=5)

    expected = run()
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(run) for _ in range(8)]]
    assert all(torch.equal(one, expected) for one in found)
    assert not any("forward" in vars(module) for module in subject.model.modules())


class Mean(nn.Module):
    """Centres by the mean of the batch: two equal variants do not show that examples look at one another."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Picks(nn.Module):
    """Where the last row of each example lies among all rows: repeated for each variant, it would be the first's."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(len(x)) * x.shape[1] + x.shape[1] - 1


@pytest.mark.parametrize(("how", "examples"), [("mean", 2), ("picks", 1), ("picks", 2)])
def test_variants_that_differ_are_what_proves(how, examples, caplog):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.mean, self.picks = Block(True, False), Mean(), Picks()

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            place = self.picks(x)
            made = x + self.one(x, real)
            return self.mean(made).mean(1) if how == "mean" else made.flatten(0, 1)[place]

    torch.manual_seed(0)
    readout = "mean" if how == "mean" else "last"
    subject = regard.module(
        Odd().eval(), lambda model, x, real: model(x, real), features=list("abcd"), readout=readout, output="embedding"
    )
    inputs = (torch.randn(examples, 4, WIDTH), torch.ones(examples, 4, dtype=torch.bool))
    with caplog.at_level("DEBUG", "regard"):
        many = regard.intervene(subject, inputs, edits.permute(0, rows="all"), variants=6)
    assert many.std(0).max() > 1e-3
    torch.testing.assert_close(
        many[0], regard.intervene(subject, inputs, edits.permute(0, rows="all")), atol=1e-6, rtol=0
    )
    assert ("run one by one" if how == "mean" else "replay is off") in caplog.text


def test_attention_across_samples_is_edited_and_its_variants_run_one_by_one():
    class Saint(nn.Module):
        """Attention over columns, then over the rows of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.columns, self.head = Block(True, False), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor, real: Tensor) -> Tensor:
            x = x + self.columns(x, real)
            flat = x.flatten(1)[None, None]
            return self.head(F.scaled_dot_product_attention(flat, flat, flat).view_as(x).mean(1))

    torch.manual_seed(0)
    subject = regard.module(
        Saint().eval(), lambda model, x, real: model(x, real), features=list("abcd"), readout="mean"
    )
    inputs = (torch.randn(3, 4, WIDTH), torch.ones(3, 4, dtype=torch.bool))
    assert [site.kind for site in regard.trace(subject, inputs).sites] == ["self", "samples"]
    for site in (0, 1):
        edit = edits.permute(0, sites=site, rows="all")
        many = regard.intervene(subject, inputs, edit, variants=5)
        torch.testing.assert_close(many[0], regard.intervene(subject, inputs, edit), atol=1e-6, rtol=0)
        assert many.std(0).max() > 1e-5


def test_threads_leave_a_model_in_train_mode(small):
    subject, inputs = small
    subject.model.train()
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(regard.intervene, subject, inputs, edits.uniform()) for _ in range(12)]:
            future.result()
    assert all(module.training for module in subject.model.modules())
