"""What a trained backbone is asked: a judge that speaks OpenAI's protocol, lm_eval's tasks, and the gate on both."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore
from infra.errors import UserError
from tasks.backbone import BackboneConfig, resolve_backbone
from tasks.judge import Answered, JudgeConfig, grade
from tasks.model_checks import QualityConfig, TasksConfig, compare_grades, paired, quality, read_checks, run_tasks
from tasks.promotion import PublishConfig, decide
from tasks.report_sections import _quality
from tasks.stage import Context
from tests import toys
from tests.tasks.test_prompts import write_lines

Reply = Callable[[dict[str, Any], int], tuple[int, str]]


@contextmanager
def judge(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that speaks the protocol: address and what it was asked. `reply` gives status and content."""
    asked: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
                status, content = reply(body, len(asked))
            answer = {"object": "chat.completion", "choices": [{"index": 0, "message": {"content": content}}]}
            raw = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/", asked
    finally:
        server.shutdown()


def config(endpoint: str, **changes: Any) -> JudgeConfig:
    return JudgeConfig(endpoint=endpoint, model="stub", prompts="unused", **changes)


SOME = [Answered(("What?", "And then?"), ("This.", "That.")), Answered(("Why?",), ("Because.",))]


def test_every_turn_is_graded_as_often_as_asked_with_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second turn graded without the first, grades that slip to another question, and a key left out."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def reply(body: dict[str, Any], _: int) -> tuple[int, str]:
        text = body["messages"][-1]["content"]
        return 200, "Fine. [[3]]" if "Because." in text else "[[1]] at first sight, but [[ 8.5 ]]"

    with judge(reply) as (endpoint, asked):
        assert grade(config(endpoint, repeats=2), SOME) == [[8.5] * 4, [3.0] * 2]
    assert {each["path"] for each in asked} == {"/v1/chat/completions"}
    assert {each["key"] for each in asked} == {"Bearer secret"} and {each["model"] for each in asked} == {"stub"}
    second = [each["messages"][-1]["content"] for each in asked if "And then?" in each["messages"][-1]["content"]]
    assert len(second) == 2 and all("This." in text and "That." in text for text in second)


def test_an_overloaded_judge_is_asked_again_and_a_refusing_one_is_not() -> None:
    """Catches a run of an hour lost to one 429, and a wrong key that is retried for minutes."""
    with judge(lambda body, count: (429, "") if count == 1 else (200, "[[7]]")) as (endpoint, asked):
        assert grade(config(endpoint, repeats=1, parallel=1), SOME[1:]) == [[7.0]]
        assert len(asked) == 2
    with judge(lambda body, count: (401, "no")) as (endpoint, asked):
        with pytest.raises(UserError, match=r"refuses \(401.*OPENAI_API_KEY"):
            grade(config(endpoint, repeats=1, parallel=1), SOME[1:])
        assert len(asked) == 1
    with pytest.raises(UserError, match="did not answer in 4 tries"):
        grade(config("http://127.0.0.1:9", repeats=1, parallel=1), SOME[1:])


def test_judgements_without_a_grade_are_never_made_up() -> None:
    """Catches a default in place of a grade, and grades outside the scale."""
    with (
        judge(lambda body, count: (200, "[[11]]" if count % 2 else "I can't say")) as (endpoint, _),
        pytest.raises(UserError, match="6 of 6 judgements of 'stub' hold no grade"),
    ):
        grade(config(endpoint, repeats=2), SOME)
    many = [Answered(("Why?",), ("Because.",))] * 12
    with judge(lambda body, count: (200, "no" if count == 5 else "[[6]]")) as (endpoint, asked):
        found = grade(config(endpoint, repeats=3, parallel=1), many)
    assert len(asked) == 36 and sorted(map(len, found)) == [2] + [3] * 11


def test_differences_are_paired_over_items() -> None:
    """Catches an interval of unpaired means: every item moves by exactly one, so the difference is certain."""
    found = paired([0, 5, 10, 3], [1, 6, 11, 4])
    assert found["difference"] == {"value": 1.0, "ci95": [1.0, 1.0]} and found["items"] == 4
    low, high = found["original"]["ci95"]
    assert low < 4.5 < high
    grades = compare_grades([[8, 6], [5]], [[6, 6], [6]])
    assert grades["original"]["value"] == 6.0 and grades["trained"]["value"] == 6.0 and grades["judgements"] == 6


def promoted(extra: dict[str, Any]) -> tuple[bool, str]:
    calm = {"value": 1.0, "ci95": [1.0, 1.0]}
    report = {
        "lossless": {"mismatched_prompts": 0, "tokens": 9},
        "quality": {"kl": {"value": 0.0, "ci95": [0.0, 0.0]}, "perplexity_ratio": calm, "greedy_agreement": calm}
        | extra,
    }
    return decide(report, PublishConfig())


def test_the_gate_holds_against_tasks_and_judge() -> None:
    """Catches an end of an interval taken for the other, a measure that is better when it is lower, and a figure that
    is missing."""
    better, worse = paired([0.5] * 9, [0.6] * 9), paired([0.5] * 9, [0.4] * 9)
    assert promoted({"lm_eval": {"t": {"acc": better | {"higher_is_better": True}}}})[0]
    assert not promoted({"lm_eval": {"t": {"acc": worse | {"higher_is_better": True}}}})[0]
    assert promoted({"lm_eval": {"t": {"ppl": worse | {"higher_is_better": False}}}})[0]
    done, reason = promoted({"lm_eval": {"t": {"ppl": better | {"higher_is_better": False}}}})
    assert not done and "t's ppl may be 0.1 worse" in reason
    assert promoted({"judge": paired([7] * 9, [6.6] * 9)})[0]
    assert "the judge's grade may be 1 worse" in promoted({"judge": paired([7] * 9, [6] * 9)})[1]
    assert "no interval for the judge's grade" in promoted({"judge": {"original": {}}})[1]


TASK = """
task: toy_next
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""


def test_tasks_and_a_judge_see_both_models_and_end_in_the_report(toy_dir: Path, tmp_path: Path) -> None:
    """The whole stage, with lm_eval as it is on a task of the toy's language; catches a trained model that is compared
    with itself, and answers of the wrong one given to the judge."""
    rows = []
    for word in range(12):
        right = " ".join(f"w{token}" for token in toys.answer_to(word)[:3])
        prompt = toys.tokenizer().decode(toys.prompt_ids([word]))
        rows.append({"prompt": prompt, "choices": ["w1 w1 w1", right], "label": 1})
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "toy.yaml").write_text(TASK.format(file=write_lines(tmp_path / "docs.jsonl", rows)))
    questions = [{"question_id": i, "category": "c", "turns": [f"w{i}", f"w{i + 1}"]} for i in range(4)]
    store = ArtifactStore(tmp_path / "root")
    other = tmp_path / "other"
    toys.train_toy(seed=1, steps=3).save_pretrained(other)
    toys.tokenizer().save_pretrained(other)
    backbones = [resolve_backbone(store, BackboneConfig(model=str(path))) for path in (toy_dir, other)]
    lengths: list[int] = []

    def reply(body: dict[str, Any], _: int) -> tuple[int, str]:
        lengths.append(len(body["messages"][-1]["content"]))
        return 200, f"[[{1 + len(lengths) % 9}]]"

    with judge(reply) as (endpoint, _):
        settings = QualityConfig(
            lm_eval=TasksConfig(tasks=("toy_next",), include_path=str(tasks)),
            judge=JudgeConfig(
                endpoint=endpoint,
                model="stub",
                prompts=str(write_lines(tmp_path / "q.jsonl", questions)),
                max_new_tokens=12,
                repeats=1,
            ),
            dtype="float32",
        )
        made = quality(Context(store), settings, original=backbones[0], trained=backbones[1])
        again = quality(Context(store), settings, original=backbones[0], trained=backbones[1])
    assert again.cached and len(lengths) == 2 * 4 * 2
    found = read_checks(made)
    accuracy = found["lm_eval"]["toy_next"]["acc"]
    assert accuracy["items"] == 12 and accuracy["original"]["value"] > 0.9 > accuracy["trained"]["value"]
    assert accuracy["difference"]["ci95"][1] < 0
    assert found["judge"]["items"] == 4 and found["judge"]["judgements"] == 16
    shown = _quality({"quality": found})
    assert "toy_next, acc" in shown and "grade by stub" in shown
    with pytest.raises(UserError, match="knows no task no_such_task"):
        run_tasks(TasksConfig(tasks=("no_such_task",)), toy_dir, "float32", "cpu")
