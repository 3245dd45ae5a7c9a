"""A folder becomes a list: methods and trials are discovered, those of other packages by entry points."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, TypeVar

import pandas as pd

from regard import methods
from regard.attention import Trace
from regard.attention.paths import no_projections
from regard.errors import NotServed, OptionError, must_know, nearest
from regard.types import Of, Scores

E = TypeVar("E")
GROUP = "regard.methods"  # of entry points: name = "package.module"


@dataclass(frozen=True)
class Entry:
    """A file of such a folder: a function with options, and what its file declares."""

    name: str
    needs: tuple[str, ...]
    cite: str
    function: Callable[..., Any]

    @property
    def options(self) -> dict[str, Any]:
        """Its options and their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}

    def chosen(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options, with those that were given; unknown ones are refused with the nearest name."""
        known = self.options
        for name in given:
            if name not in known:
                hint = nearest(name, known)
                listed = ", ".join(f"{key}={value!r}" for key, value in known.items()) or "none"
                raise OptionError(f"{name}={given[name]!r}: {self.name} has no such option.{hint} It has {listed}.")
        return {**known, **given}


@dataclass(frozen=True)
class Method(Entry):
    """A way from a trace to numbers. What its file declares is described in `regard.methods`."""

    family: str
    formula: str
    passes: str
    of: Of
    cannot: Callable[[Trace], str | None]

    def unserved(self, trace: Trace) -> str | None:
        """Why a trace cannot serve it, if it cannot."""
        return (no_projections(trace) if "values" in self.needs else None) or self.cannot(trace)

    def __call__(self, trace: Trace, **options: Any) -> Scores:
        """The numbers, or `NotServed` with the methods that this trace can serve."""
        try:
            reason = self.unserved(trace)
            if reason is None:
                scores: Scores = self.function(trace, **options)
                return scores
        except NotServed as problem:
            reason = str(problem)
        raise NotServed(f"{self.name}: {reason} {those_that_can(trace, but=self.name)}") from None


def those_that_can(trace: Trace, but: str) -> str:
    """A sentence that lists the attention methods which a trace can serve, without the one that it could not."""
    some = [one for one in found().values() if one.family == "attention" and one.name != but]
    able = [one.name for one in some if one.unserved(trace) is None]
    return f"Methods that can: {', '.join(able) or 'none'}."


@lru_cache
def found() -> dict[str, Method]:
    """All methods by name."""
    return {one.name: one for one in map(_read, modules(methods, GROUP))}


def modules(folder: ModuleType, group: str) -> list[ModuleType]:
    """The files of a folder, and what other packages offer under the name of a group."""
    inside = [f"{folder.__name__}.{entry.name}" for entry in pkgutil.iter_modules(folder.__path__)]
    outside = [entry.value for entry in entry_points(group=group)]
    return [importlib.import_module(name) for name in [*inside, *outside]]


def method_named(name: str) -> Method:
    """The method of that name."""
    return named("method", name, found())


def named(what: str, name: str, known: Mapping[str, E]) -> E:
    """The entry of that name; refused with the nearest one if there is none."""
    must_know(what, name, known)
    return known[name]


def list_methods() -> pd.DataFrame:
    """A row for each method: name, family, formula, what it needs, what it costs in passes, and its paper.

    Example:
        >>> import regard
        >>> "rollout" in set(regard.list_methods()["name"])
        True
    """
    rows = [
        {
            "name": one.name, "family": one.family, "formula": one.formula, "needs": ", ".join(one.needs),
            "passes": one.passes, "paper": one.cite, "options": ", ".join(one.options),
        }
        for one in found().values()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _read(module: ModuleType) -> Method:
    name = module.__name__.rsplit(".", 1)[-1]
    return Method(
        name, tuple(module.NEEDS), module.CITE, getattr(module, name), module.FAMILY, module.FORMULA, module.PASSES,
        module.OF, getattr(module, "cannot", lambda trace: None),
    )  # fmt: skip
