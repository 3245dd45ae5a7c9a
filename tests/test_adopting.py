"""Scores from elsewhere: on the right tokens, and refused where they do not fit."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch
from captum.attr import InputXGradient, LLMAttributionResult

import regard
from regard import errors

TEXT = "so so good so"


@pytest.fixture(scope="module")
def subject():
    return regard.pooled(regard.models.toys.decisive())


def test_scores_of_tokens_words_and_rows(subject, minilm):
    texts = ["an unexpectedly moving film", "dull"]
    batch = minilm.encode(texts)
    tokens = [np.arange(len(one.tokens)) for one in batch.features]
    target = minilm.similarity("a film")
    for given in (tokens, [np.pad(one, (0, batch.real.shape[1] - len(one))) for one in tokens]):
        whys = regard.adopt(minilm, texts, given, name="mine", target=target)
        for why, expected in zip(whys, tokens, strict=True):
            np.testing.assert_allclose(why.scores, expected)
            assert why.method == "mine"
            assert why.target == "similarity to 'a film'"
    words = regard.adopt(minilm, texts[0], [1.0, 2.0, 3.0, 4.0], name="mine", target=target).words()
    assert words.loc[~words["special"], "score"].tolist() == pytest.approx([1, 2, 3, 4]), "pieces share their word's"


def test_channels_are_summed_and_tensors_are_taken(subject):
    channels = torch.arange(8.0).view(4, 2)
    why = regard.adopt(subject, TEXT, channels, name="mine")
    assert why.scores.tolist() == [1, 5, 9, 13]
    result = LLMAttributionResult(input_tokens=TEXT.split(), output_tokens=["x"], seq_attr=channels.sum(1))
    assert regard.adopt(subject, TEXT, result, name="mine").scores.tolist() == [1, 5, 9, 13]


def test_an_algorithm_of_captum_is_run_on_the_embeddings(subject):
    (why,) = regard.adopt(subject, [TEXT], InputXGradient, name="input × gradient", of="probability")
    reference = regard.explain(subject, TEXT, method="gradient")
    np.testing.assert_allclose(np.abs(why.scores), reference.scores, atol=1e-7)


@pytest.mark.parametrize(
    ("inputs", "scores", "said"),
    [
        (TEXT, [1, 2, 3], r"scores\[0\] has shape \(3,\).*4 tokens"),
        (TEXT, [1, 2, 3, float("nan")], "NaN"),
        ([TEXT, TEXT], [[1, 2, 3, 4]], "1 entries for 2 inputs"),
    ],
)
def test_what_does_not_fit_is_refused(subject, inputs, scores, said):
    with pytest.raises(errors.RegardError, match=said):
        regard.adopt(subject, inputs, scores, name="mine")
    with pytest.raises(errors.InputError, match="n_steps"):
        regard.adopt(subject, TEXT, [1, 2, 3, 4], name="mine", n_steps=5)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # shap's import of matplotlib
def test_to_shap_and_when_it_is_not_there(subject, monkeypatch):
    why = regard.explain(subject, TEXT, method="integrated_gradients")
    shown = why.to_shap()
    np.testing.assert_allclose(shown.values, why.scores)
    assert shown.base_values + shown.values.sum() == pytest.approx(why.value)
    assert shown.data.tolist() == TEXT.split()
    known = builtins.__import__

    def without(name, *rest):
        if name == "shap":
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(errors.OptionError, match=r"regard\[shap\]"):
        why.to_shap()
