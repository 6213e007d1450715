"""Which parameters are not trained, and why?

Along the way of a parameter: is it held, registered, reached by the gradient, and given a
learning rate; does its step survive rounding; and is its layer in training
mode?
"""

import math
from collections.abc import Iterator
from itertools import takewhile
from statistics import median

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults import could_train
from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, fault, finds, loop_fault, told
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.samples import cuts
from adiv_monitor.diagnosis.finding import LOWER_RATES, Advice, Evidence, Finding, act_if
from adiv_monitor.diagnosis.readings import by_layer, these, worst_first
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report.wording import listed, percent

# Share of the entries with a gradient that a step leaves equal to the last bit: 81 % with faulty
# bfloat16 weights, at most 2.6 % elsewhere.
ROUNDED_AWAY = 0.5
OF_FLOAT32 = 1e-6  # weight_update_ratio: steps of 16-bit weights that change any entry are longer


@fault("not-held", "Parameters that the optimizer does not hold", about="loop", certain=True,
       explains=LEARNING, shown_by=read.reported("trainable"))  # fmt: skip
def not_held(record: Record) -> Iterator[Finding]:
    """Find parameters with a gradient that are in no group, or that no measured step changed."""
    names, audited = record.wiring.not_held, record.is_audited
    late = record.reports[max(1, len(record.reports) // 2) :]  # some are unfrozen on the way
    paths, share = ((), 0.0) if audited else could_train.share_of(record, "not_held", late)
    if names or paths:
        what = f"the parameters of {these(record, paths)}" if paths else _several(names)
        yield Finding("not-held", could_train.strength(record) if paths else "act",
            f"The optimizer does not hold {what}: there is a gradient, but nothing changes them.",
            (Evidence("share of the trainable parameters", share, could_train.LEAST_SHARE)
             if paths else Evidence("parameters not held", len(names), 0),),
            (Advice("pass these parameters to the optimizer: create it after the model is "
                    "complete, with modules in nn.ModuleList (not a plain list), or add a group"),
             Advice("set requires_grad=False, if these parameters should not be trained")),
             layers=paths or names)  # fmt: skip


told(__name__, "hidden-parameters", "Parameters that are not registered", "act",
     "No step trains the parameters of {all_places}, that the model does not register, as in plain "
     "lists, dictionaries and tensors.",
     Number("share of all parameters", "share"),
     Advice("put modules into nn.ModuleList or nn.ModuleDict and tensors into nn.Parameter, then "
            "make the optimizer"),
     where=lambda fact: not fact.words, certain=True, explains=LEARNING)  # fmt: skip
told(__name__, "hidden-parameters", "", "act",
     "No step trains the parameters of {all_places}, that forward() makes anew in each step, with "
     "random values.",
     Number("share of all parameters", "share"),
     Advice("make the module or the parameter once, in __init__(), then the optimizer"),
     where=lambda fact: "made" in fact.words)  # fmt: skip
told(__name__, "hidden-parameters", "", suffers,
     "The loss has parameters of its own, {all_places}, that the optimizer does not hold: no step "
     "trains them.",
     Advice("give the optimizer those of both: [*model.parameters(), *loss.parameters()]"),
     where=lambda fact: "of" in fact.words)  # fmt: skip


@loop_fault("unreached", "Parameters that no gradient reaches", shown_by=read.reported("trainable"),
       certain=True, explains=(*LEARNING, "no-activation"))  # fmt: skip
def cut_off(record: Record) -> Iterator[Finding]:
    """Find modules that ran before the first trained layer, and that no gradient reaches."""
    paths, share = could_train.share_of(record, "cut_off", record.reports)
    if paths:
        yield Finding("unreached", could_train.strength(record),
            f"No gradient reaches {these(record, paths)}, with {percent(share)} of the trainable "
            "parameters: what the next layer gets from them has no gradient.",
            (Evidence("share of the trainable parameters", share, could_train.LEAST_SHARE),),
            (Advice("look for detach(), .data, .item() or no_grad() behind these layers"),
             Advice("set requires_grad=False, if these parameters should not be trained")),
             layers=paths)  # fmt: skip


@finds()
def unreached(record: Record) -> Iterator[Finding]:
    """Find trainable parameters that no gradient reaches."""
    if record.losses and not math.isfinite(record.losses[0]):
        return  # no gradient was computed at all
    unused = record.wiring.unused
    if names := tuple(n for n in record.wiring.unreached if n not in {*unused}):
        where = ", ".join(fact.place for fact in cuts(record)[:3])
        yield Finding("unreached", "act",
            f"The loss depends on {_several(names)}, but no gradient comes back: the graph is "
            f"cut{' at ' + where if where else ''}.",
            (Evidence("parameters without a gradient", len(names), 0),),
            (Advice("remove the detach(), .data, .item(), torch.no_grad() or argmax between these "
                    "layers and the loss", "uncut" if where else None),), layers=names)  # fmt: skip
    if unused:
        yield Finding("unreached", "watch", f"The loss does not depend on {_several(unused)}.",
            (Evidence("parameters that the loss does not depend on", len(unused), 0),),
            (Advice("use the outputs of these modules, in the loss too, or remove the modules"),),
            layers=unused)  # fmt: skip


def _several(names: tuple[str, ...]) -> str:
    return "the parameters " + listed([f"'{name}'" for name in names])


@fault("rate-zero", "A learning rate of zero", about="loop", certain=True, explains=LEARNING)
def rates_zero(record: Record) -> Iterator[Finding]:
    """Find a learning rate, of all parameter groups or of some, that is zero in all steps."""
    reports = record.reports
    largest = [*map(max, zip(*(r.learning_rates for r in reports), strict=False))]
    groups = reports[-1].groups.items() if reports and any(largest) else ()
    still = [path for path, group in groups if group < len(largest) and not largest[group]]
    if read.several(record) and largest and (still or not any(largest)):
        of = f" of {these(record, still)}" if still else ""
        yield Finding("rate-zero",
            could_train.strength(record) if still and not record.is_audited else "act",
            f"The learning rate{of} is zero in all measured steps.",
            (Evidence("learning rate", 0.0, 0.0),),
            (Advice("give this parameter group a learning rate; if a scheduler set it to 0, look "
                    "for an integer division"),),
            "Any multiple of a learning rate of zero is zero.", layers=tuple(still))  # fmt: skip


@fault("rounded-away", "Steps lost to rounding", explains=LEARNING, acts_below=1.0,
       shown_by=read.stepped)  # fmt: skip
def rounded(record: Record) -> Iterator[Finding]:
    """Find steps that leave most entries with a gradient unchanged in most layers that move."""
    moves = by_layer(record, "weight_update_ratio")
    shares = {p: x.value for p, x in by_layer(record, "unchanged_share").items()
              if x.value < 1 and (p not in moves or moves[p].value > OF_FLOAT32)}  # fmt: skip
    lost = read.several(record) and shares and median(shares.values()) > ROUNDED_AWAY
    if lost and not any(could_train.rate_gone(record)):  # steps without a rate are lost anyway
        layers = worst_first(shares)
        yield Finding("rounded-away", act_if(suffers(record)),
            f"A step leaves {shares[layers[0]]:.0%} of the entries of {these(record, layers[:1])} "
            "that have a gradient unchanged to the last bit: it is smaller than the weights' last "
            "digit.",
            (Evidence("unchanged_share", shares[layers[0]], ROUNDED_AWAY, layers[0]),),
            (Advice("keep the weights in float32, under torch.autocast", "float32-weights",
                    everywhere=True),),
            "A lower learning rate makes even more steps too small.", layers=layers,
            against=LOWER_RATES)  # fmt: skip


@loop_fault("left-in-eval", "Layers left in eval mode", shown_by=read.several, explains=LEARNING)
def whole_model_in_eval(record: Record) -> Iterator[Finding]:
    """Find a model that is in eval mode as a whole in more than the last half of the run."""
    last = [*takewhile(lambda report: report.evaluated, reversed(record.reports))]
    half = (record.reports[-1].step - record.reports[0].step) / 2 if last else 0
    if len(last) >= could_train.FEWEST_MEASURED and last[0].step - last[-1].step > half:
        paths = record.reports[-1].evaluated
        yield Finding("left-in-eval", could_train.strength(record),
            "The whole model is in eval mode as it trains: dropouts drop nothing, and "
            "normalisations use their running statistics, which no step updates.",
            (Evidence("dropouts and normalisations in eval mode", len(paths), 0),),
            (Advice("call model.train() before the training, and again after each evaluation"),),
            layers=paths, since=last[-1].step)  # fmt: skip


told(__name__, "left-in-eval", "", suffers,
     "These normalisations are in eval mode while the model trains: {all_places}. Their running "
     "mean is still 0 and their variance 1, so they normalise nothing.",
     Advice("call train() on these modules before training, and look for eval() in a train() of "
            "the model's own"),
     of_modules=True)  # fmt: skip
