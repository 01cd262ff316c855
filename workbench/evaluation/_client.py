"""The client that the harness asks the endpoint with: lm-eval's `local-completions`, plus order, journal and refusals.

Prompts, payloads and retries are lm-eval's; what differs:

- every request goes through lm-eval's asynchronous path, also one at a time. Its two paths send different stop lists
  (the synchronous one adds the EOS string), so two arms with different concurrency would be asked different things.
- `request_order="reversed"` sends the same requests last first; answers come back in the documents' order either way.
- a prompt that does not fit `max_length` together with its answer is refused before the first request. lm-eval cuts
  it silently.
- every answer is appended to a journal with its `finish_reason` (which lm-eval drops), and journalled requests are
  not sent again. lm-eval's own `use_cache` is keyed by the prompt alone; this one begins with the endpoint's
  identity.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import hashlib
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from workbench.errors import EvaluationError

_current: contextvars.ContextVar[Any] = contextvars.ContextVar("current requests", default=None)


class Journal:
    """Answers so far: one JSON line each, `{"key", "text", "finish_reason"}`; the first line names the endpoint asked.

    A journal of another endpoint is replaced. A last line torn by a kill is dropped.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        if lines and lines[0] == json.dumps({"identity": identity}):
            for line in lines[1:]:
                entry = json.loads(line)
                self.answers[entry["key"]] = entry
        else:
            lines = [json.dumps({"identity": identity})]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self._stream = path.open("a", encoding="utf-8")

    def add(self, key: str, text: str, finish_reason: str) -> None:
        entry = {"key": key, "text": text, "finish_reason": finish_reason}
        self.answers[key] = entry
        self._stream.write(json.dumps(entry) + "\n")
        self._stream.flush()


def request_key(context: str, gen_kwargs: dict[str, Any]) -> str:
    """What identifies a generation request: its prompt text and its generation settings."""
    return hashlib.sha256(json.dumps([context, gen_kwargs], sort_keys=True).encode()).hexdigest()


class CompletionsClient(LocalCompletionsAPI):  # type: ignore[misc]
    """See the module. request_order: "forward" (lm-eval's own: longest prompt first) or "reversed"."""

    def __init__(self, *, request_order: str = "forward", journal: str, identity: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.request_order = request_order
        self.journal = Journal(Path(journal), identity)
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self._done = self._total = 0

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        contexts = [request.args[0] for request in requests]
        settings = [request.args[1] for request in requests]
        if self.tokenized_requests:
            prompts = self.tok_encode(contexts, add_special_tokens=self.add_bos_token)
            for prompt, kwargs, request in zip(prompts, settings, requests, strict=True):
                self._check_length(len(prompt), int(kwargs.get("max_gen_toks", self._max_gen_toks)), request)
        else:
            prompts = contexts
        keys = [request_key(*pair) for pair in zip(contexts, settings, strict=True)]
        self._total, self._done = len(keys), sum(key in self.journal.answers for key in keys)
        self.on_progress(self._done, self._total)
        for group in self._groups(contexts, settings):
            asked: dict[str, int] = {}
            for i in group:
                if keys[i] not in self.journal.answers:
                    asked.setdefault(keys[i], i)
            if asked:
                places = list(asked.values())
                asyncio.run(
                    self.get_batched_requests(
                        [prompts[i] for i in places],
                        [(contexts[i], settings[i]) for i in places],
                        generate=True,
                        gen_kwargs=copy.deepcopy(settings[places[0]]),
                    )
                )
        return [self.journal.answers[key]["text"] for key in keys]

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            self._check_length(len(context) + len(continuation), 0, None)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        if self.request_order == "reversed":
            order.reverse()
        inputs, context_lengths, cache_keys = self.batch_loglikelihood_requests([[requests[i] for i in order]])
        self._total, self._done = len(requests), 0
        batches = asyncio.run(self.get_batched_requests(inputs, cache_keys, generate=False, ctxlens=context_lengths))
        answers = dict(zip(order, chain.from_iterable(batches), strict=True))
        return [answers[i] for i in range(len(requests))]

    async def amodel_call(self, session: Any, sem: Any, messages: Any, *, cache_keys: Any = None, **kwargs: Any) -> Any:
        _current.set(cache_keys)  # each request is a task of its own, and so has its own context
        return await super().amodel_call(session, sem, messages, cache_keys=cache_keys, **kwargs)

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        choices = sorted(outputs["choices"], key=lambda choice: choice["index"])
        for choice, (context, settings) in zip(choices, _current.get(), strict=True):
            self.journal.add(
                request_key(context, settings), choice["text"] or "", str(choice.get("finish_reason") or "")
            )
            self._done += 1
            self.on_progress(self._done, self._total)
        return [choice["text"] or "" for choice in choices]

    def _groups(self, contexts: list[str], settings: list[dict[str, Any]]) -> list[list[int]]:
        """Places of the requests in the order of sending, one list for each set of generation settings."""
        groups: dict[str, list[int]] = {}
        for i, kwargs in enumerate(settings):
            groups.setdefault(json.dumps(kwargs, sort_keys=True), []).append(i)
        ordered = [sorted(group, key=lambda i: -len(contexts[i])) for group in groups.values()]
        if self.request_order == "reversed":
            ordered = [group[::-1] for group in reversed(ordered)]
        return ordered

    def _check_length(self, prompt: int, answer: int, request: Any) -> None:
        limit = self.max_length + 1  # lm-eval keeps max_length - 1
        if prompt + answer > limit:
            which = f"task {request.task_name!r}, document {request.doc_id}: " if request is not None else ""
            raise EvaluationError(
                f"{which}the prompt has {prompt} tokens and its answer may have {answer}, but max_length is {limit}",
                fix=f"serve with a context of at least {prompt + answer} tokens, or lower num_fewshot or max_gen_toks",
            )
