"""What a layer's step would be with another map, inputs or rate; without training again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Alternative:
    """A layer at one step, as it would be; the gradients that reach it are held as they are.

    Attributes:
        gradient_cosine: as the monitor's measure of that name.
        scale_cv: as the monitor's measure of that name.
        effective_lr: of a plain gradient step of learning rate 1, as the monitor's measure.
    """

    gradient_cosine: float
    scale_cv: float
    effective_lr: float
