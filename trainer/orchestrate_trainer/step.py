"""One step of reinforcement learning: measurements, recompute, mini steps. No files, no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .batch import Batch
from .counts import read_sums
from .learner import Learner
from .objective import Objective
from .passes import StepError
from .plan import plan_step
from .policy import Policy
from .recompute import (
    RecomputeStatistics,
    WithoutReplay,
    estimate_advantages,
    measure_without_replay,
    recompute,
    reference_logprobs,
)
from .settings import Hyperparameters
from .update import MiniStepResult, RouteDrift, Updater
from .world import World

__all__ = ["Progress", "apply"]

#: Called with a phase and the fraction of it that is done. Returns, with the same result in all
#: processes, whether to continue.
Progress = Callable[[str, float], bool]


def apply(
    learner: Learner,
    reference: Callable[[], Policy],
    batch: Batch,
    settings: Hyperparameters,
    world: World,
    progress: Progress,
) -> dict[str, Any]:
    """Applies one step to the learner.

    Returns the protocol's ``StepMetrics`` without ``seconds``. ``reference`` loads the reference
    policy; it is called only if the loss has a divergence from it. Raises :class:`StepError` in
    all processes.
    """
    policy = learner.policy
    plan = plan_step(batch, settings, policy, world)
    _continue(progress, "recompute", 0.0)

    without_replay = None
    if settings.measure_no_replay and settings.replays_rollout:
        without_replay = measure_without_replay(policy, plan, settings, world)
    references = None
    if settings.kl_coefficient > 0:
        references = reference_logprobs(reference(), plan, settings)

    statistics = RecomputeStatistics(policy, settings, world.device)
    passes = estimates = None
    # A single mini step's own forward pass is at the rollout weights, so no other is needed. A
    # value head's advantages must be known before it.
    if len(plan.mini_steps) > 1 or settings.values:
        passes = recompute(learner, plan, settings, references, statistics)
        if settings.values:
            estimates = estimate_advantages(plan, passes, references, settings, world)

    updater = Updater(
        learner,
        settings,
        world,
        plan,
        passes,
        references,
        estimates,
        Objective(settings, world.device),
        statistics,
    )
    done: list[MiniStepResult] = []
    for mini_step in plan.mini_steps:
        moved = any(result.moved for result in done)
        _continue(progress, "update", mini_step.number / len(plan.mini_steps), moved)
        done.append(updater.run(mini_step, moved))
    return _metrics(updater, done, without_replay)


def _continue(progress: Progress, phase: str, fraction: float, moved: bool = False) -> None:
    """Reports progress. Raises :class:`StepError` if the step is to stop."""
    if not progress(phase, fraction):
        raise StepError("stopped before the step was applied: the trainer is shutting down", moved)


def _metrics(
    updater: Updater, done: list[MiniStepResult], without_replay: WithoutReplay | None
) -> dict[str, Any]:
    """The protocol's ``StepMetrics``, over all processes, without ``seconds``."""
    settings, world, plan = updater.settings, updater.world, updater.plan
    statistics, estimates = updater.statistics, updater.estimates
    free = without_replay
    # The host waits for the device here, and once per mini step.
    read_sums(
        statistics, updater.objective, *([] if free is None else [free.mismatch, free.disagreement])
    )
    drift = sum((result.drift for result in done), RouteDrift())
    replays = settings.replays_rollout
    at_rollout = torch.stack([statistics.entropy, statistics.divergence]).tolist()
    sums = [*at_rollout, drift.moved, drift.pairs]
    entropy, divergence, drifted, pairs = world.sum(sums)
    objective: dict[str, Any] = updater.objective.finish(world)
    value_loss = objective.pop("value_loss")
    value = None
    if estimates is not None:
        value = {
            "loss": value_loss / len(done),
            "explained_variance": estimates.explained_variance,
        }
    mismatch, moments = statistics.mismatch.finish(world)
    layers = len(updater.learner.policy.shape["moe_layers"])
    metrics: dict[str, Any] = {
        "mismatch_no_replay": None,
        "disagreement": None,
        **objective,
        **statistics.load.finish(world),
        "loss": _mean([result.loss for result in done]),
        "grad_norm": _mean([result.grad_norm for result in done]),
        "router_grad_norm": _mean([result.router_grad_norm for result in done]),
        "learning_rate": done[-1].learning_rate,
        "entropy": entropy / plan.loss_tokens,
        "rollout_ratio": {**moments, **objective["rollout_ratio"]},
        "kl_reference": None if updater.references is None else divergence / plan.loss_tokens,
        "predictor_loss": _mean(
            [result.predictor_loss for result in done if result.predictor_loss is not None]
        ),
        "value": value,
        "route_drift": drifted / pairs if pairs else None,
        "mismatch": mismatch,
        "routing_missing": plan.missing_rows * layers if replays else 0,
        "routing_missing_fraction": plan.missing_rows / max(plan.possible_rows, 1)
        if replays
        else 0.0,
        "loss_tokens": plan.loss_tokens,
        "tokens": plan.tokens,
    }
    if without_replay is not None:
        metrics["mismatch_no_replay"] = without_replay.mismatch.finish(world)[0]
        metrics["disagreement"] = without_replay.disagreement.finish(world)
    if not replays:
        metrics["disagreement"] = statistics.disagreement.finish(world)
        if settings.measure_no_replay:
            metrics["mismatch_no_replay"] = mismatch
    return metrics


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
