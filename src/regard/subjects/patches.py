"""Pictures to RGB, and which row of a vision transformer stands for which of their patches."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.running import undisturbed
from regard.errors import EmptyInput, InputError, SubjectError
from regard.types import Features

Size = tuple[int, int]  # height × width, or rows × columns


@dataclass(frozen=True)
class Layout:
    """The rows of a vision transformer: special ones first, then the patches, row by row.

    Args:
        size: height × width of the pictures, in pixels.
        patch: height × width of a patch, in pixels.
        marks: names of the special rows.
    """

    size: Size
    patch: Size
    marks: tuple[str, ...] = ()

    @property
    def grid(self) -> Size:
        """Rows × columns of whole patches; pixels beyond them are not seen."""
        return self.size[0] // self.patch[0], self.size[1] // self.patch[1]

    @cached_property
    def features(self) -> Features:
        """What a person sees of every picture."""
        rows, columns = self.grid
        patches = [f"patch {row},{column}" for row in range(rows) for column in range(columns)]
        names = [*self.marks, *patches]
        return replace(Features.named(names, range(len(names)), self.marks), grid=self.grid)


def see(model: nn.Module, pixels: Tensor, **options: Any) -> Any:
    """Run a vision model, or the half of a model that sees."""
    return getattr(model, "get_image_features", model)(pixel_values=pixels, **options)


def measure_layout(model: nn.Module, processor: Any) -> tuple[Layout, Any]:
    """Find the rows of patches by changing three patches, one at a time; beside it what the model returned."""
    config, name = getattr(model, "config", None), type(model).__name__
    config = getattr(config, "vision_config", config)
    patch, size = _pair(getattr(config, "patch_size", None)), _pair(getattr(config, "image_size", None))
    if processor is not None:
        size = _pair(process(processor, np.zeros((64, 64, 3), np.uint8)).shape[1:])
    if patch is None or size is None or min(Layout(size, patch).grid) < 1:
        raise SubjectError(
            f"{name}: its patches ({patch}) and pictures ({size}) are no sizes in pixels that fit. Use regard.module."
        )
    layout, parameter = Layout(size, patch), next(model.parameters())
    rows, columns = layout.grid
    pixels = torch.zeros(4, 3, *size)  # the first stays as it is
    changed = [(0, 0), (0, columns - 1), (rows - 1, columns - 1)]
    for picture, (row, column) in zip(pixels[1:], changed, strict=True):
        top, left = row * patch[0], column * patch[1]
        picture[:, top : top + patch[0], left : left + patch[1]] = torch.linspace(-1, 2, patch[1])
    try:
        with torch.no_grad(), undisturbed(model):
            output = see(model, pixels.to(parameter.device, parameter.dtype), output_hidden_states=True)
    except (ValueError, TypeError, RuntimeError) as problem:
        whose = "config" if processor is None else "processor"
        raise SubjectError(
            f"{name} cannot run on pictures of {size[0]}×{size[1]} pixels, the size its {whose} gives: {problem}"
        ) from problem
    hidden = getattr(output, "hidden_states", None) or (torch.zeros(4, 0, 0),)
    special = hidden[0].shape[1] - rows * columns
    moved = [(one != hidden[0][0]).any(-1).nonzero().flatten().tolist() for one in hidden[0][1:]]
    if moved != [[special + row * columns + column] for row, column in changed] or len({x.shape for x in hidden}) > 1:
        raise SubjectError(
            f"{name}: its {hidden[0].shape[1]} rows are not special ones and then one for each of {rows}×{columns} "
            "patches, in every layer. Use regard.module."
        )
    distilled = any("distillation_token" in key for key, _ in model.named_parameters())
    marks = ["[CLS]", *(["[DIST]"] if distilled else []), *(f"[REG {number}]" for number in range(special))]
    return replace(layout, marks=tuple(marks[:special])), output


def process(processor: Any, picture: Any) -> Tensor:
    """``(channel, y, x)``: what an image processor makes of one picture."""
    try:
        pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
    except (TypeError, ValueError, KeyError) as problem:
        raise SubjectError(f"processor={type(processor).__name__} is no image processor: {problem}") from problem
    if not isinstance(pixels, Tensor) or pixels.dim() != 4:
        raise SubjectError(f"processor={type(processor).__name__} does not make one picture of one. Use regard.module.")
    return pixels[0]


def as_pictures(inputs: Any) -> list[Any]:
    """One picture, or several, as a list."""
    if isinstance(inputs, (Tensor, np.ndarray)) and inputs.ndim == 4:
        inputs = list(inputs)
    pictures = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    if not pictures:
        raise EmptyInput("inputs is empty: pass at least one picture.")
    return pictures


def open_picture(picture: Any, name: str) -> Any:
    """A PIL image in RGB, of a path, an array or any PIL image; what is transparent becomes white."""
    try:
        from PIL import Image, ImageOps
    except ImportError as problem:
        raise SubjectError(f"{name}: pictures need Pillow. Run: pip install 'regard[image]'") from problem
    if isinstance(picture, (str, Path)):
        try:
            with Image.open(Path(picture).expanduser()) as file:
                picture = ImageOps.exif_transpose(file)
        except (OSError, Image.DecompressionBombError) as problem:
            raise InputError(f"{name}={str(picture)!r} cannot be opened as a picture: {problem}") from problem
    elif isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] in (3, 4))):
            raise InputError(
                f"{name} is an array {picture.shape} of {picture.dtype}. Pass uint8 (0 to 255), (height, width, 3)."
            )
        if 0 in picture.shape:
            raise EmptyInput(f"{name} is an array {picture.shape}: there is nothing to see.")
        picture = Image.fromarray(picture)
    if not isinstance(picture, Image.Image):
        raise InputError(
            f"{name}={reprlib.repr(picture)} is a {type(picture).__name__}. Pass a PIL image, a path, an array or a "
            "tensor."
        )
    if 0 in picture.size:
        raise EmptyInput(f"{name} is {picture.size[0]}×{picture.size[1]} pixels: there is nothing to see.")
    if "A" in picture.getbands() or "transparency" in picture.info:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA"))
    return picture.convert("RGB")


def _pair(value: Any) -> Size | None:
    """Height and width, from one number for both or from two."""
    if isinstance(value, int):
        return value, value
    return (int(value[0]), int(value[1])) if isinstance(value, Sequence) and len(value) == 2 else None
