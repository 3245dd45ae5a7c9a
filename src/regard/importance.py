"""Which columns matter overall? Local scores of all rows, in one stream, with intervals and side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from regard import draw
from regard.attention.running import ROWS_KEPT, batch_of, must_be_subject
from regard.data import Dataset
from regard.errors import EmptyInput, InputError, NotServed, OptionError, at_least_one, choose, must_know, non_finite
from regard.explaining import Job, job_for, model_of, traces_for
from regard.measures import bootstrap
from regard.measures.ranks import spearman_drawn
from regard.progress import Counter
from regard.references import Reference
from regard.types import JOIN, Batch, Features, Of, Scores, Subject, Targets

Method = str | tuple[str, Mapping[str, Any]]
Array = NDArray[np.float64]
METHODS: tuple[Method, ...] = (
    "average", ("first_layer", {"reduce": "column"}), ("first_layer", {"reduce": "diagonal"}), "rollout",
    "grad_rollout",
)  # fmt: skip
ENCODED = 4096  # rows that are encoded at a time
ROWS_AT_ONCE = 4096  # of attention in one forward pass; with gradients fewer, or they would be computed twice
RANKS = "Only ranks are meaningful, not the numbers."


@dataclass(frozen=True, eq=False)
class Importance:
    """How important each column is to a model, by several methods. Only ranks are meaningful, not the numbers.

    Args:
        columns: their names; those that share a row of attention are one.
        means: by method ``(1 + draw, column)``: the mean size of local scores over all rows, then over rows that were
            drawn again; NaN for columns that are absent.
        families: by method "attention", "reference" or "control".
        rows: how many rows of the table there were.
        absent: columns that the model does not attend to, and why.
        refused: methods that the model cannot serve, and why.
        settings: what was asked for.
    """

    columns: tuple[str, ...]
    means: Mapping[str, Array]
    families: Mapping[str, str]
    rows: int
    absent: Mapping[str, str]
    refused: Mapping[str, str]
    settings: Mapping[str, Any]

    def __repr__(self) -> str:
        listed = ", ".join(self.means)
        refused = f"; not served: {', '.join(self.refused)}" if self.refused else ""
        return f"Importance({len(self.columns)} columns by {listed}; {self.rows:,} rows{refused}. {RANKS})"

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each method and column, the most important first: column, method, value, low, high, rank."""
        tables = []
        for method, means in self.means.items():
            low, high = np.quantile(means[1:], [0.025, 0.975], axis=0) if len(means) > 1 else (means[0], means[0])
            table = pd.DataFrame(
                {"column": self.columns, "method": method, "value": means[0], "low": low, "high": high}
            )
            table["rank"] = table["value"].rank(ascending=False, method="min")
            tables.append(table.sort_values("rank", kind="stable"))
        return pd.concat(tables, ignore_index=True)

    def wide(self, what: str = "value") -> pd.DataFrame:
        """Columns × methods, of "value" or "rank"; the columns whose mean rank is highest first."""
        must_know("what", what, ("value", "rank"))
        ranks, wanted = (
            self.frame.pivot(index="column", columns="method", values=one)[[*self.means]] for one in ("rank", what)
        )
        order = ranks.reindex([*self.columns]).mean(axis=1).sort_values(kind="stable").index
        return wanted.loc[order].rename_axis(columns=None)

    def beside(self, *references: Reference | pd.Series[float]) -> Importance:
        """The same with references from elsewhere among its methods, for tables and pictures.

        Args:
            references: what `regard.references` gives, or a number for each column, with a name.
        """
        found = self
        for one in references:
            held = Reference.of(one)
            if held.name in found.means:
                raise InputError(
                    f"references: {held.name!r} is there already. Give one of them another name: series.rename(…), or "
                    "dataclasses.replace(reference, name=…)."
                )
            found = found.grouped(held.groups)
            draws = len(next(iter(found.means.values()))) - 1
            places = [[*held.groups].index(name) for name in found.columns]
            means = held.drawn(draws, found.settings["seed"])[:, places]
            families = {**found.families, held.name: "reference"}
            found = replace(found, means={**found.means, held.name: means}, families=families)
        return found

    def grouped(self, groups: Mapping[str, Sequence[str]]) -> Importance:
        """The same for groups of columns, by name: what the columns of a group have is summed.

        Columns that share a row of attention are one already, named "a + b": the group of that name is theirs.
        """
        parts = {name: [name] if JOIN in name and name in self.columns else [*some] for name, some in groups.items()}
        named = [column for some in parts.values() for column in some]
        if sorted(named) != sorted(self.columns):
            odd = sorted({*named} ^ {*self.columns}) or sorted({one for one in named if named.count(one) > 1})
            raise InputError(
                f"groups: {odd} are not once in both, the groups and the columns {[*self.columns]}. Columns that share "
                "a row of attention, 'a + b', can only be a group: groups={'a + b': ['a', 'b']}."
            )
        places = [[self.columns.index(column) for column in some] for some in parts.values()]
        means = {
            method: np.stack([numbers[:, some].sum(1) for some in places], 1) for method, numbers in self.means.items()
        }
        absent = {
            name: self.absent[column] for name, some in parts.items() for column in some if column in self.absent
        }  # fmt: skip
        return replace(self, columns=tuple(parts), means=means, absent=absent)

    def agreement(self, *references: str | Reference | pd.Series[float]) -> pd.DataFrame:
        """Spearman's ρ of the ranking by each attention method with that by each reference.

        Intervals are over the rows of the table, drawn again (and over the repeats of a reference that has some).
        Columns that are absent take no part.

        Args:
            references: names of its own methods, what `regard.references` gives, or a number for each column; none:
                all references that it has.

        Returns:
            A row for each pair: method, reference, spearman, low, high, and how many columns were ranked.
        """
        given = [one if isinstance(one, str) else Reference.of(one) for one in references]
        found = self.beside(*(one for one in given if isinstance(one, Reference)))
        against = [one if isinstance(one, str) else one.name for one in given]
        for name in against:
            must_know("references", name, found.means)
        if not references:
            against = [name for name, kind in self.families.items() if kind == "reference"]
        if not against:
            raise InputError("there is no reference. Pass one, such as regard.references.permutation_importance(…).")
        rows = []
        for method in found.means:
            for name in () if method in against or found.families[method] == "reference" else against:
                x, y = found.means[method], found.means[name]
                ranked = np.isfinite(x[0]) & np.isfinite(y[0])
                for who, numbers in ((method, x), (name, y)):
                    if not np.ptp(numbers[0, ranked]) > 0:
                        raise InputError(
                            f"{who} gives all {int(ranked.sum())} columns the same number: it ranks none. Of a "
                            "reference try more rows, or another scoring, such as 'neg_log_loss'."
                        )
                alike = spearman_drawn(x[:, ranked], y[:, ranked])
                rows.append({"method": method, "reference": name, **alike, "columns": int(ranked.sum())})
        return pd.DataFrame(rows)

    def plot(self, what: str | None = None, *, top: int = 30) -> draw.Picture:
        """A bar for each column with its interval, by the method named (None: the first); or all "methods" as a map.

        Args:
            what: name of a method, or "methods": a map of columns × methods, whose shades are ranks.
            top: how many columns are drawn.
        """
        if what == "methods":
            ranks = self.wide("rank")[:top]
            return draw.rank_map(
                ranks.to_numpy(), [*ranks.index], [*ranks.columns], title="Which columns matter, by method",
                caption=f"1 is the most important column. {self.note}",
            )  # fmt: skip
        name = next(iter(self.means)) if what is None else what
        must_know("what", name, (*self.means, "methods"))
        table = self.frame.query("method == @name").dropna(subset=["value"])[:top]
        return draw.interval_bars(
            table["column"].tolist(), table["value"], table["low"], table["high"], title=f"Columns by {name}",
            caption=f"Mean size over {self.rows:,} rows, 95 % intervals. {self.note}",
        )  # fmt: skip

    @property
    def note(self) -> str:
        """What a reader must know beside the numbers."""
        said = [RANKS]
        for reason in dict.fromkeys(self.absent.values()):
            said += [f"Absent: {', '.join(name for name, why in self.absent.items() if why == reason)} ({reason})."]
        said += [f"Not served: {why}" for why in dict.fromkeys(self.refused.values())]
        return " ".join(said)

    def _repr_html_(self) -> str:
        return self.plot("methods")._repr_html_()


def feature_importance(
    subject: Subject,
    data: Any,
    *,
    methods: Sequence[Method] = METHODS,
    target: Targets = None,
    of: Of | None = None,
    batch_size: int | None = None,
    draws: int = 200,
    seed: int = 0,
) -> Importance:
    """How important each column is overall: the mean size of its local scores over all rows of a table.

    The ways of the literature side by side: attention averaged over blocks, heads and rows (Gorishniy et al.), the
    first layer's column sums and diagonal (Borisov et al.), rollout, and gradient-weighted rollout. The data run
    through in a stream: memory does not grow with rows. Intervals are a bootstrap over rows (each has a Poisson number
    of copies in each draw). Special rows such as [CLS] are left out. Only ranks are meaningful, say the authors of the
    FT-Transformer; whether they are, `Importance.agreement` with `regard.references.permutation_importance` tells.

    Args:
        subject: made by `regard.tabular`, or by `regard.module` with the same features for all examples.
        data: a DataFrame, a list of rows, tensors, or an iterator over such parts, each of any length.
        methods: names from `regard.list_methods`, with options as ``(name, options)``. References take their time:
            "integrated_gradients", "shapley", "leave_one_out".
        target: a class, label, pair or function of the output, for all rows; None: what is predicted for each.
        of: what is explained of it: "logit", "probability" or "logprob". None: what the paper of an attention method
            says; references explain what leave_one_out does, so that they can be compared.
        batch_size: how many rows run together; None: as many as are fast.
        draws: of rows, for intervals.
        seed: of the draws, and of methods that draw lots.

    Example:
        >>> import pandas as pd, regard
        >>> frame = pd.DataFrame({"sex": ["f", "m", "f", "m"], "job": ["a", "b", "b", "a"]})
        >>> schema = regard.data.schema.Schema.of(frame)
        >>> subject = regard.tabular(regard.models.TabTransformer(0, schema.cardinalities, 2), schema)
        >>> found = feature_importance(subject, frame, methods=["average", "rollout"])
        >>> found.wide().shape
        (2, 2)
    """
    must_be_subject(subject)
    at_least_one("draws", draws)
    jobs = _jobs(subject, methods, seed, of)
    sums = _Sums(draws, np.random.default_rng(seed))
    listed = len(data) if isinstance(data, (pd.DataFrame, list)) else None
    with Counter("importance of columns", listed) as counter:
        for batch in _batches(subject, data, batch_size, jobs):
            sums.add(jobs, batch, target)
            counter.advance(len(batch))
    if sums.features is None:
        raise EmptyInput("data holds no rows.")
    words, reason = sums.features.words, sums.features.reason
    settings = {"draws": draws, "seed": seed, "model": model_of(subject), "target": str(target or "predicted")}
    return Importance(
        words, sums.means(),
        {label: jobs[label].method.family for label in sums.totals}, sums.rows,
        dict.fromkeys(sums.features.absent, reason), sums.refused, settings,
    )  # fmt: skip


def over_seeds(tables: Sequence[pd.DataFrame], *, seed: int = 0) -> pd.DataFrame:
    """What differs between models that were trained with other seeds: mean, interval and spread of Spearman's ρ.

    Args:
        tables: one for each trained model: what `Importance.agreement` gave, or the table "global" of the trial
            `agreement`.
        seed: of the bootstrap over models.

    Returns:
        A row for each pair, in their order: spearman (the mean over models), low, high, deviation, least, most, n.

    Example:
        >>> pairs = {"method": ["rollout"], "reference": ["permutation"]}
        >>> one, other = (pd.DataFrame({**pairs, "spearman": [rho]}) for rho in (0.5, 0.75))
        >>> over_seeds([one, other])[["method", "spearman", "n"]].values.tolist()
        [['rollout', 0.625, 2]]
    """
    if isinstance(tables, pd.DataFrame) or not all("spearman" in one for one in tables):
        raise InputError("tables must be a list: of each trained model the table that `Importance.agreement` gave.")
    if not tables:
        raise EmptyInput("tables holds none. Pass one for each trained model.")
    keys = [name for name in ("method", "reference", "pair") if name in tables[0]]
    rows = []
    for names, some in pd.concat(tables).groupby(keys, sort=False):
        found = bootstrap(some["spearman"], seed=seed).unless_single
        spread = {"deviation": some["spearman"].std(ddof=1), "least": some["spearman"].min()}
        rows.append(
            dict(zip(keys, names, strict=True))
            | {"spearman": found.value, "low": found.low, "high": found.high}
            | spread | {"most": some["spearman"].max(), "n": found.n}
        )  # fmt: skip
    return pd.DataFrame(rows)


@dataclass
class _Sums:
    """What is added up, batch by batch: (1 + draw, column) for each method."""

    draws: int
    lots: np.random.Generator
    rows: int = 0
    count: Array = field(default_factory=lambda: np.zeros(1))
    totals: dict[str, Array] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    features: Features | None = None

    def add(self, jobs: Mapping[str, Job], batch: Batch, target: Targets) -> None:
        """One batch."""
        first = self.features or batch.features[0]
        if any(one is not first and one != first for one in batch.features):
            raise InputError("data: the rows do not all have the same features, so there is no mean of each.")
        self.features = first
        # a row's lots follow on those of the row before it, whatever the batches are
        copies = np.ones((len(batch), 1 + self.draws))
        copies[:, 1:] = self.lots.poisson(1.0, (len(batch), self.draws))
        asked = {label: job for label, job in jobs.items() if label not in self.refused}
        traces = traces_for([*asked.values()], batch, target)
        for label, job in asked.items():
            try:
                scores = job.method(traces[job.of], **job.options)
            except NotServed as problem:
                if label in self.totals:
                    raise
                self.refused[label] = str(problem)
                continue
            sizes = np.abs(_on_words(label, scores, first))
            self.totals[label] = self.totals.get(label, 0.0) + copies.T @ sizes
        if not self.totals:
            raise NotServed(" ".join(self.refused.values()))
        self.count = self.count + copies.sum(0)
        self.rows += len(batch)

    def means(self) -> dict[str, Array]:
        """By method ``(1 + draw, column)``. A draw of very few rows may hold none: it is then all of them."""
        drawn = np.where(self.count > 0, np.arange(len(self.count)), 0)
        return {label: total[drawn] / self.count[drawn, None] for label, total in self.totals.items()}


def _on_words(label: str, scores: Scores, features: Features) -> Array:
    """``(example, word)``: the scores of its rows, summed; NaN for those that have none."""
    if scores.rows is None or scores.axes:
        raise OptionError(f"{label}: it does not give one number for each column. Leave per_layer and the like out.")
    rows: Tensor = scores.rows.detach().double()
    if not rows.isfinite().all():
        raise non_finite(f"what {label} gives")
    found = np.full((len(rows), len(features.words)), np.nan)
    for place, some in enumerate(features.rows_of_words):
        if some:
            found[:, place] = rows[:, list(some)].sum(1).numpy(force=True)
    return found


def _jobs(subject: Subject, methods: Sequence[Method], seed: int, of: Of | None) -> dict[str, Job]:
    """What is asked, by the name that it has in tables."""
    if of is not None:
        choose("of", of, ("logit", "probability", "logprob"))
    together = of or job_for(subject, "leave_one_out", {}).of
    jobs: dict[str, Job] = {}
    for entry in [methods] if isinstance(methods, str) else methods:
        name, options = (entry, {}) if isinstance(entry, str) else entry
        label = name + "".join(f" {key}={value}" for key, value in options.items())
        job = job_for(subject, name, options, seed)
        jobs[label] = job if of is None and job.method.family != "reference" else replace(job, of=together)
    if not jobs:
        raise OptionError("methods is empty. Name at least one of regard.list_methods().")
    return jobs


def _batches(subject: Subject, data: Any, size: int | None, jobs: Mapping[str, Job]) -> Iterator[Batch]:
    """All rows, in batches; never more than some thousand are encoded at a time."""
    if size is not None:
        at_least_one("batch_size", size)
    keeps = any(job.differentiates for job in jobs.values())
    for chunk in _encoded(subject, data):
        fast = (ROWS_KEPT if keeps else ROWS_AT_ONCE) // max(chunk.lengths)
        step = max(1, fast) if size is None else size
        for start in range(0, len(chunk), step):
            yield chunk if len(chunk) <= step else chunk.pick(range(start, min(start + step, len(chunk))))


def _encoded(subject: Subject, data: Any) -> Iterator[Batch]:
    if isinstance(data, Dataset):
        data = data.frame()[[*data.columns]]
    elif hasattr(data, "to_pandas"):
        data = data.to_pandas()
    if isinstance(data, Iterator):
        for part in data:
            yield from _encoded(subject, part)
    elif isinstance(data, (pd.DataFrame, list)):
        for start in range(0, len(data), ENCODED):
            rows = slice(start, start + ENCODED)
            yield batch_of(subject, data[rows] if isinstance(data, list) else data.iloc[rows])
    else:
        yield batch_of(subject, data)
