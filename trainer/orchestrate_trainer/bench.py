"""Measures the cost of replay and its effect on the mismatch with the sampler, on one device.

    python -m orchestrate_trainer.bench --out bench.json

A model with random weights, in the shape of Qwen3-30B-A3B but with fewer layers, is sampled in low
precision by transformers, and the experts that it executes are recorded. The trainer then runs
recompute and update on these sequences, alternating between replay and no replay, and transformers
runs a plain forward and backward on them. Nothing is downloaded, and the weights do not change.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from .batch import Batch, Sequence
from .learner import Learner
from .policy import ModelOptions, load_policy
from .routers import spec_of
from .settings import Hyperparameters
from .shard import Array
from .step import apply
from .world import World

__all__ = ["main"]

#: Dense bf16 peak of a device in TFLOP/s, by a part of its name.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0}
#: Largest number in the fp8 format e4m3.
E4M3_MAX = 448.0


def main(arguments: list[str] | None = None) -> int:
    """Prints a table and writes its numbers to ``--out``. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="orchestrate_trainer.bench", description=__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=6, help="6 layers have 4.4 billion parameters")
    add("--hidden", type=int, default=2048)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=4)
    add("--head-width", type=int, default=128)
    add("--experts", type=int, default=128)
    add("--top-k", type=int, default=8)
    add("--expert-width", type=int, default=768)
    add("--vocab", type=int, default=151_936)
    add("--sequences", type=int, default=8)
    add("--tokens", type=int, default=4096, help="tokens of a sequence (default: %(default)s)")
    add("--sampled", type=int, default=512, help="of these, sampled (default: %(default)s)")
    add("--sampler", choices=("bf16", "fp8"), default="bf16", help="precision of the sampler")
    add("--kernel", help="expert kernel of transformers, e.g. eager or grouped_mm")
    add("--repeat", type=int, default=3, help="measurements of each kind")
    add("--peak-tflops", type=float, help="the device's dense bf16 peak, if unknown")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--out", type=Path, help="JSON file to write the numbers to")
    given = parser.parse_args(arguments)
    if not 0 < given.sampled < given.tokens:
        parser.error("--sampled must be at least 1 and below --tokens")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    world = World.join(given.device)
    try:
        report = _measure(given, world)
    finally:
        world.leave()
    print(_table(report))
    if given.out:
        given.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _measure(given: argparse.Namespace, world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    device = world.device
    with tempfile.TemporaryDirectory(prefix="orchestrate-bench-") as folder:
        _log("creating a model with random weights")
        model = _random_model(given)
        model.to(device)
        model.save_pretrained(folder)
        if given.sampler == "fp8":
            _round_to_fp8(model)
        _log(f"sampling {given.sequences} sequences in {given.sampler}")
        batch = _sample(model, given)
        del model
        rows: dict[str, dict[str, Any]] = {}
        _log("measuring plain transformers")
        rows["plain_forward_backward"] = _plain(Path(folder), batch, given, device)
        gc.collect()
        _log("measuring the trainer")
        trained, mismatch = _trainer(Path(folder), batch, given, world)
        rows |= trained
    flops = _flops(given)
    name = world.device_names()[0]
    peak = given.peak_tflops or next((p for part, p in PEAK_TFLOPS.items() if part in name), None)
    tokens = given.sequences * given.tokens
    for kind, row in rows.items():
        passes = 1 if kind.startswith("recompute") else 3
        row["tokens_per_s"] = tokens / row["seconds"]
        row["tflops"] = passes * flops / row["seconds"] / 1e12
        row["mfu"] = row["tflops"] / peak if peak else None
    step = {
        mode: sum(rows[f"{kind}_{mode}"]["seconds"] for kind in ("recompute", "update"))
        for mode in ("replay", "no_replay")
    }
    return {
        "device": name,
        "peak_tflops": peak,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "settings": {k: v for k, v in vars(given).items() if k not in ("out", "device")},
        "rows": rows,
        "replay_cost": step["replay"] / step["no_replay"] - 1,
        "mismatch": mismatch,
    }


def _random_model(given: argparse.Namespace) -> Any:
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
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return model.eval()


@torch.no_grad()
def _round_to_fp8(model: nn.Module) -> None:
    """Rounds the weights of attention and experts to fp8 (e4m3) with a scale per output row, as an
    inference server stores them."""
    for name, parameter in model.named_parameters():
        kept = any(part in name for part in ("embed", "lm_head", "norm", ".gate."))
        if parameter.dim() < 2 or kept:
            continue
        whole = parameter.float()
        scale = whole.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
        parameter.copy_((whole / scale).to(torch.float8_e4m3fn).float() * scale)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Sequences in memory, with the methods of :class:`~orchestrate_trainer.batch.Batch` that a
    step calls."""

    sequences: list[Sequence]

    def lengths(self) -> Array:
        """Tokens of each sequence."""
        return np.array([len(sequence) for sequence in self.sequences])

    def sequence(self, index: int) -> Sequence:
        """Sequence ``index``."""
        return self.sequences[index]


@torch.no_grad()
def _sample(model: Any, given: argparse.Namespace) -> _Batch:
    """Random prompts continued by the model, with the log-probs and experts of its own forward."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in model.modules() if spec_of(module) is not None]
    layers = tuple(range(given.layers))
    sequences = []
    for index in range(given.sequences):
        prompt = torch.randint(given.vocab, (1, given.tokens - given.sampled))
        tokens = model.generate(
            prompt.to(model.device),
            attention_mask=torch.ones_like(prompt).to(model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=given.sampled,
            max_new_tokens=given.sampled,
        )
        hooks = [
            router.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
            for router in routers
        ]
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        logits = model.lm_head(hidden[-given.sampled - 1 : -1]).float()
        picked = tokens[0, -given.sampled :, None]
        scored = torch.log_softmax(logits, -1).gather(-1, picked).squeeze(-1)
        mask = np.zeros(given.tokens, "u1")
        mask[-given.sampled :] = 1
        logprobs = np.zeros(given.tokens, "f4")
        logprobs[-given.sampled :] = scored.cpu().numpy()
        valid = np.ones(given.tokens, "u1")
        valid[-1] = 0
        rows = torch.stack(chosen, dim=1).to(torch.int16).cpu().numpy()
        chosen.clear()
        sequences.append(
            Sequence(
                index=index,
                episode_id=f"bench.{index:02}",
                group=0,
                advantage=1.0 if index % 2 else -1.0,
                reward=float(index % 2),
                token_ids=tokens[0].cpu().numpy().astype("u4"),
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
        )
    return _Batch(sequences)


def _plain(
    folder: Path, batch: _Batch, given: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Times forward and backward of plain transformers: one sequence at a time, with activation
    checkpointing."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.to(device)
    if given.kernel:
        model.set_experts_implementation(given.kernel)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def once() -> None:
        model.zero_grad(set_to_none=True)
        for sequence in batch.sequences:
            tokens = torch.from_numpy(sequence.token_ids.astype("i8")).to(device)
            hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
            logits = model.lm_head(hidden[-given.sampled - 1 : -1]).float()
            F.cross_entropy(logits, tokens[-given.sampled :]).backward()

    return _timed(once, given.repeat, device)


def _trainer(
    folder: Path, batch: _Batch, given: argparse.Namespace, world: World
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Times the trainer; returns rows of the table, and the mismatch with and without replay."""
    device = world.device
    policy = load_policy(folder, ModelOptions(experts=given.kernel), world)
    learner = Learner.of(policy, world)

    def step(replay: str, **changed: Any) -> tuple[dict[str, Any], dict[str, float]]:
        settings = Hyperparameters(
            policy_loss="grpo",
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=None,
            aggregation="token-mean",
            loss_norm_tokens=1.0,
            routing_replay=replay,
            mini_steps=1,
            micro_batch_tokens=given.tokens,
            learning_rate=0.0,
            betas=(0.9, 0.98),
            adam_eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            temperature=1.0,
            measure_no_replay=False,
        )
        settings = dataclasses.replace(settings, **changed)
        started: dict[str, float] = {}

        def progress(phase: str, _: float) -> bool:
            _synchronize(device)
            started.setdefault(phase, time.perf_counter())
            return True

        metrics = apply(learner, lambda: policy, cast("Batch", batch), settings, world, progress)
        _synchronize(device)
        started["end"] = time.perf_counter()
        return metrics, started

    metrics, _ = step("rollout", measure_no_replay=True)
    mismatch = {
        "replay": metrics["mismatch"]["kl_k3"],
        "no_replay": metrics["mismatch_no_replay"]["kl_k3"],
    }
    modes = {"replay": "rollout", "no_replay": "none"}
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for round_number in range(given.repeat):
        order = list(modes) if round_number % 2 else list(modes)[::-1]
        for mode in order:
            _reset_peak(device)
            _, at = step(modes[mode], mini_steps=2)
            for kind, a, b in (("recompute", "recompute", "update"), ("update", "update", "end")):
                seconds.setdefault(f"{kind}_{mode}", []).append(at[b] - at[a])
            peaks[mode] = max(peaks.get(mode, 0.0), _peak(device))
    rows = {
        name: {
            "seconds": statistics.median(values),
            "least_seconds": min(values),
            "peak_gib": peaks[name.split("_", 1)[1]],
        }
        for name, values in seconds.items()
    }
    return rows, mismatch


def _flops(given: argparse.Namespace) -> float:
    """Floating-point operations of one forward pass over the batch.

    Counts two per weight that a token uses, the causal half of attention, and the output head for
    sampled tokens only.
    """
    attention = 2 * given.hidden * given.head_width * (given.heads + given.kv_heads)
    experts = 3 * given.top_k * given.hidden * given.expert_width
    router = given.hidden * given.experts
    scores = given.tokens * given.heads * given.head_width
    token = given.layers * 2 * (attention + experts + router + scores)
    head = 2 * given.hidden * given.vocab
    return float(given.sequences * (given.tokens * token + given.sampled * head))


def _timed(work: Callable[[], None], repeat: int, device: torch.device) -> dict[str, float]:
    """Times ``work`` after one warm-up call."""
    work()
    _reset_peak(device)
    values = []
    for _ in range(repeat):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        values.append(time.perf_counter() - started)
    return {
        "seconds": statistics.median(values),
        "least_seconds": min(values),
        "peak_gib": _peak(device),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['device']}, torch {report['torch']}, transformers {report['transformers']}",
        f"{'':26} {'seconds':>9} {'tokens/s':>10} {'TFLOP/s':>9} {'MFU':>7} {'peak GiB':>9}",
    ]
    for name, row in report["rows"].items():
        used = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(
            f"{name:26} {row['seconds']:9.3f} {row['tokens_per_s']:10.0f} {row['tflops']:9.2f} "
            f"{used:>7} {row['peak_gib']:9.1f}"
        )
    mismatch = report["mismatch"]
    lines.append(f"replay costs {report['replay_cost']:+.2%} of recompute and update")
    lines.append(
        f"mismatch with the {report['settings']['sampler']} sampler (k3, nats): "
        f"{mismatch['replay']:.3e} with replay, {mismatch['no_replay']:.3e} without"
    )
    return "\n".join(lines)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
