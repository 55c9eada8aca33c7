"""Checkpoints are exact, complete, and in the layout that inference servers load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import TINY, draw_tokens, hyperparameters, write_batch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrate_trainer import export
from orchestrate_trainer.batch import Batch
from orchestrate_trainer.policy import ModelError, ModelOptions
from orchestrate_trainer.service import Trainer
from orchestrate_trainer.settings import Hyperparameters
from orchestrate_trainer.step import apply
from orchestrate_trainer.store import AppliedStep, CheckpointStore, Position, StepResult

OPTIONS = ModelOptions(experts="eager")


class Killed(BaseException):
    """Stands for the death of the process."""


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in trainer.policy.parameters()]


def moments_of(trainer: Trainer) -> list[torch.Tensor]:
    states = (trainer.learner.optimizer.state[p] for p in trainer.policy.parameters())
    return [state[name].full_tensor() for state in states for name in ("exp_avg", "exp_avg_sq")]


def heads_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Tensors of the router predictor, and those of the value head with the prefix ``head.``."""
    heads = trainer.learner.heads
    held = heads.predictor().tensors("router_predictor")
    held |= {f"head.{k}": t for k, t in heads.value_head().tensors("value_head").items()}
    return {name: tensor.clone() for name, tensor in held.items()}


def update(trainer: Trainer, manifest: Path, name: str, **changed: Any) -> Position:
    """Applies a step and writes its checkpoint."""
    settings = Hyperparameters.parse(hyperparameters(mini_steps=2, **changed))
    batch = Batch.open(manifest)
    parts = (trainer.learner, trainer.reference, batch, settings, trainer.world)
    metrics = apply(*parts, lambda *_: True)
    version = trainer.position.policy_version + 1
    result: StepResult = {"policy_version": version, "checkpoint": "", "metrics": metrics}
    step: AppliedStep = {"step_id": name, "batch_digest": "", "result": result}
    trainer.position = trainer.store.save(
        trainer.learner, version, lambda: trainer.position.after(step)
    )
    return trainer.position


def test_checkpoint_continues_with_the_optimizer_kernel_of_its_device(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    """A checkpoint of a GPU, whose kernel is fused, is restored on a CPU, and the reverse."""
    store = CheckpointStore(tmp_path / "ckpt", world)
    trainer = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12, 6))
    usual = trainer.learner.optimizer
    fused = torch.optim.AdamW(trainer.policy.parameters(), lr=0.0, fused=True)
    for version, (before, after) in enumerate([(fused, usual), (usual, fused)], start=1):
        trainer.learner.optimizer = before
        update(trainer, manifest, f"s{version}")
        held = moments_of(trainer)
        trainer.learner.optimizer = after
        store.restore(trainer.learner, version)
        (group,) = after.param_groups
        assert bool(group["fused"]) == (after is fused) and bool(group["foreach"]) == (
            after is usual
        )
        assert all(map(torch.equal, moments_of(trainer), held))
        assert int(trainer.learner.updates()) == 2 * version


@pytest.mark.parametrize("family", list(TINY))
def test_export_has_the_layout_of_the_starting_model(
    family: str, folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "ckpt", world)
    trainer = Trainer.open(folders[family], store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12, 6))
    before = export.tensor_files(store.folder(0)).keys()
    update(trainer, manifest, "s1")
    assert export.tensor_files(store.folder(1)).keys() == before
    config = (store.folder(1) / "config.json").read_bytes()
    assert config == (folders[family] / "config.json").read_bytes()
    # A server that loads the checkpoint computes the same log-probs as the trainer.
    served = AutoModelForCausalLM.from_pretrained(
        store.folder(1), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    start = AutoModelForCausalLM.from_pretrained(
        store.folder(0), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = draw_tokens((11,))
    with torch.no_grad(), trainer.policy.routing.micro_batch():
        wanted, *_ = trainer.policy(
            tokens[None], torch.arange(11)[None], (11,), torch.arange(10), tokens[1:], 1.0
        )
        rows = [
            model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
            for model in (served, start)
        ]
    found, old = (row.gather(-1, tokens[1:, None]).squeeze(-1) for row in rows)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(old, wanted, atol=1e-3)


def test_restored_trainer_continues_bit_for_bit(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "ckpt", world, dtype=torch.bfloat16)
    trainer = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12, 6))
    update(trainer, manifest, "s1")
    again = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    assert again.position == trainer.position and again.position.policy_version == 1
    # Exact, although the exported weights are bf16.
    assert all(map(torch.equal, weights_of(trainer), weights_of(again)))
    assert all(map(torch.equal, moments_of(trainer), moments_of(again)))
    update(trainer, manifest, "s2")
    second = shutil.move(store.folder(2), tmp_path / "aside")
    update(again, manifest, "s2")
    assert all(map(torch.equal, weights_of(trainer), weights_of(again)))
    exported = load_file(Path(second) / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in exported.values())


def test_heads_are_part_of_a_checkpoint(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "ckpt", world)
    trainer = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12, 6))
    both = {"policy_loss": "ppo", "routing_replay": "predictive"}
    update(trainer, manifest, "s1")
    assert not [*store.folder(1).glob("value*"), *store.folder(1).glob("router*")]
    update(trainer, manifest, "s2", **both)
    kept = heads_of(trainer)
    assert kept["step"] == 1 and kept["head.step"] == 2
    assert kept["router_predictor"].abs().max() > 0 and kept["head.value_head"].abs().max() > 0
    again = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in heads_of(again).items())
    update(trainer, manifest, "s3", **both)
    shutil.move(store.folder(3), tmp_path / "aside")
    update(again, manifest, "s3", **both)
    other = heads_of(trainer)
    assert not torch.equal(other["router_predictor"], kept["router_predictor"])
    assert all(torch.equal(tensor, other[name]) for name, tensor in heads_of(again).items())
    assert all(map(torch.equal, weights_of(trainer), weights_of(again)))
    # A failed step restores them.
    trainer.store.restore(trainer.learner, 2)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in heads_of(trainer).items())
    store.restore(trainer.learner, 0)
    assert heads_of(trainer)["step"] == 0 and not heads_of(trainer)["head.value_head"].any()
    save_file({"value_head": torch.zeros(3)}, store.folder(3) / "value_head.state")
    with pytest.raises(ModelError, match="`value_head` is missing or has the wrong shape"):
        Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)


def test_incomplete_checkpoint_is_ignored(
    folders: dict[str, Path], world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while writing leaves the previous checkpoint as the newest."""
    store = CheckpointStore(tmp_path / "ckpt", world)
    trainer = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12))
    update(trainer, manifest, "s1")
    kept = weights_of(trainer)

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    for victim in ("state_dict_saver.save", "write_weights", "_write_json", "_publish", "_fsync"):
        trainer = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
        with monkeypatch.context() as patch:
            patch.setattr(f"orchestrate_trainer.store.{victim}", die)
            with pytest.raises(Killed):
                update(trainer, manifest, "s2")
        assert not store.folder(2).exists()
        again = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
        assert again.position.policy_version == 1 and again.position.lineage == 0
        assert again.position.applied("s2") is None
        assert all(map(torch.equal, kept, weights_of(again)))
    assert not list(store.root.glob(".v*"))
    # After the rename the step is applied and known.
    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_history", die)
        with pytest.raises(Killed):
            update(again, manifest, "s2")
    final = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    applied = final.position.applied("s2")
    assert applied is not None and applied["policy_version"] == 2


def test_folder_can_be_used_by_one_trainer_only(world: Any, tmp_path: Path) -> None:
    first, second = (CheckpointStore(tmp_path / "ckpt", world) for _ in range(2))
    first.lock()
    with pytest.raises(ModelError, match="another trainer uses this folder"):
        second.lock()
    assert first._lock is not None
    first._lock.close()
    second.lock()


def test_restoring_an_older_checkpoint_starts_a_new_lineage(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "ckpt", world, keep=2)
    trainer = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12))
    for name in ("s1", "s2", "s3"):
        update(trainer, manifest, name)
    kept = sorted(path.name for path in store.root.glob("v*"))
    assert kept == ["v000000", "v000002", "v000003"]
    assert store.open(folders["qwen3_moe"]).lineage == 0
    shutil.rmtree(store.folder(3))
    reopened = store.open(folders["qwen3_moe"])
    assert (reopened.policy_version, reopened.lineage) == (2, 1)
    assert reopened.applied("s2") and reopened.applied("s3") is None
    assert store.open(folders["qwen3_moe"]).lineage == 1
    (store.folder(2)).rename(store.folder(7))
    with pytest.raises(ModelError, match="was the folder renamed"):
        store.open(folders["qwen3_moe"])


def test_untrained_tensors_are_copied(folders: dict[str, Path], world: Any, tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 have a prediction layer after the last one, which is not trained."""
    model = Path(shutil.copytree(folders["glm4_moe"], tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    extra = "model.layers.92.eh_proj.weight"
    weights[extra] = torch.randn(4, 4)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    store = CheckpointStore(tmp_path / "ckpt", world)
    trainer = Trainer.open(model, store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12))
    update(trainer, manifest, "s1")
    with safe_open(store.folder(1) / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor(extra), weights[extra])


def test_trained_checkpoint_has_the_tokenizer_and_the_templates_of_the_model(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(folders["qwen3_moe"], tmp_path / "model"))
    bundled = Path(__file__).parents[3] / "environments/micro/policy"
    shutil.copy2(bundled / "tokenizer.json", model)
    settings = json.loads((bundled / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    special = {"additional_special_tokens": ["<|special|>"], "sep_token": "<|separator|>"}
    (model / "special_tokens_map.json").write_text(json.dumps(special))
    (model / "chat_template.jinja").write_text("plain {{ messages | length }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text(
        "tools {{ tools | length }}"
    )
    (model / "processor_config.json").write_text("{}")

    def seen(folder: Path) -> dict[str, Any]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tools = [{"type": "function", "function": {"name": "a", "parameters": {}}}]
        messages = [{"role": "user", "content": "x"}]
        texts = [
            tokenizer.apply_chat_template(messages, tools=given, tokenize=False)
            for given in (None, tools)
        ]
        assert texts == ["plain 1", "tools 1"]
        return {
            "special": tokenizer.special_tokens_map,
            "texts": texts,
            "templates": tokenizer.chat_template,
            "files": {path.name for path in folder.rglob("*.json*")} - {"trainer.json"},
        }

    store = CheckpointStore(tmp_path / "ckpt", world)
    trainer = Trainer.open(model, store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12))
    update(trainer, manifest, "s1")
    expected = seen(model)
    for version in (0, 1):
        found = seen(store.folder(version))
        assert found["files"] >= expected.pop("files", set())
        found.pop("files")
        assert found == expected


def test_large_export_is_split_into_files(
    folders: dict[str, Path], world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    store = CheckpointStore(tmp_path / "ckpt", world)
    trainer = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12))
    update(trainer, manifest, "s1")
    index = json.loads((store.folder(1) / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    again = Trainer.open(folders["qwen3_moe"], store, OPTIONS, world)
    assert all(map(torch.equal, weights_of(trainer), weights_of(again)))
    update(again, manifest, "s2")


def test_untrainable_models_are_refused(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="no safetensors weights found"):
        Trainer.open(empty, CheckpointStore(tmp_path / "a", world), OPTIONS, world)
    for name, problem in (("quantised", "convert them to bf16"), ("cut", "gate.weight")):
        model = Path(shutil.copytree(folders["qwen3_moe"], tmp_path / name))
        if name == "quantised":
            config = json.loads((model / "config.json").read_text())
            config["quantization_config"] = {"quant_method": "fp8"}
            (model / "config.json").write_text(json.dumps(config))
        else:
            weights = load_file(model / "model.safetensors")
            del weights["model.layers.1.mlp.gate.weight"]
            save_file(weights, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=problem):
            Trainer.open(model, CheckpointStore(tmp_path / f"c-{name}", world), OPTIONS, world)
