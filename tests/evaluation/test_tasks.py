"""Prompts, filters and metrics are lm-eval's own, compared with lm-eval's own task objects on the same documents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from workbench.mini_models.problems import mmlu_pro_problems

from workbench.errors import ConfigError, EvaluationError
from workbench.evaluation.spec import check_tasks, dump_spec, load_spec, task_spec
from workbench.evaluation.tasks import build_tasks, write_mini_documents

SUBJECTS = ["math", "physics", "chemistry", "business", "engineering", "computer_science", "history", "other"]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _spec(task: str, data: Any, **settings: Any) -> Any:
    primary = {"gsm8k": "strict-match", "mmlu_pro": "custom-extract"}[task]
    return task_spec({"name": f"{task}_x", "task": task, "data": data, "primary_filter": primary, **settings})


def _lm_eval_task(file: str, data: dict[str, str]) -> Any:
    """lm-eval's own task, its documents replaced, nothing else."""
    import lm_eval.tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.tasks.__file__).parent / file)
    config.pop("tag", None)
    config.update(dataset_path="json", dataset_name=None, dataset_kwargs={"data_files": data})
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(1234)
    return task


def _instances(task: Any, limit: int | None = None) -> dict[str, tuple[str, Any, Any]]:
    """question -> (prompt, generation settings, target)."""
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=limit)
    return {
        json.dumps([i.doc["question"], i.doc.get("options")]): (i.args[0], i.args[1], task.doc_to_target(i.doc))
        for i in task.instances
    }


def _filters_and_metrics(task: Any) -> Any:
    config = task.config
    return config.filter_list, config.metric_list, config.repeats, config.output_type, config.num_fewshot


def test_gsm8k_is_lm_evals_own(tmp_path: Path) -> None:
    data = write_mini_documents("gsm8k", tmp_path)
    (built,) = build_tasks((_spec("gsm8k", data),), tmp_path)
    (ours,), theirs = built.tasks, _lm_eval_task("gsm8k/gsm8k.yaml", data)
    assert _instances(ours, 40) == _instances(theirs, 40)
    assert _filters_and_metrics(ours) == _filters_and_metrics(theirs)
    assert ours.task_name == "gsm8k_x"


def test_mmlu_pro_is_lm_evals_own_for_every_subject(tmp_path: Path) -> None:
    data = write_mini_documents("mmlu_pro", tmp_path)
    (built,) = build_tasks((_spec("mmlu_pro", data),), tmp_path)
    (ours,) = built.tasks
    prompts = _instances(ours)
    compared = 0
    for subject in SUBJECTS:
        theirs = _lm_eval_task(f"mmlu_pro/mmlu_pro_{subject}.yaml", data)
        for question, instance in _instances(theirs).items():
            assert prompts[question] == instance
            compared += 1
        assert _filters_and_metrics(ours) == _filters_and_metrics(theirs)
    assert compared == len(prompts) == 1000


@pytest.mark.skipif("WORKBENCH_SHARED_DATA" not in os.environ, reason="needs WORKBENCH_SHARED_DATA")
def test_published_documents_render_as_lm_eval_renders_them(tmp_path: Path) -> None:
    shared = Path(os.environ["WORKBENCH_SHARED_DATA"])
    data = {
        "validation": str(shared / "mmlu_pro" / "validation_2025-10-24.jsonl"),
        "test": str(shared / "mmlu_pro" / "test_subset_140.jsonl"),
    }
    (built,) = build_tasks((_spec("mmlu_pro", data),), tmp_path)
    prompts = _instances(built.tasks[0])
    theirs: dict[str, Any] = {}
    for subject in (*SUBJECTS, *["biology", "economics", "health", "law", "philosophy", "psychology"]):
        theirs |= _instances(_lm_eval_task(f"mmlu_pro/mmlu_pro_{subject}.yaml", data))
    assert prompts == theirs
    assert len(prompts) == 140
    first = [document["category"] for document in list(built.tasks[0].eval_docs)[:14]]
    assert len(set(first)) == 14
    gsm8k = {split: str(shared / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")}
    (built,) = build_tasks((_spec("gsm8k", gsm8k),), tmp_path)
    assert _instances(built.tasks[0], 50) == _instances(_lm_eval_task("gsm8k/gsm8k.yaml", gsm8k), 50)


def test_settings_change_only_what_they_name(tmp_path: Path) -> None:
    (plain,) = build_tasks((_spec("mmlu_pro", "mini"),), tmp_path)
    (short,) = build_tasks((_spec("mmlu_pro", "mini", num_fewshot=1, max_gen_toks=64),), tmp_path)
    before, after = _instances(plain.tasks[0], 16), _instances(short.tasks[0], 16)
    for question, (prompt, settings, _) in after.items():
        assert settings == {**before[question][1], "max_gen_toks": 64}
        assert prompt.count("Answer: Let's think step by step.") == 2
    again = _instances(short.tasks[0], 8)
    assert again.items() <= after.items()  # a smaller limit is a subset


def test_documents_are_interleaved_over_categories(tmp_path: Path) -> None:
    problems = sorted(mmlu_pro_problems(40, split="test"), key=lambda p: p["category"])
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    data = {**write_mini_documents("mmlu_pro", tmp_path), "test": str(tmp_path / "test.jsonl")}
    (built,) = build_tasks((_spec("mmlu_pro", data),), tmp_path)
    categories = [document["category"] for document in built.tasks[0].eval_docs]
    assert categories == sorted(set(categories)) * 5


def test_too_few_shots_name_the_category(tmp_path: Path) -> None:
    (built,) = build_tasks((_spec("mmlu_pro", "mini", num_fewshot=6),), tmp_path)
    with pytest.raises(EvaluationError, match=r"category 'math' has 5 documents.*6 are needed"):
        built.tasks[0].build_all_requests(limit=1)


def test_unknown_task_and_missing_split_are_named(tmp_path: Path) -> None:
    unknown = task_spec({"name": "x", "task": "gsm9k", "primary_filter": "none"})
    with pytest.raises(EvaluationError, match=r"'x'.*no task 'gsm9k'"):
        build_tasks((unknown,), tmp_path)
    data = write_mini_documents("gsm8k", tmp_path)
    with pytest.raises(EvaluationError, match="no split 'train'"):
        build_tasks((_spec("gsm8k", {"test": data["test"]}),), tmp_path)


def test_spec_refuses_typos_and_impossible_values() -> None:
    good = {"name": "g", "task": "gsm8k", "primary_filter": "strict-match"}
    with pytest.raises(ConfigError, match=r"(?s)unknown setting 'limt'.*'limit'"):
        task_spec({**good, "limt": 3})
    with pytest.raises(ConfigError, match="'primary_filter' is missing"):
        task_spec({"name": "g", "task": "gsm8k"})
    for bad in (
        {"limit": 0},
        {"limit": 2.5},
        {"num_fewshot": -1},
        {"max_gen_toks": True},
        {"data": "maxi"},
        {"chance": 1.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            task_spec({**good, **bad})
    spec = task_spec({**good, "limit": 7, "data": "mini"})
    assert load_spec(json.loads(json.dumps(dump_spec(spec)))) == spec
    with pytest.raises(EvaluationError, match="listed 2 times"):
        check_tasks((spec, spec))
