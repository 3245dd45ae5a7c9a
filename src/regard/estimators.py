"""Tabular transformers as estimators of scikit-learn, that hand over what regard explains."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.schema import Schema
from regard.errors import InputError, NotAModel, OptionError, SubjectError, at_least_one
from regard.fitting import FORMAT, TabularEstimator, checked_target
from regard.memory import must_fit
from regard.models import SAINT, TabTransformer

log = logging.getLogger("regard")
ADVICE = "Use fewer columns or a smaller batch_size."


@dataclass(kw_only=True, eq=False, repr=False)
class _Classifier(ClassifierMixin, TabularEstimator):  # type: ignore[misc]
    """What the classifiers share."""

    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Learn the class of each row; with a held-out part, until it is recognised no better for a while."""
        frame = self._table(X, fitting=True)
        names = checked_target(y, len(frame), type(self).__name__)
        try:
            check_classification_targets(names)
            self.classes_, codes = np.unique(names, return_inverse=True)
        except TypeError as problem:
            raise InputError(f"y holds values of kinds that have no order: {problem}. Make them all texts.") from None
        if len(self.classes_) < 2:
            raise InputError(
                f"y holds one class only, {str(self.classes_[0])!r}: there is nothing to tell apart. Give rows of two."
            )
        weights = compute_class_weight(self.class_weight, classes=self.classes_, y=names)
        if not (weights > 0).all():
            raise OptionError(f"class_weight={self.class_weight!r} must be above 0. Leave out rows that do not count.")
        weight = torch.tensor(weights, dtype=torch.float32, device=self.device)

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output, target, weight)

        def accuracy(output: Tensor, target: Tensor) -> Tensor:
            counts = weight[target]
            return ((output.argmax(-1) == target) * counts).sum() / counts.sum()

        return self._learn(frame, torch.tensor(codes), outputs=len(self.classes_), loss=loss, quality=accuracy)

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """``(row, class)``, in the order of ``classes_``."""
        return self._predicted(X).double().softmax(-1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """The most probable class of each row."""
        best = self._predicted(X).argmax(-1).numpy()  # first: it says if nothing was fitted
        return np.asarray(self.classes_[best])


@dataclass(kw_only=True, eq=False, repr=False)
class _FTTransformer(TabularEstimator):
    """What the two FT-Transformers share: rtdl's model."""

    blocks: int = 3
    width: int | None = None

    def _model(self, outputs: int) -> nn.Module:
        try:
            import rtdl_revisiting_models as rtdl
        except ImportError:
            raise SubjectError("FT-Transformer comes with rtdl: pip install 'regard[tabular]'.") from None
        options = rtdl.FTTransformer.get_default_kwargs(at_least_one("blocks", self.blocks, 6))
        if self.width is not None:
            options |= {"d_block": at_least_one("width", self.width), "_is_default": False}
        if options["d_block"] % options["attention_n_heads"]:
            raise OptionError(f"width={self.width} must be a multiple of {options['attention_n_heads']}, its heads.")
        schema = self.schema_
        rows = 1 + len(schema.names)
        weights = (self.blocks, self.batch_size, options["attention_n_heads"], rows, rows)
        must_fit(f"attention over {rows - 1} columns", weights, advice=ADVICE)
        model: nn.Module = rtdl.FTTransformer(
            n_cont_features=len(schema.numbers), cat_cardinalities=[*schema.cardinalities], d_out=outputs, **options
        )
        return model

    def _groups(self, model: Any) -> Any:
        return model.make_parameter_groups()  # no decay of biases, norms and embeddings

    def _tables(self, model: Any) -> Sequence[Tensor]:
        return [one.weight for one in model.cat_embeddings.embeddings] if self.schema_.categories else []

    def _call(self, model: nn.Module, numbers: Tensor, codes: Tensor) -> Tensor:
        output: Tensor = model(*(x if x.shape[1] else None for x in (numbers, codes)))  # rtdl refuses empty ones
        return output


@dataclass(kw_only=True, eq=False, repr=False)
class FTTransformerClassifier(_Classifier, _FTTransformer):
    """FT-Transformer: every column becomes a vector, and [CLS] attends to all of them.

    Defaults are those of the paper: rtdl's default model, AdamW, early stopping. A binary task has two logits here.

    Args:
        blocks: 1 to 6; width and dropout follow from it as rtdl has them.
        width: channels of a column's state, a multiple of 8; None: rtdl's default for so many blocks.
        class_weight: how much each class counts, by its name; "balanced": by how rare it is.
        epochs: how often all data are seen, at most.
        patience: stop after so many epochs in which the held-out part has become no better.
        batch_size: rows in a step.
        learning_rate: of AdamW.
        weight_decay: of AdamW; not of biases, norms and embeddings.
        validation: share of the rows that is held out for early stopping; None: none, and all epochs are run. Means,
            scales and categories are those of all rows.
        categories: the columns that are no numbers; None: those of texts, categoricals and booleans.
        unseen: what `predict` does with a category that was not there at training: "unknown" treats it as missing.
        random_state: of the split, the weights, the order of rows and dropout; None: never the same.
        device: where it is trained and run.

    Attributes:
        classes_: the names of the classes.
        schema_: the columns. feature_names_in_: their names, if X had any.
        model_: the module. subject_: the same as `regard.explain` takes it.
        history_: a row for each epoch: its loss, and the held-out part's accuracy (of a regression: minus its RMSE).

    Columns of a frame are found by name, in any order. A missing number counts as the mean of its column. Missing
    categories have an embedding of their own, which unseen ones share; where none was missing at training, it is the
    mean of the others.

    Protocol: Gorishniy et al. 2021, `gorishniy2021revisiting`.

    Example:
        >>> table = pd.DataFrame({"size": [1.0, 2.0, 3.0, 4.0] * 5, "colour": ["red", "blue"] * 10})
        >>> estimator = FTTransformerClassifier(blocks=1, epochs=2).fit(table, ["small", "small", "big", "big"] * 5)
        >>> estimator.predict_proba(table).shape
        (20, 2)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class FTTransformerRegressor(RegressorMixin, _FTTransformer):  # type: ignore[misc]
    """FT-Transformer for numbers: options and attributes as those of `FTTransformerClassifier`.

    It learns (y − mean) / sd; `predict` undoes that. The subject's output is in sds.

    Example:
        >>> table = pd.DataFrame({"size": [1.0, 2.0, 3.0, 4.0] * 5})
        >>> FTTransformerRegressor(blocks=1, epochs=2).fit(table, [10.0, 20.0, 30.0, 40.0] * 5).predict(table).shape
        (20,)
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Learn the number of each row; with a held-out part, until its error falls no more for a while."""
        frame = self._table(X, fitting=True)
        given = checked_target(y, len(frame), type(self).__name__)
        try:
            numbers = given.astype(np.float64)
        except (TypeError, ValueError):
            raise InputError(
                f"y must hold numbers; it holds {str(given[0])!r}. For classes use a classifier."
            ) from None
        if not np.isfinite(numbers).all():
            raise InputError(f"y holds infinity in row {int(np.isinf(numbers).argmax())}.")
        self.target_mean_, self.target_sd_ = float(numbers.mean()), float(numbers.std())
        if not self.target_sd_ > 1e-12 * abs(self.target_mean_):
            log.warning("y is constant (%g): there is nothing to learn.", self.target_mean_)
            self.target_sd_ = 1.0
        target = torch.tensor((numbers - self.target_mean_) / self.target_sd_, dtype=torch.float32)

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output[:, 0], target)

        def minus_rmse(output: Tensor, target: Tensor) -> Tensor:
            return -loss(output, target).sqrt() * self.target_sd_

        return self._learn(frame, target, outputs=1, loss=loss, quality=minus_rmse)

    def predict(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """A number for each row, in the unit of y."""
        return self._predicted(X)[:, 0].double().numpy() * self.target_sd_ + self.target_mean_


@dataclass(kw_only=True, eq=False, repr=False)
class TabTransformerClassifier(_Classifier):
    """TabTransformer: attention over the categories; numbers join after it. See `regard.models.TabTransformer`.

    Other options and attributes are those of `FTTransformerClassifier`.

    Args:
        width: channels of a category's state.
        depth: how many blocks.
        heads: of attention.
        dropout: in each block.

    Example:
        >>> table = pd.DataFrame({"size": [1.0, 2.0, 3.0, 4.0] * 5, "colour": ["red", "blue"] * 10})
        >>> estimator = TabTransformerClassifier(depth=1, epochs=2).fit(table, [0, 0, 1, 1] * 5)
        >>> estimator.predict(table).shape
        (20,)
    """

    width: int = 32
    depth: int = 6
    heads: int = 8
    dropout: float = 0.1

    def _model(self, outputs: int) -> nn.Module:
        numbers, cardinalities = len(self.schema_.numbers), self.schema_.cardinalities
        weights = (self.depth, self.batch_size, self.heads, len(cardinalities), len(cardinalities))
        must_fit(f"attention over {len(cardinalities)} columns", weights, advice=ADVICE)
        sizes: dict[str, Any] = {name: getattr(self, name) for name in ("width", "depth", "heads", "dropout")}
        return TabTransformer(numbers, cardinalities, outputs, **sizes)


@dataclass(kw_only=True, eq=False, repr=False)
class SAINTClassifier(_Classifier):
    """SAINT: attention over columns and over the rows of a batch. See `regard.models.SAINT`.

    Other options and attributes are those of `FTTransformerClassifier`. Where it attends to other rows, a prediction
    depends on the rows that it is asked for together with: they go through the model in the order they are given,
    ``batch_size`` at a time.

    Args:
        attention: "columns", "samples" or "both".
        width: channels of a column's state.
        depth: how many blocks of each kind; None: 6 over columns alone, otherwise 1.
        heads: of attention.
        dropout: of feed-forward layers.

    Example:
        >>> table = pd.DataFrame({"size": [1.0, 2.0, 3.0, 4.0] * 5, "colour": ["red", "blue"] * 10})
        >>> estimator = SAINTClassifier(attention="columns", depth=1, epochs=2).fit(table, [0, 0, 1, 1] * 5)
        >>> estimator.predict(table).shape
        (20,)
    """

    attention: Literal["both", "columns", "samples"] = "both"
    width: int = 32
    depth: int | None = None
    heads: int = 8
    dropout: float = 0.1

    def _model(self, outputs: int) -> nn.Module:
        numbers, cardinalities = len(self.schema_.numbers), self.schema_.cardinalities
        names = ("attention", "width", "depth", "heads", "dropout")
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names}
        return SAINT(numbers, cardinalities, outputs, **sizes)


KINDS = {
    kind.__name__: kind
    for kind in (FTTransformerClassifier, FTTransformerRegressor, TabTransformerClassifier, SAINTClassifier)
}


def load(folder: str | Path, *, device: str | None = None) -> Any:
    """The estimator that `save` wrote into a folder, fitted.

    Args:
        folder: with ``model.safetensors`` and ``estimator.json``.
        device: where it is run; None: where it was trained, or else the CPU, with a warning.
    """
    folder = Path(folder)
    try:
        plain = json.loads((folder / "estimator.json").read_text(encoding="utf-8"))
        if plain["format"] != FORMAT:
            raise NotAModel(f"folder={str(folder)!r} holds {plain['format']!r}; this version reads {FORMAT!r}.")
        kind, params = KINDS[plain["kind"]], plain["parameters"]
        if isinstance(params.get("class_weight"), list):
            params["class_weight"] = dict(params["class_weight"])
        one: Any = kind(**params)
        one.schema_ = Schema.from_dict(plain["schema"])
        one.history_ = pd.DataFrame(plain["history"])
        one.n_features_in_ = len(one.schema_.names)
        if plain["named"]:
            one.feature_names_in_ = np.array(one.schema_.names, dtype=object)
        if "classes" in plain:
            one.classes_ = np.array(plain["classes"], dtype=plain["classes_dtype"])
        else:
            one.target_mean_, one.target_sd_ = plain["target_mean"], plain["target_sd"]
        with torch.random.fork_rng():
            one.model_ = one._model(len(one.classes_) if "classes" in plain else 1)
        one.model_.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as problem:
        raise NotAModel(
            f"folder={str(folder)!r} holds no estimator that can be loaded: {type(problem).__name__}: "
            f"{str(problem).splitlines()[0][:160]}. Pass a folder that `regard fit` or an estimator's save() wrote."
        ) from problem
    one.model_.eval()
    try:
        one.model_.to(device or one.device)
        one.device = device or one.device
    except (AssertionError, RuntimeError) as problem:  # what torch says of a device that is not there
        if device is not None:
            raise OptionError(f"device={device!r} is not there: {problem}") from None
        log.warning("%s was trained on %s, which is not there: it runs on the CPU.", folder, one.device)
        one.device = "cpu"
    one.folder_ = str(folder)
    return one
