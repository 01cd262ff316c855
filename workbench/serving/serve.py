"""The body of `workbench serve`: start one endpoint, say where it is, keep it until Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TextIO

from workbench.interrupt import Interrupted, terminable
from workbench.records import NumericsCard, write_json

from .endpoint import Endpoint, start
from .spec import ServeSpec


def serve_forever(spec: ServeSpec, log: Path, *, numerics: Path | None = None, out: TextIO | None = None) -> None:
    """Serve `spec` until Ctrl-C or SIGTERM, printing its base URL and then its log as it grows.

    numerics: where to write the numerics card (`spec.engine.numerics` must be on); its verdict is printed.
    Raises EngineError when the server dies meanwhile; the server is stopped in every case.
    """
    out = out or sys.stdout
    print(f"starting {spec.arm} ({spec.backend}) from {spec.checkpoint} …", file=out, flush=True)
    with contextlib.suppress(KeyboardInterrupt, Interrupted), terminable(), start(spec, log) as endpoint:
        record = endpoint.record()
        held = f", {record.weight_bytes / 1e6:.1f} MB of weights" if record.weight_bytes else ""
        print(
            f"{endpoint.base_url}  model {endpoint.model}\n"
            f"weights {record.weight_format or 'as the server has them'}, activations {record.activation_format}"
            f" ({record.activation_scale}){held}, ready after {record.ready_s:.0f} s\n"
            f"log {record.log or '-'}; Ctrl-C stops it",
            file=out,
            flush=True,
        )
        card = endpoint.numerics()
        if card is not None:
            print("\n".join([*(f"! {finding}" for finding in card.findings), card.verdict]), file=out, flush=True)
            if numerics is not None:
                write_json(numerics, card)
        _follow(endpoint, out)
    print("stopped", file=out, flush=True)


def take_card(spec: ServeSpec, log: Path) -> NumericsCard:
    """Start `spec`'s server for its numerics card alone, and stop it. Raises what `start` raises."""
    with terminable(), start(spec, log) as endpoint:
        card = endpoint.numerics()
    assert card is not None, "engine.numerics is off"
    return card


def _follow(endpoint: Endpoint, out: TextIO) -> None:
    position = endpoint.log.stat().st_size if endpoint.log else 0
    while True:
        endpoint.check()
        if endpoint.log:
            with endpoint.log.open("rb") as stream:
                stream.seek(position)
                text = stream.read()
            position += len(text)
            if text:
                out.write(text.decode(errors="replace"))
                out.flush()
        time.sleep(0.5)
