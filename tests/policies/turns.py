"""Traffic of conversations that go on turn by turn, for policies that learn who comes back."""

from __future__ import annotations

import random
from typing import Any

from policies.protocol import EvictionPolicy
from tests.policies.blocks import BlockCache


def served_by(policy: EvictionPolicy, capacity_blocks: int = 10**9, **more: Any) -> BlockCache:
    return BlockCache(policy, capacity_blocks, block_bytes=100, **more)


def prompt(conversation: int, length: int) -> list[int]:
    return [0, *(1000 * conversation + index for index in range(1, length))]


def warm(server: BlockCache, turns: int = 4, conversations: int = 10) -> int:
    """Conversations that all go on, 50 ticks from turn to turn, 100 blocks each turn; returns the tick after them."""
    tick = 0
    for turn in range(1, turns + 1):
        for conversation in range(1, conversations + 1):
            tick += 5
            server.request(prompt(conversation, 10 + 2 * turn), tick, turn)
    for number in range(200):
        tick += 5
        server.request(prompt(500 + number, 12), tick, 1)
    assert server.policy.model.is_warm
    return tick


def random_traffic(seed: int, requests: int = 500) -> list[tuple[list[int], int, int]]:
    """(prompt, tick, turn): conversations that go on the likelier the longer they did, most with a cut-off end."""
    draw = random.Random(seed)
    planned = [(draw.randrange(20 * requests), number, 1, draw.randrange(4, 20)) for number in range(1, requests)]
    traffic: list[tuple[int, list[int], int]] = []
    while planned:
        tick, number, turn, length = planned.pop()
        traffic.append((tick, [*prompt(number, length - 1), -1000 * number - turn], turn))
        if draw.random() < min(0.9, 0.2 + 0.2 * turn):
            planned.append((tick + int(200 * draw.lognormvariate(0, 0.8)), number, turn + 1, length + 2))
    traffic.sort(key=lambda each: each[0])
    return [(keys, index + tick, turn) for index, (tick, keys, turn) in enumerate(traffic)]
