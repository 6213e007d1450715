"""A rank's contribution to a report, and messages between ranks.

A message is an archive of arrays, the first of which is JSON.

Anyone who can reach the ranks' store can write to it. So a message is pure data: nothing in it is
executed, and every value that is read has its field's type (`report/written.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from io import BytesIO

import numpy as np

from adiv_monitor.maths.sums import KINDS, NO_SUMS, About, Array, StepSums
from adiv_monitor.report import StepReport
from adiv_monitor.report.written import plain, read


@dataclass
class RankContribution:
    """A rank's contribution to a report.

    Attributes:
        report: the report, without readings of layers and attentions. Realised changes are those
            of this rank's samples, `losses` those of its batches; `alignment` is already that of
            all ranks.
        sums: the numbers of the layers whose rows are known.
        refused: why the step can't be measured at all; empty if it can.
        rows_lost: paths of layers that had rows here but are not in `sums`.
        attention: records of attentions by path, see `maths/scores.py`.
        no_attention: path → why there is no record.
    """

    report: StepReport
    sums: StepSums = NO_SUMS
    refused: tuple[str, ...] = ()
    rows_lost: tuple[str, ...] = ()
    attention: dict[str, Array] = field(default_factory=dict)
    no_attention: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Text:
    """What the JSON holds of the numbers.

    Attributes:
        paths: as in `StepSums`.
        about: as in `StepSums`.
        attention: the attentions that have a record.
    """

    paths: tuple[str, ...]
    about: tuple[About, ...]
    attention: tuple[str, ...]


_APART = ("sums", "attention")  # fields of `RankContribution` that hold arrays


def encode(part: RankContribution) -> bytes:
    """Return a rank's contribution as bytes."""
    sums = part.sums
    text = _Text(sums.paths, sums.about, tuple(part.attention))
    rest = {f.name: getattr(part, f.name) for f in fields(part) if f.name not in _APART}
    said = json.dumps([plain(rest), plain(text)]).encode()
    tables = (getattr(sums, name) for name in KINDS)
    of_attention = part.attention.values()
    np.savez(message := BytesIO(), np.frombuffer(said, np.uint8), *tables, *of_attention)
    return message.getvalue()


def decode(message: bytes) -> RankContribution:
    """Return the contribution in a message.

    Raises:
        ValueError: the message is not from `encode`.
    """
    with np.load(BytesIO(message), allow_pickle=False) as held:
        said, *arrays = (held[name] for name in held.files)
    told, rest = json.loads(said.tobytes()), iter(arrays)
    part, text = read(RankContribution, told[0]), read(_Text, told[1])
    sums = StepSums(text.paths, text.about, *(next(rest) for _ in KINDS))
    return replace(part, sums=sums, attention=dict(zip(text.attention, rest, strict=True)))


def encode_report(report: StepReport, ranks: Sequence[int]) -> bytes:
    """Return a report and the ranks that it covers as bytes."""
    return json.dumps({"ranks": list(ranks), "report": plain(report)}).encode()


def decode_report(message: bytes) -> tuple[StepReport, list[int]]:
    """Return the report in a message, and the ranks that it covers.

    Raises:
        ValueError: the message is not from `encode_report`.
    """
    told = json.loads(message)
    if not isinstance(told, dict):
        raise ValueError("the message is no report")
    return StepReport.from_dict(told.get("report", {})), [*map(int, told.get("ranks", ()))]
