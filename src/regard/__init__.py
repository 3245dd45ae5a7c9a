"""Read attention from any PyTorch model, turn it into explanations, and put those explanations on trial."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for those who read without running: the same names as below
    from regard import data as data
    from regard import draw as draw
    from regard import errors as errors
    from regard import estimators as estimators
    from regard import measures as measures
    from regard import models as models
    from regard import rationales as rationales
    from regard import recipes as recipes
    from regard import references as references
    from regard.adopting import adopt as adopt
    from regard.attention import Trace as Trace
    from regard.attention import edits as edits
    from regard.attention import intervene as intervene
    from regard.attention import trace as trace
    from regard.audited import Audit as Audit
    from regard.audited import load_audit as load_audit
    from regard.auditing import audit as audit
    from regard.catalog import list_methods as list_methods
    from regard.comparing import compare as compare
    from regard.comparing import compare_planted as compare_planted
    from regard.comparison import Comparison as Comparison
    from regard.diagnosis import diagnose as diagnose
    from regard.explaining import explain as explain
    from regard.explanation import Explanation as Explanation
    from regard.explanation import load_explanation as load_explanation
    from regard.finding import Finding as Finding
    from regard.finding import load_finding as load_finding
    from regard.importance import Importance as Importance
    from regard.importance import feature_importance as feature_importance
    from regard.judging import Verdict as Verdict
    from regard.judging import verdict as verdict
    from regard.methods.token_mixing import identifiability as identifiability
    from regard.probed import Heads as Heads
    from regard.probed import load_heads as load_heads
    from regard.ranking import Patterns as Patterns
    from regard.ranking import patterns as patterns
    from regard.recipes import Recipe as Recipe
    from regard.recipes import recipe as recipe
    from regard.subjects import causal as causal
    from regard.subjects import image as image
    from regard.subjects import module as module
    from regard.subjects import pooled as pooled
    from regard.subjects import seq2seq as seq2seq
    from regard.subjects import tabular as tabular
    from regard.subjects import text as text
    from regard.surveying import heads as heads
    from regard.surveying import list_probes as list_probes
    from regard.training import fit as fit
    from regard.trying import list_trials as list_trials
    from regard.trying import trial as trial

    __version__: str

# Where each public name lives. Nothing is imported before it is asked for: torch alone takes seconds.
HOMES = {
    "Audit": "audited", "Comparison": "comparison", "Explanation": "explanation", "Finding": "finding",
    "Heads": "probed", "Importance": "importance",
    "Patterns": "ranking", "Recipe": "recipes", "Trace": "attention", "Verdict": "judging", "adopt": "adopting",
    "audit": "auditing",
    "causal": "subjects", "compare": "comparing", "compare_planted": "comparing", "data": "data",
    "diagnose": "diagnosis", "draw": "draw", "edits": "attention", "errors": "errors", "estimators": "estimators",
    "explain": "explaining", "feature_importance": "importance",
    "fit": "training", "heads": "surveying", "identifiability": "methods.token_mixing", "image": "subjects",
    "intervene": "attention",
    "list_methods": "catalog", "list_probes": "surveying", "list_trials": "trying", "load_audit": "audited",
    "load_explanation": "explanation", "load_finding": "finding", "load_heads": "probed",
    "measures": "measures", "models": "models", "module": "subjects", "patterns": "ranking",
    "pooled": "subjects", "rationales": "rationales", "recipe": "recipes", "recipes": "recipes",
    "references": "references", "seq2seq": "subjects",
    "tabular": "subjects", "text": "subjects", "trace": "attention",
    "trial": "trying", "verdict": "judging",
}  # fmt: skip
__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    """A public name, or a module of this package, when it is first asked for."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("regard")
    elif name.startswith("_"):
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    else:
        home = HOMES.get(name, name)
        try:
            held = import_module(f"regard.{home}")
        except ModuleNotFoundError as problem:
            if problem.name != f"regard.{home}":  # something that it needs is missing
                raise
            raise AttributeError(f"module 'regard' has no attribute {name!r}") from None
        value = held if home == name else getattr(held, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, "__version__"})
