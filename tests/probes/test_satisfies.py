"""The SAT probe: against its definition, where attention decides what is right, and where it has no part in it."""

from __future__ import annotations

import copy
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recalling import ANSWERS, fact, opinionated, probed, speaking
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torch import nn

import regard
from regard import errors
from regard.data import Dataset, Example
from regard.models.toys import Layer
from regard.probes.satisfies import auroc

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import gpt2, llama

NAMES = [f"n{number}" for number in range(150)]
STRONG = NAMES[::3]  # of which the model knows what they are
WORDS = [*NAMES, "say", "is", "yes", "no", "[PAD]", "[UNK]"]


def satisfies(subject, facts, **options):
    return probed("satisfies", subject, facts, **options)


class Answers(nn.Module):
    """One layer: the last row looks at the word with the highest score, and says what that word stands for."""

    def __init__(self, scores, says):
        super().__init__()
        size = len(WORDS)
        token, said = torch.eye(2 * size, dtype=torch.float64).split(size)
        self.embedding = nn.Embedding.from_pretrained(torch.eye(size, 2 * size, dtype=torch.float64))
        by_word = torch.tensor([scores.get(word, 0.0) for word in WORDS], dtype=torch.float64)
        handed = torch.zeros(size, size, dtype=torch.float64)
        for word, (answer, logit) in says.items():
            handed[WORDS.index(word), WORDS.index(answer)] = logit
        self.layer = Layer(1000 * token.sum(0)[None], by_word[None] @ token, handed.T @ token, said.T)
        self.register_buffer("said", said)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        x = x + self.layer(x)
        return SimpleNamespace(logits=x @ self.said.T)


FACTS = [fact(f"say {name} is", name, "yes") for name in NAMES]


def attentive():
    """Looks at names that it knows, and otherwise at "say", which says no; as sure of the one as of the other."""
    scores = {"say": 0.5} | dict.fromkeys(STRONG, 1.0)
    return speaking(Answers(scores, {"say": ("no", 5.0)} | dict.fromkeys(NAMES, ("yes", 5.0))), WORDS)


def inattentive():
    """Looks at all names alike; of those that it does not know it says no, and is less sure."""
    says = dict.fromkeys(NAMES, ("no", 3.0)) | dict.fromkeys(STRONG, ("yes", 5.0))
    return speaking(Answers(dict.fromkeys(NAMES, 1.0), says), WORDS)


def test_attention_that_decides_tells_right_from_wrong():
    found = satisfies(attentive(), FACTS)
    table = found.tables["auroc"].set_index("by")
    assert table["auroc"].to_dict() == {"attention": 1.0, "confidence": 0.5, "both": 1.0, "nothing": 0.5}
    assert table.loc["attention", "above confidence_low"] == 0.5
    assert found.values["value"][0] > 0
    assert found.values["value"][1] == 0  # looks at all words alike
    assert found.values["label"].tolist() == ["right", ""]
    assert found.settings == {"weigh": "weights", "least": 20, "right": 50, "wrong": 100, "learned on": 75, "held out": 75}  # fmt: skip
    assert "answers 50 of 150 facts rightly" in found.sentence
    assert "of 1 of 2 heads" in found.sentence
    assert (found.tables["facts"]["answer"] == "right").sum() == 25  # both halves have as many
    assert set(found.tables["facts"].query("answer == 'right'")["fact"]) <= {str(one) for one in range(0, 150, 3)}


def test_attention_without_a_part_in_it_tells_nothing():
    found = satisfies(inattentive(), FACTS)
    table = found.tables["auroc"].set_index("by")
    assert table["auroc"].to_dict() == {"attention": 0.5, "confidence": 1.0, "both": 1.0, "nothing": 0.5}
    assert table.loc["attention", "above confidence_high"] == -0.5
    assert found.values["value"].tolist() == [0.0, 0.0]
    assert found.values["label"].tolist() == ["", ""]
    assert "No head was kept" in found.warnings[0]


def test_norms_are_of_what_is_handed_on():
    """What is handed on is larger where the answer is right, whatever is looked at."""
    found = satisfies(inattentive(), FACTS, weigh="norms")
    assert found.tables["auroc"]["auroc"][0] == 1.0
    assert found.values["label"][0] == "right"


def test_more_attention_may_speak_for_wrong_answers():
    facts = [fact(f"say {name} is", name, "no") for name in NAMES]
    found = satisfies(attentive(), facts)
    assert found.values["label"].tolist() == ["wrong", ""]
    assert found.tables["auroc"]["auroc"][0] == 1.0


# --- against the definition -----------------------------------------------------------------------------------------

SUBJECTS = [" ".join(words) for words in product(["red", "old", "the best"], ["house", "film", "book", "dog", "sea"])]
PROMPTS = [" ".join(words) for words in product(["so", "and", "now"], ["{}"], ["is", "was in", "never"], ["a", "it"])]
HEADS, SIZE = 4, 8


def literal(twin, subject, prompt, name, weigh):
    """``(head,)`` of all layers: the most that the last row has on a token of the subject."""
    batch, start = subject.encode([prompt]), prompt.index(name)
    (features,), ids = batch.features, batch.inputs["input_ids"]
    spans = zip(features.rows, features.spans, strict=True)
    keys = [row for row, (a, b) in spans if start <= a < b <= start + len(name)]
    with torch.no_grad():
        run = twin(input_ids=ids, output_attentions=True, output_hidden_states=True)
        found = []
        for layer, head in product(range(3), range(HEADS)):
            state, part = run.hidden_states[layer], slice(head * SIZE, (head + 1) * SIZE)
            if hasattr(twin, "transformer"):
                block = twin.transformer.h[layer]
                values = block.attn.c_attn(block.ln_1(state))[0].chunk(3, -1)[2][:, part]
                out = block.attn.c_proj.weight.T[:, part]
            else:  # two heads share their values
                block, shared = twin.model.layers[layer], slice(head // 2 * SIZE, (head // 2 + 1) * SIZE)
                values = block.self_attn.v_proj(block.input_layernorm(state))[0][:, shared]
                out = block.self_attn.o_proj.weight[:, part]
            sizes = [float((out @ values[key]).norm()) if weigh == "norms" else 1.0 for key in keys]
            weights = run.attentions[layer][0, head, -1]
            found.append(max(float(weights[key]) * size for key, size in zip(keys, sizes, strict=True)))
    return found, run.logits[0, -1].softmax(-1)


def pairs(scores, right):
    """AUROC, one pair after the other."""
    won = [(a > b) + (a == b) / 2 for a in scores[right] for b in scores[~right]]
    return sum(won) / len(won)


def fitted(looks, right, learn):
    """What minimises ‖w‖₁ + |b| + C Σ log loss on standardised features, and the log-odds of all."""
    z = (looks - looks[learn].mean(0)) / looks[learn].std(0)
    model = LogisticRegression(l1_ratio=1, solver="liblinear", C=0.05, max_iter=1000, random_state=0)
    model.fit(z[learn], right[learn])
    w, b = model.coef_[0], model.intercept_[0]
    sign = np.where(right[learn], 1, -1)
    slope = 0.05 * z[learn].T @ (sign / (1 + np.exp(sign * (z[learn] @ w + b))))  # −∂ log loss / ∂w
    assert np.abs(slope).max() <= 1 + 1e-2  # optimal: ±1 where w is not 0, else between
    assert slope[w != 0] == pytest.approx(np.sign(w[w != 0]), abs=1e-2)
    return z @ w + b, w


@pytest.mark.parametrize("weigh", ["weights", "norms"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_numbers_are_those_of_the_definition(build, weigh, tokenizer):
    model = opinionated(build, tokenizer)
    subject, twin = regard.causal(model, tokenizer), copy.deepcopy(model)
    twin.set_attn_implementation("written out" if build is llama else "eager")
    asked = [(prompt.format(name), name) for name, prompt in product(SUBJECTS, PROMPTS)]
    seen = [literal(twin, subject, *one, weigh) for one in asked]
    looks, p = np.array([one for one, _ in seen]), torch.stack([one for _, one in seen]).numpy()
    # right where one head looks at the subject more than usual, but for some
    right = (looks[:, 6] > np.median(looks[:, 6])) ^ (np.random.default_rng(0).random(len(looks)) < 0.2)
    facts = []
    for (prompt, name), one, true in zip(asked, p, right, strict=True):
        said = tokenizer.decode([int(one.argmax())])
        facts.append(fact(prompt, name, said if true else ANSWERS[ANSWERS.index(said) - 1]))
    found = satisfies(subject, facts, weigh=weigh)

    learn, test = (np.sort(half) for half in train_test_split(np.arange(len(right)), test_size=0.5, stratify=right, random_state=0))  # fmt: skip
    by_looks, w = fitted(looks, right, learn)
    by_both, _ = fitted(np.column_stack([looks, p.max(1)]), right, learn)
    assert np.count_nonzero(w) > 0
    assert found.values["value"].to_numpy() == pytest.approx(w, abs=1e-6)
    assert found.tables["facts"]["attention"].to_numpy() == pytest.approx(by_looks[test], abs=1e-6)
    assert found.tables["facts"]["confidence"].to_numpy() == pytest.approx(p.max(1)[test], abs=1e-9)
    assert ((found.tables["facts"]["answer"] == "right") == right[test]).all()
    expected = [pairs(one[test], right[test]) for one in (by_looks, p.max(1), by_both)]
    table = found.tables["auroc"]
    assert table["auroc"].to_numpy() == pytest.approx([*expected, 0.5], abs=1e-9)
    assert table["above confidence"].to_numpy() == pytest.approx(table["auroc"] - expected[1], abs=1e-12)
    assert table["auroc"][0] > 0.7
    assert (table["auroc_low"] <= table["auroc"]).all()
    assert (table["auroc"] <= table["auroc_high"]).all()


def test_auroc_of_copies_is_that_of_a_longer_list():
    lots = np.random.default_rng(0)
    scores, right = lots.integers(0, 6, 30).astype(float), lots.random(30) < 0.4
    times = lots.integers(0, 4, (30, 3)).astype(float)
    for draw, found in enumerate(auroc(scores, right, times)):
        longer = np.repeat(np.arange(30), times[:, draw].astype(int))
        assert found == pytest.approx(pairs(scores[longer], right[longer]), abs=1e-12)


def test_the_answer_does_not_depend_on_batches_or_padding(tokenizer):
    model, facts = opinionated(llama, tokenizer), []
    subject = regard.causal(model, tokenizer)
    for name, prompt in product(SUBJECTS, PROMPTS):  # it knows those that end in "a", and looks elsewhere there
        said = prompt.format(name)
        with torch.no_grad():
            says = tokenizer.decode([int(subject.forward(subject.encode([said])).argmax())])
        facts.append(fact(said, name, says if said.endswith(" a") else "zebra"))
    done = []
    for side, size in (("left", 1), ("left", 16), ("right", 16)):
        subject = regard.causal(model, tokenizer, padding_side=side)
        found = regard.heads(subject, Dataset.of(facts), probes=["satisfies"], batch_size=size, examples=None, draws=5)
        done.append(found["satisfies"])
    assert done[0].values["value"].any()
    for one in done[1:]:
        assert one.tables["facts"]["attention"].to_numpy() == pytest.approx(done[0].tables["facts"]["attention"], abs=1e-6)  # fmt: skip
        assert one.values["value"].to_numpy() == pytest.approx(done[0].values["value"], abs=1e-6)


# --- what cannot be served ------------------------------------------------------------------------------------------


def test_too_few_of_one_kind_are_refused():
    with pytest.raises(errors.NotServed, match="answers 50 of 150 facts rightly and 100 wrongly; it takes 51 of both"):
        satisfies(attentive(), FACTS, least=51)
    always = [one for one in FACTS if one.input.split()[1] in STRONG]
    with pytest.raises(errors.NotServed, match="answers 50 of 50 facts rightly and 0 wrongly; it takes 2 of both"):
        satisfies(attentive(), always, least=1)
    for name, value in {"least": 0, "weigh": "size"}.items():
        with pytest.raises(errors.OptionError, match=f"{name}={value!r}"):
            satisfies(attentive(), FACTS, **{name: value})


def test_models_that_say_nothing_and_data_without_facts(classifier, tokenizer):
    with pytest.raises(errors.NotServed, match="decoder"):
        satisfies(regard.text(classifier, tokenizer), FACTS)
    with pytest.raises(errors.NotServed, match="facts: pass a .json file"):
        satisfies(attentive(), [Example("say n1 is")])
    cut = Example("say n1 is", id="7", marks={"facts": {"subject": (9, 9), "answer": "yes"}})
    with pytest.raises(errors.InputError, match="fact 7: no token begins in the subject"):
        satisfies(attentive(), [cut])


def test_pictures_and_files(tmp_path):
    table = regard.heads(attentive(), Dataset.of(FACTS), probes=["satisfies"], draws=5)
    table.plot("satisfies").save(tmp_path / "heads.svg")
    table.plot("satisfies", "right or wrong").save(tmp_path / "facts.svg")
    assert table.roles()["role"].tolist() == ["right"]
    table.save(tmp_path / "heads.json")
    again = regard.load_heads(tmp_path / "heads.json")["satisfies"]
    assert again.tables["auroc"]["auroc"].tolist() == table["satisfies"].tables["auroc"]["auroc"].tolist()
