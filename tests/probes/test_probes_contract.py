"""What every probe must keep, on whatever the folder holds: those of rows and heads by numbers, all by declarations."""

from __future__ import annotations

import copy
import random
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import regard
from regard import errors
from regard.data import Dataset, Example
from regard.data.schema import Schema
from regard.models import SAINT
from regard.surveying import found

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import bert, llama, t5

STREAMED = sorted(name for name, one in found().items() if one.each != "case")
TEXTS = ["a moving film, and dull .", "so it is", "dull, and it never ends!"]
PAIRS = [("a moving film", "so it is"), ("so", "dull"), ("dull, it ends", "it is")]
WORDS = ["so good the awful film", "good so", "dull so film"]
VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<unk>", *sorted({*" ".join(WORDS).split()})])}
LOTS = np.random.default_rng(0)
FRAME = pd.DataFrame({"age": LOTS.normal(40, 10, 6), "job": [*"abcabc"], "hours": LOTS.normal(38, 5, 6), "sex": [*"fmfmff"]})  # fmt: skip
SCHEMA = Schema.of(FRAME)


def lstm(_):
    torch.manual_seed(3)
    model = regard.models.AttentionClassifier(words=len(VOCABULARY), embedding=12, hidden=8).double().eval()
    model.outer.weight.data *= 9  # far from uniform
    return model


def ft(_):
    from rtdl_revisiting_models import FTTransformer

    torch.manual_seed(4)
    return FTTransformer(
        n_cont_features=2, cat_cardinalities=list(SCHEMA.cardinalities), d_out=3, n_blocks=2, d_block=16,
        attention_n_heads=4, attention_dropout=0.2, ffn_d_hidden_multiplier=2, ffn_dropout=0.1, residual_dropout=0.0,
    ).eval()  # fmt: skip


def saint(_):
    torch.manual_seed(5)
    return SAINT(2, SCHEMA.cardinalities, 3, attention="columns", width=16, depth=2, heads=4).eval()


def table(model, _):
    return regard.tabular(model, SCHEMA, labels=["no", "maybe", "yes"])


SUBJECTS = {
    "BERT": (bert, lambda model, tokenizer: regard.text(model, tokenizer), TEXTS),
    "a decoder, padded on the left": (llama, lambda model, tokenizer: regard.causal(model, tokenizer), TEXTS),
    "a decoder, padded on the right": (
        llama, lambda model, tokenizer: regard.causal(model, tokenizer, padding_side="right"), TEXTS,
    ),
    "an encoder–decoder": (t5, lambda model, tokenizer: regard.seq2seq(model, tokenizer), PAIRS),
    "a pooled LSTM": (lstm, lambda model, tokenizer: regard.pooled(model, VOCABULARY), WORDS),
    "FT-Transformer": (ft, table, FRAME.to_dict("records")),
    "SAINT": (saint, table, FRAME.to_dict("records")),
}  # fmt: skip
FIRST, LEFT, RIGHT = list(SUBJECTS)[:3]


@pytest.fixture(scope="module")
def made(tokenizer):
    """(subject, inputs) by name and precision, each built once."""

    @cache
    def make(name, dtype=torch.float64):
        build, wrap, inputs = SUBJECTS[name]
        return wrap(build(tokenizer).to(dtype), tokenizer), inputs

    return make


def looked(subject, inputs, **options):
    """All probes of rows and heads at once: their numbers and words, and why others were not served."""
    data = Dataset.of([Example(one) for one in inputs])
    done = regard.heads(subject, data, probes=STREAMED, **{"draws": 3} | options)
    assert set(done.probed) | set(done.refused) == set(STREAMED)
    assert all(done.refused.values()), "each says why"
    return done


def numbers(done):
    return {name: one.values["value"].to_numpy(dtype=float) for name, one in done.probed.items()}


def close(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        largest = np.nanmax(np.abs(one[name]), initial=1.0)
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance * largest, err_msg=name)


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_kind_of_model_is_served(made, name):
    done = looked(*made(name))
    assert {"entropy", "confidence"} <= set(done.probed)
    for probe, values in numbers(done).items():
        assert np.isfinite(values).any(), f"{probe} found nothing, and was not refused"
    frame = done.frame()
    assert len(frame) == len(done.index)
    assert set(done.probed) <= set(frame)


def test_an_encoder_serves_all(made):
    done = looked(*made(FIRST))
    assert not done.refused
    assert all(np.isfinite(values).all() for values in numbers(done).values())


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_batch_is_a_stack_of_singles(made, name):
    subject, inputs = made(name)
    close(numbers(looked(subject, inputs)), numbers(looked(subject, inputs, batch_size=1)), 1e-5)


def test_padding_does_not_count(made):
    left, right = looked(*made(LEFT)), looked(*made(RIGHT))
    close(numbers(left), numbers(right), 1e-9)
    for probe, one in left.probed.items():
        if "label" in one.values:
            assert one.values["label"].tolist() == right[probe].values["label"].tolist()


@pytest.mark.parametrize("name", SUBJECTS)
def test_float32_agrees_with_float64(made, name):
    close(numbers(looked(*made(name))), numbers(looked(*made(name, torch.float32))), 1e-3)


def test_the_same_seed_gives_the_same_answer(made):
    one = looked(*made(FIRST), seed=5)
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    pd.testing.assert_frame_equal(one.frame(), looked(*made(FIRST), seed=5).frame())


@pytest.mark.parametrize("name", [FIRST, LEFT])
def test_the_subject_is_untouched(tokenizer, made, name):
    original, inputs = made(name)
    model = copy.deepcopy(original.model).train()
    next(iter(model.children())).eval()  # modes are kept one by one
    next(model.parameters()).requires_grad_(False)
    subject = SUBJECTS[name][1](model, tokenizer)

    def state():
        hooks = [len(held) for module in model.modules() for key, held in vars(module).items() if key.endswith("_hooks") and held is not None]  # fmt: skip
        return (
            [tensor.clone() for tensor in model.state_dict().values()], [torch.get_rng_state()],
            ([one.requires_grad for one in model.parameters()], [one.grad for one in model.parameters()],
             [one.training for one in model.modules()], hooks, random.getstate(), repr(np.random.get_state())),
        )  # fmt: skip

    before = state()
    looked(subject, inputs)
    weights, lots, rest = state()
    assert all(map(torch.equal, before[0], weights))
    assert torch.equal(before[1][0], lots[0])
    assert before[2] == rest


def test_options_that_are_not_there_are_refused(made):
    subject, inputs = made(FIRST)
    for probe in sorted(found()):
        with pytest.raises(errors.OptionError, match="zzzz"):
            regard.heads(subject, inputs, probes=[(probe, {"zzzz": 1})])


@pytest.mark.parametrize("probe", sorted(found()))
def test_what_a_file_declares(probe):
    one = found()[probe]
    assert one.function.__name__ == one.name == probe
    assert one.each in ("row", "head", "case")
    assert one.about.strip()
    assert "\n" not in one.about
    assert set(one.needs) <= {"weights", "gradients", "reruns", "projections", "states", "labels", "words", "mentions", "facts", "tokens"}  # fmt: skip
    assert one.function.__doc__
    bib = (Path(regard.__file__).parent / "references.bib").read_text("utf-8")
    assert one.cite in re.findall(r"^@\w+\{(.+),$", bib, re.MULTILINE)


def test_the_list_of_probes_says_what_they_declare():
    listed = regard.list_probes().set_index("name")
    assert sorted(listed.index) == sorted(found())
    for name, one in found().items():
        assert listed.loc[name, "about"] == one.about
        assert listed.loc[name, "paper"] == one.cite
