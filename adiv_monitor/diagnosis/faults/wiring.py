"""Is a tensor added to itself, or are the same random numbers drawn again in each step?"""

from adiv_monitor.diagnosis import readings as read
from adiv_monitor.diagnosis.faults.fault import LEARNING, told
from adiv_monitor.diagnosis.faults.rates import suffers
from adiv_monitor.diagnosis.finding import Advice

told(__name__, "added-to-itself", "A sum of one tensor", suffers,
     "{all_places} adds a tensor to itself, which only doubles it.",
     Advice("look which tensor was meant: a skip connection adds the input of its block"),
     explains=LEARNING)  # fmt: skip

told(__name__, "seed-again", "Random numbers that repeat in each step", suffers,
     "Steps end with the same state of torch's random numbers whatever it was before: a seed is "
     "set in each of them, so that dropout, noise and samples are always the same ones.",
     Advice("set the seed once, before the training; for fixed numbers, use a torch.Generator of "
            "their own"),
     certain=True, about="loop", shown_by=read.reported("random_states"))  # fmt: skip
