"""The callback in Lightning's loop: real engine, real model, groups published while others generate."""

from __future__ import annotations

import dataclasses

import lightning as L
import numpy as np
import pytest
import torch
from rollout_helpers import make_sample, reference_logprobs

from datamodules.common.seeds import response_seed
from datamodules.types import StepBatch
from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.callback import ColocatedEngineCallback, assemble
from rollout.types import GenerateRequest, SamplingSpec


class TinyPolicy(L.LightningModule):
    """What the callback needs of a module, around the tiny model; one optimizer step per batch."""

    needs_greedy_baseline = False

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model
        self.weights_version = 0
        self.syncs = 0
        self.seen: list[StepBatch] = []
        self.automatic_optimization = False

    def engine_weights(self):
        self.syncs += 1
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        if batch.rl_step == 0:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.9)
            self.weights_version += 1


class Sink:
    def __init__(self, engine) -> None:
        self.engine, self.order, self.busy = engine, [], []

    def put(self, group) -> None:
        self.order.append(group.index)
        self.busy.append(self.engine.llm.llm_engine.has_unfinished_requests())


class KeepOpen:
    """Passes everything to the session's engine but survives the callback's teardown."""

    def __init__(self, engine) -> None:
        self.generate, self.update_weights = engine.generate, engine.update_weights
        self.sleep, self.wake = engine.sleep, engine.wake

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def processor(tiny_model_dir):
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(tiny_model_dir)


@pytest.fixture
def policy(tiny_model_dir):
    from transformers import AutoModelForImageTextToText

    return TinyPolicy(AutoModelForImageTextToText.from_pretrained(tiny_model_dir).eval())


def make_callback(engine, tiny_model_dir, **sampling) -> ColocatedEngineCallback:
    spec = {"n": 3, "temperature": 1.0, "max_tokens": 8} | sampling
    return ColocatedEngineCallback(lambda: KeepOpen(engine), spec, tiny_model_dir, Qwen3VLFamily(), seed=5)


def trainer_with(callback, steps: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(callback, policy, batches) -> None:
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer_with(callback, len(batches)).fit(policy, loader)


def test_steps_in_lightnings_loop(vllm_engine, restore_engine_weights, tiny_model_dir, processor, policy):
    callback = make_callback(vllm_engine, tiny_model_dir)
    sink = Sink(vllm_engine)
    callback.subscribe(sink)
    prompts = [make_sample(processor, kind, seed=3) for kind in ("text", "video", "image", "two videos")]
    batches = [StepBatch(prompts=list(prompts), rl_step=step) for step in range(3)]
    fit(callback, policy, batches)
    assert policy.syncs == 2  # the start, and the update of step 0; step 1 changed nothing
    assert len(sink.order) == 12
    assert sorted(sink.order[:4]) == [0, 1, 2, 3]
    for step, batch in enumerate(policy.seen):
        assert [group.uid for group in batch.groups] == [prompt.uid for prompt in prompts]
        assert [group.index for group in batch.groups] == [0, 1, 2, 3]
        assert {"wake", "sync", "generate", "sleep"} <= batch.timings.keys()
        for group in batch.groups:
            assert [r.seed for r in group.responses] == [response_seed(5, step, group.uid, k) for k in range(3)]
            assert group.greedy is None
        tokens = [r.token_ids.tolist() for g in batch.groups for r in g.responses]
        assert batch.metrics["rollout/response_tokens_count"] == sum(map(len, tokens))
        assert batch.metrics["rollout/response_length"] == pytest.approx(sum(map(len, tokens)) / 12)
    # Step 2 was sampled from the scaled weights that training left behind.
    for group in policy.seen[2].groups:
        response = group.responses[0]
        banned = callback.sampling.banned_ids
        expected = reference_logprobs(policy.model, processor, group.prompt, response.token_ids, 1.0, banned)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-5, rtol=0)


def test_groups_are_published_before_the_rest_is_finished(vllm_engine, tiny_model_dir, processor, policy):
    callback = make_callback(vllm_engine, tiny_model_dir, n=2)
    callback.setup(None, policy, "fit")
    sink = Sink(vllm_engine)
    callback.subscribe(sink)
    prompts = [make_sample(processor, "text", uid=f"p{i}", seed=i) for i in range(12)]
    batch = StepBatch(prompts=prompts)
    # With 40 tokens some of 24 responses meet an end token early, some never do.
    callback._sampling = dataclasses.replace(callback.sampling, max_tokens=40, stop_ids=tuple(range(7, 60)))
    callback.on_train_batch_start(None, policy, batch, 0)
    assert sink.busy[0]
    assert not sink.busy[-1]
    assert sink.order != sorted(sink.order)
    assert [group.index for group in batch.groups] == list(range(12))


def test_greedy_baseline_and_hf_engine_agree(vllm_engine, tiny_model_dir, processor, policy):
    from rollout.engines.hf import HFEngine

    policy.needs_greedy_baseline = True
    prompts = [make_sample(processor, kind) for kind in ("video", "text")]
    greedy = []
    for build in (lambda: KeepOpen(vllm_engine), lambda: HFEngine(tiny_model_dir, Qwen3VLFamily())):
        callback = ColocatedEngineCallback(build, SamplingSpec(n=2, max_tokens=8), tiny_model_dir, Qwen3VLFamily())
        callback.setup(None, policy, "fit")
        batch = StepBatch(prompts=prompts)
        callback.on_train_batch_start(None, policy, batch, 0)
        assert all(len(group.responses) == 2 for group in batch.groups)
        greedy.append([group.greedy.token_ids.tolist() for group in batch.groups])
    assert greedy[0] == greedy[1]


def test_generate_fn_uses_the_current_weights(vllm_engine, restore_engine_weights, tiny_model_dir, processor, policy):
    callback = make_callback(vllm_engine, tiny_model_dir)
    callback.setup(None, policy, "fit")
    prompt = make_sample(processor, "image")
    spec = dataclasses.replace(callback.sampling, n=1, temperature=0.0)
    request = GenerateRequest("eval", prompt, spec, 0)
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(-1.0)
    policy.weights_version += 1
    ((key, response),) = callback.generate_fn([request])
    assert key == "eval"
    expected = reference_logprobs(policy.model, processor, prompt, response.token_ids, 1.0, spec.banned_ids)
    np.testing.assert_allclose(response.logprobs, expected, atol=1e-5, rtol=0)


def test_an_empty_step_is_no_error(vllm_engine, tiny_model_dir, policy):
    callback = make_callback(vllm_engine, tiny_model_dir)
    callback.setup(None, policy, "fit")
    batch = StepBatch(prompts=[])
    callback.on_train_batch_start(None, policy, batch, 0)
    assert batch.groups == []


def test_wrong_response_counts_are_errors(vllm_engine, tiny_model_dir, processor, policy):
    callback = make_callback(vllm_engine, tiny_model_dir)
    prompts = [make_sample(processor, "text", uid="first"), make_sample(processor, "text", uid="second", seed=1)]
    requests = callback.requests(prompts, 0, greedy=False)
    responses = list(vllm_engine.generate(requests))
    assert [group.uid for group in assemble(prompts, requests, iter(responses), 3)]
    lacking = [pair for pair in responses if pair[0] != "0:1:2"]
    with pytest.raises(RuntimeError, match=r"too few responses; missing per sample: \{'second': 1\}"):
        list(assemble(prompts, requests, iter(lacking), 3))
    with pytest.raises(RuntimeError, match="not asked for or came before"):
        list(assemble(prompts, requests, iter([*responses, responses[0]]), 3))
