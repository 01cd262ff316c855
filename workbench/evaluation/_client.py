"""The clients that lm-eval asks an endpoint with: `workbench-completions` and `workbench-chat-completions`.

Prompts and payloads are those of lm-eval's `local-completions` and `local-chat-completions`, from which they derive.
What differs:

- every answer is journalled as it arrives with what lm-eval drops (finish reason, token counts, first token ids,
  timing, the hash of the payload); answers in the journal are not asked again (`_journal`).
- requests fail one at a time, after retries (`_transport`); a request that failed is an empty answer, marked as failed.
- the same stop list is sent at any concurrency. lm-eval's synchronous path adds the EOS string, its asynchronous one
  does not; this is the asynchronous one's. Of more than four stop strings a chat endpoint is sent the first four (its
  limit), and the others are applied here.
- with `thinking` (the tag that ends a think block) no stop string is sent, because it would fire inside the thought:
  the block is taken off here, and the stop strings are applied to what follows.
- a document that says `repeat: r` is asked with seed + r; that is how several answers of one problem are drawn.
- a prompt that does not fit `max_length` together with its answer is refused. lm-eval cuts it silently.
- `request_order="reversed"` sends the same requests last first; answers come back in the documents' order either way.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from workbench.errors import EvaluationError
from workbench.evaluation._journal import Answer, Journal, encode_payload, payload_key
from workbench.evaluation._read import read_completion, read_logprobs
from workbench.evaluation._transport import Transport
from workbench.evaluation.thinking import cut_at_stops, split_thinking

CHAT_STOPS = 4
"""Stop strings that a chat endpoint takes (OpenAI's API reference, `stop`)."""
FAILED_LOGPROB = float("-inf")


class Asked(NamedTuple):
    """Which payload answers which request of which document."""

    task: str
    doc_id: int
    idx: int
    key: str


class _Endpoint(LocalCompletionsAPI):
    """What both clients share.

    request_order: "forward" (lm-eval's own: longest prompt first) or "reversed". journal: its path; identity: what the
    journal is kept for. before_first() is called once all requests are known and none is sent, and may raise.
    """

    api = "completions"

    def __init__(
        self,
        *,
        journal: str,
        identity: str,
        request_order: str = "forward",
        thinking: str = "",
        thinking_budget: int = 0,
        retries: int = 4,
        backoff_s: float = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.request_order, self.thinking, self.thinking_budget = request_order, thinking, thinking_budget
        self.journal = Journal(Path(journal), identity)
        # lm-eval sends an empty bearer without a key, which some clients and servers refuse
        self.headers = {name: value for name, value in self.header.items() if value != "Bearer "}
        self.transport = Transport(
            self.base_url,
            concurrency=self._concurrent,
            timeout_s=self.timeout,
            headers=self.headers,
            retries=retries,
            backoff_s=backoff_s,
            verify=self.verify_certificate,
        )
        self.before_first: Callable[[], None] = lambda: None
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        self.on_failure: Callable[[int, str], None] = lambda count, message: None
        self.asked: list[Asked] = []
        self.failures: dict[str, str] = {}
        self.scored_tokens: dict[tuple[str, int], int] = {}  # of rolling requests, by (task, document)
        self.resumed, self._checked = 0, False
        self._instances: list[Any] = []

    # ---- the three questions of lm-eval

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self._begin()
        prompts = self._prompts([request.args[0] for request in requests])
        bodies = []
        for prompt, request in zip(prompts, requests, strict=True):
            settings = request.args[1]
            if isinstance(prompt, list):
                self._check_length(len(prompt), self.answer_budget(settings), request)
            bodies.append(encode_payload(self.generation_payload(prompt, settings, _repeat(request))))
        keys = [payload_key(body) for body in bodies]

        def read(i: int, answer: dict[str, Any]) -> dict[str, Any]:
            return read_completion(answer, self.api, model=self.model)

        self._ask(bodies, keys, requests, self._order(requests), read)
        return [self.visible(key, request.args[1]) for key, request in zip(keys, requests, strict=True)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._begin()
        self._instances = requests
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """lm-eval's windows, all documents at once. A window that fails ends the run: a sum with a hole is no sum."""
        self._begin()
        windows: list[Any] = []
        self._instances = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            self.scored_tokens[request.task_name, request.doc_id] = len(tokens)
            for window in get_rolling_token_windows(
                token_list=tokens, prefix_token=self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            ):
                windows.append((None, *make_disjoint_window(window)))
                self._instances.append(request)
        sums: dict[int, float] = {}
        for request, (logprob, _) in zip(self._instances, self._loglikelihood_tokens(windows), strict=True):
            if logprob == FAILED_LOGPROB:
                raise EvaluationError(
                    f"task {request.task_name!r}, document {request.doc_id}: a window of its text was not answered "
                    f"({next(reversed(self.failures.values()), 'the endpoint gave -inf')})",
                    fix="see the endpoint's own log; the same command asks only what is missing",
                )
            sums[id(request)] = sums.get(id(request), 0.0) + logprob
        return [sums.get(id(request), 0.0) for request in requests]

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        bodies, keys = [], []
        for (_, context, continuation), instance in zip(requests, self._instances, strict=True):
            self._check_length(len(context) + len(continuation), 0, instance)
            bodies.append(encode_payload(self.logprob_payload(context + continuation)))
            keys.append(f"{payload_key(bodies[-1])}:{len(context)}")  # the same text may be split elsewhere
        order = sorted(range(len(bodies)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        if self.request_order == "reversed":
            order.reverse()

        def read(i: int, answer: dict[str, Any]) -> dict[str, Any]:
            _, context, continuation = requests[i]
            return read_logprobs(answer, len(context), len(context) + len(continuation), self.parse_logprobs)

        self._ask(bodies, keys, self._instances, order, read)
        return [self._likelihood(key) for key in keys]

    # ---- payloads

    def generation_payload(self, prompt: Any, settings: dict[str, Any], repeat: int = 0) -> dict[str, Any]:
        """What is sent for one prompt (text, token ids or chat)."""
        gen_kwargs = copy.deepcopy(settings)
        if self.thinking:
            gen_kwargs["until"] = []
            gen_kwargs["max_tokens"] = self.answer_budget(settings)
        message = self.create_message([prompt])
        return dict(self._create_payload(message, generate=True, gen_kwargs=gen_kwargs, seed=self._seed + repeat))

    def logprob_payload(self, tokens: list[int]) -> dict[str, Any]:
        """What is sent to have `tokens` scored."""
        return dict(self._create_payload(self.create_message([tokens]), generate=False, seed=self._seed))

    def answer_budget(self, settings: dict[str, Any]) -> int:
        """Tokens an answer may have: the task's, and the think block's on top."""
        own: Any = settings.get("max_tokens", settings.get("max_gen_toks", self._max_gen_toks))
        return int(own) + self.thinking_budget

    def visible(self, key: str, settings: dict[str, Any]) -> str:
        """The text of an answer as lm-eval scores it; "" for null, for a failed request and for an open think block.

        A lone surrogate, which no UTF-8 file holds, is scored as its escape (backslash, u, four digits); the journal
        and `raw` keep it.
        """
        answer = self.journal.answers.get(key)
        if answer is None or answer.text is None:
            return ""
        text, stops = answer.text.encode(errors="backslashreplace").decode(), stop_list(settings)
        if self.thinking:
            return cut_at_stops(
                split_thinking(text, answer.finish_reason, end=self.thinking, reasoning=answer.reasoning).answer, stops
            )
        return cut_at_stops(text, stops[CHAT_STOPS:]) if self.api == "chat" else text

    # ---- private

    def _begin(self) -> None:
        if not self._checked:
            self._checked = True
            self.before_first()

    def _prompts(self, contexts: list[Any]) -> list[Any]:
        if self.tokenized_requests:
            return list(self.tok_encode(contexts, add_special_tokens=self.add_bos_token))
        return contexts

    def _order(self, requests: list[Any]) -> list[int]:
        """Places of the requests in the order of sending: one settings' after another's, each longest first."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        order = [i for group in groups.values() for i in sorted(group, key=lambda i: -_length(requests[i].args[0]))]
        return order[::-1] if self.request_order == "reversed" else order

    def _ask(self, bodies: list[bytes], keys: list[str], instances: list[Any], order: list[int], read: Any) -> None:
        """Have every payload answered, under its key in the journal. Equal keys are asked once."""
        places: dict[str, int] = {}
        for i in order:
            places.setdefault(keys[i], i)
        todo = [i for key, i in places.items() if key not in self.journal.answers]
        self.resumed += len(places) - len(todo)
        waiting = Counter(keys)
        done = sum(count for key, count in waiting.items() if key in self.journal.answers)
        self.on_progress(done, len(keys))
        for instance, key in zip(instances, keys, strict=True):
            self.asked.append(Asked(instance.task_name, instance.doc_id, getattr(instance, "idx", 0), key))

        def advance(key: str) -> None:
            nonlocal done
            done += waiting[key]
            self.on_progress(done, len(keys))

        def keep(place: int, fields: dict[str, Any], seconds: float, attempts: int) -> None:
            key = keys[todo[place]]
            for kind, message in fields.pop("odd").items():
                self.transport.note(kind, f"{self.base_url}: {message}")
            self.journal.add(Answer(key=key, seconds=round(seconds, 6), attempts=attempts, **fields))
            advance(key)

        def fail(place: int, message: str) -> None:
            self.failures[keys[todo[place]]] = message
            self.on_failure(sum(waiting[key] for key in self.failures), message)

        self.transport.ask([bodies[i] for i in todo], lambda place, answer: read(todo[place], answer), keep, fail)

    def _likelihood(self, key: str) -> tuple[float, bool]:
        answer = self.journal.answers.get(key)
        if answer is None or answer.logprob is None:
            return FAILED_LOGPROB, False
        return answer.logprob, bool(answer.greedy)

    def _check_length(self, prompt: int, answer: int, request: Any) -> None:
        limit = self.max_length + 1  # lm-eval keeps max_length - 1
        if prompt + answer > limit:
            raise EvaluationError(
                f"task {request.task_name!r}, document {request.doc_id}: the prompt has {prompt} tokens and its answer "
                f"may have {answer}, but max_length is {limit}",
                fix=f"serve with a context of at least {prompt + answer} tokens, or lower num_fewshot or max_gen_toks",
            )


@register_model("workbench-completions")
class CompletionsClient(_Endpoint):
    """Prompts as text or token ids to /v1/completions; see the module."""


@register_model("workbench-chat-completions")
class ChatClient(_Endpoint, LocalChatCompletion):
    """Messages to /v1/chat/completions; see the module. No loglikelihood: no chat endpoint scores a given text."""

    api = "chat"

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise EvaluationError(
            f"task {requests[0].task_name!r} needs log-probabilities of given text, which no chat endpoint returns",
            fix="use api=completions for this task, or a task that generates",
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        self.loglikelihood(requests)
        return []


def stop_list(settings: dict[str, Any]) -> tuple[str, ...]:
    """The stop strings of a task's generation settings."""
    until = settings.get("until") or []
    return (until,) if isinstance(until, str) else tuple(until)


def _repeat(request: Any) -> int:
    document = getattr(request, "doc", None)
    return int(document.get("repeat", 0)) if isinstance(document, dict) else 0


def _length(context: Any) -> int:
    return len(context if isinstance(context, str) else context.prompt)
