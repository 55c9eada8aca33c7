"""The objective of an update: a policy loss with its weights and penalties."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import losses
from .corrections import Tokens, correction, off_policy_keep
from .counts import DeviceSums
from .data import MicroBatch
from .losses import Loss, Totals
from .measures import Ratio
from .settings import Hyperparameters
from .values import Returns
from .world import World

__all__ = ["Critic", "Objective", "Shift"]


@dataclass(frozen=True)
class Shift:
    """The routers' log-probs of the experts that were executed at the old weights, ``[n, L, K]`` at
    the rows of the loss tokens: now, and at the old weights."""

    new: Tensor
    old: Tensor


@dataclass(frozen=True)
class Critic:
    """Values of the loss tokens, ``[n]``, and their targets."""

    values: Tensor
    returns: Returns


class Objective(DeviceSums):
    """The loss of a step's micro-batches, and the metrics that come from it."""

    def __init__(self, settings: Hyperparameters, device: torch.device | None = None) -> None:
        """``device`` is that of the micro-batches, by default the CPU."""
        self.settings = settings
        self._ratio = Ratio(device)
        #: Sums over loss tokens: importance weight, tokens that the correction changed, γ, tokens
        #: at γ's floor, tokens with a γ. Sum over mini steps: the value loss.
        names = ("weight", "corrected", "gamma", "floored", "shifted", "value")
        self._sums = dict.fromkeys(names, torch.zeros((), dtype=torch.float64, device=device))

    def loss(
        self,
        micro: MicroBatch,
        logp: Tensor,
        old: Tensor,
        totals: Totals,
        reference: Tensor | None = None,
        shift: Shift | None = None,
        critic: Critic | None = None,
    ) -> Tensor:
        """The micro-batch's share of the mini step's loss. ``logp``, ``old`` and ``reference`` are
        ``[n]``, nats; only ``logp`` and the critic's values get a gradient."""
        settings = self.settings
        if not micro.live:
            return 0.0 * logp.sum()
        tokens = Tokens(micro.owner, len(micro.sequences))
        log_shift = None
        if shift is not None:
            floor = settings.router_shift_floor
            log_shift, raw = losses.router_shift(shift.new, shift.old, floor)
            self._note(gamma=log_shift.exp().sum(), floored=(raw < floor).sum(), shifted=len(raw))
        advantages = micro.advantages[micro.owner] if critic is None else critic.returns.advantages
        loss = self._policy_loss(micro, tokens, logp, old, advantages, log_shift)
        self._ratio.add(logp.detach() - old, loss.clipped_high, loss.clipped_low)
        weight = self._weight(micro, tokens, logp, old)
        total = losses.aggregate(loss.terms * weight, tokens, totals, settings.aggregation)
        if reference is not None and not settings.kl_in_reward:
            log_ratio = logp - old if settings.kl_unbiased else None
            penalty = losses.kl_penalty(logp, reference, settings.kl_estimator, log_ratio)
            share = losses.aggregate(penalty, tokens, totals, settings.aggregation)
            total = total + settings.kl_coefficient * share
        if critic is not None:
            clip, count = settings.value_clip, totals.loss_tokens
            value = critic.returns.loss(critic.values, clip, count)
            self._note(value=value.detach())
            total = total + settings.value_coefficient * value
        return total

    def finish(self, world: World) -> dict[str, object]:
        """Part of the protocol's ``StepMetrics``: of ``rollout_ratio`` only the correction's two
        fields; ``value_loss`` is a sum over mini steps."""
        noted = torch.stack(list(self._sums.values())).tolist()
        count, *values = world.sum([float(self._ratio.count), *noted])
        sums = dict(zip(self._sums, values))
        count = max(count, 1)
        ratio = self._ratio.finish(world)
        gamma = None
        if sums["shifted"] > 0:
            mean, floored = (sums[name] / sums["shifted"] for name in ("gamma", "floored"))
            gamma = {"mean": mean, "floored": floored}
        return {
            "clip_fraction": ratio["clipped_high"] + ratio["clipped_low"],
            "ratio": ratio,
            "rollout_ratio": {
                "weight_mean": sums["weight"] / count,
                "corrected": sums["corrected"] / count,
            },
            "router_shift": gamma,
            "value_loss": sums["value"],
        }

    def _note(self, **values: Tensor | int) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums[name] + value

    def _weight(self, micro: MicroBatch, tokens: Tokens, logp: Tensor, old: Tensor) -> Tensor:
        settings = self.settings
        weight, changed = correction(
            old,
            micro.rollout,
            tokens,
            settings.importance_correction,
            settings.importance_level,
            settings.importance_low,
            settings.importance_high,
        )
        self._note(weight=weight.sum(), corrected=changed.sum())
        if settings.off_policy_delta is None:
            return weight
        delta = settings.off_policy_delta
        return weight * off_policy_keep(logp, old, tokens, micro.advantages, delta)

    def _policy_loss(
        self,
        micro: MicroBatch,
        tokens: Tokens,
        logp: Tensor,
        old: Tensor,
        each: Tensor,
        log_shift: Tensor | None,
    ) -> Loss:
        """``each`` is the advantage of every token, ``[n]``."""
        settings = self.settings
        low, high = settings.clip_low, settings.clip_high
        advantage = micro.advantages
        log_ratio = logp - old
        shifted, after = log_ratio, log_shift
        if log_shift is not None and settings.router_shift == "before_clip":
            shifted, after = log_ratio + log_shift, None
        match settings.policy_loss:
            case "grpo" | "ppo":
                return losses.surrogate(shifted, each, low, high, settings.dual_clip)
            case "gspo":
                return losses.sequence_surrogate(shifted, tokens, advantage, low, high)
            case "gmpo" | "rspo":
                return losses.geometric_mean(shifted, tokens, advantage, low, high, after)
            case "cispo":
                return losses.cispo(logp, old, each, low, high)
            case "minirl":
                cap = settings.importance_high
                return losses.minirl(logp, old, micro.rollout, each, low, high, cap)
            case "sapo":
                return losses.sapo(log_ratio, each, *settings.sapo_tau)
        raise ValueError(f"unknown policy loss {settings.policy_loss!r}")
