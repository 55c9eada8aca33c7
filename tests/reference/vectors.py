"""The contents of every golden file, computed with the formulas in this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import advantages
import cases
import corrections
import divergence
import measures
import objective
import optimizer
import policy_losses
import predictor
import replay
import router_shift
import stitching
import values
import whole_model_cases
from routers import Router

#: Routers of every family; ``sigmoid_bias`` with and without groups.
ROUTERS: dict[str, Router] = {
    "softmax_renormalised": Router("softmax_renormalised", 2),
    "softmax_renormalised, one of six": Router("softmax_renormalised", 1),
    "logits_then_softmax": Router("logits_then_softmax", 2),
    "softmax": Router("softmax", 2),
    "softmax, scaled": Router("softmax", 3, scale=16.0),
    "softmax_grouped": Router("softmax_grouped", 2, scale=16.0, groups=3, kept_groups=2),
    "sigmoid_bias": Router("sigmoid_bias", 2, bias=(0.1, -0.05, 0.3, 0.0, -0.2, 0.05)),
    "sigmoid_bias, groups": Router(
        "sigmoid_bias", 2, scale=2.5, groups=3, kept_groups=2,
        bias=(0.02, -0.03, 0.15, 0.01, -0.1, 0.04),
    ),
    "sigmoid_bias_plain": Router(
        "sigmoid_bias_plain", 2, scale=1.8, bias=(0.0, 0.1, -0.1, 0.2, 0.0, -0.3)
    ),
}  # fmt: skip


def objective_vectors() -> dict[str, Any]:
    """Loss, gradient and diagnostics of every option and every allowed pair."""
    batches = cases.batches()
    found = []
    for name, batch, settings in cases.step_cases():
        result = objective.evaluate(cases.DEFAULTS | settings, batches[batch])
        found.append(
            {
                "name": name,
                "batch": batch,
                "settings": settings,
                "expected": {
                    "loss": result.loss,
                    "gradient": result.gradient,
                    "weights": result.weights,
                    **result.diagnostics,
                },
            }
        )
    return {
        "defaults": cases.DEFAULTS,
        "batches": {name: vars(batch) for name, batch in batches.items()},
        "cases": found,
    }


def divergence_vectors() -> dict[str, Any]:
    """Every estimator, plain and with the ratio, on differences from 0 to beyond the bounds."""
    k = np.array([0.0, 0.05, -0.05, 0.7, -0.7, 2.0, -2.0, -2.7, 6.0, 11.5, -11.5, 19.0, -19.0,
                  20.5, -20.5, 33.0, -33.0])  # fmt: skip
    new = -np.linspace(0.5, 3.0, len(k))
    old = new - np.tile([0.3, -0.4, 0.05, 21.0, -21.0], 4)[: len(k)]
    found = []
    for estimator in divergence.ESTIMATORS:
        for unbiased in (False, True) if estimator == "k3" else (False,):
            value, slope = divergence.penalty(
                estimator, new, new - k, new - old if unbiased else None
            )
            found.append(
                {
                    "name": estimator + (", unbiased" if unbiased else ""),
                    "settings": {
                        "kl_estimator": estimator, "kl_unbiased": unbiased, "kl_coefficient": 1.0,
                    },
                    "expected": {"value": value, "gradient": slope},
                }
            )  # fmt: skip
    return {"new": new, "old": old, "reference": new - k, "cases": found}


def advantage_vectors() -> dict[str, Any]:
    """Groups under every normalisation, and the overlong penalty."""
    groups = {
        "three of eight": [1, 0, 0, 1, 0, 0, 1, 0],
        "graded": [0.0, 0.25, 0.5, 1.0, 0.75],
        "pair": [0.3, -0.2],
        "all solved": [1, 1, 1, 1],
        "all failed": [0, 0, 0],
        "equal up to rounding": [0.3, 0.1 + 0.2, float(np.float32(0.3)), 0.3],
        "hardly different": [0.5, 0.5 + 2.0**-16, 0.5, 0.5],
    }
    found = []
    for name, rewards in groups.items():
        row = np.array(rewards, dtype=float)
        found.append(
            {
                "name": name,
                "rewards": row,
                "kept": advantages.has_signal(row),
                "expected": {
                    norm: advantages.group_advantages(row, norm)
                    for norm in advantages.NORMALISATIONS
                },
            }
        )
    overlong = []
    for limit, cache, lengths in (
        (10, 4, [0, 1, 5, 6, 7, 9, 10, 11, 40]),
        (20480, 4096, [100, 16384, 16385, 18432, 20479, 20480, 20481, 32768]),
    ):
        penalty = [advantages.overlong_penalty(n, limit, cache) for n in lengths]
        overlong.append(
            {"max_tokens": limit, "cache_tokens": cache, "lengths": lengths, "expected": penalty}
        )
    return {"groups": found, "overlong": overlong}


def router_vectors() -> dict[str, Any]:
    """Gates and gradients of every family, for its own and for replayed choices."""
    draw = np.random.RandomState(3)
    logits = draw.normal(0.0, 1.5, (5, 6))
    logits[4] = [0.5, -0.25, 0.5, 0.5, -0.25, 0.5]
    upstream = draw.normal(0.0, 1.0, (5, 6))
    recorded = [[0, 4, 2], [3, 1, 0], [5, 2, 1], [1, 0, 3], [4, 3, 5]]
    found = []
    for name, router in ROUTERS.items():
        own = [router.select(row) for row in logits]
        replayed = [row[: router.top_k] for row in recorded]
        expected = {}
        for kind, chosen in (("own", own), ("replayed", replayed)):
            expected[kind] = {
                "experts": chosen,
                "gates": [router.gates(row, c) for row, c in zip(logits, chosen)],
                "gradient": [
                    router.backward(row, c, up[c]) for row, c, up in zip(logits, chosen, upstream)
                ],
            }
        found.append({"name": name, "router": vars(router), "expected": expected})
    return {"logits": logits, "upstream": upstream, "cases": found}


def router_shift_vectors() -> dict[str, Any]:
    """Router-shift weights from the old and new logits of two layers, softmax and sigmoid."""
    draw = np.random.RandomState(4)
    old = draw.normal(0.0, 1.5, (4, 2, 6))
    new = old + draw.normal(0.0, 0.3, old.shape)
    # An unchanged router, and a probability below the smallest that is used.
    new[1] = old[1]
    old[3, 0, 2], new[3, 0, 2] = -30.0, -20.0
    executed = [[[0, 1], [4, 2]], [[3, 5], [1, 0]], [[2, 4], [5, 3]], [[2, 0], [1, 5]]]
    found = []
    for name in ("softmax_renormalised", "softmax", "sigmoid_bias"):
        router = ROUTERS[name]
        gamma = [
            router_shift.gamma(router, before, after, chosen)
            for before, after, chosen in zip(old, new, executed)
        ]
        found.append({"name": name, "router": vars(router), "expected": {"gamma": gamma}})
    return {"old": old, "new": new, "executed": executed, "cases": found}


def replay_vectors() -> dict[str, Any]:
    """A layer of experts, forward and backward, with its own and with recorded experts."""
    draw = np.random.RandomState(5)
    layer = replay.Layer(
        router=draw.normal(0.0, 1.0, (4, 4)),
        gate=draw.normal(0.0, 0.7, (4, 3, 4)),
        up=draw.normal(0.0, 0.7, (4, 3, 4)),
        down=draw.normal(0.0, 0.7, (4, 4, 3)),
    )
    x, upstream = draw.normal(0.0, 1.0, (3, 4)), draw.normal(0.0, 1.0, (3, 4))
    spec = Router("softmax_renormalised", 2)
    found = []
    # In the recorded routes expert 2 is never executed, and no row is the router's own choice.
    for name, recorded in (("own", None), ("replayed", [[3, 0], [1, 3], [0, 1]])):
        y, logits, chosen = replay.forward(spec, layer, x, recorded)
        found.append(
            {
                "name": name,
                "recorded": recorded,
                "expected": {
                    "logits": logits,
                    "experts": chosen,
                    "y": y,
                    "loss": float((y * upstream).sum()),
                    "gradient": replay.backward(spec, layer, x, chosen, upstream),
                },
            }
        )
    return {
        "x": x, "upstream": upstream, "top_k": 2, "layer": vars(layer), "cases": found,
    }  # fmt: skip


def predictor_vectors() -> dict[str, Any]:
    """PR2's predictor: predicted experts, loss and gradient, at 0 and after one step."""
    draw = np.random.RandomState(6)
    hidden, old = draw.normal(0.0, 1.0, (4, 3)), draw.normal(0.0, 1.0, (4, 5))
    new = old + draw.normal(0.0, 0.4, old.shape)
    router = Router("softmax_renormalised", 2)
    found = []
    for name, w in (("zero", np.zeros((3, 5))), ("trained", draw.normal(0.0, 0.3, (3, 5)))):
        slope = predictor.gradient(hidden, old, new, w)
        found.append(
            {
                "name": name,
                "w": w,
                "expected": {
                    "experts": [router.select(row) for row in old + hidden @ w],
                    "loss": predictor.loss(hidden, old, new, w),
                    "gradient": slope,
                    "loss_after_step": predictor.loss(hidden, old, new, w - 0.5 * slope),
                },
            }
        )
    return {"hidden": hidden, "old": old, "new": new, "top_k": 2, "step": 0.5, "cases": found}


def value_vectors() -> dict[str, Any]:
    """Generalised advantage estimates, returns, whitening and the value loss."""
    draw = np.random.RandomState(8)
    mask = np.array([[0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0, 0]], dtype=bool)
    old = draw.normal(0.2, 0.5, mask.shape)
    new = old + draw.normal(0.0, 0.25, mask.shape)
    rewards = np.where(mask, draw.normal(0.0, 0.05, mask.shape), 0.0)
    rewards[0, 7] += 1.0
    clip = 0.2
    found = []
    for discount, decay in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0)):
        pairs = [values.estimates(*row, discount, decay) for row in zip(rewards, old, mask)]
        advantage, returns = (np.array(part) for part in zip(*pairs))
        whitened = np.zeros(mask.shape)
        whitened[mask] = values.whiten(advantage[mask])
        loss, slope = values.value_loss(new[mask], old[mask], returns[mask], clip)
        gradient = np.zeros(mask.shape)
        gradient[mask] = slope / mask.sum()
        found.append(
            {
                "name": f"discount {discount}, decay {decay}",
                "gae_gamma": discount,
                "gae_lambda": decay,
                "expected": {
                    "advantages": advantage,
                    "returns": returns,
                    "whitened": whitened,
                    "loss": float(loss.mean()),
                    "gradient": gradient,
                    "explained_variance": values.explained_variance(returns[mask], old[mask]),
                },
            }
        )
    return {
        "mask": mask, "rewards": rewards, "old": old, "new": new, "value_clip": clip,
        "cases": found,
    }  # fmt: skip


def measure_vectors() -> dict[str, Any]:
    """Mismatch of log-probs, disagreement of routes, and load of experts."""
    draw = np.random.RandomState(9)
    lengths = (5, 9, 1)
    train = [-draw.uniform(0.01, 6.0, n) for n in lengths]
    engine = [np.minimum(t + draw.normal(0.0, 0.4, len(t)), -1e-3) for t in train]
    engine[1][3] = train[1][3]
    engine[1][4] = train[1][4] - 2.6
    engine[0][2] = train[0][2] - 1e-5
    routes = [
        np.array([[draw.permutation(6)[:2] for _ in range(3)] for _ in range(n)])
        for n in lengths
    ]
    others = [rows.copy() for rows in routes]
    others[0][1, 0] = (others[0][1, 0] + 1) % 6
    others[0][1, 2] = others[0][1, 2][::-1]
    others[1][2, :, 0] = [next(e for e in range(6) if e not in row) for row in others[1][2]]
    others[1][5, 1] = [e for e in range(6) if e not in routes[1][5, 1]][:2]
    log_rho = np.concatenate(train) - np.concatenate(engine)
    return {
        "train": train,
        "engine": engine,
        "engine_routes": routes,
        "train_routes": others,
        "top_k": 2,
        "experts": 6,
        "expected": {
            "mismatch": measures.mismatch(train, engine),
            "rollout_ratio": measures.rollout_ratio(log_rho),
            "disagreement": measures.disagreement(routes, others, 2),
            "expert_load": measures.expert_load(np.concatenate(routes), 6),
        },
    }


def optimizer_vectors() -> dict[str, Any]:
    """Parameters after each of a few steps, with warm-up, decay and clipped gradients."""
    draw = np.random.RandomState(10)
    start = draw.normal(0.0, 1.0, 6)
    gradients = draw.normal(0.0, 1.0, (5, 6)) * np.array([0.1, 1.0, 3.0, 0.5, 2.0])[:, None]
    found = []
    for name, settings in {
        "plain": {"learning_rate": 0.01, "betas": [0.9, 0.999], "adam_eps": 1e-8,
                  "weight_decay": 0.0, "warmup_steps": 0, "max_grad_norm": 1e9},
        "all": {"learning_rate": 0.05, "betas": [0.8, 0.95], "adam_eps": 1e-3,
                "weight_decay": 0.1, "warmup_steps": 3, "max_grad_norm": 1.0},
    }.items():  # fmt: skip
        adam = optimizer.AdamW(
            settings["learning_rate"], tuple(settings["betas"]), settings["adam_eps"],
            settings["weight_decay"], settings["warmup_steps"],
        )  # fmt: skip
        parameters, steps = start, []
        for gradient in gradients:
            applied, norm = optimizer.clipped(gradient, settings["max_grad_norm"])
            parameters = adam.update(parameters, applied)
            steps.append({"norm": norm, "parameters": parameters})
        found.append({"name": name, "settings": settings, "expected": steps})
    return {"start": start, "gradients": gradients, "cases": found}


def stitching_vectors() -> dict[str, Any]:
    """Three engine calls of one trajectory: complete, truncated, and with a gap."""
    draw = np.random.RandomState(11)

    def rows(count: int) -> np.ndarray:
        return np.array([[draw.permutation(8)[:2] for _ in range(3)] for _ in range(count)])

    first, second, third = rows(6), rows(6), rows(17)
    # The last call returns all rows again; one row inside the prompt has drifted.
    third[:6], third[6:12] = first, second
    third[2, 1] = [e for e in range(8) if e not in first[2, 1]][:2]
    # (prompt, output): (4, 3), (9, 4), (14, 4); the first call ends at row 6, the second at row 12.
    calls = [
        stitching.Call(0, first, 3, 7),
        stitching.Call(6, second, 3, 13),
        stitching.Call(0, third, 4, 18),
    ]
    late = [calls[0], stitching.Call(7, second[1:], 3, 13)]
    listed = {
        "complete": (calls, None),
        "truncated": (calls, 15),
        "gap": (late, None),
    }
    return {
        "layers": 3,
        "experts": 8,
        "top_k": 2,
        "cases": [
            {
                "name": name,
                "calls": [vars(call) for call in given],
                "length": length,
                "expected": stitching.stitch(given, length),
            }
            for name, (given, length) in listed.items()
        ],
    }


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "objective": objective_vectors,
    "divergence": divergence_vectors,
    "advantages": advantage_vectors,
    "routers": router_vectors,
    "router_shift": router_shift_vectors,
    "replay": replay_vectors,
    "predictor": predictor_vectors,
    "values": value_vectors,
    "measures": measure_vectors,
    "optimizer": optimizer_vectors,
    "stitching": stitching_vectors,
    "whole_model": whole_model_cases.vectors,
}
#: Checkpoints that vectors belong to: a folder of files each.
CHECKPOINTS: dict[str, Callable[[], dict[str, bytes]]] = {
    "whole_model": whole_model_cases.checkpoint,
}
#: Options that the cases must cover: selfcheck.py fails if one of them has no case.
OPTIONS = {
    "policy_loss": policy_losses.POLICY_LOSSES,
    "importance_correction": corrections.CORRECTIONS,
    "kl_estimator": divergence.ESTIMATORS,
}
