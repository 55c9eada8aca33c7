"""Which sequences each process packs into each of its micro-batches.

Sharded processes run in lockstep: every layer of a micro-batch gathers parameters from all of them,
so a micro-step takes as long as its most expensive pack. Packs are therefore balanced by cost, and
packs of similar cost run at the same time. Every process computes the same plan by itself.
"""

from __future__ import annotations

__all__ = ["lockstep_cost", "plan_packs"]

#: Numbers of the sequences of a pack.
Pack = list[int]


def plan_packs(lengths: list[int], costs: list[float], ranks: int, budget: int) -> list[list[Pack]]:
    """Packs of each rank, one per micro-step; ``plan[rank][step]`` are sequence numbers, ascending.

    ``lengths`` and ``costs`` are tokens and cost of each sequence. A pack has at most ``budget``
    tokens, but a longer sequence gets a pack to itself. All ranks have the same number of packs,
    the fewest that first-fit finds; some may be empty. The most expensive micro-step is first, so
    that memory reaches its peak at once.
    """
    order = sorted(range(len(lengths)), key=lambda number: (-costs[number], number))
    filled = _first_fit(order, lengths, budget)
    steps = -(-len(filled) // ranks)
    filled += [[] for _ in range(steps * ranks - len(filled))]
    spread = _balanced(order, lengths, costs, steps * ranks, budget)
    candidates = [filled] if spread is None else [spread, filled]
    plans = [_deal(packs, costs, ranks) for packs in candidates]
    return min(plans, key=lambda plan: lockstep_cost(plan, costs))


def lockstep_cost(plan: list[list[Pack]], costs: list[float]) -> float:
    """Cost of a plan when every micro-step takes as long as its most expensive pack."""
    return sum(max(_cost(pack, costs) for pack in step) for step in zip(*plan, strict=True))


def _first_fit(order: list[int], lengths: list[int], budget: int) -> list[Pack]:
    """Packs in which each sequence goes to the first pack with room for it."""
    packs: list[Pack] = []
    room: list[int] = []
    for number in order:
        length = lengths[number]
        place = next((at for at, free in enumerate(room) if length <= free), None)
        if place is None:
            place = len(packs)
            packs.append([])
            room.append(budget)
        packs[place].append(number)
        room[place] -= length
    return packs


def _balanced(
    order: list[int], lengths: list[int], costs: list[float], count: int, budget: int
) -> list[Pack] | None:
    """``count`` packs in which each sequence goes to the cheapest pack with room for it, or
    ``None`` if one finds no room."""
    packs: list[Pack] = [[] for _ in range(count)]
    room, total = [budget] * count, [0.0] * count
    for number in order:
        length = lengths[number]
        fits = [at for at in range(count) if length <= room[at] or not packs[at]]
        if not fits:
            return None
        place = min(fits, key=lambda at: (total[at], at))
        packs[place].append(number)
        room[place] -= length
        total[place] += costs[number]
    return packs


def _deal(packs: list[Pack], costs: list[float], ranks: int) -> list[list[Pack]]:
    """Sorts packs by cost and gives each run of ``ranks`` neighbours to one micro-step."""
    ordered = sorted(packs, key=lambda pack: (-_cost(pack, costs), pack))
    return [[sorted(pack) for pack in ordered[rank::ranks]] for rank in range(ranks)]


def _cost(pack: Pack, costs: list[float]) -> float:
    return sum(costs[number] for number in pack)
