"""Hidden states, read and changed, against torch's own forward hooks on a copy of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES
from literal import assert_near
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import errors

# By architecture, for each state of each layer the module whose output it is, and which of its calls; None: refused.
POST = {"block": "encoder.layer.{}", "attention": None, "mlp": None}
PLACES = {
    "BERT": [{name: path and (path.format(i), 0) for name, path in POST.items()} for i in (0, 1)],
    "ALBERT": [{"block": ("encoder.albert_layer_groups.0", i), "attention": None, "mlp": None} for i in (0, 1)],
    "GPT-2": [{"block": (f"h.{i}", 0), "attention": (f"h.{i}.attn", 0), "mlp": (f"h.{i}.mlp", 0)} for i in (0, 1)],
    "Llama": [
        {"block": (f"layers.{i}", 0), "attention": (f"layers.{i}.self_attn", 0), "mlp": (f"layers.{i}.mlp", 0)}
        for i in (0, 1)
    ],
    "GPT-NeoX": [  # both halves at once
        {"block": (f"layers.{i}", 0), "attention": (f"layers.{i}.attention", 0), "mlp": (f"layers.{i}.mlp", 0)}
        for i in (0, 1)
    ],
    "Gemma-2": [  # what is added has gone through a norm
        {
            "block": (f"layers.{i}", 0), "attention": (f"layers.{i}.post_attention_layernorm", 0),
            "mlp": (f"layers.{i}.post_feedforward_layernorm", 0),
        }
        for i in range(4)
    ],
    "T5": [
        *(
            {
                "block": (f"encoder.block.{i}", 0), "attention": (f"encoder.block.{i}.layer.0.SelfAttention", 0),
                "mlp": (f"encoder.block.{i}.layer.1.DenseReluDense", 0),
            }
            for i in (0, 1)
        ),
        *(  # a decoder's block has two sites: each has its half
            {
                "block": (f"decoder.block.{i}.layer.{part}", 0),
                "attention": (f"decoder.block.{i}.layer.{part}.{name}", 0), "mlp": None,
            }
            for i in (0, 1) for part, name in enumerate(["SelfAttention", "EncDecAttention"])
        ),
    ],
    "nn.TransformerEncoder, rows first": [
        {"block": (f"layers.{i}", 0), "attention": None, "mlp": None} for i in (0, 1)
    ],
    "rtdl's FTTransformer": [
        {
            "block": (f"backbone.blocks.{i}.output", 0), "attention": (f"backbone.blocks.{i}.attention", 0),
            "mlp": (f"backbone.blocks.{i}.ffn", 0),
        }
        for i in (0, 1)
    ],
}  # fmt: skip
EMBEDDINGS = {"BERT": "embeddings.word_embeddings", "ALBERT": "embeddings.word_embeddings", "GPT-2": "wte", "Llama": "embed_tokens"}  # fmt: skip
ROWS_FIRST = {"nn.TransformerEncoder, rows first"}


class Case:
    """A model in float64, and hooks on a copy of it."""

    def __init__(self, name):
        torch.manual_seed(0)
        architecture = ARCHITECTURES[name]
        self.name, self.places, self.model = name, PLACES[name], architecture.build().double()
        # rows of padding that see nothing in their window are NaN in Gemma-2 in float64
        side = "left" if "left" in architecture.sides and name != "Gemma-2" else None
        self.inputs = {
            key: one.double() if one.is_floating_point() else one for key, one in architecture.inputs(side).items()
        }
        self.architecture, self.subject = architecture, architecture.subject(self.model)
        self.every = [(layer, at) for layer, some in enumerate(self.places) for at, place in some.items() if place]

    def hooked(self, changes=None, enter=None, gradients=False):
        """Output and states ``(example, row, channel)`` of a copy; ``changes`` by (layer, at): what hooks return."""
        twin = copy.deepcopy(self.model)
        kept, flip = {}, self.name in ROWS_FIRST
        for layer, at in self.every:
            path, which = self.places[layer][at]
            calls = []

            def hook(_, __, output, key=(layer, at), which=which, calls=calls):
                calls.append(1)
                if len(calls) != which + 1:
                    return None
                state = output[0] if isinstance(output, tuple) else output
                kept[key] = state.transpose(0, 1) if flip else state
                if changes is None or key not in changes:
                    return None
                new = changes[key](kept[key])
                new = new.transpose(0, 1) if flip else new
                return (new, *output[1:]) if isinstance(output, tuple) else new

            twin.get_submodule(path).register_forward_hook(hook)
        if enter is not None:
            twin.get_submodule(EMBEDDINGS[self.name]).register_forward_hook(lambda _, __, output: enter(output))
        subject = self.architecture.subject(twin)
        with torch.set_grad_enabled(gradients):
            return subject.forward(subject.encode(self.inputs)), kept

    def real(self, state):
        """Rows that are not padding; of a single row, all."""
        sequence = self.subject.encode(self.inputs).sequence_of(state.shape[1])
        return torch.ones(state.shape[:2], dtype=torch.bool) if sequence is None else sequence.real

    def intervene(self, *edits, **options):
        return regard.intervene(self.subject, self.inputs, list(edits), **options)


@pytest.fixture(scope="module", params=list(PLACES))
def case(request):
    return Case(request.param)


@pytest.fixture(scope="module")
def llama():
    return Case("Llama")


# --- reading --------------------------------------------------------------------------------------------------------


def test_states_are_what_hooks_see(case):
    trace = regard.trace(case.subject, case.inputs, states=True)
    output, kept = case.hooked()
    assert_near(trace.output, output)
    assert len(trace.sites) == len(case.places)
    for layer, some in enumerate(case.places):
        for at, place in some.items():
            if place is None:
                with pytest.raises(errors.NotServed, match=f"site {layer} "):
                    trace.state(layer, at)
            else:
                state, expected = trace.state(layer, at), kept[layer, at]
                assert_near(state[case.real(state)], expected[case.real(state)])


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "GPT-NeoX", "Gemma-2", "rtdl's FTTransformer"])
def test_what_attention_and_mlp_add_is_what_a_block_adds(name):
    case = Case(name)
    trace = regard.trace(case.subject, case.inputs, states=True)
    for layer in range(1, len(trace.sites)):
        before, after, attention, mlp = (
            trace.state(*key) for key in [(layer - 1, "block"), (layer, "block"), (layer, "attention"), (layer, "mlp")]
        )
        assert_near(after, before + attention + mlp)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_entrance_is_the_embedding(name):
    case = Case(name)
    trace = regard.trace(case.subject, case.inputs, states="entrance")
    table = case.model.get_submodule(EMBEDDINGS[name]).weight
    assert_near(trace.state("rows", "entrance")[trace.real], table[case.inputs["input_ids"]][trace.real])
    with pytest.raises(errors.NoSuchPart, match="at='block' was not kept. Trace with states=True"):
        trace.state(0)


def test_two_sequences_enter():
    case = Case("T5")
    trace = regard.trace(case.subject, case.inputs, states=["entrance"])
    for strand, ids in (("rows", "decoder_input_ids"), ("source", "input_ids")):
        assert_near(trace.state(strand, "entrance"), case.model.shared.weight[case.inputs[ids]])


def test_states_are_only_kept_when_asked(llama):
    assert regard.trace(llama.subject, llama.inputs).states == {}
    assert {at for _, at in regard.trace(llama.subject, llama.inputs, states=["mlp"]).states} == {"mlp"}
    with pytest.raises(errors.OptionError, match="states='heads' is not known. Choose one of 'block'"):
        regard.trace(llama.subject, llama.inputs, states="heads")
    trace = regard.trace(llama.subject, llama.inputs, states=True)
    assert torch.equal(trace.state(-1), trace.state(1))
    with pytest.raises(errors.NoSuchPart, match="layer=7 is not there at 'block'. There are 0, 1."):
        trace.state(7)
    with pytest.raises(errors.OptionError, match="at='middle' is not known"):
        trace.state(0, "middle")


@pytest.mark.parametrize("examples", [1, 4])
def test_as_many_examples_as_rows(examples):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    subject = regard.module(
        model, lambda model, x: model(x.transpose(0, 1))[0], features=list("abcd"), readout="first",
        output="embedding",
    )  # fmt: skip
    x = torch.randn(examples, 4, 16, dtype=torch.float64)
    trace = regard.trace(subject, x, states=True)
    after = model.layers[0](x.transpose(0, 1)).transpose(0, 1)
    assert_near(trace.state("rows", "entrance"), x)
    assert_near(trace.state(0), after)
    assert_near(trace.state(1), model.layers[1](after.transpose(0, 1)).transpose(0, 1))


# --- editing --------------------------------------------------------------------------------------------------------


def test_a_state_that_is_put_back_changes_nothing(case):
    plain = case.hooked()[0]
    for layer, at in [*case.every, (None, "entrance")]:
        assert_near(case.intervene(regard.edits.state(lambda state, _: state, at=at, layers=layer)), plain)


def test_zeros_are_those_of_a_hook(case):
    plain = case.hooked()[0]
    moved = 0
    for key in case.every:
        layer, at = key
        expected = case.hooked({key: lambda state: state.masked_fill(case.real(state)[..., None], 0.0)})[0]
        assert_near(case.intervene(regard.edits.state(lambda state, _: state * 0, at=at, layers=layer)), expected)
        moved += not torch.allclose(expected, plain, rtol=1e-3)
    assert moved == len(case.every)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_a_restored_state_in_a_corrupted_run_is_that_of_hooks(name):
    """Meng et al.'s experiment: noise on some embeddings, and the clean state of one row after one block."""
    case = Case(name)
    clean = regard.trace(case.subject, case.inputs, states=True)
    noise = torch.zeros_like(clean.state("rows", "entrance"))
    noise[:, 5:7] = torch.randn(noise[:, 5:7].shape, dtype=noise.dtype)
    noisy = regard.edits.state(lambda state, _: state + noise, at="entrance")
    _, kept = case.hooked()
    for layer, at in case.every:
        for row in (5, 8):

            def restored(state, key=(layer, at), row=row):
                state = state.clone()
                state[:, row] = kept[key][:, row]
                return state

            expected = case.hooked({(layer, at): restored}, enter=lambda x: x + noise)[0]
            put = regard.edits.state(lambda state, _, restored=restored: restored(state), at=at, layers=layer)
            assert_near(case.intervene(noisy, put), expected)
            assert not torch.allclose(expected, case.hooked(enter=lambda x: x + noise)[0], rtol=1e-3)


@pytest.mark.parametrize("replay", [True, False])
def test_variants_are_those_of_one_run_each(case, replay):
    """Six at once, with what lies upstream replayed or not; each with another number."""
    layer, at = case.every[-1]
    size = torch.linspace(0.0, 2.0, 6, dtype=torch.float64)

    def scaled(state, place):
        assert (state.dim(), place.total, place.at, place.layer) == (4, 6, at, layer)
        return state * place.at_hand(size[:, None, None, None], "size")

    many = case.intervene(regard.edits.state(scaled, at=at, layers=layer), variants=6, replay=replay)
    for number, factor in enumerate(size):
        one = regard.edits.state(lambda state, _, factor=factor: state * factor, at=at, layers=layer)
        assert_near(many[number], case.intervene(one))
    assert not torch.allclose(many[0], many[-1], rtol=1e-3)


def test_variants_enter_apart(llama):
    size = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    edit = regard.edits.state(
        lambda state, place: state * place.at_hand(size[:, None, None, None], "size"), at="entrance"
    )
    many = llama.intervene(edit, variants=5)
    for number, factor in enumerate(size):
        assert_near(many[number], llama.hooked(enter=lambda x, factor=factor: x * factor)[0])


def test_states_and_attention_are_edited_in_one_run(llama):
    """Attention of layer 0 is uniform, then half of the first block's state is taken."""
    half = regard.edits.state(lambda state, _: state / 2, layers=0)
    both = llama.intervene(regard.edits.uniform(sites=0), half)
    seen = []
    watching = regard.edits.state(lambda state, _: seen.append(state.clone()) or state, layers=0)
    llama.intervene(regard.edits.uniform(sites=0), watching)
    assert_near(both, llama.hooked({(0, "block"): lambda _: seen[0] / 2})[0])
    assert not torch.allclose(both, llama.intervene(half), rtol=1e-3)


def test_edits_of_the_same_state_follow_each_other(llama):
    twice = [regard.edits.state(lambda state, _: state + 1), regard.edits.state(lambda state, _: state * 2)]
    expected = llama.hooked({(layer, "block"): lambda state: (state + 1) * 2 for layer in (0, 1)})[0]
    found = llama.intervene(*twice)
    rows = llama.subject.encode(llama.inputs).real
    assert rows.sum() < rows.numel()
    assert_near(found, expected)


@pytest.mark.parametrize("gradients", [True, "edits"])
@pytest.mark.parametrize("at", ["block", "mlp", "entrance"])
def test_gradients_flow_through_edits(llama, at, gradients):
    size = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    layers = None if at == "entrance" else 0
    edit = regard.edits.state(lambda state, _: state * size, at=at, layers=layers)
    rerun = regard.attention.Rerun(llama.subject, llama.inputs, gradients=gradients)
    (found,) = torch.autograd.grad(rerun(edit).square().sum(), [size])
    changes = {} if at == "entrance" else {(0, at): lambda state: state * size}
    output, _ = llama.hooked(changes, (lambda x: x * size) if at == "entrance" else None, gradients=True)
    (expected,) = torch.autograd.grad(output.square().sum(), [size])
    assert abs(float(expected)) > 0.1
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_the_last_block_of_rtdl_computes_one_row_of_attention():
    case = Case("rtdl's FTTransformer")
    trace = regard.trace(case.subject, case.inputs, states=True)
    assert trace.state(1, "attention").shape[1] == 1
    assert trace.state(0, "attention").shape[1] == trace.state(1).shape[1] == 9


# --- what is refused ------------------------------------------------------------------------------------------------


def test_the_model_is_afterwards_as_it_was(case):
    before = copy.deepcopy(case.model.state_dict())
    layer, at = case.every[-1]

    def fails(state, place):
        raise ZeroDivisionError

    regard.trace(case.subject, case.inputs, states=True)
    for options in ({}, {"variants": 5}):
        with pytest.raises(ZeroDivisionError) as raised:
            case.intervene(regard.edits.state(fails, at=at, layers=layer), **options)
        assert f"raised by edit state at {at}, layer {layer}" in raised.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        case.intervene(regard.edits.state(fails, at="entrance"))
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all("forward" not in vars(module) for module in case.model.modules())
    assert not any(module._forward_hooks for module in case.model.modules())


def test_what_an_edit_may_return(llama):
    def edited(change, **options):
        return llama.intervene(regard.edits.state(change, **options))

    with pytest.raises(errors.BadEdit, match=r"layer 0 .* returned \(3, 9\); the state it was given has shape \(3, 9"):
        edited(lambda state, _: state[..., 0])
    with pytest.raises(errors.BadEdit, match="returned list; the state"):
        edited(lambda state, _: [state])
    with pytest.raises(errors.BadEdit, match="state at mlp, layer 1 .* returned NaN or Inf"):
        edited(lambda state, _: state / 0, at="mlp", layers=-1)
    with pytest.raises(errors.BadEdit, match="state at entrance, rows, returned NaN"):
        edited(lambda state, _: state * torch.nan, at="entrance")


def test_what_cannot_be_named(llama):
    keep = lambda state, place: state  # noqa: E731
    with pytest.raises(errors.OptionError, match="at='heads' is not known. Choose one of 'block'"):
        regard.edits.state(keep, at="heads")
    with pytest.raises(errors.NoSuchPart, match="layers=5 is not there. There are 0: layers.0.self_attn, 1: layers.1"):
        llama.intervene(regard.edits.state(keep, layers=5))
    with pytest.raises(errors.BadEdit, match="an input enters once"):
        regard.edits.state(keep, at="entrance", layers=0)
    with pytest.raises(errors.BadEdit, match="change=3 must be a function"):
        regard.edits.state(3)
    with pytest.raises(errors.BadEdit, match=r"change must take \(state, place\)"):
        regard.edits.state(lambda state: state)
    bert = Case("BERT")
    with pytest.raises(errors.NotServed, match=r"state at mlp: a norm comes after the sum in the block of site 0"):
        bert.intervene(regard.edits.state(keep, at="mlp"))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Outside(nn.Module):
    """Sums outside of any submodule; ``norm`` sees each state, and returns it, but nothing goes on from there."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList([Attention(), Attention()]), nn.Identity()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return (self.norm(x) + x).mean(1)


def test_a_state_that_goes_on_elsewhere_is_not_taken_for_the_state():
    torch.manual_seed(2)
    model = Outside().double().eval()
    subject = regard.module(
        model, lambda model, x: model(x), features=list("abcde"), readout="mean", output="embedding"
    )
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    trace = regard.trace(subject, x, states=True)
    for layer in (0, 1):
        with pytest.raises(errors.NotServed, match=f"residual connection around site {layer} .*is in no submodule"):
            trace.state(layer)
    assert_near(trace.state(0, "attention"), model.layers[0](x))
    expected = 2 * (x + model.layers[1](x)).mean(1)
    found = regard.intervene(subject, x, regard.edits.state(lambda state, _: state * 0, at="attention", layers=0))
    assert_near(found, expected)


def test_attention_that_pools_has_no_states():
    subject = regard.pooled(regard.models.toys.decisive())
    trace = regard.trace(subject, "so so good so", states=["block"])
    with pytest.raises(errors.NotServed, match=r"no submodule holds site 0 .*together with its residual connection"):
        trace.state(0)
    with pytest.raises(errors.NotServed, match="no submodule holds site 0"):
        regard.intervene(subject, "so so good so", regard.edits.state(lambda state, _: state))


def test_a_module_that_is_exchanged_is_looked_up_again():
    """Where states come out is kept for a model; another layer in it has another identity."""
    case = Case("Llama")
    regard.trace(case.subject, case.inputs, states=True)
    case.model.layers[0] = copy.deepcopy(case.model.layers[1])
    case.model.layers[0].self_attn.layer_idx = 0
    trace = regard.trace(case.subject, case.inputs, states=True)
    _, kept = case.hooked()
    assert_near(trace.state(0)[trace.real], kept[0, "block"][trace.real])
