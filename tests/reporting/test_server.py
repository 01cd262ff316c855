"""The server: its own pages and nothing else, to this machine alone, and an end without a fuss."""

from __future__ import annotations

import http.client
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench import cli
from workbench.errors import ConfigError
from workbench.reporting.server import Server, pages_of_folder, pages_of_runs

from .variants import make_variants, opened

PAGE = '<!DOCTYPE html><meta http-equiv="Content-Security-Policy" content="default-src \'none\'"><title>report</title>'


@pytest.fixture(scope="module")
def runs(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = make_variants(sample_run, tmp_path_factory.mktemp("server") / "reports")
    for name in ("damaged", "unfinished"):
        shutil.rmtree(found.pop(name))
    for run in found.values():
        (run / "report.html").write_text(PAGE)
        (run / "summary.md").write_text("# summary\n")
    (found["first"].parent / "secret.html").write_text("secret")
    return found


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Server]:
    with Server(pages_of_folder(runs["first"].parent.parent), 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_pages_have_their_types_and_policies(server: Server) -> None:
    status, headers, body = ask(server, "/")
    assert status == 200
    assert b"kimi_requant/first" in body
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy
    assert policy.endswith("frame-ancestors 'none'")
    assert policy.partition("; frame-ancestors")[0] in body.decode().replace("&#39;", "'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, headers, body = ask(server, "/run/kimi_requant/first/report.html")
    assert (status, body.decode()) == (200, PAGE)
    assert headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
    status, headers, _ = ask(server, "/run/kimi_requant/first/summary.md")
    assert (status, headers["Content-Type"]) == (200, "text/markdown; charset=utf-8")


def test_the_index_links_to_pages_that_answer(server: Server) -> None:
    body = ask(server, "/")[2].decode()
    links = [part.partition('"')[0] for part in body.split('href="')[1:] if not part.startswith("#")]
    assert len(links) == 3
    assert all(ask(server, f"/{link}")[0] == 200 for link in links)


@pytest.mark.parametrize(
    "path",
    [
        "/run/kimi_requant/first/config.yaml", "/run/kimi_requant/first/", "/run/kimi_requant/first", "/run/",
        "/run/kimi_requant/secret.html", "/run/kimi_requant/first/../secret.html", "/kimi_requant/first/report.html",
        "/../../../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/etc/passwd",
        "/run/kimi_requant/first/report.html/../../secret.html", "/run/kimi_requant/first/report.html%00.md",
        "/run/kimi_requant/first/eval/nvfp4/scores.json", "/.", "/..", "/%ff%fe",
    ],
)  # fmt: skip
def test_nothing_else_of_the_disk_is_served(server: Server, path: str) -> None:
    status, headers, body = ask(server, path)
    assert status == 404
    assert b"secret" not in body
    assert b"root:" not in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_only_reading_and_only_by_this_machines_name(server: Server) -> None:
    assert ask(server, "/", Host="evil.example")[0] == 403
    assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200
    status, headers, body = ask(server, "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method=method)[0] == 501
    assert server.server_address[0] == "127.0.0.1"


def test_a_new_run_is_there_at_the_next_look(server: Server, runs: dict[str, Path]) -> None:
    new = runs["first"].parent / "new"
    assert ask(server, "/run/kimi_requant/new/summary.md")[0] == 404
    shutil.copytree(runs["first"], new)
    try:
        assert b"kimi_requant/new" in ask(server, "/")[2]
        assert ask(server, "/run/kimi_requant/new/summary.md")[0] == 200
    finally:
        shutil.rmtree(new)


def test_several_runs_are_served_side_by_side(runs: dict[str, Path], browser: Any) -> None:
    with Server(pages_of_runs([runs["first"], runs["other"]]), 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        with opened(browser, served.url) as page:
            page.select_option("#baseline", "B.source")
            assert page.inner_text('#cost tr[data-entry="B.source"] td[data-f="load"] .against') == "baseline"
        status, _, body = ask(served, "/1/report.html")
        assert (status, body.decode()) == (200, PAGE)
        assert ask(served, "/2/report.html")[0] == 404
        served.shutdown()


def test_one_run_is_served_as_it_was_written(runs: dict[str, Path]) -> None:
    with Server(pages_of_runs([runs["first"]]), 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        assert ask(served, "/")[2].decode() == PAGE
        assert ask(served, "/summary.md")[0] == 200
        assert ask(served, "/config.yaml")[0] == 404
        served.shutdown()


def test_what_cannot_be_shown_is_an_error_page_and_the_server_stays(runs: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "<root>"
    shutil.copytree(runs["first"], root / "run")
    with Server(pages_of_folder(root), 0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        root.rename(tmp_path / "moved")
        status, _, body = ask(served, "/")
        assert status == 500
        assert b"is no folder" in body
        assert b"<root>" not in body
        (tmp_path / "moved").rename(root)
        assert ask(served, "/")[0] == 200
        served.shutdown()


def test_a_port_that_cannot_be_had_is_a_clear_error(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            Server(lambda path: None, port)
        folder = str(runs["first"].parent)
        assert cli.main(["report", "--serve", "--no-open", "--index", folder, "--port", str(port)]) == 3
        assert "--port 0" in capsys.readouterr().err
    assert cli.main(["report", "--serve", "--port", "70000"]) == 3
    assert "from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_ends_cleanly(runs: dict[str, Path], stop: signal.Signals) -> None:
    folder = runs["first"].parent
    command = [
        sys.executable,
        "-m",
        "workbench.cli",
        "report",
        "--index",
        str(folder),
        "--serve",
        "--port",
        "0",
        "--no-open",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{folder}/index.html\n"
    address = process.stdout.readline().split()[0]
    connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=20)
    connection.request("GET", "/")
    assert connection.getresponse().status == 200
    process.send_signal(stop)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to report"),
        (["--index", "x", "RUN"], "RUN is given too"),
        (["--out", "page.html", "RUN", "--serve"], "--serve shows the run's own pages"),
        (["--out", "page.html", "--index", "x"], "--out is of a run's page"),
        (["RUN", "--out", "RUN/config.yaml"], "is no folder"),
        (["RUN", "--out", "RUN/config.yaml/page.html"], "is no folder"),
        (["RUN", "--port", "0"], "--port is of --serve"),
        (["--index", "x", "--port", "8600"], "--port is of --serve"),
        (["RUN", "--no-open"], "--open is of --serve"),
        (["--figures", "RUN"], "name it first: workbench report RUN"),
        (["--figures", "x", "--index", "x"], "--figures draws one run"),
        (["RUN", "RUN", "--out", "RUN/page.html"], "lies within"),
        (["RUN", "--figures", "RUN/config.yaml"], "is no folder"),
    ],
)
def test_what_cannot_be_done_is_refused(
    runs: dict[str, Path], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs["again"].rglob("*")}
    assert cli.main(["report", *(a.replace("RUN", str(runs["again"])) for a in arguments)]) == 3
    assert message in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in runs["again"].rglob("*")} == before
