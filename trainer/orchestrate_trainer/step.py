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
from .data import MicroBatch
from .losses import Totals
from .measures import Load, Mismatch, differing
from .objective import Objective, Shift
from .passes import Disagreements, Outcome, StepError, forward, mini_steps, packed
from .policy import Policy
from .settings import Hyperparameters
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


def apply(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    reference: Callable[[], Policy],
    batch: Batch,
    settings: Hyperparameters,
    world: World,
    progress: Progress,
) -> dict[str, Any]:
    """Applies one step to policy and optimizer and answers with the protocol's ``StepMetrics``,
    but for ``seconds``. ``reference`` is asked for where the loss has a divergence from it.

    Raises :class:`StepError`, alike in all processes.
    """
    return _Step(policy, optimizer, reference, batch, settings, world, progress).run()


class _Step:
    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        reference: Callable[[], Policy],
        batch: Batch,
        settings: Hyperparameters,
        world: World,
        progress: Progress,
    ) -> None:
        self.policy, self.optimizer, self.reference = policy, optimizer, reference
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
        self.mismatch, self.disagreements = Mismatch(), Disagreements(policy)
        self.load = Load(len(policy.shape["moe_layers"]), policy.shape["experts"])
        self.objective = Objective(settings)
        self.entropy = 0.0
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
        # With one mini step the update's own forward is at the weights of the rollout.
        if len(self.parts) > 1:
            self._recompute()
        if settings.kl_coefficient > 0:
            self._refer()
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
                    mismatch.add(out.logp, out.micro.rollout)
        return mismatch, disagreements

    @torch.no_grad()
    def _recompute(self) -> None:
        watch = self.settings.router_shift != "none"
        for number, micro in enumerate(self.micros):
            with forward(
                self.policy,
                micro,
                self.settings.temperature,
                self.world.device,
                self._recorded(micro),
                watch,
            ) as out:
                self._note_base(number, out, watch)

    def _note_base(self, number: int, out: Outcome, watch: bool = False) -> None:
        """Takes down what a forward at the weights of the rollout gave."""
        routing, micro = self.policy.routing, out.micro
        executed = routing.executed().cpu()
        watched = routing.watched()[micro.rows].cpu() if watch else None
        self.base[number] = Recomputed(out.logp.detach().cpu(), executed, watched)
        for sequence in executed.split(micro.lengths) if micro.sequences else ():
            self.load.add(sequence[:-1])
        if not self.settings.replays_rollout:
            self.disagreements.add(self.micros[number], routing.own())
        if micro.live:
            self.mismatch.add(out.logp, micro.rollout)
            self.entropy += float(out.entropy.double().sum())

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
        self.optimizer.zero_grad(set_to_none=True)
        value = 0.0
        for place, micro in enumerate(micros, start=first):
            stored = self.base.get(place)
            replay = self._recorded(micro)
            if stored is not None and settings.routing_replay != "none":
                replay = (stored.executed, torch.ones(len(stored.executed), dtype=torch.bool))
            watched = stored is not None and stored.watched is not None
            watch = stored.executed if watched else False
            with forward(
                self.policy, micro, settings.temperature, world.device, replay, watch
            ) as out:
                if stored is None:
                    self._note_base(place, out)
                self._note_drift(replay, number)
                loss = self.objective.loss(
                    out.micro,
                    out.logp,
                    out.logp.detach() if stored is None else stored.logp.to(world.device),
                    totals,
                    self._reference(place),
                    self._shift(out.micro, stored),
                )
                # Gradients of processes are averaged; the loss is a sum over them.
                (loss * world.size).backward()
                value += float(loss.detach())
        (value,) = world.sum([value])
        self._finite(value, "the loss", number)
        parameters = list(self.policy.parameters())
        routers = _norm(self.policy.routing.parameters())
        total = _value(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        self._finite(total, "the gradient", number)
        rate = settings.rate(_steps_made(self.optimizer) + 1)
        # Without loss tokens there is no gradient, and momentum alone must not move the weights.
        if totals.loss_tokens > 0:
            for group in self.optimizer.param_groups:
                group.update(
                    lr=rate,
                    betas=settings.betas,
                    eps=settings.adam_eps,
                    weight_decay=settings.weight_decay,
                )
            self.moved = True
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value, total, routers, rate

    def _reference(self, place: int) -> Tensor | None:
        found = self.references.get(place)
        return None if found is None else found.to(self.world.device)

    def _shift(self, micro: MicroBatch, stored: Recomputed | None) -> Shift | None:
        """Nothing has shifted where the update is the first forward."""
        if stored is None or stored.watched is None:
            return None
        new = self.policy.routing.watched()[micro.rows]
        return Shift(new, stored.watched.to(new))

    def _finite(self, value: float, what: str, number: int) -> None:
        if not math.isfinite(value):
            raise StepError(f"{what} of mini step {number + 1} is not finite", self.moved)

    def _note_drift(self, replay: tuple[Tensor, Tensor] | None, number: int) -> None:
        if replay is None or len(self.parts) == 1 or number + 1 < len(self.parts):
            return
        rows, valid = replay
        own = self.policy.routing.own().cpu()
        found = differing(rows[valid].to(torch.int16), own[valid]) > 0
        self.drift = [self.drift[0] + float(found.sum()), self.drift[1] + found.numel()]

    def _metrics(self, done: list[tuple[float, ...]]) -> dict[str, Any]:
        world, replays = self.world, self.settings.replays_rollout
        entropy, drifted, pairs = world.sum([self.entropy, *self.drift])
        objective = self.objective.finish(world)
        mismatch, moments = self.mismatch.finish(world)
        missing, inputs, tokens = self.counted
        loss, grad_norm, router_grad_norm, _ = (sum(each) / len(done) for each in zip(*done))
        metrics = objective | {
            "loss": loss,
            "grad_norm": grad_norm,
            "router_grad_norm": router_grad_norm,
            "learning_rate": done[-1][3],
            "entropy": entropy / self.loss_tokens,
            "rollout_ratio": moments | objective["rollout_ratio"],
            "expert_load_entropy": self.load.finish(world),
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


def _steps_made(optimizer: torch.optim.Optimizer) -> int:
    for state in optimizer.state.values():
        return int(state["step"])
    return 0
