"""Two engines loaded at the same time leave transformers as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from lightning_modules.families.qwen3_vl import Qwen3VLFamily
from rollout.engines.hf import HFEngine


def test_loading_in_two_threads_leaves_weight_tying_intact(tiny_model_dir):
    from transformers import PreTrainedModel

    before = PreTrainedModel.tie_weights
    with ThreadPoolExecutor(2) as pool:
        engines = list(pool.map(lambda _: HFEngine(tiny_model_dir, Qwen3VLFamily()), range(6)))
    assert PreTrainedModel.tie_weights is before
    for engine in engines:
        engine.close()
