"""A whole Qwen3-MoE: forward pass, routes, replay, and the gradient of a policy loss.

The architecture is that of ``Qwen3MoeForCausalLM``: RMS norms, grouped-query attention with norms
on queries and keys and rotary positions, then a layer of SwiGLU experts, per block; an output head
of its own. Parameters have the names and shapes of the published checkpoints.

The gradient is found by complex steps: every operation is analytic once the routes are fixed, so
``Im f(x + ih) / h`` is the derivative without a rounding difference (Squire and Trapp, 1998).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from basics import Array

#: ``config.json`` of the model; the heads' size is independent of the hidden size, as in Qwen3.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 17,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 64,
    "router_aux_loss_coef": 0.0,
    "output_router_logits": False,
    "torch_dtype": "float32",
}
HIDDEN, LAYERS = CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
HEADS, KV_HEADS, HEAD = (
    CONFIG["num_attention_heads"],
    CONFIG["num_key_value_heads"],
    CONFIG["head_dim"],
)
EXPERTS, TOP_K = CONFIG["num_experts"], CONFIG["num_experts_per_tok"]
#: Imaginary step of a derivative: its square is far below the smallest float64.
STEP = 1e-200

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """What a forward pass yields for T tokens; ``logprobs[i]`` scores token i + 1."""

    logits: Array  # [T, V]
    router_logits: Array  # [T, L, E], before any shift
    routes: Array  # [T, L, K], best expert first
    logprobs: Array  # [T - 1]
    entropy: Array  # [T]


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter."""
    width, vocab = CONFIG["moe_intermediate_size"], CONFIG["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{at}self_attn.q_norm.weight": (HEAD,),
            f"{at}self_attn.k_norm.weight": (HEAD,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}mlp.gate.weight": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            here = f"{at}mlp.experts.{expert}."
            found |= {
                f"{here}gate_proj.weight": (width, HIDDEN),
                f"{here}up_proj.weight": (width, HIDDEN),
                f"{here}down_proj.weight": (HIDDEN, width),
            }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab, HIDDEN)}


def draw(seed: int) -> Parameters:
    """Parameters that float32 represents exactly, large enough that no operation is nearly linear."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            values = 1 + 0.2 * rng.standard_normal(shape)
        else:
            scale = 1.0 if "embed" in name else 1.5
            values = scale * rng.standard_normal(shape) / np.sqrt(shape[-1])
        found[name] = values.astype(np.float32).astype(np.float64)
    return found


def forward(
    parameters: Parameters,
    tokens: list[int],
    recorded: Array | None = None,
    shift: Array | None = None,
) -> Output:
    """Runs one sequence of T tokens.

    ``recorded [T, L, K]`` are executed in place of the routers' choice. ``shift [L, T, E]`` is added
    to the router logits, for choice and weights alike: a stand-in for the noise of an engine.
    """
    count = len(tokens)
    x = parameters["model.embed_tokens.weight"][tokens]
    router_logits, routes = [], []
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        x = x + _attention(
            parameters, f"{at}self_attn.", _norm(x, parameters[f"{at}input_layernorm.weight"])
        )
        h = _norm(x, parameters[f"{at}post_attention_layernorm.weight"])
        given = None if recorded is None else recorded[:, layer]
        y, logits, chosen = expert_layer(
            parameters, at, h, given, None if shift is None else shift[layer]
        )
        x = x + y
        router_logits.append(logits)
        routes.append(chosen)
    logits = _norm(x, parameters["model.norm.weight"]) @ parameters["lm_head.weight"].T
    top = logits.real.max(axis=-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return Output(
        logits,
        np.stack(router_logits, axis=1),
        np.stack(routes, axis=1),
        logprobs[np.arange(count - 1), tokens[1:]],
        -(np.exp(logprobs) * logprobs).sum(axis=-1),
    )


def expert_layer(
    parameters: Parameters, at: str, x: Array, recorded: Array | None, shift: Array | None
) -> tuple[Array, Array, Array]:
    """Outputs ``[T, d]``, router logits ``[T, E]`` without the shift, and executed experts ``[T, K]``."""
    logits = x @ parameters[f"{at}mlp.gate.weight"].T
    used = logits if shift is None else logits + shift
    # Ties go to the lower expert id.
    chosen = (
        np.argsort(-used.real, axis=-1, kind="stable")[:, :TOP_K] if recorded is None else recorded
    )
    # A softmax over all experts, renormalised over the chosen, is a softmax over the chosen.
    gates = _softmax(np.take_along_axis(used, chosen, axis=-1))
    gate, up, down = (experts(parameters, at, part)[chosen] for part in ("gate", "up", "down"))
    a = np.einsum("tkfd,td->tkf", gate, x)
    inner = a / (1 + np.exp(-a)) * np.einsum("tkfd,td->tkf", up, x)
    return np.einsum("tk,tkdf,tkf->td", gates, down, inner), logits, chosen


def experts(parameters: Parameters, at: str, part: str) -> Array:
    """One projection (``gate``, ``up`` or ``down``) of every expert of a layer, stacked."""
    names = (f"{at}mlp.experts.{expert}.{part}_proj.weight" for expert in range(EXPERTS))
    return np.stack([parameters[name] for name in names])


def policy_loss(new: Array, old: Array, advantage: float, low: float, high: float) -> Any:
    """Mean over tokens of the clipped surrogate, DeepSeekMath eq (3) without its KL term."""
    ratio = np.exp(new - old)
    clipped = np.where(
        ratio.real < 1 - low, 1 - low, np.where(ratio.real > 1 + high, 1 + high, ratio)
    )
    plain, bounded = ratio * advantage, clipped * advantage
    return -np.where(plain.real <= bounded.real, plain, bounded).mean()


def gradient(function, parameters: Parameters) -> Parameters:
    """Derivatives of ``function(parameters)`` by complex steps, one parameter at a time."""
    moved = {name: values.astype(complex) for name, values in parameters.items()}
    found = {}
    for name, values in moved.items():
        found[name] = np.zeros(values.shape)
        for place in np.ndindex(values.shape):
            values[place] += 1j * STEP
            found[name][place] = function(moved).imag / STEP
            values[place] = values[place].real
    return found


def _attention(parameters: Parameters, at: str, x: Array) -> Array:
    def heads(name: str, count: int) -> Array:
        return (x @ parameters[f"{at}{name}_proj.weight"].T).reshape(len(x), count, HEAD)

    queries = _rotate(_norm(heads("q", HEADS), parameters[f"{at}q_norm.weight"]))
    keys = _rotate(_norm(heads("k", KV_HEADS), parameters[f"{at}k_norm.weight"]))
    values = heads("v", KV_HEADS)
    # Query head h reads key and value head h // (heads per key head).
    keys, values = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(HEAD)
    later = np.triu(np.ones((len(x), len(x)), dtype=bool), 1)
    weights = _softmax(np.where(later, -1e9, scores))
    mixed = np.einsum("hqk,khd->qhd", weights, values).reshape(len(x), HEADS * HEAD)
    return mixed @ parameters[f"{at}o_proj.weight"].T


def _rotate(x: Array) -> Array:
    """Rotary positions; dimension i is paired with i + HEAD / 2."""
    half = HEAD // 2
    speeds = CONFIG["rope_theta"] ** (-np.arange(half) / half)
    angles = np.arange(len(x))[:, None, None] * speeds
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.real.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
