"""Measures the trainer on one device: cost of replay, utilisation, and plain transformers.

    python -m orchestrate_trainer.bench --model-slice 4 --out bench.json --markdown bench.md

A model with random weights, in the shape of Qwen3-30B-A3B but with fewer layers, is sampled in low
precision by transformers, and the experts that it executes are recorded. Three arms then compute
the log-probs of these samples and their gradients in turn: the trainer with replay, the trainer
without, and plain transformers. Both arms of the trainer run the same code and count the same
measurements. At the end whole steps are measured, with recompute, optimizer and all metrics: with
replay, without, and with one sequence per pack; and a step's time is divided into parts. With
--ratios only these steps are measured. Nothing is downloaded, and the weights do not change.

With --check-sync or --check-devices nothing is timed: they count how often the host waits for the
device in a step, and compare a step in f32 on the CPU and on the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from .batch import Batch
from .bench_batch import SampledBatch, random_model, round_to_fp8, sample
from .bench_parts import PEAK_GBPS, StepFloors, timed_parts
from .bench_parts import table as parts_table
from .checkpointing import LEVELS, enable
from .corrections import Tokens
from .learner import Learner
from .measures import Load, Mismatch
from .passes import forward, own_mini_steps
from .plan import plan_step
from .policy import ModelOptions, Policy, load_policy
from .settings import Hyperparameters
from .step import apply
from .waits import Waits, count_waits, counted_device
from .world import World

__all__ = ["compare_devices", "expectations", "main", "parser"]

#: Dense bf16 peak of a device in TFLOP/s, by a part of its name.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0}
#: Forward passes that the operations of an arm are worth; a backward counts as two. Activation
#: checkpointing runs a further forward, which utilisation does not count.
PASSES = {"forward": 1, "train": 3, "step": 4}
#: Mini steps of a whole step.
MINI_STEPS = 2


def parser() -> argparse.ArgumentParser:
    """The benchmark's options. The default shape is that of Qwen3-30B-A3B."""
    options = argparse.ArgumentParser(
        prog="orchestrate_trainer.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--model-slice", "--layers", dest="layers", type=int, default=4, metavar="LAYERS",
        help="number of layers; 4 have 3.1 billion parameters (default: %(default)s)")  # fmt: skip
    add("--hidden", type=int, default=2048)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=4)
    add("--head-width", type=int, default=128)
    add("--experts", type=int, default=128)
    add("--top-k", type=int, default=8)
    add("--expert-width", type=int, default=768)
    add("--vocab", type=int, default=151_936)
    add("--sequences", type=int, default=8)
    add("--tokens", type=int, default=8192, help="tokens of a sequence (default: %(default)s)")
    add("--sampled", type=int, default=512, help="of these, sampled (default: %(default)s)")
    add("--micro-batch-tokens", "--pack", type=int, default=16_384, metavar="TOKENS",
        help="most tokens of a pack (default: %(default)s)")  # fmt: skip
    add("--sampler", choices=("bf16", "fp8"), default="bf16", help="precision of the sampler")
    add("--kernel", default="packed",
        help="the trainer's expert kernel, e.g. grouped_mm (default: %(default)s)")  # fmt: skip
    add("--attention", choices=("auto", "varlen", "flex", "loop"), default="auto")
    add("--moments", choices=("f32", "bf16"), default="f32")
    add("--activation-checkpointing", choices=LEVELS, default="full",
        help="of the trainer and of plain transformers (default: %(default)s)")  # fmt: skip
    add("--compile", choices=("off", "on"), default="off", help="compile the trainer's layers")
    add("--repeat", type=int, default=5, help="measurements of each arm (default: %(default)s)")
    add("--time-limit", type=float, default=420.0, metavar="SECONDS",
        help="begin no further repetition after this time (default: %(default)s)")  # fmt: skip
    add("--peak-tflops", type=float, help="the device's dense bf16 peak, if unknown")
    add("--peak-gbps", type=float, help="the device's memory bandwidth in GB/s, if unknown")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--out", "--json", type=Path, help="JSON file to write the numbers to")
    add("--markdown", type=Path, help="file to write the table to")
    add("--expect", action="store_true",
        help="exit with status 1 if a target of the trainer on a GPU is missed")  # fmt: skip
    add("--ratios", action="store_true",
        help="only measure whole steps: with replay, without, and unpacked")  # fmt: skip
    add("--check-sync", action="store_true",
        help="only count the host's waits for the device in a step")  # fmt: skip
    add("--check-devices", action="store_true",
        help="only compare a step in f32 on the CPU and on the GPU")  # fmt: skip
    return options


def main(arguments: list[str] | None = None) -> int:
    """Prints a table in Markdown and writes its numbers to ``--out``. Returns the exit status."""
    options = parser()
    given = options.parse_args(arguments)
    if not 0 < given.sampled < given.tokens:
        options.error("--sampled must be at least 1 and below --tokens")
    for name in ("layers", "sequences", "repeat", "micro_batch_tokens"):
        if getattr(given, name) < 1:
            options.error(f"--{name.replace('_', '-')} must be at least 1")
    if given.ratios and given.expect:
        options.error("--expect judges arms that --ratios leaves out; give only one of them")
    if (given.device == "cuda" or given.check_devices) and not torch.cuda.is_available():
        options.error("--device cuda and --check-devices: PyTorch finds no GPU")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if given.check_devices:
        return _print_differences(compare_devices(given, ("cpu", "cuda")))
    world = World.join(given.device)
    try:
        bench = _Bench(given, world)
        if given.check_sync:
            return _print_waits(bench.waits())
        report = bench.run()
    finally:
        world.leave()
    table = markdown(report)
    print(table)
    if given.out:
        given.out.write_text(json.dumps(report, indent=2) + "\n")
    if given.markdown:
        given.markdown.write_text(table + "\n")
    if not given.expect:
        return 0
    judged = expectations(report)
    for text, met in judged:
        print(f"{'met' if met else 'MISSED'}: {text}")
    return int(not all(met for _, met in judged))


def expectations(report: dict[str, Any]) -> list[tuple[str, bool]]:
    """The targets of the trainer on a GPU with what was measured, and whether each is met."""
    rows, failed = report["rows"], report["failed"]
    used = rows["train_replay"]["mfu"] if "train_replay" in rows else None
    added, plain = report["replay_cost"]["train"], report["time_of_plain"]
    mismatch = report["mismatch"]
    return [
        (f"arms that ran out of memory: {', '.join(failed) or 'none'}", not failed),
        (
            f"MFU of train replay: {'unknown' if used is None else f'{used:.1%}'} (at least 30 %)",
            used is not None and used >= 0.30,
        ),
        (
            "time added by replay: "
            f"{'unknown' if added is None else format(added['median'] - 1, '+.2%')} (at most 1 %)",
            added is not None and added["median"] <= 1.01,
        ),
        (
            "time of plain transformers over the trainer's: "
            f"{'unknown' if plain is None else format(plain['median'], '.2f')} (at least 1)",
            plain is not None and plain["median"] >= 1,
        ),
        (
            f"mismatch with the sampler: {mismatch['replay']:.2e} nats with replay, "
            f"{mismatch['own_routes']:.2e} without (less with replay)",
            mismatch["replay"] < mismatch["own_routes"],
        ),
    ]


class _Bench:
    """One run of the benchmark."""

    def __init__(self, given: argparse.Namespace, world: World) -> None:
        self.given, self.world, self.device = given, world, world.device
        self.started = time.monotonic()
        #: Measurements of each arm: seconds, GiB held before, and GiB at the peak.
        self.seconds: dict[str, list[float]] = {}
        self.held: dict[str, float] = {}
        self.peak: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def waits(self) -> Waits:
        """Counts the host's waits for the device in a step, after one that warms up."""
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="orchestrate-bench-") as name:
            model = random_model(self.given, self.device)
            model.save_pretrained(name)
            batch = sample(model, self.given)
            del model
            _collect()
            # The precision of a GPU, also where there is none.
            options = dataclasses.replace(self._options(), compute="bf16")
            policy = load_policy(Path(name), options, self.world)
        learner = Learner.of(policy, self.world, self.given.moments)
        settings = _settings(self.given)
        _step(learner, batch, settings, self.world)
        held = chain(policy.parameters(), policy.buffers())
        counted = dataclasses.replace(self.world, device=counted_device(self.device))
        with count_waits(self.device, held) as waits:
            _step(learner, batch, settings, counted)
        return waits

    def _options(self) -> ModelOptions:
        given = self.given
        return ModelOptions(
            experts=given.kernel,
            attention=given.attention,
            moments=given.moments,
            activation_checkpointing=given.activation_checkpointing,
            compile=given.compile == "on",
        )

    def run(self) -> dict[str, Any]:
        given = self.given
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="orchestrate-bench-") as name:
            folder = Path(name)
            self._log("creating a model with random weights")
            model = random_model(given, self.device)
            model.save_pretrained(folder)
            if given.sampler == "fp8":
                round_to_fp8(model)
            self._log(f"sampling {given.sequences} sequences in {given.sampler}")
            batch = sample(model, given)
            del model
            _collect()
            self._log("loading the trainer and plain transformers")
            policy = load_policy(folder, self._options(), self.world)
            trainer = _TrainerArm(policy, batch, given, self.world)
            plain = None if given.ratios else _PlainArm(folder, batch, given, self.device)
        mismatch = {
            name: trainer.mismatch(replay)
            for name, replay in (("replay", True), ("own_routes", False))
        }
        if plain is not None:
            self._alternate(_passes(trainer, plain))
        del trainer, plain
        _collect()
        learner = Learner.of(policy, self.world, given.moments)
        replayed = _settings(given)
        steps = {
            "step_replay": replayed,
            "step_own_routes": dataclasses.replace(replayed, routing_replay="none"),
            "step_unpacked": dataclasses.replace(replayed, micro_batch_tokens=given.tokens),
        }
        self._alternate(
            {
                name: partial(_step, learner, batch, settings, self.world)
                for name, settings in steps.items()
            }
        )
        parts = None
        # Marks inside of layers would divide what is compiled.
        if given.compile == "off" and "step_replay" not in self.failed:
            parts = self._parts(learner, batch, replayed)
        return self._report(policy, mismatch, parts)

    def _parts(
        self, learner: Learner, batch: SampledBatch, settings: Hyperparameters
    ) -> dict[str, Any]:
        """Mean seconds of a step's parts, with the least that each can take."""
        given = self.given
        self._log("measuring the parts of a step")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        started = time.perf_counter()
        with timed_parts(learner, self.device) as times:
            for _ in range(given.repeat):
                _step(learner, batch, settings, self.world)
        found = times.seconds()
        whole = (time.perf_counter() - started) / given.repeat
        plan = plan_step(cast("Batch", batch), settings, learner.policy, self.world)
        floors = StepFloors.of(
            learner,
            given.activation_checkpointing,
            [given.tokens] * given.sequences,
            plan.loss_tokens,
            packs=len(plan.micros),
            forwards=PASSES["step"] - 2,
        )
        tflops, gbps = self._peaks()
        peak = None if tflops is None else tflops * 1e12
        bandwidth = None if gbps is None else gbps * 1e9
        rows = {
            part: {
                "seconds": seconds / given.repeat,
                "share": seconds / given.repeat / whole,
                "flops": floors.flops.get(part, 0.0),
                "bytes": floors.bytes.get(part, 0.0),
                "least_seconds": floors.seconds(part, peak, bandwidth),
            }
            for part, seconds in found.items()
        }
        return {"seconds": whole, "repetitions": given.repeat, "rows": rows}

    def _peaks(self) -> tuple[float | None, float | None]:
        """Peak of the device in TFLOP/s and GB/s, where known."""
        name = self.world.device_names()[0]
        tflops, gbps = (
            next((value for part, value in known.items() if part in name), None)
            for known in (PEAK_TFLOPS, PEAK_GBPS)
        )
        return self.given.peak_tflops or tflops, self.given.peak_gbps or gbps

    def _alternate(self, arms: dict[str, Callable[[], object]]) -> None:
        """Warms up every arm, then measures them in turn, each time in another order."""
        for name, work in arms.items():
            self._log(f"warming up {name}")
            try:
                work()
            except torch.OutOfMemoryError as error:
                self.failed[name] = str(error).partition(". ")[0]
                _collect()
        names = [name for name in arms if name not in self.failed]
        for number in range(self.given.repeat):
            elapsed = time.monotonic() - self.started
            if number > 0 and elapsed > self.given.time_limit:
                self._log(f"time limit reached after {number} repetitions")
                return
            for name in names[::-1] if number % 2 else names:
                self._measure(name, arms[name])

    def _measure(self, name: str, work: Callable[[], object]) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.held[name] = torch.cuda.memory_allocated(self.device) / 2**30
        started = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            self.peak[name] = max(self.peak.get(name, 0.0), peak)
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def _report(
        self, policy: Policy, mismatch: dict[str, float], parts: dict[str, Any] | None
    ) -> dict[str, Any]:
        given, name = self.given, self.world.device_names()[0]
        peak, bandwidth = self._peaks()
        tokens = given.sequences * given.tokens
        cost = policy.cost
        layers = given.sequences * cost.sequence(given.tokens)
        forward = layers + given.sequences * given.sampled * cost.head
        rows: dict[str, dict[str, Any]] = {}
        for arm, values in self.seconds.items():
            seconds = statistics.median(values)
            tflops = PASSES[arm.partition("_")[0]] * forward / seconds / 1e12
            rows[arm] = {
                "seconds": seconds,
                "least_seconds": min(values),
                "most_seconds": max(values),
                "repetitions": len(values),
                "tokens_per_s": tokens / seconds,
                "tflops": tflops,
                "mfu": tflops / peak if peak else None,
                "held_gib": self.held.get(arm),
                "peak_gib": self.peak.get(arm),
            }
        products = given.sequences * (cost.token * given.tokens) + forward - layers
        return {
            "device": name,
            "peak_tflops": peak,
            "peak_gbps": bandwidth,
            "versions": _versions(),
            "attention": policy.attention_kernel,
            "experts": policy.model.config._experts_implementation,
            "parameters": sum(parameter.numel() for parameter in policy.parameters()),
            "flops_per_token": 3 * forward / tokens,
            "attention_share": 1 - products / forward,
            "settings": {k: v for k, v in vars(given).items() if k not in ("out", "markdown")},
            "rows": rows,
            "failed": self.failed,
            "replay_cost": {
                kind: self._ratio(f"{kind}_replay", f"{kind}_own_routes")
                for kind in ("forward", "train", "step")
            },
            "time_of_packed": self._ratio("step_replay", "step_unpacked"),
            "time_of_plain": self._ratio("train_plain_transformers", "train_replay"),
            "mismatch": mismatch,
            "parts": parts,
        }

    def _ratio(self, arm: str, other: str) -> dict[str, float] | None:
        """Median and range of an arm's time over another's in the same repetition."""
        pairs = list(zip(self.seconds.get(arm, []), self.seconds.get(other, []), strict=False))
        ratios = [one / two for one, two in pairs]
        if not ratios:
            return None
        return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}

    def _log(self, line: str) -> None:
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.1f} s  {line}", file=sys.stderr, flush=True)


class _TrainerArm:
    """The trainer's passes over a batch, with or without replay: the same code and counting."""

    def __init__(
        self, policy: Policy, batch: SampledBatch, given: argparse.Namespace, world: World
    ) -> None:
        self.policy, self.world = policy, world
        budget = given.micro_batch_tokens
        (self.micros,) = own_mini_steps(cast("Batch", batch), 1, budget, policy, world)
        self.scored = given.sequences * given.sampled

    def mismatch(self, replay: bool) -> float:
        """Mean k3 divergence from the sampler, nats."""
        with torch.no_grad():
            return float(self._pass(replay, False).finish(self.world)[0]["kl_k3"])

    @torch.no_grad()
    def forward(self, replay: bool) -> None:
        self._pass(replay, False)

    def train(self, replay: bool) -> None:
        self._pass(replay, True)
        self.policy.zero_grad(set_to_none=True)

    def _pass(self, replay: bool, backward: bool) -> Mismatch:
        policy, device = self.policy, self.world.device
        mismatch = Mismatch(device)
        load = Load(len(policy.shape["moe_layers"]), policy.shape["experts"], device)
        for micro in self.micros:
            rows = (micro.recorded(), micro.placeholders) if replay else None
            with forward(policy, micro, 1.0, rows) as out:
                load.add(policy.routing.executed(), micro.inner)
                tokens = Tokens(micro.owner, len(micro.sequences))
                mismatch.add(out.logp, micro.rollout, tokens)
                if backward:
                    (-out.logp.sum() / self.scored).backward()
        return mismatch


class _PlainArm:
    """Forward and backward of transformers' own model in bf16, with the trainer's activation
    checkpointing, on as many sequences at once as a micro-batch of the trainer holds."""

    def __init__(
        self, folder: Path, batch: SampledBatch, given: argparse.Namespace, device: torch.device
    ) -> None:
        self.sampled = given.sampled
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self.model = model.to(device)
        self.model.train()
        enable(self.model, given.activation_checkpointing)
        rows = [torch.from_numpy(s.token_ids.astype("i8")) for s in batch.sequences]
        together = max(1, given.micro_batch_tokens // given.tokens)
        self.parts = torch.stack(rows).to(device).split(together)
        self.scored = given.sequences * given.sampled

    def train(self) -> None:
        for tokens in self.parts:
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, -self.sampled - 1 : -1]).float().flatten(0, 1)
            targets = tokens[:, -self.sampled :].flatten()
            (F.cross_entropy(logits, targets, reduction="sum") / self.scored).backward()
        self.model.zero_grad(set_to_none=True)


def _passes(trainer: _TrainerArm, plain: _PlainArm) -> dict[str, Callable[[], object]]:
    """The arms that compute log-probs or gradients, and no whole step."""
    return {
        "forward_replay": lambda: trainer.forward(True),
        "forward_own_routes": lambda: trainer.forward(False),
        "train_replay": lambda: trainer.train(True),
        "train_own_routes": lambda: trainer.train(False),
        "train_plain_transformers": plain.train,
    }


def _settings(given: argparse.Namespace) -> Hyperparameters:
    """A step with replay that changes no weight."""
    return Hyperparameters(
        policy_loss="grpo",
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        aggregation="token-mean",
        loss_norm_tokens=1.0,
        routing_replay="rollout",
        mini_steps=MINI_STEPS,
        micro_batch_tokens=given.micro_batch_tokens,
        learning_rate=0.0,
        betas=(0.9, 0.98),
        adam_eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        measure_no_replay=False,
    )


def _step(
    learner: Learner, batch: SampledBatch, settings: Hyperparameters, world: World
) -> dict[str, Any]:
    """A whole step: recompute, update, optimizer and metrics, which are returned."""
    policy = learner.policy
    return apply(learner, lambda: policy, cast("Batch", batch), settings, world, lambda *_: True)


def compare_devices(given: argparse.Namespace, devices: tuple[str, str]) -> dict[str, float]:
    """Differences between the same step in f32 on two devices.

    They are the largest of any weight after the step, absolute, and those of the loss and of the
    gradient's norm, relative.
    """
    # With Adam's usual epsilon, a gradient that is only rounding would move a weight as far as a
    # large one.
    settings = dataclasses.replace(_settings(given), learning_rate=1e-3, adam_eps=1e-3)
    results = []
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="orchestrate-bench-") as name:
        model = random_model(given, torch.device("cpu"))
        model.save_pretrained(name)
        batch = sample(model, given)
        for device in devices:
            world = World.join(device)
            try:
                options = ModelOptions(compute="f32", experts=given.kernel)
                learner = Learner.of(load_policy(Path(name), options, world), world)
                metrics = _step(learner, batch, settings, world)
                shards: list[Any] = list(learner.policy.parameters())
                weights = [shard.full_tensor().detach().cpu() for shard in shards]
            finally:
                world.leave()
            results.append((weights, metrics))
    (weights, wanted), (others, found) = results
    return {
        "weights": max(float((a - b).abs().max()) for a, b in zip(weights, others, strict=True)),
        **{
            name: abs(found[name] - wanted[name]) / max(abs(wanted[name]), 1e-3)
            for name in ("loss", "grad_norm")
        },
    }


def _print_differences(found: dict[str, float]) -> int:
    """Prints differences between devices. Returns the exit status: 1 if one is above 1e-4."""
    for name, value in found.items():
        print(f"CPU and CUDA in f32 differ in {name} by {value:.2e} (at most 1e-4)")
    return int(not all(value <= 1e-4 for value in found.values()))


def _print_waits(waits: Waits) -> int:
    """Prints waits by cause. Returns the exit status: 1 if there are more than 2 per mini step."""
    each = waits.total / MINI_STEPS
    print(f"{waits.total} waits for the device in a step, {each:g} per mini step (at most 2)")
    for cause, number in waits.by_cause.most_common():
        print(f"{number:6}  {cause}")
    return int(each > 2)


def _versions() -> dict[str, str]:
    cuda = torch.version.cuda if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cuda": cuda or "none",
        "processors": f"{platform.machine()}, {os.cpu_count()}",
    }


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def markdown(report: dict[str, Any]) -> str:
    """The report as a table in Markdown, below the machine and versions."""
    given, versions = report["settings"], report["versions"]
    described = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"{report['device']}; {described}.",
        "",
        f"{given['layers']} layers, {report['parameters'] / 1e9:.2f} billion parameters; "
        f"{given['sequences']} sequences of {given['tokens']} tokens, {given['sampled']} of them "
        f"scored; micro-batches of {given['micro_batch_tokens']} tokens; attention "
        f"`{report['attention']}`, experts `{report['experts']}`. A token costs "
        f"{report['flops_per_token'] / 1e9:.3g} GFLOP in forward and backward, "
        f"{report['attention_share']:.0%} of it in attention scores. MFU counts two operations per "
        "weight that a token uses and the causal half of attention scores, three forwards for a "
        "forward and a backward, and nothing that activation checkpointing repeats.",
        "",
        "| arm | seconds (range) | tokens/s | TFLOP/s | MFU | held GiB | peak GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        used = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        memory = " | ".join(
            "-" if row[key] is None else f"{row[key]:.1f}" for key in ("held_gib", "peak_gib")
        )
        spread = f"{row['least_seconds']:.3f} to {row['most_seconds']:.3f}"
        lines.append(
            f"| {name.replace('_', ' ')} | {row['seconds']:.3f} ({spread}, {row['repetitions']}×) "
            f"| {row['tokens_per_s']:.0f} | {row['tflops']:.2f} | {used} | {memory} |"
        )
    lines += [f"| {name.replace('_', ' ')} | {why} |" for name, why in report["failed"].items()]
    lines.append("")
    for kind, ratio in report["replay_cost"].items():
        if ratio is not None:
            change = (f"{ratio[key] - 1:+.2%}" for key in ("median", "least", "most"))
            lines.append("Replay changes the time of {} by {} ({} to {}).".format(kind, *change))
    plain = report["time_of_plain"]
    if plain is not None:
        spread = f"{plain['least']:.2f} to {plain['most']:.2f}"
        lines.append(
            f"Plain transformers takes {plain['median']:.2f} times as long ({spread}) as the "
            "trainer with replay."
        )
    packed = report["time_of_packed"]
    if packed is not None:
        spread = f"{packed['least']:.2f} to {packed['most']:.2f}"
        lines.append(
            f"A packed step takes {packed['median']:.2f} times as long ({spread}) as one with a "
            "sequence per pack."
        )
    mismatch = report["mismatch"]
    lines.append(
        f"Mismatch with the {given['sampler']} sampler (k3, nats): {mismatch['replay']:.3e} with "
        f"replay, {mismatch['own_routes']:.3e} without."
    )
    if report["parts"] is not None:
        lines += ["", *parts_table(report["parts"])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
