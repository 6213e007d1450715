"""The model that was given, which nothing may train."""

from torch import nn


class Given:
    """Finds a loss that uses the model that was given instead of the one that it is called with."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = [
            (p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()
        ]

    def check(self) -> None:
        """After a backward pass of a copy.

        Raises:
            ValueError: the model that was given received gradients; they are put back.
        """
        touched = False
        for parameter, before, values in self._before:
            if parameter.grad is not before:
                touched = True
                parameter.grad = before
            elif before is not None and values is not None and not before.equal(values):
                touched = True
                before.copy_(values)
        self._before.clear()
        if touched:
            raise ValueError(
                "audit(loss=…): loss(model, batch) used the model that was given to audit, "
                "expected the one that it is called with, a copy: use its first argument"
            )
