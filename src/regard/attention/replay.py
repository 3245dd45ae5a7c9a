"""What lies upstream of an edit does not depend on it: run it once, and return what it returned ever after.

While a model is recorded or replayed, the `forward` of its submodules is shadowed by an attribute of the instance; no
hook is set, no class is touched, and afterwards the attributes are as they were.
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

from regard.attention.tape import Tape

# A call: for each module that is running, from the outermost on, which it is and how many times its caller has
# called it before. A module that is called many times (ALBERT's only layer) has a key for each call.
Call = tuple[tuple[int, int], ...]
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
# Two threads that shadow the same modules would restore each other's shadows.
one_at_a_time = threading.RLock()


class Recording:
    """The outputs of the submodules that had finished when a given site was reached.

    Args:
        model: the model.
        examples: the number of examples it was recorded with.
    """

    def __init__(self, model: nn.Module, examples: int) -> None:
        self.model = model
        self.examples = examples
        self.outputs: dict[Call, tuple[Any, int]] = {}  # and how many sites lie inside

    @contextmanager
    def record(self, tape: Tape, first: int) -> Iterator[None]:
        """Keep the outputs of what finishes before site ``first`` is seen by the tape, the outermost only."""

        def called(call: Call, forward: Callable[[], Any]) -> Any:
            before = tape.count
            output = forward()
            if tape.count <= first and _can_be_kept(output):
                for inner in [key for key in self.outputs if key[: len(call)] == call]:
                    del self.outputs[inner]
                # a copy: the model may go on to write into it
                kept = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, output)
                self.outputs[call] = (kept, tape.count - before)
            return output

        with shadowed(self.model, called):
            yield

    @contextmanager
    def replay(self, tape: Tape, variants: int) -> Iterator[None]:
        """Recorded calls return what they returned, repeated for each variant; the tape counts their sites."""

        def called(call: Call, forward: Callable[[], Any]) -> Any:
            if call not in self.outputs:
                return forward()
            output, sites = self.outputs[call]
            tape.count += sites
            return pytree.tree_map(lambda leaf: self._repeated(leaf, variants), output)

        with shadowed(self.model, called):
            yield

    def _repeated(self, leaf: Any, variants: int) -> Any:
        """A copy, so that the model may write into it; its axis of examples repeated.

        That axis is the first if it has the right size, otherwise another that has; that this reading is right is
        proved by a run of two unedited variants.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        axes = [axis for axis, size in enumerate(leaf.shape) if size == self.examples]
        times = [1] * leaf.dim()
        if axes:
            times[axes[0]] = variants
        return leaf.repeat(times)


@contextmanager
def shadowed(model: nn.Module, called: Callable[[Call, Callable[[], Any]], Any]) -> Iterator[None]:
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
                return called(call, lambda: forward(*args, **kwargs))
            finally:
                running.pop()

        return instead

    with one_at_a_time:
        before: list[tuple[nn.Module, Any]] = []
        try:
            for module in model.modules():
                if module is not model and not isinstance(module, torch.jit.ScriptModule):
                    before.append((module, module.__dict__.get("forward")))
                    module.__dict__["forward"] = shadow(module, module.forward)
            yield
        finally:
            for module, own in before:
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own


def _can_be_kept(output: Any) -> bool:
    """Tensors and plain values, in tuples, dicts and the like. A cache is none of these: it changes."""
    return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in pytree.tree_leaves(output))
