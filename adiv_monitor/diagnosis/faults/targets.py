"""Do outputs and targets fit each other?

Are they of the same tokens and samples; does the loss get logits, probabilities or their logarithms
as it expects; and can the outputs, as they are, take the targets' values?
"""

from collections.abc import Iterator

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, fault, finds, told
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import HIGHER_RATES, Advice, Evidence, Finding, act_if
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.printable import quoted

TOGETHER = 0.5  # share of a sample's outputs that its targets concern, of those that inputs change
# Share of couples in which the pair drawn together is nearer in the inputs than the one pushed
# apart: labels without a relation to the inputs give 1/2. And its distance in standard errors.
REVERSED, CERTAINLY = 0.3, 5.0
FORCED = 0.1  # share of the targets' variance that a normalisation at the end leaves out
OUTSIDE = 0.01  # share of the targets outside the range of the function on the outputs
BELOW_ZERO = -1e-3  # what rounding does not explain


told(__name__, "arguments-exchanged", "Outputs in the place of the targets", "act",
     "{place} gets the outputs as its targets, and the targets as its input.",
     Advice("exchange its first two arguments: outputs first, then targets"),
     certain=True, explains=(*LEARNING, "class-untaught", "unbounded-loss"))  # fmt: skip

told(__name__, "future-leak", "The model sees the tokens that it should predict", "act",
     "The targets are the next tokens of the input, and the outputs depend on later input tokens. "
     "A low loss does not show that the model predicts well.",
     Number("change of outputs with later inputs", "change", above=1e-5),
     Advice("use a causal mask, and recurrent layers of a single direction"),
     certain=True, explains=LEARNING)  # fmt: skip

told(__name__, "targets-misplaced", "Outputs and targets are of different samples", "act",
     "The outputs of a sample are compared with the targets of other samples.",
     Number("share of the outputs that the targets concern", "share", below=TOGETHER),
     Advice("transpose one of them before both are compared"),
     certain=True, explains=LEARNING)  # fmt: skip

told(__name__, "broadcast-loss", "Each output is compared with all targets", "act",
     "{place} broadcasts the shapes {of} and {and}: the loss combines each sample with the values "
     "of all samples.",
     Number("entries of the result, over those before", "times", above=1.0),
     Advice("give outputs and targets the same shape"),
     certain=True, explains=LEARNING, about="loop",
     shown_by=read.reported("loss_module"))  # fmt: skip


told(__name__, "no-log", "The loss expects log-probabilities", "act",
     "{place} expects log-probabilities, but receives {given}.",
     Advice("use log_softmax over the classes before this loss, or cross_entropy"),
     where=lambda fact: fact.words["given"] != "another axis",
     certain=True, explains=LEARNING)  # fmt: skip
told(__name__, "no-log", "", "act",
     "{place} expects log-probabilities, but those of its input sum to 1 over another axis than "
     "that of the classes.",
     Advice("take the log_softmax over the classes: they are axis 1 of the input of nll_loss, and "
            "the last axis of that of ctc_loss"),
     where=lambda fact: fact.words["given"] == "another axis")  # fmt: skip

told(__name__, "logits-as-probabilities", "The loss expects probabilities", "act",
     "The loss is {at:.2g} if outputs equal their targets, and {beyond:.2g} if they are twice as "
     "large, but {outside:.0%} of the outputs exceed 0 to 1.",
     Number("loss of outputs that are twice the targets", "beyond"),
     Advice("apply a sigmoid to the outputs before this loss, or a softmax"),
     certain=True, explains=LEARNING)  # fmt: skip

told(__name__, "softmax-of-one", "Softmax over a single class", "act",
     "{place} of shape {shape} has only one class: its result is always the same, so no gradient "
     "reaches the model.",
     Advice("give the model one output per class, or use a sigmoid, as in "
            "binary_cross_entropy_with_logits"), where=lambda fact: "scores" not in fact.words,
     certain=True, about="loop", shown_by=read.reported("loss_module"),
     explains=(*LEARNING, "class-untaught", "input-ignored", "target-scale",
               "vanishing"))  # fmt: skip
# Attention to a single key is at times meant.
told(__name__, "softmax-of-one", "", suffers,
     "{place} of shape {shape} runs over an axis of length 1: all its weights are 1, whatever the "
     "scores are.",
     Advice("take the softmax over the axis of the places"),
     where=lambda fact: "scores" in fact.words)  # fmt: skip

told(__name__, "softmax-over-samples", "Softmax over the samples", "act",
     "{place} of shape {shape} normalises over the samples instead of the classes.",
     Advice("use the axis of the classes: dim=1"), where=lambda fact: "places" not in fact.words,
     certain=True, explains=LEARNING)  # fmt: skip
told(__name__, "softmax-over-samples", "", "act",
     "{place} takes axis 1 of {shape} for the classes, but the last layer returns them along the "
     "last axis: the softmax runs over the places.",
     Advice("exchange the axes: transpose(1, 2) before this loss"),
     where=lambda fact: "places" in fact.words)  # fmt: skip


@fault("double-softmax", "Softmax is applied twice", explains=LEARNING, about="loop",
       shown_by=read.reported("loss_module"))  # fmt: skip
def double_softmax(record: Record) -> Iterator[Finding]:
    """Find probabilities whose softmax the loss takes again, so that it can't come near zero."""
    output = record.activated_output
    if output is not None and output.function == "softmax":
        yield Finding("double-softmax", act_if(record.is_audited or suffers(record)),
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
        of = f" of {quoted(output.module)}" if output.module else ""
        yield Finding("activated-logits", act_if(record.is_audited or suffers(record)),
            f"The loss uses the outputs of the {output.function}{of} as logits, which should have "
            "no bounds.",
            (Evidence("number of activation functions on the logits", 1.0),),
            (Advice("remove that function: the loss has its own", "plain-outputs"),),
            layers=(output.module,) if output.module else ())  # fmt: skip


_OUTSIDE = Number("share of the targets out of range", "share", above=OUTSIDE)
told(__name__, "targets-out-of-range", "Targets that the outputs can't reach", "act",
     "{share:.0%} of the targets of {place} are below 0 or above 1 (such as {farthest}): its loss "
     "then falls without bound.", _OUTSIDE,
     Advice("scale the targets into 0 to 1 (masks of 0 and 255: divide by 255), or use another "
            "loss, such as mse_loss"),
     where=lambda fact: "farthest" in fact.words,
     explains=(*LEARNING, "exploding", "non-finite", "unbounded-loss"))  # fmt: skip
# A cross-entropy has its lowest value at their shares, which some models are meant to learn.
told(__name__, "targets-out-of-range", "",
     lambda record: suffers(record)
     and record.found_by("targets-out-of-range")[0].words["function"] != "cross_entropy",
     "The targets of {share:.0%} of the samples sum to more than 1.5, as where a sample has "
     "several classes, but the results of {place} sum to 1.", _OUTSIDE,
     Advice("use a sigmoid for each class, as in binary_cross_entropy_with_logits; or, if each has "
            "one class, make its axis that of the outputs by permute, not by view or reshape"),
     where=lambda fact: "sum" in fact.words)  # fmt: skip
told(__name__, "targets-out-of-range", "", suffers,
     "{share:.0%} of the targets lie outside the range of the outputs: because of {place}, all lie "
     "between {low} and {high}.", _OUTSIDE,
     Advice("remove that function from the outputs, or scale the targets into its range"),
     where=lambda fact: not {"farthest", "sum"} & fact.words.keys())  # fmt: skip


@finds("monitor")
def below_zero(record: Record) -> Iterator[Finding]:
    """Find a loss below zero that no targets, or outputs, for which it is made have."""
    loss = record.reports[-1].loss_module if record.reports else ""
    lowest, is_nll = min(record.losses, default=0.0), loss == "NLLLoss"
    if lowest < BELOW_ZERO and (is_nll or loss in ("BCEWithLogitsLoss", "CrossEntropyLoss")):
        yield Finding("no-log" if is_nll else "targets-out-of-range", "act",
            f"{loss} falls to {lowest:.3g}, but is never below zero "
            + ("of log-probabilities." if is_nll else "if all targets lie between 0 and 1."),
            (Evidence("lowest loss", lowest, BELOW_ZERO),),
            (Advice("use log_softmax over the classes before this loss, or cross_entropy" if is_nll
                    else "look for labels of −1, and for logits or scores among the targets"),),
            "A lower learning rate only makes it fall more slowly.")  # fmt: skip


told(__name__, "outputs-forced", "Outputs of a forced mean and variance", suffers,
     "{place} gives the outputs of all samples the same mean and variance, but means of samples "
     "make {share:.0%} of the targets' variance.",
     Number("share of the targets' variance that is of means", "share", above=FORCED),
     Advice("leave out the normalisation behind the last layer"),
     explains=LEARNING)  # fmt: skip


told(__name__, "dropout-on-outputs", "Dropout on the outputs", suffers,
     "{place} sets {rate:.0%} of the outputs to 0 in each step, before the loss compares them with "
     "their targets.",
     Number("dropout rate of the outputs", "rate", above=0.0),
     Advice("remove that dropout", "outputs-without-dropout"),
     explains=LEARNING, acts_below=0.8)  # fmt: skip


# Targets that are further ahead may be meant, as in predictions of several tokens.
told(__name__, "target-is-input", "Targets that are the wrong tokens",
     lambda record: record.found_by("target-is-input")[0].numbers["places"] <= 1,
     "The target at each position is the input token {places:.0f} places after the last one that "
     "the output depends on, not the next token.", Number("places to the target", "places"),
     Advice("shift the labels once, in the data set, the model or the loss: compare "
            "outputs[:, :-1] with tokens[:, 1:]"),
     certain=True, explains=LEARNING)  # fmt: skip


told(__name__, "label-is-blank", "Labels with the number of the blank", "act",
     "{share:.0%} of the labels of {place} are {blank:.0f}, the number of its blank, which stands "
     "for no label: no output can spell them.",
     Number("share of the labels that are the blank", "share", above=0.0),
     Advice("number the labels from 1, or give the blank a number of its own (blank=)"),
     certain=True, explains=(*LEARNING, "unbounded-loss"))  # fmt: skip


told(__name__, "pairs-reversed", "Pairs the wrong way round", "act",
     "The loss draws pairs together and pushes others apart, the wrong way round: those that it "
     "draws together are nearer in only {share:.0%} of the comparisons.",
     Number("share in which the drawn pair is nearer", "share", below=REVERSED),
     Number("its distance from 1/2, in errors", "errors", below=-CERTAINLY),
     Advice("exchange the labels 0 and 1 of the pairs, or the positives and negatives of the "
            "triplets"),
     certain=True, explains=LEARNING)  # fmt: skip
