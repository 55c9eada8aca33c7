"""The part of a step at the rollout weights: log-probs, routes and measurements.

The update replays what was executed here, so that recompute and update run the same computation
and the first ratio of each token is exactly 1. Rows that no engine recorded are the router's own
choice here, and are replayed as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .corrections import Tokens
from .counts import DeviceSums
from .data import MicroBatch, on_device
from .learner import Learner
from .losses import kl_penalty
from .measures import Load, Mismatch
from .passes import ForwardOutput, RouteDisagreement, forward
from .plan import StepPlan
from .policy import Policy
from .prediction import Features, predictor_rows
from .settings import Hyperparameters
from .values import Estimates, RolloutValues, estimate, values_of
from .world import World

__all__ = [
    "RecomputeStatistics",
    "RecomputedPass",
    "WithoutReplay",
    "estimate_advantages",
    "kept_rows",
    "measure_without_replay",
    "recompute",
    "recorded_routes",
    "reference_at",
    "reference_logprobs",
]


@dataclass(frozen=True)
class RecomputedPass:
    """One micro-batch at the rollout weights.

    Tensors stay on the device, except for the predictor's features, which are large. Executed
    experts take 384 bytes per token and 48 layers of 8 ids.
    """

    #: Log-probs of the scored tokens, nats, ``[n]``.
    logp: Tensor
    #: Executed experts, uint8 or int16 ``[T, L, K]``.
    executed: Tensor
    #: Router log-probs of the executed experts at the scored tokens, ``[n, L, K]``; only with
    #: router shift.
    router_logprobs: Tensor | None = None
    #: Outputs of the value head, ``[n]``; only with a value head.
    values: Tensor | None = None
    #: Router inputs and logits that train the router predictor, on the CPU; only with one.
    features: Features | None = None


@dataclass(frozen=True)
class WithoutReplay:
    """Measurements of a forward pass in which the routers choose freely."""

    mismatch: Mismatch
    disagreement: RouteDisagreement


class RecomputeStatistics(DeviceSums):
    """Accumulates measurements of this process's micro-batches at the rollout weights."""

    def __init__(self, policy: Policy, settings: Hyperparameters, device: torch.device) -> None:
        """Empty statistics of a step on ``device``."""
        self._settings = settings
        self.mismatch = Mismatch(device)
        #: Recorded experts against the routers' own; filled unless the rollout's are replayed.
        self.disagreement = RouteDisagreement(policy, device)
        self.load = Load(len(policy.shape["moe_layers"]), policy.shape["experts"], device)
        #: Sum over loss tokens, nats, float64.
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        #: Sum over loss tokens of the divergence from the reference policy, nats, float64.
        self.divergence = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, policy: Policy, out: ForwardOutput, reference: Tensor | None) -> RecomputedPass:
        """Adds a forward pass and returns what the update needs of it.

        ``reference`` are the log-probs under the reference policy ``[n]``, on the device.
        """
        routing, micro = policy.routing, out.micro
        executed, logp = routing.executed(), out.logp.detach()
        self.load.add(executed, micro.inner)
        if not self._settings.replays_rollout:
            self.disagreement.add(micro, routing.own())
        if micro.live:
            self.mismatch.add(logp, micro.rollout, _tokens(micro))
            self.entropy += out.entropy.double().sum()
            if reference is not None:
                estimator = self._settings.kl_estimator
                penalty = kl_penalty(logp.double(), reference.double(), estimator)
                self.divergence += penalty.sum()
        return RecomputedPass(logp, executed)


def recorded_routes(micro: MicroBatch, settings: Hyperparameters) -> tuple[Tensor, Tensor] | None:
    """The rollout's experts and the placeholder rows among them, if the settings replay them."""
    if not settings.replays_rollout or not micro.sequences:
        return None
    return micro.recorded(), micro.placeholders


def kept_rows(micro: MicroBatch, settings: Hyperparameters) -> Tensor | None:
    """Rows that train the router predictor, if the settings have one."""
    if not settings.predicts:
        return None
    return on_device(predictor_rows(micro, settings.predictor_tokens), micro.tokens.device)


@torch.no_grad()
def measure_without_replay(
    policy: Policy, plan: StepPlan, settings: Hyperparameters, world: World
) -> WithoutReplay:
    """Compares the trainer with the sampler in a forward pass without replay."""
    mismatch, disagreement = Mismatch(world.device), RouteDisagreement(policy, world.device)
    for micro in plan.micros:
        with forward(policy, micro, settings.temperature) as out:
            disagreement.add(micro, policy.routing.own())
            if micro.live:
                mismatch.add(out.logp, micro.rollout, _tokens(micro))
    return WithoutReplay(mismatch, disagreement)


@torch.no_grad()
def reference_logprobs(
    reference: Policy, plan: StepPlan, settings: Hyperparameters
) -> list[Tensor]:
    """Log-probs ``[n]`` of each micro-batch under the reference policy, on the device.

    The reference policy's routers choose freely.
    """
    logprobs = []
    for micro in plan.micros:
        with forward(reference, micro, settings.temperature) as out:
            logprobs.append(out.logp)
    return logprobs


def reference_at(references: list[Tensor] | None, place: int) -> Tensor | None:
    """Log-probs of micro-batch ``place`` under the reference policy, on the device."""
    return None if references is None else references[place]


@torch.no_grad()
def recompute(
    learner: Learner,
    plan: StepPlan,
    settings: Hyperparameters,
    references: list[Tensor] | None,
    statistics: RecomputeStatistics,
) -> list[RecomputedPass]:
    """Runs every micro-batch at the rollout weights and adds it to ``statistics``.

    ``references`` are the results of :func:`reference_logprobs`, if there is a reference policy.
    """
    policy = learner.policy
    watch = settings.router_shift != "none"
    head = learner.heads.value_head().weights if settings.values else None
    passes = []
    for number, micro in enumerate(plan.micros):
        keep = kept_rows(micro, settings)
        replay = recorded_routes(micro, settings)
        with forward(policy, micro, settings.temperature, replay, watch, keep) as out:
            base = statistics.add(policy, out, reference_at(references, number))
            routing = policy.routing
            if watch:
                base = replace(base, router_logprobs=routing.watched()[out.micro.rows])
            if head is not None:
                base = replace(base, values=values_of(out.hidden, head))
            if keep is not None:
                base = replace(base, features=Features.on_host(*routing.kept()))
            passes.append(base)
    return passes


def estimate_advantages(
    plan: StepPlan,
    passes: list[RecomputedPass],
    references: list[Tensor] | None,
    settings: Hyperparameters,
    world: World,
) -> Estimates:
    """Advantages and returns from the value head's outputs in ``passes``."""
    found: list[Tensor] = []
    for number, base in enumerate(passes):
        assert base.values is not None, "recompute runs the value head for these settings"
        reference = reference_at(references, number)
        kept = [base.values, base.logp, *([] if reference is None else [reference])]
        found.append(torch.stack(kept))
    # One copy, so that the host waits once.
    parts = torch.cat(found, dim=1).cpu().split([part.shape[1] for part in found], dim=1)
    olds = [RolloutValues(micro, *part) for micro, part in zip(plan.micros, parts, strict=True)]
    return estimate(olds, settings, world)


def _tokens(micro: MicroBatch) -> Tokens:
    return Tokens(micro.owner, len(micro.sequences))
