"""What a recipe is: how a model comes about from data and a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from regard.data import Dataset
from regard.errors import OptionError, at_least_one, must_know, within
from regard.types import Subject

COURSE: dict[str, Any] = {"epochs": 5, "patience": 3, "batch_size": 32, "optimizer": None, "learning_rate": None}
DEEPEST = 20  # parts within parts
MANY = 100  # entries, from which on a list or mapping is known by a hash
Build = Callable[[Dataset, int], Subject]


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a model is built and fitted. Made by `regard.recipe` and by the functions of `regard.recipes`.

    Args:
        build: ``build(train, seed)``: an untrained subject.
        fit: options of training.
        name: what it is called.
        keep: the folder in which every model that is trained is kept, and found again; None: for as long as this
            recipe is at hand.
    """

    build: Build
    fit: Mapping[str, Any]
    name: str
    keep: Path | None = None
    own: dict[str, Any] = field(default_factory=dict, repr=False)  # the folder that is kept while the recipe is

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name != "own"} | {"own": {}}

    @property
    def identity(self) -> dict[str, Any]:
        """All that the trained model depends on, besides data and seed."""
        return {
            "name": self.name,
            "build": described(self.build),
            "fit": {k: described(v) for k, v in self.fit.items()},
        }


def recipe(
    build: Build, fit: Mapping[str, Any] | None = None, *, name: str | None = None, keep: str | Path | None = None
) -> Recipe:
    """How models of a kind come about, for the trials that train more of them.

    Args:
        build: ``build(train, seed)`` returns an untrained subject. ``train`` is a `regard.data.Dataset`, to take words,
            labels or columns from; of ``seed`` all that is drawn must follow.
        fit: options of training: epochs (5), patience (3), batch_size (32), learning_rate (of AdamW: 1e-3), or
            optimizer, a function that makes one for the model.
        name: what it is called; None: as the function is.
        keep: a folder in which every model that is trained is kept, and found again; None: a temporary one.

    Example:
        >>> import regard
        >>> def build(train, seed):
        ...     return regard.pooled(regard.models.toys.decisive())
        >>> regard.recipe(build, {"epochs": 2}).name
        'build'
    """
    if not callable(build):
        raise OptionError(f"build={build!r} must be a function of (train, seed) that returns an untrained subject.")
    given = dict(fit or {})
    for option in given:
        must_know("fit", option, COURSE)
    course = COURSE | given
    for option in ("epochs", "patience", "batch_size"):
        if option != "patience" or course[option] is not None:
            at_least_one(f"fit[{option!r}]", course[option])
    if course["learning_rate"] is not None:
        within("fit['learning_rate']", course["learning_rate"], 0, float("inf"))
        if course["optimizer"] is not None:
            raise OptionError("fit: pass learning_rate or optimizer, not both.")
    if course["optimizer"] is None:
        course["optimizer"] = AdamW(course["learning_rate"] or 1e-3)
    del course["learning_rate"]
    called = str(name or getattr(build, "__name__", type(build).__name__))
    return Recipe(build, course, called, None if keep is None else Path(keep))


@dataclass(frozen=True)
class AdamW:
    """AdamW for those parameters that are trained."""

    learning_rate: float
    weight_decay: float = 0.01

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        """One for this model."""
        some = [one for one in model.parameters() if one.requires_grad]
        return torch.optim.AdamW(some, lr=self.learning_rate, weight_decay=self.weight_decay)


def described(part: Any, depth: int = 0) -> Any:
    """A part of a recipe as plain data, by which it is known again: functions by their code and what they enclose."""
    if depth > DEEPEST:  # it holds itself
        return "…"
    again = partial(described, depth=depth + 1)
    if part is None or isinstance(part, (str, int, float, bool)):
        return part
    if isinstance(part, partial):
        return ["partial", *map(again, (part.func, part.args, part.keywords))]
    if isinstance(part, MethodType):
        return ["method", again(part.__self__), again(part.__func__)]
    if code := getattr(part, "__code__", None):
        cells = [cell.cell_contents for cell in part.__closure__ or ()]
        known = [part.__defaults__ or (), part.__kwdefaults__ or {}, cells]
        return [f"{part.__module__}.{part.__qualname__}", _digest(_code(code)), *map(again, known)]
    if isinstance(part, (set, frozenset)):
        return sorted(repr(one) for one in part)
    if isinstance(part, Mapping):
        return {str(name): again(one) for name, one in part.items()} if len(part) < MANY else _digest(part)
    if isinstance(part, (list, tuple)):
        return [again(one) for one in part] if len(part) < MANY else _digest(part)
    if isinstance(part, torch.Tensor):
        return _digest(part.detach().float().numpy(force=True))
    if isinstance(part, np.ndarray):
        return _digest(part)
    if isinstance(part, nn.Module):
        return [repr(part), again(dict(part.state_dict()))]
    own = getattr(part, "__dict__", None)
    if isinstance(part, type) or own is None:
        return repr(part)
    call = getattr(type(part).__call__, "__code__", None) if callable(part) else None
    kind = {"kind": f"{type(part).__module__}.{type(part).__qualname__}"}
    return kind | ({} if call is None else {"code": _digest(_code(call))}) | again(dict(own))


def _digest(content: Any) -> str:
    """A hash of what is too long to be listed, such as vectors of words."""
    kept = blake2b(digest_size=16)
    if isinstance(content, np.ndarray):
        kept.update(str((content.dtype, content.shape)).encode() + np.ascontiguousarray(content).tobytes())
    elif isinstance(content, Mapping):
        for name in sorted(map(str, content)):
            kept.update(f"{name} {json.dumps(described(content[name]), default=repr)}".encode(errors="surrogatepass"))
    else:
        kept.update(json.dumps([described(one) for one in content], default=repr).encode())
    return kept.hexdigest()


def _code(code: Any) -> list[Any]:
    """What a function does, without where it is written: functions within it likewise."""
    inner = [_code(one) if hasattr(one, "co_code") else described(one) for one in code.co_consts]
    return [code.co_code.hex(), [*code.co_names], inner]
