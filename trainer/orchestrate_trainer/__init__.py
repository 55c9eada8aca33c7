"""Reads Orchestrate's training batches, and trains on them with PyTorch.

The names exported here read batches and need NumPy only. The trainer is started by
:mod:`orchestrate_trainer.serve` and needs the packages of the ``train`` extra.
"""

from .batch import Batch, BatchError, Sequence
from .version import __version__

__all__ = ["Batch", "BatchError", "Sequence", "__version__"]
