"""Which line keeps the loss high? The edit of one call that lowers it far, if no cause is known."""

from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, told
from adiv_monitor.diagnosis.finding import Advice
from adiv_monitor.diagnosis.record import Record

# Share of the loss that an edit leaves. A rearrangement that leaves less finds a wrong order; a
# function that is left out may have slowed a healthy training. Of what leaves less than `FAR` the
# loss suffers.
REARRANGED, LEFT_OUT, FAR = 0.75, 0.4, 0.5


def _is_far(record: Record) -> bool:
    """Return whether an edit of the model leaves far less of the loss."""
    facts = [f for f in record.found_by("one-edit") if f.words["of"] == "model"]
    return any(f.numbers["loss"] < FAR * abs(f.numbers["without"]) for f in facts)


told(__name__, "one-edit", "One line keeps the loss high", _is_far,
     "With one line changed, the loss ends at {loss:.3g} instead of {without:.3g}: {place} {edit}.",
     [Number("loss with the change", "loss")],
     Advice("check what this line should compute: the change shows that it is wrong, not that the "
            "change is right"),
     explains=LEARNING)  # fmt: skip
