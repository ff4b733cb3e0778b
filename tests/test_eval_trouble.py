"""Trouble with real parts: a disk that is full, an engine that does not come back, a judge that talks rubbish."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from test_eval_pipeline_benchmark import drawn, make_run  # noqa: F401 - a fixture
from test_rewards_judge import ScriptedServer, judge, server  # noqa: F401 - a fixture
from train_helpers import command, environment
from waiting import until

from datamodules.common.files import write_lines
from eval.engine.deadline import WatchedGenerate
from eval.engine.generate import LockStepDriver
from eval.run.records import read_records
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rewards.router import RewardRouter
from rollout.types import GenerateRequest, SamplingSpec

GOOD = '{"reason": "same meaning", "score": 1}'


def small_disk(script: str) -> subprocess.CompletedProcess:
    """Run a shell script with mounts of its own."""
    own = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script]
    return subprocess.run(own, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=400)


@pytest.fixture
def disk(tmp_path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    probe = small_disk(f"mount -t tmpfs -o size=64k tmpfs {folder}")
    if probe.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {probe.stderr.strip()}")
    return folder


def lines(output: str, word: str) -> list[str]:
    return [line.partition(" ")[2] for line in output.splitlines() if word in line]


def test_a_full_disk_leaves_every_item_its_state_and_the_message_names_the_file(
    disk,
    drawn,  # noqa: F811
    tiny_model_dir,
    tmp_path,
):
    asked = (f"model={tiny_model_dir}", "benchmark=charades_sta", f"data_root={drawn}", f"output_dir={disk}", "limit=6")
    engine = ("driver=hf", "driver.engine.dtype=float32", "driver.engine.max_model_len=2048", "driver.batch_size=1")
    frames = ("frames.max_frames=4", "frames.min_pixels=2048", "frames.max_pixels=8192", "sampling.max_tokens=8")
    rest = ("prepare.processes=1", "report_items=0", "tensorboard=false", "model_name=m")
    run = shlex.join(command(*asked, *engine, *frames, *rest, script="evaluate.py"))
    # The questions fit; then another file takes all that is left.
    script = f"""
    mount -t tmpfs -o size=64k tmpfs {disk}
    {run} stage=prepare 2>&1 || exit 90
    head -c 1m /dev/zero > {disk}/ballast 2>/dev/null
    echo FIRST; {run} stage=all 2>&1; echo "code $?"
    mkdir {tmp_path}/first; cp -r {disk}/m {tmp_path}/first
    rm {disk}/ballast
    echo SECOND; {run} stage=all 2>&1; echo "code $?"
    cp -r {disk}/m {tmp_path}/second
    """
    result = small_disk(script)
    prepared, _, rest = result.stdout.partition("FIRST")
    first, _, second = rest.partition("SECOND")
    assert "6 items" in prepared, result.stdout + result.stderr
    assert "code 1" in first, first
    assert "code 0" in second, second
    # Every item has its state although the answers are in memory only, and the figures are those of the second run.
    (table,) = lines(first, "n_expected=3720")
    assert table in second
    assert "n_not_asked" not in table
    (problem,) = lines(first, "incomplete: charades_sta")
    assert ".jsonl: No space left on device" in problem
    assert "Traceback" not in first
    assert not list((tmp_path / "first").rglob("result.json"))
    (answers,) = (tmp_path / "first").rglob("answers.jsonl")
    assert read_records(answers) == {}
    assert "6 items, 6 to ask" in second
    (found,) = (tmp_path / "second").rglob("result.json")
    assert json.loads(found.read_text())["counts"]["n_items"] == 6


def prompts(tiny_model_dir, spec: SamplingSpec, *uids: str) -> list[GenerateRequest]:
    from rollout_helpers import make_sample
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_model_dir)
    return [GenerateRequest(uid, make_sample(processor, "text", uid=uid, question=f"{uid}?"), spec, 0) for uid in uids]


def test_what_a_batch_has_not_answered_at_its_deadline_has_failed_and_the_engine_goes_on(vllm_engine, tiny_model_dir):
    from rollout_helpers import model_token_ids

    banned, stop = model_token_ids(tiny_model_dir)
    endless = SamplingSpec(n=1, max_tokens=500, temperature=0.0, banned_ids=(*banned, *stop))
    short = SamplingSpec(n=1, max_tokens=4, temperature=0.0, banned_ids=banned, stop_ids=stop)
    slow, quick = prompts(tiny_model_dir, endless, "slow0", "slow1"), prompts(tiny_model_dir, short, "quick")
    expected = {key: response.text for key, response in vllm_engine.generate(quick)}
    # Five hundred steps take more than 0.2 s on any machine; the engine comes back when the first response is there.
    hasty = WatchedGenerate(vllm_engine.generate, deadline_s=0.2)
    found = list(LockStepDriver(hasty, batch_size=2).run(slow))
    assert [(o.request.request_id, o.reason, o.is_final) for o in found] == [
        ("slow0", "no answer within 0.2 s", True),
        ("slow1", "no answer within 0.2 s", True),
    ]
    until(lambda: not hasty.is_stuck, "the engine", 240)
    hasty.close()
    driver = LockStepDriver(vllm_engine.generate, batch_size=2, deadline_s=300.0)
    (outcome,) = driver.run(quick)
    driver.close()
    assert {outcome.request.request_id: outcome.response.text} == expected


def test_an_engine_that_never_comes_back_leaves_the_rest_open():
    from test_eval_pipeline_drivers import requests

    held = threading.Event()

    def generate(batch):
        held.wait()
        yield from ()

    closed = []
    driver = LockStepDriver(generate, batch_size=1, close=lambda: closed.append(True), deadline_s=0.1)
    found = list(driver.run(requests("one", "two", "three")))
    driver.close()
    held.set()
    assert [(outcome.is_final, outcome.response) for outcome in found] == [(True, None), (False, None), (False, None)]
    assert found[0].reason == "no answer within 0.1 s"
    assert "has not come back" in found[1].reason
    assert closed == []  # closing a hanging engine would hang, too


@pytest.mark.slow
def test_vllm_requests_that_cannot_be_rendered_or_get_no_answer_fail_and_a_stopped_core_is_replaced(
    tiny_model_dir, monkeypatch
):
    """The engine core is a real process; stopped by a signal it takes requests and never answers."""
    import signal
    import time

    import psutil
    from rollout_helpers import make_sample
    from transformers import AutoProcessor

    from eval.engine.async_driver import AsyncDriver
    from eval.engine.vllm_replica import AsyncLLMReplica

    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    spec = SamplingSpec(n=1, temperature=0.0, max_tokens=4)
    processor = AutoProcessor.from_pretrained(tiny_model_dir)
    blind = make_sample(processor, "video", uid="blind")
    blind = replace(blind, videos=(replace(blind.videos[0], frames=blind.videos[0].frames[:0]),))
    long = make_sample(processor, "text", uid="long", question="word " * 2100)
    bad = [GenerateRequest(prompt.uid, prompt, spec, 0) for prompt in (blind, long)]
    good = [f"good{i}" for i in range(4)]
    options = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "enforce_eager": True}
    driver = AsyncDriver(
        [lambda: AsyncLLMReplica(tiny_model_dir, Qwen3VLFamily(), **options)], max_in_flight=4, deadline_s=60.0
    )
    try:
        fine = {o.request.request_id: o for o in driver.run([*prompts(tiny_model_dir, spec, *good), *bad])}
        assert {uid for uid, outcome in fine.items() if outcome.response is None} == {"blind", "long"}
        assert "cannot render" in fine["blind"].reason
        assert "exceeds max_model_len=2048" in fine["long"].reason
        driver._deadline_s = 1.0
        children = psutil.Process().children(recursive=True)
        cores = [p for p in children if "EngineCore" in p.name() or "spawn_main" in " ".join(p.cmdline())]
        assert cores
        for core in cores:
            core.send_signal(signal.SIGSTOP)
        stuck = [o.reason for o in driver.run(prompts(tiny_model_dir, spec, *[f"stuck{i}" for i in range(8)]))]
        assert stuck == ["no answer within 1 s"] * 8
        driver._deadline_s = 900.0
        started = time.monotonic()
        again = {o.request.request_id: o.response.text for o in driver.run(prompts(tiny_model_dir, spec, *good))}
        assert again == {uid: fine[uid].response.text for uid in good}
        assert time.monotonic() - started < 600
        assert driver.stats.restarts == 1
    finally:
        driver.close()


@pytest.fixture
def judged(tmp_path, drawn, tiny_model_dir):  # noqa: F811
    """A finished run of VCR-Bench with three open answers, ready to be scored."""
    data = tmp_path / "data"
    records = [
        {"id": i, "question": "In which room?", "answer": "Kitchen", "choices": None, "video_path": "v.mp4"}
        | {"dimension": "fundamental temporal reasoning", "duration": 40}
        for i in range(3)
    ]
    (data / "vcrbench").mkdir(parents=True)
    (data / "vcrbench" / "meta_info.json").write_text(json.dumps(records))
    run = make_run(tmp_path / "out", data, tiny_model_dir, "vcrbench")
    run.prepare()
    from eval.run.pipeline import item_digest

    answers = [
        {"uid": item.uid, "state": "answered", "item": item_digest(item), "response": f"room {i}"}
        for i, item in enumerate(run.items())
    ]
    write_lines(run.folder / "answers.jsonl", answers)
    return run


def no_model():
    raise AssertionError("everything is answered")


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([(200, "I would rather talk about the weather.")], "no JSON verdict"),
        ([(200, '{"score": 7}')], "no JSON verdict"),
        ([(200, "")], "no JSON verdict"),
        ([(429, "slow down")], "RateLimitError"),
        ([(500, "broken")], "InternalServerError"),
        ([(401, "no key")], "refused the call"),
    ],
)
def test_a_judge_without_a_verdict_is_not_zero_and_the_same_command_asks_it_again(server, judged, replies, why):  # noqa: F811
    server.replies = replies
    with RewardRouter(judge=judge(server, attempts=2)) as router:
        result = judged.run(no_model, router, "all")
    assert result["headline"]["accuracy"] is None
    assert result["counts"]["n_not_judged"] == 3
    scores = read_records(judged.folder / "scores.jsonl")
    assert {(score["state"], why in score["reason"]) for score in scores.values()} == {("not_judged", True)}
    server.replies = [(200, GOOD)]
    with RewardRouter(judge=judge(server)) as router:
        again = judged.run(no_model, router, "all")
    assert again["headline"]["accuracy"] == 100.0
    assert again["counts"]["n_not_judged"] == 0


def test_a_judge_that_does_not_answer_at_all_or_is_not_there(server, judged):  # noqa: F811
    from rewards.judge.client import Judge, OpenAIBackend

    silent = threading.Event()
    original = server.RequestHandlerClass.do_POST
    server.RequestHandlerClass = type("Silent", (server.RequestHandlerClass,), {"do_POST": lambda _: silent.wait()})
    try:
        for address, why in ((server.url, "APITimeoutError"), ("http://127.0.0.1:9/v1", "APIConnectionError")):
            backend = OpenAIBackend("grader", address, timeout_s=0.3)
            with RewardRouter(judge=Judge(backend, attempts=2, pause_s=0.01)) as router:
                result = judged.run(no_model, router, "score")
            assert result["counts"]["n_not_judged"] == 3
            scores = read_records(judged.folder / "scores.jsonl")
            assert all(why in score["reason"] for score in scores.values())
    finally:
        silent.set()
        server.RequestHandlerClass = original


def test_a_slow_judge_is_waited_for_and_what_it_leaves_is_not_judged(server, judged):  # noqa: F811
    from dataclasses import replace as changed

    original, held = server.RequestHandlerClass.do_POST, threading.Event()

    def slow(handler):
        held.wait(2.0)
        original(handler)

    server.RequestHandlerClass = type("Slow", (server.RequestHandlerClass,), {"do_POST": slow})
    server.replies = [(200, GOOD)]
    judged.options = changed(judged.options, score_timeout_s=120.0)
    with RewardRouter(judge=judge(server), threads=1) as router:
        assert judged.run(no_model, router, "score")["headline"]["accuracy"] == 100.0
    judged.options = changed(judged.options, score_timeout_s=0.2)
    with RewardRouter(judge=judge(server), threads=1) as router:
        result = judged.run(no_model, router, "score")
    assert (result["counts"]["n_not_judged"], result["counts"]["n_failed"]) == (3, 0)
    assert result["headline"]["accuracy"] is None
    held.set()
    judged.options = changed(judged.options, score_timeout_s=120.0)
    with RewardRouter(judge=judge(server)) as router:
        assert judged.run(no_model, router)["headline"]["accuracy"] == 100.0
