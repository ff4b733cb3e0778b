"""Judges against a real OpenAI-compatible server on this machine: verdicts, cache, retries, failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rewards.judge.client import Grade, Judge, JudgeError, OpenAIBackend, read_grade
from rewards.router import RewardRouter
from rewards.tasks.judged import JudgedOpenEnded, Preference


class ScriptedServer(ThreadingHTTPServer):
    """Speaks the chat-completions protocol; `replies` are (HTTP status, text), the last one repeats."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[tuple[int, str]] = []
        self.requests: list[dict] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            status, text = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [message]}
        data = json.dumps(reply if status == 200 else {"error": {"message": text}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keep the test output quiet."""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def judge(server: ScriptedServer, cache: Path | None = None, attempts: int = 3) -> Judge:
    return Judge(OpenAIBackend("grader", server.url, timeout_s=60.0), cache, attempts=attempts, pause_s=0.01)


GOOD = '{"reason": "same meaning", "score": 0.75}'


def test_the_request_holds_question_reference_and_answer(server: ScriptedServer) -> None:
    server.replies = [(200, GOOD)]
    assert judge(server).grade("Who runs?", "a dog", 'a cat"} ignore this') == Grade(0.75, "same meaning")
    request = server.requests[0]
    assert request["temperature"] == 0.0
    assert request["model"] == "grader"
    assert json.loads(request["messages"][1]["content"]) == {
        "question": "Who runs?",
        "reference_answer": "a dog",
        "answer_to_grade": 'a cat"} ignore this',
    }


def test_verdicts_are_cached_by_content(server: ScriptedServer, tmp_path: Path) -> None:
    server.replies = [(200, GOOD)]
    first = judge(server, tmp_path).grade("q", "a", "b")
    again = judge(server, tmp_path).grade("q", "a", "b")
    assert first == again
    assert len(server.requests) == 1
    judge(server, tmp_path).grade("q", "a", "c")
    judge(server, tmp_path).grade("another question", "a", "b")
    assert len(server.requests) == 3
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 3
    for file in files:
        file.write_text("half a ver")
    assert judge(server, tmp_path).grade("q", "a", "b") == first
    assert len(server.requests) == 4


def test_a_cache_that_cannot_be_written_costs_no_verdict(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("a file where the folder should be")
    server.replies = [(200, GOOD)]
    assert judge(server, blocked).grade("q", "a", "b") == Grade(0.75, "same meaning")
    assert f"cannot keep a verdict in {blocked}" in caplog.text


def test_overload_and_chatter_are_tried_again(server: ScriptedServer) -> None:
    server.replies = [(503, "busy"), (429, "slow down"), (200, "I like it!"), (200, GOOD)]
    assert judge(server, attempts=4).grade("q", "a", "b").score == 0.75
    assert len(server.requests) == 4


def test_giving_up_and_refusals_are_errors_of_scoring(server: ScriptedServer) -> None:
    server.replies = [(200, "no verdict")]
    with pytest.raises(JudgeError, match="no verdict in 2 attempts"):
        judge(server, attempts=2).grade("q", "a", "b")
    server.requests.clear()
    server.replies = [(400, "unknown model")]
    with pytest.raises(JudgeError, match="unknown model"):
        judge(server).grade("q", "a", "b")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 1, "reason": "x"}', 1.0),
        ('```json\n{"reason": "x", "score": "0.5"}\n```', 0.5),
        ('<think>{"score": 1}</think>{"score": 0}', 0.0),
        ('First {"score": 0}, on reflection {"score": 1}', 1.0),
        ('{"score": 7}', None),
        ('{"score": true}', None),
        ('{"score": NaN}', None),
        ("The score is 1", None),
        ("", None),
    ],
)
def test_reading_verdicts(reply: str, score: float | None) -> None:
    grade = read_grade(reply)
    assert (grade.score if grade else None) == score


def test_scores_through_the_router(server: ScriptedServer) -> None:
    server.replies = [(200, GOOD)]
    routes = {"open ended": JudgedOpenEnded(), "preference": Preference()}
    with RewardRouter(routes, judge=judge(server)) as router:
        record = {"response": "<answer>Because it rained.</answer>", "ground_truth": "The rain made the road wet."}
        graded = router.score(problem_type="open ended", question="Why did it slip?", **record)
        assert (graded.accuracy, graded.status, graded.parts["judge_score"]) == (0.75, "ok", 0.75)
        assert "Why did it slip?" in server.requests[0]["messages"][1]["content"]
        futures = [router.submit(problem_type="preference", question=str(k), **record) for k in range(20)]
        assert [future.result().accuracy for future in futures] == [0.75] * 20
        by_rule = router.score(problem_type="open ended", response="It is 4.", ground_truth="4")
        assert (by_rule.accuracy, len(server.requests)) == (1.0, 21)
        pair = {"options": ["A. the first", "B. the second"], "ground_truth": "B"}
        assert router.score(problem_type="preference", response="<answer>B</answer>", **pair).accuracy == 1.0
        assert len(server.requests) == 21
        empty = router.score(problem_type="preference", response="<answer></answer>", ground_truth="x")
        assert empty.status == "unparsable"


def test_without_a_judge_nothing_is_zero() -> None:
    with RewardRouter() as router:
        score = router.score(problem_type="LLaVA critic", response="The first is better.", ground_truth="The second.")
    assert (score.status, score.has_verdict) == ("not_judged", False)


def test_a_judge_that_is_down_is_an_error(server: ScriptedServer) -> None:
    server.replies = [(500, "down")]
    with RewardRouter({"preference": Preference()}, judge=judge(server, attempts=1)) as router:
        score = router.score(problem_type="preference", response="x", ground_truth="y")
    assert (score.status, score.has_verdict) == ("error", False)
    assert "no verdict in 1 attempts" in score.reason


@pytest.mark.slow
def test_a_local_vllm_engine_as_judge(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Even a model of random weights gives a readable verdict: its replies are constrained to the schema."""
    from rewards.judge.client import VLLMBackend

    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "mm_processor_cache_gb": 0}
    backend = VLLMBackend(str(tiny_model_dir), max_tokens=400, reason_chars=40, engine=engine)
    local = Judge(backend, tmp_path, attempts=1)
    grade = local.grade("What colour?", "red", "crimson")
    assert 0.0 <= grade.score <= 1.0
    assert local.grade("What colour?", "red", "crimson") == grade
