"""What a server really runs, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsRow:
    """Layers of a server that run alike.

    modules: the engine's module name, * for the decoder layer's number; layers: those numbers, "0-2, 5" ("" outside the
    decoder); count: how many modules. kind: "linear", "experts", "head", "embedding" or "attention". method: the
    classes that run it; kernel: what they hold of kernels and backends ("" where none shows); storage: the module's
    tensors and their dtypes (of attention: the cache's).

    By the probe: weights: the stored or converted matrix that comes out ("bf16", "nvfp4", "mxfp4 at load"); match:
    "exact" (every bit of the probed columns), "rounded" (within a step of the output's dtype), "scaled by R", "fits"
    (experts: the output's error is within tolerance), "differs", or why it was not compared; weight_error: the largest
    relative error. activation: what the input is rounded to ("none", a format, "unclear"); activation_scale: how that
    finds its scale; residual: the largest relative error of the prediction that says so. codes: of experts, whether the
    codes in memory are the checkpoint's: "equal", "differ" or "" (kept otherwise). experts: numbers of those probed.
    differing: what batch sizes, fused matrices or experts do not agree on. not_probed: why, "" where it was.

    asked: what the arm says of it ("nvfp4, activations nvfp4"); finding: what of that does not hold, "" where all does.
    NaN where nothing was measured.
    """

    modules: str
    layers: str
    count: int
    kind: str
    method: str
    kernel: str
    storage: str
    weights: str
    match: str
    weight_error: float
    activation: str
    activation_scale: str
    residual: float
    codes: str = ""
    experts: str = ""
    differing: str = ""
    not_probed: str = ""
    asked: str = ""
    finding: str = ""

    @property
    def where(self) -> str:
        """The modules and their layers: "model.layers.*.mlp.down_proj (layers 0-2)"."""
        return f"{self.modules} (layers {self.layers})" if self.layers else self.modules

    @property
    def runs_by(self) -> str:
        """Method and kernel in words."""
        return " / ".join(filter(None, (self.method, self.kernel)))

    @property
    def said_weights(self) -> str:
        """The weights in words: "nvfp4, exact"."""
        said = ", ".join(filter(None, (self.weights, self.match))) or "unknown"
        if self.codes:
            said += f", codes in memory {'equal' if self.codes == 'equal' else 'other than'} the checkpoint's"
        return said

    @property
    def said_input(self) -> str:
        """The input's rounding in words: "nvfp4 (per token)", "not rounded"."""
        if self.activation in ("", "none"):
            return "not rounded" if self.activation else "unknown"
        return f"{self.activation} ({self.activation_scale})" if self.activation_scale else self.activation


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericsCard:
    """One server's numerics, from its loaded modules and a probe of each; server/<arm>.numerics.json.

    backend: the arm's ("stock": vLLM's own path, the plugin switched off). verdict: one line. error: why there is no
    card, or no server ("" where there is one): then rows is empty. findings: one line for every way in which layers do
    not run as the arm says. layers: modules looked at; probed: of those, asked and answered. ranks: worker processes,
    each of which probed its own share. seconds: what it took, of the slowest rank.
    """

    arm: str
    backend: str
    engine_version: str
    device: str
    verdict: str
    findings: tuple[str, ...] = ()
    rows: tuple[NumericsRow, ...] = ()
    layers: int = 0
    probed: int = 0
    ranks: int = 1
    seconds: float = 0.0
    error: str = ""

    @property
    def as_asked(self) -> bool:
        """Whether every layer that was probed runs as the arm says, and there is a server."""
        return not self.findings and not self.error
