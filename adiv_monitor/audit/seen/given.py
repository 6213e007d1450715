"""A check that the user's own model is not trained."""

from torch import nn


class Given:
    """Detects a loss that uses the user's model in place of its argument, a copy."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = [
            (p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()
        ]

    def check(self) -> None:
        """Compare the gradients of the user's model with their state before a copy's backward pass.

        Raises:
            ValueError: The user's model received gradients; its former ones are restored.
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
