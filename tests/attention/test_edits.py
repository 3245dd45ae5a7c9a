"""Edits: rows stay on the simplex, masked keys stay zero, what is not edited is bit-identical, gradients are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard import edits
from regard.attention import intervening
from regard.errors import BadEdit, InputError, NonFinite, NoSuchPart, OptionError

HEADS, CHANNEL, WIDTH = 3, 4, 12


class Block(nn.Module):
    """Self-attention, fused or written out, with a residual; padding and causality as asked for."""

    def __init__(self, fused: bool, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fused, self.causal = fused, causal

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, CHANNEL)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = real[:, None, None, :]
        if self.causal:
            mask = mask & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            scores = (q @ k.mT / math.sqrt(CHANNEL)).masked_fill(~mask, torch.finfo(x.dtype).min)
            out = scores.softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two blocks; ``checkpointed`` is None, or what `use_reentrant` is to be."""

    def __init__(self, fused: bool = True, causal: bool = False, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(fused, causal) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointed is None or not torch.is_grad_enabled():
                x = x + block(x, real)
            else:
                x = x + checkpoint(block, x, real, use_reentrant=self.checkpointed)
        return self.norm(x)


def subject_of(model: Model, rows: int, readout="last", whole: bool = False):
    """``whole``: the output is everything the last block has made, to look at rows and heads one by one."""

    def forward(model, x, real):
        if whole:
            x = x + model.blocks[0](x, real)
            return model.blocks[1](x, real).flatten(1)
        hidden = model(x, real)
        if readout == "mean":
            return model.head((hidden * real[..., None]).sum(1) / real.sum(-1, keepdim=True))
        last = real.shape[1] - 1 - real.flip(-1).long().argmax(-1)
        return model.head(hidden[torch.arange(len(x)), last])

    return regard.module(
        model, forward, features=[f"row {i}" for i in range(rows)], readout="mean" if whole else readout,
        padding=lambda x, real: real, output="embedding", special_features=["row 0"],
    )  # fmt: skip


def inputs_of(examples: int, rows: int, side: str = "right", dtype=torch.float32) -> tuple[Tensor, Tensor]:
    lengths = rows - torch.arange(examples) % (rows - 1)  # at least two are real
    place = torch.arange(rows)
    real = place < lengths[:, None] if side == "right" else place >= rows - lengths[:, None]
    return torch.randn(examples, rows, WIDTH, dtype=dtype), real


CHANGES = {
    "permute": lambda **at: edits.permute(3, **at),
    "permute, shared": lambda **at: edits.permute(3, shared=True, **at),
    "permute, special": lambda **at: edits.permute(3, special=True, **at),
    "uniform": lambda **at: edits.uniform(**at),
    "zero": lambda **at: edits.zero([1, -1], **at),
    "detach": lambda **at: edits.detach(**at),
    "custom": lambda **at: edits.custom(sharper, **at),
}


def sharper(weights: Tensor, place: edits.Place) -> Tensor:
    return weights.square() / weights.square().sum(-1, keepdim=True)


class Spy:
    """An edit that changes nothing and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, edits.Place]] = []

    def __call__(self, weights: Tensor, place: edits.Place) -> Tensor:
        self.seen.append((weights.detach().clone(), place))
        return weights


@settings(max_examples=60, deadline=None)
@given(
    change=st.sampled_from(sorted(CHANGES)),
    fused=st.booleans(),
    causal=st.booleans(),
    side=st.sampled_from(["left", "right"]),
    readout=st.sampled_from(["last", "mean"]),
    rows=st.sampled_from(["all", "readout"]),
    examples=st.integers(1, 3),
    length=st.integers(3, 6),
    heads=st.sampled_from([None, [1], [2, 0]]),
    site=st.sampled_from([0, 1, None]),
)
def test_rows_stay_on_the_simplex_and_masked_keys_stay_zero(
    change, fused, causal, side, readout, rows, examples, length, heads, site
):
    torch.manual_seed(length)
    subject = subject_of(Model(fused, causal).eval(), length, readout)
    inputs = inputs_of(examples, length, side)
    at = {"sites": site, "heads": heads, "rows": rows}
    before, after = Spy(), Spy()
    edit = CHANGES[change](**at)
    both = regard.intervene(
        subject, inputs, [edits.custom(before, **at), edit, edits.custom(after, **at)]
    )  # composed: the spies are steps like any other
    alone = regard.intervene(subject, inputs, edit)
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=0)
    real = inputs[1]
    for (old, place), (new, _) in zip(before.seen, after.seen, strict=True):
        assert new.shape == old.shape == (examples, len(heads or range(HEADS)), place.rows.shape[1], length)
        assert place.heads == tuple(heads or range(HEADS))
        # the mask, written out
        seen = real[:, None, None, :].expand_as(new).clone()
        if causal:
            seen &= torch.arange(length) <= place.rows[:, None, :, None]
        shown = real.gather(1, place.rows)[:, None, :, None] & seen.any(-1, keepdim=True)
        assert (new.where(~seen & shown, 0) == 0).all()
        assert (new.where(shown, 0) >= 0).all()
        kept = seen.any(-1) & shown[..., 0]
        mass = new.sum(-1)[kept]
        if change == "zero":  # a row left without keys is 0
            assert ((mass - 1).abs() < 1e-5).logical_or(mass == 0).all()
            gone = torch.zeros_like(real)
            for example, some in enumerate(real):
                there = some.nonzero().squeeze(-1)
                gone[example, there[[1, -1]]] = True
            assert (new * gone[:, None, None]).where(shown, 0).abs().max() == 0
        else:
            assert torch.allclose(mass, torch.ones_like(mass), atol=1e-5)
        if change == "uniform":
            torch.testing.assert_close(
                new.where(shown, 0), (seen / seen.sum(-1, keepdim=True).clamp_min(1)).where(shown, 0)
            )
        if change.startswith("permute"):
            torch.testing.assert_close(new.where(shown, 0).sort(-1)[0], old.where(shown, 0).sort(-1)[0], atol=0, rtol=0)
            if change != "permute, special":
                torch.testing.assert_close(
                    new[..., 0].where(shown[..., 0], 0), old[..., 0].where(shown[..., 0], 0), atol=0, rtol=0
                )


@settings(max_examples=40, deadline=None)
@given(
    change=st.sampled_from([*sorted(CHANGES), "scale", "gate"]),
    fused=st.booleans(),
    causal=st.booleans(),
    row=st.integers(0, 4),
    head=st.integers(0, HEADS - 1),
    seed=st.integers(0, 100),
)
def test_what_is_not_edited_is_bit_identical(change, fused, causal, row, head, seed):
    torch.manual_seed(seed)
    model = Model(fused, causal).eval()
    nn.init.eye_(model.blocks[1].o.weight)  # the output is what each head has made for each row
    nn.init.zeros_(model.blocks[1].o.bias)
    subject = subject_of(model, 5, whole=True)
    inputs = (torch.randn(2, 5, WIDTH), torch.ones(2, 5, dtype=torch.bool))
    plain = regard.intervene(subject, inputs, []).view(2, 5, HEADS, CHANNEL)
    at = {"sites": 1, "rows": row}
    edit = (
        edits.scale(0.5, heads=head, **at) if change == "scale"
        else edits.gate(head, 0.5, **at) if change == "gate"
        else CHANGES[change](heads=head, **at)
    )  # fmt: skip
    edited = regard.intervene(subject, inputs, edit).view(2, 5, HEADS, CHANNEL)
    other = torch.ones(2, 5, HEADS, dtype=torch.bool)
    other[:, row, head] = False
    assert torch.equal(edited[other], plain[other])
    if change in ("scale", "gate"):
        torch.testing.assert_close(edited[~other], plain[~other] / 2)


@settings(max_examples=20, deadline=None)
@given(fused=st.booleans(), causal=st.booleans(), side=st.sampled_from(["left", "right"]), seed=st.integers(0, 100))
def test_an_identity_changes_nothing(fused, causal, side, seed):
    torch.manual_seed(seed)
    subject = subject_of(Model(fused, causal).eval(), 5, "mean")
    inputs = inputs_of(3, 5, side)
    plain = regard.intervene(subject, inputs, [])
    with torch.no_grad():
        assert torch.equal(plain, subject.forward(subject.encode(inputs)))
    for edit in (
        edits.custom(lambda weights, place: weights),
        edits.scale(1.0),
        edits.gate(None, torch.ones(HEADS)),
        edits.detach(),
    ):
        torch.testing.assert_close(regard.intervene(subject, inputs, edit), plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_shortcuts_of_the_kernel_are_what_the_weights_would_give(causal):
    """Uniform and multiplied rows never form weights; said for each head by hand, they do."""
    subject = subject_of(Model(True, causal).eval(), 5, "mean")
    inputs = inputs_of(3, 5)
    every = list(range(HEADS))
    pairs = [
        (edits.uniform(), edits.uniform(heads=every)),
        (edits.scale(0.3), edits.custom(lambda weights, place: 0.3 * weights, allow_unnormalised=True)),
        (edits.gate([2, 1], torch.tensor([0.5, 2.0])), edits.custom(
            lambda weights, place: weights * torch.tensor([1.0, 2.0, 0.5])[:, None, None], allow_unnormalised=True)),
        ([edits.uniform(sites=0), edits.scale(0.3, sites=0)], [edits.uniform(sites=0, heads=every), edits.scale(0.3, sites=0)]),
    ]  # fmt: skip
    for short, literal in pairs:
        one, other = regard.intervene(subject, inputs, short), regard.intervene(subject, inputs, literal)
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_edits_are_made_in_the_order_of_the_list():
    subject = subject_of(Model().eval(), 4)
    inputs = inputs_of(2, 4)
    spy = Spy()
    regard.intervene(
        subject,
        inputs,
        [edits.zero(0, renormalise=False), edits.uniform(rows="readout"), edits.custom(spy, rows="readout")],
    )
    weights, _ = spy.seen[0]
    mass = weights.sum(-1)  # zero took mass away; uniform keeps the row's sum, and gives key 0 its share again
    assert (mass < 0.99).all()
    assert (weights[..., 0] > 0.1 * mass).all()
    spy = Spy()
    regard.intervene(subject, inputs, [edits.uniform(rows="readout"), edits.zero(0), edits.custom(spy, rows="readout")])
    assert (spy.seen[0][0][..., 0] == 0).all()


def test_different_heads_and_rows_compose():
    torch.manual_seed(0)
    subject = subject_of(Model().eval(), 4, "mean")
    inputs = (torch.randn(2, 4, WIDTH), torch.ones(2, 4, dtype=torch.bool))
    first = {"sites": 0, "heads": [2, 1], "rows": [3, 0]}
    second = {"sites": 0, "heads": 1, "rows": [1, 3]}

    def literal(weights: Tensor, place: edits.Place) -> Tensor:
        weights = weights.clone()
        for head in (1, 2):
            for row in (0, 3):
                weights[:, head, row] = weights[:, head, row].square() / weights[:, head, row].square().sum(
                    -1, keepdim=True
                )
        for row in (1, 3):
            weights[:, 1, row] = weights[:, 1, row].flip(-1)
        return weights

    edited = regard.intervene(
        subject,
        inputs,
        [edits.custom(sharper, **first), edits.custom(lambda weights, place: weights.flip(-1), **second)],
    )
    expected = regard.intervene(subject, inputs, edits.custom(literal, sites=0))
    torch.testing.assert_close(edited, expected, atol=1e-6, rtol=0)


def test_replaced_rows_are_in_the_order_they_are_named():
    subject = subject_of(Model().eval(), 4, "mean")
    inputs = (torch.randn(1, 4, WIDTH), torch.ones(1, 4, dtype=torch.bool))
    given = torch.eye(4)[[3, 1]]  # row 2 looks at key 3, row 0 at key 1
    edited = regard.intervene(subject, inputs, edits.replace(given, sites=1, rows=[2, 0]))
    singly = [edits.replace(torch.eye(4)[key], sites=1, rows=row) for row, key in ((0, 1), (2, 3))]
    torch.testing.assert_close(edited, regard.intervene(subject, inputs, singly), atol=1e-6, rtol=0)


# --- variants


def test_variants_are_what_single_runs_would_give(monkeypatch):
    subject = subject_of(Model().eval(), 5)
    inputs = inputs_of(3, 5)
    edit = edits.permute(7, sites=1)
    many = regard.intervene(subject, inputs, edit, variants=6)
    assert many.shape == (6, 3, 2)
    assert (many.std(0) > 0)[0].all()  # the longest example has something to permute
    monkeypatch.setattr(intervening, "ROWS_AT_ONCE", 30)
    torch.testing.assert_close(regard.intervene(subject, inputs, edit, variants=6), many, atol=1e-6, rtol=0)
    torch.testing.assert_close(regard.intervene(subject, inputs, edit), many[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(
        regard.intervene(subject, inputs, edit, variants=6, replay=False), many, atol=1e-6, rtol=0
    )


def test_each_variant_can_have_its_own_edit():
    subject = subject_of(Model().eval(), 4)
    inputs = inputs_of(2, 4)
    alphas = torch.linspace(0, 1, 5)
    gates = torch.rand(5, 2, HEADS)
    gone = torch.rand(5, 2, 4) < 0.3
    gone[..., 0] = False
    swapped = torch.rand(5, 2, HEADS, 1, 4).masked_fill(~inputs[1][:, None, None], 0)
    swapped = swapped / swapped.sum(-1, keepdim=True)
    for many, one in (
        (edits.scale(alphas), lambda i: edits.scale(float(alphas[i]))),
        (edits.gate(None, gates), lambda i: edits.gate(None, gates[i])),
        (edits.zero(gone), lambda i: edits.zero(gone[i])),
        (edits.replace(swapped), lambda i: edits.replace(swapped[i])),
    ):
        together = regard.intervene(subject, inputs, many, variants=5)
        for i in range(5):
            torch.testing.assert_close(together[i], regard.intervene(subject, inputs, one(i)), atol=1e-6, rtol=0)
    with pytest.raises(BadEdit, match="5, 2, 3.*6 variants"):
        regard.intervene(subject, inputs, edits.gate(None, gates), variants=6)
    with pytest.raises(BadEdit, match="no variants were asked for"):
        regard.intervene(subject, inputs, edits.scale(alphas))


def test_blocks_of_rows_change_nothing(monkeypatch):
    from regard.attention import editing

    subject = subject_of(Model().eval(), 6, "mean")
    inputs = inputs_of(2, 6)
    given = torch.rand(6, 6).masked_fill(~inputs[1].all(0), 0)
    for edit in (edits.permute(1, rows="all"), edits.replace(given / given.sum(-1, keepdim=True), rows="all")):
        whole = regard.intervene(subject, inputs, edit, variants=2)
        monkeypatch.setattr(editing, "BLOCK_BYTES", 1)
        torch.testing.assert_close(regard.intervene(subject, inputs, edit, variants=2), whole, atol=1e-6, rtol=0)
        monkeypatch.undo()


def test_variants_that_do_not_fit_are_split_and_it_says_so(caplog):
    subject = subject_of(Model().eval(), 4)
    inputs = inputs_of(1, 4)

    def greedy(weights: Tensor, place: edits.Place) -> Tensor:
        if len(place.variants) > 3:
            raise torch.OutOfMemoryError("16 GiB asked for")
        return sharper(weights, place)

    with caplog.at_level("WARNING", "regard"):
        edited = regard.intervene(subject, inputs, edits.custom(greedy), variants=10)
    torch.testing.assert_close(edited, regard.intervene(subject, inputs, sharper, variants=10), atol=1e-6, rtol=0)
    assert "10 variants do not fit into memory; going on with 5 at a time" in caplog.text
    assert "going on with 2 at a time" in caplog.text


# --- what cannot be done


@pytest.fixture
def small():
    return subject_of(Model().eval(), 4), inputs_of(2, 4)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (
            lambda: edits.uniform(sites=2),
            NoSuchPart,
            r"sites=2 is not there. There are 0: blocks.0 \(self\), 1: blocks.1",
        ),
        (lambda: edits.uniform(sites="blocks.7"), NoSuchPart, "'blocks.7' is not there"),
        (lambda: edits.uniform(sites=["cross"]), NoSuchPart, "'cross' is not there"),
        (lambda: edits.uniform(heads=[0, 3]), NoSuchPart, r"heads=\[0, 3\]: site 0 \(blocks.0\) has heads 0 to 2"),
        (lambda: edits.uniform(heads=[]), OptionError, r"heads=\[\] must be a whole number"),
        (lambda: edits.uniform(heads=[True, False, True]), OptionError, "A mask is none: pass its numbers"),
        (lambda: edits.uniform(heads="all"), OptionError, "heads='all' must be a whole number"),
        (lambda: edits.uniform(sites=[]), OptionError, r"sites=\[\] must be"),
        (lambda: edits.uniform(sites=1.5), OptionError, "sites=1.5 must be"),
        (
            lambda: edits.uniform(rows=4),
            NoSuchPart,
            r"rows=4 at site 0 .*: \[4\] are not there in every example. There are 0 to 2",
        ),
        (lambda: edits.uniform(rows=torch.ones(4, dtype=torch.bool)), OptionError, "A mask is none"),
        (lambda: edits.uniform(rows="last"), NoSuchPart, "rows='last' is neither"),
        (
            lambda: edits.zero([1, 9]),
            NoSuchPart,
            r"positions=\[1, 9\] at site 0 .*: \[9\] are not there in every example. There are 0 to 2",
        ),
        (
            lambda: edits.zero(torch.zeros(2, 5, dtype=torch.bool)),
            BadEdit,
            r"\(2, 5\) does not fit site 0 .* is \(2, 4\)",
        ),
        (lambda: edits.zero([True, False]), OptionError, "A mask is none"),
        (lambda: edits.zero("film"), OptionError, "positions='film'"),
        (lambda: edits.replace(torch.full((4,), 0.5)), BadEdit, "sums to 2, not 1. Pass allow_unnormalised=True"),
        (lambda: edits.replace(torch.tensor([1.5, -0.5, 0, 0])), BadEdit, "has a negative weight"),
        (lambda: edits.replace(torch.tensor([0.0, 0, 0, 1])), BadEdit, "gives weight 1 to keys that the mask hides"),
        (
            lambda: edits.replace(torch.rand(2, HEADS, 1, 7)),
            BadEdit,
            r"\(2, 3, 1, 7\) do not fit site 0 .* is \(2, 3, 1, 4\)",
        ),
        (lambda: edits.gate([0, 1], torch.ones(3)), BadEdit, r"values of shape \(3,\) do not fit 2 heads"),
        (lambda: edits.gate(None, torch.ones(5, 3)), BadEdit, "does not fit"),
        (lambda: edits.scale(torch.ones(2, 2)), BadEdit, r"alpha has shape \(2, 2\)"),
        (lambda: edits.permute(-1), BadEdit, "seed=-1"),
        (lambda: edits.permute(0.5), OptionError, "seed=0.5"),
        (lambda: edits.custom(lambda weights, place: weights / 0), BadEdit, "returned NaN or Inf"),
        (
            lambda: edits.custom(lambda weights, place: weights[..., :2]),
            BadEdit,
            r"returned \(2, 3, 4, 2\); .* \(2, 3, 4, 4\)",
        ),
        (lambda: edits.custom(lambda weights, place: None), BadEdit, "returned NoneType"),
        (lambda: edits.custom(lambda weights, place: weights.to("meta")), BadEdit, "on meta; the weights are on cpu"),
        (lambda: edits.custom(lambda weights, place: 2 * weights), BadEdit, "sums to 2"),
        (lambda: edits.replace(None), BadEdit, "weights=None is neither a number nor a tensor"),
        (lambda: edits.scale("x"), BadEdit, "alpha='x' is neither"),
        (lambda: edits.scale(float("nan")), BadEdit, "alpha holds NaN"),
        (lambda: edits.gate(0, None), BadEdit, "values=None is neither"),
        (lambda: edits.uniform, BadEdit, r"uniform is not called. Write regard.edits.uniform"),
        (lambda: [edits.gate], BadEdit, "gate is not called"),
        (lambda: [lambda weights: weights], BadEdit, r"must take \(weights, place\)"),
        (lambda: None, BadEdit, "None is not an edit"),
        (lambda: "uniform", BadEdit, "'uniform' is not an edit"),
        (lambda: edits.custom("uniform"), BadEdit, "'uniform' is not an edit"),
        (lambda: ["uniform"], BadEdit, "'uniform' is not an edit"),
    ],
)
def test_edits_that_cannot_be_made(small, edit, error, message):
    with pytest.raises(error, match=message):
        regard.intervene(*small, edit())
    assert not any("forward" in vars(module) for module in small[0].model.modules())


@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_count_what_is_real_so_a_batch_is_its_singles(side):
    subject = subject_of(Model().eval(), 5)
    x, real = inputs_of(3, 5, side)  # 5, 4 and 3 rows
    for edit in (
        edits.zero([0, -1]), edits.zero(2), edits.uniform(rows=[0, 2]), edits.custom(sharper, rows=-1),
        edits.replace(torch.eye(5)[2], rows=np.int64(1), allow_unnormalised=True),
    ):  # fmt: skip
        together = regard.intervene(subject, (x, real), edit)
        if edit.name == "replace":
            continue  # its keys are rows of the tensor
        for number, some in enumerate(real):
            alone = subject_of(subject.model, int(some.sum()))
            single = regard.intervene(alone, (x[number : number + 1, some], some[None, some]), edit)
            torch.testing.assert_close(single[0], together[number], atol=1e-6, rtol=0)
    with pytest.raises(NoSuchPart, match=r"rows=\[3\].*not there in every example. There are 0 to 2"):
        regard.intervene(subject, (x, real), edits.uniform(rows=[3]))


def test_a_row_named_twice_is_edited_once():
    subject = subject_of(Model().eval(), 4)
    inputs = (torch.randn(1, 4, WIDTH), torch.ones(1, 4, dtype=torch.bool))
    once, twice = (regard.intervene(subject, inputs, edits.permute(1, rows=rows)) for rows in ([2], [2, -2]))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("variants", [0, -1, 2.5, True, "many"])
def test_variants_must_be_a_number(small, variants):
    with pytest.raises(InputError, match="variants="):
        regard.intervene(*small, edits.uniform(), variants=variants)


def test_an_edit_that_writes_into_the_weights_is_checked_all_the_same(small):
    with pytest.raises(BadEdit, match="sums to 2"):
        regard.intervene(*small, edits.custom(lambda weights, place: weights.mul_(2)))


def test_many_hidden_keys_are_noticed_together():
    subject = subject_of(Model().eval(), 400)
    inputs = (torch.randn(1, 400, WIDTH), torch.arange(400)[None] < 4)
    even = torch.full((400,), 1 / 400)  # less than a thousandth for each, and nearly all of it on padding
    with pytest.raises(BadEdit, match=r"gives weight 0.99 to keys that the mask hides"):
        regard.intervene(subject, inputs, edits.replace(even))


def test_too_many_rows_are_refused(small):
    subject, inputs = small
    given = regard.trace(subject, inputs).sites[1].weights()  # all rows; only the last is edited
    with pytest.raises(BadEdit, match=r"\(2, 3, 4, 4\) do not fit site 1 .* edited row, key\) is \(2, 3, 1, 4\)"):
        regard.intervene(subject, inputs, edits.replace(given, sites=1))
    same = regard.intervene(subject, inputs, edits.replace(given, sites=1, rows="all"))
    torch.testing.assert_close(same, regard.intervene(subject, inputs, []), atol=1e-6, rtol=0)


def test_unnormalised_weights_are_taken_when_meant(small):
    subject, inputs = small
    double = edits.replace(torch.tensor([2.0, 0, 0, 0]), sites=1, allow_unnormalised=True)
    single = [edits.replace(torch.tensor([1.0, 0, 0, 0]), sites=1), edits.scale(2.0, sites=1, rows="readout")]
    torch.testing.assert_close(
        regard.intervene(subject, inputs, double), regard.intervene(subject, inputs, single), atol=1e-6, rtol=0
    )


def test_an_output_that_is_not_finite_is_named(small):
    with pytest.raises(NonFinite, match="output under these edits"):
        regard.intervene(*small, [edits.scale(3e38, sites=1), edits.scale(1e3, sites=1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_which_keys_may_be_seen_outlives_a_cast(dtype):
    """Softmax in float32, then a cast to half precision, as Hugging Face writes it: small weights become 0."""

    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = (6 * x @ x.mT).float() + torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
            weights = nn.functional.dropout(scores.softmax(-1).to(x.dtype), 0.1, training=False)
            return (weights[..., None] * x[:, None]).sum(2)

    torch.manual_seed(0)
    x = torch.randn(2, 4, WIDTH).to(dtype)
    subject = regard.module(
        Cast(), lambda model, x: model(x).flatten(1), features=list("abcd"), readout="mean", output="embedding"
    )
    assert (regard.trace(subject, x).sites[0].weights().tril() == 0).sum() > 12
    expected = torch.stack([x[:, : row + 1].float().mean(1) for row in range(4)], 1)
    edited = regard.intervene(subject, x, edits.uniform()).view_as(x).float()
    torch.testing.assert_close(edited, expected, atol={torch.float32: 1e-6}.get(dtype, 0.02), rtol=0)


def test_a_fused_call_that_is_no_site_is_left_alone():
    """A kernel over memory slots in the same module, before the attention over rows."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slots, self.q = nn.Parameter(torch.randn(1, 1, 7, WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            slots = self.slots.expand(len(x), -1, -1, -1)
            x = x + F.scaled_dot_product_attention(self.q(x)[:, None], slots, slots).squeeze(1)
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]).squeeze(1)

    torch.manual_seed(0)
    model, x = Memory(), torch.randn(2, 4, WIDTH)
    subject = regard.module(
        model, lambda model, x: model(x).flatten(1), features=list("abcd"), readout="mean", output="embedding"
    )
    with torch.no_grad():
        slots = model.slots.expand(2, -1, -1, -1)
        states = x + F.scaled_dot_product_attention(model.q(x)[:, None], slots, slots).squeeze(1)
    expected = states.mean(1, keepdim=True).expand_as(x)
    torch.testing.assert_close(regard.intervene(subject, x, edits.uniform()).view_as(x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("fused", [True, False])
def test_a_key_whose_weight_has_vanished_can_be_seen_all_the_same(fused, hidden):
    """Scores hundreds apart leave weights of exactly 0; only the mask says which keys may be seen."""

    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bias = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), hidden)
            q, k = 10 * x[:, None], x[:, None]
            if fused:
                return F.scaled_dot_product_attention(q, k, x[:, None], bias).squeeze(1)
            return ((q @ k.mT / math.sqrt(WIDTH) + bias).softmax(-1) @ x[:, None]).squeeze(1)

    torch.manual_seed(0)
    x = 3 * torch.randn(2, 4, WIDTH)
    subject = regard.module(
        Steep(), lambda model, x: model(x).flatten(1), features=list("abcd"), readout="mean", output="embedding"
    )
    assert (regard.trace(subject, x).sites[0].weights().tril() == 0).sum() > 16  # 12 are above the diagonal
    expected = torch.stack([x[:, : row + 1].mean(1) for row in range(4)], 1)
    torch.testing.assert_close(regard.intervene(subject, x, edits.uniform()).view_as(x), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        regard.intervene(subject, x, edits.uniform(heads=0)).view_as(x), expected, atol=1e-5, rtol=0
    )
    plain = regard.intervene(subject, x, [])
    same = regard.intervene(subject, x, edits.custom(lambda weights, place: weights))
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=0)
