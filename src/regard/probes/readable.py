"""From which layer on can it be read what a word is?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd

from regard.attention import Trace, trace
from regard.cases import FEW
from regard.errors import NotServed, OptionError, at_least_one, choose, true_or_false
from regard.glimpses import Array, Survey, copies, halves
from regard.halving import ends, over_text, shares, wordless
from regard.probed import Probed
from regard.reading_off import (
    ENTRANCE,
    READERS,
    SETTINGS,
    UNITS,
    Hits,
    Marks,
    Reader,
    Task,
    aligned,
    drawn_by_words,
    state_at,
    stateful,
    task_of,
    trained,
    words_of,
)
from regard.training import inputs_of

EACH = "case"
ABOUT = "from which layer on parts of speech, dependency labels or the class can be read off hidden states"
NEEDS = ("states",)
CITE = "tenney2019bert"
Name = Literal["tags", "relations", "class"]
TASKS: tuple[Name, ...] = ("tags", "relations", "class")
TITLES = {"tags": "Parts of speech", "relations": "Dependency labels", "class": "The class"}
NEAR = 0.95  # of the best layer's accuracy


def cannot(subject: Any, seen: Trace) -> str | None:
    """It takes a model whose blocks have states."""
    there, lacking = stateful(subject, seen)
    none = "the model has no attention in which rows of its input look at one another."
    return None if there else [*lacking, none][0]


def readable(
    survey: Survey,
    *,
    tasks: Name | Sequence[Name] | None = None,
    probe: Reader | Sequence[Reader] = READERS,
    control: bool = True,
    least: int = 20,
    words: int = 10_000,
) -> Probed:
    """The accuracy of probes that read something off the state after each block, and off the entrance (layer −1).

        tags       the part of speech of a word (UPOS), off its vector
        relations  the label of an arc, off the vectors of dependent and head side by side: which word is the head is
                   given, as in the edge probing of Tenney et al. (2019). Roots have no head, and are left out
        class      the label of an example, off the row that the prediction is read from, or the mean of such rows

    The vector of a word is the mean over its tokens. (Others take its last token, Liu et al. 2019, or learn weights,
    Tenney et al.; in a decoder only the last one has seen the whole word.) Rows are first divided by their length. The
    entrance is what the embedding of tokens returns: it knows neither other words nor places. Sentences are split by
    lot: probes are trained on one half, on channels of mean 0 and variance 1, and scored on the other. "linear" is a
    logistic regression, "mlp" has one hidden layer of 64.

    The control task (Hewitt & Liang 2019) gives each word type a label by lot, as often as labels are there in the half
    that is trained on; of an arc the dependent's type counts; of classes, which have no types, labels are permuted. It
    is learned by knowing types by heart and in no other way, so selectivity = accuracy − control is what a probe does
    beyond that. Of a type that is not in the half trained on nobody knows the control's label: there the control is at
    chance, and accuracy need not be. "selectivity_seen" compares the two where the type is. Permuted classes are never
    seen: that control is chance. Control labels are drawn once, for all layers and probes.
    NOTE[DIFF] A type is a word in lower case, or an uncased model could not tell two types apart.

    "reached" is the first layer with 95 % of the best layer's accuracy; lower layers are the first half of the blocks,
    upper ones the last, without the one in the middle. A task is readable if at some layer an interval that holds for
    all layers at a time is above the most frequent label. Intervals of 95 % come from drawing the scored sentences
    again; they do not tell of other halves, probes or control labels. NOTE[DIFF] Tenney et al. train one probe on a
    weighted sum of layers and ask what a further layer adds; here each is asked alone, as by Jawahar et al. (2019).

    Args:
        survey: the model, and sentences of CoNLL-U or examples with labels.
        tasks: "tags", "relations", "class", or several; None: all that the data serve.
        probe: "linear", "mlp" or both; the sentence is about the first.
        control: whether the control task is learned, too, which takes as long again.
        least: words, arcs or examples that a label must have in each half; other labels are left out.
        words: the most that are taken, by lot, sentence by sentence.
    """
    readers = _several("probe", probe, READERS)
    asked = None if tasks is None else _several("tasks", tasks, TASKS)
    true_or_false("control", control)
    least, words = at_least_one("least", least), at_least_one("words", words)
    survey = drawn_by_words(survey, words)
    seen = trace(survey.subject, inputs_of(survey.examples[:2]), states=("entrance", "block"))
    served, warnings = _served(survey, seen, asked, least)
    hits, late = trained(survey, seen, served, readers, control)
    found = [_Found(survey, task, readers, right) for task, right in zip(served, hits, strict=True)]
    depth = pd.DataFrame([row for one in found for row in one.depth()])
    tables = {
        "depth": depth, "layers": pd.DataFrame([row for one in found for row in one.layers()]),
        "tasks": pd.DataFrame([one.summary() for one in found]),
    } | {f"{one.task.name} by layer": one.curves() for one in found}  # fmt: skip
    few = min(len(np.unique(one.example[~one.trains])) for one in served)
    hardly = [f"Only {few} examples are scored: intervals are hardly ones."] if few < FEW else []
    return Probed(
        "readable", "", pd.DataFrame(), _sentence(depth, readers[0]), tables,
        {one.task.name: one.chart for one in found}, {"near": NEAR, **SETTINGS}, (*warnings, *late, *hardly),
    )  # fmt: skip


def _several(name: str, given: Any, known: tuple[Any, ...]) -> list[Any]:
    listed = [given] if isinstance(given, str) else [*given]
    if not listed:
        raise OptionError(f"{name}={given!r} is empty. Name some of {', '.join(known)}.")
    return [choose(name, one, known) for one in dict.fromkeys(listed)]


def _served(survey: Survey, seen: Trace, asked: list[str] | None, least: int) -> tuple[list[Task], list[str]]:
    """The tasks that data and model serve; and why others are not, and what is left out."""
    worded = any(words_of(one) for one in survey.examples)
    labels = [one.label for one in survey.examples if one.label is not None]
    if asked is None:
        asked = ["tags", "relations"] * worded + ["class"] * bool(labels)
    if not worded and not labels:
        raise NotServed(
            "the data have neither words with their syntax nor labels. Pass a file of CoNLL-U (.conllu), or name the "
            "column of labels: regard.data.read(…, label=…), or --label-column."
        )
    sites, warnings = stateful(survey.subject, seen)
    whole = {site.index for site in over_text(seen)}  # a site of fewer rows does not reach all words
    reads = [site.index for site in sites if state_at(seen, site.index).shape[:2] == seen.readout.shape]
    wrong = {
        "words": wordless(survey.subject, seen) if worded else "it needs words with their syntax: a file of CoNLL-U.",
        "class": None if labels else "it needs labels: name their column, regard.data.read(…, label=…).",
    }
    if seen.batch.source is not None or not reads:
        wrong["class"] = "the model reads no class from rows of its input that have states."
    if survey.head == "regression" or any(isinstance(one, float) for one in labels):
        wrong["class"] = "labels are numbers, and no classes."
    known, missing = ([], ()) if wrong["words"] else aligned(survey)
    train, served, warnings = {*halves(survey)[0]}, [], [*warnings, *missing]
    for name in asked:
        layers = [ENTRANCE, *(reads if name == "class" else [one.index for one in sites if one.index in whole])]
        why = wrong["class" if name == "class" else "words"]
        task, said = (None, why) if why else task_of(survey, name, layers, known, train, least)
        served += [task] if task else []
        warnings += [f"{name}: {said}"] if said else []
    if not served:
        raise NotServed(" ".join(warnings))
    return served, warnings


@dataclass(frozen=True, eq=False)
class _Found:
    """What was read in one task.

    Args:
        survey: the examples.
        task: what was to be read.
        readers: which probes read.
        hits: "accuracy", and "control" if there is one: ``(reader, layer, scored item)``, whether it was right.
    """

    survey: Survey
    task: Task
    readers: list[Reader]
    hits: Hits

    @cached_property
    def lots(self) -> Array:
        """``(scored item, 1 + draw)``: how often its example is there."""
        every = copies(range(len(self.survey.examples)), self.survey.draws, self.survey.seed)
        return every[self.task.example[~self.task.trains]]

    def rates(self, hits: Marks, among: Marks | None = None) -> Array:
        """``(1 + draw, …)``: the share of ``(…, scored item)`` that is right, among all or some items."""
        lots = self.lots if among is None else self.lots * among[:, None]
        return shares(np.moveaxis(hits @ lots, -1, 0), lots.sum(0).reshape(-1, *[1] * (hits.ndim - 1)))

    @cached_property
    def accuracy(self) -> Array:
        """``(1 + draw, reader, layer)``."""
        return self.rates(self.hits["accuracy"])

    @cached_property
    def majority(self) -> Array:
        """``(1 + draw,)``: how often the label is right that is most frequent where probes are trained."""
        return self.rates(self.task.labels[~self.task.trains] == self.task.shares.argmax())

    def layers(self) -> Iterator[dict[str, Any]]:
        """A row for each probe and layer."""
        every = {"accuracy": self.accuracy}
        if "control" in self.hits:
            every["control"] = self.rates(self.hits["control"])
            every["selectivity"] = self.accuracy - every["control"]
            if self.task.types is not None:
                right, by_heart = (self.rates(self.hits[what], self.task.seen) for what in ("accuracy", "control"))
                every["selectivity_seen"] = right - by_heart
        for at, reader in enumerate(self.readers):
            for place, layer in enumerate(self.task.layers):
                row: dict[str, Any] = {"task": self.task.name, "probe": reader, "layer": layer}
                for what, drawn in every.items():
                    row |= _cells(what, drawn[:, at, place])
                yield row | {"majority": self.majority[0], "words": len(self.lots)}

    def depth(self) -> Iterator[dict[str, Any]]:
        """A row for each probe: where the task becomes readable, and where it is more so."""
        layers = np.array(self.task.layers)
        blocks = np.flatnonzero(layers != ENTRANCE)
        half = len(blocks) // 2
        for at, reader in enumerate(self.readers):
            mine = self.accuracy[:, at]  # draw layer
            low, _ = ends(mine - self.majority[:, None], len(layers))
            row: dict[str, Any] = {"task": self.task.name, "probe": reader, "readable": bool((low > 0).any())}
            near = mine >= NEAR * mine.max(-1, keepdims=True)
            for what, places in {"reached": near.argmax(-1), "best": mine.argmax(-1)}.items():
                low, high = np.quantile(layers[places[1:]], [0.025, 0.975], method="inverted_cdf").astype(int)
                row |= {what: layers[places[0]], f"{what}_from": low, f"{what}_to": high}
            row["accuracy"] = mine[0].max()
            if half:
                lower, upper = (mine[:, some].mean(-1) for some in (blocks[:half], blocks[-half:]))
                row |= _cells("lower", lower) | _cells("upper", upper) | _cells("difference", lower - upper)
            yield row

    def summary(self) -> dict[str, Any]:
        """How much there is of what."""
        task = self.task
        sentences = [len(np.unique(task.example[some])) for some in (task.trains, ~task.trains)]
        return {
            "task": task.name, "labels": len(task.names), "examples trained on": sentences[0],
            "examples scored": sentences[1], "trained on": int(task.trains.sum()), "scored": len(self.lots),
            "seen": np.nan if task.types is None else task.seen.mean(),
            "most frequent": task.names[int(task.shares.argmax())], "majority": self.majority[0],
        }  # fmt: skip

    def curves(self) -> pd.DataFrame:
        """For the chart: a row for each layer, probe and, if there is one, its control task."""
        rows = []
        for one in self.layers():
            for what in self.hits:
                name = one["probe"] + ", control task" * (what == "control")
                cells = {f"accuracy{end}": one[f"{what}{end}"] for end in ("", "_low", "_high")}
                rows.append({"by": name, "layer": one["layer"]} | cells)
        return pd.DataFrame(rows).sort_values(["by", "layer"], kind="stable", ignore_index=True)

    @property
    def chart(self) -> dict[str, Any]:
        """How it is drawn."""
        return {
            "kind": "lines", "table": f"{self.task.name} by layer", "x": "layer", "y": "accuracy", "by": "by",
            "level": float(self.majority[0]),
            "caption": f"{TITLES[self.task.name]}: accuracy of probes on {len(self.lots):,} {UNITS[self.task.name]} of "
            "the other half of the examples, by layer; −1 is the entrance. Control task: labels by lot. Dashed: the "
            "most frequent label.",
        }  # fmt: skip


def _cells(name: str, drawn: Array) -> dict[str, Any]:
    """For a row of a table, of ``(1 + draw,)``."""
    low, high = np.quantile(drawn[1:], [0.025, 0.975])
    return {name: drawn[0], f"{name}_low": low, f"{name}_high": high}


def _sentence(depth: pd.DataFrame, reader: str) -> str:
    return " ".join(_told({**row}) for row in depth[depth["probe"] == reader].to_dict("records"))


def _told(one: Mapping[Any, Any]) -> str:
    """What came of one task."""
    said = f"{TITLES[one['task']]}, {one['probe']} probe: "
    if not one["readable"]:
        return f"{said}at no layer surely above the most frequent label."
    said += f"{one['accuracy']:.1%} at {_place(one['best'])}, its best, and {NEAR:.0%} of that first at "
    said += _place(one["reached"])
    if pd.isna(one.get("difference")):
        return f"{said}."
    more = "neither is surely more readable"
    if one["difference_low"] > 0 or one["difference_high"] < 0:
        more = f"the {'lower' if one['difference'] > 0 else 'upper'} are more readable"
    ends = f"{one['difference']:+.3f} [{one['difference_low']:+.3f}, {one['difference_high']:+.3f}]"
    return f"{said}; lower layers {one['lower']:.1%}, upper {one['upper']:.1%} ({ends}): {more}."


def _place(layer: int) -> str:
    return "the entrance" if layer == ENTRANCE else f"layer {layer}"
