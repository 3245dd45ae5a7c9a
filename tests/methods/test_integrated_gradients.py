"""Integrated gradients against sums written out: slopes at places between baseline and input, times the way.

Each text is alone, in float64; its embeddings go to the model's own code, which is asked for the slope at each place.
Where the way is smooth the sum is Riemann's, with thousands of steps; elsewhere that of Gauss and Legendre, with few.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import assert_close, bert, encoded, llama, seeded, t5
from test_gradient import WORDS, Captions, embedded, ids_of_words, lstm, pictures, pooled_logits, table, vit

import regard
from regard import errors

TEXTS = ["a moving film", "so", "dull, an unbelievably overlong movie"]
FEW = 6
METHOD = {"method": "integrated_gradients", "steps": FEW}


def gauss(count):
    """Places between 0 and 1, and their weights."""
    places, weights = np.polynomial.legendre.leggauss(count)
    return torch.from_numpy((places + 1) / 2), torch.from_numpy(weights / 2)


def middles(count):
    """The same of a Riemann sum; its error falls with the square of the number."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count, torch.full((count,), 1 / count).double()


def summed(scalar, ends, starts, at=None):
    """Σ_d (x − x̄)_d Σ_i w_i ∂F/∂x_d, a number a row, of each ``(1, row, channel)``; and F(x) − F(x̄)."""
    totals = [torch.zeros_like(end) for end in ends]
    places, weights = at or gauss(FEW)
    for some, parts in zip(places.split(1000), weights.split(1000), strict=True):
        x = [
            (start + some[:, None, None] * (end - start)).detach().requires_grad_()
            for start, end in zip(starts, ends, strict=True)
        ]
        for total, slope in zip(totals, torch.autograd.grad(scalar(*x).sum(), x), strict=True):
            total += torch.einsum("s,src->rc", parts, slope)
    with torch.no_grad():
        change = float(scalar(*ends) - scalar(*starts))
    found = [((end - start) * total).sum(-1)[0] for end, start, total in zip(ends, starts, totals, strict=True)]
    return torch.cat(found), change


def baseline_of(model, ids, kind, tokenizer, special=None):
    """The embeddings of the same text with another token, or nothing, in the place of all ordinary ones."""
    special = set(tokenizer.all_special_ids) if special is None else special
    other = {"pad": tokenizer.pad_token_id, "mask": tokenizer.mask_token_id, "zero": None}[kind]
    start = embedded(model, ids).detach().clone()
    for row, token in enumerate(ids[0].tolist()):
        if token not in special:
            start[0, row] = 0 if other is None else model.get_input_embeddings().weight[other].detach()
    return start


def of_text(model, tokenizer, text, scalar, kind="pad", types=True, at=None):
    inputs = encoded(tokenizer, text, return_token_type_ids=types)
    ids = inputs.pop("input_ids")

    def function(vectors):
        output = model(inputs_embeds=vectors, **{name: one.expand(len(vectors), -1) for name, one in inputs.items()})
        return scalar(output.logits if output.logits.dim() == 2 else output.logits[:, -1])

    return summed(function, [embedded(model, ids).detach()], [baseline_of(model, ids, kind, tokenizer)], at)


def assert_these(found, expected):
    """Scores, and how far their sum is from what it should be."""
    for why, (scores, change) in zip(found, expected, strict=True):
        assert_close(why.scores, scores)
        assert why.facts["convergence_delta"] == pytest.approx(why.scores.sum() - change, abs=1e-6)


@pytest.mark.parametrize("kind", ["pad", "mask", "zero"])
def test_a_classifier(subject, model, tokenizer, kind):
    """The integral itself."""
    found = regard.explain(subject, TEXTS, method="integrated_gradients", baseline=kind, target=1, steps=100)
    expected = [of_text(model, tokenizer, text, lambda x: x[:, 1], kind, at=middles(2000)) for text in TEXTS]
    assert_these(found, expected)
    for why in found:
        assert why.scores[[0, -1]].tolist() == [0, 0], "special tokens stay"
        assert abs(why.facts["convergence_delta"]) < 1e-5 * max(abs(why.scores))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder(tokenizer, side):
    model = llama(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    options = METHOD | {"of": "logprob", "target": "film"}
    token = tokenizer.convert_tokens_to_ids("film")
    scalar = lambda logits: logits.log_softmax(-1)[:, token]  # noqa: E731
    expected = [of_text(model, tokenizer, text, scalar, types=False) for text in TEXTS]
    assert_these(regard.explain(subject, TEXTS, **options), expected)
    assert_these([regard.explain(subject, text, **options) for text in TEXTS], expected)


def test_what_was_predicted_stays_the_target(model, tokenizer, subject):
    """Along the way other classes are predicted; also beside a target that is no class."""
    found = regard.explain(subject, TEXTS, target=[None, (0, 1), None], **METHOD)
    expected, changed = [], []
    for number, text in enumerate(TEXTS):
        inputs = encoded(tokenizer, text)
        first = int(model(**inputs).logits.argmax())
        start = baseline_of(model, inputs["input_ids"], "pad", tokenizer)
        changed.append(int(model(inputs_embeds=start).logits.argmax()) != first)
        scalar = (lambda x: x[:, 0] - x[:, 1]) if number == 1 else (lambda x, c=first: x[:, c])
        expected.append(of_text(model, tokenizer, text, scalar))
    assert changed[0] or changed[2], "else this proves nothing"
    assert_these(found, expected)


def test_a_number_and_several_labels(tokenizer):
    for kind, target, scalar in (
        ({"num_labels": 1}, None, lambda x: x[:, 0]),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, 2, lambda x: x.sigmoid()[:, 2]),
    ):
        config = hf.BertConfig(**bert(tokenizer).config.to_diff_dict() | kind)
        model = seeded(lambda config=config: hf.BertForSequenceClassification(config))
        of = "logit" if target is None else "probability"
        found = regard.explain(regard.text(model, tokenizer), TEXTS, target=target, of=of, **METHOD)
        assert_these(found, [of_text(model, tokenizer, text, scalar) for text in TEXTS])


def test_a_plain_encoder_and_a_function_of_its_output(tokenizer):
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="first")
    ids = encoded(tokenizer, TEXTS[0])["input_ids"]
    x, start = embedded(model, ids).detach(), baseline_of(model, ids, "pad", tokenizer)
    expected = summed(lambda vectors: model(inputs_embeds=vectors).last_hidden_state[:, 0, 3], [x], [start])
    assert_these(regard.explain(subject, TEXTS[:1], target=lambda output: output[:, 3], **METHOD), [expected])
    with pytest.raises(errors.WrongTarget, match="needs a function"):
        regard.explain(subject, TEXTS, **METHOD)


@pytest.mark.parametrize("kind", ["pad", "mask", "zero"])
def test_an_encoder_decoder(tokenizer, kind):
    """Of what was produced there is no baseline but zero: otherwise it stays, and has no scores."""
    model = t5(tokenizer)
    subject = regard.seq2seq(model, tokenizer)
    pairs = [("a moving film", "so it is"), ("so", "dull")]
    found = regard.explain(subject, pairs, baseline=kind, **METHOD)
    for why, (source, text) in zip(found, pairs, strict=True):
        ids, said = (torch.tensor([tokenizer(part)["input_ids"]]) for part in (source, text))
        taken = torch.cat([torch.tensor([[model.config.decoder_start_token_id]]), said[:, :-1]], 1)
        ends = [embedded(model, some).detach() for some in (ids, taken)]
        starts = [baseline_of(model, some, kind, tokenizer) for some in (ids, taken)]
        if kind != "zero":
            starts[1] = ends[1]

        def function(x, z, said=said):
            return model(inputs_embeds=x, decoder_inputs_embeds=z).logits[:, -1, said[0, -1]]

        assert why.parts == {"source": ids.shape[1]} | ({"produced": taken.shape[1]} if kind == "zero" else {})
        scores, change = summed(function, ends, starts)
        assert_these([why], [(scores[: sum(why.parts.values())], change)])


@pytest.mark.parametrize("marks", [False, True], ids=["words alone", "between marks"])
@pytest.mark.parametrize("kind", ["pad", "mask"])
def test_an_lstm(kind, marks):
    """ "<unk>" is its mask; the embedding of "<pad>" is zero."""
    model, vocabulary = lstm(marks)
    subject = regard.pooled(model, vocabulary)
    found = regard.explain(subject, WORDS, method="integrated_gradients", baseline=kind, steps=100, target=1)
    attended = slice(1, -1) if marks else slice(None)
    for why, text in zip(found, WORDS, strict=True):
        ids = ids_of_words(vocabulary, text)
        others = ids_of_words(vocabulary, " ".join(["<unk>" if kind == "mask" else "<pad>"] * len(text.split())))
        x, start = (model.encoder.embedding(torch.tensor([some])).detach() for some in (ids, others))

        def function(x):
            states, _ = model.encoder.body(x)
            scores = model.outer(model.inner(states).tanh())[..., 0]
            weights = scores[:, attended].softmax(-1)
            return model.decoder((weights[..., None] * states[:, attended]).sum(1))[:, 0]

        torch.testing.assert_close(function(x), pooled_logits(model, x, attended))
        assert_these([why], [summed(function, [x], [start], middles(2000))])


def test_a_picture_without_its_colours():
    model = vit()
    subject = regard.image(model)
    found = regard.explain(subject, pictures(), baseline="mask", target=2, **METHOD)
    other = copy.deepcopy(model)
    for why, picture in zip(found, pictures(), strict=True):
        plain = picture.mean((1, 2), keepdim=True).expand_as(picture)
        x, start = (model.vit.embeddings(one[None]).detach() for one in (picture, plain))
        start = torch.cat([x[:, :1], start[:, 1:]], 1)  # [CLS] stays

        def function(vectors):
            other.vit.embeddings.forward = lambda *_, **__: vectors
            return other(picture[None].expand(len(vectors), -1, -1, -1)).logits[:, 2]  # noqa: B023

        assert_these([why], [summed(function, [x], [start])])
    with pytest.raises(errors.NotServed, match="baseline='pad': this subject has none. Use another.*'zero'"):
        regard.explain(subject, pictures(), method="integrated_gradients")


def test_a_table_with_a_baseline():
    mean = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    model, subject, rows = table(baseline=mean)
    found = regard.explain(subject, rows, baseline="mask", target=0, **METHOD)
    for why, row in zip(found, rows, strict=True):
        x, start = (torch.cat([model.cls_embedding((1,)), model.cont_embeddings(one[None])], 1) for one in (row, mean))
        function = lambda vectors: model.backbone(vectors)[:, 0]  # noqa: E731
        assert_these([why], [summed(function, [x.detach()], [start.detach()])])
    _, without, _ = table()
    for kind in ("pad", "mask"):
        with pytest.raises(errors.NotServed, match=f"integrated_gradients: baseline='{kind}': this subject has none"):
            regard.explain(without, rows, method="integrated_gradients", baseline=kind)
    assert regard.explain(without, rows, method="integrated_gradients", baseline="zero")[0].scores[1:].all()


def test_only_a_source_has_ids():
    model = seeded(Captions)
    subject = regard.module(
        model, lambda model, x, ids: model(x, ids), features=["x", "y"], source=list("abc"), readout="first"
    )
    x, ids = torch.randn(2, 2, 6, dtype=torch.float64), torch.tensor([[3, 1, 4], [1, 5, 8]])
    found = regard.explain(subject, (x, ids), baseline="zero", target=0, **METHOD)
    for why, one, query in zip(found, ids, x, strict=True):
        z = model.embedding(one)[None].detach()

        def function(z, query=query):
            mixed = (query[:1] @ z.mT / 6**0.5).softmax(-1) @ z
            return model.head(mixed[:, 0])[:, 0]

        assert_these([why], [summed(function, [z], [torch.zeros_like(z)])])


class Counted(torch.nn.Module):
    """Tokens that look at three numbers, which become vectors in no submodule."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(9, 6), torch.nn.Linear(6, 3)

    def forward(self, ids, numbers):
        x, z = self.embedding(ids), numbers[..., None] * self.head.weight[0]
        return self.head(torch.nn.functional.scaled_dot_product_attention(x, z, z)[:, 0])


def test_a_source_that_enters_as_no_vectors():
    subject = regard.module(
        seeded(Counted), lambda model, ids, numbers: model(ids, numbers), features=["x", "y"], source=list("abc"),
        readout="first", baseline=torch.zeros(3),
    )  # fmt: skip
    given = (torch.tensor([[3, 1]]), torch.randn(1, 3, dtype=torch.float64))
    with pytest.raises(errors.NotServed, match="baseline='mask': the source enters the model as no vectors. Use base"):
        regard.explain(subject, given, baseline="mask", **METHOD)
    assert regard.explain(subject, given, baseline="zero", target=0, **METHOD)[0].parts == {"produced": 2}


def test_each_token_of_a_continuation(tokenizer):
    """Over its prefix alone, cut in the middle of a word."""
    model = llama(tokenizer)
    prompt = tokenizer("so dull")["input_ids"]
    later = tokenizer("overlong film", add_special_tokens=False)["input_ids"]
    found = regard.explain(regard.causal(model, tokenizer), "so dull", continuation="overlong film", **METHOD)
    for place, why in enumerate(found):
        ids = torch.tensor([prompt + later[:place]])
        x, start = embedded(model, ids).detach(), baseline_of(model, ids, "pad", tokenizer)
        function = lambda vectors, place=place: model(inputs_embeds=vectors).logits[:, -1, later[place]]  # noqa: E731
        assert_these([why], [summed(function, [x], [start])])


def test_what_few_steps_lack_is_on_record(subject, model, tokenizer):
    found = [
        regard.explain(subject, TEXTS[2], method="integrated_gradients", steps=count, target=1) for count in (1, 2)
    ]
    assert_these(found, [of_text(model, tokenizer, TEXTS[2], lambda x: x[:, 1], at=gauss(count)) for count in (1, 2)])
    lacking = [abs(why.facts["convergence_delta"]) for why in found]
    assert lacking[0] > lacking[1] > 1e-3


def test_half_precision(model, tokenizer):
    half = regard.text(copy.deepcopy(model).to(torch.bfloat16), tokenizer)
    why = regard.explain(half, TEXTS[0], method="integrated_gradients", target=1)
    expected, _ = of_text(model, tokenizer, TEXTS[0], lambda logits: logits[:, 1], at=gauss(50))
    assert why.scores.dtype == np.float32
    np.testing.assert_allclose(why.scores, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_no_gradients(subject):
    with torch.inference_mode(), pytest.raises(errors.NoGradient, match="inside torch.inference_mode"):
        regard.explain(subject, "so", method="integrated_gradients")
    with pytest.raises(errors.NoGradient, match="does not depend differentiably on the input"):
        regard.explain(subject, "so", method="integrated_gradients", target=lambda output: output.detach()[:, 0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"baseline": "mean"}, "baseline='mean' is not known. Choose one of 'pad', 'mask', 'zero'"),
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"steps": 2.5}, "steps=2.5"),
    ],
)
def test_options_that_are_refused(subject, options, said):
    with pytest.raises(errors.OptionError, match=said):
        regard.explain(subject, "so", method="integrated_gradients", **options)
