"""Which line keeps the loss high? The edit of one call that lowers it far, if no cause is known."""

from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, told
from adiv_monitor.diagnosis.finding import Advice
from adiv_monitor.diagnosis.record import Record

FAR = 0.5  # of the loss: an edit that leaves less is the cause


def _is_far(record: Record) -> bool:
    facts = record.found_by("one-edit")
    return any(f.numbers["loss"] < FAR * abs(f.numbers["without"]) for f in facts)


told(__name__, "one-edit", "One line keeps the loss high", _is_far,
     "{place} keeps the loss high: {edit}, it ends at {loss:.3g} instead of {without:.3g}.",
     [Number("loss with the edit", "loss")],
     Advice("compare this line with what it should compute"),
     explains=LEARNING)  # fmt: skip
