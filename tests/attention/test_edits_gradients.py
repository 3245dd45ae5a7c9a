"""Edits can be differentiated: by what they hold and by the model's parameters, with and without checkpointing."""

from __future__ import annotations

import pytest
import torch
from test_edits import HEADS, WIDTH, Model, inputs_of, sharper, subject_of
from torch import Tensor

import regard
from regard import edits


@pytest.fixture
def double():
    """Finite differences need float64."""
    torch.manual_seed(0)
    return lambda **options: Model(**options).double().eval()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("variants", [None, 4])
def test_gradients_agree_with_finite_differences(double, fused, variants):
    model = double(fused=fused, causal=True)
    subject = subject_of(model, 4)
    inputs = inputs_of(2, 4, dtype=torch.float64)
    weights = torch.rand(2, HEADS, 1, 4, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    makers = [
        (lambda x: edits.replace(x, sites=1, allow_unnormalised=True), weights),
        (lambda x: edits.replace(x, sites=0, allow_unnormalised=True), weights),
        (lambda x: edits.gate(None, x), gates),
        (lambda x: edits.gate(None, x, rows="readout", sites=1), gates),
        (edits.scale, alpha),
    ]
    for make, leaf in makers:
        for replay in (True, False):
            assert torch.autograd.gradcheck(
                lambda x, make=make, replay=replay: regard.intervene(
                    subject, inputs, make(x), gradients=True, variants=variants, replay=replay
                ),
                [leaf],
            )


CASES = {
    "permute": edits.permute(1),
    "uniform": edits.uniform(),
    "uniform, one head": edits.uniform(heads=1),
    "zero": edits.zero(1),
    "scale": edits.scale(0.4),
    "gate": edits.gate([0, 2], torch.tensor([0.3, 0.6])),
    "detach": edits.detach(),
    "detach, one head": edits.detach(heads=1),
    "custom": edits.custom(sharper),
    "several": [edits.uniform(sites=0), edits.custom(sharper, sites=1, rows="readout"), edits.scale(0.5, sites=1)],
}


def gradients(model: Model, edit: object, inputs: object, **options) -> list[Tensor]:
    output = regard.intervene(subject_of(model, 4), inputs, edit, gradients=True, **options)
    model.zero_grad()
    output.sin().sum().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fused", [True, False])
def test_checkpointing_gives_the_same_gradients(double, case, fused):
    """The backward pass recomputes what was checkpointed: it must do so under the same edits."""
    model = double(fused=fused)
    x, real = inputs_of(2, 4, dtype=torch.float64)
    x.requires_grad_()  # reentrant checkpoints ask for it
    plain = gradients(model, CASES[case], (x, real))
    unedited = gradients(model, [], (x, real))
    if not case.startswith("detach"):
        assert max(float((one - other).abs().max()) for one, other in zip(plain, unedited, strict=True)) > 1e-3
    for reentrant in (False, True):
        model.checkpointed = reentrant
        again = gradients(model, CASES[case], (x, real))
        for one, other in zip(plain, again, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
        many = gradients(model, CASES[case], (x, real), variants=4)  # replay gives way
        model.checkpointed = None
        for one, other in zip(gradients(model, CASES[case], (x, real), variants=4), many, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_recomputation_that_is_not_edited_would_be_wrong(double, monkeypatch):
    """The test above can fail: without our care, checkpointed gradients are silently those of another model."""
    from regard.attention import editing

    model = double()
    inputs = inputs_of(2, 4, dtype=torch.float64)
    right = gradients(model, CASES["scale"], inputs)
    model.checkpointed = False
    monkeypatch.setattr(editing, "recompute_inside", lambda context, site: False)
    try:
        wrong = gradients(model, CASES["custom"], inputs)
    except torch.utils.checkpoint.CheckpointError:
        return  # torch has noticed
    assert max(float((one - other).abs().max()) for one, other in zip(right, wrong, strict=True)) > 1e-3


def test_detached_weights_let_gradients_through_values_only(double):
    model = double()
    inputs = inputs_of(2, 4, dtype=torch.float64)
    for edit in (edits.detach(), edits.detach(heads=[0, 1, 2])):  # by the kernel, and by rows
        regard_out = regard.intervene(subject_of(model, 4), inputs, edit, gradients=True)
        model.zero_grad()
        regard_out.sum().backward()
        assert model.blocks[1].q.weight.grad is None or model.blocks[1].q.weight.grad.abs().max() == 0
        assert model.blocks[1].k.weight.grad is None or model.blocks[1].k.weight.grad.abs().max() == 0
        assert model.blocks[0].v.weight.grad.abs().max() > 0


def test_parameters_upstream_have_the_gradients_of_a_full_run(double):
    model = double(causal=True)
    inputs = inputs_of(2, 4, dtype=torch.float64)
    edit = edits.permute(2, sites=1)
    on, off = (gradients(model, edit, inputs, variants=5, replay=replay) for replay in (True, False))
    assert model.blocks[0].q.weight.grad.abs().max() > 0
    for one, other in zip(on, off, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_without_gradients_there_is_no_graph():
    subject = subject_of(Model().eval(), 4)
    assert not regard.intervene(subject, inputs_of(1, 4), edits.uniform()).requires_grad
    assert not regard.intervene(subject, inputs_of(1, 4), edits.uniform(sites=1), variants=5).requires_grad


def test_weights_can_be_searched_for():
    """What adversaries do: move the output by moving the replaced weights, many steps on one input."""
    from regard.attention import Rerun

    torch.manual_seed(0)
    subject = subject_of(Model().eval(), 6)
    rerun = Rerun(subject, (torch.randn(2, 6, WIDTH), torch.ones(2, 6, dtype=torch.bool)), gradients=True)
    logits = torch.zeros(2, HEADS, 1, 6, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.3)
    gaps = []
    for _ in range(20):
        output = rerun(edits.replace(logits.softmax(-1), sites=-1))
        loss = -(output - rerun.output).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        gaps.append(-float(loss.detach()))
    assert gaps[-1] > 1.5 * gaps[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_in_train_mode_is_recomputed_as_it_was_computed(double, reentrant):
    """Dropout is off in the forward pass; the backward pass comes when the modes are restored."""
    model = double()
    for block in model.blocks:
        block.o = torch.nn.Sequential(block.o, torch.nn.Dropout(0.5))
    x, real = inputs_of(2, 4, dtype=torch.float64)
    x.requires_grad_()
    expected = gradients(model, CASES["custom"], (x, real))
    model.train()
    model.checkpointed = reentrant
    found = gradients(model, CASES["custom"], (x, real))
    assert model.training
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_a_learned_bias_is_detached_with_the_weights():
    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                x[:, None], x[:, None], x[:, None], self.bias
            ).squeeze(1)

    subject = regard.module(
        Biased(), lambda model, x: model(x).flatten(1), features=list("abcd"), readout="mean", output="embedding"
    )
    x = torch.randn(2, 4, WIDTH)
    for edit in (edits.detach(), edits.detach(heads=[0])):
        output = regard.intervene(subject, x.clone().requires_grad_(), edit, gradients=True)
        (gradient,) = torch.autograd.grad(output.sin().sum(), [subject.model.bias], allow_unused=True)
        assert gradient is None or gradient.abs().max() == 0


def test_there_are_no_gradients_in_inference_mode():
    subject = subject_of(Model().eval(), 4)
    inputs = inputs_of(1, 4)
    with torch.inference_mode(), pytest.raises(regard.errors.NoGradient, match="inference_mode"):
        regard.intervene(subject, inputs, edits.uniform(), gradients=True)


def test_a_checkpoint_between_softmax_and_values_is_refused(double):
    """What is recomputed has no softmax, so its attention cannot be seen; silence would be wrong gradients."""

    class Cut(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.v = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            weights = (self.q(x) @ x.mT).softmax(-1)
            if not torch.is_grad_enabled():
                return weights @ self.v(x)
            return torch.utils.checkpoint.checkpoint(
                lambda weights, x: weights @ self.v(x), weights, x, use_reentrant=True
            )

    subject = regard.module(
        Cut(), lambda model, x: model(x).flatten(1), features=list("abcd"), readout="mean", output="embedding"
    )
    output = regard.intervene(subject, torch.randn(2, 4, WIDTH), edits.custom(sharper), gradients=True)
    with pytest.raises(regard.errors.NotReproduced, match="its softmax lies outside"):
        output.sum().backward()
