"""How a model comes about from data and a seed, so that more of its kind can be trained."""

from regard.recipes.core import Recipe, described, recipe
from regard.recipes.ready import FITS, READY, attention_classifier, fine_tune, ft_transformer, sequences

__all__ = [
    "FITS", "READY", "Recipe", "attention_classifier", "described", "fine_tune", "ft_transformer", "recipe",
    "sequences",
]  # fmt: skip
