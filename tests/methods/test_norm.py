"""Norms of what attention lets through, against the sums of Kobayashi et al. written out: T × T × d numbers.

Weights are those of eager attention, values and what goes into a block are taken by hooks, W_O from the module by its
name, all in float64; norms agree to 1e-6 of the largest.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import transformers as hf
from oracles import SMALL, assert_close, bert, encoded, gpt2, ids_of, llama, seeded
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import errors

TEXTS = ["a moving film", "so", "dull, and it never ends: it is unbelievably long"]


@dataclass
class Opened:
    """One layer of a model, on one example alone."""

    weights: Tensor  # head query key
    values: Tensor  # head key channel
    projection: Tensor  # head channel output
    bias: Tensor  # of the output projection, which no norm has
    x: Tensor  # row output: what the result is added to
    norm: nn.LayerNorm | None = None  # of the sum

    @property
    def f(self) -> Tensor:
        """f^h(x_k), ``(head, key, output)``."""
        return self.values @ self.projection

    @property
    def parts(self) -> Tensor:
        """α^h f^h(x_k), ``(head, query, key, output)``: nothing is saved here."""
        return self.weights[..., None] * self.f[:, None]

    @property
    def mixed(self) -> Tensor:
        """The sum over heads, with x_q where k is q: ``(query, key, output)``."""
        return self.parts.sum(0) + torch.eye(len(self.x), dtype=self.x.dtype)[..., None] * self.x

    @property
    def normed(self) -> Tensor:
        """Each part of the sum through the norm, LN(y) = (y − mean(y)) ⊙ γ / s + β without β; s is of all of it."""
        assert self.norm is not None
        whole = self.mixed.sum(1) + self.bias  # query output
        s = (whole.var(-1, unbiased=False) + self.norm.eps).sqrt()
        return (self.mixed - self.mixed.mean(-1, keepdim=True)) * self.norm.weight / s[:, None, None]


def opened(model, tokenizer, text, inputs=None) -> list[Opened]:
    """The layers of a BERT, a GPT-2 or a Llama, by the names of their modules."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("written out" if isinstance(model, hf.LlamaPreTrainedModel) else "eager")
    base = twin.base_model
    blocks = base.encoder.layer if hasattr(base, "encoder") else base.h if hasattr(base, "h") else base.layers
    seen: dict[tuple[int, str], Tensor] = {}

    def keep(number, what):
        return lambda module, args, output: seen.__setitem__((number, what), output if what == "values" else args[0])

    for number, block in enumerate(blocks):
        block.register_forward_hook(keep(number, "x"))
        parts_of(block)[0].register_forward_hook(keep(number, "values"))
    inputs = inputs or encoded(tokenizer, text, return_token_type_ids=hasattr(base, "encoder"))
    with torch.no_grad():
        attentions = twin(**inputs, output_attentions=True).attentions
    found = []
    for number, (block, weights) in enumerate(zip(blocks, attentions, strict=True)):
        _, projection, bias, norm = parts_of(block)
        heads, width = weights.shape[1], projection.shape[0] // weights.shape[1]
        values = seen[number, "values"][0]
        values = values[:, -width * heads :] if hasattr(block, "attn") else values  # GPT-2: queries, keys, values
        values = values.unflatten(-1, (-1, width)).transpose(0, 1)
        values = values.repeat_interleave(heads // len(values), 0)  # shared by a group of heads
        found.append(
            Opened(weights[0], values, projection.unflatten(0, (heads, width)), bias, seen[number, "x"][0], norm)
        )
    return found


def parts_of(block):
    """Where values are made, W_O ``(input, output)``, its bias, the norm of the sum."""
    if hasattr(block, "attn"):
        return block.attn.c_attn, block.attn.c_proj.weight.detach(), block.attn.c_proj.bias.detach(), None
    if hasattr(block, "self_attn"):
        weight = block.self_attn.o_proj.weight.detach().T
        return block.self_attn.v_proj, weight, torch.zeros(weight.shape[1], dtype=weight.dtype), None
    output = block.attention.output
    return block.attention.self.value, output.dense.weight.detach().T, output.dense.bias.detach(), output.LayerNorm


def lively(model):
    """With biases, and norms that are not those of a new model: of which one is left out might be seen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.5 * torch.randn_like(parameter) + ("bias" in name)
    return model


def size(vectors: Tensor) -> Tensor:
    return vectors.detach().norm(dim=-1)


def rolled(matrices, keep):
    """Π(keep·I + (1 − keep)·M), the last layer on the left."""
    product = torch.eye(len(matrices[0]), dtype=matrices[0].dtype)
    for matrix in matrices:
        product = (keep * torch.eye(len(product), dtype=product.dtype) + (1 - keep) * matrix) @ product
    return product


BUILDS = {"BERT": bert, "GPT-2": gpt2, "Llama": llama}


@pytest.fixture(scope="module", params=BUILDS)
def case(request, tokenizer):
    """A subject, the row that is read from so many, and the layers of each text."""
    torch.manual_seed(11)
    model = lively(BUILDS[request.param](tokenizer))
    wrap = regard.text if request.param == "BERT" else regard.causal
    return wrap(model, tokenizer), 0 if request.param == "BERT" else -1, [opened(model, tokenizer, t) for t in TEXTS]


def test_the_oracle_is_the_model(case):
    """A second oracle for the first: the sum of all parts and the bias is what goes on to the next block or norm."""
    subject, _, texts = case
    for number, text in enumerate(TEXTS):
        t = regard.trace(subject, text, onward=True)
        for site, layer in zip(t.sites, texts[number], strict=True):
            assert_close(site.onward.total[0], layer.mixed.sum(1) + layer.bias)


def test_the_sum_over_heads(case):
    subject, row, texts = case
    for why, layers in zip(regard.explain(subject, TEXTS, method="norm"), texts, strict=True):
        assert_close(why.scores, size(layers[-1].parts.sum(0))[row])


def test_each_head(case):
    subject, row, texts = case
    for why, layers in zip(regard.explain(subject, TEXTS, method="norm", per_head=True), texts, strict=True):
        assert why.axes == ("head", "token")
        assert_close(why.scores, size(layers[-1].parts)[:, row])
    found = regard.explain(subject, TEXTS, method="norm", per_head=True, per_layer=True, matrix=True)
    for why, layers in zip(found, texts, strict=True):
        assert why.axes == ("layer", "head", "query", "token")
        assert_close(why.scores, torch.stack([size(layer.parts) for layer in layers]))


def test_with_what_a_row_had_before(case):
    subject, row, texts = case
    found = regard.explain(subject, TEXTS, method="norm", mix="residual")
    whole = regard.explain(subject, TEXTS, method="norm", mix="residual", matrix=True)
    for why, matrix, layers in zip(found, whole, texts, strict=True):
        assert_close(why.scores, size(layers[-1].mixed)[row])
        assert_close(matrix.scores, size(layers[-1].mixed))


def test_layers(case):
    subject, row, texts = case
    options = {"method": "norm", "mix": "residual"}
    first, mean = (regard.explain(subject, TEXTS, layers=layers, **options) for layers in (1, "mean"))
    each = regard.explain(subject, TEXTS, per_layer=True, **options)
    for one, two, three, layers in zip(first, mean, each, texts, strict=True):
        expected = torch.stack([size(layer.mixed)[row] for layer in layers])
        assert_close(one.scores, expected[1])
        assert_close(two.scores, expected.mean(0))
        assert_close(three.scores, expected)


@pytest.mark.parametrize(("mix", "keep"), [("attention", 0.5), ("residual", 0.0)])
def test_a_rollout_of_rows_divided_by_their_sums(case, mix, keep):
    subject, row, texts = case
    found = regard.explain(subject, TEXTS, method="norm", mix=mix, layers="rollout")
    whole = regard.explain(subject, TEXTS, method="norm", mix=mix, layers="rollout", matrix=True)
    for why, matrix, layers in zip(found, whole, texts, strict=True):
        norms = [size(layer.mixed if mix == "residual" else layer.parts.sum(0)) for layer in layers]
        expected = rolled([one / one.sum(-1, keepdim=True) for one in norms], keep)
        assert_close(why.scores, expected[row])
        assert_close(matrix.scores, expected)


# --- through the norm -----------------------------------------------------------------------------------------------


def test_through_the_norm_of_a_post_norm_block(tokenizer):
    torch.manual_seed(11)
    model = lively(bert(tokenizer))
    subject = regard.text(model, tokenizer)
    options = {"method": "norm", "mix": "residual_norm"}
    found, whole = regard.explain(subject, TEXTS, **options), regard.explain(subject, TEXTS, matrix=True, **options)
    each = regard.explain(subject, TEXTS, per_layer=True, **options)
    product = regard.explain(subject, TEXTS, layers="rollout", **options)
    for number, text in enumerate(TEXTS):
        layers = opened(model, tokenizer, text)
        last = layers[-1]
        sums, whole_sum = last.normed.sum(1), last.mixed.sum(1) + last.bias
        without = last.norm(whole_sum) - last.norm.bias  # what the bias makes of it goes through the norm, too
        bias = (last.bias - last.bias.mean()) * last.norm.weight
        s = (whole_sum.var(-1, unbiased=False) + last.norm.eps).sqrt()
        assert_close(sums + bias / s[:, None], without)
        assert_close(found[number].scores, size(last.normed)[0])
        assert_close(whole[number].scores, size(last.normed))
        assert_close(each[number].scores, torch.stack([size(layer.normed)[0] for layer in layers]))
        norms = [size(layer.normed) for layer in layers]
        assert_close(product[number].scores, rolled([one / one.sum(-1, keepdim=True) for one in norms], 0.0)[0])


def neox(tokenizer):
    """Attention and perceptron side by side: their sum goes to the next layer, and from the last to a final norm."""
    return seeded(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**ids_of(tokenizer), **SMALL, rotary_pct=0.5)))


@pytest.mark.parametrize("layers", ["last", 0, "mean", "rollout"])
@pytest.mark.parametrize("build", [gpt2, llama, neox])
def test_a_pre_norm_model_has_no_such_norm(tokenizer, build, layers):
    subject = regard.causal(build(tokenizer), tokenizer)
    with pytest.raises(errors.NotServed, match="'residual_norm' is defined for post-norm blocks.*Use mix='residual'"):
        regard.explain(subject, TEXTS[0], method="norm", mix="residual_norm", layers=layers)


# --- torch's own layers ---------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Two of torch's layers, and a mean over real rows."""

    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, **options)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rows_first = not options["batch_first"]

    def forward(self, x, real):
        x = x.transpose(0, 1) if self.rows_first else x
        hidden = self.body(x, src_key_padding_mask=~real)
        hidden = hidden.transpose(0, 1) if self.rows_first else hidden
        return (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)

    def opened(self, x) -> list[Opened]:
        """``x`` is one example, ``(row, channel)``."""
        found = []
        for layer in self.body.layers:
            attention = layer.self_attn
            weight, bias = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
            q, k, v = ((x @ w.T + b).unflatten(-1, (2, 8)).transpose(0, 1) for w, b in zip(weight, bias, strict=True))
            out = attention.out_proj
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            found.append(Opened(weights, v, out.weight.T.unflatten(0, (2, 8)), out.bias, x, layer.norm1))
            x = layer.norm1(found[-1].mixed.sum(1) + out.bias)
            x = layer.norm2(x + layer.linear2(layer.linear1(x).relu()))
        return found


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mix", ["attention", "residual", "residual_norm"])
def test_torchs_layers_with_examples_or_rows_first(batch_first, mix):
    torch.manual_seed(5)
    model = lively(Encoder(batch_first=batch_first).double().eval())
    rows = 6
    subject = regard.module(
        model, lambda model, x, real: model(x, real), features=[f"row {i}" for i in range(rows)], readout="mean",
        padding=lambda x, real: real, output="embedding",
    )  # fmt: skip
    x, real = torch.randn(3, rows, 16).double(), torch.arange(rows) < torch.tensor([[4], [6], [2]])
    part = {"attention": lambda layer: layer.parts.sum(0), "residual": lambda layer: layer.mixed}
    part["residual_norm"] = lambda layer: layer.normed
    for options in ({}, {"layers": 0}):
        found = regard.explain(subject, (x, real), method="norm", mix=mix, matrix=True, **options)
        means = regard.explain(subject, (x, real), method="norm", mix=mix, **options)
        for example in range(3):
            layer = model.opened(x[example, real[example]])[options.get("layers", -1)]
            assert_close(found[example].scores, size(part[mix](layer)))
            assert_close(means[example].scores, size(part[mix](layer)).mean(0))


# --- what stands in between -----------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A block whose attention is gated, scaled or normed before or after its output projection."""

    def __init__(self, between):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.between = nn.LayerNorm(16), between

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.between == "a gate":
            mixed = mixed * self.gate(x).sigmoid()
        elif self.between == "a gate, in place":
            mixed *= self.gate(x).sigmoid()
        elif self.between == "a norm":
            mixed = self.norm(mixed)
        projected = self.out(mixed)
        if self.between == "a gate after it":
            projected = projected * self.gate(x).sigmoid()
        elif self.between == "half of it":
            return torch.add(x, projected, alpha=0.5).mean(1)
        return (x + projected).mean(1)


def gated(between):
    torch.manual_seed(3)
    model = Gated(between).double().eval()
    subject = regard.module(
        model, lambda model, x: model(x), features=list("abcde"), readout="mean", output="embedding"
    )
    return subject, torch.randn(2, 5, 16).double()


@pytest.mark.parametrize("between", ["a gate", "a gate, in place", "a norm"])
@pytest.mark.parametrize("mix", ["attention", "residual"])
def test_what_stands_before_the_projection_is_refused(between, mix):
    subject, x = gated(between)
    with pytest.raises(
        errors.NotServed, match="norm: no output projection was seen after site 0.*Methods that can: "
    ) as e:
        regard.explain(subject, x, method="norm", mix=mix)
    assert "norm," not in str(e.value).partition("Methods that can: ")[2]


@pytest.mark.parametrize("between", ["a gate after it", "half of it"])
def test_what_stands_before_the_residual_is_refused(between):
    subject, x = gated(between)
    assert regard.explain(subject, x, method="norm")[0].scores.min() > 0
    with pytest.raises(errors.NotServed, match="mix='residual': no residual connection was seen around site 0"):
        regard.explain(subject, x, method="norm", mix="residual")


def test_options_that_are_refused(case):
    subject, _, _ = case
    with pytest.raises(errors.OptionError, match="mix='all' is not known. Choose one of 'attention', 'residual'"):
        regard.explain(subject, TEXTS[0], method="norm", mix="all")
    with pytest.raises(errors.NotServed, match="per_head=True: with mix='residual' heads have no share"):
        regard.explain(subject, TEXTS[0], method="norm", mix="residual", per_head=True)
    with pytest.raises(errors.OptionError, match="per_head=True: a rollout multiplies the mean over heads"):
        regard.explain(subject, TEXTS[0], method="norm", layers="rollout", per_head=True)
