"""Histograms of the metrics have the embedded trainer's bins and add up over processes."""

from __future__ import annotations

from typing import Any

import needs  # noqa: F401

import pytest

import torch  # isort: skip

from orchestrate_trainer.corrections import Tokens
from orchestrate_trainer.counts import HalfDecades, ProbabilityGrid, load_curve
from orchestrate_trainer.measures import Disagreement, Load, Mismatch, Ratio
from orchestrate_trainer.routers import RouterSpec


class Copies:
    """A world whose processes all measured the same values."""

    def __init__(self, size: int) -> None:
        self._size = size

    def sum(self, values: list[float]) -> list[float]:
        return [value * self._size for value in values]

    def gather(self, value: Any) -> list[Any]:
        return [value] * self._size


def copies(size: int) -> Any:
    return Copies(size)


def test_sizes_are_counted_by_half_decade(world: Any) -> None:
    sizes = HalfDecades()
    assert sizes.finish(world) == []
    root = 3.1622776601683795
    values = [0.0, 9e-8, 1e-7, 3e-3, root * 1e-3, 3.2e-3, 9.9, 10.0, 1e9]
    sizes.add(torch.tensor(values[:4], dtype=torch.float64))
    sizes.add(torch.tensor(values[4:], dtype=torch.float64))
    expected = [0] * 18
    for place in (0, 0, 1, 9, 10, 10, 16, 17, 17):
        expected[place] += 1
    assert sizes.finish(world) == expected
    assert sizes.finish(copies(2)) == [2 * count for count in expected]


def test_probability_bins_are_finest_near_one(world: Any) -> None:
    grid = ProbabilityGrid()
    logprobs = [0.0, -0.015, -1 / 64, -0.016, -1.0, -4.0, -15.5, -1e9, -float("inf")]
    bins = [0, 0, 1, 1, 8, 16, 31, 31, 31]
    for logprob, place in zip(logprobs, bins, strict=True):
        grid = ProbabilityGrid()
        grid.add(torch.tensor([logprob] * 3), torch.tensor([-1.0, 0.0, -1.0]))
        assert grid.finish(world) == [[place, 0, 1], [place, 8, 2]], logprob
    assert grid.finish(copies(2)) == [[31, 0, 2], [31, 8, 4]]


def test_sequences_are_counted_by_their_mean(world: Any) -> None:
    sums = Mismatch()
    trainer, sampler = torch.zeros(3), torch.tensor([-1.0, -3.0, -0.5])
    # The second of three sequences has no loss tokens.
    sums.add(trainer, sampler, Tokens(torch.tensor([0, 0, 2]), 3))
    found = sums.finish(world)[0]
    filled = {
        name: {place: count for place, count in enumerate(found[name]) if count}
        for name in ("sequence_histogram", "token_histogram")
    }
    assert filled == {"sequence_histogram": {14: 1, 15: 1}, "token_histogram": {14: 1, 15: 2}}
    both = sums.finish(copies(2))[0]
    assert both["token_histogram"] == [2 * count for count in found["token_histogram"]]
    assert both["kl_k3"] == pytest.approx(found["kl_k3"])


def test_expert_load_is_ordered_from_busiest_to_idlest(world: Any) -> None:
    load = Load(2, 4)
    load.add(torch.tensor([[[0, 1], [0, 1]], [[2, 3], [0, 1]]]))
    found = load.finish(world)
    assert found["expert_load"] == [[1.0] * 4, [2.0, 2.0, 0.0, 0.0]]
    assert found["expert_load_entropy"] == pytest.approx([1.0, 0.5])
    many = torch.cat([torch.ones(64), torch.zeros(64)]).double()
    assert load_curve(many) == [2.0] * 8 + [0.0] * 8


def drawn_routes(tokens: int, seed: int) -> torch.Tensor:
    """Random distinct experts, uint8 ``[tokens, 3, 2]`` of 8."""
    chance = torch.rand(tokens, 3, 8, generator=torch.Generator().manual_seed(seed))
    return chance.argsort(-1)[..., :2].to(torch.uint8)


def test_packed_sequences_are_compared_as_single_ones(world: Any) -> None:
    lengths = (5, 1, 9, 4)
    recorded, own = drawn_routes(sum(lengths), 0), drawn_routes(sum(lengths), 1)
    valid = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(2)) > 0.3
    # The second sequence has no row at all.
    valid[5] = False
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    packed, single = Disagreement(3, 2), Disagreement(3, 2)
    packed.add(recorded, own, valid, Tokens(owner, len(lengths)))
    for rows, others, kept in zip(*(t.split(lengths) for t in (recorded, own, valid)), strict=True):
        alone = Tokens(torch.zeros(int(kept.sum()), dtype=torch.long), 1)
        single.add(rows[kept], others[kept], kept[kept], alone)
    assert sum(single.finish(world)["sequence_histogram"]) == 3
    found, wanted = packed.finish(world), single.finish(world)
    assert {name: pytest.approx(value) for name, value in wanted.items()} == found
    load, split = Load(3, 8), Load(3, 8)
    load.add(recorded, valid)
    split.add(recorded[valid])
    assert load.finish(world) == split.finish(world)


def count_everything(device: torch.device) -> None:
    """Adds to every measurement of a micro-batch on ``device``."""

    def on(values: Any) -> torch.Tensor:
        return torch.as_tensor(values).to(device)

    owner = Tokens(on([0, 0, 2]), 3)
    logp = on([-0.5, -1.0, -2.0])
    Mismatch(device).add(logp, logp - 0.1, owner)
    recorded, valid = on(drawn_routes(3, 0)), on([True, True, False])
    Disagreement(3, 2, device).add(recorded, recorded, valid, owner)
    Load(3, 8, device).add(recorded, valid)
    Ratio(device).add(logp, valid, ~valid)
    RouterSpec("softmax", 8, 2).select(on(torch.randn(3, 8)))


def test_counting_never_reads_from_the_device() -> None:
    """Tensors on the meta device have no values, so whatever reads one, or has a shape that depends
    on one, fails."""
    meta = torch.device("meta")
    count_everything(meta)
    for reads in (torch.bincount, torch.nonzero, float):
        with pytest.raises((RuntimeError, NotImplementedError)):
            reads(torch.zeros(1, dtype=torch.long, device=meta))
