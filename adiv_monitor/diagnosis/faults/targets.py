"""Do outputs and targets fit each other?

Are they of the same tokens and samples; does the loss get logits, probabilities or their logarithms
as it expects; and can the outputs, as they are, take the targets' values?
"""

from collections.abc import Iterator

from adiv_monitor.diagnosis.faults.fault import LEARNING, act_if, fault
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import HIGHER_RATES, Advice, Evidence, Finding
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.printable import quoted

OUTSIDE = 0.01  # share of the targets outside the range of the function on the outputs
TOGETHER = 0.5  # share of a sample's outputs that its targets concern, of the fewer ones
# Standard deviation of the targets over that of normalised outputs, or the reverse; and the
# distance of their means, in the larger standard deviation. Standardised targets have 1 and 0.
OTHER_SCALE, OTHER_MEAN = 3.0, 1.0
_LACK = {
    **dict.fromkeys(("sigmoid", "hardsigmoid"), "lie between 0 and 1"),
    **dict.fromkeys(("tanh", "hardtanh", "softsign"), "lie between two bounds, such as ±1"),
    **dict.fromkeys(("relu", "relu6"), "are never negative, and get no gradient at zero"),
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
            "tokens. A low loss does not show that the model predicts well.",
            (Evidence("change of outputs with later inputs", fact.numbers["change"], 1e-5),),
            (Advice("use a causal mask, and recurrent layers of a single direction"),))  # fmt: skip


@fault("targets-misplaced", "Outputs and targets are of different samples", certain=True,
       explains=LEARNING)  # fmt: skip
def targets_misplaced(record: Record) -> Iterator[Finding]:
    """Find outputs of samples that are compared with the targets of other samples."""
    for fact in record.found_by("targets-misplaced"):
        if (share := fact.numbers["share"]) < TOGETHER:
            yield Finding("targets-misplaced", "act",
                "The outputs of a sample are compared with the targets of other samples (outputs "
                f"of shape {fact.words['of']}, targets of {fact.words['to']}).",
                (Evidence("share of the outputs that the targets concern", share, TOGETHER),),
                (Advice("transpose one of them before both are compared"),))  # fmt: skip


@fault("broadcast-loss", "Each output is compared with all targets", certain=True,
       explains=LEARNING)  # fmt: skip
def broadcast_loss(record: Record) -> Iterator[Finding]:
    """Find a loss that combines each output with the targets, or weights, of all samples."""
    for fact in record.found_by("broadcast-loss"):
        yield Finding("broadcast-loss", "act",
            f"{fact.place} broadcasts the shapes {fact.words['of']} and {fact.words['and']}: the "
            "loss combines each sample with the values of all samples.",
            (Evidence("entries of the result, over those before", fact.numbers["times"], 1.0),),
            (Advice("give outputs and targets the same shape"),))  # fmt: skip


# What a loss of log-probabilities gets instead of them, and what to do.
_NO_LOG = {
    "logits": ("but receives logits: this loss falls without bound as the outputs grow.",
               "use log_softmax over the classes before {0}, or cross_entropy"),
    "another axis": ("but those of its input sum to 1 over another axis than that of the classes.",
                     "take the log_softmax over the classes: they are axis 1 of the input of "
                     "nll_loss, and the last axis of that of ctc_loss"),
    "probabilities": ("but receives probabilities: its gradient is weakest where the model is "
                      "wrong.", "use log_softmax instead of softmax"),
}  # fmt: skip


@fault("no-log", "The loss expects log-probabilities", certain=True, explains=LEARNING)
def no_log(record: Record) -> Iterator[Finding]:
    """Find a loss that expects log-probabilities of the classes but gets something else."""
    for fact in record.found_by("no-log"):
        given, advice = _NO_LOG.get(fact.words["given"], _NO_LOG["probabilities"])
        yield Finding("no-log", "act", f"{fact.place} expects log-probabilities, {given}",
            (Evidence("number of losses without log-probabilities", 1.0, step=0),),
            (Advice(advice.format(fact.words["function"])),))  # fmt: skip


@fault("logits-as-probabilities", "The loss expects probabilities", certain=True, explains=LEARNING)
def logits_as_probabilities(record: Record) -> Iterator[Finding]:
    """Find a loss of probabilities, such as dice, of outputs that may have any value."""
    for fact in record.found_by("logits-as-probabilities"):
        at, beyond = fact.numbers["at"], fact.numbers["beyond"]
        yield Finding("logits-as-probabilities", "act",
            f"The loss is {at:.2g} if outputs equal their targets, and {beyond:.2g} if they are "
            f"twice as large, but {fact.numbers['outside']:.0%} of the outputs exceed 0 to 1.",
            (Evidence("loss of outputs that are twice the targets", beyond, at),),
            (Advice("apply a sigmoid to the outputs before this loss, or a softmax"),))  # fmt: skip


@fault("softmax-of-one", "Softmax over a single class", certain=True,
       explains=(*LEARNING, "input-ignored", "target-scale", "vanishing"))  # fmt: skip
def softmax_of_one(record: Record) -> Iterator[Finding]:
    """Find a softmax over one class, which is always 1."""
    for fact in record.found_by("softmax-of-one"):
        own = fact.words["function"] == "cross_entropy"
        yield Finding("softmax-of-one", "act",
            f"{fact.place} of shape {fact.words['shape']} has only one class: its result is always "
            "the same, so no gradient reaches the model.",
            (Evidence("classes of a softmax", 1.0, 1.0, step=0),),
            (Advice("give the model one output per class, or use binary_cross_entropy_with_logits")
             if own else Advice("use a sigmoid, or no softmax"),))  # fmt: skip


@fault("softmax-over-samples", "Softmax over the samples", certain=True, explains=LEARNING)
def softmax_over_samples(record: Record) -> Iterator[Finding]:
    """Find a softmax over the first axis, that of the samples."""
    for fact in record.found_by("softmax-over-samples"):
        yield Finding("softmax-over-samples", "act",
            f"{fact.place} of shape {fact.words['shape']} normalises over the samples instead of "
            "the classes.", (Evidence("axis of the softmax", 0.0, step=0),),
            (Advice("use the axis of the classes: dim=1"),))  # fmt: skip


@fault("double-softmax", "Softmax is applied twice", explains=LEARNING)
def double_softmax(record: Record) -> Iterator[Finding]:
    """Find probabilities whose softmax the loss takes again, so that it can't come near zero."""
    output = record.activated_output
    if record.double_softmax or (output is not None and output.function == "softmax"):
        yield Finding("double-softmax", "act",
            "The loss applies a second softmax to probabilities: they differ by at most 1 between "
            "classes, so the loss can't come near zero.",
            (Evidence("number of softmaxes before that of the loss", 1.0),),
            (Advice("pass the inputs of the softmax to the loss", "plain-outputs"),),
            "A higher learning rate only saturates the first softmax.",
            against=HIGHER_RATES)  # fmt: skip


@fault("activated-logits", "An activation function on the logits", explains=LEARNING)
def activated_logits(record: Record) -> Iterator[Finding]:
    """Find an activation function between the last layer and a loss that has its own."""
    output = record.activated_output
    if output is not None and output.function != "softmax":
        yield Finding("activated-logits", "act",
            f"The loss uses the outputs of the {output.function} of {quoted(output.module or '')} "
            f"as logits. They {_LACK.get(output.function, 'are bounded on one side')}.",
            (Evidence("number of activation functions on the logits", 1.0),),
            (Advice("remove that function: the loss has its own", "plain-outputs"),),
            layers=(output.module,) if output.module else ())  # fmt: skip


@fault("targets-out-of-range", "Targets that the outputs can't reach",
       explains=(*LEARNING, "exploding", "non-finite", "unbounded-loss"),
       acts_below=1.0)  # fmt: skip
def targets_out_of_range(record: Record) -> Iterator[Finding]:
    """Find targets outside the range of the function on the outputs, or of the loss.

    A cross-entropy of targets of several classes has a lowest value at their shares, which some
    models are meant to learn.
    """
    for fact in record.found_by("targets-out-of-range"):
        share, words = fact.numbers["share"], fact.words
        strength, fix = act_if(suffers(record)), None
        if "sum" in words:
            inside = words["function"] == "cross_entropy"
            strength, fix = "watch" if inside else strength, None if inside else "sigmoids"
            said = (f"The targets of {share:.0%} of the samples sum to more than 1.5, as where a "
                    f"sample has several classes, but the results of {fact.place} sum "
                    "to 1.")  # fmt: skip
            advice = "use a sigmoid for each class, as in binary_cross_entropy_with_logits"
        elif "farthest" in words:
            strength = "act"
            said = (f"{share:.0%} of the targets of {fact.place} are below 0 or above 1 (such as "
                    f"{words['farthest']}): its loss then falls without bound.")  # fmt: skip
            advice = ("scale the targets into 0 to 1 (masks of 0 and 255: divide by 255), or use "
                      "another loss, such as mse_loss")  # fmt: skip
        else:
            fix = "unbounded-outputs"
            said = (f"{share:.0%} of the targets lie outside the range of the outputs: because of "
                    f"{fact.place}, all lie between {words['low']} and "
                    f"{words['high']}.")  # fmt: skip
            advice = "remove that function from the outputs, or scale the targets into its range"
        if share > OUTSIDE:
            yield Finding("targets-out-of-range", strength, said,
                (Evidence("share of the targets out of range", share, OUTSIDE),),
                (Advice(advice, fix),))  # fmt: skip


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
            yield Finding("outputs-normalised", act_if(suffers(record)),
                f"{fact.place} normalises the outputs, to a mean of {mean:.2g} and a deviation of "
                f"{std:.2g}. The targets have {target_mean:.3g} and {target_std:.3g}.",
                (Evidence("ratio of the standard deviations", scale, OTHER_SCALE),
                 Evidence("distance of the means", distance, OTHER_MEAN)),
                (Advice("remove the normalisation of the outputs", "outputs-without-norm"),
                 Advice("standardise the targets")))  # fmt: skip


@fault("dropout-on-outputs", "Dropout on the outputs", explains=LEARNING, acts_below=0.8)
def dropout_on_outputs(record: Record) -> Iterator[Finding]:
    """Find dropout behind the last layer: it sets outputs to 0 that are compared with targets."""
    for fact in record.found_by("dropout-on-outputs"):
        rate = fact.numbers["rate"]
        yield Finding("dropout-on-outputs", act_if(suffers(record)),
            f"{fact.place} sets {rate:.0%} of the outputs to 0 in each step, before the loss "
            "compares them with their targets.",
            (Evidence("dropout rate of the outputs", rate, 0.0, fact.place, 0),
             Evidence("loss of the trained model with it", fact.numbers["with"]),
             Evidence("loss of the trained model without it", fact.numbers["without"])),
            (Advice("remove that dropout", "outputs-without-dropout"),))  # fmt: skip


@fault("target-is-input", "Targets that are the wrong tokens", certain=True, explains=LEARNING)
def target_is_input(record: Record) -> Iterator[Finding]:
    """Find a language model whose targets are its inputs, but not the next or the masked tokens.

    Targets that are further ahead may be meant, as in predictions of several tokens.
    """
    for fact in record.found_by("target-is-input"):
        ahead = int(fact.numbers["places"])
        if fact.words.get("of") == "chosen places":
            said = ("The loss counts chosen places only, as that of a masked language model, but "
                    "the model sees their tokens, and learns to copy them.")  # fmt: skip
            advice = "mask the tokens whose targets count, and set the other targets to -100"
        else:
            said = (f"The target at each position is the input token {ahead} places after the last "
                    "one that the output depends on, not the next token.")  # fmt: skip
            advice = ("shift the labels once, in the data set, the model or the loss: compare "
                      "outputs[:, :-1] with tokens[:, 1:]")  # fmt: skip
        yield Finding("target-is-input", act_if(ahead <= 1), said,
            (Evidence("places to the target", ahead, 1.0),), (Advice(advice),))  # fmt: skip


@fault("pairs-reversed", "Pairs the wrong way round", certain=True, explains=LEARNING)
def pairs_reversed(record: Record) -> Iterator[Finding]:
    """Find a loss that draws together the pairs whose inputs are far apart, and parts the near."""
    for fact in record.found_by("pairs-reversed"):
        share, errors = fact.numbers["share"], fact.numbers["errors"]
        if share < REVERSED and errors < -CERTAINLY:
            yield Finding("pairs-reversed", "act",
                "The loss draws pairs together and pushes others apart, the wrong way round: those "
                f"that it pushes apart are nearer in {1 - share:.0%} of the comparisons.",
                (Evidence("share in which the drawn pair is nearer", share, REVERSED),
                 Evidence("its distance from 1/2, in errors", errors, -CERTAINLY)),
                (Advice("exchange the labels 0 and 1 of the pairs"),))  # fmt: skip
