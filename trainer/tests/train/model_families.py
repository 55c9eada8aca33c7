"""Tiny models of every router family, and batches for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors.numpy import save
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, TOP_K, VOCAB = 8, 2, 61
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True,
                  "head_dim": 8},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16, "norm_topk_prob": False},
    "olmoe": {"num_experts": EXPERTS, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": EXPERTS, "router_jitter_noise": 0.1},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 5},
    "deepseek_v2": {**LATENT, "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2,
                    "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    "deepseek_v3": {**LATENT, "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2,
                    "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "glm4_moe": {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "head_dim": 8,
                 "moe_intermediate_size": 16, "n_shared_experts": 1, "num_hidden_layers": 3,
                 "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
}  # fmt: skip


def tiny_model(name: str, seed: int = 0) -> Any:
    """A float32 model of a family, whose routers' scores are far from ties."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**SMALL, **TINY[name]})
    config.dtype = torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() > 1:
                value.normal_(std=0.3)
            elif "sinks" in key or key.endswith("bias"):
                value.normal_(std=0.5)
        for key, value in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                value.normal_(std=0.1)
    return model


def draw_tokens(lengths: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random token ids ``[sum(lengths)]``."""
    return torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def draw_routes(tokens: int, layers: int, seed: int = 0) -> np.ndarray:
    """Random distinct experts, uint8 ``[tokens, layers, TOP_K]``."""
    chance = np.random.default_rng(seed).random((tokens, layers, EXPERTS))
    return chance.argsort(-1)[..., :TOP_K].astype("u1")


def write_batch(
    folder: Path,
    shape: dict[str, Any],
    lengths: tuple[int, ...],
    step_id: str = "step-1",
    seed: int = 0,
    **replaced: np.ndarray,
) -> Path:
    """Writes a batch of random sequences, two per shard, in the orchestrator's format.

    ``replaced`` gives arrays over all tokens, or the advantages of the sequences, by name. Returns
    the path of the manifest.
    """
    draw = np.random.default_rng(seed)
    n, layers = sum(lengths), shape["moe_layers"]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    valid = (draw.random(n) > 0.1).astype("u1")
    valid[starts[1:] - 1] = 0
    mask = (draw.random(n) > 0.4).astype("u1")
    arrays = {
        "policy_versions": np.zeros(n, "<i8"),
        "rollout_logprobs": -1 - 6 * draw.random(n).astype("<f4"),
        "token_ids": draw.integers(0, shape["vocab"], n).astype("<u4"),
        "loss_mask": mask,
        "routing_valid": valid,
        "routed_experts": draw_routes(n, len(layers), seed),
    } | replaced
    arrays["routed_experts"][arrays["routing_valid"] == 0] = np.arange(TOP_K)
    drawn = draw.normal(size=len(lengths)).astype("<f4")
    advantages = arrays.pop("advantages", drawn)
    folder.mkdir(parents=True)
    shards = []
    for number, first in enumerate(range(0, len(lengths), 2)):
        members = range(first, min(first + 2, len(lengths)))
        span = slice(starts[members[0]], starts[members[-1] + 1])
        own = {name: np.ascontiguousarray(array[span]) for name, array in arrays.items()}
        own["cu_seqlens"] = (starts[members[0] : members[-1] + 2] - starts[first]).astype("<i8")
        own["group_ids"] = np.zeros(len(members), "<i8")
        own["advantages"] = advantages[members.start : members.stop].copy()
        own["rewards"] = (own["advantages"] > 0).astype("<f4")
        content = save(
            own,
            {
                "format_version": "1",
                "episode_ids": json.dumps([f"t000001.{m:02}" for m in members]),
                "moe_layers": json.dumps(layers),
            },
        )
        name = f"{number:04}.safetensors"
        (folder / name).write_bytes(content)
        shards.append(
            {
                "file": name,
                "sequences": len(members),
                "tokens": int(span.stop - span.start),
                "rows": int(span.stop - span.start),
                "bytes": len(content),
                "blake3": blake3(content).hexdigest(),
            }
        )
    record = {
        "kind": "experts",
        "tensor": "routed_experts",
        "dtype": "u8",
        "layers": layers,
        "per_layer": TOP_K,
    }
    manifest = {
        "format_version": 1,
        "run": "test",
        "global_step": 1,
        "base_version": 0,
        "step_id": step_id,
        "model": shape,
        "records": [record],
        "sequences": len(lengths),
        "tokens": n,
        "shards": shards,
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path


def hyperparameters(**changed: Any) -> dict[str, Any]:
    """Hyperparameters of a request, as the orchestrator sends them."""
    return {
        "policy_loss": "grpo",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": None,
        "aggregation": "token-mean",
        "loss_norm_tokens": 1.0,
        "routing_replay": "rollout",
        "mini_steps": 1,
        "micro_batch_tokens": 40,
        "learning_rate": 1e-2,
        "betas": [0.9, 0.999],
        "adam_eps": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "measure_no_replay": True,
        **changed,
    }
