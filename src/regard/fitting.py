"""What the estimators share: the loop that fits a model to the tensors of a table, its options, how they are saved."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from sklearn.base import BaseEstimator
from sklearn.utils import column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from regard.data.schema import Schema, as_frame
from regard.errors import InputError, NonFinite, OptionError, at_least_one, choose, whole_numbers, within
from regard.progress import Counter

FORMAT = "regard.estimator/1"
FEWEST = 5  # rows: some to learn from, one to hold out
Call = Callable[[nn.Module, Tensor, Tensor], Tensor]  # a model on numbers and codes
Judge = Callable[[Tensor, Tensor], Tensor]  # outputs and targets of some rows, to one number


@dataclass(kw_only=True, eq=False, repr=False)
class TabularEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What the estimators of `regard.estimators` share: the options of training, and how they are saved."""

    epochs: int = 100
    patience: int = 16
    batch_size: int = 256
    learning_rate: float = 1e-4
    weight_decay: float = 1e-5
    validation: float | None = 0.2
    categories: Sequence[str] | None = None
    unseen: Literal["unknown", "error"] = "unknown"
    random_state: int | None = 0
    device: str = "cpu"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags

    @property
    def subject_(self) -> Any:
        """The fitted model as a subject: what `regard.explain`, `trace` and `audit` take."""
        check_is_fitted(self, "model_")
        from regard.subjects.tabular import tabular  # loads transformers, for seconds

        labels = [str(name) for name in self.classes_] if hasattr(self, "classes_") else None
        output: Any = "regression" if labels is None else "softmax"
        found = tabular(self.model_, self.schema_, labels=labels, output=output)
        return replace(found, name=getattr(self, "folder_", type(self).__name__), unseen=self.unseen)

    def save(self, folder: str | Path) -> Path:
        """Write ``model.safetensors`` and ``estimator.json`` into a folder; `load` reads them."""
        check_is_fitted(self, "model_")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: x.contiguous() for name, x in self.model_.state_dict().items()}, folder / "model.safetensors")
        params = self.get_params(deep=False)
        if isinstance(params.get("class_weight"), Mapping):
            params["class_weight"] = [*params["class_weight"].items()]  # JSON would turn names of classes into texts
        plain: dict[str, Any] = {
            "format": FORMAT, "kind": type(self).__name__, "parameters": params, "schema": self.schema_.to_dict(),
            "named": hasattr(self, "feature_names_in_"), "history": self.history_.to_dict("list"),
            "versions": {name: version(name) for name in ("regard", "torch", "scikit-learn")},
        }  # fmt: skip
        if hasattr(self, "classes_"):
            plain |= {"classes": self.classes_.tolist(), "classes_dtype": str(self.classes_.dtype)}
        else:
            plain |= {"target_mean": self.target_mean_, "target_sd": self.target_sd_}
        text = json.dumps(plain, indent=1, ensure_ascii=False, default=_plain)
        (folder / "estimator.json").write_text(text, encoding="utf-8")
        return folder

    @abstractmethod
    def _model(self, outputs: int) -> nn.Module:
        """The model for the columns of the schema, untrained."""

    def _groups(self, model: nn.Module) -> Any:
        """Its parameters, as the optimizer takes them."""
        return model.parameters()

    def _tables(self, model: Any) -> Sequence[Tensor]:
        """The embeddings of each category column: ``(code, channel)``."""
        tables: Sequence[Tensor] = model.values.weight.split(self.schema_.cardinalities)
        return tables

    def _call(self, model: nn.Module, numbers: Tensor, codes: Tensor) -> Tensor:
        return model(numbers, codes)  # type: ignore[no-any-return]

    def _table(self, X: Any, *, fitting: bool) -> pd.DataFrame:  # noqa: N803
        """A frame by its names; an array (and any frame, if an array was learned from) by its places."""
        if fitting:  # should it fail, nothing is fitted; what is learned now comes from no folder
            for name in {"model_", "folder_"} & {*vars(self)}:
                delattr(self, name)
        if hasattr(X, "columns") and (fitting or hasattr(self, "feature_names_in_")):
            frame = as_frame("X", X)
            if fitting:
                self.feature_names_in_ = np.array(frame.columns, dtype=object)
                self.n_features_in_ = len(frame.columns)
            return frame
        array = validate_data(self, X, reset=fitting, dtype=None, ensure_all_finite=False)
        names = [f"x{place}" for place in range(array.shape[1])] if fitting else [*self.schema_.names]
        return pd.DataFrame(array, columns=names).infer_objects()

    def _learn(self, frame: pd.DataFrame, target: Tensor, *, outputs: int, loss: Judge, quality: Judge) -> Self:
        """Train on the rows that are not held out, and keep the model that was best on those that are."""
        self.schema_ = Schema.of(frame, categories=self.categories)
        inputs, target = self._tensors(frame), target.to(self.device)
        course = {name: getattr(self, name) for name in ("epochs", "patience", "learning_rate", "weight_decay")}
        batch_size = at_least_one("batch_size", self.batch_size)
        with torch.random.fork_rng():
            seed = torch.seed() if self.random_state is None else whole_numbers("random_state", self.random_state)[0]
            torch.manual_seed(seed)
            parts = split(target, self.validation)
            model = self._model(outputs).to(self.device)
            self.history_ = descend(
                model, self._call, inputs, target, parts=parts, loss=loss, quality=quality,
                groups=self._groups(model), batch_size=batch_size, **course,
            )  # fmt: skip
        self._tell_unseen(model, inputs[1][parts[0]])
        self.model_ = model
        return self

    @torch.no_grad()
    def _tell_unseen(self, model: nn.Module, codes: Tensor) -> None:
        """Nothing was learned about codes that were in no row that was learned from: they become the others' mean.

        So a category that was never seen, or is taken out, is like a number that is missing: the mean. Code 0 is one of
        these where no cell was missing.
        """
        for column, table in enumerate(self._tables(model)):
            counts = codes[:, column].bincount(minlength=len(table)).to(table)
            table[counts == 0] = counts @ table / counts.sum()

    def _tensors(self, frame: pd.DataFrame) -> list[Tensor]:
        """Numbers and codes."""
        choose("unseen", self.unseen, ("unknown", "error"))
        encoded = self.schema_.encode(frame, unseen=self.unseen)
        return [torch.from_numpy(x).to(self.device) for x in (encoded.numbers, encoded.codes)]

    def _predicted(self, X: Any) -> Tensor:  # noqa: N803
        check_is_fitted(self, "model_")
        inputs = self._tensors(self._table(X, fitting=False))
        return outputs(self.model_, self._call, inputs, self.batch_size).cpu()


def descend(
    model: nn.Module,
    call: Call,
    inputs: Sequence[Tensor],
    target: Tensor,
    *,
    parts: tuple[Tensor, Tensor],
    loss: Judge,
    quality: Judge,
    groups: Any,
    epochs: int,
    patience: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
) -> pd.DataFrame:
    """Train a model in place with AdamW; it ends as it was when it was best on the rows that are held out.

    Args:
        model: what is trained; it ends in eval mode.
        call: runs it.
        inputs: numbers and codes of all rows.
        target: what is to be predicted.
        parts: the places of the rows to learn from, and of those held out: none will do.
        loss: what is minimised.
        quality: how good outputs are on the held-out rows.
        groups: the parameters, as an optimizer takes them.
        epochs: how often all rows are seen, at most.
        patience: stop after so many epochs without a better quality.
        batch_size: rows in a step.
        learning_rate: of AdamW.
        weight_decay: of AdamW.

    Returns:
        A row for each epoch: its number, the mean loss, and the quality on the held-out rows ("validation").
    """
    rate = within("learning_rate", learning_rate, 0, math.inf)
    decay = within("weight_decay", weight_decay, 0, math.inf, ends="[)")
    steps = torch.optim.AdamW(groups, lr=rate, weight_decay=decay)
    epochs, patience = at_least_one("epochs", epochs), at_least_one("patience", patience)
    rest, held = parts
    rows: list[dict[str, float]] = []
    best, since, kept = -math.inf, 0, None
    with Counter("training", epochs * len(rest)) as counter:
        for epoch in range(epochs):
            model.train()
            total = 0.0
            for some in rest[torch.randperm(len(rest))].split(batch_size):
                error = loss(call(model, inputs[0][some], inputs[1][some]), target[some])
                steps.zero_grad()
                error.backward()
                steps.step()
                total += float(error.detach()) * len(some)
                counter.advance(len(some))
            rows.append({"epoch": epoch, "loss": total / len(rest)})
            if not math.isfinite(total):
                raise NonFinite(f"the loss became {total} in epoch {epoch}. Lower learning_rate={rate:g}.")
            if not len(held):
                continue
            now = float(quality(outputs(model, call, [x[held] for x in inputs], batch_size), target[held]))
            rows[-1]["validation"] = now
            since = 0 if now > best else since + 1
            if now >= best:  # of equals the last, which has learned more
                best, kept = now, {name: x.clone() for name, x in model.state_dict().items()}
            if since == patience:
                break
    if kept is not None:
        model.load_state_dict(kept)
    model.eval()
    return pd.DataFrame(rows)


@torch.no_grad()
def outputs(model: nn.Module, call: Call, inputs: Sequence[Tensor], batch_size: int) -> Tensor:
    """``(row, output)`` of a model that ends in eval mode, batch by batch."""
    model.eval()
    batches = zip(*(x.split(batch_size) for x in inputs), strict=True)
    return torch.cat([call(model, numbers, codes) for numbers, codes in batches])


def split(target: Tensor, share: float | None) -> tuple[Tensor, Tensor]:
    """The places of the rows to learn from, and of those to hold out: of each class the same share, by lot.

    A row that is the only one of its class is learned from.
    """
    size = len(target)
    if share is None:
        return torch.arange(size), torch.arange(0)
    within("validation", share, 0, 0.5, ends="(]")
    places = torch.randperm(size)
    if not target.is_floating_point():
        target = target.cpu()
        places = places[target[places].argsort(stable=True)]  # class by class
        places = places[target.bincount()[target[places]] > 1]
    count = min(max(1, round(share * size)), len(places) // 2)
    # every so many places one, so that no class gives more than its share
    steps = (torch.arange(count, dtype=torch.float64) + torch.rand(())) * len(places) / max(count, 1)
    drawn = places[steps.long().clamp_max(len(places) - 1)]
    is_held = torch.zeros(size, dtype=torch.bool)
    is_held[drawn] = True
    return (~is_held).nonzero().squeeze(-1), is_held.nonzero().squeeze(-1)


def checked_target(y: Any, rows: int, who: str) -> NDArray[Any]:
    """One value for each row, none of them missing."""
    if y is None:
        raise InputError(f"{who} requires y to be passed, but the target y is None.")
    values: NDArray[Any] = column_or_1d(y, warn=True)
    if len(values) != rows:
        raise InputError(f"y has {len(values)} values, but X has {rows} rows. There must be one for each row.")
    missing = np.asarray(pd.isna(values))
    if missing.any():
        raise InputError(
            f"y: {int(missing.sum())} values are missing, the first in row {int(missing.argmax())}. "
            "Drop these rows: nothing can be learned from them."
        )
    if rows < FEWEST:
        raise InputError(f"X has {rows} samples: too few to learn from. Give {FEWEST} or more.")
    return values


def _plain(value: Any) -> Any:
    """What NumPy and pandas hold, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise OptionError(f"{value!r} cannot be saved: parameters must be numbers, texts, or lists of them.")
