"""Where an input becomes vectors: what references differentiate by, and put other vectors in the place of.

For tokens that is what their embedding returns, before positions are added; what several return, side by side. Where
no ids of a sequence are embedded (pictures, columns of a table) it is the first state of all its rows that a submodule
is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regard.attention.checkpoints import is_state
from regard.attention.running import mixes, must_differentiate, uncompiled, undisturbed
from regard.attention.shadowing import shadowing
from regard.attention.sharding import in_place_of, whole
from regard.attention.sites import Strand
from regard.errors import NoGradient, NotServed
from regard.types import Batch, How, Scores, Source, Subject

IDS = ("input_ids", "ids")  # of the source where there is one, and then
PRODUCED = ("decoder_input_ids",)
Vectors = dict[Strand, Tensor]  # (example, row, channel) of each sequence
Pieces = dict[Strand, list[Tensor]]  # the same, by embedding


class Entrance:
    """The vectors that a batch enters a model as.

    Args:
        subject: the model and how it is called.
        batch: what it is called with.
    """

    def __init__(self, subject: Subject, batch: Batch) -> None:
        self.subject, self.batch = subject, batch
        self.rows_first: dict[Strand, bool] = {}
        pieces: Pieces = {}
        states: Vectors = {}
        size, model = len(batch), subject.model
        with torch.no_grad(), undisturbed(model), uncompiled(model):
            with _Embeddings(batch, {}, pieces) as seen:
                subject.forward(batch)
            if len(pieces) < len(batch.lengths):
                # with another example where there are as many as rows: which axis is which must be told
                more = next(count for count in range(size, size + 3) if count not in batch.lengths)
                wider = batch.pick([*range(size), *[0] * (more - size)])
                with self._shadowed(_States(wider, {}, states, self.rows_first)):
                    subject.forward(wider)
        self.tables = seen.tables
        self.widths = {strand: [one.shape[-1] for one in some] for strand, some in pieces.items()}
        self.vectors: Vectors = {strand: one[:size] for strand, one in states.items()}
        self.vectors |= {strand: torch.cat(some, -1) for strand, some in pieces.items()}
        if not self.vectors:
            raise NotServed(
                "the input cannot be differentiated by: the model embeds none of its ids, and no submodule is given "
                "a state (example, row, channel) of its rows."
            )

    def emptied(self, how: How) -> Vectors:
        """The input without its words; special tokens and padding stay. Of two sequences the source's vectors."""
        strand: Strand = "rows" if self.batch.source is None else "source"
        words = _words(self.batch.source or self.batch)
        instead = Entrance(self.subject, self.subject.without(self.batch, words, how)).vectors
        return {
            name: one.where(words[..., None], self.vectors[name]) for name, one in instead.items() if name == strand
        }

    def zeroed(self) -> Vectors:
        """Zeros in the place of words, in all sequences."""
        sequences: dict[Strand, Any] = {"rows": self.batch, "source": self.batch.source}
        return {name: one.masked_fill(_words(sequences[name])[..., None], 0) for name, one in self.vectors.items()}

    def _shadowed(self, states: _States) -> AbstractContextManager[None]:
        inner = list(self.subject.model.modules())[1:]
        return shadowing([one for one in inner if not isinstance(one, torch.jit.ScriptModule)], states.shadow)

    @contextmanager
    def given(self, vectors: Mapping[Strand, Tensor], batch: Batch) -> Iterator[None]:
        """The model goes on with these vectors instead of its own."""
        pieces = {name: one.split(self.widths[name], -1) for name, one in vectors.items() if name in self.widths}
        states = {name: one for name, one in vectors.items() if name not in self.widths}
        shadows = self._shadowed(_States(batch, states, {}, self.rows_first)) if states else nullcontext()
        with _Embeddings(batch, pieces, {}), shadows:
            yield

    def run(self, vectors: Mapping[Strand, Tensor], forward: Callable[[Batch], Tensor] | None = None) -> Tensor:
        """The output with these vectors; several times as many are as many variants of the batch, one after another."""
        model = self.subject.model
        must_differentiate(model)
        if torch.is_inference_mode_enabled():
            raise NoGradient("inside torch.inference_mode() there are no gradients. Leave that block first.")
        times = len(next(iter(vectors.values()))) // len(self.batch)
        if times > 1 and mixes(self.subject, self.batch):
            chunks = zip(*(one.chunk(times) for one in vectors.values()), strict=True)
            return torch.cat([self.run(dict(zip(vectors, some, strict=True)), forward) for some in chunks])
        batch = self.batch if times == 1 else self.batch.pick([*range(len(self.batch))] * times)
        with undisturbed(model), uncompiled(model), self.given(vectors, batch):
            return (forward or self.subject.forward)(batch)

    def scores(self, numbers: Mapping[Strand, Tensor], **rest: Any) -> Scores:
        """Numbers ``(example, row)`` of some sequences; padding has 0."""
        sequences: dict[Strand, Any] = {"rows": self.batch, "source": self.batch.source}
        found = {name: numbers[name] * one.real for name, one in sequences.items() if one and name in numbers}
        return Scores(found.get("rows"), found.get("source"), **rest)


class _Embeddings(TorchFunctionMode):
    """Sees the ids of a batch being embedded."""

    def __init__(self, batch: Batch, given: Mapping[Strand, Sequence[Tensor]], seen: Pieces) -> None:
        super().__init__()
        self.given, self.seen = given, seen
        self.tables: list[Tensor] = []  # what the ids are looked up in, each once
        self.ids: dict[Strand, list[Tensor]] = {"rows": _ids(batch, PRODUCED if batch.source else IDS, batch.real)}
        if batch.source is not None:
            self.ids["source"] = _ids(batch, IDS, batch.source.real)
        mine = {one.data_ptr() for known in self.ids.values() for one in known}
        # a query may say the same as the text: it is told by where it lies
        self.others = {one.data_ptr() for one in batch.inputs.values() if isinstance(one, Tensor)} - mine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "embedding":
            ids = whole(args[0] if args else (kwargs or {})["input"])
            for strand, known in self.ids.items() if ids.data_ptr() not in self.others else ():
                if any(ids.shape == one.shape and torch.equal(ids, one.to(ids.device)) for one in known):
                    pieces = self.seen.setdefault(strand, [])
                    result = in_place_of(whole(result), result)  # spread over processes, it can be summed but once
                    pieces.append(whole(result).clone())
                    table = (*args, *(kwargs or {}).values())[1]
                    self.tables += [table] if all(table is not one for one in self.tables) else []
                    # a copy: the model may go on to write into it
                    if strand in self.given:
                        return in_place_of(self.given[strand][len(pieces) - 1].clone(), result)
                    return result
        return result


class _States:
    """Sees the first states of all rows that submodules are given.

    ``rows_first`` says of a sequence whether its state is ``(row, example, channel)``; it is found out by the first.
    """

    def __init__(
        self, batch: Batch, given: Mapping[Strand, Tensor], seen: Vectors, rows_first: dict[Strand, bool]
    ) -> None:
        self.given, self.seen, self.rows_first = given, seen, rows_first
        sequences: dict[Strand, Any] = {"rows": batch, "source": batch.source}
        self.shapes = {strand: tuple(one.real.shape) for strand, one in sequences.items() if one}

    def shadow(self, _: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A submodule's forward, with other states."""

        def instead(*args: Any, **kwargs: Any) -> Any:
            flat, tree = pytree.tree_flatten((args, kwargs))
            for strand, shape in self.shapes.items():
                if strand not in self.seen:
                    self._exchange(strand, shape, flat)
            args, kwargs = pytree.tree_unflatten(flat, tree)
            return forward(*args, **kwargs)

        return instead

    def _exchange(self, strand: Strand, shape: tuple[int, ...], flat: list[Any]) -> None:
        for place, one in enumerate(flat):
            found = tuple(one.shape[:2]) if is_state(one) else None
            if found == (shape[::-1] if (flip := self.rows_first.get(strand, found != shape)) else shape):
                self.rows_first[strand] = flip
                # copies: the model may go on to write into it
                self.seen[strand] = (one.transpose(0, 1) if flip else one).clone()
                if strand in self.given:
                    flat[place] = (self.given[strand].transpose(0, 1) if flip else self.given[strand]).clone()
                return


def _words(sequence: Batch | Source) -> Tensor:
    """``(example, row)``: where the tokens of words are."""
    found = torch.zeros_like(sequence.real)
    for example, features in enumerate(sequence.features):
        found[example, [row for rows in features.rows_of_words for row in rows]] = True
    return found


def _ids(batch: Batch, names: tuple[str, ...], real: Tensor) -> list[Tensor]:
    """The ids of a sequence: by name, or all whole numbers that have its shape."""
    named = [batch.inputs[name] for name in names if name in batch.inputs]
    whole = [
        one for one in batch.inputs.values() if isinstance(one, Tensor) and one.dtype in (torch.int64, torch.int32)
    ]
    return [one for one in named or whole if one.shape == real.shape]
