"""Adversarial attention: where there is none, where there is any, and the authors' search, written out."""

from __future__ import annotations

import math
import random
import zlib

import numpy as np
import polar
import pytest
import torch
import transformers as hf

import regard
from regard import edits
from regard.attention import Rerun
from regard.errors import InputError, NoGradient, OptionError
from regard.models.toys import POLARITY, Pool
from regard.trials.adversarial import STAND_IN

SEARCH = {"steps": 200, "learning_rate": 0.025, "batch_size": 64}  # as long a way as the authors' 500 steps of 0.01
CLEAR = [word for word, value in POLARITY.items() if abs(value) >= 0.6]
TEXTS = ["the film is superb and so the plot", "an unbelievably dull film", "so so"]


def single(count=40):
    """One word that decides, among three to eight that say next to nothing."""
    draws = random.Random(0)
    texts = []
    for _ in range(count):
        words = [draws.choice(CLEAR), *draws.choices(polar.PLAIN, k=draws.randint(3, 8))]
        texts.append(" ".join(draws.sample(words, len(words))))
    return texts


def constant():
    """Every value is (1, 1), so any attention gives the same output; but without what it hands on it is another."""
    polarity = torch.tensor(list(POLARITY.values()))
    return Pool(4 * polarity.abs(), torch.ones(len(polarity), 2), polarity, torch.tensor([1.0, -0.4]))


# --- what it must say ------------------------------------------------------------------------------------------------


def test_it_supports_a_model_whose_attention_is_the_decision():
    found = regard.trial(polar.toy("decisive"), single(), "adversarial", **SEARCH)
    assert found.outcome == "supported"
    assert found.interval.high < STAND_IN
    assert found.reference["attention removed"].low > 0.05
    # what leaves the word moves the output by at least 0.17 of it, so of ε = 0.05 no more than 0.3 can leave
    for one in found.shown:
        word = int(np.argmax(one["maps"]["observed"]))
        assert one["maps"]["observed"][word] - one["maps"]["adversarial"][word] < 0.3
    assert (found.values["moved"] <= 0.05).all()
    assert found.values["found"].mean() > 4


def test_it_does_not_support_one_that_gives_the_same_whatever_it_looks_at():
    found = regard.trial(regard.pooled(constant()), single(), "adversarial", **SEARCH)
    assert found.outcome == "not supported"
    assert found.reference["attention removed"].low > 0.05
    assert found.statistic > 0.5
    assert (found.values["found"] == 5).all()
    assert found.values["moved"].max() < 1e-6


def test_words_that_can_stand_for_one_another_are_not_exclusive():
    texts = [f"{text} {'superb ' * 5}" for text in single()]
    assert regard.trial(polar.toy("decisive"), texts, "adversarial", **SEARCH).outcome == "not supported"


def test_a_site_that_is_not_used_says_nothing():
    found = regard.trial(polar.toy("irrelevant"), single(), "adversarial", steps=20)
    assert found.outcome == "inconclusive"
    assert found.needed is None
    assert "site is unused" in found.sentence
    assert found.statistic > 0.3
    assert found.reference["attention removed"].high < 1e-6


def test_the_level_between_seeds_takes_the_place_of_the_stand_in():
    subject, texts = polar.toy("decisive"), single()
    strict = regard.trial(subject, texts, "adversarial", **SEARCH | {"steps": 20}, between_seeds=0.001)
    assert strict.outcome == "not supported"
    assert strict.reference["very different"].value == 0.001
    loose = regard.trial(subject, texts, "adversarial", **SEARCH, between_seeds=0.6)
    assert loose.outcome == "supported"


def test_a_search_that_has_not_done_its_work_supports_nothing():
    short = regard.trial(polar.toy("decisive"), single(), "adversarial", **SEARCH | {"steps": 1}, between_seeds=0.6)
    assert (short.values["found"] == 0).mean() > 0.05
    assert short.interval.high < 0.6
    assert short.supported is None
    assert short.needed is None
    assert any("the search found none" in line for line in short.warnings)


# --- the authors' search, one example at a time ----------------------------------------------------------------------


def divergence(p, q):
    """As they write it: 1e-10 inside logarithms."""
    m = (p + q) / 2
    return 0.5 * sum((x * ((x + 1e-10).log() - (m + 1e-10).log())).sum(-1) for x in (p, q))


def literal(output, observed, features, start, *, steps, lr, epsilon=0.05):
    """Search, and choose.

    output: weights (head, key) of the readout's row to probabilities; observed: its weights (head, key); features: keys
    that are not special; start: logits (adversary, head or 1, feature).
    """
    logits = start.clone().requires_grad_()
    adam = torch.optim.Adam([logits], lr=lr, amsgrad=True)
    before = output(observed).detach()
    mass = observed[:, features].sum(-1, keepdim=True)  # head 1
    alpha = observed[:, features].mean(0) / observed[:, features].mean(0).sum()

    def adversaries():
        made = []
        for one in logits:
            weights = observed.clone()
            weights[:, features] = mass * one.softmax(-1)
            made.append(weights)
        maps = [one[:, features].mean(0) / one[:, features].mean(0).sum() for one in made]
        return made, maps, [0.5 * (output(one) - before).abs().sum() for one in made]

    for _ in range(steps):
        _, maps, moved = adversaries()
        loss = sum(500 * (far - 0.01).relu() - divergence(one, alpha) for one, far in zip(maps, moved, strict=True))
        loss = loss - torch.stack([divergence(one, other) for one in maps for other in maps]).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    made, maps, moved = adversaries()
    exact = [float(regard.measures.jsd(one.detach(), alpha)) for one in maps]
    kept = [(jsd, place) for place, (jsd, far) in enumerate(zip(exact, moved, strict=True)) if far <= epsilon]
    if not kept:
        return 0.0, 0.0, 0.0, alpha, 0
    jsd, place = max(kept)
    each = [regard.measures.jsd(*(x[head, features].detach() / x[head, features].detach().sum() for x in (made[place], observed)))
            for head in range(len(observed))]  # fmt: skip
    return jsd, float(np.mean(each)), float(moved[place].detach()), maps[place].detach(), len(kept)


def drawn(name, k, heads, features, seed=0, site=0):
    lots = np.random.default_rng([seed, zlib.crc32(name.encode()), site])
    return torch.from_numpy(3.0 * lots.standard_normal((k, heads, features)))


def assert_found(row, shown, expected, groups):
    jsd, per_head, moved, adversarial, count = expected
    assert row["epsilon_max_jsd"] == pytest.approx(jsd, abs=1e-7)
    assert row["per_head_jsd"] == pytest.approx(per_head, abs=1e-7)
    assert row["moved"] == pytest.approx(moved, abs=1e-7)
    assert row["found"] == count
    on_words = [float(sum(adversarial[place] for place in group)) for group in groups]
    np.testing.assert_allclose(shown[row["example"]]["maps"]["adversarial"], on_words, atol=1e-7)


def test_the_search_on_a_pool_step_by_step():
    model = regard.models.toys.decisive().double()
    texts = [
        "the film good so",
        "awful plot and so the superb",
        "so nice",
        "dull film moving the",
        "the slow good bad plot",
    ]
    found = regard.trial(regard.pooled(model), texts, "adversarial", k=4, steps=25, learning_rate=0.1)
    shown = {one["example"]: one for one in found.shown}
    assert found.values["epsilon_max_jsd"].max() > 0.05
    for (_, row), text in zip(found.values.iterrows(), texts, strict=True):
        ids = torch.tensor([model.vocabulary[word] for word in text.split()])
        values = model.values(ids)

        def output(weights, values=values):
            p = (weights @ values @ model.readout.weight.T).sigmoid()[0, 0]
            return torch.stack([1 - p, p])

        observed = model.scores(ids).squeeze(-1).softmax(-1)[None]
        start = drawn(row["example"], 4, 1, len(ids))
        expected = literal(output, observed, list(range(len(ids))), start, steps=25, lr=0.1)
        assert_found(row, shown, expected, [[place] for place in range(len(ids))])


@pytest.mark.parametrize("heads", ["free", "shared"])
def test_the_search_on_the_last_layer_of_a_bert(tokenizer, heads):
    """Heads, special tokens that keep their weight, words of several pieces, padding."""
    model = polar.bert(tokenizer)
    texts = [one.input for one in polar.examples(5, more=polar.LONG)]
    options = {"k": 3, "steps": 12, "learning_rate": 0.3, "heads": heads}
    found = regard.trial(regard.text(model, tokenizer), texts, "adversarial", **options)
    shown = {one["example"]: one for one in found.shown}
    assert found.values["epsilon_max_jsd"].max() > 0.05
    layer = model.bert.encoder.layer[-1]
    for (_, row), text in zip(found.values.iterrows(), texts, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states[-2]
            inner = layer.attention.self
            q, k, v = (
                part(hidden)[0].unflatten(-1, (4, 8)).transpose(0, 1) for part in (inner.query, inner.key, inner.value)
            )
            weights = (q @ k.mT / math.sqrt(8)).softmax(-1)  # head query key
        for parameter in model.parameters():
            parameter.requires_grad_(False)

        def output(row_of_cls, hidden=hidden, weights=weights, v=v):
            every = torch.cat([row_of_cls[:, None], weights[:, 1:]], 1)
            mixed = (every @ v).transpose(0, 1).flatten(1)[None]
            after = layer.attention.output(mixed, hidden)
            states = layer.output(layer.intermediate(after), after)
            return model.classifier(model.bert.pooler(states))[0].softmax(-1)

        features = list(range(1, ids.shape[1] - 1))
        start = drawn(row["example"], 3, 4 if heads == "free" else 1, len(features), site=1)
        expected = literal(output, weights[:, 0], features, start, steps=12, lr=0.3)
        groups = [[place - 1 for place in pieces] for pieces in polar.Literal(model, tokenizer, text).pieces]
        assert_found(row, shown, expected, groups)
        assert row["share"] == pytest.approx(float(weights[:, 0, features].sum(-1).mean()))


# --- any subject -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", ["last", "all"])
@pytest.mark.parametrize("kind", polar.KINDS)
def test_every_kind_of_subject(tokenizer, kind, sites):
    subject, data = polar.of_kind(kind, tokenizer, 6)
    options = {"k": 3, "steps": 4, "learning_rate": 0.5, "sites": sites}
    found, halves = (regard.trial(subject, data, "adversarial", batch_size=size, **options) for size in (6, 4))
    values = found.values
    assert len(values) == 6
    assert not found.failed
    for column in ("epsilon_max_jsd", "per_head_jsd"):
        assert values[column].between(0, math.log(2)).all()
    assert (values["moved"] <= 0.05).all()
    assert values["share"].between(1e-6, 1 + 1e-6).all()
    for column in ("epsilon_max_jsd", "per_head_jsd", "moved", "found", "removed", "share"):
        np.testing.assert_allclose(halves.values[column], values[column], atol=1e-5)
    for one in found.shown:
        assert sum(one["maps"]["adversarial"]) == pytest.approx(1)
        assert len(one["maps"]["observed"]) == len(one["words"])
    rows = {edit["kind"]: edit["rows"] for edit in found.settings["edited"]}
    assert rows.pop("encoder", "all") == "all", "none of its rows is read"
    assert set(rows.values()) == {"readout"}
    several = {"BERT": 2, "decoder": 2, "encoder–decoder": 6, "table": 2}
    assert len(found.settings["edited"]) == (several.get(kind, 1) if sites == "all" else 1)


def test_more_steps_find_adversaries_that_are_farther(tokenizer):
    subject, data = polar.of_kind("BERT", tokenizer)
    few, many = (regard.trial(subject, data, "adversarial", steps=steps, learning_rate=0.2) for steps in (1, 30))
    assert many.statistic > few.statistic
    assert many.values["found"].sum() > few.values["found"].sum()


def test_seeds_and_names_fix_what_is_drawn():
    subject, texts = polar.toy("decisive"), single(12)
    options = {"k": 2, "steps": 5}
    one, same, other = (
        regard.trial(subject, texts, "adversarial", seed=seed, examples=None, **options) for seed in (1, 1, 2)
    )
    assert one.to_dict() == same.to_dict()
    assert not np.allclose(one.values["epsilon_max_jsd"], other.values["epsilon_max_jsd"])


def test_one_adversary_has_no_others_to_keep_away_from(tokenizer):
    subject, data = polar.of_kind("BERT", tokenizer)
    found = regard.trial(subject, data, "adversarial", k=1, steps=5)
    assert found.values["found"].isin([0, 1]).all()


def test_with_a_single_word_there_is_no_other_attention():
    texts = [*single(8), "superb", "awful"]
    found = regard.trial(polar.toy("decisive"), texts, "adversarial", steps=3)
    assert found.values["epsilon_max_jsd"].isna().sum() == 2
    assert found.interval.undefined == 2
    assert any("2 examples leave the statistic undefined" in line for line in found.warnings)


def test_what_is_kept_for_the_report(tmp_path):
    found = regard.trial(polar.toy("decisive"), single(), "adversarial", steps=20)
    assert len(found.shown) == 5
    farthest = found.values.set_index("example")["epsilon_max_jsd"].nlargest(5)
    assert [one["example"] for one in found.shown] == [*farthest.index]
    for one in found.shown:
        assert f"JSD {farthest[one['example']]:.3f}" in one["caption"]
        assert [*one["maps"]] == ["observed", "adversarial"]
    page = found.to_html(tmp_path / "finding.html").read_text()
    assert "adversarial" in page
    assert found.plot("the farthest that keeps the output").values.size


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, "k=0"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"epsilon": 1.0}, "epsilon=1.0"),
        ({"epsilon": 0.005}, "epsilon_search=0.01 must be .* at most epsilon=0.005"),
        ({"epsilon": 1e-8, "epsilon_search": 0.0}, "epsilon=1e-08 is below what this model's numbers resolve"),
        ({"epsilon_search": -0.1}, "epsilon_search=-0.1"),
        ({"penalty": 0}, "penalty=0"),
        ({"learning_rate": math.inf}, "learning_rate=inf"),
        ({"spread": math.nan}, "spread=nan"),
        ({"between_seeds": 0.7}, "between_seeds=0.7"),
        ({"heads": "all"}, "heads='all'"),
    ],
)
def test_options_out_of_range_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        regard.trial(polar.toy("decisive"), single(), "adversarial", **options)


def test_a_site_that_is_not_there_is_named():
    with pytest.raises(InputError, match="sites=3"):
        regard.trial(polar.toy("decisive"), single(), "adversarial", sites=[3], steps=1)


def test_a_model_that_cuts_the_graph_is_refused():
    """Without gradients nothing would be found, and that would look exclusive."""

    class Cut(Pool):
        def forward(self, **inputs):
            return super().forward(**inputs).detach() * torch.nn.Parameter(torch.ones(()))

    polarity = torch.tensor(list(POLARITY.values()))
    cut = Cut(6 * polarity.abs(), polarity[:, None], 0 * polarity, torch.tensor([1.25]))
    with pytest.raises(NoGradient, match="does not depend on attention"):
        regard.trial(regard.pooled(cut), single(), "adversarial", steps=1)


# --- gradients by edits alone ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_layers(tokenizer):
    config = hf.BertConfig(vocab_size=len(tokenizer), **polar.SMALL | {"num_hidden_layers": 3})
    return regard.text(polar.seeded(lambda: hf.BertForSequenceClassification(config)), tokenizer)


def searched(subject, sites, gradients, variants):
    """Outputs and their gradients by the logits of the edits, of two rounds on one `Rerun`."""
    rerun = Rerun(subject, TEXTS, gradients=gradients)
    shape = () if variants is None else (variants,)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        logits = [
            torch.randn(*shape, *rerun.spots[site].shape[:2], 1, rerun.spots[site].shape[3]).double() for site in sites
        ]
        for one in logits:
            one.requires_grad_()
        weights = [one.softmax(-1) for one in logits]
        made = [
            edits.replace(one, sites=site, allow_unnormalised=True) for site, one in zip(sites, weights, strict=True)
        ]
        output = rerun(made, variants=variants)
        found += [output.detach(), *torch.autograd.grad(output.sin().sum(), logits)]
    return found


@pytest.mark.parametrize("variants", [None, 1, 2, 5])
@pytest.mark.parametrize("sites", [[0], [1], [2], [0, 1, 2]])
def test_gradients_by_edits_are_those_of_the_whole_graph(three_layers, sites, variants):
    expected = searched(three_layers, sites, True, variants)
    found = searched(three_layers, sites, "edits", variants)
    assert all(float(one.abs().max()) > 1e-6 for one in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("variants", [1, 5])
def test_what_lies_upstream_is_run_once_and_has_no_graph(three_layers, monkeypatch, variants):
    first, last = (three_layers.model.bert.encoder.layer[place] for place in (0, 2))
    ran = {"first": 0, "last": 0}
    for name, layer in (("first", first), ("last", last)):
        forward = layer.forward

        def counted(*args, name=name, forward=forward, **options):
            ran[name] += 1
            return forward(*args, **options)

        monkeypatch.setattr(layer, "forward", counted)
    rerun = Rerun(three_layers, TEXTS, gradients="edits")
    logits = torch.zeros(variants, *rerun.spots[2].shape[:2], 1, rerun.spots[2].shape[3]).double().requires_grad_()

    def step():
        made = edits.replace(logits.softmax(-1), sites=2, allow_unnormalised=True)
        output = rerun(made, variants=variants)
        upstream, by_edits = torch.autograd.grad(
            output.sum(), [first.output.dense.weight, logits], allow_unused=True, retain_graph=True
        )
        assert upstream is None
        assert by_edits.abs().max() > 0

    step()
    before = dict(ran)
    for _ in range(4):
        step()
    assert ran["first"] == before["first"]
    assert ran["last"] == before["last"] + 4
    assert torch.is_grad_enabled()


def test_there_are_no_gradients_by_edits_in_inference_mode(three_layers):
    rerun = Rerun(three_layers, TEXTS, gradients="edits")
    with torch.inference_mode(), pytest.raises(NoGradient, match="inference_mode"):
        rerun(edits.uniform(), variants=2)
