"""Prompts, filters and metrics are lm-eval's own, compared with lm-eval's own task objects on the same documents."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from workbench.mini_models.problems import mmlu_pro_problems

from workbench.errors import ConfigError, EvaluationError, OutputError
from workbench.evaluation._journal import Answer, Journal
from workbench.evaluation.spec import check_tasks, dump_spec, load_spec, task_spec
from workbench.evaluation.tasks import build_tasks, write_mini_documents

SUBJECTS = ["math", "physics", "chemistry", "business", "engineering", "computer_science", "history", "other"]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _spec(task: str, data: Any, **settings: Any) -> Any:
    primary = {"gsm8k": "strict-match", "mmlu_pro": "custom-extract"}.get(task, "none")
    return task_spec({"primary_filter": primary, **settings, "name": f"{task}_x", "task": task, "data": data})


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


@pytest.mark.skipif(not os.environ.get("WORKBENCH_SHARED_DATA"), reason="needs WORKBENCH_SHARED_DATA")
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


def test_mmlu_is_lm_evals_own(tmp_path: Path) -> None:
    data = write_mini_documents("mmlu", tmp_path)
    rows = {split: [json.loads(line) for line in Path(path).read_text().splitlines()] for split, path in data.items()}
    assert {row["answer"] for row in rows["test"]} == {0, 1, 2, 3}
    assert all(len(set(row["choices"])) == 4 for row in rows["test"])
    for split, content in rows.items():  # one subject, under a name that lm-eval has a file for
        chosen = [{**row, "subject": "high_school_physics"} for row in content if row["subject"] == "physics"]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("dev", "test")}
    theirs = _lm_eval_task("mmlu/default/mmlu_high_school_physics.yaml", files)
    theirs.set_config(key="num_fewshot", value=5)
    (built,) = build_tasks((_spec("mmlu", files, num_fewshot=5, metric="acc"),), tmp_path)
    for task in (theirs, built.tasks[0]):
        task.set_fewshot_seed(1234)
        task.build_all_requests()
    assert [i.args for i in built.tasks[0].instances] == [i.args for i in theirs.instances]
    assert len(theirs.instances) == 4 * 125
    assert "about high school physics." in theirs.instances[0].args[0]


def test_every_mmlu_description_names_its_subject() -> None:
    import lm_eval.tasks
    import yaml

    folder = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    files = list(folder.glob("mmlu_*.yaml"))
    assert len(files) == 57
    for path in files:
        config = yaml.safe_load(path.read_text())
        subject = config["dataset_name"].replace("_", " ")
        assert (
            config["description"] == f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        )


def test_repeats_are_rows_of_their_own_problem_after_problem(tmp_path: Path) -> None:
    data = write_mini_documents("gsm8k", tmp_path)
    (plain,) = build_tasks((_spec("gsm8k", data),), tmp_path)
    (built,) = build_tasks((_spec("gsm8k", data, repeats=3, temperature=0.6, top_p=0.95),), tmp_path)
    task = built.tasks[0]
    documents = task.eval_docs
    assert len(documents) == 3 * len(plain.tasks[0].eval_docs)
    assert [(d["repeat_of"], d["repeat"]) for d in documents.select(range(4))] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=3)
    assert len({i.args[0] for i in task.instances}) == 1
    assert task.instances[0].args[1]["temperature"] == 0.6
    assert task.instances[0].args[1]["top_p"] == 0.95
    assert task.instances[0].args[1]["do_sample"] is True


def test_gsm8k_platinum_takes_its_shots_from_the_scored_split(tmp_path: Path) -> None:
    data = {"test": write_mini_documents("gsm8k", tmp_path)["test"]}
    (built,) = build_tasks((_spec("gsm8k_platinum", data, primary_filter="strict-match"),), tmp_path)
    theirs = _lm_eval_task("gsm8k_platinum/gsm8k-platinum.yaml", data)
    ours = _instances(built.tasks[0], 20)
    assert ours == _instances(theirs, 20)
    assert all(prompt.count(f"Question: {json.loads(q)[0]}\n") == 1 for q, (prompt, _, _) in ours.items())


def test_gpqa_shuffles_alike_in_every_process(tmp_path: Path) -> None:
    import random

    row = {"Question": "q", "Correct Answer": "r", "Incorrect Answer 1": "a", "Incorrect Answer 2": "b"}
    path = tmp_path / "gpqa.jsonl"
    path.write_text("".join(json.dumps({**row, "Incorrect Answer 3": f"c{i}", "n": i}) + "\n" for i in range(12)))
    drawn = []
    for seed in (1, 2):
        random.seed(seed)
        spec = _spec("gpqa_diamond", {"train": str(path)})
        (built,) = build_tasks((spec,), tmp_path)
        drawn.append([(d["choice1"], d["answer"]) for d in built.tasks[0].eval_docs])
    assert drawn[0] == drawn[1]
    assert len({answer for _, answer in drawn[0]}) > 1


def test_a_task_file_is_run_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"q": "1+1", "a": "2"}\n')
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: %s}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: 'Q: {{q}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: exact_match}]\n" % (tmp_path / "docs.jsonl")
    )
    spec = task_spec({"name": "mine", "task": str(tmp_path / "own.yaml"), "primary_filter": "none", "max_gen_toks": 7})
    check_tasks((spec,))
    (built,) = build_tasks((spec,), tmp_path)
    (task,) = built.tasks
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    assert (task.task_name, task.instances[0].args[0]) == ("mine", "Q: 1+1")
    assert task.instances[0].args[1]["max_gen_toks"] == 7
    with pytest.raises(EvaluationError, match=r"gone\.yaml does not exist"):
        check_tasks((task_spec({"name": "x", "task": str(tmp_path / "gone.yaml"), "primary_filter": "none"}),))


@pytest.mark.skipif(not os.environ.get("WORKBENCH_SHARED_DATA"), reason="needs WORKBENCH_SHARED_DATA")
def test_published_aime_and_wikitext_render_as_lm_eval_renders_them(tmp_path: Path) -> None:
    shared = Path(os.environ["WORKBENCH_SHARED_DATA"])
    aime = {"test": str(shared / "aime25" / "aime25_lm_eval.jsonl")}
    (built,) = build_tasks((_spec("aime25", aime),), tmp_path)
    theirs = _lm_eval_task("aime/aime25.yaml", aime)
    for task in (built.tasks[0], theirs):
        task.set_fewshot_seed(1234)
        task.build_all_requests()
    assert [i.args for i in built.tasks[0].instances] == [i.args for i in theirs.instances]
    assert len(theirs.instances) == 30
    (often,) = build_tasks((_spec("aime25", aime, repeats=2, temperature=0.6),), tmp_path)
    assert [d["answer"] for d in often.tasks[0].eval_docs][::2] == [i.doc["answer"] for i in theirs.instances]
    pages = {"test": str(shared / "wikitext2" / "document_level_test.jsonl")}
    (built,) = build_tasks((_spec("wikitext", pages, metric="bits_per_byte"),), tmp_path)
    task = built.tasks[0]
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    found = [task.process_results(i.doc, [-100.0])["bits_per_byte"] for i in task.instances]
    assert (len(found), sum(size for _, size in found)) == (62, 1290527)  # pages and bytes of WikiText-2's test split
    assert sum(task.process_results(i.doc, [0.0])["word_perplexity"][1] for i in task.instances) == 241335


def test_sampling_settings_must_be_possible() -> None:
    good = {"name": "g", "task": "gsm8k", "primary_filter": "strict-match"}
    for bad in ({"repeats": 0}, {"repeats": 4}, {"temperature": -1}, {"top_p": 1.5}, {"temperature": True}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            task_spec({**good, **bad})


def test_a_full_disk_is_no_fault_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` wraps it in an error of its own."""

    def full(*_: Any) -> Any:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RuntimeError("An error occurred while generating the dataset") from error

    monkeypatch.setattr("workbench.evaluation.tasks._task", full)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(OutputError) as caught:
        build_tasks((_spec("gsm8k", "mini"),), tmp_path)
    assert f"could not be written to {tmp_path / 'cache'}: the disk is full" in caught.value.message
    assert "free space" in caught.value.fix


def test_a_journal_on_a_full_disk_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / ".journal.jsonl"
    journal = Journal(path, "x")
    journal._stream.close()
    journal._stream = open("/dev/full", "a")  # noqa: SIM115 - the journal closes it
    answer = Answer(**dict.fromkeys((field.name for field in dataclasses.fields(Answer)), ()))
    for write in (lambda: journal.add(answer), journal.close):
        with pytest.raises(OutputError, match="No space left") as caught:
            write()
        assert str(path) in caught.value.message
