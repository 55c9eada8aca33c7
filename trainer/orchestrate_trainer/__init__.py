"""Orchestrate's training batches, and a PyTorch trainer that takes them.

The names here read batches and need NumPy alone; the trainer is :mod:`orchestrate_trainer.serve`.
"""

from .batch import Batch, BatchError, Sequence
from .version import __version__

__all__ = ["Batch", "BatchError", "Sequence", "__version__"]
