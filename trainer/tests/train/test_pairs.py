"""The embedded trainer and this one apply the same step, whatever options are combined.

Both trainers serve from one process each and apply one step after the other, every step with other
options, on other random data. After each, all measurements, the whole gradient and all weights are
compared, and the PyTorch trainer continues from the weights of the embedded one, so that rounding
errors do not add up. Every pair of options is in a step, with others; with `ORCHESTRATE_PAIRS=each`
every pair has a step by itself. Both compute in f32; measurements agree within a relative 1e-4,
every tensor's gradient within a relative 1e-3 in norm, and weights within 1e-6 where a step moves
them by up to 2e-3.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import numpy as np
import pytest

import torch  # isort: skip
from model_families import draw_routes, write_batch
from option_pairs import aggregated_losses, covering, pairs
from safetensors.torch import load_file
from test_agreement import Embedded, agree, moments_here, moments_there
from test_service import Running, request
from transformers.core_model_loading import revert_weight_conversion

from orchestrate_trainer.policy import ModelOptions, reload_weights
from orchestrate_trainer.service import Trainer
from orchestrate_trainer.store import CheckpointStore

LENGTHS = (12, 7, 19, 10, 5)
GRADIENT_TOLERANCE = 1e-3
WEIGHT_TOLERANCE = 1e-6
#: Clips that hold some of the ratios that the first mini step's update leads to.
CLIPS: dict[str, dict[str, float]] = {
    "grpo": {"clip_low": 0.03, "clip_high": 0.04},
    "ppo": {"clip_low": 0.03, "clip_high": 0.04},
    "minirl": {"clip_low": 0.03, "clip_high": 0.04},
    "cispo": {"clip_low": 0.03, "clip_high": 0.04},
    "gspo": {"clip_low": 0.03, "clip_high": 0.01},
    "gmpo": {"clip_low": 0.03, "clip_high": 0.04},
    "rspo": {"clip_low": 0.03, "clip_high": 0.04},
    "sapo": {},
}


class Both:
    """The two trainers, in step."""

    def __init__(self, model: Path, folder: Path, world: Any) -> None:
        self.folder = folder
        self.steps = 0
        self.embedded = Embedded(model, folder / "embedded")
        store = CheckpointStore(folder / "torch", world)
        trainer = Trainer.open(model, store, ModelOptions(experts="eager"), world)
        self.running = Running(trainer, None, None)
        self.shape = self.embedded.client.call("/v1/info")[1]["model"]

    def stop(self) -> None:
        self.running.stop()
        self.embedded.stop()

    def batch(self, temperature: float) -> tuple[str, Path]:
        """A batch of random tokens and routes. The engine's log-probs are the embedded trainer's
        with noise, so that corrections change some tokens and keep others."""
        step_id = f"s{self.steps + 1}"
        seed = 1000 + self.steps
        n = sum(LENGTHS)
        draw = np.random.default_rng(seed)
        arrays = {
            "routed_experts": draw_routes(n, len(self.shape["moe_layers"]), seed),
            "loss_mask": (draw.random(n) > 0.4).astype("u1"),
        }
        probe = write_batch(
            self.folder / f"probe-{step_id}", self.shape, LENGTHS, "probe", seed, **arrays
        )
        body = {"manifest": str(probe), "replay": True, "temperature": temperature}
        status, answer = self.embedded.client.call("/v1/logprobs", body)
        assert status == 200, answer
        exact = np.concatenate([np.array(row) for row in answer["logprobs"]])
        noise = np.random.default_rng(seed + 1).normal(0.0, 0.3, n)
        sampled = np.minimum(exact + noise, -1e-3).astype("<f4")
        folder = self.folder / step_id
        manifest = write_batch(
            folder, self.shape, LENGTHS, step_id, seed, rollout_logprobs=sampled, **arrays
        )
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(content | {"base_version": self.steps}))
        return step_id, manifest

    def step(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Applies one step with both and compares them; returns its measurements."""
        step_id, manifest = self.batch(settings.get("temperature", 1.0))
        body = request(manifest, step_id, self.steps, **settings)
        results = []
        for each in (self.embedded, self.running):
            status, answer = each.client.call("/v1/steps", body)
            assert status == 200, answer
            answer = each.client.finished(step_id)
            assert answer["state"] == "done", answer
            results.append(answer["result"])
        self.steps += 1
        checkpoint = Path(results[0]["checkpoint"])
        try:
            agree(*(result["metrics"] for result in results))
            self._same_gradient(moments_there(checkpoint), moments_here(self.running.trainer))
            self._same_weights(load_file(checkpoint / "model.safetensors"))
            self._same_heads([Path(result["checkpoint"]) for result in results])
        finally:
            reload_weights(self.running.trainer.policy, checkpoint, self.running.trainer.world)
        metrics: dict[str, Any] = results[0]["metrics"]
        return metrics

    @staticmethod
    def _same_heads(checkpoints: list[Path]) -> None:
        """Value head and router predictor, whose small rates let rounding errors add up."""
        for name in ("value_head.state", "router_predictor.state"):
            paths = [checkpoint / name for checkpoint in checkpoints]
            assert paths[0].exists() == paths[1].exists(), name
            if paths[0].exists():
                there, here = map(load_file, paths)
                assert there.keys() == here.keys()
                for key in there:
                    torch.testing.assert_close(here[key], there[key], rtol=1e-2, atol=1e-5)

    @staticmethod
    def _same_gradient(there: dict[str, Any], here: dict[str, Any]) -> None:
        """The first moments, which are the gradients: their decay rate is 0."""
        there.pop("lm_head.weight", None) if "lm_head.weight" not in here else None
        assert there.keys() == here.keys()
        whole = math.sqrt(sum(float(g.double().square().sum()) for g in there.values()))
        for key, gradient in there.items():
            error = float((gradient.double() - here[key].double()).norm())
            size = float(gradient.double().norm())
            assert error <= GRADIENT_TOLERANCE * max(size, 1e-2 * whole), f"{key}: {error} {size}"

    def _same_weights(self, there: dict[str, Any]) -> None:
        model = self.running.trainer.policy.model
        here = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        here = revert_weight_conversion(model, here)
        for key, weight in here.items():
            error = float((weight - there[key].float()).abs().max())
            assert error <= WEIGHT_TOLERANCE, f"{key}: {error}"


@pytest.fixture(scope="module")
def both(
    folders: dict[str, Path], world: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    both = Both(folders["qwen3_moe"], tmp_path_factory.mktemp("both"), world)
    yield both
    both.stop()


def complete(settings: dict[str, Any]) -> dict[str, Any]:
    """A combination, and the settings at which its options act and rounding does not show."""
    full: dict[str, Any] = {
        "policy_loss": "grpo",
        "mini_steps": 2,
        "learning_rate": 1e-3,
        "adam_eps": 1e-3,
        # The first moment is the gradient of the last mini step.
        "betas": [0.0, 0.999],
        "weight_decay": 0.0,
        "max_grad_norm": 1e6,
        "measure_no_replay": False,
        "loss_norm_tokens": 9.0,
        "router_shift_floor": 0.99,
        "importance_low": 0.8,
        "importance_high": 1.2,
        "gae_gamma": 0.95,
        "gae_lambda": 0.9,
        **settings,
    }
    return full | CLIPS[full["policy_loss"]]


def name_of(settings: dict[str, Any]) -> str:
    parts = []
    for key, value in settings.items():
        if key not in ("clip_low", "clip_high", "kl_coefficient", "mini_steps", "predictor_rate"):
            parts.append(str(value) if isinstance(value, str) else f"{key}={value}")
    return " ".join(parts)


def check(both: Both, combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    measured, failed = [], []
    for settings in combinations:
        try:
            measured.append(both.step(complete(settings)))
        except AssertionError as error:
            failed.append(f"{name_of(settings)}: {str(error)[:300]}")
            if len(failed) == 5:
                break
    assert not failed, "\n".join(failed)
    return measured


def test_every_loss_aggregation_and_correction(both: Both) -> None:
    combinations = aggregated_losses()
    assert len(combinations) > 100
    measured = check(both, combinations)
    corrected = [m["rollout_ratio"]["corrected"] for m in measured]
    clipped = [m["clip_fraction"] for m in measured]
    # The data makes every option act.
    assert sum(0 < share < 1 for share in corrected) > 20
    assert sum(0 < share < 1 for share in clipped) > 40


def test_every_pair_of_options_that_the_rules_allow(both: Both) -> None:
    losses = aggregated_losses()
    wanted = [pair for pair in pairs() if pair not in losses]
    assert len(wanted) > 150
    check(both, wanted if os.environ.get("ORCHESTRATE_PAIRS") == "each" else covering(wanted))
