"""Messages between ranks contain only data; the store keeps few of them, and in the end none."""

import pickle
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from adiv_monitor.step import ranks
from adiv_monitor.step.messages import decode
from adiv_monitor.step.ranks import Ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def test_what_is_no_message_is_not_executed_and_not_read() -> None:
    """A message may come from anyone who reaches the store: no object in it is unpickled."""
    np.savez(objects := BytesIO(), np.array([print], dtype=object))
    for message in (pickle.dumps(print), objects.getvalue()):
        with pytest.raises(ValueError, match="pickle"):
            decode(message)
    np.savez(
        wrong := BytesIO(), np.frombuffer(b'[{"report": {}, "rows_lost": true}, {}]', np.uint8)
    )
    with pytest.raises(ValueError, match="RankContribution: "):
        decode(wrong.getvalue())


# --- contents of the store -----------------------------------------------------------------------

STEPS = 200


class World:
    """Several ranks in one process, which run in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.store, self.rank = dist.HashStore(), 0
        self.empty = self.store.num_keys()
        monkeypatch.setattr(ranks, "_store", lambda: self.store)
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        monkeypatch.setattr(ranks, "world_size", lambda: size)
        monkeypatch.setattr(ranks, "PATIENCE", 0.01)
        monkeypatch.setattr(ranks, "_SHORT", 0.0)

    def join(self, rank: int) -> Ranks:
        self.rank = rank
        Ranks._attached.clear()  # each rank has its own
        joined = Ranks(None, np.random.default_rng(0))
        joined.join("anything")
        return joined

    @property
    def keys(self) -> int:
        return self.store.num_keys() - self.empty


def two(monkeypatch: pytest.MonkeyPatch) -> tuple[World, Ranks, Ranks]:
    world = World(monkeypatch, 2)
    return world, world.join(0), world.join(1)


def test_many_reports_leave_no_more_keys_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 4)  # rank 3 never participates
    joined = [world.join(rank) for rank in range(3)]
    for step in range(STEPS):
        for other in joined[1:]:
            other.put(step, b"part %d" % step)
        assert joined[0].get(step, 1) == joined[0].get(step, 2) == b"part %d" % step
        assert joined[0].get(step, 3) is None
        joined[0].put(step, b"report %d" % step)
        assert joined[1].get(step, 0) == b"report %d" % step
        assert joined[1].get(step - 1, 0) is None
        # Ranks present, members of the meeting, and for each rank its message and its list.
        assert world.keys == 3 + 1 + 3 * 2
    for rank in (1, 0, 2):
        assert world.keys > 0
        joined[rank].leave()
    assert world.keys == 0


def test_the_last_report_is_there_after_the_first_process_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, first, second = two(monkeypatch)
    second.put(0, b"part")
    first.put(0, b"report")
    first.leave()
    again = world.join(0)  # a new monitor is no reason to forget it, nor to take it for its own
    assert second.get(0, 0) == b"report"
    assert again.get(0, 0) is None
    second.leave()
    again.leave()
    assert world.keys == 0


def test_large_messages_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PIECE", 3)
    world, first, second = two(monkeypatch)
    for step, message in enumerate((b"", b"abc", b"abcdefgh")):
        second.put(step, message)
        assert first.get(step, 1) == message
    world.store.delete_key(f"{first._box(1)}/2/1")
    assert first.get(2, 1) is None, "a piece is missing"
    first.leave()
    second.leave()
    assert world.keys == 0


def test_nobody_is_told_yes_when_another_was_told_no_and_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks get the same answer, even if the last one pauses before it answers."""
    world, first, second = two(monkeypatch)
    store, told = world.store, []

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def add(self, key: str, number: int) -> int:
            if not key.endswith("/came"):
                return store.add(key, number)
            world.store = store
            counts = []
            come = lambda: counts or counts.append(store.add(key, number)) or [1]  # noqa: E731
            monkeypatch.setattr(first, "present", come)
            told.append(first.agree(3, "point"))
            first.leave()
            assert counts == [2], "the second is the last to come"
            return counts[0]

    world.store = Slow()  # type: ignore[assignment]
    told.append(second.agree(3, "point"))
    assert told == [False, False]
    second.leave()
