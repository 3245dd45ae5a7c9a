"""Afterwards the subject is as it was; also when something is thrown, when traces nest, and with threads."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import regard
from regard.errors import RegardError


def state_of(model: nn.Module) -> dict[str, object]:
    return {
        "parameters": {name: p.clone() for name, p in model.state_dict().items()},
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [
            {name: len(hooks) for name, hooks in vars(m).items() if name.endswith("_hooks") and hooks is not None}
            for m in model.modules()
        ],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "modes on the stack": len(_get_current_function_mode_stack()),
    }


def assert_same(before: object, after: object) -> None:
    if isinstance(before, torch.Tensor):
        assert torch.equal(before, after)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, list):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    else:
        assert before == after


@pytest.fixture
def subject(classifier, tokenizer):
    subject = regard.text(classifier, tokenizer)
    regard.trace(subject, "warm up")  # the readout is measured here
    return subject


@pytest.mark.parametrize("gradients", [False, True])
def test_after_a_trace(subject, gradients):
    model = subject.model
    model.bert.encoder.layer[0].train()  # mixed modes are kept as they are, module by module
    model.bert.embeddings.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    before = state_of(model)
    regard.trace(subject, ["a moving film", "dull"], gradients=gradients)
    assert_same(before, state_of(model))


def test_a_first_trace_measures_the_readout_and_leaves_nothing(classifier, tokenizer):
    classifier.train()
    before = state_of(classifier)
    regard.trace(regard.text(classifier, tokenizer), "a moving film")
    assert_same(before, state_of(classifier))


@pytest.mark.parametrize("where", ["inside the model", "in the target"])
def test_after_an_exception(subject, where):
    class Boom(RuntimeError):
        pass

    def boom(*_):
        raise Boom

    model = subject.model.train()
    hook = model.bert.encoder.layer[1].register_forward_hook(boom) if where == "inside the model" else None
    before = state_of(model)
    with pytest.raises(Boom):
        regard.trace(subject, "a moving film", gradients=True, target=boom if hook is None else None)
    assert_same(before, state_of(model))


def test_nested_traces(subject, minilm):
    """A model whose forward traces another one; and the user's own mode stays where it was."""
    inner = []

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = subject.model

        def forward(self, **inputs):
            inner.append(regard.trace(minilm, "a moving film"))
            return self.body(**inputs)

    seen = []

    class Mine(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    outer = regard.text(Outer(), subject.tokenizer, readout="first")
    plain = regard.trace(subject, "dull")
    with Mine() as mine:
        t = regard.trace(outer, "dull")
        assert _get_current_function_mode_stack() == [mine]
    assert len(t.sites) == 2
    assert all(len(one.sites) == 6 for one in inner)
    assert seen
    torch.testing.assert_close(t.sites[1].weights(), plain.sites[1].weights(), atol=0, rtol=0)


def test_two_threads_trace_two_models(tokenizer):
    def build(seed):
        torch.manual_seed(seed)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2 + seed, num_attention_heads=4,
            intermediate_size=32,
        )  # fmt: skip
        return regard.text(transformers.BertModel(config), tokenizer)

    subjects = [build(0), build(1)]
    texts = ["a moving film", "dull"]
    alone = [regard.trace(subject, texts) for subject in subjects]
    found: dict[int, list] = {0: [], 1: []}

    def run(number):
        for _ in range(8):
            found[number].append(regard.trace(subjects[number], texts))

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, traces in found.items():
        assert len(traces) == 8
        for t in traces:
            assert len(t.sites) == 2 + number
            assert torch.equal(t.output, alone[number].output)
            for site, single in zip(t.sites, alone[number].sites, strict=True):
                assert torch.equal(site.weights(), single.weights())


def test_checkpointed_blocks_have_the_same_gradients(tokenizer):
    """torch.utils.checkpoint recomputes in the backward pass, where the tape is no more."""
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return x + self.attention(x, x, x, need_weights=False)[0]

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.save = True

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.save else block(x)
            return x.mean(1)

    model, x = Blocks(), torch.randn(2, 5, 8)
    make = lambda: regard.module(model, lambda m, x: m(x), features=list("abcde"), readout="mean")  # noqa: E731
    saved = regard.trace(make(), x, gradients=True, target=1)
    model.save = False
    plain = regard.trace(make(), x, gradients=True, target=1)
    assert len(saved.sites) == len(plain.sites) == 3
    for one, other in zip(saved.sites, plain.sites, strict=True):
        assert other.gradients().abs().max() > 0
        torch.testing.assert_close(one.gradients(), other.gradients(), atol=1e-7, rtol=0)


def test_target_that_is_detached_is_refused(subject):
    with pytest.raises(RegardError, match="no gradient"):
        regard.trace(subject, "dull", gradients=True, target=lambda output: output.detach()[:, 0])
