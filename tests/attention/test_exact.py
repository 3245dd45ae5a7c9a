"""Recomputed weights are the model's own, on every kind of model of the first issue, with padding on either side.

The oracle is the model's own eager attention, or a literal re-computation in the test.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from torch import nn

import regard

BATCH, ROWS, WORDS = 3, 9, 50
SMALL = {
    "bert": lambda: hf.BertModel(hf.BertConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40)),
    "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=3, n_head=4)),
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40)),
}  # fmt: skip


def last_hidden(model, input_ids, attention_mask):
    """One number for each example, read from all real rows."""
    hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(-1, keepdim=True)


def subject_of(model, forward=last_hidden, readout="mean", rows=ROWS):
    return regard.module(
        model, forward, features=[f"row {i}" for i in range(rows)], readout=readout, output="embedding",
        padding=lambda input_ids, attention_mask: attention_mask.bool(),
    )  # fmt: skip


def padded(side: str, rows: int = ROWS) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([rows, rows - 4, rows - 2])
    place = torch.arange(rows)
    real = place < lengths[:, None] if side == "right" else place >= rows - lengths[:, None]
    return {"input_ids": torch.randint(3, WORDS, (BATCH, rows)), "attention_mask": real.long()}


def first_channel(output):
    return output[:, 0]


@pytest.fixture(params=SMALL)
def twins(request):
    """The same small model with fused and with eager attention."""
    torch.manual_seed(0)
    fused = SMALL[request.param]().eval()
    eager = copy.deepcopy(fused)
    eager.set_attn_implementation("eager")
    fused.set_attn_implementation("sdpa")
    return fused, eager


@pytest.mark.parametrize("side", ["left", "right"])
def test_small_models_agree_with_their_own_eager_attention(twins, side):
    fused, eager = twins
    inputs = padded(side)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True).attentions
        plain = last_hidden(fused, **inputs)
    t = regard.trace(subject_of(fused), inputs)
    assert torch.equal(t.output, plain)  # the fused model ran as it always does, bit for bit
    assert fused.config._attn_implementation == "sdpa"
    assert len(t.sites) == len(expected) == 3
    assert all(site.kind == "self" and site.heads == 4 for site in t.sites)
    r = torch.rand(BATCH, ROWS)
    for site, weights in zip(t.sites, expected, strict=True):
        weights = weights * real[:, None, :, None]  # padding rows are 0 by definition
        torch.testing.assert_close(site.weights(), weights, atol=1e-5, rtol=0)
        assert (site.weights() * ~real[:, None, None, :]).count_nonzero() == 0  # padding keys: exactly 0
        torch.testing.assert_close(site.pull(r), torch.einsum("eq,ehqk->ek", r, weights) / 4, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            site.pull(r, per_head=True), torch.einsum("eq,ehqk->ehk", r, weights), atol=1e-5, rtol=0
        )
        entropy = torch.einsum("eq,ehq->eh", r, torch.special.entr(weights).sum(-1))
        torch.testing.assert_close(site.entropy(r), entropy, atol=1e-4, rtol=0)
        some = site.weights(heads=[2, 0], rows=[5, -1, 3])
        torch.testing.assert_close(some, weights[:, [2, 0]][:, :, [5, 8, 3]], atol=1e-5, rtol=0)
        mixed = site.weights(rows=[0, 2, 1, 3, 4, 6, 5, 7, 8])  # as many as a full block, in another order
        torch.testing.assert_close(mixed, weights[:, :, [0, 2, 1, 3, 4, 6, 5, 7, 8]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_agree_with_autograd_through_the_eager_weights(twins, side):
    fused, eager = twins
    inputs = padded(side)
    real = inputs["attention_mask"].bool()[:, None, :, None]
    output = eager(**inputs, output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    hidden = output.last_hidden_state
    mask = inputs["attention_mask"]
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(-1, keepdim=True)
    first_channel(pooled).sum().backward()
    for model in (fused, eager):  # the second is hand-written attention for the tape
        t = regard.trace(subject_of(model), inputs, gradients=True, target=first_channel)
        for site, weights in zip(t.sites, output.attentions, strict=True):
            # what padding rows hold differs between backends, so padding keys have no gradient either
            torch.testing.assert_close(site.gradients(), weights.grad * real * real.mT, atol=1e-5, rtol=0)


def test_frozen_model_has_gradients_and_stays_frozen(twins):
    fused, _ = twins
    inputs = padded("right")
    free = regard.trace(subject_of(fused), inputs, gradients=True, target=first_channel)
    fused.requires_grad_(False)
    frozen = regard.trace(subject_of(fused), inputs, gradients=True, target=first_channel)
    assert not any(parameter.requires_grad for parameter in fused.parameters())
    for one, other in zip(free.sites, frozen.sites, strict=True):
        torch.testing.assert_close(one.gradients(), other.gradients(), atol=1e-7, rtol=0)
    assert all(site.gradients().abs().max() > 0 for site in frozen.sites)


def test_eager_models_are_read_as_hand_written_attention(twins):
    fused, eager = twins
    inputs = padded("right")
    one, other = (regard.trace(subject_of(model), inputs) for model in (fused, eager))
    assert [site.name for site in one.sites] == [site.name for site in other.sites]
    for a, b in zip(one.sites, other.sites, strict=True):
        torch.testing.assert_close(a.weights(), b.weights(), atol=1e-5, rtol=0)
    assert other.ignored == ()


@pytest.mark.parametrize("side", ["left", "right"])
def test_minilm(minilm_path, side):
    subject = regard.text(minilm_path, padding_side=side)
    texts = ["a moving film", "dull, and it never ends: an unbelievably overlong movie", "so so"]
    batch = subject.encode(texts)
    eager = hf.AutoModel.from_pretrained(minilm_path, attn_implementation="eager")
    with torch.no_grad():
        expected = eager(**batch.inputs, output_attentions=True).attentions
        plain = subject.forward(batch)
    t = regard.trace(subject, texts)
    assert t.sites[3].name == "encoder.layer.3.attention.self"
    assert (t.sites[3].kind, t.sites[3].heads, len(t.sites)) == ("self", 12, 6)
    assert torch.equal(t.output, plain)
    for site, weights in zip(t.sites, expected, strict=True):
        torch.testing.assert_close(site.weights(), weights * batch.real[:, None, :, None], atol=1e-5, rtol=0)
    assert t.check.error < 1e-5
    assert t.check.readout == "measured"


@pytest.mark.parametrize("side", ["left", "right"])
def test_smollm(smollm, side):
    subject = regard.causal(smollm.model, smollm.tokenizer, padding_side=side)
    texts = ["The capital of France is", "Two plus two makes four. Three plus three makes", "Once upon a"]
    batch = subject.encode(texts)
    with torch.no_grad():
        plain = subject.forward(batch)
    t = regard.trace(subject, texts)
    assert torch.equal(t.output, plain)
    assert len(t.sites) == 30
    assert t.sites[0].heads == 9
    assert t.sites[0].source.k.shape[1] in (3, 9)  # with a mask, transformers repeats the three groups
    smollm.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            expected = smollm.model(**batch.inputs, output_attentions=True, use_cache=False).attentions
    finally:
        smollm.model.set_attn_implementation("sdpa")
    for site, weights in zip(t.sites, expected, strict=True):
        torch.testing.assert_close(site.weights(), weights * batch.real[:, None, :, None], atol=1e-5, rtol=0)
    # each prompt alone: padding changes nothing
    for example, text in enumerate(texts):
        alone = regard.trace(subject, text)
        torch.testing.assert_close(t.output[example], alone.output[0], atol=2e-4, rtol=0)
        rows = list(t.features[example].rows)
        for site, single in zip(t.sites, alone.sites, strict=True):
            inner = site.weights(rows=rows)[example][:, :, rows]
            torch.testing.assert_close(inner, single.weights()[0], atol=1e-4, rtol=0)
    assert t.score.names[0] == " Paris"


def test_grouped_queries_stay_grouped_in_memory(smollm):
    t = regard.trace(smollm, "The capital of France is")  # no padding, no mask: the kernel groups by itself
    site = t.sites[7]
    assert site.source.k.shape[1] == 3
    assert site.values.shape[1] == 9
    q, k = site.source.q[0], site.source.k[0].repeat_interleave(3, 0)
    scores = (q @ k.mT) * site.source.scale
    literal = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(site.weights()[0], literal, atol=1e-5, rtol=0)
    torch.testing.assert_close(site.weights(heads=[8, 1])[0], literal[[8, 1]], atol=1e-5, rtol=0)


def test_bfloat16_within_its_own_tolerance(minilm_path, minilm):
    """bfloat16 keeps 8 bits: weights agree with the model's own eager bfloat16 weights to 2e-2."""
    model = hf.AutoModel.from_pretrained(minilm_path, dtype=torch.bfloat16)
    eager = hf.AutoModel.from_pretrained(minilm_path, dtype=torch.bfloat16, attn_implementation="eager")
    subject = regard.text(model, minilm.tokenizer)
    batch = subject.encode(["a moving film", "dull, and it never ends"])
    t = regard.trace(subject, ["a moving film", "dull, and it never ends"])
    with torch.no_grad():
        expected = eager(**batch.inputs, output_attentions=True).attentions
    for site, weights in zip(t.sites, expected, strict=True):
        assert site.weights().dtype == torch.float32
        torch.testing.assert_close(site.weights(), weights.float() * batch.real[:, None, :, None], atol=2e-2, rtol=0)
    assert t.check.error < 2e-2


def test_float64_is_kept(twins):
    fused, _ = twins
    fused.double()
    t = regard.trace(subject_of(fused), padded("right"))
    assert t.sites[0].weights().dtype == torch.float64
    assert t.check.error < 1e-12


def test_long_inputs_cross_tiles(twins):
    """Rows, keys and heads that do not fit one tile, against the whole matrix."""
    fused, eager = twins
    inputs = padded("left", rows=300)
    subject = subject_of(fused, rows=300)
    t = regard.trace(subject, inputs)
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True).attentions
    real = inputs["attention_mask"].bool()[:, None, :, None]
    r = torch.rand(BATCH, 300) * (torch.rand(BATCH, 300) > 0.5)
    for site, weights in zip(t.sites, expected, strict=True):
        torch.testing.assert_close(site.weights(), weights * real, atol=1e-5, rtol=0)
        pulled = torch.einsum("eq,ehqk->ek", r, weights * real) / 4
        torch.testing.assert_close(site.pull(r), pulled, atol=1e-5, rtol=1e-5)


def test_one_hot_pull_is_a_row_of_the_weights(twins):
    fused, _ = twins
    t = regard.trace(subject_of(fused), padded("right"))
    r = torch.zeros(BATCH, ROWS)
    r[:, 2] = 1
    site = t.sites[1]
    torch.testing.assert_close(site.pull(r), site.weights(rows=2)[:, :, 0].mean(1), atol=1e-6, rtol=0)
    assert site.pull(torch.zeros(BATCH, ROWS)).count_nonzero() == 0


def test_without_log_sum_exp_the_sweep_agrees(twins):
    """Other devices and autocast give no log-sum-exp; the weights are then normalised tile by tile."""
    from dataclasses import replace

    fused, _ = twins
    t = regard.trace(subject_of(fused), padded("left"))
    r = torch.rand(BATCH, ROWS)
    for site in t.sites:
        assert site.source.lse is not None
        bare = replace(site, source=replace(site.source, lse=None))
        torch.testing.assert_close(bare.pull(r), site.pull(r), atol=1e-6, rtol=0)


def test_device_map_is_respected(twins):
    fused, _ = twins
    fused.hf_device_map = {"": "cpu"}
    before = {name: p.data_ptr() for name, p in fused.named_parameters()}
    regard.trace(subject_of(fused), padded("right"))
    assert before == {name: p.data_ptr() for name, p in fused.named_parameters()}


def test_names_of_nested_modules():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = SMALL["bert"]()

        def forward(self, input_ids, attention_mask):
            return last_hidden(self.inner, input_ids, attention_mask)

    t = regard.trace(
        subject_of(Outer(), lambda m, input_ids, attention_mask: m(input_ids, attention_mask)), padded("right")
    )
    assert t.sites["inner.encoder.layer.1.attention.self"].index == 1
