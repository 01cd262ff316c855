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

import hydra
from omegaconf import DictConfig

from workbench.composition import is_refusal, register_resolvers, way_out
from workbench.entry import COULD_NOT_RUN, complain, explain, safe_streams
from workbench.interrupt import terminable

SEVERITY = (1, 3, 2, 0)  # the worst of several jobs comes first
AGAIN = "continue with resume=latest; the endpoints are stopped"
BAD_FLAG = (
    "settings are KEY=VALUE and stand side by side, all before or all after the flags, e.g. --multirun"
    " experiment=kimi_requant seed=1,2; --help lists what can be set, --hydra-help the flags"
)


def main(argv: list[str] | None = None) -> int:
    """Run the front door with Hydra's command line; returns the exit code (0 for --help, --cfg and --info)."""
    safe_streams()
    register_resolvers()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads sleep: the engine shares these cores
    codes: list[int] = []
    arguments = sys.argv
    if argv is not None:
        sys.argv = ["python -m workbench.run", *argv]
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing its own text and exiting 1
    try:
        _run_jobs(codes)
        sys.stdout.flush()  # a full disk or a reader that has gone is found here, not at the interpreter's end
    except BaseException as error:  # a job's own errors end in _run_one: this one came before it, or ended it
        if isinstance(error, Exception) and is_refusal(error):
            complain(str(error).strip(), way_out(error))
            codes.append(COULD_NOT_RUN)
        else:
            codes.append(explain(error, again=AGAIN))
    finally:
        sys.argv = arguments
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    return next((code for code in SEVERITY if code in codes), 0)


def _run_jobs(codes: list[int]) -> None:
    """Let Hydra compose and run every job of the command line; their exit codes are appended."""

    @hydra.main(version_base="1.3", config_path="pkg://workbench.conf", config_name="config")
    def jobs(config: DictConfig) -> None:
        codes.append(_run_one(config))

    try:
        with terminable():
            jobs()
    except SystemExit as stop:  # argparse's bad flags, after their own text; --help and --version end here as well
        if stop.code not in (None, 0):
            print(f"  fix: {BAD_FLAG}", file=sys.stderr)
            codes.append(COULD_NOT_RUN)


def _run_one(config: DictConfig) -> int:
    """One job. Never raises but for an interruption: in a multirun the other jobs still run."""
    try:
        from workbench.experiment import run_experiment

        return run_experiment(config)
    except Exception as error:
        return explain(error, again=AGAIN)


if __name__ == "__main__":
    sys.exit(main())
