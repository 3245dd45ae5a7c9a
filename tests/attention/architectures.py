"""Small random models of many architectures: those of transformers, and of torch, timm and the tabular packages."""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import torch
from architectures_transformers import (
    BATCH,
    ROWS,
    SOURCE,
    TRANSFORMERS,
    Architecture,
    Inputs,
    Side,
    before_dropout,
    image_inputs,
    mean_of,
    names,
    real_rows,
    seeded,
    sharpened,
)  # fmt: skip
from torch import Tensor, nn

import regard

# --- timm ---------------------------------------------------------------------------------------------------------


class NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers ``import torchvision`` with a mock: timm imports it for its data loaders, which no model needs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextlib.contextmanager
def importable_timm() -> Iterator[None]:
    """timm can be imported; afterwards transformers (imported long ago) still finds no torchvision."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = NoTorchvision()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def make_timm() -> nn.Module:
    with importable_timm():
        from timm.models import VisionTransformer
    return sharpened(VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=3), 8)


def timm_forward(model: Any, pixel_values: Tensor) -> Tensor:
    return model(pixel_values)


def timm_expected(model: Any, inputs: Inputs) -> list[tuple[str, Tensor]]:
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        block.attn.fused_attn = False
    return [("self", weights) for weights in before_dropout(twin, inputs, timm_forward, Attention="attn_drop")]


TIMM = {
    "timm's vision transformer": Architecture(
        partial(seeded, make_timm), image_inputs,
        lambda model: regard.module(model, timm_forward, features=names("patch", 17), readout="first"),
        timm_expected, "timm", (None,),
    ),
}  # fmt: skip


# --- torch's own layers -------------------------------------------------------------------------------------------


def asked_for_weights(model: Any, inputs: Inputs, forward: Callable[..., Any]) -> list[Tensor]:
    """What each nn.MultiheadAttention returns when it is asked for the weights of each head."""
    found: list[Tensor] = []
    twin = copy.deepcopy(model)
    wanted = {"need_weights": True, "average_attn_weights": False}
    for module in twin.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | wanted), with_kwargs=True)
            module.register_forward_hook(lambda _, __, output: found.append(output[1].detach()))
    with torch.enable_grad():  # without a graph, torch takes a path that calls no nn.MultiheadAttention
        forward(twin, **inputs)
    return found


def encoder_forward(model: Any, x: Tensor, real: Tensor) -> Tensor:
    batch_first = model.layers[0].self_attn.batch_first
    hidden = model(x if batch_first else x.transpose(0, 1), src_key_padding_mask=~real)
    return mean_of(hidden if batch_first else hidden.transpose(0, 1), real)


def decoder_forward(model: Any, x: Tensor, real: Tensor, memory: Tensor, memory_real: Tensor, causal: Tensor) -> Tensor:
    batch_first = model.layers[0].self_attn.batch_first
    flip = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    mask = causal[0] if causal[0].any() else None
    hidden = model(
        flip(x), flip(memory), tgt_mask=mask, tgt_key_padding_mask=~real, memory_key_padding_mask=~memory_real
    )
    return mean_of(flip(hidden), real)


def layer_inputs(side: Side, *, decoder: bool) -> Inputs:
    inputs = {"x": torch.randn(BATCH, ROWS, 32), "real": real_rows(side, ROWS)}
    if decoder:
        inputs |= {"memory": torch.randn(BATCH, SOURCE, 32), "memory_real": real_rows(side, SOURCE)}
        # a padding row on the left that sees only earlier padding is NaN in torch's own layers
        later = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1) & torch.tensor(side != "left")
        inputs["causal"] = later.expand(BATCH, -1, -1)
    return inputs


def layers(stack: type, layer: type, **options: Any) -> Architecture:
    decoder = layer is nn.TransformerDecoderLayer
    forward, kinds = (decoder_forward, ("decoder", "cross")) if decoder else (encoder_forward, ("self",))
    # what torch would say aloud when it cannot take its fast path is said here
    still = {} if decoder or not options else {"enable_nested_tensor": False}
    make = lambda: stack(layer(32, 4, 40, **{"batch_first": True, **options}), 2, **still)  # noqa: E731
    source = {"source": names("source", SOURCE), "source_padding": lambda memory_real, **_: memory_real}
    return Architecture(
        partial(seeded, make), partial(layer_inputs, decoder=decoder),
        lambda model: regard.module(
            model, forward, features=names("row", ROWS), padding=lambda real, **_: real, readout="mean",
            output="embedding", **(source if decoder else {}),
        ),
        lambda model, inputs: list(zip(kinds * 2, asked_for_weights(model, inputs, forward), strict=True)),
        "torch",
    )  # fmt: skip


LAYERS = {
    "nn.TransformerEncoder": layers(nn.TransformerEncoder, nn.TransformerEncoderLayer),
    "nn.TransformerEncoder, norm_first": layers(nn.TransformerEncoder, nn.TransformerEncoderLayer, norm_first=True),
    "nn.TransformerEncoder, rows first": layers(nn.TransformerEncoder, nn.TransformerEncoderLayer, batch_first=False),
    "nn.TransformerDecoder": layers(nn.TransformerDecoder, nn.TransformerDecoderLayer),
    "nn.TransformerDecoder, norm_first": layers(nn.TransformerDecoder, nn.TransformerDecoderLayer, norm_first=True),
    "nn.TransformerDecoder, rows first": layers(nn.TransformerDecoder, nn.TransformerDecoderLayer, batch_first=False),
}


# --- tables -------------------------------------------------------------------------------------------------------

NUMBERS, CATEGORIES = ["age", "income", "height"], ["job", "town", "pet", "mood", "shoes"]


def table_inputs(_: Side) -> Inputs:
    return {"numerical": torch.randn(BATCH, len(NUMBERS)), "categorical": torch.randint(0, 4, (BATCH, len(CATEGORIES)))}


def make_frame_model(name: str, **options: Any) -> nn.Module:
    import torch_frame.nn
    from torch_frame.data.stats import StatType

    numbers = {StatType.MEAN: 0.0, StatType.STD: 1.0}
    categories = {StatType.COUNT: (["a", "b", "c", "d"], [4, 3, 2, 1])}
    return getattr(torch_frame.nn, name)(
        channels=32, out_channels=3, num_layers=2, **options,
        col_stats=dict.fromkeys(NUMBERS, numbers) | dict.fromkeys(CATEGORIES, categories),
        col_names_dict={torch_frame.numerical: NUMBERS, torch_frame.categorical: CATEGORIES},
    )  # fmt: skip


def frame_forward(model: Any, numerical: Tensor, categorical: Tensor) -> Tensor:
    from torch_frame import TensorFrame, stype

    features = {stype.numerical: numerical, stype.categorical: categorical}
    return model(TensorFrame(features, {stype.numerical: NUMBERS, stype.categorical: CATEGORIES}))


def make_rtdl() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    return sharpened(FTTransformer(
        n_cont_features=len(NUMBERS), cat_cardinalities=[4] * len(CATEGORIES), d_out=3, n_blocks=2, d_block=32,
        attention_n_heads=4, attention_dropout=0.2, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.1, residual_dropout=0.0,
    ), 3)  # fmt: skip


def rtdl_forward(model: Any, numerical: Tensor, categorical: Tensor) -> Tensor:
    return model(numerical, categorical)


def unfolded(found: list[Tensor]) -> list[tuple[str, Tensor]]:
    """``(example · head, query, key)`` to ``(example, head, query, key)``."""
    return [("self", weights.unflatten(0, (BATCH, -1))) for weights in found]


TABLES = {
    "pytorch-frame's FTTransformer": Architecture(
        partial(seeded, partial(make_frame_model, "FTTransformer")), table_inputs,
        lambda model: regard.module(model, frame_forward, features=["[CLS]", *NUMBERS, *CATEGORIES], readout="first"),
        lambda model, inputs: [("self", weights) for weights in asked_for_weights(model, inputs, frame_forward)],
        "pytorch-frame", (None,),
    ),
    "pytorch-frame's TabTransformer": Architecture(
        partial(seeded, partial(make_frame_model, "TabTransformer", num_heads=4, encoder_pad_size=2, attn_dropout=0.1, ffn_dropout=0.1)),
        table_inputs,
        lambda model: regard.module(model, frame_forward, features=CATEGORIES, readout="mean"),
        lambda model, inputs: unfolded(before_dropout(model, inputs, frame_forward, SelfAttention="dropout")),
        "pytorch-frame", (None,),
    ),
    "rtdl's FTTransformer": Architecture(
        partial(seeded, make_rtdl), table_inputs,
        lambda model: regard.module(model, rtdl_forward, features=["[CLS]", *NUMBERS, *CATEGORIES], readout="first"),
        lambda model, inputs: unfolded(before_dropout(model, inputs, rtdl_forward, MultiheadAttention="dropout")),
        "rtdl_revisiting_models", (None,),
    ),
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {**TRANSFORMERS, **TIMM, **LAYERS, **TABLES}
