"""Small models that no light library offers: attention-pooled encoders, TabTransformer, SAINT, and hand-wired toys."""

from regard.models import toys
from regard.models.classifier import AttentionClassifier
from regard.models.saint import SAINT
from regard.models.tabtransformer import TabTransformer

__all__ = ["SAINT", "AttentionClassifier", "TabTransformer", "toys"]
