"""Does the model keep samples, axes, positions and paths of the gradient apart?

In the order of the model: are samples or axes mixed, is the gradient cut, are activation functions
or attention without effect, and are parts of the inputs, or their order, ignored?
"""

from collections.abc import Iterator

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.course import is_opposed
from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, fault, finds, told
from adiv_monitor.diagnosis.faults.initialisation import INPUT_MATTERS
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.units import dead_units, saturated_units
from adiv_monitor.diagnosis.finding import Advice, Evidence, Finding, act_if
from adiv_monitor.diagnosis.record import Fact, Record
from adiv_monitor.report.wording import listed

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # kinds of layers
UNREAD = 0.5  # share of a recurrent layer's rows that get no gradient; more is told
OPPOSES = -0.7  # cosine of the gradient with the part that is cut off; −1 between two players
TURNED = 0.99  # cosine of the gradient with the gradient without the cut


@fault("samples-mixed", "Predictions depend on other samples",
       explains=(*LEARNING, "input-partly-ignored"), acts_below=1.0)  # fmt: skip
def samples_mixed(record: Record) -> Iterator[Finding]:
    """Find predictions for one sample that change with another sample's input, or its place."""
    for fact in record.found_by("samples-mixed"):
        share = fact.numbers["share"]
        by = "its place in the batch" if "by" in fact.words else "another sample's input"
        yield Finding("samples-mixed", act_if(suffers(record)),
            f"The predictions for a sample change with {by} ({share:.0%} of the outputs do)."
            + f" The first function that mixes samples is {fact.place}." * bool(fact.place),
            (Evidence("share of outputs that change", share,
                      1.2 * fact.numbers.get("independent", 0.0)),),
            (Advice("look in forward() for layers without batch_first=True, for a table along axis "
                    "0, the axis of the samples, and for a mean, a softmax, attention or a reshape "
                    "over it"),))  # fmt: skip


@finds("monitor")
def samples_for_times(record: Record) -> Iterator[Finding]:
    """Find recurrent layers of which always one row in so many counts, whatever the batch is.

    So it is if results are read at the last place of the samples' axis, taken for the times. Layers
    in reverse are left out: of their last time, only the first row counts.
    """
    if not read.several(record) or len({report.batch for report in record.reports}) < 2:
        return
    for path, kind in {p: x.kind for r in record.reports for p, x in r.layers.items()}.items():
        if kind in RECURRENT and not path.endswith("_reverse"):
            shares = {x.idle_share for x in read.readings(record, path).values()}
            share = shares.pop() or 0.0
            places = 1 / (1 - share) if share < 1 else 0.0
            if not shares and share > UNREAD and abs(places - round(places)) < 0.01:
                yield Finding("samples-mixed", act_if(suffers(record)),
                    f"In every measured step, {share:.1%} of the rows of "
                    f"{read.named(record, path)} have no gradient: what reads its results, such as "
                    "[:, -1], seems to take the axis of its samples for that of the times.",
                    (Evidence("idle_share", share, UNREAD, path),),
                    (Advice("give the layer batch_first=True, or (times, samples, features)"),),
                    layers=(path,))  # fmt: skip
                return


told(__name__, "reshape-scrambles", "A reshape that scrambles axes",
     # Positions that get to see later ones lower the loss, so that the run does not suffer.
     lambda record: suffers(record) or record.found_by("future-leak"),
     "{place} reshapes {of} to {to} across the axes, and mixes positions.",
     Advice("exchange axes with permute, not with view, unless a shift is intended"),
     explains=(*LEARNING, "future-leak"))  # fmt: skip


@fault("gradient-cut", "The gradient is cut on one of its paths", explains=LEARNING,
       acts_below=0.3)  # fmt: skip
def gradient_cut(record: Record) -> Iterator[Finding]:
    """Find cuts in front of parameters that gradients still reach on other paths.

    If no path is left, `unreached` names the cut instead.
    """
    facts = cuts(record)
    if facts and not set(record.wiring.unreached) - set(record.wiring.unused):
        yield Finding("gradient-cut", "watch",
            f"The gradient is cut at {', '.join(fact.place for fact in facts[:3])}, in front of "
            "parameters that the loss depends on.",
            (Evidence("cosine with the gradient without it", facts[0].numbers["cosine"], TURNED),),
            (Advice("draw samples as mean + std * noise, as rsample() does" if facts[0].words else
                    "remove the detach() there, unless it is intended", "uncut"),))  # fmt: skip


def cuts(record: Record) -> list[Fact]:
    """Return where the gradient is cut, if it turns when the cut is removed.

    Between two players, the part that is cut off opposes the other.
    """
    facts = [f for f in record.found_by("gradient-cut") if f.numbers["cosine"] < TURNED]
    opposed = is_opposed(record)
    return [f for f in facts if not opposed or f.numbers.get("removed", -1.0) > OPPOSES]


told(__name__, "no-activation", "Activation functions without effect", suffers,
     "Nothing uses the result of {place}.",
     Advice("assign the result: x = relu(x), not relu(x)"),
     where=lambda fact: fact.words["by"] == "lost", explains=LEARNING, acts_below=0.8)  # fmt: skip
told(__name__, "no-activation", "", suffers,
     "The outputs of {layers:.0f} layers are an affine function of the inputs.",
     Number("layers of an affine model", "layers"),
     Advice("put an activation function between the layers", "relu-between"),
     where=lambda fact: fact.words["by"] == "affine")  # fmt: skip


told(__name__, "attention-axis", "Attention weights summed over another axis", suffers,
     "{place} makes weights of shape {shape} that sum to 1 along axis {axis}, but {product} sums "
     "over axis {over}.",
     Advice("take the softmax over the keys, usually dim=-1"),
     explains=(*LEARNING, "future-leak"))  # fmt: skip


@fault("input-partly-ignored", "Parts of the inputs are ignored", explains=("input-ignored",))
def input_partly_ignored(record: Record) -> Iterator[Finding]:
    """Find places, features or patches that no output depends on, before and after training."""
    if facts := record.found_by("input-partly-ignored"):
        # Where units or steps are flat, no input gets through: that is another finding. An argument
        # of the model that is not used may be meant for others.
        flat = any(dead_units(record)) or any(saturated_units(record))
        flat |= bool(record.found_by("zero-slope"))
        unused = all("whole" in fact.words for fact in facts)
        harms = suffers(record) or record.wiring.input_matters < INPUT_MATTERS
        yield Finding("input-partly-ignored", act_if(harms and not flat and not unused),
            f"No output depends on {listed([fact.place for fact in facts])} (shape "
            f"{facts[0].words['shape']}), neither before nor after training.",
            (Evidence("share of the parts", facts[0].numbers["share"], 0.0),),
            (Advice("follow these parts through forward(): look for masks (does True keep or "
                    "ignore?), slices such as [:, -1], overwritten tensors, and divisions of whole "
                    "numbers"),), since=0)  # fmt: skip


# The inputs may be sets, and positions may help a short run whatever the order says: never "act".
told(__name__, "order-ignored", "The order of positions is ignored", "watch",
     "The outputs do not depend on the order of the {places:.0f} positions of an input.",
     Number("positions whose order does not matter", "places"),
     Advice("add position embeddings, unless the inputs are sets", "positions"),
     often_meant=True)  # fmt: skip
