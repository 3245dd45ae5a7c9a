"""What an audit is cut into: units as plain data, which run anywhere and in any order with the same result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

EXHIBIT = "exhibit"  # the task of units that are no trial: an example to look at
HEADS = "heads"  # the task of the unit that asks what heads and layers do
PARTS = {EXHIBIT: "examples to show", HEADS: "heads and layers"}  # what people read


@dataclass(frozen=True)
class Unit:
    """One batch of one trial, one example that is shown, or what is asked of all heads: all that its result depends on.

    Args:
        task: the name of a trial, "exhibit" or "heads".
        method: the title of the explanation on trial; None where attention itself is, or all explanations are.
        places: which of the drawn examples run together; none: all of them do. That is part of what is asked: a batch
            differs from its examples one by one in the last bits.
        given: what is the same for all units of an audit: fingerprints, options, seed.
    """

    task: str
    method: str | None
    places: tuple[int, ...]
    given: Mapping[str, Any] = field(repr=False)

    @property
    def part(self) -> str:
        """What it is a part of, in words."""
        if self.task in PARTS:
            return PARTS[self.task]
        return self.task if self.method is None else f"{self.task} · {self.method}"

    @cached_property
    def id(self) -> str:
        """A hash of all that."""
        asked = [self.task, self.method, self.places, self.given]
        return blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=12).hexdigest()

    @property
    def seed(self) -> int:
        """Where torch's generator starts. What trials draw, they draw from the audit's seed and names of examples."""
        return int(self.id[:12], 16)
