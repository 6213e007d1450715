"""Which parameters are not trained, and why?

Along the way of a parameter: is it held, registered, reached by the gradient, meant to be trained,
and given a learning rate; does its step survive rounding, ε and hooks; is its gradient that of the
loss; and is its layer in training mode?
"""

import math
from collections.abc import Iterator
from itertools import takewhile

from adiv_monitor.diagnosis.faults.could_train import (
    FEWEST_MEASURED,
    LEAST_SHARE,
    share_of,
    strength,
)
from adiv_monitor.diagnosis.faults.fault import LEARNING, fault, finds, reported, several
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.faults.samples import cuts, places
from adiv_monitor.diagnosis.finding import LOWER_RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.phases import learning_rate
from adiv_monitor.diagnosis.readings import named, these
from adiv_monitor.diagnosis.record import Fact, Record
from adiv_monitor.report.wording import listed, percent

# The gain that torch initialises with, 1/√3, and the sampling error for some thousand weights.
UNTRAINED, ABOUT = 3**-0.5, 0.03
# torch draws entries within ±1/√fan-in. Rounding to 16 bits moves them beyond by less than this
# share; training usually moves some further.
ROUNDED = 0.01
# Share of the entries with a gradient whose √v̂ is below ε: then most of a step is not adapted.
EPSILON = 0.5
# Share of the entries with a gradient that a step leaves equal to the last bit: 81 % with faulty
# bfloat16 weights, at most 2.6 % elsewhere.
ROUNDED_AWAY = 0.5
# Limits of the ratio of the applied gradient's length to the backward pass's, and of their cosine.
CHANGED_LENGTH, TURNED = 10.0, 0.9
# Limits of the decrease of the loss along its gradient, over the one that the gradient predicts.
LEAST_AS_PREDICTED, MOST_AS_PREDICTED = 0.9, 1.1


@fault(
    "not-held",
    "Parameters that the optimizer does not hold",
    shown_by=reported("trainable"),
    about="loop",
    certain=True,
    explains=LEARNING,
)
def not_held(record: Record) -> Iterator[Finding]:
    """Find parameters with a gradient that are in no group, or that no measured step changed."""
    names, audited = record.wiring.not_held, record.is_audited
    paths, share = ((), 0.0) if audited else share_of(record, "not_held", record.reports[1:])
    if names or paths:
        yield Finding("not-held", strength(record) if paths else "act",
            f"The optimizer does not hold the parameters of {these(record, paths)}, "
            f"{percent(share)} of the trainable ones: they have a gradient, and nothing changes "
            "them." if paths else
            f"The optimizer does not hold {_several(names)}. The loss has a gradient for "
            f"{_them(names)}, but the optimizer never changes {_them(names)}.",
            (Evidence("share of the trainable parameters", share, LEAST_SHARE) if paths else
             Evidence("parameters not held", len(names), 0),),
            (Advice("pass these parameters to the optimizer: create it after the model is "
                    "complete, or add a parameter group", "hold-parameters" if audited else None),
             Advice("set requires_grad=False, if these parameters should not be trained")),
            "Another learning rate does not train them.", layers=paths or names)  # fmt: skip


@fault("hidden-parameters", "Parameters that are not registered", certain=True, explains=LEARNING)
def hidden_parameters(record: Record) -> Iterator[Finding]:
    """Find parameters in plain lists or tensors, and parameters that forward() makes anew."""
    facts = record.found_by("hidden-parameters")
    if anew := [fact for fact in facts if "made" in fact.words]:
        yield Finding("hidden-parameters", "act",
            f"{anew[0].place} uses a parameter that forward() makes anew in each step: its values "
            "are random each time, and no step trains them."
            + f" Number of further such places: {len(anew) - 1}." * (len(anew) > 1),
            (Evidence("share of all parameters", anew[0].numbers["share"], 0),),
            (Advice("make the module or the parameter once, in __init__(), then the optimizer"),),
            "No learning rate trains a parameter that lives for one step.", since=0)  # fmt: skip
    if held := [fact for fact in facts if "made" not in fact.words]:
        yield Finding("hidden-parameters", "act",
            f"forward() uses {places(held)}, but the model does not register them as parameters: "
            "torch finds no parameters in plain lists, dictionaries and tensors. The optimizer "
            "does not change them.",
            (Evidence("share of all parameters", sum(f.numbers["share"] for f in held), 0),),
            (Advice("put modules into nn.ModuleList or nn.ModuleDict and tensors into "
                    "nn.Parameter, then make the optimizer"),),
            "Another learning rate does not train them.", since=0)  # fmt: skip


@fault(
    "unreached",
    "Parameters that no gradient reaches",
    shown_by=reported("trainable"),
    of="monitor",
    about="loop",
    certain=True,
    explains=LEARNING,
)
def cut_off(record: Record) -> Iterator[Finding]:
    """Find modules that ran before the first trained layer, and that no gradient reaches."""
    paths, share = share_of(record, "cut_off", record.reports)
    if not paths:
        return
    yield Finding("unreached", strength(record),
        f"No gradient reaches {these(record, paths)}, with {percent(share)} of the trainable "
        "parameters: they run in each measured step, but what the next layer gets has no gradient.",
        (Evidence("share of the trainable parameters", share, LEAST_SHARE),),
        (Advice("look for .detach(), .data, .item(), torch.no_grad() or argmax behind the last of "
                "these layers"),
         Advice("set requires_grad=False, if these parameters should not be trained")),
        "No optimizer and no learning rate can train parameters without a gradient.",
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
            f"The loss depends on {_several(names)}, but no gradient comes back: the graph is cut"
            + (f" at {where}." if where else "."),
            (Evidence("parameters without a gradient", len(names), 0),),
            (Advice(f"remove the detach(), .data or torch.no_grad() at {where}", "uncut")
             if where else
             Advice("look for .detach(), .data, .item(), torch.no_grad() or argmax between these "
                    "layers and the loss"),),
            "No optimizer and no learning rate can train parameters without a gradient.",
            layers=names)  # fmt: skip
    if unused:
        yield Finding("unreached", "watch",
            f"The loss does not depend on {_several(unused)}: no step trains {_them(unused)}.",
            (Evidence("parameters that the loss does not depend on", len(unused), 0),),
            (Advice("use the outputs of these modules in forward(), or remove the modules"),),
            layers=unused)  # fmt: skip


def _several(names: tuple[str, ...]) -> str:
    quoted = listed([f"'{name}'" for name in names])
    return f"the {'parameters' if len(names) > 1 else 'parameter'} {quoted}"


def _them(names: tuple[str, ...]) -> str:
    return "them" if len(names) > 1 else "it"


@fault("frozen", "Frozen parameters", certain=True, explains=("cannot-overfit", "behind-reference"))
def frozen(record: Record) -> Iterator[Finding]:
    """Find parameters with requires_grad=False; they are unlikely to be meant if untrained."""
    if not (names := record.wiring.frozen):
        return
    paths = {name.rpartition(".")[0] for name in names}
    untrained = {
        path: w.gain for path, w in record.weights.items()
        if path in paths and abs(w.gain - UNTRAINED) < ABOUT and w.largest < 1 + ROUNDED
    }  # fmt: skip
    yield Finding("frozen", "act" if untrained and suffers(record) else "watch",
        f"No step trains {_several(names)}: requires_grad is False."
        + (f" The weights of {named(record, next(iter(untrained)))} look like torch's "
           "initialisation, so they were probably never trained." if untrained else ""),
        (Evidence("frozen parameters", len(names)),
         *(Evidence("gain", gain, UNTRAINED, path, 0) for path, gain in untrained.items())),
        (Advice("set requires_grad=True, unless these parameters should stay frozen", "unfreeze"),),
        layers=names)  # fmt: skip


@fault("rate-zero", "A learning rate of zero", of="monitor", about="loop", certain=True,
       explains=LEARNING)  # fmt: skip
def rates_zero(record: Record) -> Iterator[Finding]:
    """Find a learning rate that is zero in all measured steps."""
    rates = [rate for r in record.reports if (rate := learning_rate(r)) is not None]
    if len(rates) >= FEWEST_MEASURED and not any(rates):
        yield Finding("rate-zero", "act", "The learning rate is zero in all measured steps.",
            (Evidence("learning rate", 0.0, 0.0),),
            (Advice("give the optimizer, or its scheduler, "
                    "a learning rate above zero"),))  # fmt: skip


@finds()
def rate_zero(record: Record) -> Iterator[Finding]:
    """Find parameter groups whose learning rate is zero and stays zero."""
    facts = [fact for fact in record.found_by("rate-zero") if not _rises(record, fact)]
    if facts:
        share = sum(fact.numbers["share"] for fact in facts)
        scheduled = any(fact.numbers["initial_lr"] > 0 for fact in facts)
        yield Finding("rate-zero", "act",
            f"The learning rate is 0 for {share:.0%} of the parameters (the first is "
            f"'{facts[0].place}'). They receive a gradient, but no step changes them."
            + (" A scheduler set it to 0 and does not raise it within the steps of the audit: look "
               "for an integer division.") * scheduled,
            (Evidence("share of the parameters", share, 0),),
            (Advice("give this parameter group a learning rate, or set requires_grad=False"),),
            "Any multiple of a learning rate of zero is zero.", since=0)  # fmt: skip


def _rises(record: Record, fact: Fact) -> bool:
    """Return whether the group's learning rate is above 0 in some measured step: it warms up."""
    group = int(fact.numbers.get("group", -1))
    return any(any(report.learning_rates[group : group + 1]) for report in record.reports)


@fault("rounded-away", "Steps lost to rounding", explains=LEARNING, acts_below=1.0)
def rounded_away(record: Record) -> Iterator[Finding]:
    """Find 16-bit weights whose steps are smaller than their last digit."""
    for fact in record.found_by("rounded-away"):
        share = fact.numbers["share"]
        if share > ROUNDED_AWAY:
            yield Finding("rounded-away", "act" if suffers(record) else "watch",
                f"A step leaves {share:.0%} of the entries that have a gradient unchanged to the "
                f"last bit: the weights are {fact.words['dtype']}, and the step is smaller than "
                "their last digit.",
                (Evidence("share of entries that a step leaves unchanged", share, ROUNDED_AWAY),),
                (Advice("keep the weights in float32, and compute in 16 bits under torch.autocast",
                        "float32-weights"),),
                "With a lower learning rate, even more steps are smaller than the weights' last "
                "digit.", since=0, against=LOWER_RATES)  # fmt: skip


@fault("epsilon-dominates", "Steps shortened by the optimizer's epsilon", explains=LEARNING,
       acts_below=1.0)  # fmt: skip
def epsilon_dominates(record: Record) -> Iterator[Finding]:
    """Find an epsilon that is larger than the roots it is added to, so that it sets the step."""
    for fact in record.found_by("epsilon-dominates"):
        share, epsilon, root = (fact.numbers[name] for name in ("share", "epsilon", "root"))
        if share > EPSILON:
            yield Finding("epsilon-dominates", "act" if suffers(record) else "watch",
                f"The optimizer divides the gradient by √v + ε. For {share:.0%} of the entries, "
                f"its ε ({epsilon:g}) is larger than √v (typically {root:.2g}): ε shortens their "
                "steps, which are no longer adapted to the size of their gradients.",
                (Evidence("share of entries whose root is below ε", share, EPSILON),
                 Evidence("ε", epsilon),
                 Evidence("median root of the mean squared gradient", root)),
                (Advice("use the default eps of 1e-8", "usual-epsilon"),))  # fmt: skip


@fault("gradient-hooks", "Hooks that change the gradient", explains=LEARNING, acts_below=1.0)
def gradient_hooks(record: Record) -> Iterator[Finding]:
    """Find hooks that change the gradient between the backward pass and the step."""
    for fact in record.found_by("gradient-hooks"):
        ratio, cosine = fact.numbers["ratio"], fact.numbers["cosine"]
        if 1 / CHANGED_LENGTH <= ratio <= CHANGED_LENGTH and cosine >= TURNED:
            continue
        yield Finding("gradient-hooks", "act" if suffers(record) else "watch",
            "Hooks change the gradient between backward() and the optimizer's step: its length "
            f"becomes {ratio:.3g} times as large, and its cosine with the original gradient is "
            f"{cosine:.3g}.",
            (Evidence("gradient's length after the hooks, over that before them", ratio,
                      CHANGED_LENGTH if ratio > 1 else 1 / CHANGED_LENGTH, step=0),
             Evidence("cosine of the gradients before and after the hooks", cosine, TURNED,
                      step=0)),
            (Advice("remove the hooks that change gradients (register_hook, "
                    "register_full_backward_hook, register_step_pre_hook)", "without-hooks"),),
            since=0)  # fmt: skip


@fault("gradient-differs", "A gradient that is not that of the loss", explains=LEARNING)
def gradient_differs(record: Record) -> Iterator[Finding]:
    """Find gradients that are not those of the loss, which may be meant."""
    for fact in record.found_by("gradient-differs"):
        ratio = fact.numbers["ratio"]
        names = ", ".join(f"'{name}'" for name in fact.place.split(", ") if name)
        if LEAST_AS_PREDICTED <= ratio <= MOST_AS_PREDICTED:
            continue
        limit = LEAST_AS_PREDICTED if ratio < 1 else MOST_AS_PREDICTED
        yield Finding("gradient-differs", "act" if ratio < 0 and suffers(record) else "watch",
            "The gradient that the backward pass returns is not that of the loss: along it, the "
            f"loss of the first batch falls by {ratio:.3g} times what the gradient predicts."
            + " The step goes uphill." * (ratio < 0),
            (Evidence("decrease of the loss along its gradient, over the predicted one", ratio,
                      limit, step=0),),
            (Advice(f"check the backward() of {names} with torch.autograd.gradcheck, unless "
                    "another gradient is meant") if names else
             Advice("look for hooks on tensors (register_hook) and for values that leave the "
                    "graph, unless another gradient is meant"),), since=0)  # fmt: skip


@fault(
    "left-in-eval",
    "Layers left in eval mode",
    shown_by=several,
    of="monitor",
    about="loop",
    explains=LEARNING,
    acts_below=1.0,
)
def whole_model_in_eval(record: Record) -> Iterator[Finding]:
    """Find a model that is in eval mode as a whole in more than the last half of the run."""
    last = [*takewhile(lambda report: report.evaluated, reversed(record.reports))]
    if len(last) < FEWEST_MEASURED or not (
        last[0].step - last[-1].step > (last[0].step - record.reports[0].step) / 2
    ):
        return
    paths = record.reports[-1].evaluated
    yield Finding("left-in-eval", strength(record),
        "The whole model is in eval mode as it trains: dropouts drop nothing, and normalisations "
        "use their running statistics, which no step updates.",
        (Evidence("dropouts and normalisations in eval mode", len(paths), 0),),
        (Advice("call model.train() before the training, and again after each evaluation"),),
        layers=paths, since=last[-1].step)  # fmt: skip


@finds()
def left_in_eval(record: Record) -> Iterator[Finding]:
    """Find normalisations that run with their initial statistics and so normalise nothing."""
    facts = record.found_by("left-in-eval")
    running = [fact for fact in facts if not fact.numbers["given"]]
    if running:
        yield Finding("left-in-eval", "act" if suffers(record) else "watch",
            "These normalisations are in evaluation mode while the model trains: "
            f"{places(running)}. Their running mean is still 0 and their running variance 1, so "
            "they normalise nothing.",
            (Evidence("normalisations in evaluation mode", len(running), 0),),
            (Advice("call train() on these modules before training", "train-mode"),),
            layers=tuple(fact.place for fact in running), since=0)  # fmt: skip
    elif facts:
        yield Finding("left-in-eval", "watch",
            "The audit received the model in evaluation mode, and the running mean and variance of "
            "its normalisations are still 0 and 1. The audit trained it in training mode; in a "
            "training loop that does not call train(), these layers normalise nothing.",
            (Evidence("normalisations in evaluation mode", len(facts), 0),),
            (Advice("call model.train() at the beginning of the training loop"),),
            since=0)  # fmt: skip
