"""What is wired into a layer is read from there on, what is not there is not, and the numbers are the definition's."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

import regard
from regard import reading_off
from regard.data import Dataset, Example, Word
from regard.data.schema import Schema
from regard.errors import NotServed, OptionError
from regard.subjects.scratch import scratch_text

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import bert, llama, t5

POSITION, FLAG, NEXT, CODE = range(16), (16, 17), (18, 19), (range(20, 34), range(34, 48))  # channels
TYPES = 150


def flag(word):
    """+1 or −1, half of the words each."""
    return 1 if int(word[1:]) % 2 else -1


def wired(types=TYPES):
    """A BERT that embeds a word as its flag and a code. Layer 0 does nothing; in layer 1 each row gets the next flag.

    Every number comes with its negative, so that norms only scale.
    """
    words = [f"w{number}" for number in range(types)]
    subject = scratch_text(words, ["-1", "1"])
    bert, lots = subject.model.bert, np.random.default_rng(0)
    with torch.no_grad():
        for name, one in bert.named_parameters():
            if "LayerNorm" not in name and "pooler" not in name:
                one.zero_()
        bert.embeddings.position_embeddings.weight[POSITION, POSITION] = 1.0
        table = bert.embeddings.word_embeddings.weight
        for word, place in sorted(subject.tokenizer.get_vocab().items()):
            value = flag(word) if word in words else 1
            table[place, FLAG] = torch.tensor([value, -value], dtype=table.dtype)
            code = torch.from_numpy(lots.choice([-0.5, 0.5], 14)).to(table)
            table[place, CODE[0]], table[place, CODE[1]] = code, -code
        part = bert.encoder.layer[1].attention
        part.self.query.weight[1:16, :15] = 4 * torch.eye(15)
        part.self.key.weight[:16, :16] = 4 * torch.eye(16)
        part.self.value.weight[0, FLAG[0]] = 1.0
        part.output.dense.weight[NEXT, 0] = torch.tensor([1.0, -1.0])
    return subject


def sentences(tag, count=120, types=TYPES, seed=0):
    """Words by lot; ``tag`` tells each by its own flag, the next one's (after the last comes a 1), and a lot."""
    lots, found = np.random.default_rng(seed), []
    for number in range(count):
        forms = [f"w{one}" for one in lots.integers(0, types, lots.integers(7, 13))]
        flags = [*map(flag, forms), 1]
        heads = [-1, *(int(lots.choice([j for j in range(len(forms)) if j != i])) for i in range(1, len(forms)))]
        words, at = [], 0
        for i, (form, head) in enumerate(zip(forms, heads, strict=True)):
            relation = "root" if head < 0 else f"of {flags[head]}"
            words.append(
                Word(form, at, at + len(form), str(tag(flags[i], flags[i + 1], lots.choice([-1, 1]))), head, relation)
            )
            at += len(form) + 1
        found.append(Example(" ".join(forms), str(flags[0]), id=str(number), marks={"words": tuple(words)}))
    return Dataset.of(found)


def read(subject, data, draws=100, **options):
    return regard.heads(subject, data, probes=[("readable", options)], examples=None, draws=draws)["readable"]


def rows(found, task, probe, table="layers"):
    one = found.tables[table]
    one = one[(one["task"] == task) & (one["probe"] == probe)]
    return one.set_index("layer") if table == "layers" else one.iloc[0]


@pytest.fixture(scope="module")
def brought():
    """The tag of a word is the next one's flag; the class is the first one's."""
    return read(wired(), sentences(lambda own, after, lot: after), probe="linear")


def test_what_attention_brings_is_read_from_its_layer_on_and_not_before(brought):
    tags = rows(brought, "tags", "linear")
    assert list(tags.index) == [-1, 0, 1]
    assert tags.loc[1, "accuracy"] == 1.0
    assert tags.loc[[-1, 0], "accuracy_high"].max() < 0.65
    depth = rows(brought, "tags", "linear", "depth")
    assert [depth[f"{name}{end}"] for name in ("reached", "best") for end in ("", "_from", "_to")] == [1] * 6
    assert depth["readable"]
    assert depth["difference"] == pytest.approx(tags.loc[0, "accuracy"] - 1.0)
    assert depth["difference_high"] < 0
    assert "Parts of speech, linear probe: 100.0% at layer 1, its best, and 95% of that first at layer 1" in brought.sentence  # fmt: skip
    assert "the upper are more readable" in brought.sentence


def test_the_class_is_read_off_the_row_that_the_prediction_is_read_from(brought):
    # [CLS] is the same in all texts until layer 1 gives it the flag of the first word
    found = rows(brought, "class", "linear")
    assert found.loc[1, "accuracy"] == 1.0
    assert found.loc[-1, "accuracy"] == found.loc[0, "accuracy"] == found.loc[0, "majority"]
    assert found.loc[1, "selectivity_low"] > 0.2
    assert np.isnan(found.loc[1, "selectivity_seen"])


def test_relations_are_read_off_both_words(brought):
    # the label is the head's flag, which the dependent knows nothing of
    found = rows(brought, "relations", "linear")
    assert (found["accuracy"] == 1.0).all()
    assert rows(brought, "relations", "linear", "depth")["reached"] == -1
    total = brought.tables["tasks"].set_index("task").loc["relations", ["trained on", "scored"]].sum()
    assert total == sum(len(one.marks["words"]) - 1 for one in sentences(lambda own, after, lot: after)), "no roots"


def test_xor_is_read_by_an_mlp_alone():
    found = read(wired(), sentences(lambda own, after, lot: own * after, 200), tasks="tags", control=False)
    assert rows(found, "tags", "mlp").loc[1, "accuracy"] > 0.95
    assert rows(found, "tags", "mlp").loc[0, "accuracy_high"] < 0.65
    assert rows(found, "tags", "linear")["accuracy_high"].max() < 0.65
    assert rows(found, "tags", "mlp", "depth")["reached"] == 1
    assert not [column for column in found.tables["layers"] if column.startswith(("control", "selectivity"))]


def test_labels_by_lot_are_not_read():
    found = read(wired(), sentences(lambda own, after, lot: lot), tasks="tags", probe=["linear", "mlp"])
    table = found.tables["layers"]
    assert (table["accuracy_low"] < table["majority"]).all()
    assert (table["selectivity_low"] < 0).all()
    assert not found.tables["depth"]["readable"].any()
    assert "at no layer surely above the most frequent label" in found.sentence


def test_the_control_tells_what_is_known_by_heart():
    by_flag = lambda own, after, lot: own  # noqa: E731
    many = rows(read(wired(), sentences(by_flag), tasks="tags", probe="linear"), "tags", "linear").loc[-1]
    assert many["accuracy"] == 1.0
    assert many["selectivity_low"] > 0.2, "150 types are too many to know by 15 numbers"
    few = read(wired(8), sentences(by_flag, types=8), tasks="tags", probe="linear")
    assert few.tables["tasks"]["seen"].tolist() == [1.0]
    entrance = rows(few, "tags", "linear").loc[-1]
    assert (entrance["accuracy"], entrance["control"], entrance["selectivity_seen"]) == (1.0, 1.0, 0.0)


TEXTS = """an unbelievably overlong movie never ends|the plot is awful and slow|it ends so quickly|a superb moving plot
it is a dull film|the untranslatable dialogue meandered|never have unwatchable films pleased|the film quickly ends
so it is slow and dull|a movie is a plot|untranslatable plots never please|it meandered and never ended""".replace("\n", "|").split("|")  # fmt: skip


def marked(texts):
    """Sentences whose tags and labels are by lot, and capitals that types do without."""
    lots, found = np.random.default_rng(4), []
    for number, text in enumerate(texts):
        forms = [form.capitalize() if lots.random() < 0.3 else form for form in text.split()]
        starts = np.cumsum([0, *(len(form) + 1 for form in forms)]).tolist()
        words = tuple(
            Word(form, start, start + len(form), str(lots.choice([*"AABC"])), at - 1, str(lots.choice([*"xy"])))
            for at, (form, start) in enumerate(zip(forms, starts, strict=False))
        )
        found.append(Example(" ".join(forms), str(lots.choice([*"pq"])), id=str(number), marks={"words": words}))
    return Dataset.of(found)


def literal(model, tokenizer, data, draws):
    """By task, probe and layer: accuracy, control, majority, their draws; text by text, word by word, with hooks."""
    examples = list(data)
    held = {layer: [] for layer in (-1, 0, 1, 2)}

    def keep(layer):
        def hook(_, __, output):
            found = (output[0] if isinstance(output, tuple) else output)[0].detach().numpy()
            held[layer].append(found / np.sqrt((found**2).sum(-1, keepdims=True)))

        return hook

    hooks = [model.bert.embeddings.word_embeddings.register_forward_hook(keep(-1))]
    hooks += [block.register_forward_hook(keep(at)) for at, block in enumerate(model.bert.encoder.layer)]
    encoded = [tokenizer(one.input, return_tensors="pt", return_offsets_mapping=True) for one in examples]
    for one in encoded:
        model(**{name: one[name] for name in ("input_ids", "attention_mask", "token_type_ids")})
    for one in hooks:
        one.remove()
    train = {*np.random.default_rng(0).permutation(len(examples))[: len(examples) // 2].tolist()}

    def vector(layer, place, word):
        offsets = encoded[place]["offset_mapping"][0].tolist()
        mine = [row for row, (a, b) in enumerate(offsets) if b > a and word.start <= a < word.end]
        return np.mean([held[layer][place][row] for row in mine], 0)

    found = {}
    for task in ("tags", "relations", "class"):
        items = []  # example, label, type, vector of a layer
        for place, one in enumerate(examples):
            words = one.marks["words"]
            if task == "tags":
                items += [(place, w.tag, w.form.lower(), lambda k, p=place, w=w: vector(k, p, w)) for w in words]
            elif task == "relations":
                items += [
                    (place, w.relation, w.form.lower(),
                     lambda k, p=place, w=w, g=words[w.head]: np.concatenate([vector(k, p, w), vector(k, p, g)]))
                    for w in words if w.head >= 0
                ]  # fmt: skip
            else:
                items.append((place, one.label, None, lambda k, p=place: held[k][p][0]))
        names = sorted({item[1] for item in items})
        learn = np.array([item[0] in train for item in items])
        labels = np.array([names.index(item[1]) for item in items])
        share = [np.mean(labels[learn] == at) for at in range(len(names))]
        lots = np.random.default_rng(0)
        if task == "class":
            control = lots.permutation(labels)
        else:
            types = sorted({item[2] for item in items})
            drawn = dict(zip(types, lots.choice(len(names), size=len(types), p=share), strict=True))
            control = np.array([drawn[item[2]] for item in items])
        counts = {p: np.random.default_rng((0, p)).poisson(1.0, draws) for p in range(len(examples))}
        count = np.array([[1, *counts[item[0]]] for item in items], dtype=float)[~learn]
        heard = np.isin([item[2] for item in items], [item[2] for item, one in zip(items, learn, strict=True) if one])[~learn]  # fmt: skip
        for layer in held:
            x = np.stack([item[3](layer) for item in items]).astype(np.float32)
            scaler = StandardScaler().fit(x[learn])
            for probe in ("linear", "mlp"):
                right = {}
                for what, truth in (("accuracy", labels), ("control", control)):
                    lot = int(np.random.default_rng(0).integers(2**31))
                    fitted = (
                        LogisticRegression(C=0.1, max_iter=2000) if probe == "linear"
                        else MLPClassifier((64,), alpha=1.0, max_iter=1000, tol=1e-3, random_state=lot)
                    ).fit(scaler.transform(x[learn]), truth[learn])  # fmt: skip
                    right[what] = fitted.predict(scaler.transform(x[~learn])) == truth[~learn]
                rate = {
                    what: np.array([(one * hit).sum() / one.sum() for one in count.T]) for what, hit in right.items()
                }
                rate["selectivity"] = rate["accuracy"] - rate["control"]
                if task != "class":
                    both = right["accuracy"].astype(float) - right["control"]
                    rate["selectivity_seen"] = np.array([(one * both * heard).sum() / (one * heard).sum() for one in count.T])  # fmt: skip
                rate["majority"] = np.array([np.mean(labels[~learn] == np.argmax(share))])
                found[task, probe, layer] = rate
    return found


def test_the_numbers_are_those_of_the_definition(tokenizer):
    model, draws = bert(tokenizer), 20
    data = marked(TEXTS * 3)
    found = read(regard.text(model, tokenizer), data, draws=draws, least=2)
    expected = literal(model, tokenizer, data, draws)
    assert len(found.tables["layers"]) == len(expected) == 3 * 2 * 4
    for row in found.tables["layers"].to_dict("records"):
        rate = expected[row["task"], row["probe"], row["layer"]]
        assert row["majority"] == pytest.approx(rate["majority"][0], abs=1e-12)
        for what in set(rate) - {"majority"}:
            ends = np.quantile(rate[what][1:], [0.025, 0.975])
            assert [row[what], row[f"{what}_low"], row[f"{what}_high"]] == pytest.approx([rate[what][0], *ends], abs=1e-12), (row, what)  # fmt: skip
    for row in found.tables["depth"].to_dict("records"):
        drawn = np.stack([expected[row["task"], row["probe"], layer]["accuracy"] for layer in (-1, 0, 1, 2)], 1)
        best = drawn[0].max()
        assert row["reached"] == min(layer for layer in (-1, 0, 1, 2) if drawn[0, layer + 1] >= 0.95 * best)
        assert row["accuracy"] == pytest.approx(best, abs=1e-12)
        firsts = sorted(min(at for at, one in enumerate(draw) if one >= 0.95 * max(draw)) - 1 for draw in drawn[1:])
        assert (row["reached_from"], row["reached_to"]) == (firsts[0], firsts[-1]), "of 20 draws 2.5 % are one"
        lower_less_upper = drawn[:, 1] - drawn[:, 3]  # of three blocks the one in the middle is in neither half
        assert row["difference"] == pytest.approx(lower_less_upper[0], abs=1e-12)
        assert row["difference_high"] == pytest.approx(np.quantile(lower_less_upper[1:], 0.975), abs=1e-12)


def test_decoders_and_the_encoders_of_others_are_served(tokenizer):
    data = marked(TEXTS)
    causal = read(regard.causal(llama(tokenizer), tokenizer), data, draws=5, least=2, probe="linear", control=False)
    assert sorted(set(causal.tables["layers"]["layer"])) == [-1, 0, 1, 2]
    assert set(causal.tables["layers"]["task"]) == {"tags", "relations", "class"}
    subject = regard.seq2seq(t5(tokenizer), tokenizer, most=2)
    both = read(subject, data, draws=5, least=2, probe="linear", control=False)
    assert sorted(set(both.tables["layers"]["layer"])) == [-1, 0, 1], "its encoder has two layers"
    assert set(both.tables["layers"]["task"]) == {"tags", "relations"}
    assert any("class: the model reads no class from rows of its input" in one for one in both.warnings)


def test_of_tables_the_class():
    from rtdl_revisiting_models import FTTransformer

    lots = np.random.default_rng(0)
    frame = pd.DataFrame({"age": lots.normal(size=160), "job": lots.choice([*"abc"], 160)})
    label = np.where(frame["age"] > 0, "yes", "no")
    schema = Schema.of(frame)
    torch.manual_seed(0)
    model = FTTransformer(
        n_cont_features=1, cat_cardinalities=list(schema.cardinalities), d_out=2, n_blocks=2, d_block=16,
        attention_n_heads=2, attention_dropout=0.0, ffn_d_hidden_multiplier=2, ffn_dropout=0.0, residual_dropout=0.0,
    ).eval()  # fmt: skip
    subject = regard.tabular(model, schema, labels=["no", "yes"])
    data = Dataset.of([Example(row, one) for row, one in zip(frame.to_dict("records"), label, strict=True)])
    found = rows(read(subject, data, probe="linear", draws=20), "class", "linear")
    assert list(found.index) == [-1, 0, 1]
    assert found.loc[-1, "accuracy"] == found.loc[-1, "majority"], "[CLS] enters as it always does"
    assert found.loc[0, "accuracy"] > 0.9


def test_a_model_without_states_is_refused():
    subject = regard.pooled(regard.models.toys.decisive())
    data = Dataset.of([Example("so good", "positive"), Example("so bad", "negative")])
    with pytest.raises(NotServed, match="rows of its input look at one another"):
        read(subject, data)


def test_what_cannot_be_used_is_said(tokenizer):
    subject, data = wired(), sentences(lambda own, after, lot: own, 12)
    with pytest.raises(OptionError, match="tasks='tag' is not known. Choose one of 'tags', 'relations', 'class'"):
        read(subject, data, tasks="tag")
    with pytest.raises(OptionError, match=r"probe=\[\] is empty. Name some of linear, mlp"):
        read(subject, data, probe=[])
    with pytest.raises(OptionError, match="words=0 must be 1 or more"):
        read(subject, data, words=0)
    with pytest.raises(NotServed, match=r"tags: there are too few examples: two labels must have 200 words in each half of them. Fewer have -1 \(\d+\), 1 \(\d+\)"):  # fmt: skip
        read(subject, data, tasks="tags", least=200)
    plain = Dataset.of([Example(one.input) for one in data])
    with pytest.raises(NotServed, match="neither words with their syntax nor labels"):
        read(subject, plain)
    with pytest.raises(NotServed, match="tags: it needs words with their syntax"):
        read(subject, Dataset.of([Example(one.input, one.label) for one in data]), tasks="tags")
    numbers = Dataset.of([Example(one.input, float(at)) for at, one in enumerate(data)])
    with pytest.raises(NotServed, match="class: labels are numbers, and no classes"):
        read(subject, numbers)
    gone = Dataset.of([
        Example(one.input, marks={"words": tuple(replace(word, start=900, end=901) for word in one.marks["words"])})
        for one in data
    ])  # fmt: skip
    with pytest.raises(NotServed, match="the tokenizer cannot align"):
        read(subject, gone)


def test_some_tasks_may_be_too_small_for_others():
    found = read(wired(), sentences(lambda own, after, lot: own, 30), probe="linear", control=False, least=25, draws=5)
    assert set(found.tables["depth"]["task"]) == {"tags", "relations"}
    assert any(one.startswith("class: there are too few examples") for one in found.warnings)
    assert any("Only 15 examples are scored" in one for one in found.warnings)


def test_labels_that_are_too_few_are_left_out_and_counted():
    lots = np.random.default_rng(0)
    data = sentences(lambda own, after, lot: "rare" if lots.random() < 0.04 else own, 40)
    total = sum(len(one.marks["words"]) for one in data)
    rare = sum(word.tag == "rare" for one in data for word in one.marks["words"])
    assert rare
    found = read(wired(), data, tasks="tags", probe="linear", control=False, draws=5)
    (told,) = [one for one in found.warnings if "left out" in one]
    assert told.startswith(f"tags: labels with fewer than 20 words in one half are left out, with {rare} of {total} words: rare (")  # fmt: skip
    assert found.tables["tasks"].iloc[0][["trained on", "scored"]].sum() == total - rare


def test_so_many_words_by_sentence(monkeypatch):
    data = sentences(lambda own, after, lot: own)
    options = {"tasks": "tags", "probe": "linear", "draws": 5, "words": 400, "least": 5}
    subject = wired()
    found = read(subject, data, **options)
    taken = found.tables["tasks"].iloc[0]
    assert 380 < taken["trained on"] + taken["scored"] <= 400
    monkeypatch.setattr(reading_off, "ROOM", 1)  # one layer at a time
    pd.testing.assert_frame_equal(found.tables["layers"], read(subject, data, **options).tables["layers"])


class Sink(torch.nn.Module):
    """A block after which the row of the first word is a thousand times as long."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *given, **options):
        output = self.block(*given, **options)
        long = torch.ones(output.shape[1], 1, dtype=output.dtype)
        long[1] = 1000.0
        return output * long


def test_sinks_are_told_of_and_do_not_set_the_scale(tokenizer):
    model, other, data = llama(tokenizer), llama(tokenizer), marked(TEXTS * 3)
    options = {"tasks": "tags", "probe": "linear", "control": False, "least": 2, "draws": 5}
    before = read(regard.causal(model, tokenizer, padding_side="right"), data, **options)
    assert not [one for one in before.warnings if "sinks" in one]
    other.model.layers[1] = Sink(other.model.layers[1])
    after = read(regard.causal(other, tokenizer, padding_side="right"), data, **options)
    (told,) = [one for one in after.warnings if "sinks" in one]
    assert "at 2 of 4 layers (1 to 2)" in told
    assert rows(after, "tags", "linear").loc[1, "accuracy"] == rows(before, "tags", "linear").loc[1, "accuracy"]


def test_a_probe_that_does_not_converge_is_told_of(monkeypatch):
    monkeypatch.setitem(reading_off.STEPS, "mlp", 2)
    found = read(wired(), sentences(lambda own, after, lot: own, 40), tasks="tags", draws=5)
    assert "6 of 6 mlp probes had not converged after 2 steps: their numbers may be too low." in found.warnings


def test_it_is_drawn_written_and_read_again(tmp_path, brought):
    table = regard.heads(wired(), sentences(lambda own, after, lot: own, 40), probes=[("readable", {"probe": "linear"}), "entropy"], draws=5)  # fmt: skip
    again = regard.load_heads(table.save(tmp_path / "heads.json"))
    pd.testing.assert_frame_equal(again["readable"].tables["layers"], table["readable"].tables["layers"])
    page = table.to_html(tmp_path / "heads.html").read_text()
    assert "Parts of speech, linear probe" in page
    assert set(brought.charts) == {"tags", "relations", "class"}
    for name in brought.charts:
        assert brought.plot(name).save(tmp_path / f"{name}.svg").stat().st_size > 1000
