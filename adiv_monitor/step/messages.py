"""Messages between ranks: JSON, followed by the bytes of all tables.

Anyone who can reach the ranks' store can write to it. So a message is pure data: nothing in it is
executed, every value that is read has its field's type (`report/written.py`), and lines of tables
belong to layers that are there.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from adiv_monitor.maths.attention_sums import AttentionSums, combined, tensors_of
from adiv_monitor.maths.sums import KINDS, About, StepSums
from adiv_monitor.report import StepReport
from adiv_monitor.report.written import plain, read
from adiv_monitor.step.rank_contribution import RankContribution

_END = b"\0"  # of the JSON, which never holds it


@dataclass(frozen=True)
class _Text:
    """What the JSON holds of the numbers.

    Attributes:
        paths: as in `StepSums`.
        about: as in `StepSums`.
        lines: number of lines of each table.
        attention: the records of attention, with shapes in place of arrays.
    """

    paths: tuple[str, ...]
    about: tuple[About, ...]
    lines: tuple[int, ...]
    attention: dict[str, AttentionSums[Any]]


_APART = ("sums", "attention")  # fields of `RankContribution` that hold arrays


def encode(part: RankContribution) -> bytes:
    """Return a rank's contribution as bytes."""
    sums, calls = part.sums, part.attention
    tables = [getattr(sums, name) for name in KINDS]
    shapes = {path: combined(lambda x: x.shape, call) for path, call in calls.items()}
    text = _Text(sums.paths, sums.about, tuple(map(len, tables)), shapes)
    rest = {f.name: getattr(part, f.name) for f in fields(part) if f.name not in _APART}
    arrays = [np.asarray(x, "<f8") for call in calls.values() for x in tensors_of(call)]
    said = json.dumps([plain(rest), plain(text)]).encode()
    return said + _END + b"".join([array.tobytes() for array in (*tables, *arrays)])


def decode(message: bytes) -> RankContribution:
    """Return the contribution in a message.

    Raises:
        ValueError: the message is not from `encode`.
    """
    said, _, rest = message.partition(_END)
    plain = json.loads(said)
    if not isinstance(plain, list) or len(plain) != 2:
        raise ValueError("the message is no contribution")
    part, text, at = read(RankContribution, plain[0]), read(_Text, plain[1]), 0

    def taken(kind: Any, *shape: int) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(rest, kind, math.prod(shape), at).reshape(shape)
        at += found.nbytes
        return found

    tables = [taken(kind, n) for kind, n in zip(KINDS.values(), text.lines, strict=True)]
    attention = {
        path: combined(lambda shape: taken("<f8", *shape), call)
        for path, call in text.attention.items()
    }
    sums = StepSums(text.paths, text.about, *tables)
    if at != len(rest) or not sums.is_sound:
        raise ValueError("the numbers in the message do not fit its text")
    return replace(part, sums=sums, attention=attention)


def encode_report(report: StepReport, ranks: Sequence[int]) -> bytes:
    """Return a report and the ranks that it covers as bytes."""
    return json.dumps({"ranks": list(ranks), "report": plain(report)}).encode()


def decode_report(message: bytes) -> tuple[StepReport, list[int]]:
    """Return the report in a message, and the ranks that it covers.

    Raises:
        ValueError: the message is not from `encode_report`.
    """
    plain = json.loads(message)
    if not isinstance(plain, dict):
        raise ValueError("the message is no report")
    return StepReport.from_dict(plain.get("report", {})), [*map(int, plain.get("ranks", ()))]
