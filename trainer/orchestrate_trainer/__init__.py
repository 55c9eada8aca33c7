"""Reads the training batches that Orchestrate writes."""

from .batch import Batch, BatchError, Sequence

__all__ = ["Batch", "BatchError", "Sequence"]
