"""Models and tokenizers from live objects, a local folder, a GGUF file, or a hub name."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Literal

import transformers
from torch import nn

from regard.errors import NotAModel, TokenizerMismatch

Task = Literal["classify", "encode", "generate", "recognise", "see", "translate"]
AUTO = {
    "classify": transformers.AutoModelForSequenceClassification,
    "encode": transformers.AutoModel,
    "generate": transformers.AutoModelForCausalLM,
    "translate": transformers.AutoModelForSeq2SeqLM,
    "recognise": transformers.AutoModelForImageClassification,
    "see": transformers.AutoModel,
}


def load(
    model: nn.Module | str | Path, tokenizer: Any, task: Task, *, trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """A model and its tokenizer.

    Args:
        model: a live model, or a local folder, a GGUF file or a hub name.
        tokenizer: a live tokenizer, a name or folder, or None to take the one beside the model.
        task: which head to load.
        trust_remote_code: run Python code that comes with the checkpoint. Off unless you say so.

    Weights are read from safetensors or GGUF only: a pickle can run code.
    """
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise TokenizerMismatch(
                "tokenizer=None: a live model does not say which tokenizer belongs to it. Pass the tokenizer."
            )
        if isinstance(tokenizer, (str, Path)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        return model, tokenizer
    if not isinstance(model, (str, Path)):
        raise NotAModel(
            f"model={model!r} is a {type(model).__name__}, not a model, a path or a hub name. "
            "For a function or anything else that is not a Hugging Face model, use regard.module."
        )
    source, options = locate(model)
    options |= {"trust_remote_code": trust_remote_code}
    try:
        with quiet_unless_terminal():
            live = AUTO[task].from_pretrained(source, use_safetensors=True, **options)
            if tokenizer is None or isinstance(tokenizer, (str, Path)):
                beside = {} if tokenizer else options
                tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer or source, **beside)
    except (OSError, ValueError, ImportError, KeyError) as problem:
        # transformers reports a missing file, a broken one, a missing package and an unknown type this way
        raise NotAModel(f"model={str(model)!r} could not be loaded: {problem}") from problem
    return live, tokenizer


def load_vision(
    model: nn.Module | str | Path, processor: Any, *, with_text: bool, trust_remote_code: bool = False
) -> tuple[nn.Module, Any, Any, bool]:
    """A vision model, its image processor, its tokenizer, and whether all of its weights were in the checkpoint.

    Args:
        model: a live model, or a local folder or a hub name.
        processor: a live processor of pictures, or of pictures and texts; a folder or a name; or None to take the one
            beside the model. A live model may do without.
        with_text: whether a tokenizer is wanted, too.
        trust_remote_code: run Python code that comes with the checkpoint. Off unless you say so.
    """
    if not isinstance(model, (nn.Module, str, Path)):
        raise NotAModel(
            f"model={model!r} is a {type(model).__name__}, not a model, a path or a hub name. "
            "For anything that is not a Hugging Face model, use regard.module."
        )
    live, complete, tokenizer = model, True, getattr(processor, "tokenizer", None)
    options = {"trust_remote_code": trust_remote_code}
    beside = processor if isinstance(processor, (str, Path)) else None
    try:
        with quiet_unless_terminal():
            if not isinstance(live, nn.Module):
                source, gguf = locate(live)
                live, told = AUTO[task_of(live, **options)].from_pretrained(
                    source, use_safetensors=True, output_loading_info=True, **options, **gguf
                )
                complete, beside = not told["missing_keys"], beside or (source if processor is None else None)
            if beside is not None:
                processor = transformers.AutoImageProcessor.from_pretrained(beside, **options)
                tokenizer = transformers.AutoTokenizer.from_pretrained(beside, **options) if with_text else None
    except (OSError, ValueError, ImportError, KeyError) as problem:
        what = f"processor={str(beside)!r}" if isinstance(live, nn.Module) else f"model={str(model)!r}"
        raise NotAModel(f"{what} could not be loaded: {problem}") from problem
    return live, getattr(processor, "image_processor", processor), tokenizer, complete


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """transformers draws progress bars; only where somebody can see them. Its log messages still come through."""
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


def locate(model: str | Path) -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained`, after a look at what is on the disk."""
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path), {}
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return locate(ggufs[0])
        if ggufs:
            names = ", ".join(file.name for file in ggufs)
            raise NotAModel(f"model={str(model)!r} holds {len(ggufs)} GGUF files: {names}. Pass one of them.")
        raise NotAModel(
            f"model={str(model)!r} is a folder without config.json and without a .gguf file. "
            "Pass the folder that save_pretrained wrote."
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


def is_gguf(model: str | Path) -> bool:
    """Whether a path is a GGUF file, or a folder that holds one."""
    return "gguf_file" in locate(model)[1]


def task_of(model: str | Path, *, trust_remote_code: bool = False) -> Task:
    """What the checkpoint was saved for."""
    if is_gguf(model):
        return "generate"
    source, _ = locate(model)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as problem:
        raise NotAModel(f"model={source!r} could not be loaded: {problem}") from problem
    classes = " ".join(config.architectures or ())
    if "ForSequenceClassification" in classes:
        return "classify"
    if "ForImageClassification" in classes:
        return "recognise"
    if getattr(config, "is_encoder_decoder", False) and "EncoderModel" not in classes:
        return "translate"
    seen, said = ("patch_size", "vision_config"), ("vocab_size", "audio_config")
    writes = "ForConditionalGeneration" in classes or "ForCausalLM" in classes
    if any(hasattr(config, name) for name in seen) and not any(hasattr(config, name) for name in said) and not writes:
        return "see"
    return "generate" if "ForCausalLM" in classes or "LMHeadModel" in classes else "encode"


def translates(model: nn.Module) -> bool:
    """Whether a live model reads a text and writes another: an encoder–decoder with a language-model head."""
    config, writes = getattr(model, "config", None), getattr(model, "can_generate", None)
    reads = getattr(model, "main_input_name", "input_ids") == "input_ids"  # not a spectrogram, not pixels
    return bool(getattr(config, "is_encoder_decoder", False) and reads and writes and writes())


def sentence_pooling(model: nn.Module | str | Path) -> Literal["first", "mean"] | None:
    """How a sentence-transformers folder pools, if it says so."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "") if isinstance(model, nn.Module) else model
    file = Path(name) / "1_Pooling" / "config.json"
    if not name or not file.is_file():
        return None
    modes = json.loads(file.read_text())
    if modes.get("pooling_mode_mean_tokens"):
        return "mean"
    return "first" if modes.get("pooling_mode_cls_token") else None
