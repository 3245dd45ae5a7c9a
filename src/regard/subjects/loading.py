"""Models and tokenizers from live objects, a local folder, a GGUF file, or a hub name."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import transformers
from torch import nn

from regard.attention.sharding import shards_of
from regard.errors import NotAModel, SubjectError, TokenizerMismatch
from regard.locating import is_gguf, locate
from regard.progress import STAGE

Task = Literal["classify", "encode", "generate", "recognise", "see", "translate", "other"]
Make = TypeVar("Make", bound=Callable[..., Any])
DOES = {
    "classify": "classifies texts: use regard.text",
    "encode": "encodes texts: use regard.text",
    "generate": "predicts next tokens: use regard.causal",
    "translate": "reads one text and writes another: use regard.seq2seq",
    "recognise": "looks at pictures: use regard.image",
    "see": "looks at pictures: use regard.image",
    "other": "reads neither texts nor pictures: use regard.module",
}
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
        shards_of(model)  # raises where heads cannot be spread over so many processes
        return model, tokenizer
    source, options = locate(model)
    options |= {"trust_remote_code": trust_remote_code}
    if tokenizer is None and not options.get("gguf_file") and Path(source).is_dir() and not _holds_tokenizer(source):
        raise TokenizerMismatch(
            f"model={str(model)!r} holds no tokenizer. Pass tokenizer=, or save it beside the model."
        )
    with _explained(f"model={str(model)!r}", source):
        live, told = AUTO[task].from_pretrained(source, use_safetensors=True, output_loading_info=True, **options)
        if tokenizer is None or isinstance(tokenizer, (str, Path)):
            beside = {} if tokenizer else options
            tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer or source, **beside)
    if task != "encode" and told["missing_keys"]:  # an encoder may do without its pooler
        missing = ", ".join(sorted(told["missing_keys"])[:3])
        raise NotAModel(
            f"model={str(model)!r} does not hold all of a {type(live).__name__}: {missing}, … would be random. "
            "Was it saved for something else?"
        )
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
    live, complete, tokenizer = model, True, getattr(processor, "tokenizer", None)
    options = {"trust_remote_code": trust_remote_code}
    beside = processor if isinstance(processor, (str, Path)) else None
    if not isinstance(live, nn.Module):
        task = expected(model, ("recognise", "see"), trust_remote_code=trust_remote_code)
        source, _ = locate(model)  # type: ignore[arg-type]  # it is no module
        beside = beside or (source if processor is None else None)
        with _explained(f"model={str(model)!r}", source):
            live, told = AUTO[task].from_pretrained(source, use_safetensors=True, output_loading_info=True, **options)
        complete = not told["missing_keys"]
    if beside is not None:
        with _explained(f"processor={str(beside)!r}", beside):
            processor = transformers.AutoImageProcessor.from_pretrained(beside, **options)
            if with_text and hasattr(live, "get_image_features"):
                tokenizer = transformers.AutoTokenizer.from_pretrained(beside, **options)
    return live, getattr(processor, "image_processor", processor), tokenizer, complete


def sourced(make: Make) -> Make:
    """The same; of what is loaded from a path or by name, ``reopen`` is how, so that another machine can do it, too."""

    @wraps(make)
    def noting(model: Any, *more: Any, **options: Any) -> Any:
        subject = make(model, *more, **options)
        if isinstance(model, (str, Path)):
            path = Path(model).expanduser()
            source = str(path.resolve()) if path.exists() else str(model)
            named = getattr(getattr(subject.model, "config", None), "_name_or_path", "")
            object.__setattr__(subject, "reopen", partial(_opened, noting, named, source, *more, **options))
        return subject

    return cast("Make", noting)


def _opened(make: Callable[..., Any], named: str, source: str, *more: Any, **options: Any) -> Any:
    """A subject from a path that is the same everywhere, called what it was called at first."""
    subject = make(source, *more, **options)
    if hasattr(subject.model, "config"):
        subject.model.config._name_or_path = named
    return subject


@contextmanager
def _explained(what: str, source: str | Path) -> Iterator[None]:
    """What transformers says about a checkpoint that cannot be loaded, in our words where these are plainer."""
    try:
        with quiet_unless_terminal():
            yield
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as problem:
        # a missing file, a broken one, a missing package, an unknown type: transformers has no exception of its own
        reason = str(problem)
        if "Unrecognized configuration class" in reason:
            reason = "transformers has no class that loads it for this. Load it yourself, and use regard.module."
        elif not Path(source).exists():
            reason += " (Nor is there a folder of that name on this machine.)"
        raise NotAModel(f"{what} could not be loaded: {reason}") from problem


def _holds_tokenizer(folder: str) -> bool:
    names = [file.name for file in Path(folder).iterdir()]
    return any(re.match(r"(tokenizer|vocab|merges|spiece|source).*|.*\.(model|spm|tiktoken)$", name) for name in names)


@contextmanager
def quiet_unless_terminal() -> Iterator[None]:
    """transformers draws progress bars; only where somebody can see them, and where there are no others.

    Its log messages still come through.
    """
    if sys.stderr.isatty() and STAGE.live is None:
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


def expected(model: nn.Module | str | Path, tasks: tuple[Task, ...], *, trust_remote_code: bool = False) -> Task:
    """What a model was made for, if it is one of these; otherwise who takes it."""
    task = task_of(model, trust_remote_code=trust_remote_code)
    if task not in tasks:
        name = type(model).__name__ if isinstance(model, nn.Module) else str(model)
        raise SubjectError(f"{name} {DOES[task]} for it.")
    return task


def task_of(model: nn.Module | str | Path, *, trust_remote_code: bool = False) -> Task:
    """What a checkpoint was saved for, or a live model is; a live one that does not say is an encoder."""
    if not isinstance(model, (nn.Module, str, Path)):
        raise NotAModel(
            f"model={model!r} is a {type(model).__name__}, not a model, a path or a hub name. "
            "For a function or anything else that is not a Hugging Face model, use regard.module."
        )
    if isinstance(model, nn.Module):
        config, classes = getattr(model, "config", None), type(model).__name__
        if getattr(model, "main_input_name", "input_ids") not in ("input_ids", "pixel_values"):
            return "other"
    elif is_gguf(model):
        return "generate"
    else:
        source, _ = locate(model)
        with _explained(f"model={str(model)!r}", source):
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        classes = " ".join(config.architectures or ())
    if "ForSequenceClassification" in classes:
        return "classify"
    if "ForImageClassification" in classes:
        return "recognise"
    writes = not isinstance(model, nn.Module) or getattr(model, "can_generate", lambda: False)()
    if getattr(config, "is_encoder_decoder", False) and "EncoderModel" not in classes and writes:
        return "translate"
    if "ForCausalLM" in classes or "LMHeadModel" in classes:
        return "generate"
    seen, said = ("patch_size", "vision_config"), ("vocab_size", "audio_config")
    sees = any(hasattr(config, name) for name in seen) and not any(hasattr(config, name) for name in said)
    return "see" if sees and "ForConditionalGeneration" not in classes else "encode"


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


def fresh_classifier(
    path: str, labels: list[str] | None, *, tokens: int, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """A pre-trained encoder with an untrained head for these labels (None: for a number), and its tokenizer."""
    source, options = locate(path)
    options |= {"trust_remote_code": trust_remote_code}
    names: dict[str, Any] = {"num_labels": 1}
    if labels is not None:
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: place for place, name in enumerate(labels)}}
    told = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # that the head is new is no news
    try:
        with _explained(f"path={path!r}", source):
            model = transformers.AutoModelForSequenceClassification.from_pretrained(
                source, use_safetensors=True, ignore_mismatched_sizes=True, **names, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, model_max_length=tokens, **options)
    finally:
        transformers.utils.logging.set_verbosity(told)
    return model, tokenizer
