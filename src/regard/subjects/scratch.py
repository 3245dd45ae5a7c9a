"""Small untrained subjects, for planted data: a text classifier, and one for tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from regard.errors import SubjectError
from regard.subjects.module import ModuleSubject, module
from regard.subjects.text import TextSubject, text

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def scratch_text(
    texts: Iterable[str], labels: Sequence[str], *, layers: int = 2, width: int = 64, seed: int = 0
) -> TextSubject:
    """A small BERT with random weights, whose vocabulary is the words of these texts."""
    words = [*MARKS, *sorted({word for one in texts for word in one.split()})]
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")]
    )
    names = {f"{mark.strip('[]').lower()}_token": mark for mark in MARKS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=128, **names)
    config = BertConfig(
        vocab_size=len(words), hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=2 * width, max_position_embeddings=128, num_labels=len(labels),
        id2label=dict(enumerate(labels)), label2id={label: index for index, label in enumerate(labels)},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertForSequenceClassification(config)
    return text(model.eval(), tokenizer)


def scratch_table(columns: Sequence[str], labels: Sequence[str], baseline: Tensor, *, seed: int = 0) -> ModuleSubject:
    """A small FT-Transformer with random weights, for numerical columns; [CLS] comes first."""
    try:
        from rtdl_revisiting_models import FTTransformer
    except ImportError:
        raise SubjectError("a table needs the FT-Transformer: pip install 'regard[tabular]'.") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FTTransformer(
            n_cont_features=len(columns), cat_cardinalities=[], d_out=len(labels), n_blocks=2, d_block=32,
            attention_n_heads=4, attention_dropout=0.0, ffn_d_hidden_multiplier=2, ffn_dropout=0.0,
            residual_dropout=0.0,
        )  # fmt: skip

    def forward(model: nn.Module, numbers: Tensor) -> Tensor:
        return model(numbers, None)  # type: ignore[no-any-return]

    return module(
        model.eval(), forward, features=["[CLS]", *columns], readout="first", special_features=["[CLS]"],
        labels=labels, baseline=baseline,
    )  # fmt: skip
