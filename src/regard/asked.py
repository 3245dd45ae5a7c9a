"""What an audit is asked for: explanations and trials, by name and with options; checked before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.audited import title_of
from regard.catalog import method_named
from regard.errors import OptionError, StoreError
from regard.surveying import probe_named
from regard.trying import found, trial_named

# A quick look: no profile head by head, and less of what is drawn by lot: 25 shuffles instead of 100, two random
# orders instead of five.
QUICK: tuple[tuple[str, dict[str, Any]], ...] = (
    ("agreement", {}), ("permutation", {"n": 25}), ("erasure", {"repeats": 2}), ("uniform", {"profile": False}),
    ("comprehensiveness", {"repeats": 2}),
)  # fmt: skip
METHODS = ("raw", "rollout", "grad_rollout")
PROBES: tuple[str | tuple[str, dict[str, Any]], ...] = (
    "entropy", "distance", "special", "positional", "pattern", "importance",
    ("pruning", {"by": ["importance"], "random": 3, "steps": 5}),
)  # fmt: skip
EXAMPLES = {"quick": 200, "other": 500}
Asked = str | tuple[str, Mapping[str, Any]]


def threads_of(out: str | Path) -> int | None:
    """With how many threads the run in a folder was begun, since it can only go on so; None: there is none."""
    try:
        known = json.loads((Path(out) / "manifest.json").read_text("utf-8"))["identity"]["options"]["threads"]
        return int(known)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # what is wrong with it the store will say


def pair(asked: Asked) -> tuple[str, Mapping[str, Any]]:
    """A name and its options."""
    return (asked, {}) if isinstance(asked, str) else (asked[0], asked[1])


def listed(name: str, asked: Any) -> Sequence[Asked]:
    """A list of names, each with options if need be."""
    whole = isinstance(asked, Sequence) and not isinstance(asked, str) and len(asked)
    if not whole or not all(
        isinstance(one, str)
        or (isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], Mapping))
        for one in asked
    ):
        raise OptionError(f"{name}={asked!r} must be a list of names, or of (name, options), and not empty.")
    return list(asked)


def trials_of(asked: str | Sequence[Asked]) -> dict[str, Mapping[str, Any]]:
    """By name the trials that are asked for, and their options."""
    if asked == "all":
        return {name: {} for name in found()}
    if asked == "quick":
        return dict(QUICK)
    pairs = [pair(one) for one in listed("trials", [asked] if isinstance(asked, str) else asked)]
    for name, options in pairs:
        trial_named(name).chosen(options)
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"trials={names!r}: {', '.join(sorted(twice))} is there twice. Judge each trial once.")
    return dict(pairs)


def probes_of(probes: Sequence[Asked]) -> list[tuple[str, Mapping[str, Any]]]:
    """What is asked of heads; unknown names and options are refused."""
    wanted = [pair(one) for one in listed("probes", probes)] if probes else []
    for name, options in wanted:
        probe_named(name).chosen(options)
    return wanted


def checked(
    methods: Sequence[Asked], trials: str | Sequence[Asked], out: str | Path | None = None, resume: bool = True
) -> tuple[dict[str, tuple[str, Mapping[str, Any]]], dict[str, Mapping[str, Any]]]:
    """The explanations and trials that are asked for, and whether there is room for their run."""
    explained = {title_of(*one): one for one in map(pair, listed("methods", methods))}
    for name, options in explained.values():
        method_named(name).chosen(options)
    if out is not None and not resume and (Path(out) / "manifest.json").exists():
        raise StoreError(f"out={str(out)!r} holds a run. Go on with it by resume=True, or choose another.")
    return explained, trials_of(trials)
