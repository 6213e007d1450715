"""Is the model wired as it was meant to be, before its first step?

Do hand-written backward passes fit; are modules and masks what they seem; is anything multiplied by
zero, drowned, or written over?
"""

from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, told
from adiv_monitor.diagnosis.faults.loss import lasts
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import Advice

ANOTHER_WAY = 0.5  # cosine of a gradient with the true one; that of a smoother slope is higher
OUTWEIGHS = 10.0  # times the rms of the other addend; sines beside small embeddings have 7
CHANGED = 0.01  # of the length of a batch


told(__name__, "backward-wrong", "A backward pass of another function",
     lambda record: suffers(record)
     or record.found_by("backward-wrong")[0].numbers["cosine"] < ANOTHER_WAY,
     "The backward pass of the custom function {place} is not the derivative of its forward pass: "
     "where finite differences give {slope:.3g}, it gives {backward:.3g}.",
     [Number("cosine with finite differences", "cosine")],
     Advice("correct formula and sign in backward(), until torch.autograd.gradcheck passes"),
     explains=LEARNING)  # fmt: skip

told(__name__, "outputs-tied", "Outputs of one module", lasts,
     "{outputs:.0f} outputs are equal to the last bit in every sample, before and after training, "
     "although the loss moves them apart: one module makes all of them.",
     [Number("equal outputs", "outputs", above=1)],
     Advice("make a module for each output: [layer] * n repeats one object"),
     explains=LEARNING)  # fmt: skip

told(__name__, "mask-ignored", "A mask without effect", suffers,
     "The mask {place} has no effect: if it is inverted, no output changes, neither before nor "
     "after training.", [Number("masks without effect")],
     Advice("look at what hidden places get before the softmax (−1e9 or −inf, not −1e-9), at the "
            "mask's shape, and whether its result is used"),
     explains=(*LEARNING, "order-ignored", "input-partly-ignored", "padding-read"))  # fmt: skip

told(__name__, "zero-factor", "A factor of zero in the model",
     lambda record: suffers(record) or not any(record.gradient_norms),
     "{all_places} multiplies by 0: what is multiplied has no part in the outputs, and its "
     "parameters get a gradient of 0.", [Number("factors of zero")],
     Advice("look for divisions of whole numbers (4 // 8 is 0), and for scales that begin at 0"),
     explains=(*LEARNING, "no-activation", "frozen"))  # fmt: skip

told(__name__, "addend-outweighs", "An addend that drowns the other", suffers,
     "{place} adds numbers that are {times:.3g} times as large as what they are added to, and the "
     "same for all samples or whole, as raw positions and IDs are.",
     [Number("size of the addend, over the other's", "times", above=OUTWEIGHS)],
     Advice("use an embedding of positions and IDs, or scale the numbers to about 1"),
     explains=(*LEARNING, "bad-initialisation", "input-ignored"))  # fmt: skip

told(__name__, "input-written", "Data that are written over",
     lambda record: record.found_by("input-written")[0].numbers["times"] > 1,
     "{place} changes the batch in place, by {change:.0%} of its length, and again in each pass: a "
     "batch that comes again has other values. (The audit gave copies.)",
     [Number("change of the batch", "change", above=CHANGED)],
     Advice("compute anew (x / 4, not x /= 4 or x.div_(4)), or clone() the input first"),
     certain=True)  # fmt: skip


told(__name__, "seed-again", "Random numbers that repeat in each step", suffers,
     "The loss ends with the same state of torch's random numbers whatever it was before: a seed "
     "is set in each step, so that dropout, noise and samples are the same ones in all of them.",
     [Number("places that set the seed")],
     Advice("set the seed once, before the training; for fixed numbers, use a torch.Generator of "
            "their own"), certain=True)  # fmt: skip
