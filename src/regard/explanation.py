"""One number for each token, with all that is needed to say what it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from regard import draw
from regard.errors import InputError, OptionError, choose
from regard.types import Features, Special

SCHEMA = 1  # of the JSON; raised when a field changes its meaning
Reduce = Literal["sum", "mean", "max"]


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """The attribution of one prediction: a number for each token, keyed by position.

    Args:
        scores: ``(*axes)``, raw: nothing is normalised or left out. The last axis is tokens.
        axes: "layer", "head" and "query" where they were asked for, then "token".
        features: tokens and words; where there are two sequences, those of the source come first.
        parts: the sequences that the tokens belong to, and how many each has.
        queries: the tokens of the "query" axis.
        method: name of the method.
        options: all options of the method, defaults included.
        target: what is explained, in words.
        value: the number that is explained.
        probability: of the class that is explained, where there is one.
        of: which function of the output the number is.
        special: what words and pictures do with special tokens: "keep", "drop" or "renormalise" over the others.
        sink: the same for the first token, on which decoders rest attention that is not needed elsewhere.
        check: the trace's self-check: the reconstruction error, and how the readout is known.
        facts: what else the method found out.
        model: class and name of the model.
        versions: of regard, torch and transformers.
        seed: of methods that draw lots.
        picture: ``(height, width, 3)``, where the tokens are patches of one.
    """

    scores: NDArray[np.floating[Any]]
    axes: tuple[str, ...]
    features: Features
    parts: Mapping[str, int]
    queries: tuple[str, ...] | None
    method: str
    options: Mapping[str, Any]
    target: str
    value: float | None
    probability: float | None
    of: str
    special: Special
    sink: Special
    check: Mapping[str, Any]
    facts: Mapping[str, Any]
    model: Mapping[str, str]
    versions: Mapping[str, str]
    seed: int | None = None
    picture: NDArray[np.uint8] | None = None

    def __repr__(self) -> str:
        shape = " × ".join(
            f"{size} {axis.replace('query', 'querie')}s"
            for size, axis in zip(self.scores.shape, self.axes, strict=True)
        )
        return f"Explanation({self.method} of {self.target!r}, {shape})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Explanation) and self.to_dict() == other.to_dict()

    __hash__ = object.__hash__

    @property
    def caption(self) -> str:
        """Method, target, probability and policies, in words: no picture stands without it."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items() if value is not False)
        sure = "" if self.probability is None else f" (probability {self.probability:.3f})"
        first = ""
        held = f" ({self.first_share:.0%} of all)" if self.axes == ("token",) else ""
        gone = self.features.special[self._first] and self.special != "keep"
        if self.sink != "keep" or (held and self.first_share > 0.5 and not gone):
            first = f"; first token{held}: {self.sink}"
        called = f"{self.method}({options})" if options else self.method
        target = self.target if self.target == self.target.strip() else repr(self.target)
        more = f"; absent: {self.features.left_out}" if self.features.absent else ""
        more += "; attention over samples is left out" if self.check.get("between_examples") else ""
        return f"{called} of {target}{sure}; special tokens: {self.special}{first}{more}."

    @property
    def first_share(self) -> float:
        """How much of all scores, by size, rests on the first token: the attention sink of a decoder."""
        sizes = np.abs(self._plain())
        return float(sizes[self._first] / max(sizes.sum(), np.finfo(float).tiny))

    @property
    def _part(self) -> list[str]:
        """For each token the sequence that it belongs to."""
        return [name for name, count in self.parts.items() for _ in range(count)]

    @property
    def _first(self) -> int:
        """Place of the first token of the input; where there is a source, of what was produced."""
        return len(self.features.tokens) - list(self.parts.values())[-1]

    def frame(self) -> pd.DataFrame:
        """A row for each score: position, token, word, whether it is special, and the score; raw.

        With more axes than tokens, a row for each layer, head or query and token, with their numbers.
        """
        tokens = self.features.tokens
        index = np.indices(self.scores.shape).reshape(self.scores.ndim, -1)
        table: dict[str, Any] = {axis: index[place] for place, axis in enumerate(self.axes[:-1])}
        place = index[-1]
        words = [None if word is None else self.features.words[word] for word in self.features.word]
        table |= {
            "position": place,
            "token": [tokens[i] for i in place],
            "word": [words[i] for i in place],
            "special": [self.features.special[i] for i in place],
        }
        if len(self.parts) > 1:
            table["part"] = [self._part[i] for i in place]
        return pd.DataFrame(table | {"score": self.scores.ravel()})

    def words(self, reduce: Reduce = "sum") -> pd.DataFrame:
        """A row for each word, in order: its tokens' scores by "sum", "mean" or "max" (of size, with its sign).

        Words that no row of the model stands for have NaN; ``features.reason`` says why.
        Special tokens are rows of their own with special="keep"; with "drop" they are left out, with "renormalise" what
        they had is given to the others in proportion. The policy for the first token works the same way.
        """
        choose("reduce", reduce, ("sum", "mean", "max"))
        scores, shown = self._under_policy()
        rows: list[dict[str, Any]] = []
        for place, (word, tokens) in enumerate(self._grouped()):
            if word is not None and not tokens:
                rows.append({"position": place, "word": self.features.words[word], "special": False, "score": math.nan})
            elif kept := [token for token in tokens if shown[token]]:
                odd = word is None
                name = self.features.tokens[kept[0]] if word is None else self.features.words[word]
                numbers = scores[kept]
                score = numbers[np.abs(numbers).argmax()] if reduce == "max" else getattr(numbers, reduce)()
                part = {"part": self._part[kept[0]]} if len(self.parts) > 1 else {}
                rows.append({"position": place, "word": name, "special": odd, **part, "score": float(score)})
        if not rows:
            raise OptionError(f"special={self.special!r} and sink={self.sink!r} leave no word. Keep one of the two.")
        return pd.DataFrame(rows)

    def _grouped(self) -> list[tuple[int | None, list[int]]]:
        """The words, those without tokens, too, and special tokens one by one: in the order of the words."""
        groups: list[tuple[float, int | None, list[int]]] = []
        passed = -1  # words so far; special tokens stay where they are among them, and behind them all
        last = max((token for token, word in enumerate(self.features.word) if word is not None), default=-1)
        tokens: dict[int, list[int]] = {place: [] for place in range(len(self.features.words))}
        for token, word in enumerate(self.features.word):
            if word is None:
                groups.append((passed + 0.5 if token < last else math.inf, None, [token]))
            else:
                tokens[word].append(token)
                passed = max(passed, word)
        groups += [(float(place), place, some) for place, some in tokens.items()]
        return [(word, some) for _, word, some in sorted(groups, key=lambda group: group[0])]

    def plot(self, kind: str | None = None) -> draw.Picture:
        """A picture: "text", "bars", "image", "grid" or "lines" (layers × heads), "map" (token × token) or "tree".

        None chooses by what there is. Pictures show themselves in notebooks and save to .html, .svg and .png.
        """
        possible = self._possible()
        if kind is None:
            kind = possible[0]
        if kind not in possible:
            raise OptionError(f"kind={kind!r}: with axes {self.axes} there are the pictures {', '.join(possible)}.")
        return getattr(self, f"_{kind}")()  # type: ignore[no-any-return]

    def to_html(self, path: str | Path) -> Path:
        """Write its picture to a page of its own, which needs nothing from the network."""
        path = Path(path)
        if path.suffix != ".html":
            raise OptionError(f"path={str(path)!r} must end in .html. Use .plot().save(path) for .svg and .png.")
        return self.plot().save(path)

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        plain |= {
            "schema": SCHEMA,
            "scores": _listed(self.scores),
            "dtype": str(self.scores.dtype),
            "features": asdict(self.features),
            "facts": {name: [str(fact.dtype), _listed(fact)] for name, fact in self.facts.items()},
            "picture": None if self.picture is None else self.picture.tolist(),
        }
        return json.loads(json.dumps(plain, default=lambda number: number.item()))  # type: ignore[no-any-return]

    def save(self, path: str | Path) -> Path:
        """Write all of it to a JSON file, for `regard.load_explanation`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), ensure_ascii=False), encoding="utf-8")
        return path

    def to_shap(self) -> Any:
        """The scores of tokens as a `shap.Explanation`, for its plots; needs shap."""
        try:
            from shap import Explanation as ShapExplanation
        except ImportError:
            raise OptionError("shap is not installed: pip install 'regard[shap]'.") from None
        scores = self._plain()
        base = 0.0 if self.value is None else self.value - float(scores.sum())
        return ShapExplanation(scores, base_values=base, data=np.array(self.features.tokens, dtype=object))

    @classmethod
    def mean(cls, explanations: Sequence[Explanation]) -> Explanation:
        """The mean over examples that have the same tokens: the columns of a table, the patches of pictures."""
        alike = {(one.features.tokens, one.method, str(one.options), one.axes) for one in explanations}
        if len(alike) != 1:
            raise InputError("a mean needs explanations, at least one, by one method, that all have the same tokens.")
        first = explanations[0]
        scores = np.mean([one.scores for one in explanations], axis=0)
        return replace(
            first, scores=scores, target=f"{first.target} (mean of {len(explanations)})", value=None, probability=None,
            picture=None, facts={},
        )  # fmt: skip

    def _under_policy(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Scores of the tokens, and which of them are shown."""
        scores = self._plain()
        shown = np.ones(len(scores), dtype=bool)
        masks = {self.special: np.array(self.features.special, dtype=bool)}
        first = np.arange(len(scores)) == self._first
        masks[self.sink] = masks.get(self.sink, False) | first
        for policy, taken in masks.items():
            if policy == "keep":
                continue
            left = np.abs(scores[shown & ~taken]).sum()
            if policy == "renormalise" and left:
                scores = scores * (np.abs(scores[shown]).sum() / left)
            shown &= ~taken
        return scores, shown

    def _plain(self) -> NDArray[np.float64]:
        """One score for each token."""
        if self.axes != ("token",):
            raise OptionError(
                f"these scores have axes {self.axes}, so there is not one for each word. Use .frame() or .plot(), or "
                "explain without per_layer, per_head and matrix."
            )
        return self.scores.astype(np.float64)

    def _possible(self) -> list[str]:
        if self.axes == ("token",):
            return ["text", "bars"] if self.picture is None else ["image", "bars"]
        if self.axes in (("query", "token"), ("layer", "query", "token")):
            return ["map"] if len(self.axes) == 2 else ["tree"]
        return ["grid", "lines"] if "query" not in self.axes else ["grid"]

    def _text(self) -> draw.Picture:
        table = self.words().dropna(subset="score")  # the caption names what is absent
        return draw.text_line(
            table["word"].tolist(), table["score"].tolist(), title=self._title, caption=self.caption,
            special=table["special"].tolist(),
        )  # fmt: skip

    def _bars(self) -> draw.Picture:
        table = self.words().dropna(subset="score")
        return draw.bars(table["word"].tolist(), table["score"].tolist(), title=self._title, caption=self.caption)

    def _image(self) -> draw.Picture:
        assert self.picture is not None
        assert self.features.grid is not None
        table = self.words()
        values = table.loc[~table["special"].astype(bool), "score"].to_numpy().reshape(self.features.grid)
        return draw.image_map(self.picture, values, title=self._title, caption=self.caption, legend=self.method)

    def _map(self) -> draw.Picture:
        return draw.token_map(
            self.scores, list(self.queries or ()), list(self.features.tokens), title=self._title,
            caption=self.caption, legend=self.method,
        )  # fmt: skip

    def _tree(self) -> draw.Picture:
        return draw.tree(self.scores, list(self.features.tokens), title=self._title, caption=self.caption)

    def _grid(self) -> draw.Picture:
        """The largest score of each layer and head, and the token that has it."""
        scores = self._by_head()
        if scores.ndim > 3:
            raise OptionError(f"with axes {self.axes} there are too many numbers for a picture. Use .frame().")
        top = np.abs(scores).argmax(-1)
        values = np.take_along_axis(scores, top[..., None], -1)[..., 0]
        labels = [[self.features.tokens[place] for place in row] for row in top]
        return draw.heads_grid(values, labels, title=self._title, caption=self.caption, legend="largest score")

    def _lines(self) -> draw.Picture:
        names = {axis: None if axis[:-1] in self.axes else [f"all {axis}"] for axis in ("layers", "heads")}
        return draw.head_lines(
            self._by_head(), list(self.features.tokens), title=self._title, caption=self.caption, **names
        )

    def _by_head(self) -> NDArray[np.floating[Any]]:
        """``(layer, head, …, token)``, of which one may stand for all."""
        scores = self.scores
        for axis in ("layer", "head"):
            if axis not in self.axes:
                scores = np.expand_dims(scores, 0 if axis == "layer" else 1)
        return scores

    @property
    def _title(self) -> str:
        return f"{self.method} of {self.target}"


def load_explanation(path: str | Path) -> Explanation:
    """Read an explanation that `Explanation.save` wrote; all of it comes back as it was.

    Example::

        why.save("why.json")
        assert regard.load_explanation("why.json") == why
    """
    try:
        plain = json.loads(Path(path).read_text(encoding="utf-8"))
        schema = plain.pop("schema")
    except FileNotFoundError:
        raise InputError(f"path={str(path)!r} is not there.") from None
    except (ValueError, KeyError, AttributeError, TypeError, UnicodeDecodeError):
        raise InputError(f"path={str(path)!r} is not an explanation that regard has saved.") from None
    if schema != SCHEMA:
        raise InputError(f"path={str(path)!r} has schema {schema}; this version of regard reads schema {SCHEMA}.")
    try:
        features: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.pop("features").items()
        }
        features["spans"] = tuple(tuple(one) for one in features.get("spans", ()))
        plain["features"] = Features(**features)
        plain["scores"] = np.array(plain["scores"], dtype=float).astype(plain.pop("dtype"))
        plain["facts"] = {name: np.array(value, dtype) for name, (dtype, value) in plain["facts"].items()}
        plain["axes"] = tuple(plain["axes"])
        plain["queries"] = plain["queries"] and tuple(plain["queries"])
        plain["picture"] = plain["picture"] and np.array(plain["picture"], dtype=np.uint8)
        return Explanation(**plain)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"path={str(path)!r} is not an explanation that regard has saved.") from None


def _listed(numbers: NDArray[Any]) -> Any:
    """Nested lists; JSON has no NaN, so what is absent is null."""
    if np.issubdtype(numbers.dtype, np.floating) and not np.isfinite(numbers).all():
        return np.where(np.isfinite(numbers), numbers.astype(object), None).tolist()  # type: ignore[call-overload]
    return numbers.tolist()
