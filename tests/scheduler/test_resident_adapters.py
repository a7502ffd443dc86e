"""Slots of adapters: what is used stays, what was idle longest goes, and the runner hears of every change once."""

from __future__ import annotations

import random

from tokenmill.scheduler.running import ResidentAdapters


def test_an_adapter_keeps_its_slot_until_the_slot_is_needed() -> None:
    slots = ResidentAdapters(2)
    assert slots.acquire("a") == 1
    assert slots.pop_loads() == [(1, "a")]
    slots.release("a")
    assert slots.num_needed("a") == 0
    assert slots.acquire("a") == 1
    assert slots.pop_loads() == []


def test_the_idle_adapter_used_longest_ago_makes_room() -> None:
    slots = ResidentAdapters(2)
    for name in ("a", "b", "a"):
        slots.acquire(name)
        slots.release(name)
    assert slots.acquire("c") == 2  # "b" was used before "a"
    assert slots.num_needed("b") == 1
    assert slots.num_needed("a") == 0


def test_an_adapter_in_use_is_never_replaced() -> None:
    slots = ResidentAdapters(1)
    slots.acquire("a")
    slots.acquire("a")
    slots.release("a")
    assert slots.num_free() == 0
    assert slots.num_held("a") == 1
    slots.release("a")
    assert slots.num_free() == 1


def test_after_a_failure_what_is_used_is_loaded_again() -> None:
    slots = ResidentAdapters(2)
    slots.acquire("a")
    slots.acquire("b")
    slots.release("b")
    slots.pop_loads()
    slots.reload()
    assert slots.pop_loads() == [(1, "a")]
    assert slots.num_needed("b") == 1
    assert slots.acquire("b") == 2


def test_random_use_never_shares_a_slot_and_the_runner_follows() -> None:
    rng, slots = random.Random(0), ResidentAdapters(4)
    held: dict[int, str] = {}  # as a runner would have it
    running: list[str] = []
    for _ in range(3000):
        if running and rng.random() < 0.5:
            slots.release(running.pop(rng.randrange(len(running))))
        name = f"adapter {rng.randrange(12)}"
        if slots.num_needed(name) <= slots.num_free():
            slot = slots.acquire(name)
            running.append(name)
            held |= dict(slots.pop_loads())
            assert held[slot] == name
        assert all(name in held.values() for name in running)
