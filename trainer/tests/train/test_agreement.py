"""The embedded trainer and this one on the same batch, from the same weights, in f32.

Needs the orchestrator's program: `ORCHESTRATE_BIN`, or one below `target/`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import write_batch
from safetensors.torch import load_file
from test_service import Client, Running, request
from transformers.core_model_loading import revert_weight_conversion

from orchestrate_trainer.policy import ModelOptions
from orchestrate_trainer.service import Trainer
from orchestrate_trainer.store import CheckpointStore

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = (12, 7, 19, 10, 5)
TOLERANCE = 1e-4
#: What values are at least compared to: the size of what they are differences of.
FLOOR = 0.1


def program() -> Path:
    """The orchestrator's program; skips the test if it is missing."""
    named = [os.environ.get("ORCHESTRATE_BIN")]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [target / kind / "orchestrate" for kind in ("release", "debug")]
    for path in [*filter(None, named), *built]:
        if Path(path).exists():
            return Path(path)
    required = os.environ.get("ORCHESTRATE_REQUIRE", "")
    assert "embedded" not in required, "the program orchestrate is required, but not built"
    pytest.skip("the program orchestrate is not built: `cargo build`, or set ORCHESTRATE_BIN")


class Embedded:
    """The embedded trainer, as a process."""

    def __init__(self, model: Path, checkpoints: Path) -> None:
        self._process = subprocess.Popen(
            [
                *(program(), "serve-trainer", "--model", model),
                *("--checkpoints", checkpoints, "--listen", "127.0.0.1:0"),
                *("--batch-root", "/"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "NO_COLOR": "1"},
        )
        lines = []
        # Ends with the process if it exits before it listens.
        for line in self._process.stdout:
            lines.append(line)
            found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.client = Client(int(found[1]))
                return
        raise AssertionError("".join(lines))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def both(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> Iterator[tuple[Embedded, Running]]:
    model = folders["qwen3_moe"]
    store = CheckpointStore(tmp_path / "torch", world)
    embedded = Embedded(model, tmp_path / "embedded")
    trainer = Trainer.open(model, store, ModelOptions(experts="eager"), world)
    running = Running(trainer, None, None)
    yield embedded, running
    running.stop()
    embedded.stop()


def relative(one: float, two: float) -> float:
    return abs(one - two) / max(abs(one), abs(two), FLOOR)


def agree(one: Any, two: Any, name: str = "metrics") -> None:
    """All of the embedded trainer's measurements are here, and the same."""
    if isinstance(one, dict):
        assert isinstance(two, dict) and one.keys() == two.keys(), name
        for key in one.keys() - {"seconds"}:
            agree(one[key], two[key], f"{name}.{key}")
    elif name.endswith("probability_grid"):
        assert moved(cells(one), cells(two)) <= 1, name
    elif name.endswith(("token_histogram", "sequence_histogram")) and "mismatch" in name:
        assert moved(dict(enumerate(one)), dict(enumerate(two))) <= 1, name
    elif isinstance(one, list):
        assert len(one) == len(two), name
        for pair in zip(one, two):
            agree(*pair, name)
    elif one is None or two is None:
        assert one == two, name
    else:
        assert relative(one, two) <= TOLERANCE, f"{name}: {one} {two}"


def cells(grid: list[list[int]]) -> dict[Any, int]:
    return {(sampler, trainer): tokens for sampler, trainer, tokens in grid}


def moved(one: dict[Any, int], two: dict[Any, int]) -> int:
    """Number of values in different bins: a value at a bin's edge may be rounded to either side."""
    assert sum(one.values()) == sum(two.values())
    return sum(abs(one.get(key, 0) - two.get(key, 0)) for key in one.keys() | two.keys()) // 2


def moments_here(trainer: Trainer) -> dict[str, torch.Tensor]:
    """First moments under the names that the tensors have on disk."""
    states = trainer.learner.optimizer.state
    named = trainer.policy.model.named_parameters()
    moments = {name: states[p]["exp_avg"].full_tensor() for name, p in named}
    return revert_weight_conversion(trainer.policy.model, moments)


def moments_there(checkpoint: Path) -> dict[str, torch.Tensor]:
    held = load_file(checkpoint / "optimizer.state")
    prefix = "exp_avg."
    return {name.removeprefix(prefix): t for name, t in held.items() if name.startswith(prefix)}


def cosine(one: torch.Tensor, two: torch.Tensor) -> float:
    if torch.equal(one, two):
        return 1.0
    # Scaled first, because products of the squares of small gradients underflow.
    one, two = (part.double().flatten() / part.double().norm() for part in (one, two))
    return float(one @ two)


PPO = {"policy_loss": "ppo", "dual_clip": 3.0}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, two mini steps": {"mini_steps": 2, "kl_coefficient": 0.1},
    "grpo, recompute": {"mini_steps": 2, "routing_replay": "recompute"},
    "grpo, no replay": {"mini_steps": 2, "routing_replay": "none"},
    "rspo": {"policy_loss": "rspo", "aggregation": "seq-mean-token-mean", "clip_low": 0.4,
             "clip_high": 0.4, "router_shift": "before_clip", "mini_steps": 2},
    "tis": {"importance_correction": "tis", "mini_steps": 2},
    "ppo": {**PPO, "value_coefficient": 5.0},
    "ppo, three mini steps": {**PPO, "mini_steps": 3, "gae_gamma": 0.95, "gae_lambda": 0.9,
                              "value_coefficient": 5.0, "value_clip": 0.01},
    "ppo, divergence in the reward": {**PPO, "mini_steps": 2, "kl_coefficient": 0.3,
                                      "kl_estimator": "k1"},
    "pr2": {"routing_replay": "predictive", "mini_steps": 2, "predictor_rate": 1.0},
    "pr2, few rows": {"routing_replay": "predictive", "mini_steps": 3, "predictor_rate": 1.0,
                      "predictor_tokens": 4},
    "ppo with pr2": {**PPO, "routing_replay": "predictive", "mini_steps": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_matches_the_embedded_trainer(
    name: str, both: tuple[Embedded, Running], tmp_path: Path
) -> None:
    embedded, running = both
    shape = embedded.client.call("/v1/info")[1]["model"]
    assert running.client.call("/v1/info")[1]["model"] == shape
    manifest = write_batch(tmp_path / "b1", shape, LENGTHS, "s1")
    for replay in (True, False):
        body = {"manifest": str(manifest), "replay": replay, "temperature": 1.0}
        there, here = (each.client.call("/v1/logprobs", body)[1] for each in both)
        agree(there, here, "log-probs")
    # With these rates weights move by more than the precision of f32. The epsilon hides rounding in
    # Adam's first steps, in which a tiny gradient would move a weight as far as a large one.
    changed = {"learning_rate": 1e-4, "adam_eps": 1e-3, "weight_decay": 0.0} | CASES[name]
    results = []
    for each in both:
        status, answer = each.client.call("/v1/steps", request(manifest, "s1", **changed))
        assert status == 200, answer
        answer = each.client.finished("s1")
        assert answer["state"] == "done", answer
        results.append(answer["result"])
    agree(*(result["metrics"] for result in results))

    checkpoint = Path(results[0]["checkpoint"])
    there, here = moments_there(checkpoint), moments_here(running.trainer)
    there.pop("lm_head.weight", None) if "lm_head.weight" not in here else None
    assert there.keys() == here.keys()
    one, two = (torch.cat([part[key].flatten() for key in sorted(there)]) for part in (there, here))
    assert cosine(one, two) >= 0.9999
    for key in there:
        assert there[key].shape == here[key].shape and cosine(there[key], here[key]) >= 0.9999, key
    # The files next to the model have the same names and tensors.
    sides = ("value_head.state", "router_predictor.state")
    for side in sides:
        paths = [Path(result["checkpoint"]) / side for result in results]
        assert paths[0].exists() == paths[1].exists(), side
        if not paths[0].exists():
            continue
        there, here = map(load_file, paths)
        assert there.keys() == here.keys()
        for key in there:
            assert there[key].shape == here[key].shape, key
            assert cosine(there[key], here[key]) >= 0.9999, f"{side} {key}"
            torch.testing.assert_close(here[key], there[key], rtol=1e-2, atol=1e-6)
    seen = {side for side in sides if (checkpoint / side).exists()}
    assert ("value_head.state" in seen) == name.startswith("ppo")
    assert ("router_predictor.state" in seen) == ("pr2" in name)


REFUSED: list[dict[str, Any]] = [
    {"policy_loss": "ppo", "off_policy_delta": 0.5},
    {"policy_loss": "ppo", "router_shift": "after_clip"},
    {"policy_loss": "ppo", "gae_gamma": 1.5, "gae_lambda": -0.25, "value_clip": 0.0},
    {"policy_loss": "ppo", "clip_low": 1.0},
    {"routing_replay": "predictive"},
    {"routing_replay": "predictive", "mini_steps": 2, "predictor_rate": 0.0,
     "predictor_tokens": 0},
    {"kl_coefficient": 0.1, "kl_estimator": "k1"},
    {"kl_coefficient": 0.1, "kl_estimator": "k2", "kl_unbiased": True},
    {"policy_loss": "sapo", "dual_clip": 3.0, "sapo_tau": [1.0, 0.0]},
    {"policy_loss": "rspo", "aggregation": "token-mean"},
    {"policy_loss": "gmpo", "aggregation": "seq-mean-token-mean", "router_shift": "before_clip",
     "importance_correction": "icepop"},
    {"policy_loss": "gmpo", "aggregation": "seq-mean-token-mean", "importance_correction": "tis"},
    {"policy_loss": "cispo", "clip_low": 1.25, "router_shift": "before_clip"},
    {"policy_loss": "minirl", "importance_correction": "geometric_mask"},
    {"router_shift": "before_clip", "router_shift_floor": 0.5},
    {"importance_correction": "icepop", "importance_level": "sequence", "importance_low": 3.0},
    {"mini_steps": 0, "micro_batch_tokens": 0, "betas": [0.9, 1.0], "adam_eps": 0.0},
    {"learning_rate": -1e-7, "weight_decay": -1.0, "max_grad_norm": 0.0, "temperature": 0.0},
    {"dual_clip": 1.0, "loss_norm_tokens": 0.0, "off_policy_delta": -1.0},
]  # fmt: skip


def test_both_refuse_the_same_settings_with_the_same_message(
    both: tuple[Embedded, Running], tmp_path: Path
) -> None:
    shape = both[0].client.call("/v1/info")[1]["model"]
    manifest = write_batch(tmp_path / "b1", shape, LENGTHS, "s1")
    for changed in REFUSED:
        there, here = (
            each.client.refused("/v1/steps", request(manifest, "s1", **changed)) for each in both
        )
        assert here == there and here[:2] == (422, "does_not_fit"), changed
