"""Any PyTorch module: the user says how it is called and what its rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from regard.errors import EmptyInput, InputError, NotServed, OptionError, SubjectError, WrongTarget, choose
from regard.subjects import targets
from regard.subjects.tokens import described, spread
from regard.types import Batch, Features, How, Of, Score, Source, Special, Targets, Vocabulary


@dataclass(frozen=True, eq=False)
class ModuleSubject:
    """Any module with named rows. Made by `regard.module`."""

    model: nn.Module
    call: Callable[..., Tensor]
    features: tuple[str, ...]
    special_features: frozenset[str]
    reading: str | int | Sequence[float]
    padding: Callable[..., Tensor] | None
    source: tuple[str, ...] | None
    source_padding: Callable[..., Tensor] | None
    head: targets.Head
    special: Special
    baseline: Tensor | None = None
    vocabulary: Vocabulary | None = None

    __repr__ = described

    @property
    def predicts(self) -> bool:
        """Whether the output has classes; otherwise the user names a target."""
        return self.head.kind != "embedding"

    def encode(self, inputs: Any) -> Batch:
        """Tensors, alone or in a tuple or dict, the first axis of each being examples; or a table."""
        if isinstance(inputs, pd.DataFrame):
            inputs = self.columns_of(inputs)
        if isinstance(inputs, Tensor):
            inputs = (inputs,)
        named = dict(inputs) if isinstance(inputs, Mapping) else {str(i): x for i, x in enumerate(inputs)}
        sizes = {name: len(x) for name, x in named.items() if isinstance(x, Tensor) and x.dim()}
        if not sizes or min(sizes.values()) == 0:
            raise EmptyInput(f"inputs holds no examples: {sizes or named!r}.")
        if len(set(sizes.values())) > 1:
            raise InputError(f"inputs disagree on the number of examples (their first axis): {sizes}.")
        size, rows = next(iter(sizes.values())), len(self.features)
        device = next((x.device for x in named.values() if isinstance(x, Tensor)), torch.device("cpu"))
        shape = torch.Size([size, rows])
        real = self._real("padding", self.padding, named, shape, device)
        source = None
        if self.source is not None:
            shape = torch.Size([size, len(self.source)])
            seen = self._real("source_padding", self.source_padding, named, shape, device)
            source = Source(seen, tuple(self._features(self.source, one) for one in seen))
        return Batch(named, real, tuple(self._features(self.features, one) for one in real), source=source)

    def of_ids(self, ids: Tensor) -> Batch:
        """Numbers of tokens ``(example, row)`` as a batch, for modules that take these."""
        if ids.shape[1] != len(self.features):
            raise InputError(f"ids: {ids.shape[1]} tokens in a row, but the module has {len(self.features)} features.")
        return self.encode(ids)

    def probe(self, batch: Batch) -> Batch:
        """The first example."""
        return batch.pick([0])

    def forward(self, batch: Batch) -> Tensor:
        """What the user's function returns: ``(example, class)``; a single axis becomes one column."""
        output = self._call(lambda *args, **kwargs: self.call(self.model, *args, **kwargs), batch.inputs)
        if not isinstance(output, Tensor) or output.dim() not in (1, 2) or len(output) != len(batch):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise SubjectError(
                f"forward returned {got}; it must return a tensor (example,) or (example, class) for "
                f"{len(batch)} examples."
            )
        return output if output.dim() == 2 else output[:, None]

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch with the baseline in the place of some features ``(example, row)``."""
        if how != "mask" or self.baseline is None:
            raise NotServed(
                f"how={how!r}: how a feature of this module is taken out is not known. Use how='attention', or pass "
                "baseline= to regard.module and use how='mask'."
            )
        names = [name for name, x in batch.inputs.items() if _fits(x, self.baseline)]
        if len(names) != 1:
            raise NotServed(
                f"how='mask': baseline= stands in for numbers (example, {len(self.baseline)}), and {len(names)} inputs "
                "are such, not one. Use how='attention'."
            )
        values, removed = batch.inputs[names[0]], self.features if self.source is None else self.source
        columns = gone[:, [row for row, name in enumerate(removed) if name not in self.special_features]]
        return replace(batch, inputs={**batch.inputs, names[0]: self.baseline.to(values).where(columns, values)})

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        return targets.score(self.head, output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: as the user declared it."""
        if isinstance(self.reading, str):
            if self.reading == "pool":
                return torch.ones(len(batch), 1, device=batch.real.device)
            return spread(self.reading, batch.real)
        if isinstance(self.reading, int):
            wanted = torch.zeros(batch.real.shape[1])
            wanted[self.reading] = 1
        else:
            wanted = torch.as_tensor(self.reading, dtype=torch.get_default_dtype())
        return wanted.to(batch.real.device).expand(len(batch), -1)

    def columns_of(self, table: pd.DataFrame) -> Tensor:
        """The columns that are features, as one tensor of numbers."""
        names = [name for name in self.features if name not in self.special_features]
        if missing := [name for name in names if name not in table.columns]:
            raise InputError(f"inputs: the table has no columns {missing!r}; it has {list(table.columns)}.")
        try:
            numbers = table[names].to_numpy(dtype=float)
        except (TypeError, ValueError) as problem:
            raise InputError(f"inputs: columns {names!r} must hold numbers: {problem}.") from None
        if self.vocabulary is not None:
            return torch.tensor(numbers).long()
        parameter = next(self.model.parameters(), torch.zeros(()))
        return torch.tensor(numbers).to(parameter)

    @staticmethod
    def _call(function: Callable[..., Any], named: Mapping[str, Any]) -> Any:
        """Positional inputs are passed by position, named ones by name."""
        if all(name.isdigit() for name in named):
            return function(*named.values())
        return function(**named)

    def _real(
        self, name: str, padding: Callable[..., Tensor] | None, named: Mapping[str, Any], shape: torch.Size,
        device: torch.device,
    ) -> Tensor:  # fmt: skip
        """``(example, row)``: what the user's function says, or all of them."""
        if padding is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        real = self._call(padding, named)
        if real.dtype != torch.bool or real.shape != shape:
            raise SubjectError(
                f"{name} returned {real.dtype} {tuple(real.shape)}; it must return a bool tensor of shape "
                f"{tuple(shape)}, True where a row is real."
            )
        return real  # type: ignore[no-any-return]

    def _features(self, names: tuple[str, ...], real: Tensor) -> Features:
        rows = real.nonzero().squeeze(-1).tolist()
        return Features.named([names[row] for row in rows], rows, self.special_features)


def module(
    model: nn.Module,
    forward: Callable[..., Tensor],
    *,
    features: Sequence[str],
    readout: Literal["first", "last", "mean", "pool"] | int | Sequence[float],
    padding: Callable[..., Tensor] | None = None,
    source: Sequence[str] | None = None,
    source_padding: Callable[..., Tensor] | None = None,
    special_features: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    output: Literal["softmax", "sigmoid", "binary", "regression", "embedding"] = "softmax",
    special: Special = "keep",
    baseline: Tensor | None = None,
    vocabulary: int | None = None,
) -> ModuleSubject:
    """Any PyTorch module as a subject.

    Args:
        model: the module; never changed, never moved.
        forward: ``forward(model, *inputs)`` returns ``(example, class)``; inputs are what you pass to `trace`, a
            tensor or a tuple of tensors by position, a dict by name. The first axis of each is examples.
        features: a name for every row that attention runs over, special ones such as "[CLS]" included.
        readout: which rows the prediction is read from: "first", "last", "mean", a row, or one weight for each row;
            "pool" if it is read from a single attention over all rows.
        padding: ``padding(*inputs)`` returns ``(example, row)`` bool, True where a row is real.
        source: names of the rows of a second sequence, for models that have two: what the encoder of an
            encoder–decoder reads, the regions of a picture beside a text.
        source_padding: the same as ``padding``, for the source.
        special_features: those of the features that stand for no part of the input, such as "[CLS]".
        labels: names of the classes.
        output: what the columns of the output are; "embedding" means that every target is a function.
        special: what explanations do with special features: "keep", "drop", or "renormalise" over the others.
        baseline: ``(feature,)``: what stands in for a feature that is removed, such as the mean of its column; for
            modules one of whose inputs is ``(example, feature)``, special features not counted. With two sequences
            those of the source are removed.
        vocabulary: how many tokens there are, for language models that take their numbers ``(example, row)``.
    """
    if not isinstance(model, nn.Module):
        raise SubjectError(f"model={model!r} is a {type(model).__name__}, not a torch.nn.Module.")
    choose("special", special, ("keep", "drop", "renormalise"))
    names = tuple(features)
    if isinstance(readout, str):
        choose("readout", readout, ("first", "last", "mean", "pool"))
    elif isinstance(readout, int):
        if not -len(names) <= readout < len(names):
            raise OptionError(f"readout={readout} is not one of the {len(names)} rows named in features.")
    elif len(readout) != len(names) or abs(sum(readout) - 1) > 1e-4 or min(readout) < 0:
        raise OptionError(
            f"readout has {len(readout)} weights that sum to {sum(readout):.4g}; it needs one for each of the "
            f"{len(names)} rows in features, none negative, summing to 1."
        )
    if source is not None and len(source) == len(names):
        raise OptionError(
            f"source has {len(source)} rows, as many as features: attention over one could not be told from attention "
            "over the other. Pad one of them by a row."
        )
    if missing := sorted(set(special_features) - {*names, *(source or ())}):
        raise OptionError(f"special_features={missing!r} are not among the features.")
    removable = [name for name in (names if source is None else source) if name not in special_features]
    if baseline is not None and tuple(baseline.shape) != (len(removable),):
        raise OptionError(
            f"baseline has shape {tuple(baseline.shape)}; it needs one number for each of the {len(removable)} "
            "features that are not special."
        )
    if labels is None:
        head = targets.Head(output, _no_labels, str)
    elif output == "embedding":
        raise OptionError("labels: an embedding has no classes. Leave labels out, or say what the output is.")
    else:
        head = targets.named_head(output, tuple(labels))
    return ModuleSubject(
        model, forward, names, frozenset(special_features), readout, padding,
        None if source is None else tuple(source), source_padding, head, special, baseline,
        None if vocabulary is None else Vocabulary(torch.arange(vocabulary), None),
    )  # fmt: skip


def _fits(given: Any, baseline: Tensor) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.shape[1:] == baseline.shape


def _no_labels(name: str) -> int:
    raise WrongTarget(f"target={name!r}: this subject has no labels. Pass labels=, or a class index as target.")
