"""How the tabular transformers that are known by name are called, and which column each of their rows stands for.

They are told by the names of their class and package: no package is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from regard.data.schema import Schema, text_of
from regard.errors import SubjectError

Token = str | tuple[str, ...] | None  # a column, columns that share a row, or a special row such as [CLS]
Reading = Literal["first", "last", "mean", "pool"] | int | Sequence[float]
Forward = Callable[[Any, Tensor, Tensor], Tensor]
ONLY_CATEGORIES = "the model attends to categories only; numbers join after its attention"


@dataclass(frozen=True)
class Adapter:
    """What must be known of a model.

    Args:
        forward: ``forward(model, numbers, codes)`` gives ``(example, class)``.
        tokens: for each row of attention its column.
        readout: which rows the prediction is read from.
        reason: why columns without a row have none.
        takes: how many numbers, and how many codes of each category; None: that is found out otherwise.
    """

    forward: Forward
    tokens: tuple[Token, ...]
    readout: Reading
    reason: str = ""
    takes: tuple[int, tuple[int, ...]] | None = None


def adapter_for(model: Any, schema: Schema) -> Adapter | None:
    """That of a model which is known, or whose parent is."""
    for kind in type(model).__mro__:
        make = KNOWN.get((kind.__module__.split(".")[0], kind.__name__))
        if make is not None:
            return make(model, schema)
    return None


def unwrapped(model: Any) -> Any:
    """The module itself, of what holds it together with how its data was prepared."""
    held = type(model).__module__.split(".")[0] == "pytorch_tabular" and hasattr(model, "datamodule")
    return model.model if held else model


@dataclass(frozen=True, eq=False)
class Translation:
    """From the numbers and codes of a schema to those that a model was trained with.

    Args:
        numbers: which numbers of the schema, in the order of the model.
        scaling: ``(2, number)``, in the order of the model: what a standardised number is multiplied by, and then what
            is added to it.
        codes: which categories of the schema, in the order of the model.
        tables: of each category, in the order of the model, its code for each of the schema's.
    """

    numbers: list[int]
    scaling: Tensor
    codes: list[int]
    tables: list[Tensor]

    def __call__(self, numbers: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """``(example, number)`` and ``(example, category)``."""
        factor, shift = self.scaling.to(numbers.device)
        own = [table.to(codes.device)[codes[:, place]] for table, place in zip(self.tables, self.codes, strict=True)]
        whole = torch.stack(own, 1) if own else codes
        return (numbers[:, self.numbers].double() * factor + shift).to(numbers.dtype), whole


def _translation(
    schema: Schema, numbers: Sequence[str], codes: Sequence[str], known: Sequence[Mapping[str, int]],
    missing: Sequence[int], scaled: Sequence[tuple[float, float]],
) -> Translation:  # fmt: skip
    """Made of the model's columns, its codes of each category by name and where it is missing, its means and scales."""
    for kind, asked, there in (("number", numbers, schema.numbers), ("category", codes, schema.categories)):
        if odd := sorted(set(asked) ^ set(there)):
            raise SubjectError(
                f"schema: {odd} are not of kind {kind} in both the model and the schema. Learn the schema from the "
                "columns that the model was trained on, with categories= if some of them look like numbers."
            )
    columns = {column.name: column for column in schema.columns}
    tables = [
        torch.tensor([none, *(places.get(category, none) for category in columns[name].categories)])
        for name, places, none in zip(codes, known, missing, strict=True)
    ]
    own = zip((columns[name] for name in numbers), scaled, strict=True)
    pairs = [(one.scale / scale, (one.center - center) / scale) for one, (center, scale) in own]
    scaling = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).T
    places = [schema.numbers.index(name) for name in numbers], [schema.categories.index(name) for name in codes]
    return Translation(places[0], scaling, places[1], tables)


def must_take(model: Any, known: Adapter, schema: Schema) -> None:
    """Refuse a model of another table: torch would run many of them all the same, on other columns' weights."""
    if known.takes is None:
        return
    numbers, cardinalities = known.takes
    if (numbers, cardinalities) != (len(schema.numbers), schema.cardinalities):
        raise SubjectError(
            f"model: {type(model).__name__} takes {numbers} numbers and categories of {list(cardinalities)} codes; the "
            f"schema has {len(schema.numbers)} and {list(schema.cardinalities)} (code 0: missing or never seen). Pass "
            "the columns that it was trained on, or forward= if its codes are others."
        )


def _rtdl(model: Any, schema: Schema) -> Adapter:
    """FT-Transformer of rtdl_revisiting_models: [CLS], numbers, categories."""
    tables = () if model.cat_embeddings is None else model.cat_embeddings.embeddings
    numbers = 0 if model.cont_embeddings is None else len(model.cont_embeddings.weight)
    takes = numbers, tuple(one.num_embeddings for one in tables)
    return Adapter(_called_or_none, (None, *schema.numbers, *schema.categories), "first", takes=takes)


def _tabtransformer(model: Any, schema: Schema) -> Adapter:
    """Ours: categories; all of their states are read."""
    return Adapter(_called, schema.categories, "mean", ONLY_CATEGORIES, model.takes)


def _saint(model: Any, schema: Schema) -> Adapter:
    """Ours: [CLS], numbers, categories. Where it looks at other rows it mixes the columns of each: all are read."""
    readout: Reading = "first" if model.attention == "columns" else "mean"
    return Adapter(_called, (None, *schema.numbers, *schema.categories), readout, takes=model.takes)


def _frame_ft(model: Any, schema: Schema) -> Adapter:
    """FT-Transformer of pytorch-frame: [CLS], numbers, categories."""
    encoders = dict(model.encoder.encoder_dict.items())
    return _frame(schema, model.encoder.col_names_dict, encoders.get("categorical"), both=True)


def _frame_tab(model: Any, schema: Schema) -> Adapter:
    """TabTransformer of pytorch-frame: categories; all of their states are read."""
    return _frame(schema, model.col_names_dict, getattr(model, "cat_encoder", None), both=False)


def _frame(schema: Schema, names: Any, encoder: Any, *, both: bool) -> Adapter:
    """A model of pytorch-frame, which takes raw numbers, and has codes of its own: −1 is missing."""
    kinds = {kind.value: list(some) for kind, some in names.items()}
    numbers, codes = kinds.pop("numerical", []), kinds.pop("categorical", [])
    if kinds:
        raise SubjectError(
            f"the model has columns of kind {', '.join(kinds)}. Numbers and categories are served; for others pass "
            "forward=, tokens= and readout=."
        )
    counts = (
        [next(one for key, one in stats.items() if key.name == "COUNT") for stats in encoder.stats_list]
        if codes
        else []
    )
    known = [{text_of(cell): code for code, cell in enumerate(cells)} for cells, _ in counts]
    own = _translation(schema, numbers, codes, known, [-1] * len(codes), [(0.0, 1.0)] * len(numbers))
    forward = partial(_framed, own=own, names=(numbers, codes))
    if both:
        return Adapter(forward, (None, *numbers, *codes), "first")
    return Adapter(forward, tuple(codes), "mean", ONLY_CATEGORIES)


def _framed(
    model: Any, numbers: Tensor, codes: Tensor, *, own: Translation, names: tuple[list[str], list[str]]
) -> Tensor:
    """Called with pytorch-frame's own record of a table."""
    package = import_module("torch_frame")
    cells = zip((package.numerical, package.categorical), own(numbers, codes), names, strict=True)
    some = [(kind, tensor, columns) for kind, tensor, columns in cells if columns]
    record = package.TensorFrame(
        {kind: tensor for kind, tensor, _ in some}, {kind: columns for kind, _, columns in some}
    )
    return model(record)  # type: ignore[no-any-return]


def _tabular_ft(model: Any, schema: Schema) -> Adapter:
    """FT-Transformer of pytorch_tabular: numbers, categories, [CLS]."""
    return Adapter(_by_name, (*schema.numbers, *schema.categories, None), "last")


def _tabular_tab(model: Any, schema: Schema) -> Adapter:
    """TabTransformer of pytorch_tabular: categories; all of their states are read."""
    return Adapter(_by_name, schema.categories, "mean", ONLY_CATEGORIES)


def _tabular_whole(whole: Any, schema: Schema) -> Adapter | None:
    """A TabularModel of pytorch_tabular, which has the codes and the scales that its model was trained with."""
    known = adapter_for(whole.model, schema)
    data = whole.datamodule
    numbers, codes = (list(getattr(whole.config, f"{kind}_cols") or []) for kind in ("continuous", "categorical"))
    if known is None or data is None or data.continuous_transform is not None:
        raise SubjectError(
            "model: of pytorch_tabular's TabularModel fitted FT-Transformers and TabTransformers are served, without "
            "continuous_feature_transform. For others pass its .model, and forward=, tokens= and readout=."
        )
    maps = [data.categorical_encoder._mapping[name]["value"] for name in codes]
    places = [{text_of(cell): int(code) for cell, code in one.items()} for one in maps]
    missing = [one.get("0", 0) for one in places]  # it calls what is missing 0 before it gives codes
    scaler = data.scaler
    scaled = [(0.0, 1.0)] * len(numbers) if scaler is None else [*zip(scaler.mean_, scaler.scale_, strict=True)]
    own = _translation(schema, numbers, codes, places, missing, scaled)
    tokens = (*numbers, *codes, None) if None in known.tokens else tuple(codes)
    return replace(known, forward=partial(_by_name, own=own), tokens=tokens)


def _called(model: Any, numbers: Tensor, codes: Tensor) -> Tensor:
    return model(numbers, codes)  # type: ignore[no-any-return]


def _called_or_none(model: Any, numbers: Tensor, codes: Tensor) -> Tensor:
    given = [one if one.shape[1] else None for one in (numbers, codes)]
    return model(*given)  # type: ignore[no-any-return]


def _by_name(model: Any, numbers: Tensor, codes: Tensor, *, own: Translation | None = None) -> Tensor:
    numbers, codes = (numbers, codes) if own is None else own(numbers, codes)
    return model({"continuous": numbers, "categorical": codes})["logits"]  # type: ignore[no-any-return]


KNOWN: dict[tuple[str, str], Callable[[Any, Schema], Adapter | None]] = {
    ("rtdl_revisiting_models", "FTTransformer"): _rtdl,
    ("regard", "TabTransformer"): _tabtransformer,
    ("regard", "SAINT"): _saint,
    ("torch_frame", "FTTransformer"): _frame_ft,
    ("torch_frame", "TabTransformer"): _frame_tab,
    ("pytorch_tabular", "FTTransformerModel"): _tabular_ft,
    ("pytorch_tabular", "TabTransformerModel"): _tabular_tab,
    ("pytorch_tabular", "TabularModel"): _tabular_whole,
}
