"""The verb heads: what the heads and layers of a model do, by one pass of traces and by probes of their own."""

from __future__ import annotations

import logging
import reprlib
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import islice
from types import ModuleType
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from regard import probes as folder
from regard.attention import Site, Trace, trace
from regard.attention.running import must_be_subject
from regard.attention.sharding import must_be_whole
from regard.catalog import Entry, modules, named
from regard.data import Dataset, Example
from regard.errors import EmptyInput, InputError, NotServed, OptionError, RegardError
from regard.explaining import job_for, model_of
from regard.glimpses import Loss, Sums, Survey, batches, copies, loss_of, row_means
from regard.probed import HEAD, Array, Heads, Probed, tabled
from regard.progress import Counter
from regard.training import inputs_of
from regard.trying import UNITS, dataset_of, must_count
from regard.types import Targets

GROUP = "regard.probes"  # of entry points: name = "package.module"
DEFAULT = ("entropy", "distance", "special", "positional", "importance")
log = logging.getLogger("regard")


@dataclass(frozen=True)
class Probe(Entry):
    """A question about heads. What its file declares is described in `regard.probes`."""

    each: str
    about: str
    parts: tuple[str, ...]
    settle: Callable[[Array, Any], tuple[Array, list[str]]] | None
    cannot: Callable[[Any, Trace], str | None]


Asked = dict[str, tuple[Probe, dict[str, Any]]]  # by the name that it has in tables, with all its options


@lru_cache
def found() -> dict[str, Probe]:
    """All probes by name."""
    return {one.name: one for one in map(_read, modules(folder, GROUP))}


def probe_named(name: str) -> Probe:
    """The probe of that name."""
    return named("probe", name, found())


def list_probes() -> pd.DataFrame:
    """A row for each probe: its name, what it finds out, what it is asked of, what it needs, and its paper.

    Example:
        >>> import regard
        >>> "entropy" in set(regard.list_probes()["name"])
        True
    """
    rows = [
        {
            "name": one.name, "about": one.about, "each": one.each, "needs": ", ".join(one.needs), "paper": one.cite,
            "options": ", ".join(f"{option}={value!r}" for option, value in one.options.items()),
        }
        for one in found().values()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def heads(
    subject: Any,
    data: Any,
    *,
    probes: Sequence[str | tuple[str, Mapping[str, Any]]] = DEFAULT,
    target: Targets = None,
    examples: int | None = 200,
    batch_size: int = 32,
    draws: int = 200,
    seed: int = 0,
) -> Heads:
    """What do the heads of a model look at, which of them matter, and what do they do?

    Probes that look at weights, or at gradients of gates, share one pass of traces over the data, in constant memory.

    Args:
        subject: made by `regard.text`, `regard.causal`, `regard.tabular` and the like.
        data: what `regard.data.read` takes, or has read; some probes need labels, or a file of CoNLL-U, GAP or facts.
        probes: names from `regard.list_probes`, with options as ``(name, options)``. Those that the model or the data
            cannot serve are listed in `Heads.refused`; if none can be served, that is an error.
        target: for models without classes the function of their output that heads matter for.
        examples: how many are drawn by lot from the data; None: all, in a stream.
        batch_size: how many examples run together; fewer where they are long.
        draws: of examples, for intervals.
        seed: of everything that is drawn.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> table = regard.heads(subject, ["so so good so", "the plot is awful"], probes=["entropy", "confidence"])
        >>> table.frame().shape
        (1, 10)
    """
    must_be_subject(subject)
    must_be_whole(subject.model, "heads")
    must_count(seed, examples=examples, batch_size=batch_size, draws=draws)
    asked = asked_of(probes)
    dataset = dataset_of(data)
    some = dataset if examples is None else dataset.sample(examples, seed=seed)
    work = Round(subject, some, target, batch_size, draws, seed)
    found, refused = work.run(asked)
    settings = {
        "model": model_of(subject), "data": dataset.source or f"{len(dataset):,} {UNITS[dataset.kind]}",
        "examples": len(some), "of": len(dataset), "seed": seed, "draws": draws, "batch_size": batch_size,
    }  # fmt: skip
    return Heads(work.index, found, refused, settings)


def probed(subject: Any, data: Dataset, probes: Any, target: Targets, batch_size: int, seed: int) -> dict[str, Any]:
    """What all examples tell of heads, as plain values; "why", if nothing: for an audit, whose trials go on."""
    try:
        asked: Any = {"probes": probes, "target": target, "batch_size": batch_size, "seed": seed}
        return heads(subject, data, examples=None, **asked).to_dict()
    except Exception as problem:
        log.debug("probes", exc_info=True)
        return {"why": str(problem) if isinstance(problem, RegardError) else repr(problem)}


@dataclass(eq=False)
class Round:
    """Probes at work. Arguments as in `heads`."""

    subject: Any
    data: Dataset
    target: Targets
    batch_size: int
    draws: int
    seed: int
    index: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=HEAD))

    def run(self, asked: Asked) -> tuple[dict[str, Probed], dict[str, str]]:
        """What each probe found, in the order asked for; and why others found nothing."""
        _must_choose(asked)
        found: dict[str, Probed] = {}
        refused = self._able(asked)
        able = {name: one for name, one in asked.items() if name not in refused}
        streamed = {name: one for name, one in able.items() if one[0].each != "case"}
        found |= self._streamed(streamed, refused) if streamed else {}
        for place, (name, (probe, options)) in enumerate(able.items(), 1):
            if probe.each == "case":
                try:
                    with Counter(f"probe {place} of {len(able)}: {name}", None):
                        found[name] = self._whole(probe, options)
                except InputError as problem:
                    if not found and not isinstance(problem, NotServed):
                        raise type(problem)(f"{name}: {problem}") from problem
                    refused[name] = str(problem)  # what others found is not lost
        if not found:
            raise NotServed(" ".join(f"probe={name!r} cannot be served: {why}" for name, why in refused.items()))
        for name, why in refused.items():
            log.warning("%s: %s", name, why)
        return {name: found[name] for name in asked if name in found}, refused

    @cached_property
    def survey(self) -> Survey:
        """What probes that run by themselves are asked of."""
        return Survey(
            self.subject, self.data, tuple(self.data), self.data.kind, job_for(self.subject, "raw", {}, self.seed),
            target=self.target, seed=self.seed, batch_size=self.batch_size,
            index=self.index, draws=self.draws,
        )  # fmt: skip

    def _able(self, asked: Asked) -> dict[str, str]:
        """Why some probes cannot be served; a first trace tells which heads there are."""
        first = list(islice(self.data, 2))
        if not first:
            raise EmptyInput("data holds no examples.")
        seen = trace(
            self.subject, inputs_of(first), inward=any("projections" in one.needs for one, _ in asked.values())
        )
        self.index = pd.DataFrame([
            {"layer": site.index, "site": site.name, "kind": site.kind, "head": head}
            for site in seen.sites for head in range(site.heads)
        ])  # fmt: skip
        refused: dict[str, str] = {}
        for name, (probe, _) in asked.items():
            reason = _missing(probe, first[0]) or unserved(probe, self.subject, seen)
            refused |= {name: reason} if reason else {}
        return refused

    def _whole(self, probe: Probe, options: Mapping[str, Any]) -> Probed:
        """A probe that runs by itself."""
        done: Probed = probe.function(self.survey, **options)
        return Probed(
            probe.name, done.about or probe.about, done.values, done.sentence, done.tables, done.charts,
            {**options, **done.settings}, done.warnings, probe.cite, done.drawn,
        )  # fmt: skip

    def _streamed(self, asked: Asked, refused: dict[str, str]) -> dict[str, Probed]:
        """All probes of rows and heads, in one pass over the data."""
        loss = None
        if any("gradients" in probe.needs for probe, _ in asked.values()):
            try:
                loss = loss_of(self.subject, list(islice(self.data, 100)), self.target)
            except NotServed as problem:
                refused |= {name: str(problem) for name, (probe, _) in asked.items() if "gradients" in probe.needs}
                asked = {name: one for name, one in asked.items() if name not in refused}
        if not asked:
            return {}
        sums = {name: Sums() for name in asked}
        with Counter("looking at heads", len(self.data)) as counter:
            for places, seen in self._traces(loss):
                lots = copies(places, self.draws, self.seed)
                for name, values in _looked(seen, asked).items():
                    sums[name].add(values, lots)
                del seen  # before the next one is made
                counter.advance(len(places))
        found = {name: self._finished(*asked[name], sums[name].means(), loss) for name in asked}
        nothing = [name for name, one in found.items() if one.values["value"].isna().all()]
        refused |= dict.fromkeys(nothing, "it is defined for no head of this model.")
        return {name: one for name, one in found.items() if name not in nothing}

    def _traces(self, loss: Loss | None) -> Iterator[tuple[list[int], Trace]]:
        """Batches of like lengths; with gradients of the loss, if there is one."""
        subject = self.subject if loss is None else loss.subject
        for some, batch in batches(subject, self.data, self.batch_size):
            places, examples = [place for place, _ in some], [one for _, one in some]
            if loss is None:
                yield places, trace(subject, batch)
            else:
                yield places, trace(subject, batch, gradients=True, target=loss.targets(examples), of=loss.of)

    def _finished(self, probe: Probe, options: dict[str, Any], means: Array, loss: Loss | None) -> Probed:
        """From means ``(1 + draw, part, head)`` to numbers of heads."""
        labels = None
        if probe.settle is None:
            drawn = means[:, 0]
        else:
            drawn, labels = probe.settle(means, self.index["layer"].to_numpy())
        about = probe.about + (f" ({loss.about})" if loss is not None and "gradients" in probe.needs else "")
        tables = {}
        if len(probe.parts) > 1:
            parts = pd.DataFrame(means[0].T, columns=[*probe.parts])
            tables["parts"] = pd.concat([self.index, parts], axis=1)
        return Probed(
            probe.name, about, tabled(self.index, drawn, labels), tables=tables, settings=options, cite=probe.cite,
            drawn=drawn,
        )  # fmt: skip


def _looked(seen: Trace, asked: Asked) -> dict[str, Array]:
    """By probe ``(example, part, head)``: means over rows, heads of all sites in order."""
    found: dict[str, list[Tensor]] = {name: [] for name in asked}
    by_row = {
        name: (partial(probe.function, **options), len(probe.parts))
        for name, (probe, options) in asked.items() if probe.each == "row"
    }  # fmt: skip
    for site in seen.sites:
        for name, values in row_means(seen, site, by_row).items():
            found[name].append(values)
        for name, (probe, options) in asked.items():
            if probe.each == "head":
                found[name].append(_must_have(probe, probe.function(seen, site, **options), site, seen)[:, None])
    return {name: torch.cat(some, -1).double().numpy(force=True) for name, some in found.items()}


def _must_have(probe: Probe, values: Tensor, site: Site, seen: Trace) -> Tensor:
    if values.shape != (len(seen.batch), site.heads):
        raise RegardError(
            f"{probe.name} gave {tuple(values.shape)} for {len(seen.batch)} examples × {site.heads} heads."
        )
    return values


def _must_choose(asked: Asked) -> None:
    """Refuse wrong values of options before anything runs: probes check theirs before they look at what is asked."""
    for name, (probe, options) in asked.items():
        try:
            if probe.each == "case" and options != probe.options:
                probe.function(_Nothing(), **options)
        except _LookedAt:
            pass
        except OptionError as problem:
            raise OptionError(f"{name}: {problem}") from None


class _LookedAt(Exception):
    """Options were good enough to go on."""


class _Nothing:
    """Stands for a survey while options are checked."""

    def __getattr__(self, name: str) -> Any:
        raise _LookedAt(name)


def _missing(probe: Probe, example: Example) -> str | None:
    """What a probe needs of the data, and these do not have."""
    for need, how in MARKS.items():
        if need in probe.needs and need not in example.marks:
            return f"it needs {how}"
    if "labels" in probe.needs and example.label is None:
        return "it needs labels: name their column, regard.data.read(…, label=…), or --label-column."
    return None


def unserved(probe: Probe, subject: Any, seen: Trace) -> str | None:
    """Why a model cannot serve a probe, whatever the data; None: it can."""
    if "tokens" in probe.needs and getattr(subject, "vocabulary", None) is None:
        return "it is about language models: it needs a decoder (regard.causal)."
    return probe.cannot(subject, seen)


MARKS = {
    "words": "words with their syntax: pass a file of CoNLL-U (.conllu).",
    "mentions": "pronouns and names: pass a file of GAP (.tsv).",
    "facts": "facts: pass a .json file with a prompt, its subject and the answer.",
}
OF_DATA = (*MARKS, "labels")  # what probes need that is not of the model


def asked_of(probes: Any) -> Asked:
    """The probes by the names that they have in tables, with all their options; of one that is there twice by both."""
    listed = [probes] if isinstance(probes, (str, tuple)) and not _several(probes) else [*probes]
    pairs = [entry if isinstance(entry, tuple) else (entry, {}) for entry in listed]
    often = Counted(name for name, _ in pairs)
    found: Asked = {}
    for name, options in pairs:
        shown = {key: reprlib.repr(value) if isinstance(value, Mapping) else value for key, value in options.items()}
        title = name + "".join(f" {key}={value}" for key, value in shown.items()) * (often[name] > 1)
        found[title] = (probe := probe_named(name)), probe.chosen(options)
    if not found:
        raise OptionError("probes is empty. Name at least one of regard.list_probes().")
    return found


def _several(probes: Any) -> bool:
    """Whether a tuple is a list of probes, and not one with its options."""
    return isinstance(probes, tuple) and not (len(probes) == 2 and isinstance(probes[1], Mapping))


def _read(module: ModuleType) -> Probe:
    name = module.__name__.rsplit(".", 1)[-1]
    return Probe(
        name, tuple(module.NEEDS), module.CITE, getattr(module, name), module.EACH, module.ABOUT,
        getattr(module, "PARTS", ("",)), getattr(module, "settle", None),
        getattr(module, "cannot", lambda subject, trace: None),
    )  # fmt: skip
