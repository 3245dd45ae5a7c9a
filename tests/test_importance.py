"""Global importances against means over single explanations, written out; their bootstrap, ranks and pictures."""

from __future__ import annotations

import weakref

import numpy as np
import pandas as pd
import pytest
import torch
from rtdl_revisiting_models import FTTransformer
from scipy import stats

import regard
from regard import errors
from regard.data.schema import Schema
from regard.importance import METHODS, Importance, feature_importance, over_seeds
from regard.references import Reference
from regard.subjects.tabular import tabular

NUMBERS = ["age", "hours", "gain"]


def table(rows: int = 60) -> pd.DataFrame:
    lots = np.random.default_rng(0)
    frame = pd.DataFrame({name: lots.normal(size=rows) for name in NUMBERS})
    frame.insert(1, "job", lots.choice(["clerk", "cook", "pilot"], rows))
    return frame


def ft_transformer(frame: pd.DataFrame, outputs: int = 2, **options):
    torch.manual_seed(3)
    schema = Schema.of(frame)
    model = FTTransformer(
        n_cont_features=len(schema.numbers), cat_cardinalities=[*schema.cardinalities], d_out=outputs, n_blocks=2,
        d_block=16, attention_n_heads=4, attention_dropout=0.0, ffn_d_hidden_multiplier=2, ffn_dropout=0.0,
        residual_dropout=0.0,
    )  # fmt: skip
    for weights in model.parameters():  # its own begin with uniform attention
        torch.nn.init.normal_(weights, std=0.4)
    return tabular(model.eval().double(), schema, **options)


@pytest.fixture(scope="module")
def subject():
    return ft_transformer(table())


@pytest.fixture(scope="module")
def found(subject):
    return feature_importance(subject, table(), draws=50, seed=4)


def attention(model, numbers, codes):
    """Of each block the weights (head, query, key) of one row, and the logits; recomputed from its own layers."""
    parts = [model.cls_embedding((1,)), model.cont_embeddings(numbers), model.cat_embeddings(codes)]
    x, maps = torch.cat(parts, 1), []
    blocks = model.backbone.blocks
    for place, block in enumerate(blocks):
        last = place + 1 == len(blocks)
        y = block["attention_normalization"](x) if "attention_normalization" in block else x
        module = block["attention"]
        q, k, v = module.W_q(y[:, :1] if last else y), module.W_k(y), module.W_v(y)
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (q, k, v))
        weights = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)
        weights.retain_grad()
        maps.append(weights)
        mixed = module.W_out((weights @ v).transpose(1, 2).flatten(2))
        x = (x[:, :1] if last else x) + mixed
        y = block["ffn_normalization"](x)
        x = x + block["ffn"](y)
    return maps, model.backbone.output(x[:, 0])


def literal(subject, frame) -> dict[str, np.ndarray]:
    """(row, column) of each method, from the definitions, in float64, in the order [CLS], numbers, categories."""
    model, cells = subject.model, subject.schema.encode(frame)
    scores: dict[str, list] = {}
    for number in range(len(frame)):
        numbers = torch.tensor(cells.numbers[[number]], dtype=torch.float64)
        maps, logits = attention(model, numbers, torch.tensor(cells.codes[[number]]))
        expected = model(numbers, torch.tensor(cells.codes[[number]]))
        torch.testing.assert_close(logits, expected)  # the oracle is the model
        logits[0].max().backward()
        model.zero_grad()
        first, second = (one[0].detach() for one in maps)
        one, both = torch.eye(5, dtype=torch.float64), [first.mean(0), second.mean(0)]
        gradients = [(one.grad[0] * one[0]).clamp_min(0).mean(0).detach() for one in maps]
        rows = {
            "average": torch.cat([first[:, 0], second[:, 0]]).mean(0),
            "first_layer reduce=column": both[0].sum(0),
            "first_layer reduce=diagonal": both[0].diagonal(),
            "rollout": (one[0] / 2 + both[1][0] / 2) @ (one + both[0]) / 2,
            "grad_rollout": (one[0] + gradients[1][0]) @ (one + gradients[0]),
        }
        for name, values in rows.items():
            scores.setdefault(name, []).append(values.numpy()[1:])
    return {name: np.array(some) for name, some in scores.items()}


def test_every_way_of_the_literature_against_its_definition(subject, found):
    oracle = literal(subject, table())
    order = [*NUMBERS, "job"]  # the model has numbers first
    assert [*found.means] == [*oracle]
    copies = np.random.default_rng(4).poisson(1.0, (60, 50))
    for name, scores in oracle.items():
        some = found.frame.query("method == @name").set_index("column").loc[order]
        np.testing.assert_allclose(some["value"], scores.mean(0), rtol=1e-9, err_msg=name)
        drawn = copies.T @ scores / copies.sum(0)[:, None]
        low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
        np.testing.assert_allclose(some["low"], low, rtol=1e-9)
        np.testing.assert_allclose(some["high"], high, rtol=1e-9)
        assert some["rank"].tolist() == stats.rankdata(-scores.mean(0)).tolist()
    assert found.columns == ("age", "job", "hours", "gain")
    assert found.rows == 60


def test_batches_chunks_and_streams_do_not_matter(subject, found):
    frame = table()
    for data, options in (
        (frame, {"batch_size": 7}),
        (iter([frame[:1], frame[1:33], frame[33:]]), {}),
        (frame.to_dict("records"), {"batch_size": 60}),
        (subject.schema.encode(frame), {"batch_size": 11}),
    ):
        again = feature_importance(subject, data, draws=50, seed=4, **options)
        for name, means in found.means.items():
            np.testing.assert_allclose(again.means[name], means, rtol=1e-9)
    other = feature_importance(subject, frame, draws=50, seed=5)
    assert (other.means["rollout"][1:] != found.means["rollout"][1:]).all()
    assert other.means["rollout"][0].tolist() == found.means["rollout"][0].tolist()


def test_nothing_is_kept_of_rows_that_have_passed(subject):
    seen: list[weakref.ref] = []

    def parts():
        for _ in range(6):
            assert sum(one() is not None for one in seen) <= 2  # the last, and the one that is left behind
            part = table(20)
            seen.append(weakref.ref(part))
            yield part

    assert feature_importance(subject, parts(), methods=["rollout"], draws=5).rows == 120


def test_the_subject_is_untouched(subject):
    subject.model.train()
    before = {name: weights.clone() for name, weights in subject.model.state_dict().items()}
    state = torch.random.get_rng_state()
    feature_importance(subject, table(8), draws=5)
    assert subject.model.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(weights, before[name]) for name, weights in subject.model.state_dict().items())
    assert all(weights.grad is None for weights in subject.model.parameters())
    subject.model.eval()


def test_columns_that_no_row_stands_for_are_absent():
    frame = table()
    schema = Schema.of(frame)
    torch.manual_seed(0)
    model = regard.models.TabTransformer(3, schema.cardinalities, 2, width=16, depth=2, heads=2)
    found = feature_importance(tabular(model.eval(), schema), frame, draws=10)
    wide = found.wide()
    assert wide.loc[NUMBERS].isna().all(axis=None)
    assert wide.loc["job"].notna().all()
    assert found.wide("rank").loc["job"].tolist() == [1.0] * len(wide.columns)
    assert [*found.absent] == NUMBERS
    assert "age" in found.note
    assert found.absent["age"] in found.note
    assert found.plot().values.shape == (1,)
    assert "–" in found.plot("methods").svg()
    with pytest.raises(errors.InputError, match="average gives all 1 columns the same number: it ranks none"):
        found.agreement(pd.Series([1.0, 2, 3, 4], index=frame.columns))


def test_methods_that_are_refused_are_listed_with_the_reason(subject):
    frame = table(12)
    schema = Schema.of(frame)
    torch.manual_seed(0)
    saint = regard.models.SAINT(3, schema.cardinalities, 2, attention="samples", width=8, depth=1, heads=2)
    with pytest.raises(errors.NotServed, match="over samples"):
        feature_importance(tabular(saint.eval(), schema), frame, methods=["rollout"], draws=5)
    mixed = feature_importance(tabular(saint.eval(), schema), frame, methods=["rollout", "leave_one_out"], draws=5)
    assert [*mixed.means] == ["leave_one_out"]
    assert "over samples" in mixed.refused["rollout"]
    assert "over samples" in mixed.note


def test_references_among_the_methods(subject):
    frame = table(20)
    methods = ["average", "leave_one_out", ("integrated_gradients", {"steps": 8}), "random"]
    found = feature_importance(subject, frame, methods=methods, draws=20)
    label = "integrated_gradients steps=8"
    for name, options in (("leave_one_out", {}), ("integrated_gradients", {"steps": 8})):
        whys = regard.explain(subject, frame, method=name, of="probability", **options)
        sizes = [np.abs(why.words().set_index("word").loc[[*frame.columns], "score"]) for why in whys]
        known = found.wide()[label if options else name].loc[[*frame.columns]]
        np.testing.assert_allclose(known, np.mean(sizes, axis=0), rtol=1e-6)
    alike = found.agreement()
    assert [*zip(alike["method"], alike["reference"], strict=True)] == [
        (method, reference) for method in ("average", "random") for reference in ("leave_one_out", label)
    ]  # fmt: skip


def test_agreement_is_spearman_with_intervals_over_rows_and_repeats(found):
    repeats = np.random.default_rng(1).normal(size=(4, 3))
    groups = {name: (name,) for name in found.columns}
    held = Reference("permutation", groups, repeats, 0.8, {})
    alike = found.agreement(held).set_index("method")
    times = np.random.default_rng(4).multinomial(3, [1 / 3] * 3, 50)
    for name, means in found.means.items():
        drawn = [
            stats.spearmanr(means[1 + draw], (repeats * times[draw]).sum(1)).statistic for draw in range(50)
        ]  # fmt: skip
        assert alike.loc[name, "spearman"] == pytest.approx(stats.spearmanr(means[0], repeats.mean(1)).statistic)
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert alike.loc[name, "low"] == pytest.approx(low)
        assert alike.loc[name, "high"] == pytest.approx(high)
    own = found.agreement("rollout")
    assert "rollout" not in set(own["method"])
    assert own["spearman"].between(-1, 1).all()
    beside = found.beside(held)
    assert [*beside.wide().columns] == [*found.means, "permutation"]
    assert beside.agreement()["spearman"].tolist() == alike["spearman"].tolist()
    assert beside.frame.query("method == 'permutation'")["value"].is_monotonic_decreasing


def test_groups_are_summed_and_must_fit(found):
    groups = {"person": ("age", "job"), "hours": ("hours",), "gain": ("gain",)}
    alike = found.agreement(Reference("grouped", groups, np.array([[3.0], [2.0], [1.0]]), 1.0, {}))
    assert alike["columns"].tolist() == [3] * 5
    together = found.grouped(groups)
    means, parts = together.means["rollout"], found.means["rollout"]
    np.testing.assert_allclose(means[:, 0], parts[:, :2].sum(1))
    np.testing.assert_allclose(means[:, 1:], parts[:, 2:])
    assert together.columns == ("person", "hours", "gain")
    with pytest.raises(errors.InputError, match=r"\['gain', 'hours'\] are not once"):
        found.grouped({"person": ("age", "job")})
    with pytest.raises(errors.InputError, match=r"\['age'\] are not once"):
        found.grouped({"one": ("age", "job"), "other": ("age", "hours", "gain")})


def test_columns_that_share_a_row_are_one():
    frame = table()
    whole = ft_transformer(frame)
    tokens = [None, ("age", "hours"), ("age", "hours"), "gain", "job"]
    shared = tabular(whole.model, whole.schema, tokens=tokens)
    found, apart = (feature_importance(one, frame, methods=["rollout"], draws=5) for one in (shared, whole))
    assert found.columns == ("age + hours", "job", "gain")
    np.testing.assert_allclose(
        found.wide().loc["age + hours"], apart.wide().loc[["age", "hours"]].sum(), rtol=1e-9
    )  # fmt: skip
    held = Reference("r", {"age + hours": ("age", "hours"), "job": ("job",), "gain": ("gain",)}, np.tri(3), 1.0, {})
    assert found.agreement(held)["columns"].tolist() == [3]
    with pytest.raises(errors.InputError, match=r"groups={'a \+ b'"):
        found.agreement(pd.Series([1.0, 2, 3, 4], index=frame.columns))


def test_frame_and_wide_are_sorted(found):
    frame = found.frame
    assert [*frame.columns] == ["column", "method", "value", "low", "high", "rank"]
    for _, some in frame.groupby("method"):
        assert some["rank"].is_monotonic_increasing
        assert some["value"].is_monotonic_decreasing
        assert ((some["low"] <= some["value"]) & (some["value"] <= some["high"])).all()
    ranks = found.wide("rank")
    assert ranks.mean(axis=1).is_monotonic_increasing
    assert [*ranks.columns] == [*found.means]
    assert len(ranks) == 4
    assert "Only ranks are meaningful" in repr(found)


def test_pictures(found, tmp_path):
    bars = found.plot()
    assert bars.title == "Columns by average"
    assert "Only ranks are meaningful" in bars.caption
    assert bars.values.tolist() == found.frame.query("method == 'average'")["value"].tolist()
    assert found.plot("rollout", top=2).values.shape == (2,)
    drawn = found.plot("methods")
    assert drawn.values.shape == (4, 5)
    svg = drawn.svg()
    assert all(f">{name}<" in svg for name in (*found.columns, "grad_rollout"))
    assert drawn.save(tmp_path / "methods.png").stat().st_size > 1000
    assert "<svg" in found._repr_html_()
    with pytest.raises(errors.OptionError, match="what='rolout' is not known. Did you mean 'rollout'"):
        found.plot("rolout")


def test_the_attention_of_one_row_as_a_map_and_as_lines(subject):
    frame = table(3)
    one = regard.explain(subject, frame[:1], method="raw", layer=0, matrix=True)[0]
    drawn = one.plot()
    assert drawn.values.shape == (5, 5)
    assert all(name in drawn.svg() for name in ("0: [CLS]", "1: age", "4: job"))
    heads = regard.explain(subject, frame, method="raw", per_layer=True, per_head=True)
    lines = regard.Explanation.mean(heads).plot("lines")
    assert lines.values.shape == (2, 4, 5)
    svg = lines.svg()
    assert all(f">{text}<" in svg for text in ("layer 0", "layer 1", "head 0", "head 3", "1: age"))
    values = lines.values[1, 3]
    assert f"layer 1, head 3, 2: hours: {values[2]:.4g}" in svg
    layers = regard.explain(subject, frame[:1], method="raw", per_layer=True)[0].plot("lines")
    assert layers.values.shape == (2, 1, 5)
    assert ">all heads<" in layers.svg()
    last = regard.explain(subject, frame[:1], method="raw", matrix=True)[0]  # it computes the row that is read only
    assert (last.queries, last.scores.shape) == (("[CLS]",), (1, 5))


def test_over_seeds():
    pairs = {"method": ["a", "b"], "reference": ["r", "r"]}
    tables = [pd.DataFrame({**pairs, "spearman": both}) for both in ([0.1, 0.9], [0.3, 0.7], [0.2, np.nan])]
    found = over_seeds(tables).set_index("method")
    assert found["spearman"].tolist() == pytest.approx([0.2, 0.8])
    assert found["deviation"].tolist() == pytest.approx([0.1, np.std([0.9, 0.7], ddof=1)])
    assert found["n"].tolist() == [3, 2]
    assert found.loc["a", ["least", "most"]].tolist() == [0.1, 0.3]
    assert 0.1 <= found.loc["a", "low"] <= 0.2 <= found.loc["a", "high"] <= 0.3
    with pytest.raises(errors.EmptyInput, match="tables"):
        over_seeds([])


def test_three_rows_and_a_single_one(subject):
    three = feature_importance(subject, table(3), methods=["average"], draws=20)
    assert three.frame["low"].notna().all()
    one = feature_importance(subject, table(1), methods=["average"], draws=3)
    np.testing.assert_allclose(one.frame["value"], one.frame["high"])


def test_bad_input(subject, found):
    frame = table(4)
    for given, match in (
        ({"methods": []}, "methods is empty"),
        ({"methods": ["rolout"]}, "Did you mean 'rollout'"),
        ({"methods": [("raw", {"per_head": True})]}, "raw per_head=True: it does not give one number for each column"),
        ({"draws": 0}, "draws=0"),
        ({"batch_size": 0}, "batch_size=0"),
    ):
        with pytest.raises(errors.OptionError, match=match):
            feature_importance(subject, frame, **given)
    with pytest.raises(errors.EmptyInput, match="data holds no rows"):
        feature_importance(subject, iter([]))
    with pytest.raises(errors.SubjectError, match="not a subject"):
        feature_importance(subject.model, frame)
    with pytest.raises(errors.InputError, match="there is no reference"):
        found.agreement()
    with pytest.raises(errors.OptionError, match="references='permutation' is not known"):
        found.agreement("permutation")
    one = pd.Series(1.0, index=list(frame.columns))
    with pytest.raises(errors.InputError, match="'reference' is there already"):
        found.agreement(one, one * 2)
    with pytest.raises(errors.InputError, match="'rollout' is there already"):
        found.beside(one.rename("rollout"))
    with pytest.raises(errors.InputError, match="has 'age' more than once"):
        found.agreement(pd.Series([1.0, 2.0], index=["age", "age"]))
    with pytest.raises(errors.InputError, match="Pass a Series"):
        found.agreement([1, 2, 3, 4])
    text = regard.pooled(regard.models.toys.decisive())
    with pytest.raises(errors.InputError, match="do not all have the same features"):
        feature_importance(text, ["so good", "so so good"])


def test_defaults():
    assert [one if isinstance(one, str) else one[0] for one in METHODS] == [
        "average", "first_layer", "first_layer", "rollout", "grad_rollout",
    ]  # fmt: skip
    assert Importance.__doc__ is not None
    assert "Only ranks are meaningful" in Importance.__doc__
