"""What is said of one layer's alignment with its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from adiv_monitor.report.written import read


@dataclass(frozen=True)
class AlignmentReading:
    """How one layer's weights and their change are aligned with its inputs. See `alignment/`.

    With W₀, z₀ the weight and the inputs at the reference point, dW and dz what has changed since:

    Attributes:
        role: "embedding", "hidden", "readout" or "excluded".
        kind: "linear", "convolution", "embedding", "table" (one that is indexed or added), "lstm",
            "gru", "rnn_tanh", "rnn_relu", "experts", or that of a rule of the module's class.
        fan_in: n, the base of the logarithms; of embeddings and tables, their rows.
        fan_out: outputs, of blocks those of each; of embeddings and tables, how wide they are.
        predecessors: the layers whose outputs make up the input.
        rows: inputs that were looked at, over all ranks of the probe.
        alpha: A(dW, z₀), the update on old features. None wherever a ratio is undefined.
        omega: A(W₀, dz), old weights on the change of features.
        u: A(dW, dz), the update on that change.
        cumulative: A(W, z).
        kappa_alpha: n^(alpha − 1), 0 to 1: what stays where the width grows, as alpha does not.
        kappa_omega: the same of omega.
        kappa_u: the same of u.
        kappa_cumulative: the same of A(W, z).
        effective_rank: of A(W, z): over how many directions weights and inputs are spread alike.
        output_rms: RMS of W z, without bias.
        output_change_rms: RMS of W z − W₀ z₀.
    """

    _null_is_nan: ClassVar[bool] = True  # what is None is left out
    role: str
    kind: str
    fan_in: int
    fan_out: int
    predecessors: tuple[str, ...]
    rows: int
    alpha: float | None = None
    omega: float | None = None
    u: float | None = None
    cumulative: float | None = None
    kappa_alpha: float | None = None
    kappa_omega: float | None = None
    kappa_u: float | None = None
    kappa_cumulative: float | None = None
    effective_rank: float | None = None
    output_rms: float | None = None
    output_change_rms: float | None = None

    @property
    def standard_error(self) -> Mapping[str, float]:
        """None: the rows of a probe are the same at each step, and all are looked at."""
        return {}

    def measures(self) -> dict[str, float]:
        """The measures that are defined, by name."""
        taken = ((name, getattr(self, name)) for name in ALIGNMENT_MEASURES)
        return {name: value for name, value in taken if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything, without the measures that are undefined."""
        record = {name: getattr(self, name) for name in ("role", "kind", "fan_in", "fan_out")}
        record |= {"predecessors": list(self.predecessors), "rows": self.rows}
        return {**record, **self.measures()}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> "AlignmentReading":
        """The reading that `to_dict` made a record of; see `StepReport.from_dict`."""
        return read(AlignmentReading, record)


# Every measure of alignment, in the order of tables and dashboards.
ALIGNMENT_MEASURES: tuple[str, ...] = tuple(
    f.name for f in fields(AlignmentReading) if f.default is None
)
