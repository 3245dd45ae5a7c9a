"""Small models that no light library offers: attention-pooled encoders, and hand-wired toys."""

from regard.models import toys
from regard.models.classifier import AttentionClassifier

__all__ = ["AttentionClassifier", "toys"]
