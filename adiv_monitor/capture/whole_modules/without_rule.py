"""Parameters without a rule, and the modules through which they are measured."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from adiv_monitor.capture.forwards import Forward
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.whole_modules.outputs import Outputs
from adiv_monitor.capture.world import world_size
from adiv_monitor.features.features import JacobianFeatures
from adiv_monitor.features.rows import Rows, compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.derivatives import pattern, tolerance
from adiv_monitor.rerun.twin import Arguments, Twin

_ADVICE = "register_features adds a rule for its class"


class ParametersWithoutRule:
    """Finds the parameters without a rule that must be measured through a module that has run.

    These are the parameters that an output depends on although no rule accounts for them: a
    function without a rule, or none that is visible, took them. Each one goes to the innermost
    module that ran and holds it at any depth.

    Args:
        selection: the parameters to measure.

    Attributes:
        unmeasured: id of a parameter → the reason why its use can't be measured.
    """

    def __init__(self, selection: Selection) -> None:
        self.unmeasured: dict[int, str] = {}
        self._functions: dict[int, str] = {}  # by id of a parameter, the last one without a rule
        self._accounted: set[int] = set()
        for module in selection.rules:
            self._accounted |= {id(p) for p in module._parameters.values() if p is not None}
        self._held = selection.below
        self._claims: dict[int, set[nn.Module]] = defaultdict(set)
        self._before: dict[int, Tensor] = {}  # copies of parameters, see `Twin`

    def account(self, keys: Iterable[int]) -> None:
        """Record that a rule accounts for a use of the parameters with these ids."""
        self._accounted.update(keys)

    def leave(self, keys: Iterable[int], function: str) -> None:
        """Record that a function without a rule took the parameters with these ids."""
        self._functions |= dict.fromkeys(keys, function)

    def release(self) -> None:
        """Release copies of parameters, which are not needed after the step."""
        self._before = {}

    def why(self, key: int) -> str | None:
        """Return the reason why a parameter is not measured; None if it is or was not seen."""
        if key in self._functions and key not in self._accounted:
            return self.unmeasured.get(key) or (
                f"it is used by torch's {self._functions[key]}, for which there is no rule, and no "
                "module that holds it returns the result as rows"
            )
        return self.unmeasured.get(key)

    def may_be_in(self, module: nn.Module) -> bool:
        """Return whether the module may hold parameters without a rule at any depth."""
        return not self._held[module] <= self._accounted

    def claim(
        self, module: nn.Module, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[str]:
        """Return the names, in the module, of the parameters to be measured through it."""
        left = self._held[module] - self.unmeasured.keys() - self._accounted
        if not self._claims.keys().isdisjoint(left):  # claimed by modules inside this one
            below = set(module.modules()) - {module}
            left = {key for key in left if below.isdisjoint(self._claims.get(key, ()))}
        found = left & _leaves_of(outputs, inputs) if left else left
        for key in found:
            self._claims[key].add(module)
        return [name for name, p in module.named_parameters() if id(p) in found] if found else []

    def refuse(self, parameters: Iterable[Tensor], reason: str) -> None:
        """Record why parameters can't be measured through a module."""
        self.unmeasured |= dict.fromkeys(map(id, parameters), reason)

    def features(
        self,
        module: nn.Module,
        names: Sequence[str],
        arguments: Arguments,
        outputs: Outputs,
        expected: Tensor,
        began: Forward,
        rows: Rows,
    ) -> JacobianFeatures:
        """Return how the chosen rows of z move with the parameters.

        Args:
            module: the module, whose forward has just run.
            names: the names of the parameters.
            arguments: the arguments of the forward.
            outputs: determines z in its output.
            expected: z of the chosen rows (rows, n_total).
            began: the state at the beginning of the forward.
            rows: the chosen rows.

        Raises:
            Refused: the forward can't be repeated, or has no derivatives.
        """
        if world_size() > 1:
            raise Refused(
                "no rule describes what it computes, and with several ranks it is not run again, "
                f"because it may wait for the other ranks; {_ADVICE}"
            )
        moving = {name: module.get_parameter(name).detach() for name in names}
        sizes = [p.numel() for p in moving.values()]
        tried = pattern(expected.new_empty(sum(sizes), dtype=compute_dtype(expected)))
        length = float(torch.linalg.vector_norm(expected))

        def run(vector: Tensor) -> tuple[Tensor, Tensor]:
            """Return the rows of z and their J_Θ(z) ΔΘ for ΔΘ as one vector."""
            parts = zip(moving.items(), torch.split(vector, sizes), strict=True)
            tangents = {name: part.view_as(p) for (name, p), part in parts}
            z, moved = twin.jvp(tangents, lambda output: outputs.rows(outputs.of(output)))
            return rows.take(z), rows.take(moved)

        try:
            twin = Twin(module, tree_map(_copied, arguments), began.random, self._before)
            again, _ = run(tried)
            away = float(torch.linalg.vector_norm(again - expected))
            if not away <= tolerance(max(twin.precision, outputs.precision)) * length:
                raise RuntimeError(
                    f"it returned another output (off by {away:.2g} of {length:.2g}): a hook "
                    "changes it, or it changes its input, a buffer, a frozen parameter or another "
                    "state, or draws random numbers from other generators than torch's"
                )
        except Exception as error:
            first_line = f"its forward can't be run again with derivatives: {error}".splitlines()[0]
            raise Refused(f"{first_line}; {_ADVICE}") from error
        return JacobianFeatures(lambda vector: run(vector)[1])


def _leaves_of(tensors: Iterable[Tensor], inputs: Iterable[Tensor]) -> set[int]:
    """Return ids of the leaves that tensors are computed from other than through the inputs."""
    seen: set[Any] = {tensor.grad_fn for tensor in inputs}
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    leaves = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
            leaves.add(id(getattr(node, "variable", None)))
    return leaves


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
