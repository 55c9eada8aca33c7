"""The size of packs: the estimate of their memory, the limit that follows, and what uses it."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from pathlib import Path
from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip
from model_families import EXPERTS, SMALL, TINY, hyperparameters, write_batch
from test_checkpoints import update
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrate_trainer import cli, pack_size, service
from orchestrate_trainer import policy as policy_module
from orchestrate_trainer.checkpointing import LEVELS
from orchestrate_trainer.jobs import StepJob
from orchestrate_trainer.pack_size import ActivationSize, PackLimit
from orchestrate_trainer.passes import StepError
from orchestrate_trainer.policy import ModelError, ModelOptions, Policy, load_policy
from orchestrate_trainer.service import Trainer
from orchestrate_trainer.settings import Hyperparameters
from orchestrate_trainer.store import CheckpointStore

#: The estimate may be this many times what is measured, at least and at most. Packs use only 0.85
#: of the memory that is free.
LEAST, MOST = 0.97, 1.5
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss")
QWEN3_30B = ActivationSize(
    layers=48, hidden=2048, queries=4096, keys=512, values=512, outputs=4096, normed_heads=True,
    sinks=False, experts=128, top_k=8, expert_width=768, expert_copies=5, dense_width=0,
    vocab=151_936, width=2, level="full",
)  # fmt: skip


class Alive(TorchDispatchMode):
    """Follows the bytes of the tensors that operators return, until nothing refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.bytes)
        return result

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key, 0)


def save_model(folder: Path, family: str, **changed: Any) -> None:
    """Writes a random model of a family with four layers, in which a token's activations count."""
    inner = "moe_intermediate_size" if "moe_intermediate_size" in TINY[family] else None
    given: dict[str, Any] = {
        **SMALL,
        **TINY[family],
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 1024,
        inner or "intermediate_size": 40,
        **changed,
    }
    config = AutoConfig.for_model(family, **given)
    config.dtype = torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of such a model of each family."""
    root = tmp_path_factory.mktemp("wider")
    for family in FAMILIES:
        save_model(root / family, family)
    return {family: root / family for family in FAMILIES}


def peak(policy: Policy, tokens: int, scored: int) -> tuple[int, int]:
    """Most bytes alive in a forward and backward pass, and the bytes that autograd saved."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    ids = torch.arange(tokens) % 61
    draw = torch.Generator().manual_seed(0)
    chance = torch.rand(tokens, len(policy.routing.layers), EXPERTS, generator=draw)
    routes = chance.argsort(-1)[..., :4].to(torch.uint8)
    rows = torch.arange(scored)
    given = ids[None], torch.arange(tokens)[None], (tokens,), rows, ids[rows + 1], 1.0
    with Alive() as alive, policy.routing.micro_batch(routes):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logp = policy(*given)[0]
        kept = sum(saved.values())
        logp.sum().backward()
    policy.zero_grad(set_to_none=True)
    return alive.peak, kept


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", ["bf16", "f32"])
@pytest.mark.parametrize("level", LEVELS)
def test_estimate_is_close_to_the_bytes_alive(
    family: str, compute: Any, level: Any, wider: dict[str, Path], world: Any
) -> None:
    """Per token, which leaves out parameters and all else that does not depend on the pack."""
    options = ModelOptions(activation_checkpointing=level, compute=compute)
    policy = load_policy(wider[family], options, world)
    size = ActivationSize.of(policy, level)
    peak(policy, 128, 2)
    (less, few), (more, many) = (peak(policy, tokens, 2) for tokens in (256, 512))
    measured, saved = (more - less) / 256, (many - few) / 256
    assert LEAST * measured <= size.token <= MOST * measured
    if level == "none":
        # Otherwise what a layer keeps is known to its checkpoint alone.
        assert 0.9 * saved <= size.kept <= MOST * saved


def test_estimate_of_the_head_is_close_to_the_bytes_alive(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a vocabulary that outweighs the layers, scored in one chunk and in several."""
    save_model(tmp_path, "qwen3_moe", vocab_size=4096)
    policy = load_policy(tmp_path, ModelOptions(compute="bf16"), world)
    size = ActivationSize.of(policy, "full")
    peaks, estimates = [], []
    for chunk in (128, 512):
        for module in (pack_size, policy_module):
            monkeypatch.setattr(module, "MAX_LOGITS", 4096 * chunk)
        peak(policy, 513, 2)
        peaks.append(peak(policy, 513, 512)[0])
        estimates.append(size.head(512))
        assert peaks[-1] <= size.token * 513 + estimates[-1] + parameter_bytes(policy)
        assert size.head(chunk) == size.head(10 * chunk) > size.head(chunk - 1)
    ratio = (estimates[1] - estimates[0]) / (peaks[1] - peaks[0])
    assert LEAST <= ratio <= MOST


def parameter_bytes(policy: Policy) -> int:
    """Bytes of the parameters that are gathered in bf16, and of their gradients in both dtypes."""
    return sum(parameter.numel() for parameter in policy.parameters()) * (2 + 2 + 4 + 4)


GROWING = (
    "layers", "hidden", "queries", "keys", "values", "outputs", "experts", "top_k",
    "expert_width", "expert_copies", "dense_width", "width",
)  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*GROWING, "vocab", "normed_heads", "sinks"])
def test_estimate_grows_with_every_argument(name: str, level: str) -> None:
    size = dataclasses.replace(QWEN3_30B, level=level, normed_heads=False)
    larger = dataclasses.replace(
        size, **{name: True if name in ("normed_heads", "sinks") else getattr(size, name) * 2 + 1}
    )
    available = 40 << 30
    if name == "vocab":
        # One token's logits; a chunk of many holds as many logits as before.
        assert larger.token == size.token and larger.head(1) > size.head(1)
    else:
        assert larger.token > size.token
        assert larger.most_tokens(available) < size.most_tokens(available)


def test_estimate_falls_with_checkpointing_and_grows_with_memory() -> None:
    sizes = [dataclasses.replace(QWEN3_30B, level=level) for level in LEVELS]
    none, selective, full = (size.token for size in sizes)
    assert none > 3 * selective > 6 * full
    for size in sizes:
        found = [size.most_tokens(gib << 30) for gib in range(-1, 80)]
        assert found == sorted(found) and found[0] == found[1] == 0 < found[-1]
        # What fits does fit, and one token more does not.
        for gib, tokens in enumerate(found, start=-1):
            if tokens > 0:
                assert size.token * tokens + size.head(tokens) <= gib << 30
                assert size.token * (tokens + 1) + size.head(tokens + 1) > gib << 30


def test_no_tensor_of_a_pack_needs_64_bit_indices() -> None:
    limit = PackLimit(1 << 50, QWEN3_30B, ())
    tokens = limit.tokens
    assert tokens == QWEN3_30B.indexed == 131_071
    # A sequence cannot be split, so it is tried.
    assert limit.problem(tokens + 1) is None
    assert tokens * 8 * 2048 < 2**31 <= (tokens + 1) * 8 * 2048


def opened(
    folder: Path, checkpoints: Path, world: Any, free: int | None, **options: Any
) -> Trainer:
    """A trainer on a device with ``free`` bytes of memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_size, "free_bytes", lambda _: free)
        given = ModelOptions(experts="eager", **options)
        return Trainer.open(folder, CheckpointStore(checkpoints, world), given, world)


def reserved(trainer: Trainer) -> int:
    """What a step of a new trainer needs besides activations."""
    learner = trainer.learner
    return pack_size.reserved_bytes(learner.policy, learner.optimizer, trainer.options)


def test_packs_fill_the_free_memory_and_a_line_says_so(
    folders: dict[str, Path], world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = folders["qwen3_moe"]
    plain = opened(model, tmp_path / "cpu", world, None)
    assert plain.limit is None and not caplog.records
    size = ActivationSize.of(plain.policy, "full")
    room = int((size.token * 30 + size.head(30)) / pack_size.USED) + 1
    with caplog.at_level(logging.INFO):
        trainer = opened(model, tmp_path / "gpu", world, reserved(plain) + room)
    assert trainer.limit is not None and trainer.limit.tokens == 30
    (record,) = caplog.records
    assert record.getMessage() == (
        f"packs of 30 tokens: 0.0 GiB free after model and optimizer, {size.token:,} bytes per "
        "token"
    )
    # In a step, packs have the size that fits, not the one that is asked for.
    sized = trainer.sized(settings(), 30)
    assert sized.micro_batch_tokens == 30 and plain.sized(settings(), 30) == settings()
    # The starting weights take room too.
    weights = sum(parameter.nbytes for parameter in trainer.policy.parameters())
    assert pack_size.weight_bytes(trainer.policy, trainer.options) == weights
    fewer = trainer.limit.without(weights).longest
    assert fewer < 30
    with pytest.raises(StepError, match=rf"has room for {fewer} "):
        trainer.sized(settings(kl_coefficient=0.1), 30)
    assert trainer.measured() == 30 and plain.measured() == service.MEASURE_TOKENS
    # Moments that exist are not counted twice.
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 12, 6))
    before = reserved(trainer)
    update(trainer, manifest, "s1")
    moments = 8 * sum(parameter.numel() for parameter in trainer.policy.parameters())
    assert before - reserved(trainer) == moments


def settings(**changed: Any) -> Hyperparameters:
    return Hyperparameters.parse(hyperparameters(**changed))


def test_a_sequence_that_does_not_fit_is_refused_with_the_remedy(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    plain = opened(folders["qwen3_moe"], tmp_path / "cpu", world, None)
    size = ActivationSize.of(plain.policy, "full")
    free = reserved(plain) + size.token * 20 + size.head(20)
    trainer = opened(folders["qwen3_moe"], tmp_path / "gpu", world, free)
    limit = trainer.limit
    # A sequence may use the margin that packs leave.
    assert limit is not None and limit.tokens < 20 == limit.longest
    assert trainer.sized(settings(), 20).micro_batch_tokens == limit.tokens
    with pytest.raises(StepError) as raised:
        trainer.sized(settings(), 21)
    assert not raised.value.moved
    assert str(raised.value) == (
        f"the longest sequence has 21 tokens, but the device has room for 20 ({limit}); use "
        "--moments bf16, --cpu-offload or more GPUs, shorten the episodes, or try it with "
        "--pack-tokens 21"
    )
    # The whole step is refused, and nothing changes.
    before = [parameter.full_tensor().clone() for parameter in trainer.policy.parameters()]
    manifest = write_batch(tmp_path / "batch", trainer.policy.shape, (9, 21, 6))
    service._run_step(trainer, None, StepJob("s1", str(manifest), settings(), "digest"))
    assert trainer.position.policy_version == 0
    after = [parameter.full_tensor() for parameter in trainer.policy.parameters()]
    assert all(map(torch.equal, before, after))


def test_a_device_without_room_is_refused_at_the_start(
    folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    """Even if the numbers of tokens are not those of the request."""
    with pytest.raises(ModelError) as raised:
        opened(folders["mixtral"], tmp_path, world, 1000, activation_checkpointing="none")
    problem = str(raised.value)
    assert problem.startswith("the device has no room for a pack (-0.0 GiB free")
    assert problem.endswith(
        "use --activation-checkpointing full, --moments bf16, --cpu-offload or more GPUs"
    )


@pytest.mark.parametrize(("asked", "wanted"), [(17, 17), ("request", 40)])
def test_a_given_size_needs_no_measurement(
    asked: Any, wanted: int, folders: dict[str, Path], world: Any, tmp_path: Path
) -> None:
    trainer = opened(folders["mixtral"], tmp_path, world, 1000, pack_tokens=asked)
    assert trainer.limit is None
    assert trainer.sized(settings(), 1000).micro_batch_tokens == wanted


def test_remedies_are_those_not_in_use() -> None:
    limit = PackLimit(0, QWEN3_30B, ())
    assert limit.advice == "use more GPUs"
    options = ModelOptions(moments="bf16", activation_checkpointing="selective")
    assert pack_size._remedies(options) == ("--activation-checkpointing full", "--cpu-offload")
    assert pack_size._remedies(ModelOptions(cpu_offload=True)) == ()


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5", ""])
def test_other_values_of_the_option_are_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "m", "--checkpoint-dir", "c"]
    for text, wanted in (("auto", "auto"), ("request", "request"), ("32768", 32_768)):
        assert cli.parser().parse_args([*arguments, "--pack-tokens", text]).pack_tokens == wanted
    with pytest.raises(SystemExit):
        cli.parser().parse_args([*arguments, f"--pack-tokens={given}"])
    assert "argument --pack-tokens" in capsys.readouterr().err
