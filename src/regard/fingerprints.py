"""What was audited, in a few characters: two runs with the same fingerprints had the same model and data."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import torch

from regard.attention.sharding import must_be_whole, stored
from regard.data import Dataset, Example
from regard.errors import WorkerDiffers
from regard.explaining import model_of, versions
from regard.jobs.store import differences
from regard.training import PROBED, inputs_of, settled

PACKAGES = ("regard", "torch", "transformers", "numpy", "scipy")
PLAIN = (str, int, float, bool, tuple, type(None))


def of_subject(subject: Any) -> dict[str, Any]:
    """The model's class, name and weights, its tokenizer or columns, and how the subject reads them."""
    must_be_whole(subject.model, "audits and training, which tell models by all their weights")
    weights = blake2b(digest_size=16)
    for name, one in sorted(subject.model.state_dict().items()):
        if isinstance(one, torch.Tensor):
            one = stored(subject.model, name, one)
            weights.update(f"{name} {one.dtype} {tuple(one.shape)}".encode())
            weights.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            weights.update(f"{name} {one!r}".encode())
    found_out = {name for name, one in vars(type(subject)).items() if isinstance(one, cached_property)}
    own = {name: one for name, one in vars(subject).items() if isinstance(one, PLAIN) and name not in found_out}
    tokenizer, schema = (getattr(subject, name, None) for name in ("tokenizer", "schema"))
    rules = schema.to_dict() if schema is not None else None if tokenizer is None else _rules(tokenizer)
    return {
        **model_of(subject), "subject": type(subject).__name__, "settings": own, "weights": weights.hexdigest(),
        "tokenizer" if schema is None else "columns": None if rules is None else _digest(rules),
    }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Fetched:
    """What another machine makes for itself: once this is read there, it is in its place, and must be the same.

    Args:
        make: makes it.
        of: takes its fingerprint.
        here: the fingerprint that it has here.
        gpu: its model works on the GPU that a worker is given.
    """

    make: Callable[[], Any]
    of: Callable[[Any], Any]
    here: Any
    gpu: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return fetched, (self.make, self.of, self.here, self.gpu)


def fetching(subject: Any, known: Mapping[str, Any], *, gpu: bool = False) -> Any:
    """How a subject with this fingerprint goes to other machines: what came from a path is loaded from there."""
    load = getattr(subject, "reopen", None)
    return Fetched(load or partial(copy, subject), of_subject, known, gpu) if load or gpu else subject


def fetched(make: Callable[[], Any], of: Callable[[Any], Any], here: Any, gpu: bool) -> Any:
    """What is made, if it is the same as elsewhere."""
    made = make()
    if changes := differences({"model": here}, {"model": of(made)}):
        raise WorkerDiffers(f"the model is another one there ({'; '.join(changes)}). Copy it there, or save it anew.")
    if gpu:
        made.model.to("cuda")
    return made


@torch.no_grad()
def of_untrained(subject: Any, inputs: Any) -> list[str]:
    """Of a model before training: its weights, and what it says of a few inputs. If its code is changed, this is."""
    subject.model.eval()
    said = subject.forward(subject.encode(inputs)).double()
    return [of_subject(subject)["weights"], _digest((said * 1000).round().tolist())]


def of_teacher(teacher: Any, *, seed: int) -> list[str]:
    """Of what a teacher teaches: of the model that its recipe builds from the data, before training."""
    train = teacher.data["train"]
    with settled(seed, devices=[]):
        return of_untrained(teacher.recipe.build(Dataset.of(train), seed), inputs_of(train[:PROBED]))


def of_examples(examples: Iterable[Example]) -> str:
    """Of inputs, labels, rationales and names, in their order."""
    found = blake2b(digest_size=16)
    for one in examples:
        found.update(_digest([one.input, one.label, one.rationale, one.id]).encode())
    return found.hexdigest()


def of_versions() -> dict[str, str]:
    """What the numbers may depend on."""
    return {"python": platform.python_version(), "machine": platform.machine(), **versions(PACKAGES)}


def _rules(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Padding and truncation are how it was last used, and not what it is.
        return {
            name: one for name, one in json.loads(backend.to_str()).items() if name not in ("padding", "truncation")
        }
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else repr(tokenizer)


def _digest(content: Any) -> str:
    def plain(one: Any) -> Any:
        return dict(one) if isinstance(one, Mapping) else repr(one)

    return blake2b(json.dumps(content, sort_keys=True, default=plain).encode(), digest_size=16).hexdigest()
