"""From inputs to explanations: what is taken, targets, batches, want of memory, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from oracles import TEXTS, assert_close, bert, classified, gpt2, seeded

import regard
from regard import catalog, errors
from regard.subjects.scratch import scratch_table

FIVE = [*TEXTS, "it ends", "a film"]


@pytest.fixture(scope="module")
def singles(subject):
    return [regard.explain(subject, text, method="grad_rollout") for text in FIVE]


def assert_these(found, singles):
    """The same explanations, to 1e-6, in this order."""
    assert isinstance(found, list)
    assert [why.features.tokens for why in found] == [one.features.tokens for one in singles]
    for why, one in zip(found, singles, strict=True):
        assert_close(why.scores, one.scores)
        assert why.target == one.target


# --- what is taken --------------------------------------------------------------------------------------------------


def test_one_input_gives_one_explanation(singles):
    assert all(isinstance(one, regard.Explanation) for one in singles)


@pytest.mark.parametrize(
    "many",
    [
        list, iter, pd.Series, np.array,
        lambda texts: (text for text in texts),
        lambda texts: pd.DataFrame({"text": texts, "title": texts[::-1]}),
        lambda texts: pd.DataFrame({"number": range(len(texts)), "body": texts}),
        lambda texts: pd.Series(texts, index=range(7, 7 + len(texts))),
    ],
    ids=["list", "iterator", "Series", "array", "generator", "frame with text", "frame with one column", "odd index"],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 5, 32])
def test_many_inputs_give_a_list_whatever_they_come_in(subject, singles, many, size):
    assert_these(regard.explain(subject, many(FIVE), method="grad_rollout", batch_size=size), singles)


@pytest.mark.parametrize("size", [1, 2, 32])
def test_an_encoded_batch(subject, singles, size):
    assert_these(regard.explain(subject, subject.encode(FIVE), method="grad_rollout", batch_size=size), singles)


def test_a_list_of_one_gives_a_list_of_one(subject, singles):
    assert_these(regard.explain(subject, FIVE[:1], method="grad_rollout"), singles[:1])


def test_pairs_of_texts(subject):
    one = regard.explain(subject, ("a film", "so dull"), method="raw")
    assert isinstance(one, regard.Explanation)
    assert_these(regard.explain(subject, [("a film", "so dull")], method="raw"), [one])


def test_tensors_are_many_and_mappings_too():
    model = seeded(lambda: torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0), 2, enable_nested_tensor=False
    ))  # fmt: skip
    subject = regard.module(model, lambda model, x: model(x)[:, 0], features=list("abc"), readout="first")
    x = torch.randn(5, 3, 8).double()
    for inputs in (x, (x,), {"x": x}):
        found = regard.explain(subject, inputs, method="rollout", batch_size=2)
        assert len(found) == 5
        assert_close(found[4].scores, regard.explain(subject, x[4:], method="rollout")[0].scores)


@pytest.fixture(scope="module")
def viewer():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = seeded(lambda: hf.ViTForImageClassification(hf.ViTConfig(**sizes, patch_size=8, image_size=(24, 32))))
    return regard.image(model, hf.ViTImageProcessorPil(size={"height": 24, "width": 32}))


PHOTOS = np.random.default_rng(0).integers(0, 256, (3, 24, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize("many", [list, tuple, lambda photos: photos], ids=["list", "tuple", "array"])
def test_several_pictures_give_a_list(viewer, many):
    found = regard.explain(viewer, many(PHOTOS), method="raw")
    singles = [regard.explain(viewer, photo, method="raw") for photo in PHOTOS]
    assert all(isinstance(one, regard.Explanation) for one in singles)
    assert_these(found, singles)


def test_one_picture_gives_one_explanation_also_as_a_tensor(viewer):
    picture = torch.rand(3, 24, 32)
    assert isinstance(regard.explain(viewer, picture, method="raw"), regard.Explanation)
    assert len(regard.explain(viewer, picture[None], method="raw")) == 1


def test_a_table_whose_texts_cannot_be_told_is_refused(subject):
    two = pd.DataFrame({"title": FIVE, "body": FIVE})
    with pytest.raises(errors.InputError, match=r"columns \['title', 'body'\] has no column 'text', and 2 columns"):
        regard.explain(subject, two, method="raw")
    with pytest.raises(errors.InputError, match="no column 'text', and 0 columns of texts"):
        regard.explain(subject, pd.DataFrame({"number": [1, 2]}), method="raw")


@pytest.mark.parametrize("nothing", [[], iter(()), pd.Series([], dtype=object), pd.DataFrame({"text": []})])
def test_nothing_is_refused(subject, nothing):
    with pytest.raises(errors.EmptyInput, match="no examples|is empty"):
        regard.explain(subject, nothing, method="raw")


@pytest.mark.parametrize("size", [0, -1])
def test_batches_of_none_are_refused(subject, size):
    for inputs in (FIVE, FIVE[0], subject.encode(FIVE)):
        with pytest.raises(errors.OptionError, match=f"batch_size={size} must be 1 or more"):
            regard.explain(subject, inputs, method="raw", batch_size=size)


# --- targets --------------------------------------------------------------------------------------------------------


def test_a_target_for_each_example(subject, model, tokenizer):
    targets = [2, 0, "LABEL_1", None, (1, 2)]
    found = regard.explain(subject, FIVE, method="grad_rollout", target=targets, batch_size=2)
    for why, text, target in zip(found[:3], FIVE, [2, 0, 1], strict=False):
        relevance = torch.eye(len(why.scores), dtype=torch.float64)
        for product in classified(model, tokenizer, text, target).products:
            relevance = relevance + product.clamp(min=0).mean(0) @ relevance
        assert_close(why.scores, relevance[0])
        assert why.target == f"LABEL_{target}"
    assert found[4].target == "LABEL_1 rather than LABEL_2"
    assert found[4].probability is None
    by_generator = regard.explain(subject, iter(FIVE), method="grad_rollout", target=targets, batch_size=2)
    assert_these(by_generator, found)


@pytest.mark.parametrize("count", [1, 4, 6])
@pytest.mark.parametrize("many", [list, iter])
def test_a_list_of_targets_of_another_length_is_refused(subject, many, count):
    with pytest.raises(errors.WrongTarget, match=r"target has \d entries for \d examples"):
        regard.explain(subject, many(FIVE), method="raw", target=[0] * count, batch_size=2)


def test_functions_of_the_output_that_are_none_are_refused(subject):
    with pytest.raises(errors.OptionError, match="of='logits' is not known"):
        regard.explain(subject, FIVE[0], method="raw", of="logits")


def test_a_target_that_is_not_there_is_refused(subject):
    for target in (3, -1, "good", [0, 1, 2, 3, 0]):
        with pytest.raises(errors.WrongTarget, match="target="):
            regard.explain(subject, FIVE, method="raw", target=target)


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [list, iter])
@pytest.mark.parametrize(
    ("bad", "kind"), [("", errors.EmptyInput), (7, errors.InputError), ("so " * 80, errors.TooLong)]
)
def test_errors_count_inputs_across_batches(subject, wrap, bad, kind):
    with pytest.raises(kind, match=r"inputs\[4\]") as caught:
        regard.explain(subject, wrap([*FIVE[:4], bad]), method="raw", batch_size=3)
    assert type(caught.value) is kind
    with pytest.raises(kind, match=r"inputs\[1\]"):
        regard.explain(subject, wrap([FIVE[0], bad, *FIVE]), method="raw", batch_size=3)


def failing(above, error):
    """A forward that has no memory for more than so many examples, and the sizes it was asked for."""
    sizes = []

    def wrap(forward):
        def limited(self, batch):
            sizes.append(len(batch))
            if len(batch) > above:
                raise error
            return forward(self, batch)

        return limited

    return wrap, sizes


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_want_of_memory_in_the_model_splits_the_batch(subject, monkeypatch, caplog, error):
    targets = [2, 0, 1, 0, 2]
    singles = [
        regard.explain(subject, text, method="grad_rollout", target=target)
        for text, target in zip(FIVE, targets, strict=True)
    ]
    wrap, sizes = failing(2, error)
    monkeypatch.setattr(type(subject), "forward", wrap(type(subject).forward))
    with caplog.at_level(logging.WARNING, "regard"):
        found = regard.explain(subject, FIVE, method="grad_rollout", target=targets)
    assert_these(found, singles)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "a batch of 5 does not fit into memory; going on with 2 at a time",
        "a batch of 3 does not fit into memory; going on with 1 at a time",
    ]
    assert sizes == [5, 2, 3, 1, 2]


def test_want_of_memory_in_the_method_splits_the_batch(subject, singles, monkeypatch, caplog):
    plain = catalog.found()["grad_rollout"]

    def limited(trace, **options):
        if len(trace.batch) > 2:
            raise MemoryError
        return plain.function(trace, **options)

    monkeypatch.setitem(catalog.found(), "grad_rollout", replace(plain, function=limited))
    with caplog.at_level(logging.WARNING, "regard"):
        assert_these(regard.explain(subject, FIVE, method="grad_rollout"), singles)
    assert "a batch of 5 does not fit into memory" in caplog.text


def test_what_does_not_fit_alone_is_raised(subject, monkeypatch):
    wrap, sizes = failing(0, MemoryError())
    monkeypatch.setattr(type(subject), "forward", wrap(type(subject).forward))
    with pytest.raises(MemoryError):
        regard.explain(subject, FIVE, method="raw")
    assert sizes == [5, 2, 1]


def test_other_failures_do_not_split(subject, monkeypatch):
    wrap, sizes = failing(2, RuntimeError("something else"))
    monkeypatch.setattr(type(subject), "forward", wrap(type(subject).forward))
    with pytest.raises(RuntimeError, match="something else"):
        regard.explain(subject, FIVE, method="raw")
    assert sizes == [5]


# --- what cannot be served ------------------------------------------------------------------------------------------


def test_methods_that_can_are_listed(tokenizer):
    """A pool has no layers to flow through: those that need some say which do not, and those serve it."""
    subject = regard.pooled(regard.models.toys.decisive())
    with pytest.raises(errors.NotServed, match="^flow: .* Methods that can: ") as caught:
        regard.explain(subject, "so good so", method="flow")
    able = str(caught.value).split("Methods that can: ")[1].rstrip(".").split(", ")
    assert {"raw", "rollout", "average", "attention_gradient", "grad_rollout"} <= set(able)
    assert not {"flow", "first_layer", "random"} & set(able), "neither those that cannot, nor controls"
    for method in able:
        assert len(regard.explain(subject, "so good so", method=method).scores) == 3


def test_a_plain_encoder_needs_a_target_where_a_scalar_is_differentiated(tokenizer):
    subject = regard.text(bert(tokenizer, hf.BertModel), tokenizer)
    with pytest.raises(errors.WrongTarget, match="plain encoder .* needs a function"):
        regard.explain(subject, TEXTS, method="grad_rollout")
    why = regard.explain(subject, TEXTS, method="rollout")[0]
    assert why.value is None
    assert "no target" in why.target
    similar = regard.explain(subject, TEXTS, method="grad_rollout", target=subject.similarity("a film"))
    assert all(-1 <= why.value <= 1 and why.probability is None for why in similar)


def test_layers_that_are_not_as_many_in_both_sequences_are_refused_in_words(two_streams):
    """LXMERT: a token has five self-attentions and three attentions to the picture, so there is no table of layers."""
    _, subject, inputs = two_streams
    with pytest.raises(errors.InputError, match="per_layer"):
        regard.explain(subject, inputs, method="raw", per_layer=True)


def test_what_is_no_subject_is_refused(model):
    with pytest.raises(errors.SubjectError, match="not a subject"):
        regard.explain(model, "so", method="raw")


def test_texts_are_written_by_language_models_only(subject, tokenizer):
    with pytest.raises(errors.NotServed, match="writes no text"):
        regard.explain(subject, "so", method="raw", generate=3)
    writer = regard.causal(gpt2(tokenizer), tokenizer)
    with pytest.raises(errors.WrongTarget, match="Leave target out"):
        regard.explain(writer, "so", method="raw", generate=2, target=5)


def test_texts_of_mixed_length_run_together_and_come_back_in_their_order(subject):
    texts = ["so", "a moving film and so it ends", "dull", "it is a film", "a film so dull it ends", "moving"]
    targets = [0, 1, 2, 0, 1, 2]
    together = regard.explain(subject, texts, method="leave_one_out", batch_size=2, target=targets)
    for text, target, why in zip(texts, targets, together, strict=True):
        alone = regard.explain(subject, text, method="leave_one_out", target=target)
        assert why.features.tokens == alone.features.tokens
        assert why.target == alone.target
        np.testing.assert_allclose(why.scores, alone.scores, rtol=0, atol=1e-9)
    with pytest.raises(errors.EmptyInput, match=r"inputs\[4\]"):
        regard.explain(subject, [*texts[:4], " ", *texts], method="raw", batch_size=2)
    with pytest.raises(errors.WrongTarget, match="2 entries for 6"):
        regard.explain(subject, texts, method="raw", batch_size=2, target=[0, 1])


def test_a_table_is_many_rows_for_a_subject_with_columns():
    subject = scratch_table(["a", "b", "c"], ["low", "high"], torch.zeros(3))
    rows = pd.DataFrame({"c": [1.0, -1.0, 0.5], "a": [0.2, 0.1, 3.0], "b": [0.0, 2.0, -2.0]})
    found = regard.explain(subject, rows, method="rollout", batch_size=2)
    assert_these(
        found, regard.explain(subject, torch.tensor(rows[["a", "b", "c"]].to_numpy()).float(), method="rollout")
    )
    assert_these(regard.explain(subject, rows[2:], method="rollout"), found[2:])
    assert tuple(found[0].features.words) == ("a", "b", "c")
