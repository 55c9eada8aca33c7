"""One step of reinforcement learning: recompute, measurements, mini steps. No files, no HTTP.

Recompute and update run the same micro-batches with the same routes, those that were missing
included: what the recompute pass chose there is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .corrections import Tokens
from .data import MicroBatch
from .learner import Learner
from .losses import Totals, kl_penalty
from .measures import Load, Mismatch, differing
from .objective import Critic, Objective, Shift
from .passes import Disagreements, Outcome, StepError, forward, mini_steps, packed
from .policy import Policy
from .prediction import Features, kept_rows, learn
from .settings import Hyperparameters
from .values import Estimates, Old, estimate, values_of
from .world import World

__all__ = ["Progress", "apply"]

#: Told of a phase and its share done; answers, alike in all processes, whether to go on.
Progress = Callable[[str, float], bool]


@dataclass
class Recomputed:
    """What one micro-batch gave at the weights of the rollout; tensors on the CPU."""

    logp: Tensor
    executed: Tensor
    watched: Tensor | None = None
    values: Tensor | None = None
    features: Features | None = None


def apply(
    learner: Learner,
    reference: Callable[[], Policy],
    batch: Batch,
    settings: Hyperparameters,
    world: World,
    progress: Progress,
) -> dict[str, Any]:
    """Applies one step to the learner and answers with the protocol's ``StepMetrics``,
    but for ``seconds``. ``reference`` is asked for where the loss has a divergence from it.

    Raises :class:`StepError`, alike in all processes.
    """
    return _Step(learner, reference, batch, settings, world, progress).run()


class _Step:
    def __init__(
        self,
        learner: Learner,
        reference: Callable[[], Policy],
        batch: Batch,
        settings: Hyperparameters,
        world: World,
        progress: Progress,
    ) -> None:
        self.learner, self.reference = learner, reference
        self.policy = policy = learner.policy
        self.settings, self.world, self.progress = settings, world, progress
        own = mini_steps(batch, settings.mini_steps, policy, world)
        self.parts = [packed(part, settings.micro_batch_tokens, world) for part in own]
        self.micros = [micro for part in self.parts for micro in part]
        counts = [[len(part), sum(len(s.scored) for s in part)] for part in own]
        sizes = world.sum([float(n) for pair in counts for n in pair])
        self.totals = [
            Totals(int(sequences), int(tokens), settings.loss_norm_tokens)
            for sequences, tokens in zip(sizes[::2], sizes[1::2])
        ]
        self.loss_tokens = sum(part.loss_tokens for part in self.totals)
        if self.loss_tokens == 0:
            raise StepError("the batch has no loss tokens")
        self.moved = False
        #: Per micro-batch, once it was run at the weights of the rollout.
        self.base: dict[int, Recomputed] = {}
        self.references: dict[int, Tensor] = {}
        self.estimates: Estimates | None = None
        self.mismatch, self.disagreements = Mismatch(), Disagreements(policy)
        self.load = Load(len(policy.shape["moe_layers"]), policy.shape["experts"])
        self.objective = Objective(settings)
        self.entropy = self.divergence = 0.0
        #: Losses of the router predictor, one per mini step that it learned in.
        self.predictions: list[float] = []
        #: (token, layer) pairs whose own choice has left the replayed one, and all of them.
        self.drift = [0.0, 0.0]
        sequences = [sequence for part in own for sequence in part]
        missing = sum(int((~s.valid[:-1]).sum()) for s in sequences)
        tokens = sum(len(s) for s in sequences)
        counts = [float(missing), float(tokens - len(sequences)), float(tokens)]
        #: Rows that are missing, rows there could be, and tokens, over all processes.
        self.counted = [int(count) for count in world.sum(counts)]

    def run(self) -> dict[str, Any]:
        settings = self.settings
        self._go_on("recompute", 0.0)
        metrics: dict[str, Any] = {"mismatch_no_replay": None, "disagreement": None}
        if settings.measure_no_replay and settings.replays_rollout:
            mismatch, disagreements = self._without_replay()
            metrics["mismatch_no_replay"] = mismatch.finish(self.world)[0]
            metrics["disagreement"] = disagreements.finish(self.world)
        if settings.kl_coefficient > 0:
            self._refer()
        # With one mini step the update's own forward is at the weights of the rollout. Advantages
        # of a value head are needed before it.
        if len(self.parts) > 1 or settings.values:
            self._recompute()
        if settings.values:
            self._estimate()
        done = []
        first = 0
        for number, micros in enumerate(self.parts):
            self._go_on("update", number / len(self.parts))
            done.append(self._mini_step(number, first, micros))
            first += len(micros)
        return metrics | self._metrics(done)

    def _go_on(self, phase: str, share: float) -> None:
        if not self.progress(phase, share):
            raise StepError(
                "stopped before the step was applied: the trainer is shutting down", self.moved
            )

    def _recorded(self, micro: MicroBatch) -> tuple[Tensor, Tensor] | None:
        return micro.recorded() if self.settings.replays_rollout and micro.sequences else None

    @torch.no_grad()
    def _without_replay(self) -> tuple[Mismatch, Disagreements]:
        mismatch, disagreements = Mismatch(), Disagreements(self.policy)
        for micro in self.micros:
            with forward(
                self.policy, micro, self.settings.temperature, self.world.device
            ) as out:
                disagreements.add(micro, self.policy.routing.own())
                if micro.live:
                    mismatch.add(out.logp, out.micro.rollout, _tokens(out.micro))
        return mismatch, disagreements

    @torch.no_grad()
    def _recompute(self) -> None:
        settings, policy = self.settings, self.policy
        watch = settings.router_shift != "none"
        head = self.learner.side.value_head().weights if settings.values else None
        for number, micro in enumerate(self.micros):
            keep = self._kept(micro)
            replay, device = self._recorded(micro), self.world.device
            with forward(
                policy, micro, settings.temperature, device, replay, watch, keep
            ) as out:
                self._note_base(number, out)
                base = self.base[number]
                if watch:
                    base.watched = policy.routing.watched()[out.micro.rows].cpu()
                if head is not None:
                    base.values = values_of(out.hidden, head).cpu()
                if keep is not None:
                    base.features = Features(*(part.cpu() for part in policy.routing.kept()))

    def _kept(self, micro: MicroBatch) -> Tensor | None:
        """Rows that the router predictor learns from, where it does."""
        return kept_rows(micro, self.settings.predictor_tokens) if self.settings.predicts else None

    def _estimate(self) -> None:
        bases = [self.base[number] for number in range(len(self.micros))]
        olds = [
            Old(micro, base.values, base.logp, self.references.get(number))
            for number, (micro, base) in enumerate(zip(self.micros, bases))
        ]
        self.estimates = estimate(olds, self.settings, self.world)

    def _note_base(self, number: int, out: Outcome) -> None:
        """Takes down what a forward at the weights of the rollout gave."""
        routing, micro = self.policy.routing, out.micro
        executed, logp = routing.executed().cpu(), out.logp.detach()
        self.base[number] = Recomputed(logp.cpu(), executed)
        for sequence in executed.split(micro.lengths) if micro.sequences else ():
            self.load.add(sequence[:-1])
        if not self.settings.replays_rollout:
            self.disagreements.add(self.micros[number], routing.own())
        if not micro.live:
            return
        self.mismatch.add(logp, micro.rollout, _tokens(micro))
        self.entropy += float(out.entropy.double().sum())
        reference = self._reference(number)
        if reference is not None:
            penalty = kl_penalty(logp.double(), reference.double(), self.settings.kl_estimator)
            self.divergence += float(penalty.sum())

    @torch.no_grad()
    def _refer(self) -> None:
        """Log-probs of the reference policy, which routes as it likes."""
        reference = self.reference()
        for number, micro in enumerate(self.micros):
            with forward(
                reference, micro, self.settings.temperature, self.world.device
            ) as out:
                self.references[number] = out.logp.cpu()

    def _mini_step(self, number: int, first: int, micros: list[MicroBatch]) -> tuple[float, ...]:
        settings, world, totals = self.settings, self.world, self.totals[number]
        learner = self.learner
        learner.optimizer.zero_grad(set_to_none=True)
        predicts = settings.predicts and number > 0
        value = predicted = 0.0
        for place, micro in enumerate(micros, start=first):
            stored = self.base.get(place)
            replay = self._recorded(micro)
            if stored is not None and settings.routing_replay != "none":
                replay = (stored.executed, torch.ones(len(stored.executed), dtype=torch.bool))
            watched = number > 0 and stored is not None and stored.watched is not None
            watch = stored.executed if watched else False
            keep = self._kept(micro) if predicts else None
            with forward(
                self.policy, micro, settings.temperature, world.device, replay, watch, keep
            ) as out:
                if stored is None:
                    self._note_base(place, out)
                self._note_drift(micro, replay, number)
                if predicts and stored is not None and stored.features is not None:
                    weights = learner.side.predictor().weights
                    predicted += learn(stored.features, self.policy.routing.kept()[1], weights)
                loss = self.objective.loss(
                    out.micro,
                    out.logp,
                    out.logp.detach() if stored is None else stored.logp.to(world.device),
                    totals,
                    self._reference(place),
                    self._shift(out.micro, stored) if watched else None,
                    self._critic(place, out),
                )
                # Gradients of processes are averaged; the loss is a sum over them.
                (loss * world.size).backward()
                value += float(loss.detach())
        value, predicted = world.sum([value, predicted])
        self._finite(value, "the loss", number)
        parameters = list(self.policy.parameters())
        routers = _norm(self.policy.routing.parameters())
        total = _value(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        self._finite(total, "the gradient", number)
        rate = learner.next_rate(settings)
        # Without loss tokens there is no gradient, and momentum alone must not move the weights.
        if totals.loss_tokens > 0:
            self.moved = True
            if predicts:
                self._predict(micros, predicted, rate)
            if settings.values:
                head = learner.side.value_head()
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
        learner.optimizer.zero_grad(set_to_none=True)
        learner.side.forget_gradients()
        return value, total, routers, rate

    def _predict(self, micros: list[MicroBatch], loss: float, rate: float) -> None:
        """Updates the router predictor; its loss is a mean over rows, a sum over layers."""
        (rows,) = self.world.sum([float(sum(len(self._kept(micro)) for micro in micros))])
        predictor = self.learner.side.predictor()
        predictor.scale_gradient(1 / max(rows, 1))
        predictor.update(self.settings, rate * self.settings.predictor_rate, self.world)
        self.predictions.append(loss / max(rows, 1))

    def _critic(self, place: int, out: Outcome) -> Critic | None:
        if self.estimates is None:
            return None
        head = self.learner.side.value_head().weights
        returns = self.estimates.parts[place].to(self.world.device)
        return Critic(values_of(out.hidden, head), returns)

    def _reference(self, place: int) -> Tensor | None:
        found = self.references.get(place)
        return None if found is None else found.to(self.world.device)

    def _shift(self, micro: MicroBatch, stored: Recomputed) -> Shift:
        new = self.policy.routing.watched()[micro.rows]
        return Shift(new, stored.watched.to(new))

    def _finite(self, value: float, what: str, number: int) -> None:
        if not math.isfinite(value):
            raise StepError(f"{what} of mini step {number + 1} is not finite", self.moved)

    def _note_drift(
        self, micro: MicroBatch, replay: tuple[Tensor, Tensor] | None, number: int
    ) -> None:
        if replay is None or number == 0 or number + 1 < len(self.parts):
            return
        rows, valid = replay
        # Nothing depends on the experts of a sequence's last token.
        valid = valid.clone()
        valid[torch.tensor(micro.lengths).cumsum(0) - 1] = False
        own = self.policy.routing.own().cpu()
        found = differing(rows[valid].to(torch.int16), own[valid]) > 0
        self.drift = [self.drift[0] + float(found.sum()), self.drift[1] + found.numel()]

    def _metrics(self, done: list[tuple[float, ...]]) -> dict[str, Any]:
        world, replays = self.world, self.settings.replays_rollout
        sums = [self.entropy, self.divergence, *self.drift]
        entropy, divergence, drifted, pairs = world.sum(sums)
        objective = self.objective.finish(world)
        value = {"loss": objective.pop("value_loss") / len(done)}
        if self.estimates is not None:
            value["explained_variance"] = self.estimates.explained_variance
        mismatch, moments = self.mismatch.finish(world)
        missing, inputs, tokens = self.counted
        loss, grad_norm, router_grad_norm, _ = (sum(each) / len(done) for each in zip(*done))
        metrics = objective | self.load.finish(world) | {
            "loss": loss,
            "grad_norm": grad_norm,
            "router_grad_norm": router_grad_norm,
            "learning_rate": done[-1][3],
            "entropy": entropy / self.loss_tokens,
            "rollout_ratio": moments | objective["rollout_ratio"],
            "kl_reference": divergence / self.loss_tokens if self.references else None,
            "predictor_loss": _mean(self.predictions),
            "value": value if self.estimates is not None else None,
            "route_drift": drifted / pairs if pairs else None,
            "mismatch": mismatch,
            "routing_missing": missing * len(self.policy.shape["moe_layers"]) if replays else 0,
            "routing_missing_fraction": missing / max(inputs, 1) if replays else 0.0,
            "loss_tokens": self.loss_tokens,
            "tokens": tokens,
        }
        if not replays:
            metrics["disagreement"] = self.disagreements.finish(world)
            if self.settings.measure_no_replay:
                metrics["mismatch_no_replay"] = mismatch
        return metrics


def _norm(parameters: list[torch.nn.Parameter]) -> float:
    """Global L2 norm of their gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return _value(torch.nn.utils.get_total_norm(gradients))


def _value(norm: Tensor) -> float:
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tokens(micro: MicroBatch) -> Tokens:
    return Tokens(micro.owner, len(micro.sequences))
