"""`regard heads`, `regard probes`, and what `doctor` and the report say of heads: what they print and write, and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import regard
from regard.cli import helps, showing
from regard.cli.shared import known, several
from regard.probed import Heads, Probed, tabled
from regard.report import page

TEXTS = ["a moving film, and dull .", "so so", "dull, and it never ends!", "it is so", "a film", "the plot is awful"]
LABELS = ["good", "fair", "bad", "fair", "good", "bad"]
HOSTILE = "<script>alert(1)</script>"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
GAP = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


def saved(model, tokenizer, folder) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    """A small untrained BERT with three classes, in a folder."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, id2label=dict(enumerate(["bad", "fair", "good"])),
        label2id={"bad": 0, "fair": 1, "good": 2}, initializer_range=0.2, **SMALL,
    )  # fmt: skip
    return saved(transformers.BertForSequenceClassification(config), tokenizer, tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def decoder(tokenizer, tmp_path_factory) -> Path:
    """A small untrained Llama, in a folder."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **SMALL)
    return saved(transformers.LlamaForCausalLM(config), tokenizer, tmp_path_factory.mktemp("llama"))


def sentence(*words: tuple[str, str, int, str], text: str | None = None) -> str:
    """A sentence of CoNLL-U: form, tag, head, relation."""
    lines = [f"{at}\t{form}\t_\t{tag}\t_\t_\t{head}\t{to}\t_\t_" for at, (form, tag, head, to) in enumerate(words, 1)]
    return "\n".join([*([f"# text = {text}"] if text else []), *lines]) + "\n\n"


DOGS = sentence(("old", "ADJ", 2, "amod"), ("dogs", "NOUN", 3, "nsubj"), ("bark", "VERB", 0, "root"))


@pytest.fixture
def around(tmp_path, monkeypatch):
    """A folder with files of all kinds, in which the command is called."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"text": TEXTS, "label": LABELS}).to_csv("good.csv", index=False)
    pd.DataFrame({"text": TEXTS, "label": ["nice", "awful"] * 3}).to_csv("labels.csv", index=False)
    written = {
        "many.conllu": DOGS * 50, "small.conllu": DOGS * 3, "columns.conllu": DOGS + "1\tdogs\tNOUN\n",
        "head.conllu": DOGS + sentence(("dogs", "NOUN", 7, "root")), "text.conllu": sentence(("dogs", "NOUN", 0, "root"), text="cats"),
        "facts.json": json.dumps([{"prompt": "The capital of France is", "subject": "Italy", "answer": "Rome"}]),
        "none.json": '{"a": 1}', "broken.json": "{", "note.txt": "a film",
        "gap.tsv": GAP + "1\tAnn met Bea and she left\tshe\t16\tAnn\t0\tTRUE\tBea\t8\tFALSE\tx\n" * 60,
        "few.tsv": GAP + "1\tAnn met Bea and she left\tshe\t16\tAnn\t0\tTRUE\tBea\t8\tFALSE\tx\n" * 3,
        "offset.tsv": GAP + "1\tAnn met Bea and she left\tshe\t3\tAnn\t0\tTRUE\tBea\t8\tFALSE\tx\n",
    }  # fmt: skip
    for name, text in written.items():
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def self_contained(html: str) -> None:
    """No script, and nothing to fetch."""
    assert "<script" not in html.lower()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?!["']?#)|url\((?!#)|@import""", html)
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_first_look_prints_a_table_and_writes_what_python_finds(around, call, folder):
    given = ["heads", "--model", folder, "--data", "good.csv", "--seed", 3]
    code, out, err = call(*given, "--save", "new/heads.json", "--html", "new/heads.html")
    assert code == 0, err
    found = regard.heads(regard.text(folder), regard.data.read("good.csv"), seed=3)
    flat = " ".join(out.split())
    assert f"{folder} (BertForSequenceClassification); data: good.csv; examples: 6" in out.replace("\n", "")
    for name, one in found.probed.items():
        assert f"{name}: {one.about}" in flat
        top = one.values.loc[one.values["value"].idxmax()]
        assert f"{top['layer']} {top['head']} {top['value']:.3f} [{top['low']:.3f}, {top['high']:.3f}]" in flat
    assert "agreement of probes over heads (Spearman)" in flat
    assert err.splitlines() == ["written: new/heads.json", "written: new/heads.html"]

    kept = regard.load_heads("new/heads.json")
    pd.testing.assert_frame_equal(kept.frame(), found.frame())
    pd.testing.assert_frame_equal(kept.agreement(), found.agreement())
    html = Path("new/heads.html").read_text("utf-8")
    self_contained(html)
    assert all(f"<h2>{name}</h2>" in html for name in found.probed)

    code, out, err = call(*given, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told == json.loads(Path("new/heads.json").read_text("utf-8"))
    plain = json.loads(json.dumps(found.to_dict()))
    for part in ("suite", "probed", "index", "refused", "agreement"):
        assert told[part] == plain[part]


def test_a_file_that_was_read_draws_the_same_page(around, folder):
    found = regard.heads(regard.text(folder), regard.data.read("good.csv"), probes=["entropy", "pattern", "importance"])
    again = regard.load_heads(found.save("heads.json"))
    assert again.to_html("again.html").read_text("utf-8") == found.to_html("first.html").read_text("utf-8")


ON_TEXTS = "entropy,positional,pattern,rare,importance,ablation:how=mean,integrated:steps=2,pruning:steps=2,gates:epochs=2,composition,copying"
PAGES = [("good.csv", ON_TEXTS), ("many.conllu", "syntax,tags"), ("gap.tsv", "coreference")]


@pytest.mark.parametrize(("data", "probes"), PAGES)
def test_whatever_is_found_can_be_printed_and_drawn(around, call, folder, data, probes):
    code, out, err = call("heads", "--model", folder, "--data", data, "--probes", probes, "--html", "x.html")
    assert code == 0, err
    html = Path("x.html").read_text("utf-8")
    self_contained(html)
    for name, _ in several([probes]):
        assert f"\n{name}: " in out
        assert f"<h2>{name}</h2>" in html
    assert not [line for line in out.splitlines() if line.startswith(tuple(f"! {name}:" for name in known("probes")))]


def test_the_same_probe_with_two_options_stands_twice(around, call, folder):
    both = "ablation:how=mean,ablation:how=uniform"
    code, out, _ = call("heads", "--model", folder, "--data", "good.csv", "--probes", both, "--json")
    found = json.loads(out)["probed"]
    assert code == 0
    assert [*found] == ["ablation how=mean", "ablation how=uniform"]
    assert [one["settings"]["how"] for one in found.values()] == ["mean", "uniform"]


def test_a_hostile_word_stays_a_word(around, call, folder):
    Path("bad.conllu").write_text(
        sentence(("old", HOSTILE, 2, HOSTILE), ("dogs", "NOUN", 3, "nsubj"), ("bark", "VERB", 0, "root")) * 50
    )
    given = ["--data", "bad.conllu", "--probes", "syntax,tags", "--html", "x.html", "--save", "x.json"]
    code, out, err = call("heads", "--model", folder, *given)
    assert code == 0, err
    assert HOSTILE in Path("x.json").read_text()
    assert HOSTILE in out
    html = Path("x.html").read_text("utf-8")
    self_contained(html)
    assert "&lt;script&gt;alert(1)" in html


def test_a_language_model_is_asked_about_random_text(around, call, decoder):
    asked = "induction:sequences=2,duplicate:sequences=2,previous,importance,special"
    code, out, err = call("heads", "--model", decoder, "--data", "good.csv", "--probes", asked)
    assert code == 0, err
    assert "−log p of a token" in out
    assert "induction: " in out


def test_a_table_fits_the_terminal(around, call):
    pytest.importorskip("rtdl_revisiting_models", reason="regard[tabular] is not installed")
    draw = np.random.default_rng(0)
    names = [f"a_column_of_some_length_{number}" for number in range(11)] + [HOSTILE]
    rows = pd.DataFrame(draw.normal(size=(60, 12)), columns=names)
    said = np.where(rows[HOSTILE] > 0, "much", "little")
    model = regard.estimators.FTTransformerClassifier(blocks=1, width=16, epochs=1).fit(rows, said)
    model.save("table")
    rows.assign(pays=said).to_csv("rows.csv", index=False)
    given = [
        "--data",
        "rows.csv",
        "--target-column",
        "pays",
        "--probes",
        "columns,importance,previous",
        "--html",
        "x.html",
    ]
    code, out, err = call("heads", "--model", "table", *given)
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"… \d+ more columns: --json, --save or --html", out)
    assert "! previous: the columns of a table have no order." in out
    html = Path("x.html").read_text("utf-8")
    self_contained(html)
    assert "&lt;script&gt;alert(1)" in html


def test_what_cannot_be_served_is_said_and_the_rest_is_shown(around, call, folder):
    given = ["heads", "--model", folder, "--data", "good.csv", "--probes", "entropy,syntax,induction"]
    code, out, err = call(*given)
    assert (code, err) == (0, "")
    flat = " ".join(out.split())
    assert "! syntax: it needs words with their syntax: pass a file of CoNLL-U (.conllu)." in flat
    assert "! induction: it is about language models" in flat
    told = json.loads(call(*given, "--json")[1])
    assert [*told["probed"]] == ["entropy"]
    assert [*told["refused"]] == ["syntax", "induction"]


def test_what_others_found_is_not_lost(around, call, folder):
    code, out, err = call("heads", "--model", folder, "--data", "labels.csv", "--probes", "entropy,ablation")
    assert (code, err) == (0, "")
    assert "entropy of attention" in out
    assert "! ablation: example '2': label='awful' is not a label of this model" in " ".join(out.split())


def test_whom_a_pronoun_means_is_no_class_of_the_model(around, call, folder):
    code, out, err = call("heads", "--model", folder, "--data", "gap.tsv")
    assert code == 0, err
    assert "−log p of what is predicted" in " ".join(out.split())


def test_words_without_a_token_are_counted(around, call, folder):
    odd = sentence(("dogs", "NOUN", 2, "nsubj"), ("bark", "VERB", 0, "root"), ("\u200b", "X", 2, "dep"))
    Path("odd.conllu").write_text(odd * 50, "utf-8")
    code, out, err = call("heads", "--model", folder, "--data", "odd.conllu", "--probes", "syntax,tags")
    assert code == 0, err
    assert " ".join(out.split()).count("! 50 of 150 words have no token of their own, and are left out.") == 2


def test_options_are_checked_before_anything_runs(around, call, folder, monkeypatch):
    monkeypatch.setattr("regard.surveying.trace", lambda *given, **options: pytest.fail("it ran"))
    asked = "entropy,gates:epochs=2,ablation:how=median"
    code, out, err = call("heads", "--model", folder, "--data", "good.csv", "--probes", asked)
    assert (code, out) == (2, "")
    assert err == "error: ablation: how='median' is not known. Choose one of 'zero', 'mean', 'uniform'.\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["good.csv", "--probes", "entrpy"], ["probe='entrpy'", "Did you mean 'entropy'?", "There are ablation"]),
        (["good.csv", "--probes", ""], ["--probes ''", "`regard probes` lists them"]),
        (["good.csv", "--probes", "how=mean"], ["option of nothing", "name:how=mean"]),
        (["good.csv", "--probes", "ablation:hw=mean"], ["hw='mean'", "ablation has no such option", "Did you mean 'how'?"]),
        (["good.csv", "--probes", "entropy:how=mean"], ["how='mean'", "entropy has no such option"]),
        (["good.csv", "--probes", "ablation:how=median"], ["ablation: how='median'", "'zero', 'mean', 'uniform'"]),
        (["good.csv", "--probes", "pruning:steps=0"], ["pruning: steps=0 must be 1 or more"]),
        (["good.csv", "--probes", "pruning:cost=lots"], ["pruning: cost='lots' must be a number above 0"]),
        (["good.csv", "--probes", "gates:penalty=x"], ["gates: penalty='x' must be a number"]),
        (["good.csv", "--probes", "rare:counts=5"], ["rare: counts=5", "a word and its count"]),
        (["good.csv", "--probes", "rare:counts=nowhere"], ["counts='nowhere' cannot be read"]),
        (["many.conllu", "--probes", "syntax:least=0"], ["syntax: least=0 must be 1 or more"]),
        (["columns.conllu"], ["columns.conllu", "line 5: has 3 columns", "--on-bad skip"]),
        (["head.conllu"], ["head.conllu", "line 5: has the head '7'", "words 1 to 1"]),
        (["text.conllu"], ["text.conllu", "line 2: 'dogs' is not what the text says next: 'cats'"]),
        (["small.conllu", "--probes", "syntax"], ["probe='syntax'", "too few", "nsubj (1)", "more sentences"]),
        (["small.conllu", "--probes", "tags"], ["probe='tags'", "too few", "NOUN (1)", "more sentences"]),
        (["small.conllu", "--text", "words"], ["text='words' names a column", "Leave it out"]),
        (["few.tsv", "--probes", "coreference"], ["probe='coreference'", "3 of 3 texts", "least=20", "Pass more"]),
        (["offset.tsv"], ["Pronoun='she' is not in 'Text' at Pronoun-offset='3'"]),
        (["facts.json"], ["the subject 'Italy' does not occur in the prompt"]),
        (["none.json"], ["none.json", "holds no facts", "'prompt', 'subject' and 'answer'"]),
        (["broken.json"], ["broken.json", "does not parse as JSON", "line 1"]),
        (["note.txt"], ["note.txt", ".conllu", "Convert it"]),
        (["nowhere.csv"], ["--data nowhere.csv does not exist"]),
        (["good.csv", "--probes", "induction"], ["probe='induction' cannot be served", "language models", "decoder"]),
        (["good.csv", "--probes", "syntax"], ["probe='syntax' cannot be served", "pass a file of CoNLL-U"]),
        (["good.csv", "--probes", "coreference"], ["probe='coreference' cannot be served", "pass a file of GAP"]),
        (["good.csv", "--probes", "columns"], ["probe='columns' cannot be served", "about tables"]),
        (["labels.csv"], ["example '2'", "label='awful'", "'bad', 'fair', 'good'", "Correct it"]),
        (["good.csv", "--target", "nice"], ["target='nice'", "'bad', 'fair', 'good'"]),
        (["good.csv", "--html", "x.txt"], ["--html x.txt must end in .html"]),
        (["good.csv", "--save", "x.txt"], ["--save x.txt must end in .json"]),
        (["good.csv", "--limit", "0"], ["'--limit'", "0 is not in the range", "See: regard heads --help"]),
        (["good.csv", "--on-bad", "ignore"], ["on_bad='ignore'", "'raise', 'skip'"]),
    ],
)  # fmt: skip
def test_heads_refuses(around, call, folder, given, said):
    before = {*around.iterdir()}
    code, out, err = call("heads", "--model", folder, "--data", *given)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for words in said:
        assert words in err
    assert {*around.iterdir()} == before


def test_a_plain_encoder_matters_for_what_is_named(around, call, minilm_path):
    given = ["heads", "--model", minilm_path, "--data", "good.csv", "--probes", "importance", "--limit", 2]
    code, out, err = call(*given)
    assert (code, out) == (2, "")
    assert "probe='importance' cannot be served: the model has no classes" in err
    assert "--similar-to TEXT" in err
    code, out, err = call(*given, "--target", "good")
    assert (code, out) == (2, "")
    assert err == f"error: --target good: {minilm_path} has no classes. Pass --similar-to TEXT.\n"
    code, out, err = call(*given, "--similar-to", "a good film", "--json")
    assert code == 0, err
    assert "minus the target" in json.loads(out)["probed"]["importance"]["about"]


def test_probes_are_the_files_of_the_folder(call):
    files = sorted(path.stem for path in Path(regard.probes.__file__).parent.glob("*.py") if path.stem != "__init__")
    told = json.loads(call("probes", "--json")[1])
    assert sorted(one["name"] for one in told) == files
    assert all(one["about"] and one["needs"] and one["paper"] for one in told)
    code, out, _ = call("probes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line[:1].strip()] == [one["name"] for one in told]
    assert "how='zero'" in out


def test_the_examples_of_help_name_probes_that_there_are():
    asked = re.findall(r"regard heads .*--probes ([^\s`]+)", helps.HEADS_HELP)
    assert asked
    assert {name for one in asked for name, _ in several([one])} <= {*known("probes")}


def test_doctor_lists_what_a_model_can_serve(call, folder, decoder):
    told = {}
    for model in (folder, decoder):
        code, out, err = call("doctor", "--model", model, "--json")
        assert code == 0, err
        told[model] = {one["name"]: one for one in json.loads(out)["probes"]}
        assert sorted(told[model]) == sorted(known("probes"))
    served = {"importance", "ablation", "copying", "composition", "syntax", "coreference", "entropy"}
    assert all(told[model][name]["works"] for model in told for name in served)
    assert told[folder]["syntax"]["data"] == "words"
    for name in ("induction", "duplicate", "columns"):
        assert not told[folder][name]["works"]
        assert told[folder][name]["why"]
    assert told[decoder]["induction"]["works"]
    flat = " ".join(call("doctor", "--model", folder)[1].split())
    assert "syntax (words)" in flat.partition("probes of heads: ")[2]
    assert re.search(r"no [\w, ]*duplicate, induction[\w, ]*: it is about language models", flat)


def test_small_numbers_are_told_apart_and_long_curves_are_left_to_the_page(capsys):
    index = pd.DataFrame([{"layer": 0, "site": "a.very.long.name.of.a.site", "kind": "self", "head": head} for head in range(12)])  # fmt: skip
    numbers = np.linspace(0.000583, 0.0001, 12)
    tables = {"size": index.assign(value=numbers), "curve": pd.DataFrame({"x": range(30), "y": range(30)})}
    charts = {"curve": {"kind": "lines", "table": "curve", "x": "x", "y": "y"}}
    one = Probed("ablation", "rise", tabled(index, numbers[None]), tables=tables, charts=charts)
    showing.show_heads(Heads(index, {"ablation": one}))
    said = capsys.readouterr().out
    assert "0     0  0.000583" in said
    assert "… 4 more heads" in said
    assert "curve: 30 rows, drawn by --html" in said
    assert "a.very.long" not in said


def test_the_report_tells_roles_and_what_was_refused(tmp_path, folder):
    data = regard.data.read(pd.DataFrame({"text": TEXTS, "label": LABELS}))
    probes = ["entropy", "pattern", "importance", "induction"]
    tried = [("permutation", {"n": 2})]
    found = regard.audit(
        regard.text(folder), data, methods=["raw"], trials=tried, probes=probes, shown=1, out=tmp_path / "run"
    )
    html = page(found)
    roles = found.heads.by_role()
    assert roles["heads"].sum() == len(found.heads.roles())
    for row in roles.to_dict("records"):
        assert row["layer.head (number)"] in html
    assert re.search(r"<li><b>induction</b>: it is about language models", html)
    assert "Do probes rank heads alike?" in html
    assert re.search(r'data-said="layer 1, head 0: [^"]*importance 0\.\d\d"', html)
