"""The one exception of our own."""


class AdivError(RuntimeError):
    """The monitor met a state of the training run in which it can't do what was asked."""
