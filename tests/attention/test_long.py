"""Long inputs: gradients under checkpoints of our own, and what does not fit into memory."""

from __future__ import annotations

import pytest
import torch
import transformers

import regard
from regard import errors, memory
from regard.attention import running
from regard.attention.checkpoints import blocks_of

TEXTS = ["a moving film that never quite says what it means", "dull"]


def decoder(tokenizer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_gradients_are_the_same_under_checkpoints(tokenizer, classifier, monkeypatch, kind, frozen):
    model = (decoder(tokenizer) if kind == "decoder" else classifier).double()
    model.requires_grad_(not frozen)
    subject = regard.causal(model, tokenizer) if kind == "decoder" else regard.text(model, tokenizer)
    plain = regard.trace(subject, TEXTS, gradients=True)
    calls = []
    checkpoint = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k))
    monkeypatch.setattr(running, "ROWS_KEPT", 0)
    kept = regard.trace(subject, TEXTS, gradients=True)
    assert len(calls) == len(plain.sites)
    torch.testing.assert_close(kept.output, plain.output, rtol=0, atol=0)
    for one, two in zip(kept.sites, plain.sites, strict=True):
        assert two.out_gradient.abs().max() > 0
        torch.testing.assert_close(one.out_gradient, two.out_gradient, rtol=1e-12, atol=1e-15)
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())


def test_blocks_are_the_layers(tokenizer, classifier):
    assert blocks_of(decoder(tokenizer)) != []
    assert [type(block).__name__ for block in blocks_of(classifier)] == ["BertLayer"] * 2


def test_what_does_not_fit_is_refused_with_what_it_would_need(classifier, tokenizer, monkeypatch):
    subject = regard.text(classifier, tokenizer)
    monkeypatch.setattr(memory, "_free", lambda: 100)
    for method in ("rollout", "raw", "flow", "grad_rollout"):
        options = {} if method == "flow" else {"matrix": True}
        with pytest.raises(errors.TooLarge, match=r"needs 0.0 GiB \(\d+ × .* numbers\), but 0.0 GiB are free"):
            regard.explain(subject, TEXTS[0], method=method, **options)
    assert regard.explain(subject, TEXTS[0], method="rollout").scores.sum() == pytest.approx(1)


def test_free_memory_is_told_without_proc(monkeypatch):
    told = memory._free()
    monkeypatch.setattr(memory, "Path", lambda name: memory.os.devnull and __import__("pathlib").Path("/not/there"))
    assert memory._free() >= told > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["grad_rollout", "attention_gradient", "integrated", "token_mixing"])
def test_quantised_models_have_no_gradients(classifier, tokenizer, method):
    quantised = torch.ao.quantization.quantize_dynamic(classifier, {torch.nn.Linear}, dtype=torch.qint8)
    subject = regard.text(quantised, tokenizer, readout="first")
    with pytest.raises(
        errors.NoGradient, match=f"{method}: .* is an integer-quantised Linear.*Methods without gradients:"
    ):
        regard.explain(subject, TEXTS[0], method=method)
    assert regard.explain(subject, TEXTS[0], method="rollout").scores.sum() == pytest.approx(1, abs=1e-5)
