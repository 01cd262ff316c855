"""Questions to an OpenAI-compatible server: is it up, which models, does it complete a token.

Plain HTTP with httpx; every failure is an EngineError that names the URL.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import EngineError

_TIMEOUT_S = 120.0  # of the first completion: a cold engine may still compile


def healthy(root: str) -> bool:
    """Whether `GET root/health` answers 200. Never raises."""
    import httpx

    try:
        return httpx.get(f"{root}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def list_models(base_url: str) -> list[str]:
    """Model names of `GET base_url/models`. Raises EngineError when there is no such server or it lists none."""
    answer = _ask("GET", f"{base_url}/models", None, timeout=15.0)
    try:
        names = [entry["id"] for entry in answer["data"]]
    except (KeyError, TypeError):
        names = []
    if not names:
        raise EngineError(
            f"{base_url}/models lists no model: this is no OpenAI-compatible server",
            fix="base_url usually ends in /v1: engine.base_url=http://host:8000/v1",
        )
    return names


def complete_one_token(base_url: str, model: str) -> None:
    """One token completed, as the evaluation will ask for it. Raises EngineError with the server's own words."""
    _ask("POST", f"{base_url}/completions", {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0})


def _ask(method: str, url: str, body: dict[str, Any] | None, timeout: float = _TIMEOUT_S) -> Any:
    import httpx

    try:
        response = httpx.request(method, url, json=body, timeout=timeout)
    except httpx.HTTPError as error:
        raise EngineError(
            f"no answer from {url}: {error or type(error).__name__}", fix="check base_url, and that the server runs"
        ) from error
    except httpx.InvalidURL as error:
        raise EngineError(f"{url} is no URL: {error}", fix="write engine.base_url=http://host:8000/v1") from error
    if response.status_code != 200:
        raise EngineError(
            f"{url} answers {response.status_code}: {response.text[:500]}",
            fix="check base_url (it usually ends in /v1), the model's name, and the server's log",
        )
    try:
        return response.json()
    except ValueError as error:
        raise EngineError(f"{url} does not answer in JSON: {response.text[:200]}", fix="check base_url") from error
