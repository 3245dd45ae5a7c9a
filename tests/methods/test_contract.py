"""What every method must keep, on whatever the catalog finds.

Numbers are compared relative to the largest score: batches and singles to 1e-5, float32 and float64 to 1e-4. A method
that a subject cannot serve must say so, and which can; every attention method serves the small BERT.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import bert, llama, t5
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import regard
from regard import catalog, errors

HERE = Path(__file__).parent
METHODS = sorted(catalog.found())
CONTROLS = {name for name, method in catalog.found().items() if method.family == "control"}
# Differences of outputs that are nearly the same, or slopes that cancel (a norm after the embedding makes it so): what
# is left of float32 there has few digits, whatever runs together.
CANCEL = {name for name, method in catalog.found().items() if method.family == "reference"}
TEXTS = ["a moving film", "so", "dull, and it ends"]
PAIRS = [("a moving film", "so it is"), ("so", "dull"), ("dull, it ends", "it is")]
WORDS = ["so good the awful film", "good", "dull so"]
VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<unk>", *sorted({*" ".join(WORDS).split()})])}


def lstm(_):
    torch.manual_seed(3)
    model = regard.models.AttentionClassifier(words=len(VOCABULARY), embedding=12, hidden=8).double().eval()
    model.outer.weight.data *= 9  # far from uniform
    return model


# how the model is built, how it becomes a subject, and what it reads: texts of different lengths
SUBJECTS = {
    "BERT, padded on the right": (bert, lambda model, tokenizer: regard.text(model, tokenizer), TEXTS),
    "a decoder, padded on the left": (llama, lambda model, tokenizer: regard.causal(model, tokenizer), TEXTS),
    "a decoder, padded on the right": (
        llama, lambda model, tokenizer: regard.causal(model, tokenizer, padding_side="right"), TEXTS,
    ),
    "an encoder–decoder": (t5, lambda model, tokenizer: regard.seq2seq(model, tokenizer), PAIRS),
    "a pooled LSTM": (lstm, lambda model, tokenizer: regard.pooled(model, VOCABULARY), WORDS),
}  # fmt: skip
FIRST, LEFT = list(SUBJECTS)[:2]


@pytest.fixture(scope="module")
def made(tokenizer):
    """(subject, inputs) by name and precision, each built once."""

    @cache
    def make(name, dtype=torch.float32):
        build, wrap, inputs = SUBJECTS[name]
        return wrap(build(tokenizer).to(dtype), tokenizer), inputs

    return make


def explained(method, subject, inputs):
    """The explanations; None if the method does not serve this subject, which it must say well."""
    try:
        return regard.explain(subject, inputs, method=method)
    except errors.NotServed as problem:
        said = str(problem)
    reason, _, able = said.partition(" Methods that can: ")
    assert reason.startswith(f"{method}: ")
    assert able.endswith(".")
    listed = set(able[:-1].split(", "))
    assert listed <= {*METHODS, "none"}
    assert method not in listed, f"it says that it can, and that it cannot: {said}"
    return None


def traced(method, subject, inputs, **options):
    """What `regard.explain` gives the method."""
    needs = catalog.found()[method].needs
    wanted = {"gradients": "gradients" in needs, "onward": "values" in needs, "of": catalog.found()[method].of}
    return regard.trace(subject, inputs, **wanted | options)


def close(one, other, tolerance):
    one, other = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    assert one.shape == other.shape
    largest = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


def same(one, other):
    """Bit for bit."""
    for a, b in ((one.rows, other.rows), (one.source, other.source)):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_a_stack_of_singles(made, method, name):
    subject, inputs = made(name, torch.float64 if method in CANCEL else torch.float32)
    together = explained(method, subject, inputs)
    if together is None:
        assert method not in CONTROLS, "controls serve everything"
        assert name != FIRST, "every method serves a BERT"
        return
    assert max(np.abs(why.scores).max() for why in together) > 0
    for why, one in zip(together, inputs, strict=True):
        alone = regard.explain(subject, one, method=method)
        close(why.scores, alone.scores, 1e-5)
        assert why.features.tokens == alone.features.tokens
        assert why.facts.keys() == alone.facts.keys()
        for fact in why.facts:  # some are what is left when like is taken from like
            np.testing.assert_allclose(why.facts[fact], alone.facts[fact], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("method", METHODS)
def test_padding_scores_exactly_zero(made, method, name):
    subject, inputs = made(name)
    trace = traced(method, subject, inputs)
    assert not trace.real.all(), "there is padding"
    kinds = [{}] + [{option: True} for option in ("matrix", "per_layer", "per_head") if option in catalog.found()[method].options]  # fmt: skip
    for options in kinds:
        try:
            scores = catalog.found()[method](trace, **options)
        except errors.InputError:  # a subject that cannot serve it, tested elsewhere
            continue
        parts = [(scores.rows, trace.real)]
        parts += [] if trace.batch.source is None else [(scores.source, trace.batch.source.real)]
        assert any(numbers is not None for numbers, _ in parts)
        for numbers, real in parts:
            if numbers is None:
                continue
            assert numbers.shape == (len(real), *numbers.shape[1:-1], real.shape[1])
            assert numbers.dim() == 2 + len(scores.axes)
            for example, kept in enumerate(real):
                assert (numbers[example][..., ~kept] == 0).all(), f"{options}: padding has a score"
            if "query" in scores.axes:
                axis = 1 + scores.axes.index("query")
                if numbers.shape[axis] == trace.real.shape[1]:
                    for example, kept in enumerate(trace.real):
                        assert (numbers[example].movedim(axis - 1, 0)[~kept] == 0).all(), f"{options}: a padding row"


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("method", METHODS)
def test_float32_agrees_with_float64(made, method, name):
    subject, inputs = made(name)
    single = explained(method, subject, inputs)
    double = explained(method, made(name, torch.float64)[0], inputs)
    assert (single is None) == (double is None)
    for one, other in zip(single or (), double or (), strict=True):
        close(one.scores, other.scores, 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_answer(made, method):
    subject, inputs = made(FIRST)
    options = {"seed": 5} if "seed" in catalog.found()[method].options else {}
    torch.manual_seed(1)
    before = regard.explain(subject, inputs, method=method, **options)
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    for one, other in zip(before, regard.explain(subject, inputs, method=method, **options), strict=True):
        assert np.array_equal(one.scores, other.scores)
        assert one == other


# --- needs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_needed_where_they_are_declared(made, method):
    subject, inputs = made(FIRST)
    one = catalog.found()[method]
    without = traced(method, subject, inputs, gradients=False)
    if "gradients" in one.needs and "reruns" not in one.needs:  # those that run again take their own
        with pytest.raises(errors.NoGradient):
            one(without)
    else:
        same(one(without), one(traced(method, subject, inputs, gradients=True)))


@pytest.mark.parametrize("method", METHODS)
def test_projections_are_needed_where_they_are_declared(made, method):
    """Values are followed to what they are projected to only for methods that say so."""
    subject, inputs = made(FIRST)
    one = catalog.found()[method]
    if "values" not in one.needs:
        same(one(traced(method, subject, inputs)), one(traced(method, subject, inputs, onward=True)))
        return
    trace = traced(method, subject, inputs)
    assert all(site.onward is not None for site in trace.sites)
    assert np.isfinite(one(trace).rows.numpy()).all()


@pytest.mark.parametrize("name", [FIRST, LEFT])
@pytest.mark.parametrize("method", METHODS)
def test_the_model_runs_again_only_where_it_is_declared(made, method, name, monkeypatch):
    subject, inputs = made(name)
    one, calls = catalog.found()[method], []
    trace = traced(method, subject, inputs)
    plain = type(subject).forward

    def counting(self, batch):
        calls.append(batch)
        return plain(self, batch)

    monkeypatch.setattr(type(subject), "forward", counting)
    hook = subject.model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        one(trace)
    except errors.NotServed:
        assert name != FIRST
        return
    finally:
        hook.remove()
    assert bool(calls) == ("reruns" in one.needs)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_read_only_where_it_is_declared(made, method):
    """A site proves itself when it is first read."""
    subject, inputs = made(FIRST)
    one = catalog.found()[method]
    trace = traced(method, subject, inputs)
    assert not any("proof" in vars(site) for site in trace.sites)
    one(trace)
    assert any("proof" in vars(site) for site in trace.sites) == ("weights" in one.needs)


# --- the subject stays as it was ------------------------------------------------------------------------------------


class Boom(BaseException):
    """Thrown in the middle of something, as an interrupt is: replay gets over any `Exception`, and runs all again."""


class Bomb(TorchFunctionMode):
    """Counts torch functions, and throws at one of them."""

    def __init__(self, at=None):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch._C._set_grad_enabled:  # not even what restores a mode could stand that
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.count == self.at:
            raise Boom
        return func(*args, **(kwargs or {}))


def state_of(model):
    """All that a subject could be changed in, and the state of every random number generator."""
    hooks = [
        {name: len(found) for name, found in vars(module).items() if name.endswith("_hooks") and found is not None}
        for module in model.modules()
    ]
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grad": [parameter.grad for parameter in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": hooks,
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "gradients on": torch.is_grad_enabled(),
        "modes": _get_current_function_mode_stack(),
    }


def assert_untouched(before, after):
    for key, value in before.items():
        if key == "weights":
            assert all(torch.equal(value[name], after[key][name]) for name in value)
        elif key == "torch":
            assert torch.equal(value, after[key])
        elif key == "numpy":
            assert all(np.array_equal(a, b) for a, b in zip(value, after[key], strict=True))
        else:
            assert value == after[key], key


@pytest.mark.parametrize("name", [FIRST, LEFT])
@pytest.mark.parametrize("method", METHODS)
def test_the_subject_is_untouched_also_when_the_method_raises(tokenizer, made, method, name):
    """Torch functions of a whole explanation are counted; then one of them throws: early, in the middle, at the end."""
    original, inputs = made(name)
    model = copy.deepcopy(original.model)
    subject = SUBJECTS[name][1](model, tokenizer)
    if explained(method, subject, inputs) is None:  # the readout is measured here
        assert name != FIRST
        return
    model.train()
    next(iter(model.children())).eval()  # modes are kept one by one
    next(model.parameters()).requires_grad_(False)
    before = state_of(model)
    with Bomb() as counter:
        regard.explain(subject, inputs, method=method)
    assert_untouched(before, state_of(model))
    assert counter.count > 1
    for share in (0.3, 0.7, 0.95):
        with Bomb(max(1, int(share * counter.count))), pytest.raises(Boom):
            regard.explain(subject, inputs, method=method)
        assert_untouched(before, state_of(model))


# --- what is declared -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_unknown_options_are_refused_with_the_nearest_name(made, method):
    subject, _ = made(FIRST)
    one = catalog.found()[method]
    for option in one.options:
        misspelt = option[:-1] + "x" + option[-1]
        with pytest.raises(errors.OptionError, match=f"{misspelt}=1: {method} has no such option.*mean '{option}'"):
            regard.explain(subject, "so", method=method, **{misspelt: 1})
    listed = ", ".join(f"{name}={value!r}" for name, value in one.options.items()) or "none"
    with pytest.raises(errors.OptionError, match=re.escape(f"It has {listed}.")):
        regard.explain(subject, "so", method=method, zzzzzz=1)


def test_unknown_methods_are_refused_with_the_nearest_name(made):
    with pytest.raises(errors.OptionError, match="method='rolout' is not known. Did you mean 'rollout'"):
        regard.explain(made(FIRST)[0], "so", method="rolout")


@pytest.mark.parametrize("method", METHODS)
def test_the_docstring_names_every_option(method):
    one = catalog.found()[method]
    text = inspect.getdoc(one.function)
    assert text, "it has one"
    args = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE)
    named = set(re.findall(r"^ {4}(\w+): \S", args[1], re.MULTILINE)) if args else set()
    assert named - {"trace"} == set(one.options)
    first, *others = inspect.signature(one.function).parameters.values()
    assert first.name == "trace"
    assert all(other.kind is other.KEYWORD_ONLY for other in others), "options have names, and no **kwargs takes others"
    assert re.search(r"``\(.*\)``", text), "it states the shape of what it returns"


@pytest.mark.parametrize("method", METHODS)
def test_what_a_file_declares(method):
    one = catalog.found()[method]
    assert one.function.__name__ == one.name == method
    assert one.family in ("attention", "reference", "control")
    assert set(one.needs) <= {"weights", "values", "gradients", "reruns"}
    assert len(set(one.needs)) == len(one.needs)
    assert one.of in ("logit", "probability", "logprob")
    for line in (one.formula, one.passes):
        assert line.strip()
        assert "\n" not in line
    keys = re.findall(r"^@\w+\{(.+),$", (HERE.parent.parent / "src/regard/references.bib").read_text(), re.MULTILINE)
    assert one.cite in keys if one.family != "control" else one.cite in ("", *keys)


def test_every_file_is_a_method_and_has_a_test_of_its_name():
    folder = Path(inspect.getfile(regard)).parent / "methods"
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert files <= set(METHODS)
    tested = {file.stem.removeprefix("test_") for file in HERE.glob("test_*.py")}
    assert files - CONTROLS <= tested
    assert "controls" in tested


def test_the_list_of_methods_says_what_they_declare():
    table = regard.list_methods().set_index("name")
    assert sorted(table.index) == METHODS
    for name, one in catalog.found().items():
        assert table.loc[name, "formula"] == one.formula
        assert table.loc[name, "needs"] == ", ".join(one.needs)
        assert table.loc[name, "paper"] == one.cite
