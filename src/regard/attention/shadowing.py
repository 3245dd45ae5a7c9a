"""The `forward` of submodules, shadowed by an attribute of the instance for the length of a block.

No hook is set, no class is touched, and afterwards the attributes are as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Two threads that shadow the same modules would restore each other's shadows.
_one_at_a_time = threading.RLock()


@contextmanager
def shadowing(
    modules: Iterable[nn.Module], shadow: Callable[[nn.Module, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Put ``shadow(module, forward)`` in place of each module's forward."""
    with _one_at_a_time:
        before: list[tuple[nn.Module, Any]] = []
        try:
            for module in modules:
                before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = shadow(module, module.forward)
            yield
        finally:
            for module, own in before:
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own
