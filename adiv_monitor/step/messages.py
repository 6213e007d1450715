"""Messages between ranks: JSON, followed by the numbers of all arrays.

Anyone who can reach the ranks' store can write to it. So a message is pure data: nothing in it is
executed, and every value that is read has its field's type (`report/written.py`).
"""

import json
from collections.abc import Sequence

import numpy as np

from adiv_monitor.maths.records import numbers_of, with_numbers
from adiv_monitor.report import StepReport
from adiv_monitor.report.written import plain, read
from adiv_monitor.step.rank_contribution import Contribution, RankContribution

_END = b"\0"  # of the JSON, which never holds it


def encode(part: RankContribution) -> bytes:
    """Return a rank's contribution as bytes; in the JSON, arrays are replaced by their shapes."""
    arrays = [np.asarray(number, "<f8") for number in numbers_of(part)]
    shapes = [" ".join(map(str, array.shape)) for array in arrays]
    text = json.dumps(plain(with_numbers(part, shapes)))
    return text.encode() + _END + b"".join([array.tobytes() for array in arrays])


def decode(message: bytes) -> RankContribution:
    """Return the contribution in a message.

    Raises:
        ValueError: the message is not from `encode`.
    """
    text, _, rest = message.partition(_END)
    bare = read(Contribution, json.loads(text))
    shapes = [tuple(map(int, shape.split())) for shape in numbers_of(bare)]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes], dtype=np.int64)
    *arrays, surplus = np.split(np.frombuffer(rest, "<f8"), ends)
    if len(surplus):
        raise ValueError("the message is longer than its text says")
    pairs = zip(arrays, shapes, strict=True)
    return with_numbers(bare, [array.reshape(shape) for array, shape in pairs])


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
