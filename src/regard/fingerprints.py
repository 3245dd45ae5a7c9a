"""What was audited, in a few characters: two runs with the same fingerprints had the same model and data."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch

from regard.attention.sharding import must_be_whole, stored
from regard.data import Example
from regard.explaining import model_of, versions

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


@torch.no_grad()
def of_untrained(subject: Any, inputs: Any) -> list[str]:
    """Of a model before training: its weights, and what it says of a few inputs. If its code is changed, this is."""
    subject.model.eval()
    said = subject.forward(subject.encode(inputs)).double()
    return [of_subject(subject)["weights"], _digest((said * 1000).round().tolist())]


def of_examples(examples: Iterable[Example]) -> str:
    """Of inputs, labels, rationales and names, in their order."""
    return _digest([[one.input, one.label, one.rationale, one.id] for one in examples])


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
