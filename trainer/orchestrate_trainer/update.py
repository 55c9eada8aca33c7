"""The part of a step that changes weights: mini steps of forward, backward and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .data import MicroBatch, on_device
from .learner import Learner
from .measures import differing
from .objective import Critic, Objective, Shift
from .passes import ForwardOutput, StepError, forward
from .plan import MiniStep, StepPlan
from .policy import Policy
from .prediction import accumulate_gradient
from .recompute import (
    RecomputedPass,
    RecomputeStatistics,
    kept_rows,
    recorded_routes,
    reference_at,
)
from .settings import Hyperparameters
from .values import Estimates, values_of
from .world import World

__all__ = ["MiniStepResult", "RouteDrift", "Updater"]


@dataclass(frozen=True)
class MiniStepResult:
    """What one mini step did, over all processes."""

    loss: float
    #: Global L2 norm of the gradient before clipping.
    grad_norm: float
    #: The same over the routers' parameters.
    router_grad_norm: float
    learning_rate: float
    #: Whether the weights were changed. They are not if the mini step has no loss tokens.
    moved: bool
    #: Loss of the router predictor, a mean over rows; ``None`` if it did not learn.
    predictor_loss: float | None
    #: Drift of this process's routes; measured in the last of several mini steps.
    drift: RouteDrift


@dataclass(frozen=True)
class RouteDrift:
    """How many routers no longer choose the replayed experts."""

    #: (token, layer) pairs whose router chooses other experts.
    moved: float = 0.0
    #: All pairs that were compared.
    pairs: float = 0.0

    def __add__(self, other: RouteDrift) -> RouteDrift:
        """Sum of both."""
        return RouteDrift(self.moved + other.moved, self.pairs + other.pairs)


@dataclass(frozen=True)
class Updater:
    """Runs the mini steps of one step, given the results of the earlier phases."""

    learner: Learner
    settings: Hyperparameters
    world: World
    plan: StepPlan
    #: Results of recompute, one per micro-batch of the step. ``None`` where it did not run: a
    #: single mini step's own forward pass is at the rollout weights, and only a value head needs
    #: another before it.
    passes: list[RecomputedPass] | None
    #: Log-probs under the reference policy ``[n]`` of each micro-batch, on the device.
    references: list[Tensor] | None
    #: Advantages and returns of a value head.
    estimates: Estimates | None
    #: Accumulates the loss's own measurements.
    objective: Objective
    #: Accumulates measurements at the rollout weights where ``passes`` is ``None``.
    statistics: RecomputeStatistics

    def run(self, mini_step: MiniStep, moved: bool) -> MiniStepResult:
        """Runs one mini step; ``moved`` says whether an earlier one changed the weights.

        Raises :class:`StepError` in all processes if the loss or the gradient is not finite.
        """
        settings, world, learner = self.settings, self.world, self.learner
        learner.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(4, dtype=torch.float64, device=world.device)
        for place, micro in enumerate(mini_step.micros, start=mini_step.first):
            sums += self._backward(mini_step, place, micro)
        router_norm = _gradient_norm(learner.policy.routing.parameters())
        parameters = list(learner.policy.parameters())
        norm = _whole(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        scalars = [*sums, router_norm, norm, learner.updates()]
        # The host waits for the device here, and not between micro-batches.
        read = torch.stack([on_device(scalar, world.device).double() for scalar in scalars])
        loss, predictor_loss, moved_routes, compared, routers, norm, made = read.tolist()
        loss, predictor_loss = world.sum([loss, predictor_loss])
        _require_finite(loss, "the loss", mini_step.number, moved)
        _require_finite(norm, "the gradient", mini_step.number, moved)
        rate = settings.rate(int(made) + 1)
        # Without loss tokens there is no gradient, and momentum alone must not move the weights.
        moves = mini_step.totals.loss_tokens > 0
        predictor_mean = None
        if moves:
            if self._trains_predictor(mini_step):
                predictor_mean = self._update_predictor(mini_step.micros, predictor_loss, rate)
            self._update_weights(rate)
        learner.optimizer.zero_grad(set_to_none=True)
        learner.heads.clear_gradients()
        drift = RouteDrift(moved_routes, compared)
        return MiniStepResult(loss, norm, routers, rate, moves, predictor_mean, drift)

    def _backward(self, mini_step: MiniStep, place: int, micro: MicroBatch) -> Tensor:
        """Adds the gradients of micro-batch ``place`` of the step.

        Returns loss, predictor's loss, and the two fields of :class:`RouteDrift` of this process's
        micro-batch, float64 ``[4]`` on the device.
        """
        settings, world, policy = self.settings, self.world, self.learner.policy
        base = None if self.passes is None else self.passes[place]
        replay: tuple[Tensor, Tensor | None] | None
        if base is None:
            replay = recorded_routes(micro, settings)
        else:
            replay = None if settings.routing_replay == "none" else (base.executed, None)
        # In the first mini step the routers' log-probs are those at the rollout weights.
        shifted = mini_step.number > 0 and base is not None and base.router_logprobs is not None
        watch = base.executed if base is not None and shifted else False
        keep = kept_rows(micro, settings) if self._trains_predictor(mini_step) else None
        reference = reference_at(self.references, place)
        is_last = 0 < mini_step.number == len(self.plan.mini_steps) - 1
        drifts = is_last and replay is not None
        predictor_loss = torch.zeros(1, dtype=torch.float64, device=world.device)
        drift = predictor_loss.new_zeros(2)
        with forward(policy, micro, settings.temperature, replay, watch, keep, drifts) as out:
            if base is None:
                self.statistics.add(policy, out, reference)
            if drifts and replay is not None:
                drift = _route_drift(policy, micro, replay[0])
            if keep is not None and base is not None and base.features is not None:
                weights = self.learner.heads.predictor().weights
                logits = policy.routing.kept()[1]
                predictor_loss = accumulate_gradient(base.features, logits, weights).view(1)
            loss = self.objective.loss(
                micro,
                out.logp,
                out.logp.detach() if base is None else base.logp,
                mini_step.totals,
                reference,
                _shift(policy, micro, base) if base is not None and shifted else None,
                self._critic(place, out),
            )
            # Gradients are averaged over the processes, but the loss is a sum over them.
            (loss * world.size).backward()
            return torch.cat([loss.detach().double().view(1), predictor_loss, drift])

    def _trains_predictor(self, mini_step: MiniStep) -> bool:
        return self.settings.predicts and mini_step.number > 0

    def _critic(self, place: int, out: ForwardOutput) -> Critic | None:
        if self.estimates is None:
            return None
        head = self.learner.heads.value_head().weights
        returns = self.estimates.parts[place].to(self.world.device)
        return Critic(values_of(out.hidden, head), returns)

    def _update_predictor(self, micros: list[MicroBatch], loss: float, rate: float) -> float:
        """Updates the router predictor; returns its loss as a mean over rows, a sum over layers."""
        kept = (kept_rows(micro, self.settings) for micro in micros)
        (rows,) = self.world.sum([float(sum(len(part) for part in kept if part is not None))])
        predictor = self.learner.heads.predictor()
        predictor.scale_gradient(1 / max(rows, 1))
        predictor.update(self.settings, rate * self.settings.predictor_rate, self.world)
        return loss / max(rows, 1)

    def _update_weights(self, rate: float) -> None:
        """One optimizer step of the value head, if there is one, and of the model."""
        settings, learner, world = self.settings, self.learner, self.world
        if settings.values:
            head = learner.heads.value_head()
            head.scale_gradient(1 / world.size)
            head.update(settings, rate * settings.value_rate, world)
        for group in learner.optimizer.param_groups:
            group.update(
                lr=rate,
                betas=settings.betas,
                eps=settings.adam_eps,
                weight_decay=settings.weight_decay,
            )
        learner.optimizer.step()


def _shift(policy: Policy, micro: MicroBatch, base: RecomputedPass) -> Shift:
    """Router log-probs now and at the rollout weights."""
    assert base.router_logprobs is not None
    new = policy.routing.watched()[micro.rows]
    return Shift(new, base.router_logprobs.to(new))


def _route_drift(policy: Policy, micro: MicroBatch, executed: Tensor) -> Tensor:
    """Compares the routers' own choice with the replayed experts: (token, layer) pairs that moved,
    and all pairs, float64 ``[2]``."""
    own = policy.routing.own()
    # No loss depends on the experts of a sequence's last token.
    counted = micro.inner.double()
    moved = (differing(executed.to(torch.int16), own) > 0).double()
    return torch.stack([(counted @ moved).sum(), counted.sum() * moved.shape[1]])


def _require_finite(value: float, what: str, number: int, moved: bool) -> None:
    if not math.isfinite(value):
        raise StepError(f"{what} of mini step {number + 1} is not finite", moved)


def _gradient_norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Global L2 norm of the parameters' gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return _whole(torch.nn.utils.get_total_norm(gradients))


def _whole(norm: Tensor) -> Tensor:
    """A norm over all processes."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
