"""Small models in float64, and what their own code says about attention: weights and their gradients.

Nothing here uses regard's tape or methods. Weights are those of Hugging Face's ``attn_implementation="eager"``, or
written out here where that rounds to float32; the gradients are autograd's, with respect to those weights. Every oracle runs one example alone, without padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn

TOLERANCE = 1e-6  # of the largest number that is expected
TEXTS = ["a moving film", "dull, and it never ends", "so so"]
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
ROWS, REGIONS = 9, 7
STACKS = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}


def assert_close(found: Any, expected: Any) -> None:
    """Equal in shape, and in every number to 1e-6 of the largest one."""
    found, expected = (x.detach().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (found, expected))
    assert found.shape == expected.shape
    largest = np.abs(expected).max()
    assert largest > 0, "an oracle that says nothing proves nothing"
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * largest)


# --- models ---------------------------------------------------------------------------------------------------------


def seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return build().eval().double()


def bert(tokenizer: Any, kind: Any = hf.BertForSequenceClassification, **options: Any) -> Any:
    return seeded(lambda: kind(hf.BertConfig(vocab_size=len(tokenizer), num_labels=3, **SMALL | options)))


def gpt2(tokenizer: Any) -> Any:
    return seeded(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**ids_of(tokenizer), **SMALL)))


def llama(tokenizer: Any) -> Any:
    """Four heads share two groups of keys and values; its norms, which round to float32, are replaced by torch's."""
    config = {**ids_of(tokenizer), **SMALL, "num_key_value_heads": 2, "head_dim": 8}
    model = seeded(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**config)))
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, nn.RMSNorm(32, eps=module.variance_epsilon).double())
    return model


def t5(tokenizer: Any, **options: Any) -> Any:
    start = {"decoder_start_token_id": tokenizer.cls_token_id, "tie_word_embeddings": False}
    config = {**ids_of(tokenizer), **start, **STACKS, "initializer_factor": 2.0, **options}
    model = seeded(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**config)))
    model.lm_head.weight.data *= 0.05  # probabilities that are not 1, whose gradients would be all rounding
    return model


def lxmert() -> Any:
    """Text and picture, which look at each other in three layers, both ways at once."""
    model = seeded(lambda: hf.LxmertModel(hf.LxmertConfig(
        vocab_size=50, hidden_size=32, num_attention_heads=4, intermediate_size=40, l_layers=2, r_layers=3, x_layers=3,
        visual_feat_dim=12, initializer_range=0.2,
    )))  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name:
                parameter *= 4  # far from uniform
    return model


def ids_of(tokenizer: Any) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }  # fmt: skip


def written_out(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Eager attention with grouped queries, without the rounding to float32 that Llama's own does."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    rows = query.shape[2]
    scores = (query @ key.mT * scaling).masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


hf.AttentionInterface.register("written out", written_out)


# --- what they say --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One example, alone: weights and gradients of each layer, ``(head, query, key)``."""

    output: Any
    weights: list[Tensor]
    gradients: list[Tensor]

    @property
    def products(self) -> list[Tensor]:
        """A ⊙ ∂y/∂A."""
        return [weights * gradient for weights, gradient in zip(self.weights, self.gradients, strict=True)]


def attend(
    model: Any, inputs: dict[str, Tensor], scalar: Callable[[Any], Tensor],
    attentions: Callable[[Any], Any] = lambda output: output.attentions,
) -> Run:  # fmt: skip
    """Run the written-out model, and differentiate the scalar by its attention weights."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("written out" if isinstance(model, hf.LlamaForCausalLM) else "eager")
    output = twin(**inputs, output_attentions=True)
    return differentiated(output, list(attentions(output)), scalar(output))


def differentiated(output: Any, weights: list[Tensor], scalar: Tensor) -> Run:
    """∂scalar/∂A of every layer; 0 where it does not depend on it."""
    found = torch.autograd.grad(scalar, weights, allow_unused=True)
    gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
    return Run(output, [w.detach()[0] for w in weights], [g[0] for g in gradients])


def encoded(tokenizer: Any, text: str, **options: Any) -> dict[str, Tensor]:
    return dict(tokenizer(text, return_tensors="pt", **options))


def classified(model: Any, tokenizer: Any, text: str, target: int | None = None) -> Run:
    """A classifier; the scalar is the logit of the target, or of what is predicted."""

    def logit(output: Any) -> Tensor:
        return output.logits[0].max() if target is None else output.logits[0, target]

    return attend(model, encoded(tokenizer, text), logit)


def continued(model: Any, tokenizer: Any, text: str) -> Run:
    """A decoder; the scalar is the logit of the next token, which the last row predicts."""
    return attend(
        model, encoded(tokenizer, text, return_token_type_ids=False), lambda output: output.logits[0, -1].max()
    )


def produced(model: Any, tokenizer: Any, source: str, text: str) -> tuple[Run, list[str]]:
    """An encoder–decoder made to say ``text``; the scalar is the logit of its last token.

    Beside it the sequences of each layer's queries and keys, in order of execution.
    """
    said = tokenizer(text)["input_ids"]
    inputs = encoded(tokenizer, source, return_token_type_ids=False)
    inputs["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id, *said[:-1]]])
    run = attend(model, inputs, lambda output: output.logits[0, -1, said[-1]], both_stacks)
    return run, kinds_of(run.output)


def both_stacks(output: Any) -> list[Tensor]:
    """The encoder's layers, then in each layer of the decoder attention to its own rows and to the source."""
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(weights for pair in pairs for weights in pair)]


def kinds_of(output: Any) -> list[str]:
    return ["source source"] * len(output.encoder_attentions) + ["rows rows", "rows source"] * len(
        output.decoder_attentions
    )


def stream_inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "input_ids": torch.randint(3, 50, (3, ROWS)), "visual_feats": torch.randn(3, REGIONS, 12).double(),
        "visual_pos": torch.rand(3, REGIONS, 4).double(),
    }  # fmt: skip


def contrast(embedding: Tensor) -> Tensor:
    """A scalar of LXMERT's pooled output, which is read from the first token."""
    return embedding @ torch.linspace(-1, 2, 32, dtype=embedding.dtype)


def in_both_streams(model: Any, inputs: dict[str, Tensor]) -> dict[str, Run]:
    """What each of LXMERT's attention modules hands on after its dropout (an identity here), by the module's name.

    A module that runs twice looks from the text to the picture first, then back.
    """
    twin = copy.deepcopy(model)
    kept: list[tuple[str, Tensor]] = []
    for name, module in twin.named_modules():
        if type(module).__name__ == "LxmertAttention":
            name = name.removeprefix("encoder.")
            module.dropout.register_forward_hook(lambda _, __, output, name=name: kept.append((name, output)))
    output = twin(**inputs)
    run = differentiated(output, [weights for _, weights in kept], contrast(output.pooled_output)[0])
    found: dict[str, Run] = {}
    for (name, _), weights, gradient in zip(kept, run.weights, run.gradients, strict=True):
        one = found.setdefault(name, Run(output, [], []))
        one.weights.append(weights)
        one.gradients.append(gradient)
    return found
