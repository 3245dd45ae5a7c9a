"""From findings to a scorecard: named criteria, each with its evidence, and never one number for all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from regard import draw
from regard.errors import InputError, OptionError
from regard.finding import SAID, Finding, said

UNTESTED = "not tested"


@dataclass(frozen=True)
class Criterion:
    """A row of the scorecard.

    Args:
        name: what an explanation is.
        asks: what that means.
        rule: when it is supported, and when not.
        trials: which of these fill it.
        faithfulness: whether it is about what the model does; what people find convincing is another thing.
    """

    name: str
    asks: str
    rule: str
    trials: tuple[str, ...]
    faithfulness: bool = True


CRITERIA = (
    Criterion(
        "consistent", "agrees with gradients and leave-one-out",
        "supported when the lower end of τ is at least half of the τ between gradients and leave-one-out, and above "
        "the random control's interval; not supported when the upper end is below that half",
        ("agreement",),
    ),
    Criterion(
        "exclusive", "no very different attention gives the same output",
        "supported when the upper end of the mean ε-max JSD is below the 95th percentile between seeds (or a stated "
        "stand-in); not supported when the lower end is above it; inconclusive where the site is unused",
        ("adversarial",),
    ),
    Criterion(
        "causal", "erasing what it ranks high changes the decision sooner than erasing at random",
        "supported when the paired interval of (random − explanation) removals, or of comprehensiveness (explanation − "
        "random), is above 0; not supported when it is below; inconclusive where two trials contradict each other",
        ("erasure", "comprehensiveness"),
    ),
    Criterion(
        "necessary", "the model is worse when it is trained with uniform attention",
        "supported when the interval of (base − uniform) scores is above 0; not supported when it ends below 0.02",
        ("uniform_trained",),
    ),
    Criterion(
        "hard to manipulate", "a model trained to look elsewhere pays for it",
        "supported when the total variation paid at the seeds' 95th percentile of JSD (0.1 at least) is above the "
        "seeds' own (0.01 at least); not supported when it is below",
        ("adversary",),
    ),
    Criterion(
        "works out of context", "its weights help a model that sees no context",
        "supported when that model, guided by them, beats uniform weights and its own, intervals apart",
        ("guide",),
    ),
    Criterion(
        "plausible", "agrees with what people marked",
        "supported when AUPRC is above the random control's interval",
        ("plausibility",), faithfulness=False,
    ),
)  # fmt: skip
CANNOT_TELL = (
    "A criterion holds for this model, these examples and the attention that was edited, and for nothing else.",
    "Plausible is about people, the others are about the model: neither follows from the other.",
    "Supported means that these examples speak for it, not that it is proved; many criteria tested once will now and "
    "then be supported by chance.",
)


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """The scorecard of an explanation. Made by `regard.verdict`.

    Args:
        findings: by trial.
        criteria: what it is judged by.
    """

    findings: Mapping[str, Finding]
    criteria: tuple[Criterion, ...] = CRITERIA

    def __repr__(self) -> str:
        return "Verdict(" + ", ".join(f"{one.name}: {self[one.name]}" for one in self.criteria) + ")"

    def __getitem__(self, criterion: str) -> str:
        """ "supported", "not supported", "inconclusive" or "not tested"."""
        wanted = next((one for one in self.criteria if one.name == criterion), None)
        if wanted is None:
            raise InputError(f"criterion={criterion!r} is not known. There are {', '.join(c.name for c in CRITERIA)}.")
        evidence = self.evidence(wanted)
        if not evidence:
            return UNTESTED
        outcomes = {one.supported for one in evidence}
        if {True, False} <= outcomes:
            return SAID[None]
        return SAID[True if True in outcomes else False if False in outcomes else None]

    def evidence(self, criterion: Criterion) -> list[Finding]:
        """The findings that fill a criterion."""
        return [self.findings[name] for name in criterion.trials if name in self.findings]

    @property
    def besides(self) -> list[Finding]:
        """The findings that fill no criterion."""
        filled = {name for criterion in self.criteria for name in criterion.trials}
        return [one for name, one in self.findings.items() if name not in filled]

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each criterion and each trial that fills it; then those trials that fill none."""
        rows: list[dict[str, Any]] = []
        for criterion in self.criteria:
            evidence = self.evidence(criterion)
            rows += [_row(criterion.name, self[criterion.name], one) for one in evidence]
            rows += [] if evidence else [{"criterion": criterion.name, "outcome": UNTESTED}]
        rows += [_row("", one.outcome, one) for one in self.besides]
        return pd.DataFrame(
            rows, columns=["criterion", "outcome", "trial", "value", "references", "needed", "sentence"]
        )

    @property
    def notes(self) -> list[str]:
        """What to know before believing it."""
        lines = list(CANNOT_TELL)
        if self["necessary"] == SAID[False]:
            lines.insert(0, "The model does as well with uniform attention, so the other criteria mean little here.")
        warned: dict[str, list[str]] = {}
        for name, one in self.findings.items():
            for line in one.warnings:
                warned.setdefault(line, []).append(name)
        lines += [f"{', '.join(names)}: {line}" for line, names in warned.items()]
        methods = {_judged(one) for one in self.findings.values() if one.settings}
        if len(methods) > 1:
            lines.append(f"These trials judged different explanations: {', '.join(sorted(methods))}.")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = json.loads(self.frame.to_json(orient="records"))
        rules = {one.name: {"asks": one.asks, "rule": one.rule} for one in self.criteria}
        return {"criteria": {one.name: self[one.name] for one in self.criteria}, "rows": rows, "rules": rules,
                "notes": self.notes}  # fmt: skip

    def to_html(self, path: str | Path) -> Path:
        """Write a page of its own: what the model does, what people find convincing, the rules, and the limits."""
        path = Path(path)
        if path.suffix != ".html":
            raise OptionError(f"path={str(path)!r} must end in .html.")
        table = self.frame[["criterion", "outcome", "trial", "sentence", "needed"]]
        apart = [one.name for one in self.criteria if not one.faithfulness]
        about_people = table["criterion"].isin(apart)
        rules = pd.DataFrame([{"criterion": one.name, "asks": one.asks, "rule": one.rule} for one in self.criteria])
        parts: list[tuple[str, Any]] = [
            ("Faithful: does it tell what the model does?", [table[~about_people]]),
            ("Plausible: does it agree with people?", [table[about_people]]),
            ("Rules", [rules]),
            ("What this cannot tell", self.notes),
        ]
        tried = {
            f"{one.settings['model']} on {one.settings['data']}"
            for one in self.findings.values()
            if "model" in one.settings
        }
        about = "".join(f"{one}. " for one in sorted(tried))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            draw.page("Verdict", f"{about}A row for each criterion; there is no overall grade.", parts), "utf-8"
        )
        return path


def verdict(findings: Iterable[Finding] | Finding) -> Verdict:
    """Judge an explanation by its trials: a scorecard of criteria, each supported, not supported or inconclusive.

    Args:
        findings: of `regard.trial`, each trial once.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> texts = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad"] * 8
        >>> regard.verdict([regard.trial(subject, texts, "comprehensiveness")])["causal"]
        'supported'
    """
    by_trial: dict[str, Finding] = {}
    for one in [findings] if isinstance(findings, Finding) else findings:
        if not isinstance(one, Finding):
            raise InputError(f"findings holds {one!r}, a {type(one).__name__}. Pass what regard.trial returns.")
        if one.trial in by_trial:
            raise InputError(f"findings holds {one.trial!r} twice. Judge each explanation by itself.")
        by_trial[one.trial] = one
    return Verdict(by_trial)


def _judged(one: Finding) -> str:
    """Which explanation a trial was about; trials that edit attention are about attention, as `raw` is."""
    asked = one.settings
    if "method" not in asked:
        return str(asked.get("judged", "attention"))
    options = ", ".join(
        f"{name}={value}" for name, value in asked.get("options", {}).items() if value not in (False, None)
    )
    plain = asked["method"] == "raw" and options in ("", "layer=last, heads=mean")
    return "attention" if plain else f"{asked['method']}({options})"


def _row(criterion: str, outcome: str, one: Finding) -> dict[str, Any]:
    references = "; ".join(f"{name} {said(interval)}" for name, interval in one.reference.items())
    return {
        "criterion": criterion, "outcome": outcome, "trial": one.trial, "value": f"{one.about} {said(one.interval)}",
        "references": references, "needed": one.needed, "sentence": one.sentence,
    }  # fmt: skip
