"""Named hidden states: read while a model runs, for `trace(states=…)`, and changed, for `regard.edits.state`.

Where they come out is told in `outlets`; "entrance", the vectors that the input enters as, in `entrance`. The forward
of submodules is shadowed as in replay: no hook is set, and the model is afterwards as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.attention.checkpoints import open_checkpoints
from regard.attention.entrance import Entrance, Vectors
from regard.attention.outlets import Key, Outlet, layout_of
from regard.attention.replay import Call, CannotReplay, Running, shadowed
from regard.attention.sites import Strand
from regard.attention.state_edits import AT, At, StateEdit, StatePlace
from regard.errors import BadEdit, NoGradient, NoSuchPart, NotReproduced, NotServed, choose
from regard.types import Batch, Subject

if TYPE_CHECKING:
    from regard.attention.editing import Plan

States = dict[tuple[int | Strand, At], Tensor | str]  # by layer, or by sequence at the entrance; or why there is none


def wanted(states: bool | At | Sequence[At]) -> tuple[At, ...]:
    """The kinds of states that are to be kept."""
    if isinstance(states, bool):
        return AT if states else ()
    listed: tuple[At, ...] = (states,) if isinstance(states, str) else tuple(states)
    for one in listed:
        choose("states", one, AT)
    return listed


@contextmanager
def reading(subject: Subject, batch: Batch, kinds: Sequence[At]) -> Iterator[States]:
    """Keep copies of states ``(example, row, channel)`` while the model runs."""
    kept: States = {}
    if "entrance" in kinds:
        kept |= {(strand, "entrance"): one for strand, one in Entrance(subject, batch).vectors.items()}
    asked = {key: one for key, one in layout_of(subject, batch).items() if key[1] in kinds} if kinds else {}
    kept |= {key: one for key, one in asked.items() if isinstance(one, str)}
    places = {one.call: (key, one) for key, one in asked.items() if isinstance(one, Outlet)}

    def called(call: Call, forward: Running) -> Any:
        output = forward()
        if call in places:
            key, outlet = places[call]
            kept.setdefault(key, outlet.take(output).detach().clone())  # the model may go on to write into it
        return output

    with ExitStack() as stack:
        if places:
            stack.enter_context(shadowed(subject.model, called))
        yield kept
    if missed := [key for key, _ in places.values() if key not in kept]:
        raise NotReproduced(f"the states {missed} were not seen: the model takes another path than in a small run.")


def kept_state(states: Mapping[tuple[int | Strand, At], Tensor | str], layer: int | Strand, at: At) -> Tensor:
    """One of the states that were kept."""
    choose("at", at, AT)
    if not any(kind == at for _, kind in states):
        raise NoSuchPart(f"at={at!r} was not kept. Trace with states=True, or states={at!r}.")
    there = [one for one, kind in states if kind == at]
    if isinstance(layer, int) and layer < 0:
        layer = len(there) + layer
    if (layer, at) not in states:
        raise NoSuchPart(f"layer={layer!r} is not there at {at!r}. There are {', '.join(map(str, there))}.")
    state = states[layer, at]
    if isinstance(state, str):
        raise NotServed(f"layer={layer}, at={at!r}: {state}")
    return state


def changes_of(subject: Subject, batch: Batch, edits: Sequence[Any], names: Sequence[str]) -> Changes | None:
    """The edits of states among edits, if there are some."""
    some = [edit for edit in edits if isinstance(edit, StateEdit)]
    return Changes(subject, batch, some, names) if some else None


@dataclass(eq=False)
class Changes:
    """Edits of states, to be made while a model runs.

    Args:
        subject: the model and how it is called.
        batch: the examples, once.
        edits: the edits, in order.
        names: of each site.
    """

    subject: Subject
    batch: Batch
    edits: Sequence[StateEdit]
    names: Sequence[str]

    @cached_property
    def steps(self) -> dict[Key, tuple[Outlet, list[StateEdit]]]:
        """For each state that is changed where it comes out, and its edits in order."""
        found: dict[Key, tuple[Outlet, list[StateEdit]]] = {}
        layout = layout_of(self.subject, self.batch)
        size = len(self.names)
        for edit in self.edits:
            if edit.at == "entrance":
                continue
            numbers = range(size) if edit.layers is None else edit.layers
            assert not isinstance(numbers, int)
            for number in numbers:
                if not -size <= number < size:
                    listed = ", ".join(f"{index}: {name}" for index, name in enumerate(self.names))
                    raise NoSuchPart(f"edit {edit.name}: layers={number} is not there. There are {listed}.")
                outlet = layout[number % size, edit.at]
                if isinstance(outlet, str):
                    raise NotServed(f"edit {edit.name}: {outlet}")
                found.setdefault((number % size, edit.at), (outlet, []))[1].append(edit)
        return found

    @property
    def entering(self) -> list[StateEdit]:
        """The edits of the vectors that the input enters as."""
        return [edit for edit in self.edits if edit.at == "entrance"]

    @cached_property
    def entrance(self) -> Entrance:
        """The vectors that the input enters as."""
        return Entrance(self.subject, self.batch)

    @property
    def layers(self) -> set[int]:
        """The sites from whose blocks on anything is changed."""
        return {0} if self.entering else {layer for layer, _ in self.steps}

    @contextmanager
    def made(self, batch: Batch, plan: Plan) -> Iterator[None]:
        """Make the edits while the model runs on a batch: the variants one after the other, each with all examples."""
        places = {outlet.call: (key, outlet, edits) for key, (outlet, edits) in self.steps.items()}
        reached: set[Key] = set()

        def called(call: Call, forward: Running) -> Any:
            output = forward()
            if call not in places:
                return output
            key, outlet, edits = places[call]
            reached.add(key)
            if plan.gradients and any(open_checkpoints()):
                raise NoGradient(
                    "activations are checkpointed, and would be recomputed without the edits of states. Switch "
                    "checkpointing off."
                )
            if plan.gradients == "edits":
                torch.set_grad_enabled(True)  # `run` restores it
            return outlet.put(output, self._changed(edits, outlet.take(output), *key, plan))

        with ExitStack() as stack:
            if self.entering:
                stack.enter_context(self.entrance.given(self._entering(plan), batch))
            if places:
                stack.enter_context(shadowed(self.subject.model, called))
            yield
        for layer, at in self.steps.keys() - reached:
            if plan.replayed:
                raise CannotReplay(f"state {at} of layer {layer} was not seen again")
            raise NotReproduced(
                f"state {at} of layer {layer} ({self.names[layer]}) was not reached with these edits: the model takes "
                "another path."
            )

    def _entering(self, plan: Plan) -> Vectors:
        """The vectors that each variant enters as."""
        times = len(plan.variants)
        with torch.set_grad_enabled(bool(plan.gradients)):
            return {
                strand: self._changed(self.entering, one.repeat(times, 1, 1), strand, "entrance", plan)
                for strand, one in self.entrance.vectors.items()
            }

    def _changed(self, edits: Sequence[StateEdit], state: Tensor, layer: int | Strand, at: At, plan: Plan) -> Tensor:
        """What edits make of a state ``(variant · example, row, channel)``, after a look at whether they may."""
        sequence = self.batch.source if layer == "source" else self.batch.sequence_of(state.shape[1])
        real = torch.ones(len(self.batch), state.shape[1], dtype=torch.bool) if sequence is None else sequence.real
        real = real.to(state.device)
        number, name = (None, layer) if isinstance(layer, str) else (layer, self.names[layer])
        place = StatePlace(at, number, name, real, plan.variants, plan.total)
        old = state if plan.total is None else state.unflatten(0, (len(plan.variants), -1))
        for edit in edits:
            what = f"edit {edit.name}, {name if number is None else f'layer {number} ({name})'},"
            try:
                new = edit.change(old.clone(), place)
            except Exception as raised:
                raised.add_note(f"raised by {what}")
                raise
            if not isinstance(new, Tensor) or new.shape != old.shape:
                got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
                raise BadEdit(f"{what} returned {got}; the state it was given has shape {tuple(old.shape)}.")
            if new.device != old.device:
                raise BadEdit(f"{what} returned a tensor on {new.device}; the state is on {old.device}.")
            new = new.to(old.dtype).where(real[..., None], old)  # padding stays as it is
            if not new.detach().where(real[..., None], 0).isfinite().all():
                raise BadEdit(f"{what} returned NaN or Inf.")
            old = new
        return old.reshape(state.shape)
