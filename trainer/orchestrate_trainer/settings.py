"""Hyperparameters of a step, as in the trainer protocol, and which of them this trainer supports.

Generated from crates/handoff/src/algorithm/declaration.rs. Do not edit: change the declaration, and
run `ORCHESTRATE_REGENERATE=1 cargo nextest run -p orchestrate-handoff generated`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .rules import refusals

__all__ = ["ALGORITHMS", "Hyperparameters", "Unusable"]

#: Policy losses that this trainer supports.
ALGORITHMS = ("grpo", "gspo", "gmpo", "rspo", "cispo", "minirl", "sapo", "ppo")
CHOICES: dict[str, tuple[str, ...]] = {
    "policy_loss": ALGORITHMS,
    "aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm"),
    "routing_replay": ("none", "recompute", "rollout", "predictive"),
    "router_shift": ("none", "before_clip", "after_clip"),
    "importance_correction": ("none", "tis", "mis", "icepop", "geometric_mask"),
    "importance_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3", "k3_plus"),
}


class Unusable(ValueError):
    """A hyperparameter that is missing, out of range or not supported by this trainer."""


@dataclass(frozen=True)
class Hyperparameters:
    """Everything an update depends on besides the batch.

    Fields with a default may be absent from a request.
    """

    #: Policy loss.
    policy_loss: str
    #: How token losses are aggregated to one number.
    aggregation: str
    #: Constant of `token-sum-norm`, in tokens: usually the longest sequence. Required there.
    loss_norm_tokens: float
    #: Whose routes the trainer's forward passes use.
    routing_replay: str
    #: Lower clip of the ratio; of its logarithm for `gmpo` and `rspo`.
    clip_low: float
    #: Upper clip of the ratio; above `clip_low` it is Clip-Higher.
    clip_high: float
    #: Optimizer steps that one batch is split into.
    mini_steps: int
    #: Maximum number of tokens in one forward and backward pass; gradients accumulate over passes.
    micro_batch_tokens: int
    #: AdamW learning rate. A run requires at least 1e-12.
    learning_rate: float
    #: AdamW decay rates of the first and second moment.
    betas: tuple[float, float]
    #: AdamW ε.
    adam_eps: float
    #: Decoupled weight decay.
    weight_decay: float
    #: Global L2 norm that gradients are clipped to.
    max_grad_norm: float
    #: Sampling temperature of the rollouts; log-probs are taken at it.
    temperature: float
    #: Also measure the mismatch in a forward pass without replay.
    measure_no_replay: bool
    #: Where the router-shift weight enters the ratio.
    router_shift: str = "none"
    #: Smallest router-shift weight.
    router_shift_floor: float = 0.8
    #: Bound of the ratio for negative advantages; 0 turns it off.
    dual_clip: float | None = None
    #: Thresholds of `sapo`'s sigmoid for positive and for other advantages.
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    #: Importance weight that corrects the mismatch between engine and trainer.
    importance_correction: str = "none"
    #: Whether the weight is taken over single tokens or whole sequences.
    importance_level: str = "token"
    #: Upper bound of the weight, and of `minirl`'s ratio.
    importance_high: float = 2.0
    #: Lower bound of the weight.
    importance_low: float = 0.5
    #: Sequences with a negative advantage are left out once the policy moved away from them by this
    #: mean log-prob; 0 turns it off.
    off_policy_delta: float | None = None
    #: Factor on the divergence from the run's starting policy; 0 turns it off.
    kl_coefficient: float = 0.0
    #: Estimator of that divergence.
    kl_estimator: str = "k3"
    #: Multiply k3 by the ratio of new to old policy, and take the gradient through both: unbiased
    #: off policy.
    kl_unbiased: bool = False
    #: Discount of `ppo`'s advantages per loss token.
    gae_gamma: float = 1.0
    #: λ of `ppo`'s advantages.
    gae_lambda: float = 1.0
    #: How far `ppo`'s new value may move from the old one.
    value_clip: float = 0.2
    #: Factor on `ppo`'s value loss.
    value_coefficient: float = 0.1
    #: Learning rate of `ppo`'s value head, as a multiple of `learning_rate`.
    value_rate: float = 10.0
    #: Learning rate of the router predictor, as a multiple of `learning_rate`.
    predictor_rate: float = 100.0
    #: Maximum number of tokens per sequence that the router predictor learns from, evenly spread.
    predictor_tokens: int = 2048
    #: Optimizer steps over which the learning rate rises: step `k` has `k / warmup_steps` of it.
    warmup_steps: int = 0

    @classmethod
    def parse(cls, given: object) -> Hyperparameters:
        """Reads and checks a request's ``hyperparameters``; unknown fields are ignored.

        Raises :class:`Unusable`, naming the field.
        """
        if not isinstance(given, dict):
            raise Unusable("hyperparameters must be an object")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in given:
                values[field.name] = _typed(field.name, str(field.type), given[field.name])
            elif field.default is dataclasses.MISSING:
                raise Unusable(f"hyperparameter `{field.name}` is missing")
        settings = cls(**values)
        settings._check()
        return settings

    @property
    def replays_rollout(self) -> bool:
        """Whether the engine's rows are executed."""
        return self.routing_replay in ("rollout", "predictive")

    @property
    def predicts(self) -> bool:
        """Whether the router predictor learns (PR2)."""
        return self.routing_replay == "predictive"

    @property
    def values(self) -> bool:
        """Whether advantages come from a value head."""
        return self.policy_loss == "ppo"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence is subtracted from the rewards instead of added to the loss."""
        return self.kl_coefficient > 0 and self.kl_estimator == "k1"

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 1 over the trainer's life."""
        return self.learning_rate * min(1.0, step / max(self.warmup_steps, 1))

    def _check(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                known = ", ".join(choices)
                raise Unusable(
                    f"hyperparameter `{name}`: this trainer knows {known}, not {value!r}"
                )
        if self.warmup_steps < 0:
            raise Unusable("hyperparameter `warmup_steps` must be 0 or more")
        problems = refusals(self)
        if problems:
            raise Unusable(f"hyperparameter {'; '.join(problems)}")


def _typed(name: str, kind: str, value: object) -> object:
    """``value`` in the type of its field; numbers must be finite."""
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind == "int" and isinstance(value, int):
            return value
        if kind in ("float", "float | None") and math.isfinite(value):
            return float(value)
    if kind == "float | None" and value is None:
        return None
    if kind == "tuple[float, float]" and isinstance(value, list) and len(value) == 2:
        return tuple(_typed(name, "float", part) for part in value)
    raise Unusable(f"hyperparameter `{name}` must be {kind}, not {value!r}")
