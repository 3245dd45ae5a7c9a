"""What heads hand on, replaced, against the same done by hand in eager attention; in float64."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from test_edits import HEADS, WIDTH, Model, inputs_of, subject_of

import regard
from regard import edits
from regard.attention import Rerun
from regard.errors import BadEdit

sys.path.insert(0, str(Path(__file__).parents[1] / "methods"))
from oracles import assert_close, bert, encoded, llama

TEXTS = ["dull, and it never ends", "so so"]  # the second is padded beside the first
CHANNEL = 8
HAND = {"layer": None, "heads": (), "values": None, "count": 0}


def handed_by_hand(module, query, key, value, attention_mask, scaling=None, **_):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if getattr(module, "is_causal", False):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    out = weights @ value  # example head query channel
    if HAND["layer"] == HAND["count"]:
        out = torch.stack([HAND["values"][h].expand(out.shape[2:])[None] if h in HAND["heads"] else out[:, h]
                           for h in range(out.shape[1])], 1)  # fmt: skip
    HAND["count"] += 1
    return out.transpose(1, 2).contiguous(), weights


hf.AttentionInterface.register("handed by hand", handed_by_hand)
BUILDS = {
    "bert": (bert, regard.text, True, lambda output: output.logits[0]),
    "llama": (llama, regard.causal, False, lambda output: output.logits[0, -1]),  # four heads share two groups
}


@pytest.fixture(params=BUILDS)
def both(request, tokenizer):
    """A subject, and its model written out: text, layer, heads and ``(head, row or 1, channel)`` to the output."""
    build, wrap, types, read = BUILDS[request.param]
    model = build(tokenizer)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("handed by hand")

    def oracle(text, layer=None, heads=(), values=None):
        HAND.update(layer=layer, heads=heads, values=values, count=0)
        return read(twin(**encoded(tokenizer, text, return_token_type_ids=types)))

    return wrap(model, tokenizer), oracle


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_it_is_what_eager_attention_gives_with_other_results(both, layer):
    subject, oracle = both
    values = torch.randn(4, 1, CHANNEL, dtype=torch.float64)
    found = regard.intervene(subject, TEXTS, edits.hand_on(values[None, [0, 3]], heads=[0, 3], sites=layer))
    assert_close(found, torch.stack([oracle(text, layer, (0, 3), values) for text in TEXTS]))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_variants_that_each_replace_another_head(both, layer):
    """What mean ablation asks for; replayed and run in full."""
    subject, oracle = both
    values = torch.randn(4, 1, CHANNEL, dtype=torch.float64)
    edit = edits.hand_on(values[None], where=torch.eye(4, dtype=torch.bool)[:, None], sites=layer)
    found = regard.intervene(subject, TEXTS, edit, variants=4)
    assert_close(found, torch.stack([torch.stack([oracle(t, layer, (h,), values) for t in TEXTS]) for h in range(4)]))
    torch.testing.assert_close(
        regard.intervene(subject, TEXTS, edit, variants=4, replay=False), found, rtol=0, atol=1e-12
    )
    own = edits.hand_on(torch.stack([values, 2 * values, 3 * values, 0 * values])[:, None], heads=2, sites=layer)
    with pytest.raises(BadEdit, match="do not fit site"):
        regard.intervene(subject, TEXTS, own, variants=4)  # values for four heads, of one
    own = edits.hand_on(torch.arange(4.0).view(4, 1, 1, 1, 1) * values[2], heads=2, sites=layer)
    expected = [torch.stack([oracle(t, layer, (2,), v * values) for t in TEXTS]) for v in range(4)]
    assert_close(regard.intervene(subject, TEXTS, own, variants=4), torch.stack(expected))


def test_a_model_that_forms_its_weights_itself(tokenizer):
    model = bert(tokenizer)
    values = torch.randn(1, 1, 1, CHANNEL, dtype=torch.float64)
    edit = edits.hand_on(values, heads=1, sites=1)
    fused = regard.intervene(regard.text(model, tokenizer), TEXTS, edit)
    eager = bert(tokenizer)
    eager.set_attn_implementation("eager")
    assert_close(regard.intervene(regard.text(eager, tokenizer), TEXTS, edit), fused)


def test_what_heads_hand_on_anyway_changes_nothing(both):
    """A·V of the trace, put back where it came from: the same output; at one row of one site, too."""
    subject, _ = both
    seen = regard.trace(subject, TEXTS)
    for site in seen.sites:
        out = site.weights() @ site.values
        for at in ({}, {"rows": "readout"}, {"rows": [0, -1]}):
            found = regard.intervene(subject, TEXTS, edits.hand_on(out, sites=site.index, **at))
            assert_close(found, seen.output)
            other = regard.intervene(subject, TEXTS, edits.hand_on(0 * out, sites=site.index, **at))
            # the last block's rows matter where they are read
            assert (other - seen.output).abs().max() > 1e-6


def test_rows_that_are_not_named_stay(both):
    subject, _ = both
    seen = regard.trace(subject, TEXTS[:1])
    out = seen.sites[0].weights() @ seen.sites[0].values
    changed = torch.zeros_like(out)
    changed[:, :, 1] = out[:, :, 1]  # right where it is named, wrong where it is not
    assert_close(regard.intervene(subject, TEXTS[:1], edits.hand_on(changed, sites=0, rows=1)), seen.output)


# --- gradients, orders and refusals, on a small model of our own ------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("variants", [None, 4])
def test_gradients_flow_to_the_values(fused, variants):
    torch.manual_seed(0)
    model = Model(fused=fused, causal=True).double().eval()
    subject, inputs = subject_of(model, 4), inputs_of(2, 4, dtype=torch.float64)
    values = torch.randn(1, 1, 1, WIDTH // HEADS, dtype=torch.float64, requires_grad=True)
    for options in ({"sites": 0, "heads": [0, 2]}, {"sites": 1, "rows": "readout"}, {"heads": 1}):
        for gradients in (True, "edits"):
            assert torch.autograd.gradcheck(
                lambda x, options=options, gradients=gradients: Rerun(subject, inputs, gradients=gradients)(
                    edits.hand_on(x, **options), variants=variants
                ),
                [values],
            )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    torch.manual_seed(0)
    model = Model().double().eval()
    x, real = inputs_of(2, 4, dtype=torch.float64)
    x.requires_grad_()

    def gradients(checkpointed):
        model.checkpointed = checkpointed
        values = torch.full((1, 1, 1, WIDTH // HEADS), 0.3, dtype=torch.float64, requires_grad=True)
        output = regard.intervene(subject_of(model, 4), (x, real), edits.hand_on(values, heads=1), gradients=True)
        model.zero_grad()
        output.sin().sum().backward()
        return [values.grad, model.blocks[0].v.weight.grad.clone()]

    for one, other in zip(gradients(None), gradients(reentrant), strict=True):
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_the_order_of_edits():
    torch.manual_seed(0)
    subject, inputs = subject_of(Model().double().eval(), 4), inputs_of(2, 4, dtype=torch.float64)
    values = torch.randn(1, 1, 1, WIDTH // HEADS, dtype=torch.float64)
    put = edits.hand_on(values, heads=1)

    def run(*some):
        return regard.intervene(subject, inputs, list(some))

    assert_close(run(put, edits.gate(1, 0.5)), run(edits.hand_on(0.5 * values, heads=1)))
    assert_close(run(edits.gate(1, 0.5), put), run(put))
    assert_close(run(edits.uniform(heads=1), put), run(put))
    both = run(edits.uniform(heads=0), put)
    assert (both - run(put)).abs().max() > 1e-6
    assert (both - run(edits.uniform(heads=0))).abs().max() > 1e-6
    with pytest.raises(BadEdit, match=r"edit uniform\(\) changes weights at site 0 .* Name hand_on last"):
        run(put, edits.uniform(heads=0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"values": torch.zeros(5)}, r"hand_on: values of shape \(5,\) do not fit site 0 .* \(2, 3, 4, 4\)"),
        ({"values": torch.zeros(2, 1, 1, 1, 1)}, "begins with a variant axis, but no variants were asked for"),
        ({"values": float("nan")}, "hand_on: values holds NaN or Inf"),
        ({"values": 0.0, "where": torch.ones(3)}, "must be a bool tensor"),
        ({"values": 0.0, "where": torch.ones(7, dtype=torch.bool)}, r"where of shape \(7,\) do not fit"),
        ({"values": torch.zeros(1, 1, 1, 1, 1, 1)}, "do not fit site 0"),
    ],
)
def test_what_is_refused(options, said):
    subject = subject_of(Model().eval(), 4)
    with pytest.raises(BadEdit, match=said):
        regard.intervene(subject, inputs_of(2, 4), edits.hand_on(**options))
