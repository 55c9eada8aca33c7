"""Golden vectors of the whole model, and the checkpoint that they belong to."""

from __future__ import annotations

import functools
import json
import struct
from typing import Any

import numpy as np

import measures
import whole_model
from basics import Array
from whole_model import CONFIG, EXPERTS, LAYERS

#: Draw with clear choices of experts, and with experts that no token uses.
SEED = 36
TOKENS, PROMPT = 20, 6
ADVANTAGE, CLIP_LOW, CLIP_HIGH = 0.7, 0.2, 0.28


def checkpoint() -> dict[str, bytes]:
    """The files of the checkpoint: ``config.json`` and ``model.safetensors`` (float32)."""
    header, data = {}, b""
    for name, values in whole_model.draw(SEED).items():
        stored = values.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(stored)],
        }
        data += stored
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return {
        "config.json": (json.dumps(CONFIG, indent=1) + "\n").encode(),
        "model.safetensors": struct.pack("<Q", len(text)) + text + data,
    }


@functools.cache
def vectors() -> dict[str, Any]:
    """Own routes, an engine with shifted router logits, replay of its routes, and one update."""
    parameters = whole_model.draw(SEED)
    rng = np.random.default_rng(SEED + 1000)
    tokens = [int(token) for token in rng.integers(0, CONFIG["vocab_size"], TOKENS)]
    shift = 0.5 * rng.standard_normal((LAYERS, TOKENS, EXPERTS))
    own = whole_model.forward(parameters, tokens)
    engine = whole_model.forward(parameters, tokens, shift=shift)
    routes = engine.routes
    replayed = whole_model.forward(parameters, tokens, recorded=routes)
    # float32 must choose the same experts.
    shifted = engine.router_logits + np.moveaxis(shift, 0, 1)
    assert min(_margin(own.router_logits), _margin(shifted)) > 5e-3

    answer = slice(PROMPT - 1, None)
    measured: dict[str, float] = {}
    for trainer, suffix in ((own, "no_replay"), (replayed, "replay")):
        log_rho = trainer.logprobs[answer] - engine.logprobs[answer]
        found = measures.mismatch([trainer.logprobs[answer]], [engine.logprobs[answer]])
        measured |= {
            f"kl_k3_{suffix}": found["kl_k3"],
            f"F_2_{suffix}": found["extreme_token_fraction"]["2"],
            f"F_1.1_{suffix}": float((np.abs(log_rho) > np.log(1.1)).mean()),
        }
    disagreement = measures.disagreement([routes], [own.routes], CONFIG["num_experts_per_tok"])

    def loss(moved: whole_model.Parameters) -> Any:
        new = whole_model.forward(moved, tokens, recorded=routes).logprobs[answer]
        old = engine.logprobs[answer]
        return whole_model.policy_loss(new, old, ADVANTAGE, CLIP_LOW, CLIP_HIGH)

    gradient = whole_model.gradient(loss, parameters)
    # An expert outside every replayed route has no gradient; some of them must be among the vectors.
    assert any(
        expert not in routes[:, layer] for layer in range(LAYERS) for expert in range(EXPERTS)
    )
    return {
        "checkpoint": "whole_model",
        "cases": [
            {
                "name": "forward_own_routing",
                "inputs": {"input_ids": tokens},
                "expected": {
                    "logits_first_row": own.logits[0],
                    "logits_last_row": own.logits[-1],
                    "idx_own": own.routes,
                    "token_logprobs": own.logprobs,
                    "token_entropy": own.entropy,
                },
            },
            {
                "name": "inference_engine",
                "inputs": {"router_delta": shift},
                "expected": {"idx_infer": routes, "token_logprobs": engine.logprobs},
            },
            {
                "name": "training_engine_with_replay",
                "inputs": {"idx_infer": routes, "prompt_len": PROMPT},
                "expected": {
                    "token_logprobs": replayed.logprobs,
                    **measured,
                    "router_mismatch_fraction": disagreement["router"],
                    "token_any_mismatch_fraction": disagreement["token"],
                },
            },
            {
                "name": "policy_gradient_step",
                "inputs": {
                    "input_ids": tokens,
                    "idx_infer": routes,
                    "prompt_len": PROMPT,
                    "advantage": ADVANTAGE,
                    "eps_low": CLIP_LOW,
                    "eps_high": CLIP_HIGH,
                    "logp_old": engine.logprobs,
                },
                "expected": {
                    "loss": loss(parameters),
                    "grad_norm_all": np.sqrt(sum((part**2).sum() for part in gradient.values())),
                    "grads": gradient,
                },
            },
        ],
    }


def _margin(logits: Array) -> float:
    """Smallest distance between the chosen experts of any row, or to the next one."""
    ordered = np.sort(logits, axis=-1)[..., ::-1][..., : CONFIG["num_experts_per_tok"] + 1]
    return float(-np.diff(ordered, axis=-1).max())
