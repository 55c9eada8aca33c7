"""Choice of experts by every router family; gates are tested in test_reference.py."""

from __future__ import annotations

import needs  # noqa: F401

import torch  # isort: skip

from orchestrate_trainer.routers import RouterSpec


def test_the_lower_expert_wins_a_tie() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    for kind in ("softmax", "softmax_of_chosen", "sigmoid"):
        assert RouterSpec(kind, 5, 2).select(logits).tolist() == [[1, 2]]
