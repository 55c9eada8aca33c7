"""Which options the golden vectors cover, and the synthetic inputs they are evaluated on.

Inputs are drawn with ``RandomState``, whose streams are the same in every version of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from aggregation import AGGREGATIONS
from objective import Batch
from policy_losses import PER_SEQUENCE, POLICY_LOSSES

#: Hyperparameters under the names of the trainer protocol. A case lists those that differ.
DEFAULTS: dict[str, Any] = {
    "policy_loss": "grpo",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "aggregation": "token-mean",
    "loss_norm_tokens": 7.0,
    "sapo_tau": [1.0, 1.05],
    "router_shift": "none",
    "router_shift_floor": 0.8,
    "importance_correction": "none",
    "importance_level": "token",
    "importance_low": 0.5,
    "importance_high": 2.0,
    "off_policy_delta": None,
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "kl_unbiased": False,
}

#: Clips that apply to some tokens of the ordinary batch and not to others.
CLIPS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {},
    "gspo": {"clip_low": 0.1, "clip_high": 0.12},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "rspo": {"clip_low": 0.4, "clip_high": 0.4, "router_shift": "before_clip"},
    "cispo": {"clip_low": 1.0, "clip_high": 0.5},
    "minirl": {"clip_low": 0.2, "clip_high": 0.27},
    "sapo": {},
}

CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"importance_correction": "tis", "importance_level": "token"},
    {"importance_correction": "tis", "importance_level": "sequence", "importance_high": 1.5},
    {"importance_correction": "mis", "importance_level": "token", "importance_high": 1.2},
    {"importance_correction": "mis", "importance_level": "sequence", "importance_high": 1.5},
    {"importance_correction": "icepop", "importance_level": "token", "importance_low": 0.8,
     "importance_high": 1.5},
    {"importance_correction": "geometric_mask", "importance_level": "sequence",
     "importance_low": 0.95, "importance_high": 1.3},
]  # fmt: skip

DIVERGENCES: list[dict[str, Any]] = [
    {"kl_coefficient": 0.3, "kl_estimator": "k2"},
    {"kl_coefficient": 0.3, "kl_estimator": "k3"},
    {"kl_coefficient": 0.3, "kl_estimator": "k3", "kl_unbiased": True},
    {"kl_coefficient": 0.3, "kl_estimator": "k3_plus"},
]


def base(loss: str) -> dict[str, Any]:
    """Settings of a loss with the aggregation that it was published with."""
    published = {
        "gspo": "seq-mean-token-mean",
        "gmpo": "seq-mean-token-mean",
        "rspo": "seq-mean-token-mean",
        "sapo": "seq-mean-token-mean",
        "minirl": "seq-mean-token-sum",
    }
    return {"policy_loss": loss, **CLIPS[loss], "aggregation": published.get(loss, "token-mean")}


def fits(settings: dict[str, Any]) -> bool:
    """Whether a loss and a correction can be combined: gmpo and rspo have one factor per sequence,
    and minirl's ratio is already the ratio to the engine."""
    loss, correction = settings["policy_loss"], settings.get("importance_correction", "none")
    if correction == "none":
        return True
    if loss == "minirl":
        return False
    return loss not in ("gmpo", "rspo") or settings["importance_level"] == "sequence"


def step_cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, batch and changed hyperparameters of each case of the objective."""
    for loss in POLICY_LOSSES:
        aggregations = ("seq-mean-token-mean",) if loss in PER_SEQUENCE else AGGREGATIONS
        shifts = ("before_clip", "after_clip") if loss == "rspo" else ("none",)
        for shift in shifts:
            for aggregation in aggregations:
                for correction in CORRECTIONS:
                    settings = {**base(loss), "aggregation": aggregation, **correction}
                    if loss == "rspo":
                        settings["router_shift"] = shift
                    if fits(settings):
                        yield _name(settings), "ordinary", settings
        for divergence in DIVERGENCES:
            settings = {**base(loss), **divergence}
            yield _name(settings), "ordinary", settings
        if loss != "ppo":
            for correction in CORRECTIONS[:3:2]:
                settings = {**base(loss), "off_policy_delta": 0.1, **correction}
                if fits(settings):
                    yield _name(settings), "ordinary", settings
        yield f"{loss} extreme", "extreme", base(loss)
        yield f"{loss} extreme, k3", "extreme", {**base(loss), **DIVERGENCES[1]}
    settings = {**base("ppo"), "kl_coefficient": 0.3, "kl_estimator": "k1"}
    yield _name(settings), "ordinary", settings
    for loss in ("grpo", "gspo", "ppo"):
        wide = {"clip_low": 0.2, "clip_high": 0.28, "router_shift": "before_clip"}
        for correction in CORRECTIONS[:2]:
            settings = {**base(loss), **wide, **correction}
            yield _name(settings), "ordinary", settings
        yield f"{loss} extreme, before_clip", "extreme", {**base(loss), **wide}
    yield "rspo extreme, after_clip", "extreme", {**base("rspo"), "router_shift": "after_clip"}
    for loss in ("grpo", "ppo"):
        for aggregation in AGGREGATIONS:
            for correction in CORRECTIONS[:2]:
                settings = {**base(loss), "dual_clip": 3.0, "aggregation": aggregation}
                yield _name(settings | correction), "ordinary", settings | correction
        yield f"{loss} extreme, dual clip", "extreme", {**base(loss), "dual_clip": 3.0}
    yield "gspo published clip", "ordinary", {**base("gspo"), "clip_low": 3e-4, "clip_high": 4e-4}
    yield "cispo two-sided", "ordinary", {**base("cispo"), "clip_low": 0.3}
    for correction in CORRECTIONS[1:]:
        name = f"{correction['importance_correction']} {correction['importance_level']}"
        for loss in ("grpo", "gspo"):
            yield f"{loss} extreme, {name}", "extreme", {**base(loss), **correction}
        everything = {**base("grpo"), **correction, **DIVERGENCES[2], "off_policy_delta": 0.1}
        yield f"grpo {name}, k3 unbiased, off-policy mask", "ordinary", everything
    for divergence in DIVERGENCES[0:4:2] + DIVERGENCES[3:]:
        name = divergence["kl_estimator"] + (" unbiased" if "kl_unbiased" in divergence else "")
        yield f"grpo extreme, {name}", "extreme", {**base("grpo"), **divergence}
    for loss in ("grpo", "gspo", "gmpo"):
        # With clamped log-ratios the mean of the second sequence would be below the threshold.
        yield f"{loss} extreme, off-policy mask", "extreme", {**base(loss), "off_policy_delta": 0.1}


def _name(settings: dict[str, Any]) -> str:
    full = DEFAULTS | settings
    parts = [full["policy_loss"], full["aggregation"]]
    if full["router_shift"] != "none":
        parts.append(full["router_shift"])
    if full["importance_correction"] != "none":
        parts.append(f"{full['importance_correction']} {full['importance_level']}")
    if full["kl_coefficient"] > 0:
        parts.append(full["kl_estimator"] + (" unbiased" if full["kl_unbiased"] else ""))
    if full["off_policy_delta"] is not None:
        parts.append("off-policy mask")
    if full["dual_clip"] is not None:
        parts.append("dual clip")
    return ", ".join(parts)


def batches() -> dict[str, Batch]:
    """``ordinary``: five sequences, one without loss tokens, ratios on both sides of every clip.
    ``extreme``: ratios far beyond the bound of ±20, and log-probs far from the reference."""
    return {"ordinary": _ordinary(), "extreme": _extreme()}


def _ordinary() -> Batch:
    draw = np.random.RandomState(20)
    shape = (5, 6)
    mask = np.array(
        [
            [0, 1, 1, 1, 1, 1],
            [0, 1, 1, 0, 1, 1],
            [0, 0, 1, 1, 1, 0],
            [0, 0, 0, 0, 0, 0],
            [0, 1, 1, 1, 1, 1],
        ],
        dtype=bool,
    )
    old = -draw.uniform(1.0, 4.0, shape)
    change = draw.normal(0.0, 0.25, shape)
    # Tokens to which each clip and the dual clip apply.
    change[0, 2], change[0, 4], change[1, 1] = 0.62, -0.71, 1.31
    change[1, 5], change[2, 3] = -0.55, 0.47
    change[4] -= 0.3
    mismatch = draw.normal(0.0, 0.2, shape)
    mismatch[0, 1], mismatch[1, 4], mismatch[4, 2] = 0.95, -0.8, 1.4
    return Batch(
        new=old + change,
        old=old,
        sampler=old - mismatch,
        reference=old + draw.normal(0.0, 0.5, shape),
        gamma=np.exp(-np.abs(draw.normal(0.0, 0.15, shape))),
        mask=mask,
        advantage=np.array([1.0, -0.8, 0.5, 0.3, -0.6]),
        token_advantage=draw.normal(0.0, 1.0, shape),
    )


def _extreme() -> Batch:
    mask = np.ones((5, 4), dtype=bool)
    mask[:, 0] = False
    old = np.array(
        [
            [-1.0, -30.0, -1.5, -3.0],
            [-1.0, -2.0, -26.0, -27.5],
            [-1.0, -26.5, -27.0, -28.0],
            [-1.0, -1.5, -2.5, -3.5],
            [-1.0, -2.0, -3.0, -31.0],
        ]
    )
    change = np.array(
        [
            [0.1, 28.5, -26.0, 0.5],
            # The mean of old - new is 0.97; of differences clamped to ±20 it would be -6.4.
            [0.1, -48.0, 22.1, 23.0],
            [0.1, 24.0, 25.0, 26.5],
            [0.1, -22.0, -21.0, -24.0],
            [0.1, 1.5, -0.7, 29.0],
        ]
    )
    mismatch = np.array(
        [
            [0.1, -24.0, 21.5, 0.2],
            [0.1, 23.0, 0.3, -0.1],
            [0.1, 0.2, -0.4, 0.1],
            [0.1, -25.0, 26.0, -0.9],
            [0.1, 22.0, 23.0, -21.0],
        ]
    )
    new = old + change
    from_reference = np.array(
        [
            [0.1, 4.0, -3.0, 21.0],
            [0.1, -24.5, 0.6, -2.2],
            [0.1, 11.5, -0.4, 15.0],
            [0.1, -4.0, -22.0, 0.3],
            [0.1, 2.0, -0.8, -19.0],
        ]
    )
    return Batch(
        new=new,
        old=old,
        sampler=old - mismatch,
        reference=new - from_reference,
        gamma=np.array([[1.0, 0.9, 0.85, 0.7]] * 5),
        mask=mask,
        advantage=np.array([1.0, -1.0, -0.5, 0.7, -0.9]),
        token_advantage=np.array([[0.0, 1.0, -1.0, 0.5]] * 5),
    )
