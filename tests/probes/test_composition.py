"""Composition of heads: against full matrices, in a wired model, and what is and is not defined."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from letters import HEADS, WIDTH, gpt2, llama, served

import regard
from regard import errors
from regard.models import toys
from regard.probes.composition import by_chance

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import t5

SIZE = WIDTH // HEADS
CENTRE = torch.eye(WIDTH, dtype=torch.float64) - 1 / WIDTH
PAIR = ["kind", "layer", "head", "earlier_layer", "earlier_head"]


def composition(subject, data, **options):
    return regard.heads(subject, data, probes=[("composition", options)]).probed.popitem()[1]


def ratio(reader, writer):
    """‖R W‖ / (‖R‖ ‖W‖) of whole matrices."""
    return float(((reader @ writer).norm() / reader.norm() / writer.norm()).detach())


def test_the_induction_head_reads_what_the_previous_token_head_wrote():
    found = composition(*served(toys.induction(), tokens=16, rows=48))
    pairs = found.tables["pairs"].set_index(PAIR).sort_index()
    # W_QK W_OV takes 16 tokens to themselves: √16 / (√16 · √16); all other pairs have nothing in common
    assert pairs.loc[("K", 1, 0, 0, 0), "value"] == pytest.approx(1 / 4 - by_chance(16, 64, 112), abs=1e-6)
    others = pairs.drop(("K", 1, 0, 0, 0))
    assert len(others) == 11
    assert (others["value"] + others["chance"]).abs().max() < 1e-9
    assert "K-composition of 1.0 with 0.0" in found.sentence
    assert found.values["value"].isna().tolist() == [True, True, False, False]


def test_against_full_matrices():
    model, subject, data = gpt2()
    found = composition(subject, data, strongest=10_000)
    written, asked = {}, {}
    for number, layer in enumerate(model.transformer.h):
        maps = [part @ layer.ln_1.weight.diag() @ CENTRE for part in layer.attn.c_attn.weight.T.chunk(3)]
        for head in range(HEADS):
            part = slice(head * SIZE, (head + 1) * SIZE)
            query, key, value = (one[part] for one in maps)
            written[number, head] = layer.attn.c_proj.weight.T[:, part] @ value
            asked[number, head] = query.T @ key
    expected, best = {}, {}
    for (later, head), (earlier, other) in [(a, b) for a in written for b in written if a[0] > b[0]]:
        writer = written[earlier, other]
        readers = {"V": written[later, head], "K": asked[later, head], "Q": asked[later, head].T}
        for kind, reader in readers.items():
            expected[kind, later, head, earlier, other] = ratio(reader, writer)
    pairs = found.tables["pairs"].set_index(PAIR).sort_index()
    assert set(pairs.index) == set(expected)
    assert len(pairs) == 3 * 3 * HEADS**2
    for pair, value in expected.items():
        assert pairs.loc[pair, "value"] + by_chance(SIZE, SIZE, WIDTH) == pytest.approx(value, abs=1e-9)
        best[pair[1:3]] = max(best.get(pair[1:3], 0.0), value - by_chance(SIZE, SIZE, WIDTH))
    for row in found.values.itertuples():
        assert np.isnan(row.value) if row.layer == 0 else row.value == pytest.approx(best[row.layer, row.head])
    top = composition(subject, data, strongest=5).tables["pairs"]
    assert top["kind"].tolist() == ["V"] * 5 + ["K"] * 5 + ["Q"] * 5
    assert top["value"][0] == pairs.loc["V", "value"].max()


def test_by_chance_is_what_random_matrices_have():
    lots = np.random.default_rng(1)
    found = []
    for _ in range(300):
        maps = [lots.normal(size=(WIDTH, SIZE)) @ lots.normal(size=(SIZE, WIDTH)) for _ in range(2)]
        found.append(ratio(*map(torch.tensor, maps)))
    error = np.std(found) * np.sqrt(1 / 300 + 1 / 32)
    assert by_chance(SIZE, SIZE, WIDTH) == pytest.approx(np.mean(found), abs=4 * error)
    assert error < 0.01


def test_models_with_rotary_positions_have_values_alone():
    model, subject, data = llama()
    found = composition(subject, data, strongest=10_000)
    assert set(found.tables["pairs"]["kind"]) == {"V"}
    assert [kind in warning for kind, warning in zip(("K-", "Q-"), found.warnings, strict=True)] == [True, True]
    assert all("rotary" in warning for warning in found.warnings)
    pairs = found.tables["pairs"].set_index(PAIR).sort_index()

    def writes(number, head):
        layer = model.model.layers[number]
        value = layer.self_attn.v_proj.weight[(head // 2) * SIZE : (head // 2 + 1) * SIZE]
        return layer.self_attn.o_proj.weight[:, head * SIZE : (head + 1) * SIZE] @ (
            value * layer.input_layernorm.weight
        )

    for later, head, earlier, other in [(2, 3, 1, 0), (2, 0, 0, 2), (1, 1, 0, 1)]:
        one = pairs.loc[("V", later, head, earlier, other)]
        assert one["value"] + one["chance"] == pytest.approx(
            ratio(writes(later, head), writes(earlier, other)), abs=1e-9
        )


def test_heads_compose_within_a_stream(tokenizer):
    """What an encoder writes is read by the keys and values of cross-attention, and by nothing else of the decoder."""
    subject = regard.seq2seq(t5(tokenizer), tokenizer)
    found = composition(subject, [("a moving film", "so"), ("dull", "so so")], strongest=10_000)
    kinds = found.values.groupby("layer")["kind"].first()
    pairs = found.tables["pairs"]
    seen = {(one.kind, kinds[one.earlier_layer], kinds[one.layer]) for one in pairs.itertuples()}
    inside = {(kind, "encoder", "encoder") for kind in "VKQ"} | {(kind, "decoder", "decoder") for kind in "VKQ"}
    between = {("V", "encoder", "cross"), ("K", "encoder", "cross"), ("Q", "decoder", "cross"), ("Q", "cross", "cross")}
    after = {(kind, "cross", "decoder") for kind in "VKQ"}
    assert seen == inside | between | after


def test_bad_options_and_models():
    with pytest.raises(errors.OptionError, match="strongest"):
        composition(*served(toys.induction(), tokens=16, rows=48), strongest=0)
    with pytest.raises(errors.NotServed, match="is not known"):
        composition(regard.pooled(toys.decisive()), ["so so good", "the film"])
