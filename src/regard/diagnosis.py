"""What can regard do with this model? The first thing to ask of a new one."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from regard.attention import Ignored, Rerun, Site, Trace, edits, trace
from regard.attention.reading import some_scalar
from regard.attention.running import batch_of, undisturbed
from regard.attention.sources import Given
from regard.catalog import found as found_methods
from regard.errors import RegardError
from regard.surveying import OF_DATA, unserved
from regard.surveying import found as found_probes
from regard.types import Batch, Subject

VARIANTS = 10


@dataclass(frozen=True)
class Ability:
    """Something that can be asked of the model, or cannot.

    Args:
        name: what is asked.
        serves: the methods and trials that need it.
        works: whether the model can serve it.
        passes: what it costs, in plain forward passes; None if it does not work.
        said: what was measured, or why it does not work and what to change.
    """

    name: str
    serves: str
    works: bool
    passes: float | None
    said: str


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about a subject.

    Args:
        model: class, parameters, precision, device and attention backend.
        examples: how many, and how many rows each has at most.
        seconds: of a plain forward pass on these examples.
        sites: a row for each group of alike sites: kind, number, heads, shape, where weights come from, names.
        readout: from which rows the prediction is read, and how that is known.
        error: the largest reconstruction error, max |A·V − output| / max |output|; None without sites.
        ignored: what looked like attention and was not taken for it, with reasons.
        abilities: what can be asked of it, and what each costs.
        methods: a row for each attention method: whether it can be served, what it costs, or why it cannot.
        probes: a row for each probe of heads and layers: whether the model can serve it, what it needs of the data, or
            why it cannot.
        advice: what to change, or to keep in mind.
    """

    model: dict[str, Any]
    examples: tuple[int, int]
    seconds: float
    sites: pd.DataFrame
    readout: str
    error: float | None
    ignored: tuple[Ignored, ...]
    abilities: tuple[Ability, ...]
    methods: pd.DataFrame
    probes: pd.DataFrame
    advice: tuple[str, ...]

    @property
    def works(self) -> bool:
        """Whether everything can be served."""
        return all(ability.works for ability in self.abilities)

    def frame(self) -> pd.DataFrame:
        """A row for each ability."""
        return pd.DataFrame([asdict(ability) for ability in self.abilities])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **{name: getattr(self, name) for name in ("model", "examples", "seconds", "readout", "error", "advice")},
            "works": self.works,
            "sites": self.sites.to_dict(orient="records"),
            "ignored": [asdict(entry) for entry in self.ignored],
            "abilities": [asdict(ability) for ability in self.abilities],
            "methods": self.methods.to_dict(orient="records"),
            "probes": self.probes.to_dict(orient="records"),
        }


def diagnose(subject: Subject, inputs: Any) -> Diagnosis:
    """Trace a subject, differentiate it, edit it, and say what works, how exactly, and at what cost.

    Args:
        subject: made by `regard.text`, `regard.causal` and the like.
        inputs: what the subject takes; costs are those of inputs of this length.

    Example:
        >>> import regard
        >>> found = regard.diagnose(regard.pooled(regard.models.toys.decisive()), "so so good so")
        >>> found.works, len(found.sites)
        (True, 1)
    """
    batch = batch_of(subject, inputs)  # once: an encoder–decoder writes its text here

    def plain() -> Tensor:
        with torch.no_grad(), undisturbed(subject.model):
            return subject.forward(batch)

    clock = _Clock(plain)
    found: Trace | None = clock.ask("weights", _named("weights"), lambda: _weights(subject, batch))
    if found is not None:
        clock.ask("gradients", _named("gradients"), lambda: _gradients(subject, batch))
        clock.ask("edits", _named("reruns"), lambda: _edited(subject, batch))
        clock.ask(
            f"{VARIANTS} variants", "permutation, adversarial search, leave-one-out", lambda: _variants(subject, batch)
        )
    return Diagnosis(
        model=_described(subject),
        examples=(len(batch), int(batch.real.sum(-1).max())),
        seconds=clock.seconds,
        sites=_groups(found),
        readout=_readout(found),
        error=None if found is None else found.check.error,
        ignored=found.ignored if found else (),
        abilities=tuple(clock.abilities),
        methods=_methods(subject, batch, clock.abilities),
        probes=_probes(subject, batch, clock.abilities),
        advice=tuple(_advice(subject, found, clock.abilities)),
    )


def _named(need: str) -> str:
    """The attention methods that need this, and of what comes after it nothing."""
    order = ("weights", "gradients", "reruns")
    after = {*order[order.index(need) + 1 :]}
    some = [one for one in found_methods().values() if one.family == "attention"]
    return ", ".join(one.name for one in some if (need in one.needs or need == "weights") and not after & {*one.needs})


def _methods(subject: Subject, batch: Batch, abilities: list[Ability]) -> pd.DataFrame:
    """Which methods can be served; each says so itself, if what it needs is there."""
    failed = {"reruns" if ability.name == "edits" else ability.name for ability in abilities if not ability.works}
    traced = None if "weights" in failed else trace(subject, batch, onward=True)
    rows = []
    for one in found_methods().values():
        if one.family == "attention":
            missing = [need for need in ("weights", *one.needs) if need in failed]
            why = f"needs {missing[0]}" if missing or traced is None else one.cannot(traced)
            rows.append({"name": one.name, "works": why is None, "passes": one.passes, "why": why or ""})
    return pd.DataFrame(rows)


def _probes(subject: Subject, batch: Batch, abilities: list[Ability]) -> pd.DataFrame:
    """Which probes the model can serve; what they need of the data is said, and not asked."""
    failed = {"reruns" if ability.name == "edits" else ability.name for ability in abilities if not ability.works}
    traced = None if "weights" in failed else trace(subject, batch, inward=True)
    rows = []
    for one in found_probes().values():
        missing = [need for need in ("weights", *one.needs) if need in failed]
        why = f"needs {missing[0]}" if missing or traced is None else unserved(one, subject, traced)
        data = ", ".join(need for need in one.needs if need in OF_DATA)
        rows.append({"name": one.name, "works": why is None, "data": data, "why": why or ""})
    return pd.DataFrame(rows)


class _Clock:
    """Asks one thing after the other, and notes what it cost or why it failed.

    A plain forward pass is timed beside each question, so that a machine that slows down does not show as a cost.
    """

    def __init__(self, plain: Callable[[], Tensor]) -> None:
        self.plain = plain
        self.abilities: list[Ability] = []
        self.seconds = self._pass()

    def ask(self, name: str, serves: str, question: Callable[[], tuple[Any, str]]) -> Any:
        try:
            question()  # first runs are slow, and measure the readout
            (taken, (answer, said)), (again, _) = _timed(question), _timed(question)
        except RegardError as problem:
            self.abilities.append(Ability(name, serves, False, None, str(problem)))
            return None
        beside = self._pass()
        self.seconds = min(self.seconds, beside)
        self.abilities.append(Ability(name, serves, True, min(taken, again) / beside, said))
        return answer

    def _pass(self) -> float:
        self.plain()
        return statistics.median(_timed(self.plain)[0] for _ in range(3))


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = function()
    return time.perf_counter() - began, answer


def _weights(subject: Subject, batch: Batch) -> tuple[Trace, str]:
    found = trace(subject, batch)
    for site in found.sites:
        if found.reads(site):
            site.pull(found.readout)
    return found, f"A·V reproduces every site's output to {found.check.error:.0e}"


def _gradients(subject: Subject, batch: Batch) -> tuple[Trace, str]:
    target = None if subject.predicts else some_scalar
    found = trace(subject, batch, gradients=True, target=target)
    silent = [site.index for site in found.sites if site.out_gradient is not None and not site.out_gradient.any()]
    if silent:
        return found, f"sites {silent} have no gradient here: the output does not depend on them"
    return found, "the output depends on every site"


def _edited(subject: Subject, batch: Batch) -> tuple[Rerun, str]:
    rerun = Rerun(subject, batch)
    same = rerun(edits.custom(lambda weights, place: weights, sites=-1))
    gap = float((same - rerun.output).abs().max() / rerun.output.abs().max().clamp_min(1e-30))
    return rerun, f"weights put back as they are change the output by {gap:.0e}"


def _variants(subject: Subject, batch: Batch) -> tuple[Rerun, str]:
    rerun = Rerun(subject, batch)
    rerun(edits.permute(0, sites=-1), variants=VARIANTS)
    last = len(rerun.spots) - 1
    if rerun.upstream[last].recording is None:
        return rerun, f"permutations of site {last}; each runs the whole model (replay is off: see the debug log)"
    return rerun, f"permutations of site {last}; what lies before it is run once"


def _described(subject: Subject) -> dict[str, Any]:
    model = subject.model
    parameters = list(model.parameters())
    config = getattr(model, "config", None)
    return {
        "class": type(model).__name__,
        "saved as": ", ".join(getattr(config, "architectures", None) or ()) or None,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "precision": ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        "device": ", ".join(sorted({str(parameter.device) for parameter in parameters})),
        "backend": getattr(config, "_attn_implementation", None) or "its own",
    }


def _groups(found: Trace | None) -> pd.DataFrame:
    """Sites that are alike, in one row."""
    groups: dict[tuple[Any, ...], list[Site]] = {}
    for site in found.sites if found else ():
        formed = "by the model" if isinstance(site.source, Given) else "fused, recomputed"
        groups.setdefault((site.kind, site.heads, site.shape, formed), []).append(site)
    rows = [
        {"kind": kind, "number": len(some), "heads": heads, "shape": shape, "weights": formed,
         "names": _pattern([site.name for site in some])}
        for (kind, heads, shape, formed), some in groups.items()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["kind", "number", "heads", "shape", "weights", "names"])


def _pattern(names: list[str]) -> str:
    """``layer.{0…5}.attention`` for names that differ in one number, otherwise the first and the last."""
    first, last = (re.split(r"(\d+)", names[place]) for place in (0, -1))
    differ = [place for place, (one, two) in enumerate(zip(first, last, strict=False)) if one != two]
    if len(first) != len(last) or len(differ) > 1:
        return f"{names[0]} … {names[-1]}"
    for place in differ:
        first[place] = f"{{{first[place]}…{last[place]}}}"
    return "".join(first)


def _readout(found: Trace | None) -> str:
    if found is None:
        return "unknown: nothing was traced"
    rows = found.readout[0].nonzero().squeeze(-1).tolist()
    names = dict(zip(found.features[0].rows, found.features[0].tokens, strict=True))
    if found.readout.shape != found.real.shape:
        where = "a single attention over all rows" if found.readout.shape[1] == 1 else f"{len(rows)} attentions"
    elif len(rows) == 1:
        where = f"row {rows[0]} ({names.get(rows[0], '?')!r} in the first example)"
    else:
        alike = len(set(found.readout[0, rows].tolist())) == 1
        where = f"the mean of {len(rows)} rows" if alike else f"{len(rows)} rows"
    return f"{where}; {found.check.readout}"


def _advice(subject: Subject, found: Trace | None, abilities: list[Ability]) -> list[str]:
    """What to change if something cannot be served, and what to keep in mind."""
    advice = [f"{ability.name}: {ability.said}" for ability in abilities if not ability.works]
    if found is None:
        return [*advice, "docs/add-a-model.md says what to do when a model cannot be traced."]
    formed = [site for site in found.sites if isinstance(site.source, Given) and site.kind != "pool"]
    if formed:
        advice.append(
            f"{len(formed)} sites form their weights themselves, so memory grows with the square of the length."
            + " If the model can, load it with attn_implementation='sdpa'." * hasattr(subject.model, "config")
        )
    low, high = (pick(mass) for pick, mass in zip((min, max), zip(*found.check.masses, strict=True), strict=True))
    if low < 0.999:
        advice.append(f"rows sum to {low:.3g} … {high:.3g}, not 1: a sink, or dropped keys, takes the rest.")
    special = found.frame()["special_share"].mean()  # of the sites that are read
    if special > 0.5:
        advice.append(
            f"{special:.0%} of what the readout looks at are special tokens (sinks). Explanations "
            "keep them unless the subject is made with special='drop' or 'renormalise'."
        )
    if found.check.left_fast_path:
        advice.append("torch's fast path is left while tracing; outputs agree to about 1e-6 with a plain run.")
    if not subject.predicts:
        advice.append(
            "it predicts no class: what is explained is a function of its output, target=subject.similarity(…) for one."
        )
    return advice
