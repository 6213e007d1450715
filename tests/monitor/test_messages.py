"""Messages between ranks contain only data; the store keeps few of them, and in the end none."""

import json
import math
import pickle
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import loss_of, make

from adiv_monitor import Monitor
from adiv_monitor.features.rows import Index
from adiv_monitor.maths.sums import (
    About,
    Array,
    Blocks,
    Dots,
    Evidence,
    LayerSums,
    Moved,
    Sampled,
    Vector,
)
from adiv_monitor.report import StepReport
from adiv_monitor.step import assembly, ranks
from adiv_monitor.step.merge_ranks import prepared
from adiv_monitor.step.messages import Malformed, decode, encode
from adiv_monitor.step.rank_contribution import Facts, RankContribution
from adiv_monitor.step.ranks import Exchange
from adiv_monitor.step.soundness import check

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture(scope="module")
def known() -> tuple[RankContribution, StepReport]:
    """Return a step's contribution as it is sent, and its report, with many kinds of entries."""
    model, tokens, targets = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    asked: dict[str, Any] = {"attention": True, "attainable": True}
    asked["realised"] = lambda output: output.square().sum()
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        add = assembly.Assembly.add
        patch.setattr(
            *(assembly.Assembly, "add"),
            lambda self, part: (parts.append(part), add(self, part)),
        )
        with Monitor(model, optimizer, layers_per_step=None, **asked) as monitor:
            loss_of(model(tokens), targets).backward()
            optimizer.step()
    assert monitor.latest is not None
    chance = np.random.default_rng(0)
    return prepared(parts[0], 16, 2, chance), monitor.latest


def same(a: Any, b: Any) -> bool:
    """Assert equality to the last bit, with equal types at every level."""
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(map(same, a, b)) and len(a) == len(b)
    return bool(a == b) or (a != a and b != b)


@dataclass(frozen=True)
class Heard:
    report: StepReport
    ranks: list[int]


def test_what_was_sent_is_what_comes(known: tuple[RankContribution, StepReport]) -> None:
    part, report = known
    assert part.layers and part.attention
    come = decode(RankContribution, encode(part))
    assert same(part, come)
    check(come)
    assert same(report, decode(Heard, encode(Heard(report, [0, 3]))).report)


@dataclass
class Inner:
    chosen: Index | None
    keys: Array
    bound: float


@dataclass
class Everything:
    """A message with every supported type."""

    flag: bool
    number: float
    maybe: int | None
    names: set[str] = field(default_factory=set)
    shares: dict[int, float] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    inner: Inner | None = None
    last: tuple[float, ...] = ()


def everything() -> Everything:
    values = {
        "none": np.empty((0, 3)),
        "one": np.array(math.nan),
        "turned": np.arange(6.0).reshape(2, 3).T,
    }
    inner = Inner(np.array([1, 5]), np.array([0.5, -0.0]), math.inf)
    return Everything(True, math.nan, None, {"a", "ü"}, {-3: 1e-300}, values, inner, (0.1, 2.0))


def test_all_that_a_message_can_hold() -> None:
    assert same(everything(), decode(Everything, encode(everything())))


# --- invalid messages ----------------------------------------------------------------------------


class Exploit:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (Path(self.folder),)


def test_what_was_changed_on_the_way_is_no_message(
    known: tuple[RankContribution, StepReport],
) -> None:
    message = encode(known[0])
    chance = np.random.default_rng(0)
    places = [*range(40), *chance.integers(len(message), size=300)]
    changed = [message[:i] + bytes([message[i] ^ (1 << i % 8)]) + message[i + 1 :] for i in places]
    changed += [message[:length] for length in places]
    changed += [message + b"\0", message * 2, b"", message[1:], bytes(100)]
    for data in changed:
        with pytest.raises(Malformed):
            decode(RankContribution, data)


def test_a_pickle_is_no_message(tmp_path: Path) -> None:
    with pytest.raises(Malformed):
        decode(RankContribution, pickle.dumps(Exploit(str(tmp_path / "made"))))
    assert not (tmp_path / "made").exists()


def signed(text: str | bytes, numbers: bytes = b"", length: int | None = None) -> bytes:
    """Return a validly signed message with this text."""
    text = text.encode() if isinstance(text, str) else text
    size = len(text) if length is None else length
    body = size.to_bytes(8, "little") + text + numbers
    return encode(everything())[:8] + zlib.crc32(body).to_bytes(4, "little") + body


def text_of(message: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(message[12:20], "little")
    return json.loads(message[20 : 20 + length]), message[20 + length :]


LIES: dict[str, Callable[[list[Any]], object]] = {
    "a number for a flag": lambda x: x.__setitem__(0, 1),
    "a text for a number": lambda x: x.__setitem__(1, "1"),
    "a flag for a number": lambda x: x.__setitem__(2, True),
    "a number without end": lambda x: x.__setitem__(2, 2**70),
    "a mapping for names": lambda x: x.__setitem__(3, {"a": 1}),
    "a key that is none": lambda x: x.__setitem__(4, [[[], 1.0]]),
    "no pair": lambda x: x.__setitem__(4, [[1, 2.0, 3.0]]),
    "a field too few": lambda x: x.pop(),
    "a field too many": lambda x: x.append(1),
    "a field too few inside": lambda x: x[6].pop(),
    "a length below zero": lambda x: x[5][2].__setitem__(1, [-3, -2]),
    "a huge length": lambda x: x[5][2].__setitem__(1, [2**62, 3]),
    "huge lengths of nothing": lambda x: x[5][0].__setitem__(1, [0, 2**62]),
    "many lengths": lambda x: x[5][2].__setitem__(1, [1] * 100),
    "a length of another type": lambda x: x[5][2].__setitem__(1, [2.0, 3.0]),
    "less than there is": lambda x: x[5][2].__setitem__(1, [2, 2]),
    "more than there is": lambda x: x[5][2].__setitem__(1, [3, 3]),
}


@pytest.mark.parametrize("name", LIES)
def test_whoever_knows_the_layout_can_say_no_other_types(name: str) -> None:
    text, numbers = text_of(encode(everything()))
    decode(Everything, signed(json.dumps(text), numbers))
    LIES[name](text)
    with pytest.raises(Malformed):
        decode(Everything, signed(json.dumps(text), numbers))


@pytest.mark.parametrize(
    "message",
    [
        *(signed("[]"), signed(""), signed("null"), signed("{"), signed(b"\xff\xfe")),
        *(signed("[" * 100_000), signed("9" * 100_000), signed('{"a":' * 50_000)),
        *(signed("[]", length=2**63), signed("[]", length=2**64 - 1), signed("[]", length=1)),
    ],
    ids=range(11),
)
def test_no_text_takes_more_memory_than_it_has_bytes(message: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            decode(RankContribution, message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(message) + 2**20


def layer(**changes: Any) -> RankContribution:
    """Return a contribution with one layer of four rows."""
    found: LayerSums[Array] = LayerSums(
        About("gain"),
        Sampled(4, 8, np.zeros(4)),
        (Vector.G, Vector.E, Vector.OWN, Vector.REST),
        np.ones((4, 7)),
        Evidence(0.0),
        Dots(1.0),
        blocks=Blocks(2, np.ones((1, 1)), np.ones(4), np.ones(4), np.ones(4), np.ones(8)),
    )
    for name, value in changes.items():
        if name in ("sampled", "blocks"):
            value = value and replace(getattr(found, name), **value)
        found = replace(found, **{name: value})
    facts = Facts(True, 1.0, False, False, False, False)
    return RankContribution(StepReport(0, {}, {}, 1.0), {"x": found}, facts)


def test_numbers_that_do_not_go_with_each_other_are_refused() -> None:
    check(layer())
    wrong: list[dict[str, Any]] = [
        *({"products": np.ones((4, 6))}, {"products": np.ones((5, 7))}, {"products": np.ones(4)}),
        *({"realised": of} for of in (Moved(8, np.ones((4, 6))), Moved(3, np.ones((4, 7))))),
        *({"vectors": (Vector.G,)}, {"blocks": None}),
        {"scale": np.ones(3)},
        *({"blocks": {"sums": of}} for of in (np.ones(3), np.array(1.0))),
        *({"blocks": {"entries": of}} for of in (np.ones(7), np.ones((8, 1)))),
        *({"blocks": {"groups": groups}} for groups in (0, 2**40)),
        *({"sampled": {"seen": 3}}, {"sampled": {"seen": -1}}, {"sampled": {"total": 3}}),
        *(
            {"blocks": {"entry_rows": of}}
            for of in (np.array([0, 1]), np.array([*range(7), 2**40]))
        ),
        *({"sampled": {"keys": None}}, {"sampled": {"keys": np.zeros(3)}}, {"parameters": None}),
    ]
    for changes in wrong:
        with pytest.raises(Malformed):
            check(layer(**changes))


def test_an_attention_that_does_not_go_with_its_numbers_is_refused(
    known: tuple[RankContribution, StepReport],
) -> None:
    def changed(**values: Any) -> RankContribution:
        part = decode(RankContribution, encode(known[0]))
        part.attention["attend"] = replace(part.attention["attend"], **values)
        return part

    check(changed())
    sums = known[0].attention["attend"]
    assert sums.d is not None and sums.scale is not None
    seen, heads = sums.G_G.shape
    longer = np.ones((seen + 1, heads))
    wrong: list[dict[str, Any]] = [
        *({"G_G": of} for of in (np.ones(seen), longer, np.ones((seen, heads, 1)))),
        *({"e": replace(sums.e, G=of)} for of in (longer, np.ones(seen))),
        {"d": replace(sums.d, square=longer)},
        {"scale": replace(sums.scale, count=longer)},
        {"scale": replace(sums.scale, pivot=longer)},
        {"away": np.ones(2)},
        {"samples": seen - 1},
    ]
    for values in wrong:
        with pytest.raises(Malformed):
            check(changed(**values))


# --- contents of the store -----------------------------------------------------------------------

STEPS = 1_000
KEPT = ranks._KEPT


class World:
    """Several ranks in one process, which run in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.store, self.rank = dist.HashStore(), 0
        self.empty = self.store.num_keys()
        monkeypatch.setattr(ranks, "_store", lambda: self.store)
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)

    def join(self, rank: int) -> Exchange:
        self.rank = rank
        Exchange._attached.clear()  # each rank has its own
        return Exchange("anything")

    @property
    def keys(self) -> int:
        return self.store.num_keys() - self.empty


def test_a_thousand_reports_leave_no_more_keys_than_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few keys remain, though rank 2 never reads reports, and its contributions are left unread."""
    world = World(monkeypatch, 4)  # rank 3 never participates
    joined = [world.join(rank) for rank in range(3)]
    meeting, most = joined[0].meeting(), 0
    assert meeting is not None
    for step in range(STEPS):
        for exchange in joined[1:]:
            assert exchange.meeting() == meeting
            exchange.put(meeting, step, b"part %d" % step)
        assert joined[0].take(step, 1) == b"part %d" % step
        assert joined[0].take(step, 1) is None, "it is taken away"
        if step < STEPS // 2:
            assert joined[0].take(step, 2) == b"part %d" % step
        assert joined[0].take(step, 3) is None
        joined[0].put(meeting, step, b"report %d" % step)
        assert joined[1].get(meeting, step, 0) == b"report %d" % step
        most = max(most, world.keys)
    # Ranks present, their message lists, and the messages: reports, and unread contributions.
    assert most == 3 + 1 + 3 + 2 * KEPT
    assert joined[2].get(meeting, STEPS - KEPT, 0) == b"report %d" % (STEPS - KEPT)
    assert joined[2].get(meeting, STEPS - KEPT - 1, 0) is None
    for rank in (1, 0, 2):
        assert world.keys > 0
        joined[rank].leave()
    assert world.keys == 0


def test_the_last_report_is_there_after_the_first_process_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 2)
    first, second = world.join(0), world.join(1)
    meeting = second.meeting()
    assert meeting is not None
    second.put(meeting, 0, b"part")
    first.put(meeting, 0, b"report")
    first.leave()
    again = world.join(0)  # a new monitor is no reason to forget it
    assert second.meeting() == again.meeting() != meeting
    assert second.get(meeting, 0, 0) == b"report"
    second.leave()
    again.leave()
    assert world.keys == 0


def test_large_messages_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PIECE", 3)
    world = World(monkeypatch, 2)
    first, second = world.join(0), world.join(1)
    meeting = second.meeting()
    assert meeting is not None
    for step, message in enumerate((b"", b"abc", b"abcdefgh")):
        second.put(meeting, step, message)
        assert first.take(step, 1) == message
    assert world.keys == 4, "who is there, who is at the meeting, a list of messages"
    second.put(meeting, 3, b"abcdefgh")
    world.store.delete_key(f"{first._key}/{meeting}/box/1/3/1")
    assert first.take(3, 1) is None, "a piece is missing"
    for listed in (b"x", b"3", b"3:", b"3:99999", b"-3:1", b"3:1,4:1", b" ".join([b"1:1"] * 9)):
        world.store.set(f"{first._key}/{meeting}/box/1", listed.decode())
        assert first.take(3, 1) is None
    second.leave()
    first.leave()


def test_many_points_that_not_all_come_to_leave_no_more_keys_than_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few keys remain if only two ranks participate, and the last refuses, declines or is idle."""
    world, most = World(monkeypatch, 3), 0
    joined = [world.join(rank) for rank in range(3)]
    for step in range(STEPS):
        if step % 3 == 0:
            joined[2].refuse(step, "point")
        elif step % 3 == 1:
            joined[2].decline(step)
        assert not any(exchange.agree(step, "point", 0.0) for exchange in joined[:2])
        most = max(most, world.keys)
    assert most <= 3 + 1 + 3 * 2 * (KEPT + 1)
    for rank in (1, 0, 2):
        assert world.keys > 0
        joined[rank].leave()
    assert world.keys == 0


def test_nobody_is_told_yes_when_another_was_told_no_and_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks get the same answer, even if the last one pauses before it answers."""
    world = World(monkeypatch, 2)
    first, second = world.join(0), world.join(1)
    store, told = world.store, []

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def add(self, key: str, number: int) -> int:
            if not key.endswith("/came"):
                return store.add(key, number)
            world.store = store
            counts = []
            come = lambda: counts.append(store.add(key, number)) or [1]  # noqa: E731
            monkeypatch.setattr(first, "present", come)
            told.append(first.agree(3, "point", 0.01))
            first.leave()
            assert counts == [2], "the second is the last to come"
            return counts[0]

    world.store = Slow()  # type: ignore[assignment]
    told.append(second.agree(3, "point", 60.0))
    assert told == [False, False]
    second.leave()
    assert world.keys == 0


def test_what_the_first_process_decides_is_gone_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 2)
    told = ranks.Ranks("anything")
    told.tell(16, 32)
    world.rank = 1
    assert told.told(8, 9) == (16, 32)
    world.store.set(told._key, "16 what")
    assert told.told(8, 9) == (8, 9)
    world.store.set(told._key, "16")
    assert told.told(8, 9) == (8, 9)
    told.end()
    assert world.keys == 1, "others don't take it away"
    world.rank = 0
    told.end()
    assert world.keys == 0
