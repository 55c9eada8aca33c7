"""Hyperparameters of a step, as the trainer protocol has them, and which this trainer takes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

__all__ = ["ALGORITHMS", "Hyperparameters", "Unusable"]

#: Policy losses this trainer has.
ALGORITHMS = ("grpo", "gspo", "gmpo", "rspo", "cispo", "minirl", "sapo")
PER_SEQUENCE = ("gspo", "gmpo", "rspo")
CHOICES = {
    "policy_loss": ALGORITHMS,
    "aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum-norm"),
    "routing_replay": ("none", "recompute", "rollout"),
    "router_shift": ("none", "before_clip", "after_clip"),
    "importance_correction": ("none", "tis", "mis", "icepop", "geometric_mask"),
    "importance_level": ("token", "sequence"),
    "kl_estimator": ("k2", "k3", "k3_plus"),
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
    warmup_steps: int = 0

    @classmethod
    def parse(cls, given: Any) -> "Hyperparameters":
        """Reads and checks a request's ``hyperparameters``. Fields that only algorithms of other
        trainers read are passed over. Raises :class:`Unusable`, naming the field."""
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
        return self.routing_replay == "rollout"

    def rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 1 over the trainer's life."""
        return self.learning_rate * min(1.0, step / max(self.warmup_steps, 1))

    def _check(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                known = ", ".join(choices)
                raise Unusable(f"hyperparameter `{name}`: this trainer knows {known}, not {value!r}")
        for fine, problem in [*self._ranges(), *self._combinations()]:
            if not fine:
                raise Unusable(f"hyperparameter {problem}")

    def _ranges(self) -> list[tuple[bool, str]]:
        loss = self.policy_loss
        reads_low = loss != "sapo"
        most = {"gmpo": math.inf, "rspo": math.inf, "cispo": 1.0}.get(loss, 1 - 1e-12)
        bounded = self.importance_correction in ("icepop", "geometric_mask")
        return [
            (not reads_low or 0 < self.clip_low <= most, f"clip_low is out of range for {loss}"),
            (not reads_low or self.clip_high > 0, "clip_high must be > 0"),
            (self.dual_clip is None or self.dual_clip > 1, "dual_clip must be > 1"),
            (self.loss_norm_tokens > 0, "loss_norm_tokens must be > 0"),
            (self.mini_steps >= 1, "mini_steps must be >= 1"),
            (self.micro_batch_tokens >= 1, "micro_batch_tokens must be >= 1"),
            (self.learning_rate >= 0, "learning_rate must be >= 0"),
            (self.warmup_steps >= 0, "warmup_steps must be >= 0"),
            (all(0 <= beta < 1 for beta in self.betas), "betas must lie in [0, 1)"),
            (self.adam_eps > 0, "adam_eps must be > 0"),
            (self.weight_decay >= 0, "weight_decay must be >= 0"),
            (self.max_grad_norm > 0, "max_grad_norm must be > 0"),
            (self.temperature > 0, "temperature must be > 0"),
            (all(tau > 0 for tau in self.sapo_tau), "sapo_tau must be two numbers > 0"),
            (0 < self.router_shift_floor <= 1, "router_shift_floor must lie in (0, 1]"),
            (self.importance_low >= 0, "importance_low must be >= 0"),
            (self.importance_high > 0, "importance_high must be > 0"),
            (
                not bounded or self.importance_low < self.importance_high,
                "importance_low must be below importance_high",
            ),
            (
                self.off_policy_delta is None or self.off_policy_delta > 0,
                "off_policy_delta must be > 0",
            ),
            (self.kl_coefficient >= 0, "kl_coefficient must be >= 0"),
        ]

    def _combinations(self) -> list[tuple[bool, str]]:
        loss, shift = self.policy_loss, self.router_shift
        correction, level = self.importance_correction, self.importance_level
        allowed = {"rspo": ("before_clip", "after_clip")}
        allowed |= dict.fromkeys(("grpo", "gspo"), ("none", "before_clip"))
        floor = self.router_shift_floor
        reach = -math.log(floor) if loss == "rspo" else 1 - floor
        return [
            (self.dual_clip is None or loss == "grpo", f"dual_clip does not go with {loss}"),
            (
                loss not in PER_SEQUENCE or self.aggregation == "seq-mean-token-mean",
                f"aggregation must be seq-mean-token-mean with {loss}",
            ),
            (
                shift in allowed.get(loss, ("none",)),
                f"router_shift `{shift}` does not go with {loss}",
            ),
            (
                shift != "before_clip" or reach <= self.clip_low + 1e-9,
                "router_shift_floor alone would pass the lower clip: raise it or clip_low",
            ),
            (
                loss != "minirl" or correction == "none",
                "importance_correction must be none with minirl, whose ratio has it",
            ),
            (
                correction != "icepop" or level == "token",
                "importance_level must be token with icepop",
            ),
            (
                correction != "geometric_mask" or level == "sequence",
                "importance_level must be sequence with geometric_mask",
            ),
            (
                correction == "none" or level == "sequence" or loss not in ("gmpo", "rspo"),
                f"importance_level must be sequence with {loss}",
            ),
            (
                not self.kl_unbiased or self.kl_estimator == "k3",
                "kl_unbiased goes with kl_estimator k3",
            ),
        ]


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
