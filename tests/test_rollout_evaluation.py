"""Held-out evaluation through the colocated engine: expected scores by the same router, failed items kept."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rollout_helpers import make_requests, make_sample, model_token_ids, reference_logprobs

from datamodules.types import StepBatch
from datamodules.video_rl import VideoRLDataModule
from eval.callback import EvaluationCallback
from eval.heldout import EvalRecord, complete, evaluate_batches, generate_tolerantly, summarise
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rewards.router import RewardRouter
from rollout.callback import ColocatedEngineCallback
from rollout.table import RolloutTableCallback
from rollout.types import SampleError, SamplingSpec


class SessionEngine:
    """The session's engine without its `close`."""

    def __init__(self, engine) -> None:
        self.generate, self.update_weights = engine.generate, engine.update_weights
        self.sleep, self.wake = engine.sleep, engine.wake


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny_model_dir).eval()


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="module")
def greedy(tiny_model_dir):
    banned, stop = model_token_ids(tiny_model_dir)
    return SamplingSpec(n=1, temperature=0.0, max_tokens=8, banned_ids=banned, stop_ids=stop)


def write_records(path, answers):
    records = [
        {
            "problem_id": f"t{i}",
            "problem": f"Say number {i}.",
            "answer": answer,
            "problem_type": kind,
            "data_type": "text",
        }
        for i, (kind, answer) in enumerate(answers)
    ]
    records.append(
        {"problem_id": "gone", "problem": "<video>What?", "answer": "A", "problem_type": "multiple choice"}
        | {"data_type": "video", "videos": ["missing.mp4"], "options": ["A. x", "B. y"]}
    )
    path.write_text(json.dumps(records))
    return path


def test_callback_scores_the_heldout_split(vllm_engine, tiny_model_dir, tmp_path, model, greedy, caplog):
    def datamodule(answers):
        file = write_records(tmp_path / "val.json", answers)
        module = VideoRLDataModule(
            str(tiny_model_dir),
            family=Qwen3VLFamily(),
            val_files=[str(file)],
            media_root=str(tmp_path),
            val_batch_size=2,
        )
        module.setup()
        return module

    # First pass: what does the model say? Then its own words are the right answer of one item.
    first = datamodule([("open-ended", "x"), ("open-ended", "x"), ("boolean", "yes")])
    prompts = [first.preparer.prepare(sample) for sample in first.val_samples[:3]]
    said = {key: r.text for key, r in vllm_engine.generate(make_requests(prompts, greedy))}
    answers = [("open-ended", f"{said['0/0']} and more"), ("open-ended", "something else"), ("boolean", "yes")]
    second = datamodule(answers)
    router = RewardRouter()
    expected = [
        router.score(response=said[f"{i}/0"], ground_truth=answer, problem_type=kind).accuracy
        for i, (kind, answer) in enumerate(answers)
    ]
    engine = ColocatedEngineCallback(
        lambda: SessionEngine(vllm_engine), {"n": 2, "max_tokens": 8}, tiny_model_dir, Qwen3VLFamily()
    )
    policy = SimpleNamespace(weights_version=0, engine_weights=model.named_parameters, rl_step=0)
    engine.setup(None, policy, "fit")
    evaluation = EvaluationCallback(router, every_n_steps=2, max_steps=3, run_dir=tmp_path / "run")
    logged = []
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((step, metrics)))
    trainer = SimpleNamespace(datamodule=second, callbacks=[engine, evaluation], loggers=[logger], is_global_zero=True)
    evaluation.on_train_start(trainer, policy)
    for policy.rl_step in (1, 2, 3):
        evaluation.on_train_batch_end(trainer, policy, None, None, 0)
    assert [step for step, _ in logged] == [0, 2, 3]
    metrics = logged[0][1]
    assert metrics["val/items"] == 4
    assert metrics["val/failed"] == 1
    assert metrics["val/accuracy_mean"] == pytest.approx(sum(expected) / 4)
    assert metrics["val/accuracy/open-ended"] == pytest.approx(sum(expected[:2]) / 2)
    assert metrics["val/accuracy/boolean"] == expected[2]
    assert metrics["val/accuracy_visual"] == 0.0
    assert {k: v for k, v in logged[2][1].items() if k != "val/seconds"} == {
        k: v for k, v in metrics.items() if k != "val/seconds"
    }
    saved = json.loads((tmp_path / "run" / "evaluation" / "step_000003.json").read_text())
    by_uid = {record["uid"].split(":")[-1]: record for record in saved["records"]}
    assert [by_uid[f"t{i}"]["response"] for i in range(3)] == [said[f"{i}/0"] for i in range(3)]
    assert by_uid["gone"]["state"] == "failed"
    assert "missing.mp4" in by_uid["gone"]["reason"]
    assert evaluation.last_results["step"] == 3


def test_a_sample_the_engine_refuses_fails_alone(vllm_engine, processor, greedy):
    good = [make_sample(processor, "text", uid=f"good{i}", seed=i, question=f"{i}?") for i in range(2)]
    blind = make_sample(processor, "video", uid="blind")
    blind = dataclasses.replace(
        blind, videos=(dataclasses.replace(blind.videos[0], frames=blind.videos[0].frames[:0]),)
    )
    long = make_sample(processor, "text", uid="long", question="word " * 2100)
    prompts = [good[0], blind, long, good[1]]
    samples = {prompt.uid: prompt.sample for prompt in prompts}
    records = evaluate_batches([StepBatch(prompts)], samples, vllm_engine.generate, RewardRouter(), greedy)
    assert [(r.uid, r.state == "failed") for r in records] == [
        ("good0", False),
        ("blind", True),
        ("long", True),
        ("good1", False),
    ]
    assert "cannot render" in records[1].reason
    assert "exceeds max_model_len=2048" in records[2].reason
    assert records[0].num_tokens > 0


def test_other_errors_are_not_swallowed(processor, greedy):
    def broken(requests):
        raise RuntimeError("the engine died")
        yield

    requests = make_requests([make_sample(processor, "text")], greedy)
    with pytest.raises(RuntimeError, match="the engine died"):
        list(generate_tolerantly(requests, broken, {}))
    assert issubclass(SampleError, RuntimeError)


def test_an_engine_that_names_a_stranger_or_says_nothing_does_not_hold_the_run(processor, greedy):
    def confused(requests):
        raise SampleError("somebody else", "too long")
        yield

    requests = make_requests([make_sample(processor, "text")], greedy)
    with pytest.raises(SampleError, match="somebody else"):
        list(generate_tolerantly(requests, confused, {}))
    reasons: dict[str, str] = {}
    assert list(generate_tolerantly(requests, lambda batch: iter(()), reasons)) == []
    assert reasons == {requests[0].request_id: "the engine returned nothing"}


def test_summary_by_hand():
    def record(uid, state, accuracy, kind="ocr", data="image", source=""):
        return EvalRecord(uid, state, kind, data, source, accuracy, format=1.0, num_tokens=4)

    records = [
        record("a", "ok", 1.0),
        record("b", "ok", 0.5, "math", "text", "gsm"),
        record("c", "unparsed", 0.0),
        record("d", "failed", 0.0, "math", "video", "gsm"),
    ]
    metrics = summarise(records)
    assert metrics["val/accuracy_mean"] == 0.375
    assert metrics["val/accuracy_visual"] == pytest.approx(1 / 3)
    assert metrics["val/accuracy/ocr"] == 0.5
    assert metrics["val/accuracy/math"] == 0.25
    assert metrics["val/accuracy_by_source/gsm"] == 0.25
    assert (metrics["val/failed"], metrics["val/unparsed"], metrics["val/items"]) == (1, 1, 4)
    unjudged = record("e", "not_judged", 0.0, "open-ended")
    more = summarise([*records, unjudged])
    assert {key: more[key] for key in metrics if "item" not in key and "judged" not in key} == {
        key: value for key, value in metrics.items() if "item" not in key and "judged" not in key
    }
    assert (more["val/not_judged"], more["val/items"], "val/accuracy/open-ended" in more) == (1, 5, False)
    assert "val/accuracy_mean" not in summarise([unjudged])


def test_every_sample_ends_in_exactly_one_record(processor):
    samples = [make_sample(processor, "text", uid=uid).sample for uid in ("a", "b")]
    one = EvalRecord("b", "ok", "ocr", "text", accuracy=1.0)
    filled = complete([one], samples)
    assert [(r.uid, r.state) for r in filled] == [("a", "failed"), ("b", "ok")]
    with pytest.raises(RuntimeError, match="a record too many for sample b"):
        complete([one, one], samples)


def test_rollout_table(vllm_engine, processor, tiny_model_dir, model, tmp_path):
    engine = ColocatedEngineCallback(
        lambda: SessionEngine(vllm_engine), {"n": 2, "max_tokens": 6}, tiny_model_dir, Qwen3VLFamily()
    )
    policy = SimpleNamespace(weights_version=0, engine_weights=model.named_parameters)
    engine.setup(None, policy, "fit")
    batch = StepBatch([make_sample(processor, "text", uid=f"p{i}", seed=i) for i in range(3)], rl_step=4)
    engine.on_train_batch_start(None, policy, batch, 0)
    router = RewardRouter()
    batch.scores = [
        tuple(router.score(response=r.text, ground_truth="red", problem_type="open-ended") for r in g.responses)
        for g in batch.groups
    ]
    table = RolloutTableCallback(tmp_path, num_groups=2)
    table.on_train_batch_end(SimpleNamespace(is_global_zero=True), policy, None, batch, 0)
    lines = (tmp_path / "rollouts" / "step_000004.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["uid"], row["k"]) for row in rows] == [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)]
    assert rows[0]["response"] == batch.groups[0].responses[0].text
    assert rows[3]["total"] == batch.scores[1][1].total


def test_real_clip_through_cache_engine_and_model(vllm_engine, shared_data, tiny_model_dir, tmp_path, model, processor):
    """A Charades clip, decoded and cached by the datamodule: the same ids and log-probs on both sides."""
    clip = next(path for path in sorted((shared_data / "videos").iterdir()) if "0F7LW" in path.name)
    record = {"problem_id": "c", "problem": "<video>When does the person sit down?", "answer": "[1, 2]"}
    record |= {"problem_type": "temporal grounding", "data_type": "video", "videos": [clip.name]}
    (tmp_path / "val.json").write_text(json.dumps([record]))
    data = VideoRLDataModule(
        str(tiny_model_dir),
        family=Qwen3VLFamily(),
        val_files=[str(tmp_path / "val.json")],
        media_root=str(clip.parent),
        cache_dir=str(tmp_path / "cache"),
        max_frames=8,
        video_max_pixels=16384,
        video_min_pixels=1024,
    )
    (batch,) = list(data.val_dataloader())
    assert batch.lost == []
    banned, stop = model_token_ids(tiny_model_dir)
    spec = SamplingSpec(n=2, max_tokens=8, banned_ids=banned, stop_ids=stop)
    for response in dict(vllm_engine.generate(make_requests(batch.prompts, spec))).values():
        expected = reference_logprobs(model, processor, batch.prompts[0], response.token_ids, 1.0, banned)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-5, rtol=0)
