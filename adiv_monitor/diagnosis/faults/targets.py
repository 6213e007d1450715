"""Do outputs and targets fit each other?

Are they of the same tokens and samples; does the loss get logits, probabilities or their logarithms
as it expects; and can the outputs, as they are, take the targets' values?
"""

from collections.abc import Iterator

from adiv_monitor.diagnosis.faults.fault import LEARNING, fault
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import HIGHER_RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Fact, Record
from adiv_monitor.printable import quoted

OUTSIDE = 0.01  # share of the targets outside the range of the function on the outputs
TOGETHER = 0.5  # share of a sample's outputs that its targets concern, of the fewer ones
# Standard deviation of the targets over that of normalised outputs, or the reverse; and the
# distance of their means, in the larger standard deviation. Standardised targets have 1 and 0.
OTHER_SCALE, OTHER_MEAN = 3.0, 1.0
_LACK = {
    "relu": "are never negative, and receive no gradient where they are zero",
    "relu6": "lie between 0 and 6, and receive no gradient at 0 and at 6",
    "sigmoid": "lie between 0 and 1",
    "hardsigmoid": "lie between 0 and 1",
    "tanh": "lie between −1 and 1",
    "hardtanh": "lie between two bounds, and receive no gradient at the bounds",
    "softsign": "lie between −1 and 1",
}
# Share of couples in which the pair drawn together is nearer in the inputs than the one pushed
# apart: labels without a relation to the inputs give 1/2. And its distance in standard errors.
REVERSED, CERTAINLY = 0.3, 5.0


@fault("future-leak", "The model sees the tokens that it should predict", certain=True,
       explains=LEARNING)  # fmt: skip
def future_leak(record: Record) -> Iterator[Finding]:
    """Find a model of the next token whose inputs include that token."""
    for fact in record.found_by("future-leak"):
        yield Finding("future-leak", "act",
            "The targets are the next tokens of the input, and the outputs depend on later input "
            "tokens: the model sees the tokens that it should predict. A low loss does not show "
            "that it predicts well.",
            (Evidence("change of outputs with later inputs", fact.numbers["change"], 1e-5),),
            (Advice("use a causal mask in attention (is_causal=True), and a single direction in "
                    "recurrent layers"),), since=0)  # fmt: skip


@fault("targets-misplaced", "Outputs and targets are of different samples", certain=True,
       explains=LEARNING)  # fmt: skip
def targets_misplaced(record: Record) -> Iterator[Finding]:
    """Find outputs of samples that are compared with the targets of other samples."""
    for fact in record.found_by("targets-misplaced"):
        share = fact.numbers["share"]
        if share < TOGETHER:
            yield Finding("targets-misplaced", "act",
                "The outputs of a sample are compared with the targets of other samples: a change "
                "of the first sample's targets changes the gradient at outputs that do not depend "
                f"on its inputs (outputs of shape {fact.words['of']}, targets of "
                f"{fact.words['to']}).",
                (Evidence("share of a sample's outputs that its targets concern", share, TOGETHER,
                          step=0),),
                (Advice("look at the axes of outputs and targets where the loss compares them: "
                        "transpose one of them before both are flattened, and reorder both or "
                        "none"),),
                "Another learning rate does not bring outputs and targets together.",
                since=0)  # fmt: skip


@fault("broadcast-loss", "Each output is compared with all targets", certain=True,
       explains=LEARNING)  # fmt: skip
def broadcast_loss(record: Record) -> Iterator[Finding]:
    """Find a loss that combines each output with the targets, or weights, of all samples."""
    for fact in record.found_by("broadcast-loss"):
        a, b = fact.words["of"], fact.words["and"]
        is_difference = "by" not in fact.words
        yield Finding("broadcast-loss", "act",
            f"{fact.place} broadcasts the shapes {a} and {b}: the loss "
            + ("compares each output with the targets of all samples, and is lowest where every "
               "output is their mean." if is_difference else
               "combines each sample with the values of all samples, not only with its own."),
            (Evidence("entries of the result, over those of the larger tensor",
                      fact.numbers["times"], 1.0, step=0),),
            (Advice("squeeze the outputs, or unsqueeze the targets, so that both have the same "
                    "shape" if is_difference else
                    "squeeze the one, or unsqueeze the other, so that both have the same shape"),),
            "Another learning rate leads to the same mean." * is_difference, since=0)  # fmt: skip


@fault("no-log", "The loss expects log-probabilities", certain=True, explains=LEARNING)
def no_log(record: Record) -> Iterator[Finding]:
    """Find a loss that expects log-probabilities of the classes but gets something else."""
    for fact in record.found_by("no-log"):
        name, given = fact.words["function"], fact.words["given"]
        why_not = ""
        if given == "logits":
            advice = ("use cross_entropy instead of nll_loss, or log_softmax before nll_loss"
                      if name == "nll_loss" else
                      f"use log_softmax over the classes before {name}")  # fmt: skip
            text = ("but receives logits: their exponentials do not sum to 1. This loss has no "
                    "lower bound: it falls as the outputs grow, "
                    "whatever the model learns.")  # fmt: skip
            why_not = "With a higher learning rate, the outputs only grow faster."
        elif given == "another axis":
            advice = ("take the log_softmax over the classes: they are axis 1 of the input of "
                      "nll_loss, and the last axis of that of ctc_loss")  # fmt: skip
            text = ("whose exponentials sum to 1 over the classes. Those of its input sum to 1 "
                    "over another axis: the probabilities of one class "
                    "compete with each other.")  # fmt: skip
        else:
            advice = "use log_softmax instead of softmax" + (
                     "" if name == "ctc_loss" else
                     ", or pass the inputs of the softmax to cross_entropy")  # fmt: skip
            text = ("but receives probabilities: they sum to 1. The gradient of this loss is "
                    "weakest where the model is wrong.")  # fmt: skip
        yield Finding("no-log", "act", f"{fact.place} expects log-probabilities, {text}",
            (Evidence("number of losses without log-probabilities", 1.0, step=0),),
            (Advice(advice),), why_not, since=0)  # fmt: skip


@fault("logits-as-probabilities", "The loss expects probabilities", certain=True, explains=LEARNING)
def logits_as_probabilities(record: Record) -> Iterator[Finding]:
    """Find a loss of probabilities, such as dice, of outputs that may have any value."""
    for fact in record.found_by("logits-as-probabilities"):
        at, beyond = fact.numbers["at"], fact.numbers["beyond"]
        yield Finding("logits-as-probabilities", "act",
            f"The loss is {at:.2g} if the outputs equal their targets of 0 and 1, and {beyond:.2g} "
            "if they are twice as large: it expects probabilities. But "
            f"{fact.numbers['outside']:.0%} of the outputs are below 0 or above 1 after training. "
            "A lower loss does not show that the predictions are better.",
            (Evidence("loss of outputs that are twice the targets", beyond, at),),
            (Advice("apply a sigmoid to the outputs before this loss, or a softmax over the "
                    "classes if each sample has one"),),
            "Another learning rate does not keep the outputs between 0 and 1.",
            since=0)  # fmt: skip


@fault("softmax-of-one", "Softmax over a single class", certain=True,
       explains=(*LEARNING, "input-ignored", "target-scale", "vanishing"))  # fmt: skip
def softmax_of_one(record: Record) -> Iterator[Finding]:
    """Find a softmax over one class, which is always 1."""
    for fact in record.found_by("softmax-of-one"):
        own = fact.words["function"] == "cross_entropy"
        yield Finding("softmax-of-one", "act",
            f"{fact.place} of shape {fact.words['shape']} has only one class: its result is the "
            "same whatever the model computes, so no gradient reaches the model.",
            (Evidence("classes of a softmax", 1.0, 1.0, step=0),),
            (Advice("give the model one output per class, or use binary_cross_entropy_with_logits")
             if own else Advice("remove the softmax, or replace it by a sigmoid"),),
            "No learning rate trains a model that receives no gradient.", since=0)  # fmt: skip


@fault("softmax-over-samples", "Softmax over the samples", certain=True, explains=LEARNING)
def softmax_over_samples(record: Record) -> Iterator[Finding]:
    """Find a softmax over the first axis, that of the samples."""
    for fact in record.found_by("softmax-over-samples"):
        yield Finding("softmax-over-samples", "act",
            f"{fact.place} of shape {fact.words['shape']} normalises over the samples instead of "
            "the classes: the result for one sample depends on the other samples of its batch.",
            (Evidence("axis of the softmax", 0.0, step=0),),
            (Advice("use the axis of the classes: dim=1"),),
            since=0)  # fmt: skip


@fault("double-softmax", "Softmax is applied twice", explains=LEARNING)
def double_softmax(record: Record) -> Iterator[Finding]:
    """Find probabilities whose softmax the loss takes again, so that it can't come near zero."""
    output = record.activated_output
    in_loss = output is not None and output.function == "softmax" and output.module is None
    if record.double_softmax or (output is not None and output.function == "softmax"):
        yield Finding("double-softmax", "act",
            ("The loss function takes a softmax of the outputs" if in_loss else
             "The model's outputs are already probabilities")
            + ", and the loss applies a second softmax to them: they differ by at most 1 between "
            "classes, so the loss can't come near zero.",
            (Evidence("number of softmaxes before that of the loss", 1.0),),
            (Advice("pass the inputs of the softmax to the loss, not its outputs",
                    "plain-outputs"),),
            "A higher learning rate only saturates the first softmax.", since=0,
            against=HIGHER_RATES)  # fmt: skip


@fault("activated-logits", "An activation function on the logits", explains=LEARNING)
def activated_logits(record: Record) -> Iterator[Finding]:
    """Find an activation function between the last layer and a loss that has its own."""
    output = record.activated_output
    if output is None or output.function == "softmax":
        return
    where = f"the {output.function} of {quoted(output.module or '')}"
    yield Finding("activated-logits", "act",
        f"The loss uses the outputs of {where} as logits. Such logits "
        f"{_LACK.get(output.function, 'are bounded on one side')}.",
        (Evidence("number of activation functions on the logits", 1.0),),
        (Advice("remove that function from the outputs: the loss already contains a softmax (or "
                "sigmoid)", "plain-outputs"),),
        "Another learning rate does not widen the range of the logits.",
        layers=(output.module,) if output.module else (), since=0)  # fmt: skip


@fault("targets-out-of-range", "Targets that the outputs can't reach",
       explains=(*LEARNING, "exploding", "non-finite", "unbounded-loss"),
       acts_below=1.0)  # fmt: skip
def targets_out_of_range(record: Record) -> Iterator[Finding]:
    """Find regression targets outside the range of the function on the outputs."""
    for fact in record.found_by("targets-out-of-range"):
        share = fact.numbers["share"]
        if share > OUTSIDE and "sum" in fact.words:
            yield _of_several(record, fact, share)
        elif share > OUTSIDE and "farthest" in fact.words:
            yield _no_probabilities(fact, share)
        elif share > OUTSIDE:
            yield Finding("targets-out-of-range", "act" if suffers(record) else "watch",
                f"{share:.0%} of the targets lie outside the range of the outputs: because of "
                f"{fact.place}, all outputs lie between {fact.words['low']} and "
                f"{fact.words['high']}.",
                (Evidence("share of the targets out of range", share, OUTSIDE),),
                (Advice("remove that function from the outputs, or scale the targets into its "
                        "range", "unbounded-outputs"),),
                "Another learning rate does not widen the range.", since=0)  # fmt: skip


def _no_probabilities(fact: Fact, share: float) -> Finding:
    """Return the finding of a binary cross-entropy whose targets are no probabilities."""
    return Finding("targets-out-of-range", "act",
        f"{share:.0%} of the targets of {fact.place} are below 0 or above 1 (such as "
        f"{fact.words['farthest']}): its loss then falls without bound.",
        (Evidence("share of the targets below 0 or above 1", share, OUTSIDE, step=0),),
        (Advice("scale the targets into 0 to 1 (masks of 0 and 255: divide by 255, or compare with "
                "0); for targets that are no probabilities use another loss, such as mse_loss"),),
        "Another learning rate does not give the loss a lower bound.", since=0)  # fmt: skip


def _of_several(record: Record, fact: Fact, share: float) -> Finding:
    """Return the finding of a softmax whose targets are of several classes at once.

    A cross-entropy of such targets has a lowest value at their shares, which some models are meant
    to learn.
    """
    is_inside = fact.words["function"] == "cross_entropy"
    what = "the softmax in " * is_inside + fact.place
    return Finding("targets-out-of-range", "act" if suffers(record) and not is_inside else "watch",
        f"The targets of {share:.0%} of the samples sum to more than 1.5, as where a sample has "
        f"several classes, but the results of {what} sum to 1: they can't be close to 1 for two "
        "classes at once.",
        (Evidence("share of the samples with targets that sum to more than 1.5", share, OUTSIDE),),
        (Advice("use binary_cross_entropy_with_logits, which has a sigmoid for each class")
         if is_inside else
         Advice("use a sigmoid for each class in place of the softmax", "sigmoids"),),
        since=0)  # fmt: skip


@fault("outputs-normalised", "Normalised outputs of a regression", explains=LEARNING,
       acts_below=0.8)  # fmt: skip
def outputs_normalised(record: Record) -> Iterator[Finding]:
    """Find a regression whose outputs are normalised, though its targets are not."""
    for fact in record.found_by("outputs-normalised"):
        names = ("mean", "std", "target mean", "target std")
        mean, std, target_mean, target_std = (fact.numbers[name] for name in names)
        if not (std > 0 and target_std > 0):
            continue
        scale = max(std / target_std, target_std / std)
        distance = abs(target_mean - mean) / max(std, target_std)
        if scale > OTHER_SCALE or distance > OTHER_MEAN:
            yield Finding("outputs-normalised", "act" if suffers(record) else "watch",
                f"{fact.place} normalises the outputs: whatever the layers before it compute, they "
                f"begin with a mean of {mean:.2g} and a standard deviation of {std:.2g}. The "
                f"targets have {target_mean:.3g} and {target_std:.3g}.",
                (Evidence("ratio of the standard deviations of outputs and targets", scale,
                          OTHER_SCALE, step=0),
                 Evidence("distance of their means, in the larger standard deviation", distance,
                          OTHER_MEAN, step=0)),
                (Advice("remove the normalisation of the outputs", "outputs-without-norm"),
                 Advice("standardise the targets")), since=0)  # fmt: skip


@fault("dropout-on-outputs", "Dropout on the outputs", explains=LEARNING, acts_below=0.8)
def dropout_on_outputs(record: Record) -> Iterator[Finding]:
    """Find dropout behind the last layer: it sets outputs to 0 that are compared with targets."""
    for fact in record.found_by("dropout-on-outputs"):
        rate, with_it, without = (fact.numbers[name] for name in ("rate", "with", "without"))
        yield Finding("dropout-on-outputs", "act" if suffers(record) else "watch",
            f"{fact.place} sets {rate:.0%} of the outputs to 0 in each step, and multiplies the "
            "others by 1/(1 − p), before the loss compares them with their targets.",
            (Evidence("dropout rate of the outputs", rate, 0.0, fact.place, 0),
             Evidence("loss of the trained model with it", with_it),
             Evidence("loss of the trained model without it", without)),
            (Advice("remove the dropout behind the last layer", "outputs-without-dropout"),),
            "Another learning rate does not remove this noise.", since=0)  # fmt: skip


@fault("target-is-input", "Targets that are the wrong tokens", certain=True, explains=LEARNING)
def target_is_input(record: Record) -> Iterator[Finding]:
    """Find a language model whose targets are its inputs, but not the next or the masked tokens.

    Targets that are further ahead may be meant, as in predictions of several tokens.
    """
    for fact in record.found_by("target-is-input"):
        places = int(fact.numbers["places"])
        if fact.words.get("of") == "chosen places":
            advice = ("mask the tokens whose targets count, and set the targets of the other "
                      "places to -100")  # fmt: skip
            said = ("The loss counts chosen places only, as that of a masked language model, and "
                    "the model sees their tokens, which are the targets: it learns to copy them, "
                    "not to fill in masked ones.")  # fmt: skip
        elif places > 1:
            advice = ("shift the labels once: the data set, the model and the loss "
                      "may each shift them")  # fmt: skip
            said = (f"The target at each position is the input token {places} places after the "
                    "last one that the output depends on: the labels are shifted twice, and the "
                    "model never learns to predict the next token.")  # fmt: skip
        else:
            advice = "shift the labels by one: compare outputs[:, :-1] with tokens[:, 1:]"
            seen = "the last input token" if places == 0 else "an input token before the last one"
            said = (f"The target at each position is {seen} that the output depends on: the model "
                    "learns to copy its input, not to predict the next token.")  # fmt: skip
        yield Finding("target-is-input", "watch" if places > 1 else "act", said,
            (Evidence("places from the last token that an output depends on to its target", places,
                      1.0, step=0),),
            (Advice(advice),), since=0)  # fmt: skip


@fault("pairs-reversed", "Pairs the wrong way round", certain=True, explains=LEARNING)
def pairs_reversed(record: Record) -> Iterator[Finding]:
    """Find a loss that draws together the pairs whose inputs are far apart, and parts the near."""
    for fact in record.found_by("pairs-reversed"):
        share, errors = fact.numbers["share"], fact.numbers["errors"]
        if share < REVERSED and errors < -CERTAINLY:
            yield Finding("pairs-reversed", "act",
                f"The loss draws {fact.numbers['drawn']:.0f} pairs together and pushes "
                f"{fact.numbers['pushed']:.0f} apart, the wrong way round: those that it pushes "
                f"apart are nearer in the inputs in {1 - share:.0%} of the comparisons.",
                (Evidence("share of couples in which the pair drawn together is the nearer one",
                          share, REVERSED, step=0),
                 Evidence("its distance from 1/2, in standard errors", errors, -CERTAINLY,
                          step=0)),
                (Advice("exchange the labels 0 and 1 of the pairs, or the two terms of the loss: "
                        "it should draw together pairs that are alike"),),
                "Another learning rate learns the reverse faster.", since=0)  # fmt: skip
