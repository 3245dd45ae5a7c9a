"""Small random models of many architectures, each with the weights that its own code says it used.

The oracle is never regard: it is the model's eager attention (``output_attentions=True``), or, where a model returns
none, what its own attention module hands to its dropout or returns when asked for weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import regard
from regard.types import Subject

BATCH, ROWS, SOURCE, WORDS = 3, 9, 7, 50
GRID = (4, 3)  # of the feature map that Detr attends over
Inputs = dict[str, Tensor]
Side = str | None
SIDES: tuple[Side, ...] = ("left", "right", None)  # without padding there is no mask: other kernels, other arguments


@dataclass(frozen=True)
class Architecture:
    """How to build a model, call it, and learn from it what its attention weights are.

    Args:
        build: a new random model, in eval mode.
        inputs: a batch of three, padded on the side asked for.
        subject: the model as regard takes it.
        expected: (kind, weights ``(example, head, query, key)``) of each site, in order of execution.
        package: where the model comes from.
        sides: on which its inputs can be padded; None: without padding.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[Side], Inputs]
    subject: Callable[[Any], Subject]
    expected: Callable[[Any, Inputs], list[tuple[str, Tensor]]]
    package: str = "transformers"
    sides: tuple[Side, ...] = SIDES


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The same weights each time, and no dropout."""
    torch.manual_seed(0)
    return build().eval()


def sharpened(model: nn.Module, factor: float, only: str = "") -> nn.Module:
    """With larger weights: attention that is nearly uniform would prove little."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and only in name:
                parameter *= factor
    return model


def real_rows(side: Side, rows: int) -> Tensor:
    """``(example, row)``: examples of different lengths, one of them full; without a side, all are."""
    if side is None:
        return torch.ones(BATCH, rows, dtype=torch.bool)
    lengths = torch.tensor([rows - 4, rows, rows - 2])[:, None]
    place = torch.arange(rows)
    return place < lengths if side == "right" else place >= rows - lengths


def mean_of(hidden: Tensor, real: Tensor) -> Tensor:
    """One vector for each example, read from all real rows."""
    return hidden.masked_fill(~real[..., None], 0).sum(1) / real.sum(-1, keepdim=True)


def names(word: str, count: int) -> list[str]:
    return [f"{word} {i}" for i in range(count)]


def eager(model: Any, inputs: Inputs) -> Any:
    """What the same weights say when attention is written out."""
    twin = copy.deepcopy(getattr(model, "_orig_mod", model))
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        return twin(**inputs, output_attentions=True)


# --- texts, one sequence ------------------------------------------------------------------------------------------


def text_inputs(side: Side) -> Inputs:
    return {"input_ids": torch.randint(3, WORDS, (BATCH, ROWS)), "attention_mask": real_rows(side, ROWS).long()}


def text_subject(model: Any) -> Subject:
    def forward(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return mean_of(hidden, attention_mask.bool())

    return regard.module(
        model, forward, features=names("token", ROWS), readout="mean", output="embedding",
        padding=lambda input_ids, attention_mask: attention_mask.bool(),
    )  # fmt: skip


def self_attention(model: Any, inputs: Inputs) -> list[tuple[str, Tensor]]:
    return [("self", weights) for weights in eager(model, inputs).attentions]


def make(name: str, **options: Any) -> nn.Module:
    """A model by the name of its class. It is imported here, not with the table: some modules warn when imported."""
    return getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**options))


def text(name: str, wrap: Callable[[nn.Module], nn.Module] = lambda model: model, **options: Any) -> Architecture:
    """A model of one text. Weights are large enough for attention to be far from uniform."""
    common = {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 40, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    build = partial(seeded, lambda: wrap(make(name, **{**common, **options})))
    return Architecture(build, text_inputs, text_subject, self_attention)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")  # what matters is that calls go to Dynamo; no C++ compiler is needed
    return model


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": ROWS, "num_experts_per_tok": 2}  # a router that is as wide as the text is long
TEXTS = {
    "BERT": text("Bert"),
    "BERT, torch.compile": text("Bert", wrap=partial(torch.compile, backend="eager")),
    "BERT, model.compile()": text("Bert", wrap=compiled_in_place),
    "RoBERTa": text("Roberta"),
    "XLM-R": text("XLMRoberta"),
    "DistilBERT": text("DistilBert", hidden_dim=40),
    "ELECTRA": text("Electra", embedding_size=16),
    "ALBERT": text("Albert", embedding_size=16),
    "DeBERTa-v2": text(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "ModernBERT": text(
        "ModernBert", num_hidden_layers=4, local_attention=4, global_attn_every_n_layers=3,
        cls_token_id=1, sep_token_id=2, initializer_cutoff_factor=2.0,
    ),
    "CLIP, text": text("CLIPText", initializer_factor=8.0),
    "GPT-2": text("GPT2"),
    "GPT-NeoX": text("GPTNeoX", rotary_pct=0.5),
    "Phi": text("Phi", partial_rotary_factor=0.5),
    "Llama": text("Llama", num_key_value_heads=2),
    "Mistral": text("Mistral", **GROUPED, sliding_window=4),
    "Mixtral": text("Mixtral", **GROUPED, **EXPERTS),
    "Qwen-2": text("Qwen2", num_key_value_heads=2),
    "Qwen-3": text("Qwen3", **GROUPED),
    "Gemma-2": text("Gemma2", **GROUPED, **WINDOWS, attn_logit_softcapping=1.0, query_pre_attn_scalar=8),
    # transformers takes attn_logit_softcapping for Gemma-3, too, and never applies it
    "Gemma-3": text("Gemma3Text", **GROUPED, **WINDOWS, query_pre_attn_scalar=8),
    "GPT-OSS": text("GptOss", **GROUPED, **WINDOWS, **EXPERTS),
}  # fmt: skip


# --- two sequences ------------------------------------------------------------------------------------------------


def translation_inputs(side: Side) -> Inputs:
    return {
        "input_ids": torch.randint(3, WORDS, (BATCH, SOURCE)),
        "attention_mask": real_rows(side, SOURCE).long(),
        "decoder_input_ids": torch.randint(3, WORDS, (BATCH, ROWS)),
        "decoder_attention_mask": real_rows(side, ROWS).long(),
    }


def two_sequences(
    model: Any, *, rows: int, source: int, padding: Callable[..., Tensor] | None = None,
    source_padding: Callable[..., Tensor] | None = None,
) -> Subject:  # fmt: skip
    """An encoder–decoder whose prediction is read from all real rows of the decoder."""

    def forward(model: Any, **inputs: Tensor) -> Tensor:
        hidden = model(**inputs).last_hidden_state
        every = torch.ones(hidden.shape[:2], dtype=torch.bool)
        return mean_of(hidden, every if padding is None else padding(**inputs))

    return regard.module(
        model, forward, features=names("row", rows), padding=padding, readout="mean", output="embedding",
        source=names("source", source), source_padding=source_padding,
    )  # fmt: skip


def decoder_real(decoder_attention_mask: Tensor, **_: Tensor) -> Tensor:
    return decoder_attention_mask.bool()


def source_real(attention_mask: Tensor, **_: Tensor) -> Tensor:
    return attention_mask.bool()


def encoder_decoder(model: Any, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """The encoder's layers, then in each layer of the decoder attention to its own rows and to the source."""
    output = eager(model, inputs)
    found = [("encoder", weights) for weights in output.encoder_attentions]
    for own, cross in zip(output.decoder_attentions, output.cross_attentions, strict=True):
        found += [("decoder", own), ("cross", cross)]
    return found


BOTH_STACKS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "init_std": 0.2,
}  # fmt: skip
SPECIAL = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def translation(name: str, **options: Any) -> Architecture:
    subject = partial(two_sequences, rows=ROWS, source=SOURCE, padding=decoder_real, source_padding=source_real)
    build = partial(seeded, lambda: make(name, **SPECIAL, **options))
    return Architecture(build, translation_inputs, subject, encoder_decoder)


def whisper_inputs(side: Side) -> Inputs:
    inputs = translation_inputs(side)
    spectrogram = torch.randn(BATCH, 8, 2 * SOURCE)  # a convolution halves its length
    return {"input_features": spectrogram, **{name: inputs[name] for name in inputs if name.startswith("decoder")}}


def detr_inputs(side: Side) -> Inputs:
    """Images of different sizes, padded at the bottom and on the right, as Detr has them."""
    height, width = (8 * size for size in GRID)
    inputs = {"pixel_values": torch.randn(BATCH, 3, height, width)}
    if side is not None:
        inputs["pixel_mask"] = torch.zeros(BATCH, height, width, dtype=torch.long)
        for example, (rows, columns) in enumerate([(2, 3), GRID, (3, 2)]):
            inputs["pixel_mask"][example, : 8 * rows, : 8 * columns] = 1
    return inputs


def pixels_real(pixel_values: Tensor, pixel_mask: Tensor | None = None) -> Tensor:
    every = torch.ones(len(pixel_values), *GRID, dtype=torch.bool)
    return (every if pixel_mask is None else pixel_mask[:, ::8, ::8].bool()).flatten(1)


def make_detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    options = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": backbone}
    model = make("Detr", **options, **BOTH_STACKS, num_queries=5)
    sharpened(model.input_projection, 0.05)  # an untrained backbone gives scores of 1e4, where float32 cannot be exact
    return sharpened(model, 4, only="q_proj")


def lxmert_inputs(side: Side) -> Inputs:
    return {
        **text_inputs(side),
        "visual_feats": torch.randn(BATCH, SOURCE, 12),
        "visual_pos": torch.rand(BATCH, SOURCE, 4),
        "visual_attention_mask": real_rows(side, SOURCE).long(),
    }


def lxmert_subject(model: Any) -> Subject:
    def forward(model: Any, **inputs: Tensor) -> Tensor:
        return mean_of(model(**inputs).language_output, inputs["attention_mask"].bool())

    return regard.module(
        model, forward, features=names("token", ROWS), readout="mean", output="embedding",
        source=names("region", SOURCE), padding=source_real,
        source_padding=lambda visual_attention_mask, **_: visual_attention_mask.bool(),
    )  # fmt: skip


def make_lxmert() -> nn.Module:
    return sharpened(make(
        "Lxmert", vocab_size=WORDS, hidden_size=32, num_attention_heads=4, intermediate_size=40, l_layers=2, x_layers=2, r_layers=2,
        visual_feat_dim=12, initializer_range=0.2,
    ), 4, only="query")  # fmt: skip


def before_dropout(model: Any, inputs: Inputs, forward: Callable[..., Any], **places: str) -> list[Tensor]:
    """What attention modules hand to their own dropout (an identity here), in order of execution.

    ``places`` names, for a class of modules, the dropout that its weights go through.
    """
    found: list[Tensor] = []
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if (place := places.get(type(module).__name__)) is not None:
            getattr(module, place).register_forward_hook(lambda _, args, __: found.append(args[0].detach()))
    with torch.no_grad():
        forward(twin, **inputs)
    return found


def lxmert_expected(model: Any, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Its own output has one direction of the co-attention only; the kind is told by the sizes, which differ."""
    kinds = {(ROWS, ROWS): "decoder", (SOURCE, SOURCE): "encoder", (ROWS, SOURCE): "cross", (SOURCE, ROWS): "cross"}
    found = before_dropout(model, inputs, lambda twin, **inputs: twin(**inputs), LxmertAttention="dropout")
    return [(kinds[tuple(weights.shape[-2:])], weights) for weights in found]


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
PAIRS = {
    "T5": translation("T5", **T5),
    "BART": translation("Bart", **BOTH_STACKS, max_position_embeddings=64),
    "Marian": translation("Marian", **BOTH_STACKS, max_position_embeddings=64),
    "Whisper": Architecture(
        partial(seeded, lambda: make(
            "Whisper", **SPECIAL, **BOTH_STACKS, num_mel_bins=8, max_source_positions=SOURCE, max_target_positions=64)),
        whisper_inputs, partial(two_sequences, rows=ROWS, source=SOURCE, padding=decoder_real), encoder_decoder,
    ),
    "Detr": Architecture(
        partial(seeded, make_detr), detr_inputs,
        partial(two_sequences, rows=5, source=GRID[0] * GRID[1], source_padding=pixels_real), encoder_decoder,
        sides=(None, "right"),
    ),
    "Lxmert": Architecture(partial(seeded, make_lxmert), lxmert_inputs, lxmert_subject, lxmert_expected),
}  # fmt: skip


# --- images -------------------------------------------------------------------------------------------------------


def image_inputs(_: Side) -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16)}


def image_subject(model: Any, *, rows: int) -> Subject:
    def forward(model: Any, pixel_values: Tensor) -> Tensor:
        return model(pixel_values=pixel_values).last_hidden_state.mean(1)

    return regard.module(model, forward, features=names("patch", rows), readout="mean", output="embedding")


def image(name: str, rows: int, **options: Any) -> Architecture:
    common = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 16,
        "patch_size": 4, "initializer_range": 0.2,
    }  # fmt: skip
    build = partial(seeded, lambda: make(name, **common, **options))
    subject = partial(image_subject, rows=rows)
    return Architecture(build, image_inputs, subject, self_attention, sides=(None,))


IMAGES = {
    "ViT": image("ViT", 17),
    "DeiT": image("DeiT", 18),
    "CLIP, vision": image("CLIPVision", 17, initializer_factor=8.0),
}

TRANSFORMERS = {**TEXTS, **PAIRS, **IMAGES}
