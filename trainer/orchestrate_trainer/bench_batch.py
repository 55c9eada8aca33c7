"""A model with random weights and a batch that it sampled, for benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from .batch import Sequence
from .routers import spec_of
from .shard import Array

__all__ = ["SampledBatch", "random_model", "round_to_fp8", "sample"]

#: Largest number in the fp8 format e4m3.
E4M3_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class SampledBatch:
    """Sequences in memory, with the methods of :class:`~orchestrate_trainer.batch.Batch` that a
    step calls."""

    sequences: list[Sequence]

    def lengths(self) -> Array:
        """Tokens of each sequence."""
        return np.array([len(sequence) for sequence in self.sequences])

    def sequence(self, index: int) -> Sequence:
        """Sequence ``index``."""
        return self.sequences[index]


def random_model(given: argparse.Namespace, device: torch.device) -> Any:
    """A Qwen3-MoE in bf16 on ``device``, in the shape that the options give."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=given.hidden,
        intermediate_size=given.expert_width,
        moe_intermediate_size=given.expert_width,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
        head_dim=given.head_width,
        num_experts=given.experts,
        num_experts_per_tok=given.top_k,
        norm_topk_prob=True,
        vocab_size=given.vocab,
        max_position_embeddings=max(given.tokens, 4096),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


@torch.no_grad()
def round_to_fp8(model: nn.Module) -> None:
    """Rounds the weights of attention and experts to fp8 (e4m3) with a scale per output row, as an
    inference server stores them."""
    for name, parameter in model.named_parameters():
        kept = any(part in name for part in ("embed", "lm_head", "norm", ".gate."))
        if parameter.dim() < 2 or kept:
            continue
        whole = parameter.float()
        scale = whole.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
        parameter.copy_((whole / scale).to(torch.float8_e4m3fn).float() * scale)


@torch.no_grad()
def sample(model: Any, given: argparse.Namespace) -> SampledBatch:
    """Random prompts continued by the model, with the log-probs and experts of its own forward."""
    prompts = torch.randint(given.vocab, (given.sequences, given.tokens - given.sampled))
    tokens = model.generate(
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts).to(model.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=given.sampled,
        max_new_tokens=given.sampled,
    )
    return SampledBatch([_scored(model, row, n, given) for n, row in enumerate(tokens)])


def _scored(model: Any, tokens: torch.Tensor, index: int, given: argparse.Namespace) -> Sequence:
    """The sequence ``tokens`` ``[T]`` with what a sampler records of it."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if spec_of(module) is not None]
    hooks = [
        router.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for router in routers
    ]
    hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    logits = model.lm_head(hidden[-given.sampled - 1 : -1]).float()
    scored = torch.log_softmax(logits, -1).gather(-1, tokens[-given.sampled :, None]).squeeze(-1)
    mask = np.zeros(given.tokens, "u1")
    mask[-given.sampled :] = 1
    logprobs = np.zeros(given.tokens, "f4")
    logprobs[-given.sampled :] = scored.cpu().numpy()
    valid = np.ones(given.tokens, "u1")
    valid[-1] = 0
    layers = tuple(range(given.layers))
    rows = torch.stack(chosen, dim=1).to(torch.int16).cpu().numpy()
    return Sequence(
        index=index,
        episode_id=f"bench.{index:02}",
        group=0,
        advantage=1.0 if index % 2 else -1.0,
        reward=float(index % 2),
        token_ids=tokens.cpu().numpy().astype("u4"),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        policy_versions=np.zeros(given.tokens, "i8"),
        routing_valid=valid,
        layers=layers,
        _rows=rows.astype("u1" if given.experts <= 256 else "u2"),
        _row_index=None,
        _columns=slice(None),
        _positions=layers,
    )
