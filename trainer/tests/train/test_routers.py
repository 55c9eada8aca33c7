"""Choice of experts by every router family; gates are tested in test_reference.py."""

from __future__ import annotations

import needs  # noqa: F401

import torch  # isort: skip

from orchestrate_trainer.routers import RouterSpec, _top


def test_the_lower_expert_wins_a_tie() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]])
    for kind in ("softmax", "softmax_of_chosen", "sigmoid"):
        assert RouterSpec(kind, 5, 2).select(logits).tolist() == [[1, 2]]


def test_the_choice_equals_a_stable_sort() -> None:
    """Values from a small set, so that most rows have ties at the boundary, and values apart by one
    bit, of both signs."""
    generator = torch.Generator().manual_seed(0)
    few = torch.tensor([-torch.inf, -1.5, -1e-45, -0.0, 0.0, 1e-45, 0.25, 0.25000003, 3.0])
    ties = few[torch.randint(len(few), (2000, 32), generator=generator)]
    free = torch.randn(2000, 128, generator=generator)
    for keys in (ties, free, free.bfloat16().float(), free.double()):
        for count in (1, 4, 8, keys.shape[-1]):
            wanted = keys.sort(dim=-1, descending=True, stable=True).indices[:, :count]
            assert torch.equal(_top(keys, count), wanted)
