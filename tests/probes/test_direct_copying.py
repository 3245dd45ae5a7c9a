"""What heads raise by the direct path: wired heads, and a model that is run by hand, step by step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from letters import HEADS, WIDTH, Wired, gpt2, llama, served

import regard
from regard import errors
from regard.circuits import random_text

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import attend

SIZE = WIDTH // HEADS


def direct_copying(subject, data, **options):
    return regard.heads(subject, data, probes=[("direct_copying", options)], draws=50).probed.popitem()[1]


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 1.0), (-1.0, -1.0)])
def test_heads_that_raise_what_they_look_at_and_all_else(sign, expected):
    found = direct_copying(*served(Wired("previous", sign)), tokens=24)
    assert found.values["value"][0] == pytest.approx(expected, abs=1e-6)
    assert found.values["value"].isna().tolist() == [False, True]  # the idle one raises nothing
    assert "1 heads" in found.warnings[0]


def literal(weights, values, outs, unembed, text):
    """``(head,)``: 2s − 1 of one text."""
    found = []
    for head in range(HEADS):
        shares = []
        for row in range(len(text)):
            out = sum(weights[head, row, key] * values[head][key] for key in range(row + 1))
            logits = (unembed @ (outs[head] @ out)).detach()
            raised = [max(float(logits[token] - logits.mean()), 0.0) for token in text]
            if sum(raised):
                looked = [float(weights[head, row, key]) for key in range(len(text))]
                shares.append(sum(a * r for a, r in zip(looked, raised, strict=True)) / sum(raised))
        found.append(2 * sum(shares) / len(shares) - 1)
    return found


@pytest.mark.parametrize("build", [llama, gpt2])
def test_against_a_model_that_is_run_by_hand(build):
    model, subject, data = build(rows=10)
    found = direct_copying(subject, data, tokens=10, sequences=2)
    every = []
    for text in random_text(subject, tokens=10, repeats=1, sequences=2, seed=0).tolist():
        ids = {"input_ids": torch.tensor([text])}
        run = attend(model, ids, lambda output: output.logits.sum())
        states = [state.detach() for state in model(**ids, output_hidden_states=True).hidden_states]
        one = []
        for layer, weights in enumerate(run.weights):
            if build is llama:
                block = model.model.layers[layer]
                mixed = block.self_attn.v_proj(block.input_layernorm(states[layer]))[0]
                values = [mixed[:, (head // 2) * SIZE : (head // 2 + 1) * SIZE] for head in range(HEADS)]
                projection, unembed = block.self_attn.o_proj.weight, model.lm_head.weight * model.model.norm.weight
            else:
                block = model.transformer.h[layer]
                mixed = block.attn.c_attn(block.ln_1(states[layer]))[0].chunk(3, -1)[2]
                values = [mixed[:, head * SIZE : (head + 1) * SIZE] for head in range(HEADS)]
                projection, unembed = block.attn.c_proj.weight.T, model.lm_head.weight * model.transformer.ln_f.weight
                unembed = unembed - unembed.mean(-1, keepdim=True)
            outs = [projection[:, head * SIZE : (head + 1) * SIZE] for head in range(HEADS)]
            one += literal(weights, values, outs, unembed, text)
        every.append(one)
    expected = torch.tensor(every).mean(0).tolist()
    assert found.values["value"].tolist() == pytest.approx(expected, abs=1e-6)
    assert found.settings["chance"] == pytest.approx(-0.8)


def test_attention_to_the_token_that_texts_begin_with_is_left_out(smollm):
    """Most attention of a decoder is on it; what remains sums to 1, so that shares are not all next to nothing."""
    found = direct_copying(smollm, ["so"], sequences=3).values["value"]
    assert found.mean() == pytest.approx(2 / 25 - 1, abs=0.05)
    assert found.max() > 4 / 25 - 1


def test_models_without_logits_of_tokens_are_refused(classifier, tokenizer):
    with pytest.raises(errors.NotServed, match="decoder"):
        direct_copying(regard.text(classifier, tokenizer), ["so so"])
