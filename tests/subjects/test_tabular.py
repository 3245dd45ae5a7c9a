"""Transformers on tables: which row is which column, what is absent, what is read, and which other rows are looked at.

Models are small and untrained; oracles are the models themselves, called by hand, and literal loops.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import regard
from regard import errors
from regard.attention.entrance import Entrance
from regard.data.schema import Schema
from regard.models import SAINT, TabTransformer
from regard.subjects.tabular import looked_at, tabular

LOTS = np.random.default_rng(0)
SIZE = 9
FRAME = pd.DataFrame({
    "age": LOTS.normal(40, 10, SIZE), "job": [*"abcdabcda"], "hours": LOTS.normal(38, 5, SIZE),
    "sex": [*"fmfmfmffm"], "rank": [*"zyxzyxzyx"],
})  # fmt: skip
FRAME.loc[3, "job"] = None
FRAME.loc[5, "hours"] = np.nan
SCHEMA = Schema.of(FRAME)
LABELS = ["no", "maybe", "yes"]


def ft(blocks=3):
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(
        n_cont_features=2, cat_cardinalities=list(SCHEMA.cardinalities), d_out=3, n_blocks=blocks, d_block=16,
        attention_n_heads=4, attention_dropout=0.2, ffn_d_hidden_multiplier=2, ffn_dropout=0.1, residual_dropout=0.0,
    )  # fmt: skip


def tab():
    return TabTransformer(2, SCHEMA.cardinalities, 3, depth=2)


def saint(attention="both"):
    return SAINT(2, SCHEMA.cardinalities, 3, attention=attention, width=16, depth=2, heads=4)


def frame_data():
    torch_frame = pytest.importorskip("torch_frame", reason="pytorch-frame is not installed")
    from torch_frame.data import Dataset

    kinds = dict.fromkeys(SCHEMA.numbers, torch_frame.numerical) | dict.fromkeys(
        [*SCHEMA.categories, "y"], torch_frame.categorical
    )
    data = Dataset(FRAME.assign(y=[*"abcabcabc"]), kinds, target_col="y")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # its own, with pandas 3
        return data.materialize()


def frame_ft():
    data = frame_data()
    from torch_frame.nn.models import FTTransformer

    return FTTransformer(16, 3, 2, data.col_stats, data.tensor_frame.col_names_dict)


def frame_tab():
    data = frame_data()
    from torch_frame.nn.models import TabTransformer

    return TabTransformer(16, 3, 2, 4, 2, 0.1, 0.1, data.col_stats, data.tensor_frame.col_names_dict)


MODELS = {
    "ft": ft, "tab": tab, "saint": saint, "saint columns": lambda: saint("columns"), "frame ft": frame_ft,
    "frame tab": frame_tab,
}  # fmt: skip
ONLY_CATEGORIES = ("tab", "frame tab")


def made(name, **options):
    return tabular(MODELS[name](), SCHEMA, labels=LABELS, **options)


# --- what is stated about models that are known ----------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_each_row_stands_for_its_column_and_no_other(name):
    subject = made(name)
    before = Entrance(subject, subject.encode(FRAME[:2])).vectors["rows"]
    for word, column in enumerate(FRAME):
        cells = FRAME[:2].assign(**{column: [7.0, 9.0] if column in SCHEMA.numbers else FRAME[column].tolist()[1:3]})
        after = Entrance(subject, subject.encode(cells)).vectors["rows"]
        changed = (before != after).any(-1).any(0).nonzero().squeeze(-1).tolist()
        assert tuple(changed) == subject.features.rows_of_words[word]


@pytest.mark.parametrize("name", MODELS)
def test_the_trace_proves_itself_and_reads_what_is_declared(name):
    traced = regard.trace(made(name), FRAME)
    assert traced.check.readout == "measured"
    assert traced.check.error < 1e-5
    rows = len(traced.features[0].rows)
    assert {site.shape[3] for site in traced.sites if site.kind == "self"} == {rows}


@pytest.mark.parametrize(
    ("name", "readout"),
    [pair for pair in product(MODELS, ["first", "last", "mean", 2]) if pair not in {
        ("ft", "first"), ("tab", "mean"), ("saint", "mean"), ("saint columns", "first"), ("frame ft", "first"),
        ("frame tab", "mean"),
    }],
)  # fmt: skip
def test_a_readout_that_is_not_the_models_is_an_error(name, readout):
    with pytest.raises(errors.ReadoutMismatch):
        regard.trace(made(name, readout=readout), FRAME)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_block_that_computes_one_row_only_does_not_hide_which_it_is(blocks):
    assert regard.trace(tabular(ft(blocks), SCHEMA), FRAME).check.readout == "measured"
    with pytest.raises(errors.ReadoutMismatch, match="declared at rows 5, but the output moves with rows 0"):
        regard.trace(tabular(ft(blocks), SCHEMA, readout="last"), FRAME)


def test_models_are_called_as_by_hand():
    cells = SCHEMA.encode(FRAME)
    numbers, codes = torch.tensor(cells.numbers), torch.tensor(cells.codes)
    for model in (ft().eval(), tab().eval(), saint().eval()):
        subject = tabular(model, FRAME)
        assert torch.equal(subject.forward(subject.encode(FRAME)), model(numbers, codes))
        assert torch.equal(subject.encode(cells).inputs["codes"], codes)


@pytest.mark.parametrize("name", ["frame ft", "frame tab"])
def test_pytorch_frame_has_its_own_codes_and_scales(name):
    model = MODELS[name]().eval()
    subject = tabular(model, Schema.of(FRAME[FRAME.columns[::-1]]))  # columns are found by name
    assert torch.allclose(subject.forward(subject.encode(FRAME)), model(frame_data().tensor_frame), atol=1e-6)


def test_pytorch_frame_and_a_schema_of_another_table():
    with pytest.raises(errors.SubjectError, match=r"\['rank'\] are not of kind category in both"):
        tabular(frame_ft(), FRAME.drop(columns="rank"))


@pytest.mark.filterwarnings("ignore")  # of Lightning
@pytest.mark.parametrize("kind", ["FTTransformer", "TabTransformer"])
def test_pytorch_tabular(kind, tmp_path, monkeypatch):
    package = pytest.importorskip(
        "pytorch_tabular", reason="pytorch_tabular is not installed: pip install it elsewhere"
    )
    monkeypatch.chdir(tmp_path)  # it writes its logs where it is
    config, data = package.config, FRAME.dropna().astype(dict.fromkeys(SCHEMA.categories, object))
    data = pd.concat([data] * 8, ignore_index=True).assign(y=[*"ab"] * 28)
    whole = package.TabularModel(
        data_config=config.DataConfig(["y"], continuous_cols=["hours", "age"], categorical_cols=["sex", "job", "rank"]),
        model_config=getattr(package.models, f"{kind}Config")(
            task="classification", input_embed_dim=16, num_heads=4, num_attn_blocks=2
        ),
        optimizer_config=config.OptimizerConfig(),
        trainer_config=config.TrainerConfig(
            max_epochs=1, accelerator="cpu", checkpoints=None, load_best=False, progress_bar="none", early_stopping=None
        ),
    )
    whole.fit(train=data, validation=data)
    schema = Schema.of(data.drop(columns="y"))
    subject = tabular(whole, schema)
    said = whole.predict(data)[["y_a_probability", "y_b_probability"]].to_numpy()
    found = subject.forward(subject.encode(data)).softmax(-1).detach().numpy()
    assert np.abs(said - found).max() < 1e-5
    assert regard.trace(subject, data[:7]).check.readout == "measured"
    assert subject.features.absent == (("age", "hours") if kind == "TabTransformer" else ())
    with pytest.raises(errors.ReadoutMismatch):
        regard.trace(tabular(whole, schema, readout="first"), data[:7])
    outcome = outcomes(subject, data[:5].drop(columns="y"))
    assert {name for name, said in outcome.items() if said} <= {"token_mixing", "value_zeroing"}


# --- all methods -----------------------------------------------------------------------------------------------------

FEW = {"shapley": {"samples": 2}, "integrated_gradients": {"steps": 4}, "token_mixing": {"probes": 2},
       "integrated": {"steps": 2}}  # fmt: skip
REFUSED = {
    "ft": {"token_mixing": "residual connection", "value_zeroing": "residual connection"},
    "saint": {
        "token_mixing": "one sequence through self-attention",
        "value_zeroing": "samples",
        "integrated": "its examples look at each other",
    },
}


def outcomes(subject, frame):
    """What each method of the catalog gives: a refusal, or "" if all columns are there in their order."""
    found = {}
    for method in regard.catalog.found():
        try:
            whys = regard.explain(subject, frame, method=method, **FEW.get(method, {}))
        except errors.NotServed as problem:
            found[method] = str(problem)
            continue
        found[method] = ""
        for why in whys:
            table = why.words()
            assert table.loc[~table["special"], "word"].tolist() == list(frame.columns)
            assert table.loc[table["score"].isna(), "word"].tolist() == list(why.features.absent)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_method_explains_every_row_or_says_why_not(name):
    found = outcomes(made(name), FRAME[:4])
    assert {method for method, said in found.items() if said} == set(REFUSED.get(name, {}))
    for method, part in REFUSED.get(name, {}).items():
        assert part in found[method]


def test_flow_goes_on_from_a_layer_that_computes_one_row():
    subject = made("ft")
    traced = regard.trace(subject, FRAME[:2])
    whys = regard.explain(subject, FRAME[:2], method="flow", alpha=0.5)
    for example, why in enumerate(whys):
        graph = nx.DiGraph()
        for layer, site in enumerate(traced.sites, 1):
            mean = site.weights()[example].double().mean(0).numpy()
            for query, key in product(range(6), range(6)):
                weight = mean[query, key] if len(mean) == 6 else mean[0, key] * (query == 0)
                graph.add_edge((layer, query), (layer - 1, key), capacity=0.5 * (query == key) + 0.5 * weight)
        flows = [nx.maximum_flow_value(graph, (3, 0), (0, token)) for token in range(6)]
        assert np.allclose(why.scores, flows, atol=1e-6)


# --- columns that are absent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONLY_CATEGORIES)
def test_numbers_that_are_not_attended_to_are_nan_with_the_reason(name, tmp_path):
    why = regard.explain(made(name), FRAME[:2], method="rollout")[0]
    table = why.words().set_index("word")["score"]
    assert table.index.tolist() == list(FRAME.columns)
    assert table.isna().tolist() == [True, False, True, False, False]
    assert why.features.absent == ("age", "hours")
    assert "absent: age, hours (the model attends to categories only" in why.caption
    assert "age" not in why.plot("bars").html().split("<figcaption")[0]
    assert regard.load_explanation(why.save(tmp_path / "why.json")) == why


def test_trials_and_comparisons_leave_them_out_and_say_so(caplog):
    subject = made("tab")
    data = [regard.data.Example(row, rationale=(True, False, False, True, False)) for row in FRAME.to_dict("records")]
    data = regard.data.Dataset.of(data * 3)
    found = regard.trial(subject, data, "agreement", method="rollout")
    assert any("age, hours (the model attends to categories only" in line for line in found.warnings)
    assert found.failed == {}
    for name in ("comprehensiveness", "plausibility", "stability"):
        assert regard.trial(subject, data, name, method="average").failed == {}
    assert regard.trial(subject, data, "erasure").failed == {}
    compared = regard.compare(subject, data, methods=["rollout", "gradient"])
    assert set(compared.numbers.words) == {("job", "sex", "rank")}
    assert all(truth.tolist() == [False, True, False] for truth in compared.numbers.truth)
    assert "Left out: age, hours" in compared.note


def test_scores_of_others_are_adopted_by_column():
    subject = made("frame tab")  # its rows are in another order than the columns
    given = [[np.nan, 1.0, np.nan, 2.0, 3.0]]
    (why,) = regard.adopt(subject, FRAME[:1], given, name="mine")
    assert why.words().set_index("word")["score"].dropna().to_dict() == {"job": 1, "sex": 2, "rank": 3}
    with pytest.raises(errors.InputError, match="has numbers for age, hours"):
        regard.adopt(subject, FRAME[:1], [[0.5, 1.0, 0.5, 2.0, 3.0]], name="mine")


# --- what is taken out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [None, {"age": 33.0, "job": "b"}])
def test_leaving_a_column_out_puts_the_mean_or_missing_in_its_place(fill):
    subject = made("ft", fill=fill)
    model = subject.model.eval()
    cells = SCHEMA.encode(FRAME)
    instead = {"age": 0.0, "hours": 0.0, "job": 0, "sex": 0, "rank": 0}
    if fill:
        age = SCHEMA.columns[0]
        instead |= {"age": (33 - age.center) / age.scale, "job": 2}
    whys = regard.explain(subject, FRAME, method="leave_one_out")
    whole = model(torch.tensor(cells.numbers), torch.tensor(cells.codes)).softmax(-1)
    for column in FRAME:
        numbers, codes = torch.tensor(cells.numbers), torch.tensor(cells.codes)
        if column in SCHEMA.numbers:
            numbers[:, SCHEMA.numbers.index(column)] = instead[column]
        else:
            codes[:, SCHEMA.categories.index(column)] = instead[column]
        apart = (whole - model(numbers, codes).softmax(-1)).abs().sum(-1) / 2
        found = [why.words().set_index("word").loc[column, "score"] for why in whys]
        assert np.allclose(found, apart.detach().numpy(), atol=1e-6)


def test_the_gradient_of_a_number_is_by_the_number_itself():
    subject = made("ft")
    model, cells = subject.model.eval(), SCHEMA.encode(FRAME)
    numbers = torch.tensor(cells.numbers, requires_grad=True)
    best = model(numbers, torch.tensor(cells.codes)).softmax(-1).max(-1).values
    (slope,) = torch.autograd.grad(best.sum(), [numbers])
    for row, why in enumerate(regard.explain(subject, FRAME, method="gradient")):
        found = why.words().set_index("word")["score"]
        assert found[[*SCHEMA.numbers]].tolist() == pytest.approx((slope * numbers)[row].abs().tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["ft", "tab", "saint"])
def test_integrated_gradients_begin_at_means_and_missing_categories(name):
    subject = made(name)
    subject.model.eval()
    batch = subject.encode(FRAME)
    rows = torch.tensor([word is not None for word in subject.features.word]).expand(SIZE, -1)
    target = regard.trace(subject, batch).target
    whys = regard.explain(subject, FRAME, method="integrated_gradients", steps=200, target=target)
    for row, why in enumerate(whys):
        one = subject.without(batch, rows & (torch.arange(SIZE)[:, None] == row), "pad")  # the others stay as they are
        with torch.no_grad():
            fall = subject.forward(batch)[row, target[row]] - subject.forward(one)[row, target[row]]
        assert why.scores.sum() == pytest.approx(float(fall), abs=2e-3)
        assert abs(float(why.facts["convergence_delta"])) < 2e-3


def test_what_cannot_be_taken_out():
    subject = made("ft")
    with pytest.raises(errors.NotServed, match="cannot be taken out"):
        regard.explain(subject, FRAME, method="leave_one_out", how="delete")
    with pytest.raises(errors.OptionError, match="fill: 'ages' is no column of the schema. Did you mean 'age'"):
        made("ft", fill={"ages": 3})
    with pytest.raises(errors.InputError, match="'q', which it did not at training"):
        made("ft", fill={"job": "q"})


# --- rows that look at each other --------------------------------------------------------------------------------------


def test_only_attention_over_samples_makes_rows_look_at_each_other():
    assert made("saint").mixes
    names = FRAME[["job", "sex"]]
    assert tabular(SAINT(0, Schema.of(names).cardinalities, 2, width=16), names).mixes  # also without numbers
    assert not any(made(name).mixes for name in ("ft", "tab", "saint columns"))


def test_columns_are_left_out_one_by_one_while_other_rows_stay():
    subject = made("saint")
    batch = subject.encode(FRAME)
    whys = regard.explain(subject, FRAME, method="leave_one_out")
    with torch.no_grad():
        whole = subject.model.eval()(*batch.inputs.values()).softmax(-1)
        for row, (place, column) in product(range(SIZE), enumerate(SCHEMA.categories)):
            codes = batch.inputs["codes"].clone()
            codes[row, place] = 0
            apart = (whole - subject.model(batch.inputs["numbers"], codes).softmax(-1))[row].abs().sum() / 2
            assert whys[row].words().set_index("word").loc[column, "score"] == pytest.approx(float(apart), abs=1e-6)


def test_a_row_has_its_own_gradient_and_not_what_it_did_to_others():
    subject = made("saint")
    model = subject.model.double().eval()
    batch = subject.encode(FRAME)
    traced = regard.trace(subject, batch, gradients=True, of="logit")
    vectors = Entrance(subject, batch).vectors["rows"]
    empty = replace(batch, inputs={name: torch.zeros_like(cells) for name, cells in batch.inputs.items()})
    nothing = Entrance(subject, empty).vectors["rows"]
    entered = {row: why.scores for row, why in enumerate(regard.explain(subject, FRAME, method="gradient", of="logit"))}
    seen = []
    hooks = [block.out.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for block in model.blocks]
    output = model(*batch.inputs.values())
    for hook in hooks:
        hook.remove()
    for row in range(SIZE):
        score = output[row, traced.target[row]]
        for place in (0, 2):  # example row (head channel), attention over columns
            (slope,) = torch.autograd.grad(score, [seen[place]], retain_graph=True)
            head, _, width = (values := traced.sites[place].source.values)[row].shape
            apart = slope[row].unflatten(-1, (head, width)).transpose(0, 1) @ values[row].transpose(-1, -2)
            assert torch.allclose(traced.sites[place].gradients()[row], apart, atol=1e-10)
        leaf = vectors.clone().requires_grad_()
        (slope,) = torch.autograd.grad(Entrance(subject, batch).run({"rows": leaf})[row, traced.target[row]], [leaf])
        assert np.allclose(entered[row], (slope * (vectors - nothing))[row].sum(-1).abs().numpy(), atol=1e-6)
    assert not torch.allclose(slope[0], torch.zeros_like(slope[0]))  # others do move it


def test_rollout_multiplies_the_attention_over_columns_only():
    subject = made("saint")
    traced = regard.trace(subject, FRAME)
    assert [site.kind for site in traced.sites] == ["self", "samples", "self", "samples"]
    for row, why in enumerate(regard.explain(subject, FRAME, method="rollout")):
        product_ = torch.eye(6, dtype=torch.float64)
        for site in (traced.sites[0], traced.sites[2]):
            product_ = (torch.eye(6) / 2 + site.weights()[row].double().mean(0) / 2) @ product_
        assert np.allclose(why.scores, product_.mean(0), atol=1e-6)  # all rows are read
        assert why.check["between_examples"] == ["blocks.1", "blocks.3"]
        assert "attention over samples is left out" in why.caption
    with pytest.raises(errors.OptionError, match="start_layer=3: from there on attention is over samples only"):
        regard.explain(subject, FRAME, method="rollout", start_layer=3)


def test_which_other_rows_a_row_looked_at():
    subject = tabular(saint("samples"), SCHEMA)
    model, cells = subject.model.double().eval(), SCHEMA.encode(FRAME)
    seen = []

    def look(block, args):
        x = block.before_attention(args[0])[0, 0]  # example (row channel)
        query, key, _ = block.qkv(x).unflatten(-1, (3, 4, 64)).unbind(1)
        weights = torch.einsum("ehc,fhc->hef", query, key) / 8
        seen.append(weights.softmax(-1).mean(0))

    hooks = [block.register_forward_pre_hook(look) for block in model.blocks]
    with torch.no_grad():
        model(torch.tensor(cells.numbers).double(), torch.tensor(cells.codes))
    for hook in hooks:
        hook.remove()
    expected = torch.stack(seen).mean(0)
    for row in (0, 4):
        found = looked_at(subject, FRAME, row)
        assert np.allclose(found["weight"].sort_index(), expected[row], atol=1e-9)
        assert found["weight"].is_monotonic_decreasing
        assert found["weight"].sum() == pytest.approx(1)
        assert found.index[found["itself"]].tolist() == [row]
        assert found["age"].sort_index().equals(FRAME["age"])
    assert looked_at(subject, FRAME, -1).equals(looked_at(subject, FRAME, SIZE - 1))


def test_who_looks_at_nobody_else():
    with pytest.raises(errors.NotServed, match="looks at no other rows"):
        looked_at(made("ft"), FRAME, 0)
    with pytest.raises(errors.InputError, match="a single row"):
        looked_at(made("saint"), FRAME[:1], 0)
    with pytest.raises(errors.InputError, match="frame has a column 'weight'"):
        looked_at(made("saint"), FRAME.assign(weight=1), 0)
    with pytest.raises(errors.NoSuchPart, match="row=9 is not there"):
        looked_at(made("saint"), FRAME, 9)
    with pytest.raises(errors.NotServed, match="all attention of this model is over samples"):
        regard.explain(tabular(saint("samples"), SCHEMA), FRAME, method="rollout")


# --- models that the user states ---------------------------------------------------------------------------------------


class Own(nn.Module):
    """Rows: age and hours together, job twice, sex, and a last one that is read; rank passes by."""

    def __init__(self, classes=2):
        super().__init__()
        self.numbers, self.codes = nn.Linear(2, 8), nn.Embedding(8, 8)
        self.last, self.head = nn.Parameter(torch.randn(8)), nn.Linear(9, classes)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, numbers, codes):
        job, sex = self.codes(codes[:, 0]), self.codes(codes[:, 1] + 5)
        rows = [self.numbers(numbers), job, -job, sex, self.last.expand(len(codes), -1)]
        state = self.layer(torch.stack(rows, 1))[:, -1]
        return self.head(torch.cat([state, codes[:, 2:].to(state)], 1))


TOKENS = [("age", "hours"), "job", "job", "sex", None]


def own(model=None, **options):
    stated = {"forward": lambda m, numbers, codes: m(numbers, codes), "tokens": TOKENS, "readout": "last"}
    return tabular(model or Own(), FRAME, **{**stated, **options})


def test_columns_may_share_a_row_and_have_several():
    subject = own()
    assert subject.features.words == ("age + hours", "job", "sex", "rank")
    assert subject.features.tokens == ("age + hours", "job", "job", "sex", "[CLS]")
    assert subject.features.rows_of_words == ((0,), (1, 2), (3,), ())
    assert subject.features.absent == ("rank",)
    why = regard.explain(subject, FRAME, method="raw")[0]
    table = why.words()
    assert table["word"].tolist() == ["age + hours", "job", "sex", "rank", "[CLS]"]
    assert table["score"].isna().tolist() == [False, False, False, True, False]
    assert table["score"].sum() == pytest.approx(1)
    assert "rank (no row of the model's attention stands for it)" in why.caption
    gone = subject.without(subject.encode(FRAME), torch.tensor([[True, False, False, False, False]] * SIZE), "mask")
    assert gone.inputs["numbers"].abs().sum() == 0
    assert torch.equal(gone.inputs["codes"], subject.encode(FRAME).inputs["codes"])


def test_a_rationale_is_found_by_the_names_of_columns():
    marked = (False, False, True, False, True)
    data = [regard.data.Example(row, rationale=marked) for row in FRAME.to_dict("records")]
    compared = regard.compare(own(), regard.data.Dataset.of(data), methods=["raw"])
    assert all(truth.tolist() == [True, False, False] for truth in compared.numbers.truth)


def test_a_wrong_statement_about_the_last_row_is_found():
    with pytest.raises(errors.ReadoutMismatch, match="moves with rows 4"):
        regard.trace(own(tokens=[None, ("age", "hours"), "job", "job", "sex"], readout="first"), FRAME)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"tokens": None}, errors.SubjectError, "test_tabular.Own is not known: pass tokens= as well"),
        ({"tokens": ["age", None]}, errors.NoAttentionFound, "its 5 keys are not rows of the input, which has 2"),
        ({"tokens": ["ages", None]}, errors.OptionError, "'ages' is no column of the schema. Did you mean 'age'"),
        ({"tokens": [("age", "hours"), "age"]}, errors.OptionError, "'age' shares a row with others in one place"),
        ({"tokens": [None, None]}, errors.OptionError, "name no column"),
        ({"readout": "middle"}, errors.OptionError, "readout='middle'"),
        ({"readout": 7}, errors.OptionError, "readout=7"),
        ({"forward": lambda m, numbers, codes: m(codes, numbers)}, errors.SubjectError, "cannot be called with"),
        ({"forward": lambda m, numbers, codes: 3}, errors.SubjectError, "forward returned int"),
        ({"model": "a path"}, errors.SubjectError, "'a path' is a str"),
        ({"special": "hide"}, errors.OptionError, "special='hide'"),
    ],
)  # fmt: skip
def test_each_wrong_statement_has_its_message(options, kind, said):
    with pytest.raises(kind) as problem:
        regard.trace(own(**options), FRAME)
    assert said in str(problem.value)


@pytest.mark.parametrize("name", ["ft", "tab", "saint"])
def test_a_model_of_another_table(name):
    for frame in (FRAME.drop(columns="age"), FRAME.assign(job=None, sex=FRAME["job"], more=1).drop(columns="job")):
        with pytest.raises(
            errors.SubjectError, match=r"takes 2 numbers and categories of \[5, 3, 4\] codes; the schema"
        ):
            tabular(MODELS[name](), frame)
    less = FRAME.drop(columns="age")  # forward= may make of it what the model takes
    padded = tabular(ft(), less, forward=lambda model, numbers, codes: model(numbers.expand(-1, 2), codes),
                     tokens=[None, "hours", "hours", "job", "sex", "rank"])  # fmt: skip
    assert regard.explain(padded, less, method="raw")[0].words()["word"].tolist()[1:] == list(less.columns)
    with pytest.raises(errors.SubjectError, match="cannot be called with 2 numbers and 3 categories of"):
        own(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("classes", "labels", "output", "kind"),
    [(1, None, None, "regression"), (2, None, None, "softmax"), (1, ["no", "yes"], None, "binary"),
     (2, ["no", "yes"], None, "softmax"), (1, ["price"], None, "regression"), (2, ["a", "b"], "sigmoid", "sigmoid")],
)  # fmt: skip
def test_what_the_output_is_follows_from_its_width_and_labels(classes, labels, output, kind):
    subject = own(Own(classes), labels=labels, output=output)
    assert subject.head.kind == kind
    assert regard.explain(subject, FRAME, method="grad_rollout")[0].target in (labels or ["0", "1"])


def test_a_readout_may_be_an_array():
    assert regard.trace(own(readout=np.array([0, 0, 0, 0, 1.0])), FRAME).check.readout == "measured"


def test_chance_draws_for_rows_also_where_all_columns_are_categories():
    subject = tabular(TabTransformer(0, SCHEMA.cardinalities, 2), FRAME[[*SCHEMA.categories]])
    found = {tuple(why.scores.tolist()) for why in regard.explain(subject, FRAME, method="random")}
    assert len(found) == len(FRAME[[*SCHEMA.categories]].drop_duplicates())


# --- rows in ---------------------------------------------------------------------------------------------------------


class Polars:
    """As much of another library's frame as is asked for."""

    def to_pandas(self):
        return FRAME


@pytest.mark.parametrize(
    "inputs",
    [FRAME.to_dict("records"), Polars(), SCHEMA.encode(FRAME), FRAME[FRAME.columns[::-1]].assign(more=1)],
    ids=["mappings", "polars", "encoded", "another order"],
)
def test_rows_come_in_many_ways(inputs):
    subject = made("ft")
    expected = regard.explain(subject, FRAME, method="average")
    found = regard.explain(subject, inputs, method="average", batch_size=4)
    assert np.allclose([why.scores for why in found], [why.scores for why in expected], atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "kind", "said"),
    [
        ([], errors.EmptyInput, "no "),
        (FRAME[:0], errors.EmptyInput, "0 rows"),
        (["a text"], errors.InputError, "inputs[0]='a text' is no row"),
        ([{"age": 3}], errors.InputError, "inputs[0] has no 'job'. Pass None for a cell that is missing"),
        (FRAME.drop(columns="sex"), errors.InputError, "'sex'"),
        (FRAME.assign(age="old"), errors.InputError, "has the text 'old'"),
        (7, errors.InputError, "inputs is a int"),
    ],
)
def test_each_bad_input_has_its_message(inputs, kind, said):
    with pytest.raises(kind) as problem:
        regard.explain(made("ft"), inputs, method="average")
    assert said in str(problem.value)


def test_as_many_rows_as_columns_are_not_taken_for_one_another():
    for name in ("ft", "tab", "saint columns", "frame tab"):
        subject = made(name)
        some = len(subject.features.rows)
        together = regard.explain(subject, FRAME[:some], method="rollout")
        alone = [regard.explain(subject, FRAME[place : place + 1], method="rollout")[0] for place in range(some)]
        assert np.allclose([why.scores for why in together], [why.scores for why in alone], atol=1e-6)


def test_the_model_is_afterwards_as_it_was():
    model = saint().train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    subject = tabular(model, SCHEMA)
    looked_at(subject, FRAME, 0)
    assert subject.mixes
    assert model.training
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert repr(subject) == "TabularSubject(SAINT)"
