"""Real vLLM and real Ray: equal records through both drivers, engines that end with the evaluation, a lost actor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from eval_latency import LatencyEngine
from test_eval_pipeline_drivers import requests
from waiting import until


@pytest.mark.slow
def test_vllm_gives_identical_records_through_both_drivers():
    pytest.importorskip("vllm")
    command = [sys.executable, "scripts/bench/eval_pipeline.py", "--vllm"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=True)
    (case,) = json.loads(result.stdout[result.stdout.index("[") :])
    assert case["identical_records"]
    assert case["items"] >= 20
    assert 0 <= case["async"]["idle_share"] < 1


@pytest.mark.slow
def test_the_pipeline_benchmark_reports_its_cases():
    command = [sys.executable, "scripts/bench/eval_pipeline.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=True)
    cases = {case["case"]: case for case in json.loads(result.stdout)}
    assert cases["decode-bound"].keys() >= {"gain", "share_of_bound"}


class PatientEngine(LatencyEngine):
    async def generate(self, request):
        response = await super().generate(request)
        return response

    async def start(self) -> None:
        self.seconds = 0.2


@pytest.mark.slow
def test_items_of_a_killed_ray_actor_are_asked_elsewhere():
    pytest.importorskip("ray")
    import ray

    from eval.engine.async_driver import AsyncDriver
    from eval.engine.ray_replica import RayReplica

    # The actors must find the engine of this test.
    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    replicas = []

    def build():
        replicas.append(RayReplica(PatientEngine, num_gpus=0))
        return replicas[-1]

    try:
        driver = AsyncDriver([build, build], max_in_flight=2, restarts=0)
        found = []
        for outcome in driver.run(requests(*["fine"] * 24)):
            found.append(outcome)
            if len(found) == 4:
                os.kill(ray.get(replicas[0]._actor.process_id.remote()), signal.SIGKILL)
        driver.close()
    finally:
        ray.shutdown()
    assert sorted(o.request.request_id for o in found) == sorted(f"u{i}" for i in range(24))
    assert {outcome.response.text for outcome in found} == {"answer to fine"}


@pytest.mark.slow
def test_the_engine_process_ends_with_a_killed_evaluation(tmp_path):
    pytest.importorskip("vllm")
    import psutil

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    process = subprocess.Popen([sys.executable, str(ROOT / "scripts/eval_demo.py")], cwd=tmp_path, env=environment)
    answers = tmp_path / "outputs" / "eval_demo"

    def asked() -> bool:
        return any(path.stat().st_size for path in answers.rglob("answers.jsonl"))

    until(lambda: asked() or process.poll() is not None, "the first answer", 400)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert len(children) >= 2
    _, left = psutil.wait_procs(children, timeout=120)
    assert [p.pid for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
