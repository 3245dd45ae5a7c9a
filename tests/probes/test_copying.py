"""The OV circuit: against the full matrix over the vocabulary, and wired heads that copy, and that do the opposite."""

from __future__ import annotations

import pytest
import torch
from letters import HEADS, WIDTH, Wired, gpt2, llama, served

import regard
from regard import errors
from regard.models import toys

SIZE = WIDTH // HEADS
CENTRE = torch.eye(WIDTH, dtype=torch.float64) - 1 / WIDTH  # takes the mean away, as a layer norm does


def copying(subject, data):
    return regard.heads(subject, data, probes=["copying"])["copying"]


def ratio(circuit):
    eigenvalues = torch.linalg.eigvals(circuit.detach())
    return float(eigenvalues.real.sum() / eigenvalues.abs().sum())


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 1.0), (-1.0, -1.0)])
def test_heads_that_copy_and_that_do_the_opposite(sign, expected):
    found = copying(*served(Wired("previous", sign)))
    assert found.values["value"].tolist() == pytest.approx([expected, 0.0])  # the idle one writes nothing
    assert "W_U W_O W_V W_E" in found.sentence


def test_of_the_wired_model_only_the_induction_head_copies():
    """The previous-token head writes where no logit is read from."""
    found = copying(*served(toys.induction(), tokens=16, rows=48))
    assert found.values["value"].tolist() == pytest.approx([0, 0, 1, 0])


def test_against_the_full_circuit_of_a_model_whose_heads_share_values():
    model, subject, data = llama()
    expected = []
    for layer in model.model.layers:
        for head in range(HEADS):
            group = head // 2
            value = (
                layer.self_attn.v_proj.weight[group * SIZE : (group + 1) * SIZE] @ layer.input_layernorm.weight.diag()
            )
            out = layer.self_attn.o_proj.weight[:, head * SIZE : (head + 1) * SIZE]
            unembed = model.lm_head.weight @ model.model.norm.weight.diag()
            expected.append(ratio(unembed @ out @ value @ model.model.embed_tokens.weight.T))
    found = copying(subject, data).values["value"].tolist()
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(found) - min(found) > 0.1


def test_against_the_full_circuit_of_a_model_with_layer_norms():
    model, subject, data = gpt2()
    expected = []
    for layer in model.transformer.h:
        for head in range(HEADS):
            part = slice(head * SIZE, (head + 1) * SIZE)
            value = layer.attn.c_attn.weight.T.chunk(3)[2][part] @ layer.ln_1.weight.diag() @ CENTRE
            out = layer.attn.c_proj.weight.T[:, part]
            unembed = model.lm_head.weight @ model.transformer.ln_f.weight.diag() @ CENTRE
            expected.append(ratio(unembed @ out @ value @ model.transformer.wte.weight.T))
    assert copying(subject, data).values["value"].tolist() == pytest.approx(expected, abs=1e-6)


def test_an_encoder_copies_from_state_to_state(classifier, tokenizer):
    model = classifier.double()
    found = copying(regard.text(model, tokenizer), ["a moving film", "so so"])
    expected = []
    for layer in model.bert.encoder.layer:
        for head in range(4):
            part = slice(head * 8, (head + 1) * 8)
            expected.append(
                ratio(layer.attention.output.dense.weight[:, part] @ layer.attention.self.value.weight[part])
            )
    assert found.values["value"].tolist() == pytest.approx(expected, abs=1e-6)
    assert "no unembedding" in found.sentence


def test_what_reads_one_stream_and_writes_another_is_not_defined(tokenizer):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
    from oracles import t5

    found = copying(regard.seq2seq(t5(tokenizer), tokenizer), [("a moving film", "so"), ("dull", "so so")])
    assert (found.values["value"].isna() == (found.values["kind"] == "cross")).all()
    assert "Not defined" in found.warnings[0]


def test_models_whose_maps_are_not_seen_are_refused():
    subject = regard.pooled(toys.decisive())
    with pytest.raises(errors.NotServed, match="is not known"):
        copying(subject, ["so so good", "the film"])
