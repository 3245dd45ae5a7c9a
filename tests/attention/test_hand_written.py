"""Attention that nobody announced: torch's own modules, rtdl's, and softmaxes written by hand; and what is none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard

BATCH, ROWS, WIDTH, HEADS = 3, 5, 8, 2


def rows_subject(model, forward=None, readout="mean", rows=ROWS, padding=None):
    forward = forward or (lambda m, x: m(x).mean(1))
    return regard.module(
        model, forward, features=[f"row {i}" for i in range(rows)], readout=readout, output="embedding", padding=padding
    )


def literal(q, k, scale):
    return (q @ k.mT * scale).softmax(-1)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(need_weights, batch_first):
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first).eval()
    x = torch.randn(BATCH, ROWS, WIDTH)
    masked = torch.zeros(BATCH, ROWS, dtype=torch.bool)
    masked[1, -2:] = True

    def call(model, x):
        y = x if batch_first else x.transpose(0, 1)
        out = model(y, y, y, key_padding_mask=masked[: len(x)], need_weights=need_weights)[0]
        out = out if batch_first else out.transpose(0, 1)
        return (out * ~masked[: len(x), :, None]).sum(1)

    subject = rows_subject(attention, call, padding=lambda x: ~masked[: len(x)])
    with torch.no_grad():
        y = x if batch_first else x.transpose(0, 1)
        _, expected = attention(y, y, y, key_padding_mask=masked, need_weights=True, average_attn_weights=False)
        plain = call(attention, x)
    t = regard.trace(subject, x)
    (site,) = t.sites
    torch.testing.assert_close(site.weights(), expected * ~masked[:, None, :, None], atol=1e-5, rtol=0)
    torch.testing.assert_close(t.output, plain, atol=1e-5, rtol=0)
    assert t.check.left_fast_path


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_transformer_encoder_leaves_its_fast_path_by_itself():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    masked = torch.zeros(BATCH, ROWS, dtype=torch.bool)
    masked[0, -1] = masked[2, -3:] = True
    x = torch.randn(BATCH, ROWS, WIDTH)

    def call(model, x, masked):
        return (model(x, src_key_padding_mask=masked) * ~masked[..., None]).sum(1)

    subject = rows_subject(model, call, padding=lambda x, masked: ~masked)
    with torch.no_grad():
        plain = call(model, x, masked)
    t = regard.trace(subject, (x, masked))
    assert t.check.left_fast_path
    torch.testing.assert_close(t.output, plain, atol=1e-5, rtol=0)
    assert [site.name for site in t.sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad():
        hidden = x
        for site, block in zip(t.sites, model.layers, strict=True):
            _, expected = block.self_attn(hidden, hidden, hidden, key_padding_mask=masked, average_attn_weights=False)
            torch.testing.assert_close(site.weights(), expected * ~masked[:, None, :, None], atol=1e-5, rtol=0)
            hidden = block(hidden, src_key_padding_mask=masked)


@pytest.mark.parametrize("heads", [1, 2, 4, BATCH])
def test_rtdl_ft_transformer_folds_heads_into_the_batch(heads):
    from rtdl_revisiting_models import FTTransformer

    torch.manual_seed(3)
    model = FTTransformer(
        n_cont_features=4, cat_cardinalities=[3, 2], d_out=2, n_blocks=2, d_block=12, attention_n_heads=heads,
        attention_dropout=0.1, ffn_d_hidden_multiplier=4 / 3, ffn_dropout=0.1, residual_dropout=0.0,
    )  # fmt: skip
    x = torch.randn(BATCH, 4), torch.randint(0, 2, (BATCH, 2))
    names = ["[CLS]", "a", "b", "c", "d", "e", "f"]
    subject = regard.module(model, lambda m, *x: m(*x), features=names, readout="first", special_features=["[CLS]"])
    model.train()  # as a live model may be; the trace looks at it in eval mode
    t = regard.trace(subject, x, gradients=True)
    assert model.training
    assert [site.heads for site in t.sites] == [heads, heads]
    assert t.features[0].special == (True,) + (False,) * 6
    # the oracle: rtdl's own projections of the block's input, one example and one head at a time
    seen = []
    hooks = [module.register_forward_hook(lambda m, args, out: seen.append((args, out)), always_call=False)
             for name, module in model.named_modules() if name.endswith(".attention")]  # fmt: skip
    model.eval()
    with torch.no_grad():
        plain = model(*x)
    for hook in hooks:
        hook.remove()
    assert torch.equal(t.output, plain)
    modules = [module for name, module in model.named_modules() if name.endswith(".attention")]
    for site, module, (args, _) in zip(t.sites, modules, seen, strict=True):
        queries, keys = module.W_q(args[0]), module.W_k(args[1])
        width = queries.shape[-1] // heads
        for example in range(BATCH):
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                expected = literal(queries[example, :, part], keys[example, :, part], 1 / math.sqrt(width))
                # the last block asks for [CLS] only
                torch.testing.assert_close(site.weights()[example, head], expected[: site.shape[2]], atol=1e-5, rtol=0)


class Folded(nn.Module):
    """Attention with heads folded into the batch axis, in either order."""

    def __init__(self, order: str, heads: int = HEADS):
        super().__init__()
        self.order, self.heads = order, heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        examples, rows, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)

        def fold(y):
            y = y.view(examples, rows, self.heads, -1)
            y = y.permute(0, 2, 1, 3) if self.order == "example" else y.permute(2, 0, 1, 3)
            return y.reshape(examples * self.heads, rows, -1)

        q, k, v = fold(q), fold(k), fold(v)
        weights = F.dropout(
            F.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1]), dim=-1), 0.1, self.training
        )
        out = torch.bmm(weights, v)
        axes = (examples, self.heads) if self.order == "example" else (self.heads, examples)
        out = out.view(*axes, rows, -1)
        out = out if self.order == "example" else out.transpose(0, 1)
        return out.transpose(1, 2).reshape(examples, rows, WIDTH)


@pytest.mark.parametrize("order", ["example", "head"])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_folded_heads_are_told_apart_in_either_order(order, heads, batch):
    model = Folded(order, heads)
    x = torch.randn(batch, ROWS, WIDTH)
    t = regard.trace(rows_subject(model), x, gradients=True, target=lambda y: y[:, 0])
    q, k, v = model.qkv(x).view(batch, ROWS, 3, heads, -1).permute(2, 0, 3, 1, 4)
    expected = literal(q, k, 1 / math.sqrt(q.shape[-1])).detach().requires_grad_()
    torch.testing.assert_close(t.sites[0].weights(), expected.detach(), atol=1e-6, rtol=0)
    out = (expected @ v).transpose(1, 2).reshape(batch, ROWS, WIDTH).mean(1)
    out[:, 0].sum().backward()
    torch.testing.assert_close(t.sites[0].gradients(), expected.grad, atol=1e-6, rtol=0)


class HeadsFirst(nn.Module):
    """Weights of shape (head, example, query, key), by einsum."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        weights = torch.einsum("bqhc,bkhc->hbqk", q, k).softmax(-1)
        return torch.einsum("hbqk,bkhc->bqhc", weights, v).flatten(2)


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_heads_before_examples_also_when_there_are_as_many(batch):
    model = HeadsFirst(4)
    x = torch.randn(batch, ROWS, WIDTH)
    q, k, _ = model.qkv(x).view(batch, ROWS, 3, 4, -1).permute(2, 0, 3, 1, 4)
    t = regard.trace(rows_subject(model), x)
    torch.testing.assert_close(t.sites[0].weights(), literal(q, k, 1.0), atol=1e-6, rtol=0)


def pool(how):
    """Additive attention over LSTM states, with the weighted sum written in different ways."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, 6, batch_first=True, bidirectional=True)
            self.inner, self.outer, self.head = nn.Linear(12, 6), nn.Linear(6, 1, bias=False), nn.Linear(12, 2)

        def forward(self, x):
            states, _ = self.lstm(x)
            weights = torch.softmax(self.outer(torch.tanh(self.inner(states))).squeeze(-1), dim=1)
            context = {
                "bmm": lambda: torch.bmm(weights.unsqueeze(1), states).squeeze(1),
                "values first": lambda: torch.bmm(states.transpose(1, 2), weights.unsqueeze(2)).squeeze(2),
                "sum": lambda: (weights.unsqueeze(-1) * states).sum(1),
                "torch.sum": lambda: torch.sum(states * weights[..., None], dim=1),
                "einsum": lambda: torch.einsum("bt,btc->bc", weights, states),
                "ellipsis": lambda: torch.einsum("...t,...tc->...c", weights, states),
                "matmul": lambda: (weights[:, None] @ states)[:, 0],
            }[how]()
            return self.head(context)

        def expected(self, x):
            states, _ = self.lstm(x)
            return self.outer(self.inner(states).tanh()).squeeze(-1).softmax(1)

    return Pooled()


@pytest.mark.parametrize("how", ["bmm", "values first", "sum", "torch.sum", "einsum", "ellipsis", "matmul"])
@pytest.mark.parametrize("batch", [1, 3])
def test_attention_pooled_lstm(how, batch):
    model, x = pool(how), torch.randn(batch, ROWS, WIDTH)
    subject = regard.module(model, lambda m, x: m(x), features=list("abcde"), readout="pool")
    t = regard.trace(subject, x, gradients=True)
    (site,) = t.sites
    assert (site.kind, site.shape) == ("pool", (batch, 1, 1, ROWS))
    torch.testing.assert_close(site.weights()[:, 0, 0], model.expected(x).detach(), atol=1e-6, rtol=0)
    assert t.check.error < 1e-6


class Router(nn.Module):
    """Attention plus things that look like it; each negative is switched on by its name."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, ROWS)  # as many experts as rows: sizes alone cannot tell
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ROWS))
        self.mix = nn.Parameter(torch.randn(ROWS))
        self.slots = nn.Parameter(torch.randn(WIDTH, ROWS))
        self.classes = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        h = x + F.scaled_dot_product_attention(q, k, v)
        return h + getattr(self, self.what)(h)

    def top_k_router(self, h):
        probabilities = self.gate(h).softmax(-1)
        weight, chosen = probabilities.topk(2, -1)
        every = torch.stack([expert(h) for expert in self.experts], -2)
        picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH))
        return (weight[..., None] * picked).sum(-2)

    def dense_mixture(self, h):
        every = torch.stack([expert(h) for expert in self.experts], -2)
        return torch.einsum("bte,bted->btd", self.gate(h).softmax(-1), every)

    def flat_mixture(self, h):
        flat = h.reshape(-1, WIDTH)
        every = torch.stack([expert(flat) for expert in self.experts], 1)
        return torch.bmm(self.gate(flat).softmax(-1).unsqueeze(1), every).view_as(h)

    def scalar_mix(self, h):
        layers = torch.stack([h * i for i in range(ROWS)])
        return (self.mix.softmax(0).view(-1, 1, 1, 1) * layers).sum(0)

    def scalar_mix_loop(self, h):
        weights = torch.softmax(self.mix, 0)
        return sum(weights[i] * h * i for i in range(ROWS))

    def soft_mixture(self, h):
        logits = h @ self.slots  # example row slot
        dispatch, combine = logits.softmax(1), logits.softmax(2)
        slots = dispatch.mT @ h
        made = torch.stack([expert(slots[:, i]) for i, expert in enumerate(self.experts)], 1)
        return combine @ made

    def classifier(self, h):
        probabilities = self.gate(h.mean(1)).softmax(-1)
        return (probabilities @ self.classes).unsqueeze(1).expand_as(h)

    def sampling(self, h):
        chosen = torch.multinomial(self.gate(h.mean(1)).softmax(-1), 1)
        return chosen.to(h.dtype).unsqueeze(-1) * 0 + h


NEGATIVES = [
    "top_k_router", "dense_mixture", "flat_mixture", "scalar_mix", "scalar_mix_loop", "soft_mixture", "classifier",
    "sampling",
]  # fmt: skip


@pytest.mark.parametrize("what", NEGATIVES)
@pytest.mark.parametrize("batch", [1, BATCH])
def test_what_is_not_attention_is_listed_and_not_taken_for_it(what, batch):
    model, x = Router(what), torch.randn(batch, ROWS, WIDTH)
    t = regard.trace(rows_subject(model, lambda m, x: m(x).mean(1)), x)
    assert len(t.sites) == 1, [site.name for site in t.sites]  # the real one
    assert len(t.ignored) == (2 if what == "soft_mixture" else 1)
    assert all(entry.reason for entry in t.ignored)


def test_weights_that_are_also_used_for_something_else():
    class Relative(nn.Module):
        """Values with learned relative embeddings: the weights multiply parameters first, then the values."""

        def __init__(self):
            super().__init__()
            self.qkv, self.table = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(ROWS, WIDTH))

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            weights = (q @ k.mT).softmax(-1)
            return weights @ self.table + weights @ v

    model, x = Relative(), torch.randn(BATCH, ROWS, WIDTH)
    t = regard.trace(rows_subject(model), x)
    q, k, _ = model.qkv(x).chunk(3, -1)
    (site,) = t.sites
    torch.testing.assert_close(site.weights()[:, 0], literal(q, k, 1.0), atol=1e-6, rtol=0)
    assert t.ignored == ()


class Relative(nn.Module):
    """Relative value embeddings by einsum: an indexed table, the same for every example."""

    def __init__(self):
        super().__init__()
        self.qkv, self.table = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(2 * ROWS, WIDTH // HEADS))

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), ROWS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT).softmax(-1)
        place = torch.arange(ROWS)
        relative = torch.einsum("bhqk,qkd->bhqd", weights, self.table[place[:, None] - place + ROWS])
        return (weights @ v + relative).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("batch", [1, 2, ROWS])
def test_relative_values_are_not_a_second_site(batch):
    model, x = Relative(), torch.randn(batch, ROWS, WIDTH)
    t = regard.trace(rows_subject(model), x)
    q, k, _ = model.qkv(x).view(batch, ROWS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    (site,) = t.sites
    torch.testing.assert_close(site.weights(), literal(q, k, 1.0), atol=1e-6, rtol=0)


class SharedValues(nn.Module):
    """Several query heads over one head of keys and values, or over two groups of them."""

    def __init__(self, equations, groups):
        super().__init__()
        self.equations, self.groups = equations, groups
        self.q, self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 2 * groups), nn.Linear(WIDTH, 2 * groups)

    def split(self, x):
        q = self.q(x).unflatten(-1, (self.groups, 4 // self.groups, 2))  # example row group head channel
        return q, self.k(x).unflatten(-1, (self.groups, 2)), self.v(x).unflatten(-1, (self.groups, 2))

    def forward(self, x):
        q, k, v = self.split(x)
        if self.groups == 1:
            q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
        weights = torch.einsum(self.equations[0], q, k).softmax(-1)
        return torch.einsum(self.equations[1], weights, v).flatten(2)


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize(
    ("equations", "groups"),
    [(("bihd,bjd->bhij", "bhij,bjd->bihd"), 1), (("bqgrc,bkgc->bgrqk", "bgrqk,bkgc->bqgrc"), 2)],
)
def test_heads_that_share_values_by_einsum(equations, groups, batch):
    model, x = SharedValues(equations, groups), torch.randn(batch, ROWS, WIDTH)
    t = regard.trace(rows_subject(model), x, gradients=True, target=lambda y: y[:, 0])
    q, k, v = model.split(x)
    q = q.flatten(2, 3).transpose(1, 2)
    k, v = (y.transpose(1, 2).repeat_interleave(4 // groups, 1) for y in (k, v))
    expected = literal(q, k, 1.0).detach().requires_grad_()
    (site,) = t.sites
    torch.testing.assert_close(site.weights(), expected.detach(), atol=1e-6, rtol=0)
    (expected @ v).transpose(1, 2).flatten(2).mean(1)[:, 0].sum().backward()
    torch.testing.assert_close(site.gradients(), expected.grad, atol=1e-6, rtol=0)


SPELLINGS = {
    "softmax axis": lambda e, h: (torch.softmax(e, axis=1)[..., None] * h).sum(1),
    "sum axis": lambda e, h: (e.softmax(1)[..., None] * h).sum(axis=1),
    "keepdim": lambda e, h: (e.softmax(1)[..., None] * h).sum(1, keepdim=True)[:, 0],
    "keepdim by position": lambda e, h: (e.softmax(1)[..., None] * h).sum(1, True)[:, 0],
    "named operands": lambda e, h: torch.matmul(input=e.softmax(1)[:, None], other=h)[:, 0],
    "mat2": lambda e, h: torch.bmm(e.softmax(1)[:, None], mat2=h)[:, 0],
}


@pytest.mark.parametrize("how", SPELLINGS)
def test_other_spellings(how):
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(WIDTH, 1)

        def forward(self, x):
            return SPELLINGS[how](self.score(x.tanh())[..., 0], x)

    model, x = Pool(), torch.randn(BATCH, ROWS, WIDTH)
    subject = regard.module(model, lambda m, x: m(x), features=list("abcde"), readout="pool", output="embedding")
    t = regard.trace(subject, x, gradients=True, target=lambda y: y[:, 0])
    expected = model.score(x.tanh())[..., 0].softmax(1).detach()
    torch.testing.assert_close(t.sites[0].weights()[:, 0, 0], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(t.sites[0].gradients()[:, 0, 0], x[..., 0], atol=1e-6, rtol=0)


def test_scores_by_baddbmm_with_named_batches():
    class Alibi(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(1, ROWS, ROWS))

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = self.bias.expand(len(x), -1, -1).baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=0.5)
            return torch.bmm(scores.softmax(-1), v)

    model, x = Alibi(), torch.randn(BATCH, ROWS, WIDTH)
    t = regard.trace(rows_subject(model), x)
    q, k, _ = model.qkv(x).chunk(3, -1)
    torch.testing.assert_close(t.sites[0].weights()[:, 0], (q @ k.mT / 2 + model.bias).softmax(-1), atol=1e-6, rtol=0)


def test_soft_capped_eager_scores_with_a_sink_have_row_mass_below_one():
    class Sink(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.sink = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = torch.tanh(q @ k.mT / 5) * 5
            scores = torch.cat([scores, self.sink.expand(len(x), ROWS, 1)], -1)
            return scores.softmax(-1)[..., :-1] @ v

    model, x = Sink(), torch.randn(BATCH, ROWS, WIDTH)
    t = regard.trace(rows_subject(model), x)
    q, k, _ = model.qkv(x).chunk(3, -1)
    exp = ((q @ k.mT / 5).tanh() * 5).exp()
    torch.testing.assert_close(t.sites[0].weights()[:, 0], exp / (1 + exp.sum(-1, keepdim=True)), atol=1e-6, rtol=0)
    low, high = t.check.masses[0]
    assert 0 < low <= high < 1


def test_attention_across_the_examples_of_a_batch():
    class Samples(nn.Module):
        """As in SAINT: each example is one long row that attends to the other examples."""

        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(ROWS * WIDTH, 3 * ROWS * WIDTH)
            self.within = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

        def forward(self, x):
            q, k, v = self.qkv(x.flatten(1)[None]).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            across = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(x.shape)
            return self.within(x + across, x, x)[0]

    for within in (1, 2):  # with two, nn.MultiheadAttention folds heads into the batch
        model = Samples()
        model.within = nn.MultiheadAttention(WIDTH, within, batch_first=True)
        t = regard.trace(rows_subject(model), torch.randn(BATCH, ROWS, WIDTH))
        assert [site.kind for site in t.sites] == ["samples", "self"]
        assert t.sites[0].shape == (1, 2, BATCH, BATCH)
        assert t.sites[1].heads == within
