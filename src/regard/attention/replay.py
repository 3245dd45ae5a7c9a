"""What lies upstream of an edit does not depend on it: run it once, and return what it returned ever after.

While a model is recorded or replayed, the `forward` of its submodules is shadowed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regard.attention.checkpoints import open_checkpoints
from regard.attention.shadowing import shadowing
from regard.attention.tape import Tape

# A call: for each module that is running, from the outermost on, which it is and how many times its caller has
# called it before. A module that is called many times (ALBERT's only layer) has a key for each call.
Call = tuple[tuple[int, int], ...]
Running = functools.partial[Any]  # what the call would do, with its arguments
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class CannotReplay(Exception):
    """What lies upstream must be run, for the reason given."""


class Recording:
    """The outputs of the submodules that had finished when a given site was reached, the outermost only.

    Args:
        model: the model.
        first: number of the site.
    """

    def __init__(self, model: nn.Module, first: int) -> None:
        self.model = model
        self.first = first
        self.outputs: dict[Call, tuple[list[Any], pytree.TreeSpec, int]] = {}  # leaves, their tree, the sites inside
        self.axes: dict[Call, list[int | None]] = {}  # of each leaf, the axis of examples

    @contextmanager
    def record(self, tape: Tape) -> Iterator[None]:
        """Keep the outputs of what finishes before the site is seen by the tape."""

        def called(call: Call, forward: Running) -> Any:
            before = tape.count
            output = forward()
            leaves, tree = pytree.tree_flatten(output)
            if tape.count <= self.first and all(_can_be_kept(leaf, tape) for leaf in leaves):
                for inner in [key for key in self.outputs if key[: len(call)] == call]:
                    del self.outputs[inner]
                # copies: the model may go on to write into them
                kept = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                self.outputs[call] = (kept, tree, tape.count - before)
            return output

        with shadowed(self.model, called):
            yield

    def learn_axes(self, twice: Recording) -> None:
        """The axis of examples is the one that is longer in a recording of the same examples twice."""
        for call in list(self.outputs):
            leaves, tree, _ = self.outputs[call]
            others, same_tree, _ = twice.outputs.get(call, ([], None, 0))
            if tree != same_tree:
                del self.outputs[call]
                continue
            self.axes[call] = [_longer_axis(one, two) for one, two in zip(leaves, others, strict=True)]

    @contextmanager
    def replay(self, tape: Tape, variants: int) -> Iterator[None]:
        """Recorded calls return what they returned, repeated for each variant; the tape counts their sites."""

        def called(call: Call, forward: Running) -> Any:
            if call not in self.axes:
                return forward()
            if torch.is_grad_enabled() and next(open_checkpoints(), None):
                raise CannotReplay("activations are checkpointed, and would be recomputed in full")
            leaves, tree, sites = self.outputs[call]
            tape.count += sites
            again = [_repeated(leaf, axis, variants) for leaf, axis in zip(leaves, self.axes[call], strict=True)]
            return pytree.tree_unflatten(again, tree)

        with shadowed(self.model, called):
            yield

    @property
    def has_graph(self) -> bool:
        """Whether gradients flow on into what lies upstream: then one backward pass uses it up."""
        return any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaves, _, _ in self.outputs.values() for leaf in leaves
        )


@contextmanager
def shadowed(model: nn.Module, called: Callable[[Call, Running], Any]) -> Iterator[None]:
    """Ask ``called(call, forward)`` for the output of each submodule, for the length of a block, in this thread."""
    thread = threading.get_ident()
    # each running call, and how often it has called each module
    running: list[tuple[Call, dict[int, int]]] = [((), {})]

    def shadow(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def instead(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return forward(*args, **kwargs)
            caller, counts = running[-1]
            before = counts.get(id(module), 0)
            counts[id(module)] = before + 1
            call = (*caller, (id(module), before))
            running.append((call, {}))
            try:
                return called(call, functools.partial(forward, *args, **kwargs))
            finally:
                running.pop()

        return instead

    inner = [one for one in model.modules() if one is not model and not isinstance(one, torch.jit.ScriptModule)]
    with shadowing(inner, shadow):
        yield


def _can_be_kept(leaf: Any, tape: Tape) -> bool:
    """Tensors and plain values. A cache is neither: it changes; nor are scores and weights, which the tape follows."""
    return isinstance(leaf, PLAIN) or (isinstance(leaf, Tensor) and not tape.follower.follows(leaf))


def _longer_axis(one: Any, two: Any) -> int | None:
    if not isinstance(one, Tensor) or one.shape == two.shape:
        return None
    return next(axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b)


def _repeated(leaf: Any, axis: int | None, variants: int) -> Any:
    """A copy, so that the model may write into it."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.clone() if axis is None else torch.cat([leaf] * variants, axis)
