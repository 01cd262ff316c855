"""An endpoint's life: start a server for an arm, wait until it answers, record what it was, stop it.

    with start(spec, log=Path("server/nvfp4.log")) as endpoint:
        ...  # endpoint.base_url is http://127.0.0.1:PORT/v1, endpoint.model its name there
        record = endpoint.record()

The server is always stopped: at the end of the block, on an error, on Ctrl-C, and when this process is killed (a small
supervisor holds the process tree). `engine.kind = "external"` probes a server that someone else runs; load time and
memory are then not ours to measure.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from workbench.errors import EngineError, OutputError
from workbench.records import NumericsCard, ServerRecord

from . import command as commands
from . import probe, serverlog
from .numerics import facts_path, read_card
from .spec import STOCK, ServeSpec

GRACE_S = 5.0  # from asking a server to stop to killing it: it keeps nothing worth more
_SAMPLE_S = 0.5


def start(spec: ServeSpec, log: Path) -> Endpoint:
    """Start (or, for an external engine, reach) the endpoint of `spec` and wait until it answers.

    log: the server's output, written anew; the worker's audit (`<stem>.audit.json`) and what it runs
    (`<stem>.facts.json`, of `numerics`) are written beside it.
    Raises ConfigError or CheckpointError for what is wrong before a process starts, EngineError when the port is
    taken, the server dies (with the cause and the last lines of its log), never answers within
    `engine.startup_timeout_s`, or is reached but is no OpenAI-compatible server; OutputError for the log's folder.
    """
    if spec.engine.kind == "external":
        return _reach(spec)
    fingerprint = _check(spec)
    port = _take_port(spec.engine.host, spec.engine.port)
    model = spec.engine.model or spec.arm
    audit = _fresh_audit(log)
    command, env = commands.build_command(spec, port=port, model=model, audit=audit)
    endpoint = Endpoint(spec, f"http://{spec.engine.host}:{port}/v1", model, log=log, fingerprint=fingerprint)
    try:
        endpoint._launch(command, env, audit)
        endpoint._wait_until_ready()
    except BaseException:
        endpoint.stop()
        raise
    return endpoint


class Endpoint:
    """A server that answers. Use it as a context manager, or call `stop`."""

    def __init__(self, spec: ServeSpec, base_url: str, model: str, *, log: Path | None = None, fingerprint: str = ""):
        self.spec, self.base_url, self.model, self.log = spec, base_url, model, log
        self.command: list[str] = []
        self._fingerprint = fingerprint
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._audit: Path | None = None
        self._started = time.monotonic()
        self._card: NumericsCard | None = None
        self._ready_s = math.nan
        self._peak_rss = 0
        self._known: dict[int, float] = {}  # process id -> creation time, of everything seen below the supervisor
        self._stopping = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def alive(self) -> bool:
        """Whether the server process runs (always True for an external one)."""
        return self._supervisor is None or self._supervisor.poll() is None

    def check(self) -> None:
        """Raise EngineError with the end of the log when the server has died since it was started."""
        if not self.alive():
            raise EngineError(
                f"the server of arm {self.spec.arm} has died (exit code {self._exit_code()}){self._log_tail()}",
                fix=serverlog.way_out(self._log_text()),
            )

    def record(self) -> ServerRecord:
        """What this endpoint was and cost so far. Can be taken again; memory is the peak until now."""
        spec, engine = self.spec, self.spec.engine
        audit = _read_audit(self._audit)
        layers = audit.get("layers", {})
        card = self.numerics()
        weights, activation, scale = _of_card(card) if card and spec.backend == STOCK else ("", "none", "none")
        return ServerRecord(
            arm=spec.arm,
            engine=engine.kind,
            base_url=self.base_url,
            model=self.model,
            checkpoint=str(spec.checkpoint),
            backend=spec.backend,
            weight_format=_summary(layers, "weight") or (spec.format or weights),
            activation_format=_summary(layers, "activation", ignore=("none",)) or activation,
            activation_scale=_activation_scale(layers) if layers else scale,
            kv_cache_dtype=spec.kv_cache_dtype,
            dtype=engine.dtype,
            command=tuple(self.command),
            args=dict(engine.args),
            env={k: str(v) for k, v in engine.env.items()},
            engine_version=audit.get("engine_version") or self._external_version(),
            fingerprint=self._fingerprint,
            ready_s=self._ready_s - (card.seconds if card else 0.0),
            load_s=float(audit.get("load_s", math.nan)),
            peak_rss_bytes=self._peak_rss or None,
            weight_bytes=audit.get("weight_bytes"),
            layers=layers,
            log=str(self.log) if self.log else "",
        )

    def numerics(self) -> NumericsCard | None:
        """The card of what the server runs; None where it was not asked for one (`engine.numerics`)."""
        if self._audit is None or not self.spec.engine.numerics:
            return None
        if self._card is None:
            self._card = read_card(self.spec, facts_path(self._audit))
        return self._card

    def resident_bytes(self) -> int | None:
        """What the server's processes hold now; None for an external one, or where none is seen."""
        return None if self._supervisor is None else self._sample() or None

    def stop(self) -> None:
        """End the server and everything below it. Safe to call twice; an external server is left alone."""
        self._stopping.set()
        supervisor = self._supervisor
        if supervisor is not None:
            self._sample()
            if supervisor.stdin and not supervisor.stdin.closed:
                with contextlib.suppress(OSError):
                    supervisor.stdin.close()  # the supervisor's signal to stop
            try:
                supervisor.wait(GRACE_S + 10)
            except subprocess.TimeoutExpired:
                supervisor.kill()
                supervisor.wait()
            self._kill_leftovers()
        if self._sampler is not None and self._sampler is not threading.current_thread():
            self._sampler.join(timeout=5)

    # ---- private

    def _launch(self, command: list[str], env: dict[str, str], audit: Path) -> None:
        self.command, self._audit = command, audit
        environment = {**os.environ, **env}
        if "VLLM_CPU_KVCACHE_SPACE" in environment and not environment["VLLM_CPU_KVCACHE_SPACE"]:
            del environment["VLLM_CPU_KVCACHE_SPACE"]  # vLLM fails on an empty one
        assert self.log is not None
        with self.log.open("wb") as stream:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "workbench.serving.supervise", str(GRACE_S), *command],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the workbench, which then stops the server
            )
        self._sampler = threading.Thread(target=self._sample_until_stopped, name="rss", daemon=True)
        self._sampler.start()

    def _wait_until_ready(self) -> None:
        deadline = self._started + self.spec.engine.startup_timeout_s
        root = self.base_url.removesuffix("/v1")
        while not probe.healthy(root):
            if not self.alive():
                raise EngineError(
                    f"the server of arm {self.spec.arm} died at start (exit code {self._exit_code()})"
                    f"{self._log_tail()}",
                    fix=serverlog.way_out(self._log_text()),
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the server of arm {self.spec.arm} did not answer within"
                    f" {self.spec.engine.startup_timeout_s:.0f} s{self._log_tail()}",
                    fix="raise engine.startup_timeout_s, or read the log",
                )
            time.sleep(0.2)
        try:
            probe.complete_one_token(self.base_url, self.model)
        except EngineError as error:
            raise EngineError(f"{error.message}{self._log_tail()}", fix=error.fix) from error
        self._ready_s = time.monotonic() - self._started

    def _exit_code(self) -> int | None:
        return self._supervisor.poll() if self._supervisor else None

    def _external_version(self) -> str:
        return "" if self.spec.engine.kind == "external" else commands.engine_version()

    def _log_text(self) -> str:
        try:
            return self.log.read_text(errors="replace") if self.log else ""
        except OSError:
            return ""

    def _log_tail(self) -> str:
        return serverlog.describe_end(self._log_text(), str(self.log))

    def _sample_until_stopped(self) -> None:
        while not self._stopping.wait(_SAMPLE_S):
            if not self.alive():
                return
            self._sample()

    def _sample(self) -> int:
        import psutil

        total = 0
        assert self._supervisor is not None
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._supervisor.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self._known[process.pid] = process.create_time()
                    total += process.memory_info().rss
        self._peak_rss = max(self._peak_rss, total)
        return total

    def _kill_leftovers(self) -> None:
        """What outlived the supervisor (only when that was killed itself)."""
        import psutil

        for pid, created in self._known.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created:
                    process.kill()


# ---- before the start ------------------------------------------------------------------------------------------------


def _check(spec: ServeSpec) -> str:
    """Everything that can be found wrong without starting a process; returns the checkpoint's fingerprint."""
    import importlib.util

    from workbench.checkpoints import open_checkpoint

    from .vllm_plugin.settings import plan_modules

    settings = commands.plugin_settings(spec) if spec.backend != STOCK else None
    with open_checkpoint(spec.checkpoint) as checkpoint:
        if settings is not None:
            plan_modules(checkpoint, settings)
        fingerprint = checkpoint.fingerprint()
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed in this environment",
            fix="pip install 'quantization-workbench[cpu]' (or [gpu]), or use engine=external engine.base_url=…",
        )
    return fingerprint


def _take_port(host: str, port: int) -> int:
    """`port` when it is free, a free one for 0. Raises EngineError when it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((host, port))
        except socket.gaierror as error:
            raise EngineError(
                f"cannot listen on {host}: {error.strerror or error}",
                fix="give an address of this machine, e.g. 127.0.0.1",
            ) from error
        except OSError as error:
            raise EngineError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                fix="stop what uses that port, or set engine.port=0 for a free one",
            ) from error
        return probe_socket.getsockname()[1]


def _fresh_audit(log: Path) -> Path:
    """Where the worker writes its audit, beside the log; what an earlier server left there is removed."""
    audit = log.with_name(f"{log.stem}.audit.json")
    try:
        audit.parent.mkdir(parents=True, exist_ok=True)
        for name in (audit.name, facts_path(audit).name):
            for old in audit.parent.glob(f"{name}*"):
                old.unlink()
    except OSError as error:
        raise OutputError(
            f"cannot write in {audit.parent}: {error.strerror or error}", fix="choose another output folder"
        ) from error
    return audit


def _reach(spec: ServeSpec) -> Endpoint:
    started = time.monotonic()
    base_url = spec.engine.base_url.rstrip("/")
    listed = probe.list_models(base_url)
    model = spec.engine.model or listed[0]
    if model not in listed:
        raise EngineError(
            f"{base_url} does not serve {model!r}; it lists {', '.join(listed)}", fix="set engine.model to one of those"
        )
    probe.complete_one_token(base_url, model)
    endpoint = Endpoint(spec, base_url, model)
    endpoint._ready_s = time.monotonic() - started
    return endpoint


# ---- reading back ----------------------------------------------------------------------------------------------------


def _read_audit(path: Path | None) -> dict[str, Any]:
    """The workers' audits merged: bytes are summed over ranks."""
    if path is None or not path.exists():
        return {}
    merged = json.loads(path.read_text())
    for other in sorted(path.parent.glob(f"{path.name}.rank*")):
        rank = json.loads(other.read_text())
        merged["weight_bytes"] += rank["weight_bytes"]
        merged["load_s"] = max(merged["load_s"], rank["load_s"])
        for name, layer in rank["layers"].items():
            if name in merged["layers"]:
                merged["layers"][name]["weight_bytes"] += layer["weight_bytes"]
    return merged


def _of_card(card: NumericsCard) -> tuple[str, str, str]:
    """Weights, activations and their scale, by what most layers that compute run: of a server without our audit."""
    counts: list[dict[str, int]] = [{}, {}, {}]
    for row in card.rows:
        quantized = row.activation not in ("", "none")
        for found, value in zip(
            counts,
            (row.weights, row.activation if quantized else "", row.activation_scale if quantized else ""),
            strict=True,
        ):
            if value:
                found[value] = found.get(value, 0) + row.count
    weights, activation, scale = ("+".join(sorted(found, key=lambda k: -found[k])) for found in counts)
    return weights, activation or "none", scale or "none"


def _summary(layers: dict[str, dict[str, Any]], key: str, ignore: tuple[str, ...] = ()) -> str:
    """The formats by their share of bytes, the largest first: "mxfp4+bf16"."""
    shares: dict[str, int] = {}
    for layer in layers.values():
        value = layer[key].split()[0]
        if value not in ignore:
            shares[value] = shares.get(value, 0) + layer["weight_bytes"]
    return "+".join(sorted(shares, key=lambda k: -shares[k]))


def _activation_scale(layers: dict[str, dict[str, Any]]) -> str:
    kinds = {layer["activation_scale"] for layer in layers.values()} - {"none"}
    return kinds.pop() if len(kinds) == 1 else ("mixed" if kinds else "none")
