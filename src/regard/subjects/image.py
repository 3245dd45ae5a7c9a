"""Vision transformers: picture classifiers, encoders, and pictures matched with texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.attention import measure_readout
from regard.attention.running import undisturbed
from regard.errors import InputError, NotServed, OptionError, ReadoutMismatch, SubjectError, TooLong, choose
from regard.subjects import targets
from regard.subjects.loading import load_vision, sourced
from regard.subjects.patches import Layout, as_pictures, measure_layout, open_picture, process, see
from regard.subjects.text import classifier_head
from regard.subjects.tokens import check_vocabulary, described, spread
from regard.types import Batch, How, Of, Score, Special, Targets

EMBEDDING = targets.Head("embedding", targets.no_place, str)


@dataclass(frozen=True, eq=False)
class ImageSubject:
    """A vision transformer with its image processor. Made by `regard.image`."""

    model: nn.Module
    processor: Any
    layout: Layout
    head: targets.Head
    declared: Literal["first", "mean"] | None
    texts: Tensor | None  # (label, channel), for classes that are texts
    special: Special

    __repr__ = described

    @property
    def predicts(self) -> bool:
        """Classes, or texts in their place, are predicted; a plain encoder needs a target."""
        return self.head.kind != "embedding"

    def encode(self, inputs: Any) -> Batch:
        """Pictures to a tensor on the model's device, in its precision."""
        parameter = next(self.model.parameters())
        pixels = self._pixels(inputs).to(parameter.device, parameter.dtype)
        features = (self.layout.features,) * len(pixels)
        real = torch.ones(len(pixels), len(features[0].rows), dtype=torch.bool, device=pixels.device)
        return Batch({"pixel_values": pixels}, real, features)

    def probe(self, batch: Batch) -> Batch:
        """The first picture."""
        return batch.pick([0])

    def forward(self, batch: Batch) -> Tensor:
        """``(example, class)`` logits; for a plain encoder the ``(example, channel)`` embedding."""
        output = see(self.model, batch.inputs["pixel_values"])
        if (logits := getattr(output, "logits", None)) is not None:
            return logits  # type: ignore[no-any-return]
        pooled = own_pooling(output)
        if self.texts is not None and pooled is not None:
            scale, bias = (getattr(self.model, name, None) for name in ("logit_scale", "logit_bias"))
            cosines = nn.functional.normalize(pooled, dim=-1) @ self.texts.T
            return cosines * (1 if scale is None else scale.exp()) + (0 if bias is None else bias)
        if pooled is not None and (self.declared is None or hasattr(self.model, "get_image_features")):
            return pooled
        hidden: Tensor = output.last_hidden_state
        return torch.einsum("er,erc->ec", self.readout(batch, None).to(hidden), hidden)

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch with the mean colour of the picture in the place of some patches ``(example, row)``."""
        if how != "mask":
            raise NotServed(f"how={how!r}: patches of a picture cannot be taken out. Use 'mask' or 'attention'.")
        pixels, (height, width) = batch.inputs["pixel_values"], self.layout.patch
        patches = gone[:, len(self.layout.marks) :].unflatten(1, self.layout.grid)
        hidden = patches.repeat_interleave(height, 1).repeat_interleave(width, 2)
        hidden = nn.functional.pad(hidden, (0, pixels.shape[3] - hidden.shape[2], 0, pixels.shape[2] - hidden.shape[1]))
        mean = pixels.mean((2, 3), keepdim=True)
        return replace(batch, inputs={"pixel_values": mean.where(hidden[:, None], pixels)})

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        return targets.score(self.head, output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: where the prediction is read: at [CLS], at all patches alike, or as measured."""
        if self.declared is None:
            return self._measured.to(batch.real.device).expand(len(batch), -1)
        patches = torch.arange(batch.real.shape[1], device=batch.real.device) >= len(self.layout.marks)
        return spread(self.declared, batch.real if self.declared == "first" else batch.real & patches)

    def similarity(self, picture: Any) -> Callable[[Tensor], Tensor]:
        """A target for plain encoders: cosine similarity of the embedding to that of another picture."""
        with torch.no_grad(), undisturbed(self.model):
            other = self.forward(self.encode([picture]))
        return targets.similarity_to(
            other, repr(str(picture)) if isinstance(picture, (str, Path)) else "another picture"
        )

    def picture(self, inputs: Any) -> list[NDArray[np.uint8]]:
        """The pictures as the model sees them: resized and cropped, without normalisation, only whole patches.

        Each is ``(height, width, 3)``.
        """
        if self.processor is None:
            raise SubjectError("processor=None: only a processor says how pixels were normalised. Pass processor=.")
        return self._seen(self._pixels(inputs))

    def pictures_of(self, batch: Batch) -> list[NDArray[np.uint8]] | None:
        """The pictures of an encoded batch, as `picture` gives them; None without a processor."""
        return None if self.processor is None else self._seen(batch.inputs["pixel_values"].cpu())

    def _seen(self, tensors: Tensor) -> list[NDArray[np.uint8]]:
        pixels = tensors.float().movedim(1, -1)
        if getattr(self.processor, "do_normalize", False):
            mean, std = (torch.tensor(getattr(self.processor, name)) for name in ("image_mean", "image_std"))
            pixels = pixels * std + mean
        if getattr(self.processor, "do_rescale", False):
            pixels = pixels / self.processor.rescale_factor
        (rows, columns), (height, width) = self.layout.grid, self.layout.patch
        whole = pixels[:, : rows * height, : columns * width].round().clamp(0, 255).to(torch.uint8)
        return list(whole.numpy())

    @cached_property
    def _measured(self) -> Tensor:
        """``(row,)``: alike on all rows that move the output; a single row if the model ends in a pooling."""
        noise = torch.rand(3, *self.layout.size, generator=torch.Generator().manual_seed(0))
        rows, _ = measure_readout(self, self.encode(noise))
        if rows is None:
            raise ReadoutMismatch(
                "the output does not depend on the last attention site, so the readout cannot be measured. "
                "Pass readout='first' or 'mean', or use regard.module."
            )
        return rows[0] / rows[0].sum()

    def _pixels(self, inputs: Any) -> Tensor:
        """``(example, channel, y, x)``."""
        pictures = as_pictures(inputs)
        return torch.stack([self._processed(picture, f"inputs[{number}]") for number, picture in enumerate(pictures)])

    def _processed(self, picture: Any, name: str) -> Tensor:
        """``(channel, y, x)``: as it is if it is a tensor, otherwise what the processor makes of it."""
        wanted = (3, *self.layout.size)
        if not isinstance(picture, Tensor) and self.processor is None:
            raise InputError(
                f"{name} is a {type(picture).__name__}, but without a processor only processed tensors {wanted} are "
                "taken. Pass processor=."
            )
        given = picture if isinstance(picture, Tensor) else process(self.processor, open_picture(picture, name))
        if not given.is_floating_point() or given.shape != wanted:
            raise InputError(
                f"{name} is a tensor {tuple(given.shape)} of {given.dtype}, but this subject takes floating-point "
                f"tensors {wanted}. Pass the picture itself, with a processor that makes this size."
            )
        return given.detach().cpu()


@sourced
def image(
    model: nn.Module | str | Path,
    processor: Any = None,
    *,
    labels: Sequence[str] | None = None,
    readout: Literal["first", "mean"] | None = None,
    special: Special = "keep",
    trust_remote_code: bool = False,
) -> ImageSubject:
    """A vision transformer as a subject: a classifier, a plain encoder, or one that matches pictures with texts.

    Pictures are PIL images, paths, uint8 arrays ``(height, width, 3)``, or processed tensors ``(3, height, width)``;
    one, or several.

    Args:
        model: a live Hugging Face model, a local folder, or a hub name.
        processor: its image processor, or one for pictures and texts; loaded from beside the model when that is a
            path or name. A live model without one takes processed tensors only.
        labels: texts that are the classes of a model like CLIP; without them it is an encoder. For a classifier: other
            names for its classes.
        readout: where the prediction is read: "first" row ([CLS]), or "mean" of all patches. None: measured. With a
            plain encoder the choice is yours; None is its own pooling if it has one, otherwise [CLS] or else the mean.
        special: what explanations do with special rows: "keep", "drop", or "renormalise" over the others.
        trust_remote_code: run Python code that comes with the checkpoint.

    Example::

        subject = regard.image("path/to/my-vit")
        t = regard.trace(subject, "cat.png", target="tabby")
        t.features[0].grid  # (14, 14): rows × columns of patches
    """
    if readout is not None:
        choose("readout", readout, ("first", "mean"))
    choose("special", special, ("keep", "drop", "renormalise"))
    if labels is not None and (isinstance(labels, str) or not labels or not all(isinstance(x, str) for x in labels)):
        raise OptionError(f"labels={labels!r} must be a list of texts, such as ['a photo of a cat', …].")
    live, processor, tokenizer, complete = load_vision(
        model, processor, with_text=labels is not None, trust_remote_code=trust_remote_code
    )
    layout, output = measure_layout(live, processor)
    logits, name = getattr(output, "logits", None), type(live).__name__
    if logits is None and own_pooling(output) is None and getattr(output, "last_hidden_state", None) is None:
        raise SubjectError(f"{name} returns no logits, pooler_output or last_hidden_state. Use regard.module.")
    if logits is None and readout is None and (own_pooling(output) is None or not complete):
        readout = "first" if layout.marks else "mean"  # a pooler whose weights are not in the checkpoint is random
    if readout == "first" and not layout.marks:
        raise OptionError(f"readout='first': {name} has no [CLS] row. Pass readout='mean', or leave it out.")
    if logits is None:
        subject = ImageSubject(live, processor, layout, EMBEDDING, readout, None, special)
        return subject if labels is None else match(subject, tokenizer, tuple(labels))
    if logits.dim() != 2:
        raise SubjectError(f"{name} returns logits {tuple(logits.shape)}, not (example, class). Use regard.module.")
    if labels is not None and len(labels) != logits.shape[1]:
        raise OptionError(f"labels={labels!r} are {len(labels)} names, but {name} has {logits.shape[1]} classes.")
    head = classifier_head(live, logits.shape[1], None if labels is None else tuple(labels))
    return ImageSubject(live, processor, layout, head, readout, None, special)


def match(subject: ImageSubject, tokenizer: Any, labels: tuple[str, ...]) -> ImageSubject:
    """The subject whose classes are texts. They are embedded once, by the model's own text half."""
    model, name = subject.model, type(subject.model).__name__
    if not hasattr(model, "get_image_features"):
        raise OptionError(
            f"labels={labels!r}: {name} embeds pictures only. Leave labels out, or use a model like CLIP."
        )
    if tokenizer is None:
        raise OptionError(f"labels={labels!r} need a tokenizer: pass processor= with one, such as a CLIPProcessor.")
    check_vocabulary(getattr(model, "text_model", model), tokenizer)
    config: Any = model.config
    limit = config.text_config.max_position_embeddings
    longest = max(len(ids) for ids in tokenizer(list(labels))["input_ids"])
    if longest > limit:
        raise TooLong(f"labels has a text of {longest} tokens, but {name} takes {limit}. Pass shorter ones.")
    encoding = tokenizer(list(labels), padding="max_length", max_length=limit, return_tensors="pt")
    batch = subject.encode(torch.zeros(3, *subject.layout.size))
    with torch.no_grad(), undisturbed(model):
        output = model(**encoding.to(batch.real.device), **batch.inputs)
        kind: Literal["sigmoid", "softmax"] = "sigmoid" if hasattr(model, "logit_bias") else "softmax"
        matched = replace(subject, head=targets.named_head(kind, labels), texts=output.text_embeds)
        error = (matched.forward(batch) - output.logits_per_image).abs().max()
    if error > 1e-3 * output.logits_per_image.abs().max():
        raise SubjectError(f"{name} does not score texts by scaled cosine similarity. Use regard.module.")
    return matched


def own_pooling(output: Any) -> Tensor | None:
    """The embedding that a model makes of its rows by itself."""
    pooled: Tensor | None = getattr(output, "image_embeds", None)
    return getattr(output, "pooler_output", None) if pooled is None else pooled
