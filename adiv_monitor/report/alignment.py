"""The reading of one layer's alignment with its inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

from adiv_monitor.report.reading import Reading, measures_of


@dataclass(frozen=True)
class AlignmentReading(Reading):
    """Alignment of one layer's weights, and of their change, with its inputs. See `alignment/`.

    W₀ and z₀ are the weight and the inputs at the reference point, dW and dz their changes since.

    Attributes:
        role: "embedding", "hidden", "readout" or "excluded".
        kind: "linear", "convolution", "embedding", "table" (indexed or added), "lstm", "gru",
            "rnn_tanh", "rnn_relu", "experts", or the kind of a rule for the module's class.
        fan_in: n, the base of the logarithms; for embeddings and tables, the number of rows.
        fan_out: number of outputs, for blocks those of each block; for embeddings and tables, the
            width.
        predecessors: the layers whose outputs make up the input.
        rows: inputs that were examined, over all ranks of the probe.
        alpha: A(dW, z₀), the update on old features. None wherever a ratio is undefined.
        omega: A(W₀, dz), old weights on the change of features.
        u: A(dW, dz), the update on the change of features.
        cumulative: A(W, z).
        kappa_alpha: n^(alpha − 1), 0 to 1; stays constant as the width grows, unlike alpha.
        kappa_omega: n^(omega − 1).
        kappa_u: n^(u − 1).
        kappa_cumulative: n^(cumulative − 1).
        spectral_alpha: ‖dW z₀‖ / (‖dW‖₂ ‖z₀‖), 0 to 1. Only with `Probe(spectral=True)`.
        spectral_omega: ‖W₀ dz‖ / (‖W₀‖₂ ‖dz‖).
        spectral_u: ‖dW dz‖ / (‖dW‖₂ ‖dz‖).
        spectral_cumulative: ‖W z‖ / (‖W‖₂ ‖z‖).
        effective_rank: of A(W, z): number of directions that weights and inputs share.
        output_rms: RMS of W z, without bias.
        output_change_rms: RMS of W z − W₀ z₀.
    """

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
    spectral_alpha: float | None = None
    spectral_omega: float | None = None
    spectral_u: float | None = None
    spectral_cumulative: float | None = None
    effective_rank: float | None = None
    output_rms: float | None = None
    output_change_rms: float | None = None

    @property
    def standard_error(self) -> Mapping[str, float]:
        """Empty: every step of a probe uses the same rows, and all of them."""
        return {}


# All measures of alignment, in the order of tables and dashboards.
ALIGNMENT_MEASURES = measures_of(AlignmentReading)
