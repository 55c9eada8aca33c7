"""Hyperparameters of a step, as the trainer protocol has them, and which this trainer takes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .rules import refusals

__all__ = ["ALGORITHMS", "Hyperparameters", "Unusable"]

#: Policy losses this trainer has.
ALGORITHMS = ("grpo", "gspo", "gmpo", "rspo", "cispo", "minirl", "sapo", "ppo")
CHOICES = {
    "policy_loss": ALGORITHMS,
    "aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm"),
    "routing_replay": ("none", "recompute", "rollout", "predictive"),
    "router_shift": ("none", "before_clip", "after_clip"),
    "importance_correction": ("none", "tis", "mis", "icepop", "geometric_mask"),
    "importance_level": ("token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3", "k3_plus"),
}


class Unusable(ValueError):
    """A setting outside its range, or one this trainer does not have."""


@dataclass(frozen=True)
class Hyperparameters:
    """Everything an update depends on beside the batch. Fields with a default may be absent in a
    request."""

    policy_loss: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    aggregation: str
    loss_norm_tokens: float
    routing_replay: str
    mini_steps: int
    micro_batch_tokens: int
    learning_rate: float
    betas: tuple[float, float]
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    temperature: float
    measure_no_replay: bool
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    router_shift: str = "none"
    router_shift_floor: float = 0.8
    importance_correction: str = "none"
    importance_level: str = "token"
    importance_low: float = 0.5
    importance_high: float = 2.0
    off_policy_delta: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    gae_gamma: float = 1.0
    gae_lambda: float = 1.0
    value_clip: float = 0.2
    value_coefficient: float = 0.1
    value_rate: float = 10.0
    predictor_rate: float = 100.0
    predictor_tokens: int = 2048
    warmup_steps: int = 0

    @classmethod
    def parse(cls, given: Any) -> "Hyperparameters":
        """Reads and checks a request's ``hyperparameters``; fields unknown here are passed over.
        Raises :class:`Unusable`, naming the field."""
        if not isinstance(given, dict):
            raise Unusable("hyperparameters must be an object")
        values = {}
        for field in dataclasses.fields(cls):
            if field.name in given:
                values[field.name] = _typed(field.name, str(field.type), given[field.name])
            elif field.default is not dataclasses.MISSING:
                continue
            elif field.name == "dual_clip":
                values[field.name] = None
            else:
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
        """Whether the divergence is taken off the rewards and is no part of the loss."""
        return self.kl_coefficient > 0 and self.kl_estimator == "k1"

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 1 over the trainer's life."""
        return self.learning_rate * min(1.0, step / max(self.warmup_steps, 1))

    def _check(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                known = ", ".join(choices)
                raise Unusable(f"hyperparameter `{name}`: this trainer knows {known}, not {value!r}")
        if self.warmup_steps < 0:
            raise Unusable("hyperparameter `warmup_steps` must be 0 or more")
        problems = refusals(self)
        if problems:
            raise Unusable(f"hyperparameter {'; '.join(problems)}")


def _typed(name: str, kind: str, value: Any) -> Any:
    """``value`` as a field's type has it; numbers must be finite."""
    number = type(value) in (int, float) and math.isfinite(value)
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and type(value) is int:
        return value
    if kind.startswith("float") and number:
        return float(value)
    if kind == "float | None" and value is None:
        return None
    if kind == "tuple[float, float]" and isinstance(value, list) and len(value) == 2:
        return tuple(_typed(name, "float", part) for part in value)
    raise Unusable(f"hyperparameter `{name}` must be {kind}, not {value!r}")
