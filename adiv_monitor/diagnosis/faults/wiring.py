"""Is the model wired as it was meant to be, before its first step?

Is anything multiplied by zero, or are the same random numbers drawn again?
"""

from adiv_monitor.diagnosis.faults.fault import LEARNING, Number, reported, told
from adiv_monitor.diagnosis.faults.loss import lasts
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import Advice
from adiv_monitor.diagnosis.record import Record


def _costs_a_gradient(record: Record) -> bool:
    return suffers(record) or not any(record.gradient_norms)


told(__name__, "added-to-itself", "A sum of one tensor", suffers,
     "{all_places} adds a tensor to itself, which only doubles it.", [Number("such sums")],
     Advice("look which tensor was meant: a skip connection adds the input of its block"),
     explains=LEARNING)  # fmt: skip

told(__name__, "outputs-tied", "Outputs of one module", lasts,
     "{outputs:.0f} outputs are equal to the last bit in every sample, before and after training, "
     "although the loss moves them apart: one module makes all of them.",
     [Number("equal outputs", "outputs", above=1)],
     Advice("make a module for each output: [layer] * n repeats one object"),
     explains=LEARNING)  # fmt: skip

told(__name__, "zero-factor", "A factor of zero in the model", _costs_a_gradient,
     "{all_places} multiplies by 0: what is multiplied has no part in the outputs, and its "
     "parameters get a gradient of 0.", [Number("factors of zero")],
     Advice("look for divisions of whole numbers (4 // 8 is 0), and for scales that begin at 0"),
     where=lambda fact: not fact.numbers,
     explains=(*LEARNING, "no-activation", "frozen"))  # fmt: skip
told(__name__, "zero-factor", "", _costs_a_gradient,
     "The parameters {all_places} begin at 0 and get a gradient of exactly 0, as factors that are "
     "multiplied by each other do: they stay at 0.",
     [Number("parameters that stay at 0", "zeros", above=1)],
     Advice("begin one of two factors with random numbers, as LoRA its first one"))  # fmt: skip


told(__name__, "seed-again", "Random numbers that repeat in each step", suffers,
     "Steps end with the same state of torch's random numbers whatever it was before: a seed is "
     "set in each of them, so that dropout, noise and samples are always the same ones.",
     [Number("places that set the seed")],
     Advice("set the seed once, before the training; for fixed numbers, use a torch.Generator of "
            "their own"),
     certain=True, about="loop", shown_by=reported("random_states"))  # fmt: skip
