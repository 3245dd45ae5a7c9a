"""Transformers on tables: rows of a frame in, names of columns out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from regard.attention.running import record, undisturbed
from regard.attention.tracing import trace
from regard.data.schema import Encoded, Schema, as_frame
from regard.errors import (
    EmptyInput,
    InputError,
    NoSuchPart,
    NotServed,
    OptionError,
    SubjectError,
    nearest,
    whole_numbers,
)
from regard.subjects import targets
from regard.subjects.adapters import Adapter, Forward, Reading, Token, adapter_for, must_take, unwrapped
from regard.subjects.module import ModuleSubject, module
from regard.subjects.tokens import described
from regard.types import JOIN, Batch, Features, How, Of, Score, Special, Targets

Output = Literal["softmax", "sigmoid", "binary", "regression", "embedding"]
NO_ROW = "no row of the model's attention stands for it"
CLS = "[CLS]"


@dataclass(frozen=True, eq=False)
class TabularSubject:
    """A transformer on a table. Made by `regard.tabular`."""

    inner: ModuleSubject
    schema: Schema
    features: Features
    columns: tuple[tuple[int, ...], ...]  # of each row of attention the columns that it stands for, by their numbers
    fill: Encoded  # what stands in for cells that are taken out
    name: str = ""  # of the model, or where it was loaded from
    unseen: Literal["unknown", "error"] = "unknown"  # what to do with categories that were never seen
    origin: ClassVar[How] = "mask"  # such a cell is where vectors are counted from

    __repr__ = described

    @property
    def model(self) -> nn.Module:
        """The model. It is never changed and never moved."""
        return self.inner.model

    @property
    def special(self) -> Special:
        """What explanations do with special rows."""
        return self.inner.special

    @property
    def head(self) -> targets.Head:
        """What the columns of the output are."""
        return self.inner.head

    @property
    def predicts(self) -> bool:
        """Whether the output has classes, or is a number."""
        return self.inner.predicts

    @cached_property
    def mixes(self) -> bool:
        """Whether rows of a batch look at each other: what is said of one then depends on which others there are."""
        one, other = self.fill, Encoded(self.fill.numbers + 1, (self.fill.codes + 1) % self.schema.cardinalities)
        with torch.no_grad(), undisturbed(self.model):
            alone = self.forward(self.encode(one))
            tape, both = record(self, self.encode(_stacked(one, other)))
        looks = any(entry.across for entry in tape.records)
        return looks or not torch.allclose(alone, both[:1], rtol=1e-3, atol=1e-5)

    def columns_of(self, table: Any) -> Encoded:
        """The cells of a table as numbers and codes; a frame, or a list of rows, each by the names of its columns."""
        if isinstance(table, Encoded):
            return table
        if isinstance(table, Mapping):
            table = [table]
        if isinstance(table, (list, tuple)):
            if not table:
                raise EmptyInput("inputs holds no rows.")
            for place, row in enumerate(table):
                if not isinstance(row, Mapping):
                    raise InputError(f"inputs[{place}]={str(row)[:80]!r} is no row: pass cells by name, as a dict.")
                if missing := [name for name in self.schema.names if name not in row]:
                    raise InputError(f"inputs[{place}] has no {missing[0]!r}. Pass None for a cell that is missing.")
            table = pd.DataFrame([dict(row) for row in table])
        return self.schema.encode(as_frame("inputs", table), unseen=self.unseen)

    def remarks(self, table: Any) -> list[str]:
        """What of a table the model cannot read."""
        return self.schema.remarks(table)

    def encode(self, inputs: Any) -> Batch:
        """A frame of pandas or polars, a list of rows as mappings, or what `Schema.encode` gave."""
        cells = self.columns_of(inputs)
        if not len(cells):
            raise EmptyInput("inputs holds no rows.")
        parameter = next((one for one in self.model.parameters() if one.is_floating_point()), torch.zeros(()))
        tensors = {
            "numbers": torch.as_tensor(cells.numbers).to(parameter),
            "codes": torch.as_tensor(cells.codes).to(parameter.device),
        }
        real = torch.ones(len(cells), len(self.columns), dtype=torch.bool, device=parameter.device)
        return Batch(tensors, real, (self.features,) * len(cells))

    def probe(self, batch: Batch) -> Batch:
        """The first two rows: attention between rows is none where there is a single one."""
        return batch.pick(range(min(2, len(batch))))

    def forward(self, batch: Batch) -> Tensor:
        """``(example, class)``."""
        return self.inner.forward(batch)

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch with something else in some columns: the mean, "missing", or what ``fill`` says.

        "mask" and "pad" are the same: a table has no padding.
        """
        if how not in ("mask", "pad"):
            raise NotServed(f"how={how!r}: a column of a table cannot be taken out. Use how='mask' or 'attention'.")
        taken = torch.zeros(len(batch), len(self.schema.columns), dtype=torch.bool, device=gone.device)
        for row, columns in enumerate(self.columns):
            taken[:, list(columns)] |= gone[:, row, None]
        inputs = dict(batch.inputs)
        kinds = [column.kind for column in self.schema.columns]
        for name, kind, instead in (("numbers", "number", self.fill.numbers), ("codes", "category", self.fill.codes)):
            those = taken[:, [place for place, one in enumerate(kinds) if one == kind]]
            inputs[name] = torch.as_tensor(instead).to(inputs[name]).where(those, inputs[name])
        return replace(batch, inputs=inputs)

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        return self.inner.score(output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: as it was stated."""
        return self.inner.readout(batch, score)


def tabular(
    model: Any,
    schema: Schema | pd.DataFrame,
    *,
    forward: Forward | None = None,
    tokens: Sequence[Token] | None = None,
    readout: Reading | None = None,
    labels: Sequence[str] | None = None,
    output: Output | None = None,
    special: Special = "keep",
    fill: Mapping[str, Any] | None = None,
) -> TabularSubject:
    """A transformer on a table as a subject: rows of a frame in, names of columns out.

    How a model is called, and which column each row of its attention stands for, is known for the FT-Transformer of
    rtdl_revisiting_models, `regard.models.TabTransformer` and `SAINT`, and for the FT-Transformer and TabTransformer of
    pytorch-frame and of pytorch_tabular (pass its `TabularModel`: it has the codes of its categories). For others you
    say so. Columns that no row stands for are absent in explanations: NaN, with the reason.

    Args:
        model: the module; never changed, never moved.
        schema: the columns, as `regard.data.schema.Schema` has learned them; or the frame that the model was trained
            on, without its target.
        forward: ``forward(model, numbers, codes)`` gives ``(example, class)``, from standardised numbers
            ``(example, number)`` and codes ``(example, category)``, each in the order of the schema.
        tokens: for each row of attention its column, a tuple of the columns that share it, or None for a special row
            such as [CLS]. A column may have several rows.
        readout: which rows the prediction is read from: "first", "last", "mean", a row, a weight for each row, "pool".
            It is checked against the model when it first runs.
        labels: names of the classes.
        output: what the columns of the output are; None: a regression if there is one column, otherwise classes; with
            two labels one column is a logit between them.
        special: what explanations do with special rows: "keep", "drop", or "renormalise" over the others.
        fill: by column, what stands in for cells that are taken out; others have the mean, or "missing".

    Example:
        >>> import pandas as pd, regard
        >>> frame = pd.DataFrame({"age": [20, 40, 60], "sex": ["f", "m", "f"], "job": ["a", "b", None]})
        >>> schema = regard.data.schema.Schema.of(frame)
        >>> model = regard.models.TabTransformer(1, schema.cardinalities, 2)
        >>> why = regard.explain(regard.tabular(model, schema), frame, method="rollout")[0]
        >>> why.words()["word"].tolist()
        ['age', 'sex', 'job']
        >>> why.features.absent  # it attends to categories only
        ('age',)
    """
    schema = schema if isinstance(schema, Schema) else Schema.of(schema)
    whole, model = model, unwrapped(model)
    if not isinstance(model, nn.Module):
        raise SubjectError(f"model={model!r} is a {type(model).__name__}, not a torch.nn.Module.")
    known = None if all(one is not None for one in (forward, tokens, readout)) else adapter_for(whole, schema)
    if forward is None and known is not None:
        must_take(model, known, schema)
    stated = _stated(model, known, forward, tokens, readout)
    features, columns = _features(schema, stated)
    names = [CLS if one is None else str(place) for place, one in enumerate(stated.tokens)]
    instead = _fill(schema, fill or {})

    def made(kind: Output) -> TabularSubject:
        inner = module(
            model, stated.forward, features=names, readout=stated.readout, special_features=sorted({*names} & {CLS}),
            labels=labels, output=kind, special=special,
        )  # fmt: skip
        return TabularSubject(inner, schema, features, columns, instead)

    width = _tried(made("embedding" if labels is None else "softmax"))
    if output is None:
        count = len(labels or ())
        output = "softmax" if width > 1 or count > 2 else "binary" if count == 2 else "regression"
    return made(output)


def looked_at(subject: TabularSubject, frame: Any, row: int) -> pd.DataFrame:
    """Which rows of a table did one of them look at? For models with attention over samples, such as SAINT.

    All rows run in one batch. Their weights, mean over heads and sites, sum to 1.

    Args:
        subject: made by `regard.tabular`.
        frame: the rows.
        row: the number of the one that looks.

    Returns:
        The rows in falling order of "weight", with their own columns after it; "itself" tells the one that looks.

    Example:
        >>> import pandas as pd, regard
        >>> from regard.subjects.tabular import looked_at
        >>> frame = pd.DataFrame({"age": [20, 40, 60], "sex": ["f", "m", "f"]})
        >>> subject = regard.tabular(regard.models.SAINT(1, [3], 2), frame)
        >>> looked_at(subject, frame, 0).columns.tolist()
        ['weight', 'itself', 'age', 'sex']
    """
    table = as_frame("frame", frame)
    (row,) = whole_numbers("row", row)
    if not -len(table) <= row < len(table):
        raise NoSuchPart(f"row={row} is not there: the frame has rows 0 to {len(table) - 1}.")
    if taken := {"weight", "itself"} & {*table.columns}:
        raise InputError(f"frame has a column {min(taken)!r}, as the answer has. Rename it.")
    if len(table) < 2:
        raise InputError("frame has a single row: there is no other that it could look at. Pass some more.")
    sites = [site for site in trace(subject, table).sites if site.kind == "samples"]
    if not sites:
        raise NotServed(f"{type(subject.model).__name__} looks at no other rows: it has no attention over samples.")
    weights = torch.stack([site.weights(rows=row)[0, :, 0].mean(0) for site in sites]).mean(0)
    found = table.assign(weight=weights.numpy(force=True), itself=np.arange(len(table)) == row % len(table))
    found = found[["weight", "itself", *table.columns]]
    return found.sort_values("weight", ascending=False, kind="stable")


def _stated(
    model: nn.Module, known: Adapter | None, forward: Forward | None, tokens: Sequence[Token] | None,
    readout: Reading | None,
) -> Adapter:  # fmt: skip
    """What the user says, and otherwise what is known of the model."""
    given: dict[str, Any] = {"forward": forward, "tokens": tokens, "readout": readout}
    given = {name: one for name, one in given.items() if one is not None}
    if known is None and (missing := [name for name in ("forward", "tokens", "readout") if name not in given]):
        raise SubjectError(
            f"{type(model).__module__}.{type(model).__qualname__} is not known: pass {', '.join(missing)}= as well. "
            "See help(regard.tabular)."
        )
    if tokens is not None:
        given |= {"tokens": tuple(tokens), "reason": NO_ROW}
    return replace(known, **given) if known is not None else Adapter(**given)


def _features(schema: Schema, stated: Adapter) -> tuple[Features, tuple[tuple[int, ...], ...]]:
    """What a person sees of a row of the table, and which columns each row of attention stands for.

    Columns that share a row are one word, since attention cannot tell them apart; it stands where the first one does.
    """
    groups = [() if one is None else (one,) if isinstance(one, str) else tuple(one) for one in stated.tokens]
    owner: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for name in group:
            if name not in schema.names:
                raise OptionError(f"tokens: {name!r} is no column of the schema.{nearest(name, schema.names)}")
            if owner.setdefault(name, group) != group:
                raise OptionError(f"tokens: column {name!r} shares a row with others in one place and not in another.")
    words = [*dict.fromkeys(owner.get(name, (name,)) for name in schema.names)]
    if not any(groups):
        raise OptionError(f"tokens={list(stated.tokens)!r} name no column: there is nothing to attribute to.")
    said = [JOIN.join(group) for group in words]
    features = Features(
        tuple(JOIN.join(group) if group else CLS for group in groups), tuple(range(len(groups))), tuple(said),
        tuple(words.index(group) if group else None for group in groups),
    )  # fmt: skip
    reason = stated.reason or NO_ROW if features.absent else ""
    places = tuple(tuple(schema.names.index(name) for name in group) for group in groups)
    return replace(features, reason=reason), places


def _fill(schema: Schema, fill: Mapping[str, Any]) -> Encoded:
    """One row: what stands in for cells that are taken out."""
    for name in fill:
        if name not in schema.names:
            raise OptionError(f"fill: {name!r} is no column of the schema.{nearest(name, schema.names)}")
    row = pd.DataFrame([{name: fill.get(name) for name in schema.names}])
    return schema.encode(row, unseen="error")


def _tried(subject: TabularSubject) -> int:
    """The number of columns of the output, for one row; refuses models that do not take the columns of the schema."""
    schema = subject.schema
    try:
        with torch.no_grad(), undisturbed(subject.model):
            output = subject.forward(subject.encode(subject.fill))
    except (SubjectError, NotServed):
        raise
    except Exception as problem:
        raise SubjectError(
            f"model: {type(subject.model).__name__} cannot be called with {len(schema.numbers)} numbers and "
            f"{len(schema.categories)} categories of {list(schema.cardinalities)} codes: {type(problem).__name__}: "
            f"{problem}. Is the schema that of the table it was trained on?"
        ) from problem
    return output.shape[1]


def _stacked(one: Encoded, other: Encoded) -> Encoded:
    return Encoded(np.concatenate([one.numbers, other.numbers]), np.concatenate([one.codes, other.codes]))
