"""What a server's log says about its death: the cause, the way out, the last lines."""

from __future__ import annotations

import re

_LAST_LINES = 25


def describe_end(log: str, path: str) -> str:
    """ ": cause; the end of its log PATH: …", to be put at the end of a message."""
    lines = [line for line in log.splitlines() if line.strip() and "Route: /" not in line]
    if not lines:
        return f"; its log {path} is empty"
    cause = root_cause(log)
    tail = "\n    ".join(lines[-_LAST_LINES:])
    return f"{f': {cause}' if cause else ''}; the end of its log {path}:\n    {tail}"


def root_cause(log: str) -> str:
    """The first exception that a process of the server reported; what follows it in the log is mostly its echo."""
    for line in log.splitlines():
        found = re.search(r"(?:^|\s|\.)([A-Z]\w*(?:Error|Exception): .+)", line)
        if found and "Engine core initialization failed" not in line and "WARNING" not in line:
            return found[1].strip()
    return ""


def way_out(log: str) -> str:
    """A way out for failures that users meet often."""
    known = {
        "are not supported for now": "vLLM does not know this architecture: use a vLLM version that has it, or"
        " engine=external with a server that has it",
        "is not recognized": "vLLM does not know this architecture: use a vLLM version that has it, or engine=external",
        "Address already in use": "set engine.port=0 for a free port",
        "unrecognized arguments": "engine.args holds a flag that this vLLM does not have",
        "Failed to find a kernel that can implement": "this vLLM has no kernel of its own for the format on this"
        " device: use backend=emulation (our kernels) or reference (decoded)",
        "out of memory": "lower engine.max_model_len, or raise engine.tensor_parallel_size",
        "No available memory for the cache blocks": "raise --kv-cache-memory-bytes in engine.args",
        "is larger than the available KV cache memory": "raise --kv-cache-memory-bytes in engine.args, or lower"
        " engine.max_model_len",
        "max_model_len": "set engine.max_model_len to what the model allows",
    }
    for line in reversed(log.splitlines()):
        if line.strip().startswith("fix: "):
            return line.strip().removeprefix("fix: ")
        for text, fix in known.items():
            if text in line:
                return fix
    return "read the log; `workbench serve` with the same settings repeats the start alone"
