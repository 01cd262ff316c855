"""Where the matrices of a pass are measured: in this process, or as tasks of a Ray cluster.

    compute = choose_compute("ray", address="10.0.0.1:6379", cpus=2)     # ConfigError for what cannot be
    with closing(compute.results(matrices, names)) as results:  # in the order of names
        ...

A result depends on its matrix alone and results come in order, so nothing that is written tells the two apart, and a
pass that one began the other goes on with.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

from workbench.errors import ConfigError

if TYPE_CHECKING:
    from .matrices import MatrixPass, Result

KINDS = ("local", "ray")
"""Of the command line and of an experiment's settings as well; importing this file is light."""


class Compute(Protocol):
    """Measures matrices somewhere. Closing the generator ends what is still under way."""

    def results(self, matrices: MatrixPass, names: Sequence[str]) -> Generator[Result]:
        """The result of each name, in their order."""


class LocalCompute:
    """This process, with as many threads as torch takes."""

    def results(self, matrices: MatrixPass, names: Sequence[str]) -> Generator[Result]:
        import torch

        return matrices.results(names, torch.get_num_threads())


def choose_compute(kind: str, *, address: str | None = None, cpus: int = 1, device: str = "cpu") -> Compute:
    """The compute called `kind`. address, cpus: of Ray (`cluster.RayCompute`). device: of the pass.

    Raises ConfigError for another kind, for Ray where its package is not installed, and for Ray with a GPU.
    """
    if kind == "local":
        return LocalCompute()
    if kind != "ray":
        raise ConfigError(f"compute {kind!r} is none that is known", fix=f"choose one of: {', '.join(KINDS)}")
    if device != "cpu":
        raise ConfigError(
            f"device {device!r} with compute=ray: Ray's tasks measure on processors",
            fix="use --device cpu (in an experiment analysis.device=cpu), or --compute local (compute=local)",
        )
    from .cluster import RayCompute

    return RayCompute(address, cpus)
