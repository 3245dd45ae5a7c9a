"""Causal tracing: against runs with hooks that do what the paper says, and where a fact is known to be looked up."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from recalling import fact, opinionated, probed, speaking
from torch import nn

import regard
from regard import errors
from regard.data import Dataset, Example
from regard.facts import answer_tokens, knows
from regard.models.toys import Layer
from regard.probes.causal_tracing import ROLES, roles_of

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import gpt2, llama

KINDS = ("state", "mlp", "attention")


def traced(subject, facts, **options):
    return probed("causal_tracing", subject, facts, **{"noises": 3} | options)


def effects(found, kind):
    """``(role, layer)``"""
    return found.tables[kind].pivot(index="role", columns="layer", values="effect").reindex(ROLES).to_numpy()


# --- against hooks --------------------------------------------------------------------------------------------------

# subjects of one and of three tokens; after them one word, or two, and the token that ends a text
SAID = [
    ("the red house", "so the red house is small"),
    ("paris", "and paris is in"),
    ("a good film", "a good film never"),
]


def believed(subject):
    """Facts that the model knows: whatever it says."""
    found = []
    for name, prompt in SAID:
        with torch.no_grad():
            output = subject.forward(subject.encode([prompt]))[0]
        one = fact(prompt, name, subject.tokenizer.decode([int(output.argmax())]))
        assert knows(subject, one, output)
        found.append(one)
    return found


class Hooked:
    """The definition, one run after the other: a copy of the model with hooks."""

    def __init__(self, model, layers, parts):
        self.model, self.blocks = model, layers
        self.at = {"state": lambda block: block, "mlp": lambda block: block.mlp, "attention": parts}

    def p(self, ids, answer, rows, noise, restore=(), clean=None, keep=None):
        """p(answer); ``restore``: (kind, layer, row) from what ``keep`` was given in a clean run."""
        hooks = []

        def add_noise(module, args, output):
            output = output.clone()
            output[0, rows] += noise
            return output

        def on_block(kind, layer):
            def hook(module, args, output):
                state = output[0] if isinstance(output, tuple) else output
                if keep is not None:
                    keep[kind, layer] = state.clone()
                for one, at, row in restore:
                    if (one, at) == (kind, layer):
                        state[0, row] = clean[kind, layer][0, row]

            return hook

        hooks.append(self.model.get_input_embeddings().register_forward_hook(add_noise))
        for kind, (layer, block) in product(KINDS, enumerate(self.blocks)):
            hooks.append(self.at[kind](block).register_forward_hook(on_block(kind, layer)))
        with torch.no_grad():
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -1]
        for hook in hooks:
            hook.remove()
        return float(logits.softmax(-1)[answer])


def by_definition(hooked, subject, facts, noises, window):
    tokens = {}
    for one in facts:
        (features,), (start, end) = subject.encode([one.input]).features, one.marks["facts"]["subject"]
        tokens[one.input] = [row for row, (a, b) in zip(features.rows, features.spans, strict=True) if start <= a < b <= end]  # fmt: skip
    table = hooked.model.get_input_embeddings().weight
    ids = {one.input: subject.encode([one.input]).inputs["input_ids"] for one in facts}
    sigma = torch.cat([table[ids[one.input][0, tokens[one.input]]].flatten() for one in facts]).std().item()
    found, totals = {kind: [] for kind in KINDS}, []
    for one in facts:
        text, rows, (answer, *_) = ids[one.input], tokens[one.input], answer_tokens(subject, one)
        lots = np.random.default_rng(0)
        noise = 3 * sigma * torch.from_numpy(lots.standard_normal((noises, len(rows), table.shape[1])))
        clean = {}
        before = hooked.p(text, answer, rows, 0.0, keep=clean)
        corrupted = np.mean([hooked.p(text, answer, rows, some) for some in noise])
        totals.append([before, corrupted, before - corrupted])
        last = text.shape[1] - 1
        roles = [rows[0], rows[1] if len(rows) == 3 else None, rows[-1], rows[-1] + 1,
                 rows[-1] + 2 if last == rows[-1] + 3 else None, last]  # fmt: skip
        assert last <= rows[-1] + 3
        depth = len(hooked.blocks)
        for kind in KINDS:
            table_of = np.full((len(ROLES), depth), np.nan)
            for (role, row), layer in product(enumerate(roles), range(depth)):
                around = [layer]
                if kind != "state":
                    around = [at for at in range(depth) if layer - window // 2 <= at < layer + (window + 1) // 2]
                if row is not None:
                    restore = [(kind, at, row) for at in around]
                    runs = [hooked.p(text, answer, rows, some, restore, clean) for some in noise]
                    table_of[role, layer] = np.mean(runs) - corrupted
            found[kind].append(table_of)
    return {kind: np.nanmean(some, 0) for kind, some in found.items()}, np.mean(totals, 0), sigma


@pytest.mark.parametrize("window", [1, 2, 3, 8])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_numbers_are_those_of_the_definition(build, window, tokenizer):
    model = opinionated(build, tokenizer)
    subject = regard.causal(model, tokenizer)
    facts = believed(subject)
    found = traced(subject, facts, window=window)
    if build is llama:
        hooked = Hooked(model, model.model.layers, lambda block: block.self_attn)
    else:
        hooked = Hooked(model, model.transformer.h, lambda block: block.attn)
    expected, totals, sigma = by_definition(hooked, subject, facts, 3, window)
    assert found.settings["sigma"] == pytest.approx(sigma, rel=1e-6)
    assert found.tables["total"]["p"].to_numpy() == pytest.approx(totals, abs=1e-9)
    for kind in KINDS:
        assert np.nanmax(np.abs(expected[kind])) > 0.01
        np.testing.assert_allclose(effects(found, kind), expected[kind], rtol=0, atol=1e-9)


# --- where a fact is looked up --------------------------------------------------------------------------------------

WORDS = [*"abcdefgh", "is", "in", "[PAD]", "[UNK]"]
CITIES = {"a": "e", "b": "f", "c": "g", "d": "h"}  # what is told of a name


class Writes(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x):
        return x @ self.weight


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Recalls(nn.Module):
    """Four layers. The MLP of layer 1 turns a name into what is told of it, beside the name; attention of layer 2 takes
    that from the row ``looks`` to all later rows, which predict it. All else writes what nobody reads.

    Only the embedding gets noise: the other slots of the stream, for positions, facts and predictions, are beside it.
    """

    def __init__(self, looks, told=CITIES):
        super().__init__()
        words, places = len(WORDS), 8
        eye = torch.eye(3 * words + places + 1, dtype=torch.float64)
        token, place, known, said, waste = eye.split([words, places, words, words, 1])
        self.embedding = nn.Embedding.from_pretrained(torch.eye(words, dtype=torch.float64))
        self.register_buffer("rest", place[:, words:])
        self.register_buffer("said", said)
        recall = torch.zeros(words, words, dtype=torch.float64)
        for name, city in told.items():
            recall[WORDS.index(name), WORDS.index(city)] = 1.0
        asks = torch.zeros(places, len(eye), dtype=torch.float64)
        asks[looks] = 1000 * place.sum(0)  # so steep that all other weights are 0
        counted = place.sum(0)[:, None] * waste  # what nobody reads is written, too: where nothing is, no state is

        def looked(what, where):
            return Layer(asks, place, what, where.T)

        self.blocks = nn.ModuleList([
            Block(looked(place[:1], waste), Writes(counted)),
            Block(looked(place[:1], waste), Writes(counted + token.T @ recall @ known)),
            Block(looked(known, said), Writes(counted)),
            Block(looked(place[:1], waste), Writes(counted)),
        ])  # fmt: skip

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        x = torch.cat([x, self.rest[: x.shape[1]].expand(len(x), -1, -1)], -1)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=5 * x @ self.said.T)


def wired(**options):
    return speaking(Recalls(**options), WORDS)


def names(told=CITIES):
    """The last word of the subject is the name; the words before it say nothing."""
    return [fact(f"e f {name} is in in", f"e f {name}", city) for name, city in told.items()]


@pytest.mark.parametrize("window", [1, 3])
def test_a_fact_is_recalled_where_it_is_looked_up(window):
    found = traced(wired(looks=2), names(), window=window)
    clean, corrupted, total = found.tables["total"]["p"]
    assert clean == pytest.approx(np.exp(5) / (np.exp(5) + len(WORDS) - 1), abs=1e-12)
    assert total == pytest.approx(clean - corrupted)
    assert total > 0.1
    expected = {kind: np.zeros((6, 4)) for kind in KINDS}
    subject, last = ROLES.index("last subject"), ROLES.index("last")
    expected["state"][subject, :2] = expected["state"][last, 2:] = total
    expected["mlp"][subject, [1] if window == 1 else [0, 1, 2]] = total  # windows with layer 1 in them
    expected["attention"][last, [2] if window == 1 else [1, 2, 3]] = total
    for kind in KINDS:
        np.testing.assert_allclose(effects(found, kind), expected[kind], rtol=0, atol=1e-12)
    assert "knows 4 of 4 facts" in found.sentence
    assert "MLP outputs" in found.sentence
    assert "only 4 facts" in found.warnings[0]
    assert found.settings["window"] == window
    assert found.tables["facts"]["total effect"].mean() == pytest.approx(total)


def test_a_model_that_ignores_the_subject_has_no_effects():
    found = traced(wired(looks=3, told={"is": "g"}), names(dict.fromkeys("abcd", "g")))
    assert found.tables["total"]["p"].to_numpy()[[0, 2]] == pytest.approx([0.931, 0.0], abs=1e-3)
    assert found.tables["total"]["p"][2] == pytest.approx(0.0, abs=1e-12)
    for kind in KINDS:
        assert np.abs(effects(found, kind)).max() < 1e-12


def test_only_facts_that_the_model_knows_count():
    false = fact("e f a is in in", "e f a", "f")
    found = traced(wired(looks=2), [false, *names()], kinds="state", every=3)
    alone = traced(wired(looks=2), names(), kinds="state")
    assert found.settings["known"] == 4
    assert found.settings["facts"] == 5
    assert list(found.tables) == ["state", "total", "facts"]
    assert found.tables["state"]["layer"].unique().tolist() == [0, 3]
    assert found.tables["total"]["p"][0] == pytest.approx(alone.tables["total"]["p"][0])
    with pytest.raises(errors.NotServed, match="knows none of the 1 facts"):
        traced(wired(looks=2), [false])


def test_the_roles_of_tokens():
    lots = np.random.default_rng(0)
    assert roles_of([1, 2], 3, lots) == [1, None, 2, None, None, 2]  # the subject comes last
    assert roles_of([1], 3, lots) == [1, None, 1, 2, None, 2]  # one token has two roles
    drawn = [roles_of([1, 2, 3, 4], 9, lots) for _ in range(50)]
    assert {one[1] for one in drawn} == {2, 3}
    assert {one[4] for one in drawn} == {6, 7}
    assert {(one[0], one[2], one[3], one[5]) for one in drawn} == {(1, 4, 5, 8)}


def test_a_subject_that_ends_the_prompt_has_nothing_after_it():
    found = traced(wired(looks=2), [fact(f"e f {name}", f"e f {name}", city) for name, city in CITIES.items()])
    assert set(found.tables["state"]["role"]) == {"first subject", "middle subject", "last subject", "last"}
    assert found.tables["state"].query("role == 'last'")["effect"].to_numpy() == pytest.approx(
        [found.tables["total"]["p"][2]] * 4
    )


def test_pictures_and_files(tmp_path):
    table = regard.heads(wired(looks=2), Dataset.of(names()), probes=["causal_tracing"], draws=5)
    for chart in table["causal_tracing"].charts:
        assert "layers around" in table["causal_tracing"].charts[chart]["caption"] or "state" in chart
        table.plot("causal_tracing", chart).save(tmp_path / "effect.svg")
    many = pd.DataFrame(list(product(ROLES, range(15))), columns=["role", "layer"]).assign(effect=0.1)
    drawn = regard.draw.lines(many.assign(effect_low=0.0, effect_high=0.2), x="layer", y="effect", by="role", title="", caption="")  # fmt: skip
    assert all(role in drawn.svg() for role in ROLES)  # the legend, of as many curves as there are
    table.save(tmp_path / "heads.json")
    again = regard.load_heads(tmp_path / "heads.json")["causal_tracing"]
    assert again.tables["state"]["effect"].tolist() == table["causal_tracing"].tables["state"]["effect"].tolist()


# --- what cannot be served ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "match"), [
    ({"noises": 0}, "noises=0"), ({"every": 0}, "every=0"), ({"window": 0}, "window=0"),
    ({"kinds": ()}, "kinds=.. is empty"), ({"kinds": "heads"}, "kinds='heads'"),
])  # fmt: skip
def test_bad_options(options, match):
    with pytest.raises(errors.OptionError, match=match):
        traced(wired(looks=2), names(), **options)


def test_models_that_say_nothing(classifier, tokenizer):
    with pytest.raises(errors.NotServed, match="decoder"):
        traced(regard.text(classifier, tokenizer), names())
    speaks = regard.causal(llama(tokenizer), tokenizer, verbalizer={"yes": "good", "no": "bad"})
    with pytest.raises(errors.NotServed, match="verbalizer"):
        traced(speaks, names())
    with pytest.raises(errors.NotServed, match="facts: pass a .json file"):
        traced(wired(looks=2), [Example("e f a is in")])


def test_files_of_facts(tmp_path):
    file = tmp_path / "facts.json"
    entries = [{"prompt": "e f {} is in in", "subject": name, "answer": city} for name, city in CITIES.items()]
    file.write_text(json.dumps(entries))
    found = regard.heads(wired(looks=2), file, probes=["causal_tracing"], draws=5)["causal_tracing"]
    assert found.tables["state"]["effect"].max() == pytest.approx(found.tables["total"]["p"][2])
    file.write_text("[{")
    with pytest.raises(errors.InputError, match="does not parse as JSON"):
        regard.heads(wired(looks=2), file, probes=["causal_tracing"])
    file.write_text(json.dumps([{"prompt": "e f a is in", "subject": "zz", "answer": "e"}]))
    with pytest.raises(errors.InputError, match="'zz' does not occur"):
        regard.heads(wired(looks=2), file, probes=["causal_tracing"])


def test_a_fact_is_known_if_the_whole_answer_is_given():
    """After "in" comes the fact, and after that again: what row 2 was looked at for is said over and over."""
    subject = wired(looks=2)
    (one, *_) = names()
    with torch.no_grad():
        output = subject.forward(subject.encode([one.input]))[0]
    for answer, known in {"e": True, "e e": True, "e f": False, "f e": False}.items():
        assert knows(subject, fact(one.input, "e f a", answer), output) is known


def test_the_answer_goes_on_after_the_prompt(smollm):
    for prompt in ("The capital of France is", "The capital of France is "):
        one = fact(prompt, "France", "Paris")
        expected = " Paris" if prompt[-1] == "s" else "Paris"
        assert smollm.tokenizer.decode(answer_tokens(smollm, one)) == expected
    with pytest.raises(errors.InputError, match="no token of the answer"):
        answer_tokens(wired(looks=2), fact("e f a is ", "a", " "))
