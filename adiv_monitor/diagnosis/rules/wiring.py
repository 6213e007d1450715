"""Rules about wiring: whether all parameters and inputs take part in training."""

import math
from collections.abc import Iterator

from adiv_monitor.diagnosis.course import fell, is_long_enough
from adiv_monitor.diagnosis.finding import RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.readings import maps, named, typical
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.diagnosis.rules.initialisation import vanishing
from adiv_monitor.diagnosis.rules.rates import suffers
from adiv_monitor.diagnosis.rules.samples import cuts
from adiv_monitor.diagnosis.rules.units import ALL_DEAD, dead_share

# Smallest relative change of the outputs, when inputs are exchanged between samples, of a model
# that uses its inputs: rounding alone gives 1e-7.
INPUT_MATTERS = 1e-4
ALIKE = 1e-3  # scale_cv below which all rows count as equal
# The gain that torch initialises with, 1/√3, and the sampling error for some thousand weights.
UNTRAINED, ABOUT = 3**-0.5, 0.03
# torch draws entries within ±1/√fan-in. Rounding to 16 bits moves them beyond by less than this
# share; training usually moves some further.
ROUNDED = 0.01
# Share of the outputs' first variation that is left of it: the outputs are nearly the same.
COLLAPSED = 0.2
# What to do about outputs that are the same for all samples, by what makes them so.
FROM_CONSTANT = {
    "weight": "initialise its weight with other values than 0; that of a normalisation with 1",
    "norm": "normalise over more than one number, or remove the normalisation: one number minus "
            "its own mean is 0",
    "zeros": "initialise the layer in front of it again, or make it wider: no input of any sample "
             "passes",
}  # fmt: skip


def not_held(record: Record) -> Iterator[Finding]:
    """Find trainable parameters with a gradient that the optimizer does not hold."""
    names = record.wiring.not_held
    if names:
        yield Finding(
            "not-held",
            names,
            "act",
            (Evidence("parameters not held", len(names), 0),),
            (
                Advice(
                    "pass these parameters to the optimizer: create it after the model is "
                    "complete, or add a parameter group",
                    "hold-parameters",
                ),
                Advice("set requires_grad=False, if these parameters should not be trained"),
            ),
            f"The optimizer does not hold {_several(names)}. The loss has a gradient for "
            f"{'them' if len(names) > 1 else 'it'}, but the optimizer never changes "
            f"{'them' if len(names) > 1 else 'it'}.",
            "Another learning rate does not train them.",
            against=RATES,
        )


def unreached(record: Record) -> Iterator[Finding]:
    """Find trainable parameters that no gradient reaches."""
    if record.losses and not math.isfinite(record.losses[0]):
        return  # no gradient was computed at all
    unused = set(record.wiring.unused)
    names = tuple(n for n in record.wiring.unreached if n not in unused)
    if names:
        where = ", ".join(fact.place for fact in cuts(record)[:3])
        yield Finding(
            "unreached",
            names,
            "act",
            (Evidence("parameters without a gradient", len(names), 0),),
            (
                Advice(f"remove the detach(), .data or torch.no_grad() at {where}", "uncut")
                if where else
                Advice("look for .detach(), .data, .item(), torch.no_grad() or argmax between "
                       "these layers and the loss"),
            ),
            f"The loss depends on {_several(names)}, but no gradient comes back: the graph is cut"
            + (f" at {where}." if where else "."),
            "No optimizer and no learning rate can train parameters without a gradient.",
            against=RATES,
        )  # fmt: skip
    unused_names = record.wiring.unused
    if unused_names:
        yield Finding(
            "unreached",
            unused_names,
            "watch",
            (Evidence("parameters that the loss does not depend on", len(unused_names), 0),),
            (Advice("use the outputs of these modules in forward(), or remove the modules"),),
            f"The loss does not depend on {_several(unused_names)}: no step trains "
            f"{'them' if len(unused_names) > 1 else 'it'}.",
        )


def frozen(record: Record) -> Iterator[Finding]:
    """Find parameters with requires_grad=False; they are unlikely to be meant if untrained."""
    names = record.wiring.frozen
    if not names:
        return
    paths = {name.rpartition(".")[0] for name in names}
    untrained = {
        path: w.gain for path, w in record.weights.items()
        if path in paths and abs(w.gain - UNTRAINED) < ABOUT and w.largest < 1 + ROUNDED
    }  # fmt: skip
    yield Finding(
        "frozen",
        names,
        "act" if untrained and suffers(record) else "watch",
        (
            Evidence("frozen parameters", len(names)),
            *(Evidence("gain", gain, UNTRAINED, path, 0) for path, gain in untrained.items()),
        ),
        (Advice("set requires_grad=True, unless these parameters should stay frozen", "unfreeze"),),
        f"No step trains {_several(names)}: requires_grad is False."
        + (f" The weights of {named(record, next(iter(untrained)))} look like torch's "
           "initialisation, so they were probably never trained." if untrained else ""),
    )  # fmt: skip


def input_lost(record: Record) -> Iterator[Finding]:
    """Find inputs that are lost before the first layer, which causes other findings."""
    paths = maps(record)
    spread = typical(record, paths[0], "scale_cv") if paths else None
    silent = spread is None and record.wiring.input_matters == 0  # no row has a gradient
    if (silent and dead_share(record) < ALL_DEAD) or (spread is not None and spread.value < ALIKE):
        yield from _ignored(record)


def input_ignored(record: Record) -> Iterator[Finding]:
    """Find inputs that make no difference, unless dead units or vanishing gradients explain it."""
    explained = dead_share(record) > ALL_DEAD or any(vanishing(record))
    if not explained and not any(input_lost(record)):
        yield from _ignored(record)


def _ignored(record: Record) -> Iterator[Finding]:
    matters = record.wiring.input_matters
    if matters < INPUT_MATTERS:
        yield Finding(
            "input-ignored",
            (),
            "act",
            (Evidence("input_matters", matters, INPUT_MATTERS),),
            (
                Advice("follow one batch through forward(): look for inputs that are multiplied by "
                       "zero, overwritten or not used"),
            ),
            "The outputs hardly change when inputs are exchanged between samples: the model does "
            "not use its inputs.",
            "With more steps or another learning rate, the model can only learn how frequent each "
            "answer is.",
            against=RATES,
        )  # fmt: skip


def outputs_constant(record: Record) -> Iterator[Finding]:
    """Find the module from which on nothing varies over samples, unless all its units are dead."""
    facts = record.found_by("outputs-constant")
    if not facts or record.found_by("softmax-of-one"):
        return
    fact = facts[0]
    by = fact.words["by"]
    if by == "zeros" and dead_share(record) > ALL_DEAD:
        return
    stands = is_long_enough(record) and bool(record.losses) and not fell(record)
    yield Finding(
        "outputs-constant",
        (fact.place,),
        "act" if stands or suffers(record) else "watch",
        (Evidence("share of the outputs that varies", fact.numbers["share"], 1e-6, fact.place, 0),),
        (Advice(FROM_CONSTANT.get(by, "look at what reaches this layer: next to its bias, it is "
                                      "too small to make a difference")),),
        f"At the start, the outputs of {fact.words['class']} '{fact.place}' are the same for all "
        "samples, although its inputs are not. The model's outputs are the same, too: what follows "
        "this module can only learn a constant.",
        since=0,
    )  # fmt: skip


def collapsed(record: Record) -> Iterator[Finding]:
    """Find outputs that become the same for all samples, because the loss is lowest there.

    A stop-gradient may keep them apart in the end: outputs that still vary are only to be watched.
    """
    for fact in record.found_by("collapsed"):
        before, after = fact.numbers["before"], fact.numbers["after"]
        yield Finding(
            "collapsed",
            (),
            "act" if after < COLLAPSED * before else "watch",
            (Evidence("share of the outputs that varies", after, COLLAPSED * before),),
            (Advice("add what keeps the outputs of different samples apart: negative pairs, a "
                    "term for their variance, or a stop-gradient on one of two views behind a "
                    "predictor"),),
            f"The outputs of different samples become alike: {before:.2g} of their mean square "
            f"varies between samples at the start, {after:.2g} after training. If all samples had "
            f"the same outputs, whichever these are, the loss would be {fact.numbers['loss']:.3g}, "
            "as low as after training: it does not keep samples apart.",
            "Another learning rate leads to the same outputs, sooner or later.",
            against=RATES,
        )  # fmt: skip


def _several(names: tuple[str, ...]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the {'parameters' if len(names) > 1 else 'parameter'} {shown}{more}"
