"""Whatever the architecture: edits do what they say, replay changes nothing, and the model is afterwards as it was."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from functools import partial
from typing import Any

import models_table
import pytest
import test_architectures
import torch
from architectures import ARCHITECTURES
from literal import Case, evened, gap, squared
from models_table import PAGE, FellBack, rows_of
from test_architectures import CASES
from test_untouched import assert_same, state_of
from torch import Tensor, nn

import regard
from regard.attention.intervening import Rerun
from regard.attention.replay import Recording

pytestmark = test_architectures.pytestmark

VARIANTS = 5
# The last site of Lxmert is that of the regions, and the output is read from the text.
WITHOUT_EFFECT = {("Lxmert", 11)}
# Here the first site is the first thing that runs: no module has finished before it.
NOTHING_UPSTREAM = [name for name in ARCHITECTURES if name.startswith("nn.Transformer") and "norm_first" not in name]


def share(place: regard.attention.edits.Place) -> Tensor:
    """``(variant, 1, 1, 1, 1)``: from 0 for the first variant to 1 for the last."""
    return torch.tensor([number / (VARIANTS - 1) for number in place.variants])[:, None, None, None, None]


def partly_squared(weights: Tensor, place: regard.attention.edits.Place) -> Tensor:
    """The first variant is left as it is, the last is squared, the others lie between."""
    return weights.lerp(squared(weights), share(place))


def matters(case: Case, site: int) -> bool:
    return (case.name, site) not in WITHOUT_EFFECT


# --- edits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "side"), CASES)
def test_edits_are_exact(name, side):
    case = Case(name, side)
    intervene = partial(regard.intervene, case.subject, case.inputs)
    for site in case.tried:
        for heads in (None, [1]):
            by_hand = case.literally(site, squared, heads)
            assert (gap(by_hand, case.plain) > 1e-3) == matters(case, site)  # otherwise it would prove little
            assert gap(intervene([regard.edits.custom(squared, sites=site, heads=heads)]), by_hand) <= 1e-5
        assert gap(intervene([regard.edits.uniform(sites=site)]), case.literally(site, evened)) <= 1e-5


@pytest.mark.parametrize(("name", "side"), CASES)
def test_an_edit_that_changes_nothing_changes_nothing(name, side):
    """Every site computed explicitly: what deviates from the kernel is rounding."""
    case = Case(name, side)
    edited = regard.intervene(case.subject, case.inputs, [regard.edits.custom(lambda weights, place: weights)])
    assert gap(edited, case.plain) <= 1e-6


# --- replay ---------------------------------------------------------------------------------------------------------


def replayed(case: Case, site: int, edit: regard.attention.edits.Edit) -> Tensor:
    """Variants, with proof that what lies upstream of a site was not run for each of them."""
    rerun = Rerun(case.subject, case.inputs)
    output = rerun(edit, variants=VARIANTS)
    recording = rerun.upstream[site].recording
    assert isinstance(recording, Recording)  # None: it fell back
    assert sum(sites for _, _, sites in recording.outputs.values()) == site  # all that lie upstream
    assert recording.outputs or (case.name in NOTHING_UPSTREAM and site == 0)
    return output


@pytest.mark.parametrize(("name", "side"), CASES)
def test_replay_is_exact(name, side):
    case = Case(name, side)
    for site in case.tried:
        edit = regard.edits.custom(partly_squared, sites=site)
        on = replayed(case, site, edit)
        off = regard.intervene(case.subject, case.inputs, edit, variants=VARIANTS, replay=False)
        assert gap(on, off) <= 1e-6
        assert gap(on[0], case.plain) <= 1e-5
        assert gap(on[-1], case.literally(site, squared)) <= 1e-5
        assert (torch.pdist(on.flatten(1)).min() > 1e-4) == matters(case, site)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_example_alone(name):
    """Then its axis cannot be told by its size, and with variants there is an axis of examples all the same."""
    case = Case(name, None).alone(1)
    for site in case.tried:
        by_hand = case.literally(site, squared, [1])
        single = regard.intervene(case.subject, case.inputs, regard.edits.custom(squared, sites=site, heads=[1]))
        assert gap(single, by_hand) <= 1e-5
        edit = regard.edits.custom(partly_squared, sites=site, heads=[1])
        many = replayed(case, site, edit)
        assert gap(many[0], case.plain) <= 1e-5
        assert gap(many[-1], by_hand) <= 1e-5


# --- gradients ------------------------------------------------------------------------------------------------------


def gradients(output: Tensor, given: Tensor, model: nn.Module) -> list[Tensor]:
    """Of a scalar of the output by the weights that were put in and by all parameters; zeros where there is none."""
    direction = torch.cos(torch.arange(output.shape[-1]))  # so that a layer norm at the end cancels nothing
    wanted = [given, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad((output * direction).sum(), wanted, allow_unused=True)
    return [
        torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(wanted, found, strict=True)
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_exact_with_and_without_replay(name):
    """Of replaced weights and of all parameters, upstream and downstream, against those of the edit made by hand."""
    # numbers of rows count real ones: with padding on the right they are those of the tensor (but not in a picture)
    case = Case(name, "right" if {"left", "right"} <= {*ARCHITECTURES[name].sides} else None)
    for site in case.tried:
        row = 0 if case.subject.reading == "first" else min(2, case.expected[site].shape[2] // 2)  # real in all
        old = case.expected[site][:, :, row : row + 1]
        given = torch.stack([old.lerp(squared(old), number / (VARIANTS - 1)) for number in range(VARIANTS)])
        given.requires_grad_()
        edit = regard.edits.replace(given, sites=site, rows=row)
        intervene = partial(regard.intervene, case.subject, case.inputs, edit, variants=VARIANTS, gradients=True)
        on, off = (gradients(intervene(replay=replay), given, case.model) for replay in (True, False))

        puts = [lambda weights, _, r=row, new=new: weights.index_copy(2, torch.tensor([r]), new) for new in given]
        by_hand = torch.stack([case.literally(site, put, gradients=True) for put in puts])
        expected = gradients(by_hand, given, case.twin)
        for found in (on, off, expected):
            # At a padding key the gradient is what the values of padding would move. They depend on the backend, as
            # does what becomes of a row that sees no key.
            found[0] = found[0] * (old > 0)
        largest = max(float(gradient.abs().max()) for gradient in expected)
        assert (float(expected[0].abs().max()) > 1e-3) == matters(case, site)
        for one, other, oracle in zip(on, off, expected, strict=True):
            # where the gradient is 0 (by the bias of keys, say, which moves all scores alike) there is only rounding
            scale = max(float(oracle.abs().max()), 1e-2 * largest)
            assert float((one - other).abs().max()) <= 1e-5 * scale
            assert float((one - oracle).abs().max()) <= 1e-4 * scale


# --- the model is untouched -----------------------------------------------------------------------------------------


class Boom(Exception):
    pass


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_model_is_untouched(name):
    """Also when an edit raises while what lies upstream is replayed, with `forward` shadowed in every module."""
    case = Case(name, ARCHITECTURES[name].sides[0])
    site = len(case.expected) // 2
    reached = []

    def boom(weights: Tensor, place: regard.attention.edits.Place) -> Tensor:
        reached.append(shadowed())
        raise Boom

    def shadowed() -> list[Any]:
        return [vars(module).get("forward") for module in case.model.modules()]

    case.model.train()
    next(case.model.parameters()).grad = torch.ones_like(next(case.model.parameters()))
    before = state_of(case.model)
    forwards = shadowed()
    for keep_graph in (False, True):
        for variants in (None, VARIANTS):
            intervene = partial(regard.intervene, case.subject, case.inputs, variants=variants, gradients=keep_graph)
            intervene(regard.edits.uniform(sites=site))
            assert_same(before, state_of(case.model))
            with pytest.raises(Boom):
                intervene(regard.edits.custom(boom, sites=site))
            assert_same(before, state_of(case.model))
            assert shadowed() == forwards
            assert (reached.pop() == forwards) == (variants is None)  # a single run is not worth a recording


# --- compiled models ------------------------------------------------------------------------------------------------


class Backend:
    """Counts what it is given to compile, and leaves it as it is."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


def compiled(model: Any, how: str, backend: Backend) -> Any:
    if how == "torch.compile":
        return torch.compile(model, backend=backend)
    if how == "model.compile()":
        model.compile(backend=backend)
    elif how == "a layer's compile()":
        model.encoder.layer[0].compile(backend=backend)
    else:
        model.encoder.layer[0] = torch.compile(model.encoder.layer[0], backend=backend)
    return model


@pytest.mark.parametrize("how", ["torch.compile", "model.compile()", "a layer's compile()", "torch.compile of a layer"])
def test_compiled_models(how):
    """They run as they were written while they are edited, and afterwards what was compiled is still there."""
    torch._dynamo.reset()
    case, backend = Case("BERT", "left"), Backend()
    subject = case.architecture.subject(compiled(case.architecture.build(), how, backend))
    with torch.no_grad():
        before = subject.forward(subject.encode(case.inputs))
    graphs = backend.graphs
    assert graphs
    for site in case.tried:
        rerun = Rerun(subject, case.inputs)
        many = rerun(regard.edits.custom(partly_squared, sites=site), variants=VARIANTS)
        assert isinstance(rerun.upstream[site].recording, Recording)
        assert gap(many[0], case.plain) <= 1e-5
        assert gap(many[-1], case.literally(site, squared)) <= 1e-5
    with torch.no_grad():
        assert torch.equal(subject.forward(subject.encode(case.inputs)), before)
    assert backend.graphs == graphs  # neither lost nor made anew


# --- docs/models.md -------------------------------------------------------------------------------------------------


def test_the_page_says_of_each_architecture_what_is_tested_here():
    """Names, versions and status; the digits are those of the machine it was written on."""
    rows = rows_of(PAGE.read_text())
    assert [row["model"] for row in rows] == list(ARCHITECTURES)
    for row, architecture in zip(rows, ARCHITECTURES.values(), strict=True):
        package, version = row["package and version"].split()
        assert package == architecture.package
        assert version.split(".")[:2] == importlib.metadata.version(package).split(".")[:2], (
            f"run {models_table.__file__}"
        )
        assert set(row["padding verified"].split(", ")) == {side or "none" for side in architecture.sides}
        assert row["default backend"] in ("sdpa", "eager", "hand-written")
        assert max(float(row["trace deviation"]), float(row["edit deviation"])) <= 1e-5
        assert row["replay"] == "exact"


def test_a_model_that_fails_stays_on_the_page(monkeypatch):
    broken = dataclasses.replace(ARCHITECTURES["BERT"], build=lambda: 1 / 0, sides=(None,))
    monkeypatch.setitem(ARCHITECTURES, "broken", broken)
    row = models_table.measure("broken")
    assert row["trace deviation"] == "ZeroDivisionError: division by zero"
    assert row["padding verified"] == "-"

    def refused(*_):
        raise FellBack("it is Sunday")

    monkeypatch.setattr(models_table, "replay_deviation", refused)
    monkeypatch.setattr(models_table, "edit_deviation", lambda case: 0.02)
    row = models_table.measure("ViT")
    assert row["edit deviation"] == "off by 2e-02, padding none"
    assert row["replay"] == "falls back: it is Sunday"
    assert row["padding verified"] == "-"
