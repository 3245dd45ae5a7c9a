"""Data: readers of files, frames and datasets, and data whose truth was planted."""

from regard.data import planted
from regard.data.dataset import BadRow, Dataset, Example
from regard.data.eraser import read_eraser, write_eraser, write_predictions
from regard.data.marked import Word
from regard.data.reading import read

__all__ = [
    "BadRow",
    "Dataset",
    "Example",
    "Word",
    "planted",
    "read",
    "read_eraser",
    "write_eraser",
    "write_predictions",
]
