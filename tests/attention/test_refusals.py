"""What cannot be read is refused by name, with the next step."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import regard
from regard import errors

WIDTH, ROWS = 8, 5


def rows_subject(model, **options):
    options = {"features": list("abcde"), "readout": "mean", "output": "embedding", **options}
    return regard.module(model, lambda m, x: m(x).mean(1), **options)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def test_no_site_at_all():
    with pytest.raises(errors.NoAttentionFound, match="no softmax that mixes values") as caught:
        regard.trace(rows_subject(nn.Linear(WIDTH, WIDTH)), torch.randn(2, ROWS, WIDTH))
    assert not isinstance(caught.value, errors.OpaqueKernel)


def test_no_site_tells_what_was_seen():
    class Classifier(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    with pytest.raises(errors.NoAttentionFound, match=r"Classifier \(2, 5, 8\): its result never multiplies"):
        regard.trace(rows_subject(Classifier()), torch.randn(2, ROWS, WIDTH))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_code():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Attention())
    with pytest.raises(errors.OpaqueKernel, match=r"scripted.*original module"):
        regard.trace(rows_subject(scripted), torch.randn(2, ROWS, WIDTH))


def test_a_kernel_of_its_own():
    @torch.library.custom_op("regard_tests::flash_attn", mutates_args=())
    def flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v

    class Custom(Attention):
        def forward(self, x):
            return flash_attn(*self.qkv(x).chunk(3, -1))

    with pytest.raises(errors.OpaqueKernel, match=r"attn_implementation='sdpa'"):
        regard.trace(rows_subject(Custom()), torch.randn(2, ROWS, WIDTH))


@pytest.mark.filterwarnings("ignore")  # flex attention warns that it is slow on the CPU
def test_flex_attention():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.LlamaModel(config).eval()
    model.set_attn_implementation("flex_attention")
    subject = regard.module(
        model,
        lambda m, ids: m(ids).last_hidden_state[:, -1],
        features=list("abcde"),
        readout="last",
        output="embedding",
    )
    with pytest.raises(errors.OpaqueKernel, match="flex"):
        regard.trace(subject, torch.randint(0, 50, (1, 5)))


@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_compiled_models_run_as_they_were_written(how):
    plain = Attention()
    compiled = Attention()
    compiled.load_state_dict(plain.state_dict())
    x = torch.randn(2, ROWS, WIDTH)
    expected = regard.trace(rows_subject(plain), x)
    if how == "torch.compile":
        compiled = torch.compile(compiled)
    else:
        compiled.compile()
    t = regard.trace(rows_subject(compiled), x)
    assert torch.equal(t.sites[0].weights(), expected.sites[0].weights())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_weights(bad):
    model = Attention()
    model.qkv.weight.data[0, 0] = bad
    with pytest.raises(errors.NonFinite, match="Attention"):
        regard.trace(rows_subject(model), torch.randn(2, ROWS, WIDTH))


def test_non_finite_inputs_matter_on_real_rows_only():
    class Masked(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            seen = torch.tensor([True, True, True, True, False])
            k, v = k.where(seen[:, None], 0), v.where(seen[:, None], 0)
            out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=seen[None, None, None])
            return out[:, 0, :4]

    x = torch.randn(2, ROWS, WIDTH)
    x[:, 4] = torch.nan
    subject = rows_subject(
        Masked(), padding=lambda x: torch.tensor([[True, True, True, True, False]]).expand(len(x), -1)
    )
    weights = regard.trace(subject, x).sites[0].weights()
    assert weights[:, :, 4].count_nonzero() == weights[..., 4].count_nonzero() == 0
    torch.testing.assert_close(weights[:, :, :4].sum(-1), torch.ones(2, 1, 4))
    x[1, 2] = torch.nan
    with pytest.raises(errors.NonFinite, match="site 0"):
        regard.trace(subject, x)


def test_a_site_head_or_row_that_is_not_there():
    t = regard.trace(rows_subject(Attention()), torch.randn(2, ROWS, WIDTH))
    with pytest.raises(errors.NoSuchPart, match=r"site 7 is not there.*0: Attention"):
        t.sites[7]
    with pytest.raises(errors.NoSuchPart, match=r"'encoder' is not there.*0: Attention"):
        t.sites["encoder"]
    with pytest.raises(errors.NoSuchPart, match=r"heads=3.*has 1 heads"):
        t.sites[0].weights(heads=3)
    with pytest.raises(errors.NoSuchPart, match=r"rows=\[0, 9\].*0 to 4"):
        t.sites[0].weights(rows=[0, 9])
    with pytest.raises(errors.OptionError, match=r"rows=\[\] must be a whole number"):
        t.sites[0].weights(rows=[])
    with pytest.raises(errors.NoSuchPart, match=r"\(2, 4\).*\(2, 5\)"):
        t.sites[0].pull(torch.ones(2, 4))
    with pytest.raises(errors.NoGradient, match="gradients=True"):
        t.sites[0].gradients()
    assert isinstance(errors.NoSuchPart("x"), IndexError)
    assert [site.index for site in t.sites[:1]] == [0]


def test_a_shared_module_is_asked_for_by_number():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = Attention()

        def forward(self, x):
            return self.shared(self.shared(x))

    t = regard.trace(rows_subject(Twice()), torch.randn(2, ROWS, WIDTH))
    assert [site.name for site in t.sites] == ["shared", "shared"]
    with pytest.raises(errors.NoSuchPart, match="runs 2 times"):
        t.sites["shared"]


def test_keys_that_are_not_rows_of_the_input_are_ignored_with_the_reason():
    class Compressed(Attention):
        """Linformer-like: keys and values are compressed to three."""

        def __init__(self):
            super().__init__()
            self.compress = nn.Linear(ROWS, 3)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            small = (self.compress(y.mT).mT for y in (k, v))
            return F.scaled_dot_product_attention(q, *small) + super().forward(x)

    t = regard.trace(rows_subject(Compressed()), torch.randn(2, ROWS, WIDTH))
    assert len(t.sites) == 1
    assert "3 keys are not rows of the input" in t.ignored[0].reason


def test_axes_that_cannot_be_told_apart_are_refused():
    class ChannelIndependent(nn.Module):
        """Each of four channels is a series of its own: examples · channels run slower than heads."""

        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(2, 3 * 4)

        def forward(self, x):  # example row 8
            series = x.unflatten(-1, (4, 2)).transpose(1, 2).flatten(0, 1)  # example·channel row 2
            q, k, v = self.qkv(series).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).reshape(len(x), 4, ROWS, 4).transpose(1, 2).flatten(2)

    subject = rows_subject(ChannelIndependent())
    with pytest.raises(errors.NotReproduced, match="one example at a time"):
        regard.trace(subject, torch.randn(2, ROWS, WIDTH))  # as many examples as heads


def test_the_proof_looks_at_real_rows_of_fixed_length_inputs():
    from dataclasses import replace

    class Fixed(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            seen = (torch.arange(20) < 6)[None, None, None]
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=seen)[:, 0, :6]

    subject = rows_subject(
        Fixed(), features=[str(i) for i in range(20)], padding=lambda x: (torch.arange(20) < 6).expand(len(x), -1)
    )
    site = regard.trace(subject, torch.randn(2, 20, WIDTH)).sites[0]
    assert site.proof.error < 1e-5
    with pytest.raises(errors.NotReproduced):
        replace(site, source=replace(site.source, scale=5.0, lse=None)).weights()


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min])
def test_rows_that_see_only_a_finite_minus_infinity(low):
    class Hidden(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            mask = torch.zeros(1, 1, ROWS, ROWS)
            mask[..., 2, :] = low
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]

    site = regard.trace(rows_subject(Hidden()), torch.randn(2, ROWS, WIDTH)).sites[0]
    r = torch.eye(ROWS)[2].expand(2, -1)
    torch.testing.assert_close(site.pull(r), site.weights(rows=2)[:, 0, 0], atol=1e-6, rtol=0)


def test_a_model_that_writes_into_the_output_of_a_site():
    class InPlace(nn.Module):
        def __init__(self, copy):
            super().__init__()
            self.copy, self.one, self.two = copy, Attention(), Attention()

        def forward(self, x):
            for block in (self.one, self.two):
                out = block(x)
                out = out.clone() if self.copy else out
                out.mul_(x.sigmoid())
                out += x
                x = out
            return x

    models = InPlace(True), InPlace(False)
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, ROWS, WIDTH)
    expected, t = (
        regard.trace(rows_subject(model), x, gradients=True, target=lambda y: y.square().sum(-1)) for model in models
    )
    assert torch.equal(expected.output, t.output)
    for one, other in zip(expected.sites, t.sites, strict=True):
        torch.testing.assert_close(one.gradients(), other.gradients(), atol=1e-7, rtol=0)


def test_gradients_inside_a_no_grad_block_are_refused():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Attention(), Attention()

        def forward(self, x):
            with torch.no_grad():
                x = self.one(x)
            return self.two(x)

    subject, x = rows_subject(Frozen()), torch.randn(2, ROWS, WIDTH)
    assert len(regard.trace(subject, x).sites) == 2
    with pytest.raises(errors.NoGradient, match=r"site 0 \(one\) runs under torch.no_grad"):
        regard.trace(subject, x, gradients=True, target=lambda y: y[:, 0])


def test_a_mask_with_one_axis():
    class OneAxis(Attention):
        def forward(self, x):
            return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), attn_mask=torch.arange(ROWS) < 3)

    weights = regard.trace(rows_subject(OneAxis()), torch.randn(2, ROWS, WIDTH)).sites[0].weights()
    assert weights[..., 3:].count_nonzero() == 0


def test_a_wrong_readout_is_an_error():
    subject = regard.module(
        Attention(), lambda m, x: m(x)[:, 0], features=list("abcde"), readout="last", output="embedding"
    )
    with pytest.raises(errors.ReadoutMismatch, match=r"declared at rows 4.*moves with rows 0"):
        regard.trace(subject, torch.randn(2, ROWS, WIDTH))


def test_weights_that_do_not_reproduce_the_output_are_refused():
    from dataclasses import replace

    t = regard.trace(rows_subject(Attention()), torch.randn(2, ROWS, WIDTH))
    site = t.sites[0]
    wrong = replace(site, source=replace(site.source, scale=site.source.scale * 2, lse=None))
    with pytest.raises(errors.NotReproduced, match="do not trust"):
        wrong.weights()
