"""Small language models that take the numbers of tokens, as subjects with data: some random, some wired by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
import transformers as hf
from torch import nn

import regard
from regard.models import toys

TOKENS, ROWS, WIDTH, HEADS = 40, 24, 32, 4
SMALL = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "intermediate_size": 40, "max_position_embeddings": 64, "initializer_range": 0.3, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def served(model, forward=lambda model, ids: model(ids)[:, -1], tokens=TOKENS, rows=ROWS):
    """A subject and its data: two texts of random tokens."""
    names = [f"row {row}" for row in range(rows)]
    subject = regard.module(model, forward, features=names, readout="last", vocabulary=tokens)
    frame = pd.DataFrame(np.random.default_rng(0).integers(0, tokens, (2, rows)), columns=names)
    return subject, regard.data.read(frame, columns=names)


def random_model(build, rows=ROWS):
    """A model of transformers in float64, whose norms and biases are not all alike."""
    torch.manual_seed(3)
    model = build().eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":  # transformers' own rounds to float32
            own = nn.RMSNorm(WIDTH, eps=module.variance_epsilon).double()
            own.weight.data = module.weight.data
            model.set_submodule(name, own)
    return model, *served(model, lambda model, ids: model(input_ids=ids, use_cache=False).logits[:, -1], rows=rows)


def llama(rows=ROWS):
    """Rotary positions; two heads share their keys and values."""
    config = hf.LlamaConfig(**SMALL, num_key_value_heads=2)
    return random_model(lambda: hf.LlamaForCausalLM(config), rows)


def gpt2(rows=ROWS):
    """Layer norms, and positions that are added."""
    return random_model(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL)), rows)


class Wired(nn.Module):
    """One layer; its first head is wired by what it asks for, its second one idle. Slots: token, position, prediction."""

    def __init__(self, looks, sign=1.0, tokens=TOKENS, positions=64):
        super().__init__()
        width = 2 * tokens + positions
        eye = torch.eye(width)
        token, position, prediction = eye[:tokens], eye[tokens : tokens + positions], eye[tokens + positions :]
        shift = torch.diag(torch.ones(positions - 1), 1) @ position
        asks = {"previous": (shift, position), "the same": (token, token)}[looks]
        self.layer = toys.Layer(query=40.0 * asks[0], key=asks[1], value=token, out=sign * prediction.T)
        self.register_buffer("token", token)
        self.register_buffer("position", position)
        self.register_buffer("prediction", prediction)

    def forward(self, ids):
        x = self.token[ids] + self.position[torch.arange(ids.shape[1])]
        return (x + self.layer(x)) @ self.prediction.T
