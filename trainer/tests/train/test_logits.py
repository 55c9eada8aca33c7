"""Log-probs are computed in chunks whose logits are not kept for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs  # noqa: F401

import torch  # isort: skip
from model_families import VOCAB, draw_tokens
from test_replay import LENGTHS, replaying, run

from orchestrate_trainer import policy as policy_module
from orchestrate_trainer.policy import ModelOptions, Policy, load_policy

import pytest  # isort: skip


def run_counted(policy: Policy) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Log-probs, gradients, and bytes of tensors as wide as the vocabulary that the forward pass
    kept for the backward."""
    kept = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes if tensor.dim() and tensor.shape[-1] == VOCAB else 0
        return tensor

    policy.zero_grad()
    with replaying(policy), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        run(policy, draw_tokens(LENGTHS))
    with replaying(policy):
        logp = run(policy, draw_tokens(LENGTHS))
        logp.sum().backward()
    gradients = [p.grad.full_tensor().clone() for p in policy.parameters() if p.grad is not None]
    return logp.detach(), gradients, kept


def test_logits_are_not_kept(
    folders: dict[str, Path], world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(folders["qwen3_moe"], ModelOptions(experts="eager"), world)
    whole = run_counted(policy)
    monkeypatch.setattr(policy_module, "MAX_LOGITS", 5 * VOCAB)
    chunked = run_counted(policy)
    torch.testing.assert_close(chunked[0], whole[0], rtol=1e-6, atol=1e-6)
    for found, wanted in zip(chunked[1], whole[1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert whole[2] == chunked[2] == 0
    # Without the checkpoint the same hooks find them.
    monkeypatch.setattr(policy_module, "checkpoint", lambda head, *given, **_: head(*given))
    assert run_counted(policy)[2] >= 4 * VOCAB * (sum(LENGTHS) - 1)
