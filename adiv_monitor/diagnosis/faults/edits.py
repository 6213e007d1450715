"""Which line keeps the loss high? The edit of one call that lowers it far, if no cause is known."""

from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, told
from adiv_monitor.diagnosis.finding import Advice
from adiv_monitor.diagnosis.record import Record

# Share of the loss that an edit leaves at most. A function that is left out may have slowed a
# healthy training.
REARRANGED, LEFT_OUT = 0.5, 0.4


def _is_of_model(record: Record) -> bool:
    """Return whether the line is the model's; an edit of the loss may make another loss."""
    return any(fact.words["of"] == "model" for fact in record.found_by("one-edit"))


told(__name__, "one-edit", "One line keeps the loss high", _is_of_model,
     "With one line changed, the loss ends at {loss:.3g} instead of {without:.3g}: {place} {edit}.",
     [Number("loss with the change", "loss")],
     Advice("check what this line should compute: the change shows that it is wrong, not that the "
            "change is right"),
     explains=LEARNING)  # fmt: skip
