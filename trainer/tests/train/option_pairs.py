"""Options of ``[algorithm]`` and their combinations, as changed hyperparameters."""

from __future__ import annotations

import itertools
from typing import Any

from model_families import hyperparameters

from orchestrate_trainer.settings import CHOICES, Hyperparameters, Unusable

#: The aggregation a loss was published with, where it is not ``token-mean``.
PUBLISHED = dict.fromkeys(("gspo", "gmpo", "rspo", "sapo"), "seq-mean-token-mean") | {
    "minirl": "seq-mean-token-sum"
}

#: Options of one combination in `covering`: so few that none hides what another one does.
TOGETHER = 4


def base(loss: str) -> dict[str, Any]:
    """Settings of a loss by itself."""
    settings: dict[str, Any] = {
        "policy_loss": loss,
        "aggregation": PUBLISHED.get(loss, "token-mean"),
    }
    if loss in ("gmpo", "rspo"):
        settings |= {"clip_low": 0.4, "clip_high": 0.4}
    if loss == "rspo":
        settings["router_shift"] = "before_clip"
    return settings


def is_allowed(settings: dict[str, Any]) -> bool:
    """Whether the rules allow a combination."""
    try:
        Hyperparameters.parse(hyperparameters(**settings))
    except Unusable:
        return False
    return True


def aggregated_losses() -> list[dict[str, Any]]:
    """Every loss with every aggregation and every correction at every level."""
    return [
        settings
        for loss in CHOICES["policy_loss"]
        for aggregation in CHOICES["aggregation"]
        for how in CHOICES["importance_correction"]
        for level in (CHOICES["importance_level"] if how != "none" else ("token",))
        if is_allowed(
            settings := base(loss)
            | {
                "aggregation": aggregation,
                "importance_correction": how,
                "importance_level": level,
            }
        )
    ]


def kinds() -> list[list[dict[str, Any]]]:
    """The options of each kind, of which a combination has at most one."""
    return [
        [base(loss) for loss in CHOICES["policy_loss"]],
        [{"router_shift": shift} for shift in CHOICES["router_shift"] if shift != "none"],
        [
            {"importance_correction": how, "importance_level": level}
            for how in CHOICES["importance_correction"]
            for level in CHOICES["importance_level"]
            if how != "none"
        ],
        [
            {"kl_coefficient": 0.1, "kl_estimator": estimator, "kl_unbiased": unbiased}
            for estimator in CHOICES["kl_estimator"]
            for unbiased in (False, True)
        ],
        [
            {"routing_replay": replay, "mini_steps": 2, "predictor_rate": 1.0}
            for replay in CHOICES["routing_replay"]
            if replay != "rollout"
        ],
        [{"off_policy_delta": 0.01}],
        [{"dual_clip": 3.0}],
        [{"warmup_steps": 400}],
        [{"temperature": 1.3}],
    ]


def pairs() -> list[dict[str, Any]]:
    """Every option with every option of another kind, where the rules allow the pair."""
    found = []
    for one, other in itertools.combinations(kinds(), 2):
        found += [a | b for a in one for b in other if is_allowed(a | b)]
    return found


def covering(wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combinations of up to `TOGETHER` options that have every pair in `wanted`, found greedily."""
    left, found = list(wanted), []
    while left:
        row = left[0]
        for _ in range(TOGETHER - 2):
            options = [option for kind in kinds() for option in kind if fits(option, row)]
            # The first of those that add the most pairs.
            row = max([row, *(row | option for option in options)], key=lambda r: count(r, left))
        found.append(row)
        left = [pair for pair in left if not pair.items() <= row.items()]
    return found


def fits(option: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether an option may be added to a combination."""
    changes_none = all(row.get(key, value) == value for key, value in option.items())
    return changes_none and is_allowed(row | option)


def count(row: dict[str, Any], wanted: list[dict[str, Any]]) -> int:
    """Number of pairs that a combination has."""
    return sum(pair.items() <= row.items() for pair in wanted)
