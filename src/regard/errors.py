"""Every exception regard raises on purpose.

::

    RegardError
    ├── InputError                  what you passed cannot be used
    │   ├── EmptyInput              no text, no rows, no examples
    │   ├── TooLong                 more tokens than the model has positions for
    │   ├── WrongTarget             no such class, label or token; no scalar to explain
    │   ├── OptionError             an option that is not one of the choices
    │   ├── NoSuchPart              a site, head or row that the trace does not have
    │   ├── BadEdit                 an edit of attention that cannot be made
    │   ├── TooLarge                what was asked for does not fit into memory
    │   └── NotServed               a method that this model, or this input, cannot serve
    ├── SubjectError                model and tokenizer do not make a subject
    │   ├── NotAModel               the path or name holds no model that can be loaded
    │   ├── TokenizerMismatch       the tokenizer belongs to another model
    │   └── ReadoutMismatch         the prediction is not read from the rows that were declared
    ├── TrialFailed                 too many examples of a trial failed
    ├── StoreError                  a run cannot be kept, or what was kept is not what was written
    ├── WorkerDied                  a process that worked for this one ended before its time
    ├── WorkerDiffers               a machine that would work for this one has another version, or another model
    └── SeamError                   what happened inside the model cannot be told
        ├── NoAttentionFound        no torch function that mixes values was seen
        │   └── OpaqueKernel        … because the code that does it bypasses torch functions
        ├── NonFinite               NaN or Inf in activations or weights
        ├── NotReproduced           recomputed weights × values is not what the model computed
        └── NoGradient              the target does not depend on the sites differentiably

Each message names the argument, echoes the value and says the next step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class RegardError(Exception):
    """Root of all exceptions that regard raises on purpose."""


class InputError(RegardError, ValueError):
    """What was passed cannot be used."""


class EmptyInput(InputError):
    """There is no text, no row or no example."""


class TooLong(InputError):
    """The input has more tokens than the model has positions for."""


class WrongTarget(InputError):
    """The class, label or token does not exist, or no scalar was named."""


class OptionError(InputError):
    """An option has a value that is not one of its choices."""


class NoSuchPart(InputError, IndexError):
    """A site, head or row that the trace does not have."""


class BadEdit(InputError):
    """An edit of attention that cannot be made: off the simplex, of another shape, NaN."""


class TooLarge(InputError, MemoryError):
    """What was asked for does not fit into memory."""


class NotServed(InputError):
    """A method that this model, or this input, cannot serve."""


class SubjectError(RegardError):
    """Model and tokenizer do not make a subject."""


class NotAModel(SubjectError):
    """The path or name holds no model that can be loaded."""


class TokenizerMismatch(SubjectError):
    """The tokenizer belongs to another model."""


class ReadoutMismatch(SubjectError):
    """The prediction is not read from the rows that the subject declares."""


class TrialFailed(RegardError):
    """More examples failed than a trial can do without."""


class StoreError(RegardError):
    """A run cannot be kept where it should be, or what was kept is not what was written."""


class WorkerDied(RegardError):
    """A process that worked for this one ended before its time."""


class WorkerDiffers(RegardError):
    """A machine that would work for this one has another version of something, or another model."""


class SeamError(RegardError):
    """What happened inside the model cannot be told."""


class NoAttentionFound(SeamError):
    """No torch function that mixes values by attention weights was seen."""


class OpaqueKernel(NoAttentionFound):
    """The code that computes attention bypasses torch functions."""


class NonFinite(SeamError):
    """NaN or Inf in activations or attention weights."""


class NotReproduced(SeamError):
    """Recomputed weights × values differ from what the model computed."""


class NoGradient(SeamError):
    """The target does not depend differentiably on the attention sites."""


def non_finite(what: str) -> NonFinite:
    """The exception for NaN or Inf in ``what``, with the next step."""
    return NonFinite(
        f"{what} holds NaN or Inf. Check the inputs, the weights and the precision the model runs in "
        "(half precision overflows first)."
    )


def choose(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``; raise `OptionError` that lists them otherwise."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise OptionError(f"{name}={value!r} is not known. Choose one of {listed}.")
    return str(value)


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the one that is most like it, if any is."""
    near = get_close_matches(str(name), [*known], 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def must_know(what: str, name: object, known: Iterable[str]) -> None:
    """Refuse an unknown name, with the nearest one."""
    names = [*known]
    if name not in names:
        raise OptionError(f"{what}={name!r} is not known.{nearest(name, names)} There are {', '.join(names)}.")


def whole_numbers(name: str, value: Any) -> list[int]:
    """One or several whole numbers as a list; arrays and tensors will do, masks will not."""
    value = value.tolist() if hasattr(value, "tolist") else value
    listed = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]
    try:
        numbers = [operator.index(number) for number in listed]
    except TypeError:
        numbers = []
    if any(isinstance(number, bool) for number in listed) or not numbers:
        raise OptionError(f"{name}={value!r} must be a whole number, or several. A mask is none: pass its numbers.")
    return numbers


def at_least_one(name: str, value: Any, most: float = math.inf) -> int:
    """A whole number from 1 on, up to ``most``."""
    try:
        count, *more = whole_numbers(name, value)
    except OptionError:
        count, more = 0, []
    if more or not 1 <= count <= most:
        up = f", and at most {most}" * (most < math.inf)
        raise OptionError(f"{name}={value!r} must be 1 or more{up}: a whole number.")
    return count


def within(name: str, value: Any, least: float, most: float, *, ends: str = "()") -> float:
    """A number between two others; ``ends`` as intervals are written: "[]" with both of them, "()" without."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    above = least <= number if ends[0] == "[" else least < number
    below = number <= most if ends[1] == "]" else number < most
    if not above or not below:
        low = f"{least:g} or more" if ends[0] == "[" else f"above {least:g}"
        high = "" if most == math.inf else f", and at most {most:g}" if ends[1] == "]" else f", and below {most:g}"
        raise OptionError(f"{name}={value!r} must be a number {low}{high}.")
    return number


def true_or_false(name: str, value: Any) -> None:
    """Refuse what is neither."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be True or False.")
