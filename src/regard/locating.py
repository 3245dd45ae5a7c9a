"""Where a model is, after a look at what is on the disk. Knows no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.errors import NotAModel

ESTIMATOR = "estimator.json"  # in the folder of a model for tables, as `regard.estimators` saves them


def locate(model: str | Path) -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained`, after a look at what is on the disk."""
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            pickles = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
            if pickles and not any(path.glob("*.safetensors*")):
                raise NotAModel(
                    f"model={str(model)!r} could not be loaded: it holds its weights as a pickle ({pickles[0].name}), "
                    "which can run code. Where you trust it, load it with transformers and save_pretrained it anew: "
                    "that writes safetensors."
                )
            return str(path), {}
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return locate(ggufs[0])
        if ggufs:
            names = ", ".join(file.name for file in ggufs)
            raise NotAModel(f"model={str(model)!r} holds {len(ggufs)} GGUF files: {names}. Pass one of them.")
        raise NotAModel(
            f"model={str(model)!r} is a folder without config.json and without a .gguf file. "
            "Pass the folder that save_pretrained or `regard fit` wrote."
        )
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return str(path.parent), {"gguf_file": path.name}
        raise NotAModel(
            f"model={str(model)!r} is a file, but not a GGUF file. Pass the folder that holds it (with config.json), "
            "or load the model yourself and pass it with its tokenizer."
        )
    if path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") > 1:
        raise NotAModel(f"model={str(model)!r} does not exist on this machine.")
    return str(model), {}


def columns_of(model: str | Path) -> list[str] | None:
    """The columns that a model for tables was trained on; None: it is another kind of model."""
    file = Path(model).expanduser() / ESTIMATOR
    if not file.is_file():
        return None
    try:
        return [one["name"] for one in json.loads(file.read_text("utf-8"))["schema"]["columns"]]
    except (ValueError, KeyError, TypeError):
        raise NotAModel(
            f"model={str(model)!r}: {ESTIMATOR} is damaged, or of another version. Save the model anew."
        ) from None


def is_gguf(model: str | Path) -> bool:
    """Whether a path is a GGUF file, or a folder that holds one."""
    return "gguf_file" in locate(model)[1]
