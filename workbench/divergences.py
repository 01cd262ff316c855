"""KL divergence of every arm from the baseline, from top-k log-probabilities that each endpoint gives while it is up.

    divergences = Divergences(settings=settings, folder=run_folder, say=progress)
    divergences.collect("nvfp4", endpoint, fingerprint)   # kld/nvfp4.jsonl
    divergences.compare()                                 # kld/nvfp4.json, against kld/source.jsonl

A few seconds an arm. What an endpoint cannot give (no echo, fewer log-probabilities) is said and left out: a run is
judged by answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from workbench import records
from workbench.errors import EvaluationError, WorkbenchError

if TYPE_CHECKING:
    from workbench.evaluation.spec import TaskSpec
    from workbench.progress import Progress
    from workbench.runfolder import RunFolder
    from workbench.serving.endpoint import Endpoint
    from workbench.settings import Settings


@dataclass(kw_only=True)
class Divergences:
    settings: Settings
    folder: RunFolder
    say: Progress
    tasks: Sequence[TaskSpec]

    def collect(self, arm: str, endpoint: Endpoint, fingerprint: str) -> None:
        """Ask the endpoint of `arm` for its log-probabilities of the text; a note where it cannot give them."""
        from workbench.evaluation.kld import collect_logprobs

        if not self._windows:
            return
        target = self._file(arm)
        try:
            collect_logprobs(
                base_url=endpoint.base_url,
                model=endpoint.model,
                windows=self._windows,
                k=self.settings.kld.top_k,
                path=target,
                name=arm,
                fingerprint=fingerprint,
                concurrency=self.settings.engine.concurrency,
                progress=self.say.counter(f"{arm}: windows"),
            )
        except EvaluationError as error:
            target.unlink(missing_ok=True)
            self.say.note(f"{arm}: no KL divergence: {error.message}")

    def compare(self) -> None:
        """Write kld/<arm>.json for every arm whose log-probabilities and the baseline's are there; note the others."""
        from workbench.evaluation.kld import kl_divergence

        reference = self._file(self.settings.baseline)
        for arm in self.settings.arms:
            self._file(arm).with_suffix(".json").unlink(missing_ok=True)  # of log-probabilities that may be gone
        for arm in self._evaluated():
            mine = self._file(arm)
            try:
                found = kl_divergence(reference, mine)
            except EvaluationError as error:
                self.say.note(f"{arm}: no KL divergence: {error.message}")
                continue
            records.write_json(mine.with_suffix(".json"), found)
            self.say.note(f"{arm}: KL divergence at least {found.mean.lower:.3g} nats over {found.positions} tokens")

    def _evaluated(self) -> list[str]:
        """Arms to set against the baseline; one that has answers but no log-probabilities beside others' is noted."""
        given = {arm for arm in self.settings.arms if self._file(arm).exists()}
        missing = [arm for arm in self.settings.arms if arm not in given and self._scores(arm).exists()]
        if given:
            for arm in missing:
                gone = f"kld/{arm}.jsonl is missing (delete eval/{arm} to ask it again)"
                self.say.note(f"{arm}: no KL divergence: {gone}")
        baseline = self.settings.baseline
        return [arm for arm in self.settings.arms if arm in given and arm != baseline and baseline in given]

    def _scores(self, arm: str) -> Path:
        return self.folder.path / "eval" / arm / "scores.json"

    @cached_property
    def _windows(self) -> list[list[int]]:
        """Token ids of the text in whole windows, as many as it has and are wanted; none where there is no text."""
        from workbench.evaluation.kld import cut_windows
        from workbench.evaluation.prompts import training_prompts

        wanted = self.settings.kld
        if not wanted.windows:
            return []
        try:
            if wanted.text:
                text = Path(wanted.text).read_text(encoding="utf-8")
            else:
                scratch = self.folder.path / "scratch"
                text = "\n\n".join(training_prompts(tuple(self.tasks), self.settings.analysis.prompts, scratch=scratch))
            tokens = min(wanted.tokens, self.settings.engine.max_model_len - 1)
            tokenizer = Path(self.settings.model.tokenizer)
            return cut_windows(text, tokenizer, tokens=tokens, count=wanted.windows, fewer=True)
        except (WorkbenchError, OSError, UnicodeDecodeError) as error:
            reason = error.message if isinstance(error, WorkbenchError) else str(error)
            self.say.note(f"no KL divergence: {reason}")
            return []

    def _file(self, arm: str) -> Path:
        return self.folder.path / "kld" / f"{arm}.jsonl"
