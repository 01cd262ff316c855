"""The front door: compose an experiment, run its stages, return its verdict as the exit code.

    python -m workbench.run experiment=kimi_requant
    python -m workbench.run experiment=kimi_requant model=local model.root=/path/to/bf16 'eval=[gsm8k]'
    python -m workbench.run --help | --cfg job | --multirun …

Exit codes: 0 pass, 1 regression, 2 inconclusive or invalid, 3 could not run. Only the gate may produce 0, 1 or 2 for a
run; a Hydra error, an unknown override, a signal or a bug ends in 3, a bug with its traceback. Several jobs
(--multirun) all run, and the worst counts: 1, then 3, then 2, then 0.
"""

from __future__ import annotations

import os
import sys
import traceback

import hydra
from omegaconf import DictConfig

from workbench.errors import WorkbenchError
from workbench.interrupt import Interrupted, terminable
from workbench.settings import register_resolvers

COULD_NOT_RUN = 3
SEVERITY = (1, 3, 2, 0)  # the worst of several jobs comes first


def main(argv: list[str] | None = None) -> int:
    """Run the front door with Hydra's command line; returns the exit code (0 for --help, --cfg and --info)."""
    register_resolvers()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads sleep: the engine shares these cores
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path="pkg://workbench.conf", config_name="config")
    def jobs(config: DictConfig) -> None:
        codes.append(_run_one(config))

    arguments = sys.argv
    if argv is not None:
        sys.argv = ["python -m workbench.run", *argv]
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing its own text and exiting 1
    try:
        with terminable():
            jobs()
    except SystemExit as stop:  # Hydra's own errors and argparse's bad flags
        if stop.code not in (None, 0):
            codes.append(COULD_NOT_RUN)
    except (KeyboardInterrupt, Interrupted):
        print("interrupted: endpoints are stopped; continue with resume=latest", file=sys.stderr)
        codes.append(COULD_NOT_RUN)
    except Exception as error:  # a job's own errors end in _run_one: this one came while composing
        if _is_composition_error(error):
            print(f"error: {str(error).strip()}", file=sys.stderr)
            print("  fix: --help lists the groups and their choices, --cfg job shows every key", file=sys.stderr)
        else:
            traceback.print_exc()
        codes.append(COULD_NOT_RUN)
    finally:
        sys.argv = arguments
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    return next((code for code in SEVERITY if code in codes), 0)


def _run_one(config: DictConfig) -> int:
    """One job. Never raises but for an interruption: in a multirun the other jobs still run."""
    try:
        from workbench.experiment import run_experiment

        return run_experiment(config)
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        print("this is a bug in the workbench; the traceback above says where", file=sys.stderr)
    return COULD_NOT_RUN


def _is_composition_error(error: Exception) -> bool:
    """Whether Hydra or OmegaConf refused an override: their own types, or a plain error raised in their code."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(part in frames[-1].filename for part in ("/hydra/", "/omegaconf/", "/antlr4/"))


if __name__ == "__main__":
    sys.exit(main())
