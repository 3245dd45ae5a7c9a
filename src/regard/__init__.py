"""Read attention from any PyTorch model, turn it into explanations, and put those explanations on trial."""

from importlib.metadata import version

from regard import errors, models
from regard.attention import Trace, trace
from regard.subjects import causal, module, pooled, text

__version__ = version("regard")
__all__ = ["Trace", "causal", "errors", "models", "module", "pooled", "text", "trace"]
