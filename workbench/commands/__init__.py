"""What each `workbench` command takes and does; `workbench.cli` has the entry point.

    checkpoints.py       lint, quantize
    calibration.py       calibrate; the capture that quantize asks for too
    analysis.py          analyze
    mixed_precision.py   sensitivity, plan
    whatif.py            whatif
    serving.py           serve, numerics
    answers.py           evaluate, logprobs, kld
    judging.py           compare, gate
    report.py            report
    bench.py             bench kernels, bench serve

Each file's `add_commands` names its commands; the options of a command stand above the function that reads them, which
returns the exit code. A command checks where it is to write before it works (paths.py). Imports that take time stand
inside the functions.
"""
