"""Estimate tokens, micro-batches and memory of a run from arithmetic alone. The figures are estimates and say so."""

from __future__ import annotations

from typing import Any

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def visual_tokens(pixels: int, frames: int, factor: int, temporal_patch: int) -> int:
    """Most visual tokens of a video of `frames` frames of `pixels` pixels; factor = patch size x spatial merge."""
    return -(-frames // temporal_patch) * (pixels // factor**2)


def memory_plan(plain: dict[str, Any], world: int, sharded: bool, keeps_groups: bool) -> list[str]:
    """Lines of the plan about tokens, micro-batches and memory; needs `model.size` for the latter.

    Args:
        plain: the run's settings.
        world: ranks.
        sharded: whether the strategy spreads the model over the ranks.
        keeps_groups: whether the layout computes the prompt of a group once.
    """
    data, module, sampling = plain["data"], plain["module"], (plain.get("rollout") or {}).get("sampling") or {}
    size = plain["model"].get("size") or {}
    factor, temporal = int(size.get("pixel_factor", 32)), int(size.get("temporal_patch", 2))
    frames = int(data.get("max_frames") or 0)
    pixels = int(data.get("video_max_pixels") or 0)
    prompt = visual_tokens(pixels, frames, factor, temporal)
    response, n = int(sampling.get("max_tokens", 0)), int(sampling.get("n", 1))
    budget = int(module.get("micro_batch_tokens") or 0)
    # The prompt's text comes on top of the visual tokens; its limit is known, its length is not.
    longest = max(prompt, min(int(data.get("max_prompt_tokens") or prompt), prompt + 4096))
    group = longest + n * response
    prompts = int(data["rollout_batch_size"]) // world
    lines = [
        f"  tokens: video prompt up to {prompt:,} visual tokens ({frames} frames of {pixels:,} pixels), response up to "
        f"{response:,}; a group that shares its prompt up to {group:,} instead of {n * (longest + response):,}"
    ]
    if prompt and prompt >= int(data.get("max_prompt_tokens") or prompt + 1):
        lines.append(
            f"  tokens: data.max_prompt_tokens={int(data['max_prompt_tokens']):,} leaves no room for text beside "
            f"{prompt:,} visual tokens: the longest videos will be dropped"
        )
    if budget:
        most = -(-prompts * group // budget)
        lines.append(f"  micro-batches: budget {budget:,} tokens each, at most {most} per rank and step")
        if keeps_groups and group > budget:
            lines.append(
                "  micro-batches: the longest group is split and repeats its prompt; "
                f"module.micro_batch_tokens={group} would hold it whole"
            )
    if not size.get("parameters"):
        return [*lines, "  memory: the model's size is not in its config (model.size), no estimate"]
    return lines + _memory_lines(plain, world if sharded else 1, size, max(budget, prompt + response))


def _memory_lines(plain: dict[str, Any], shards: int, size: dict[str, Any], micro_batch_tokens: int) -> list[str]:
    parameters = float(size["parameters"])
    layers, hidden, mlp = int(size["layers"]), int(size["hidden"]), int(size["intermediate"])
    compute = BYTES[plain["strategy"].get("param_dtype") or "float32"]
    states = parameters * 16 / shards  # float32 parameters, gradients, two Adam moments
    gathered = parameters / layers * compute * 2 if shards > 1 else 0.0  # the layer in use and the prefetched one
    checkpoints = micro_batch_tokens * hidden * layers * compute
    one_layer = micro_batch_tokens * (hidden * 12 + mlp * 3) * compute
    # Without checkpointing every layer keeps what its backward reads.
    activations = checkpoints + one_layer if plain["module"].get("gradient_checkpointing") else layers * one_layer
    needs_reference = bool((plain.get("algorithm") or {}).get("kl"))
    reference = parameters * 4 / shards if needs_reference and not plain["module"].get("reference_offload") else 0.0
    logits = 1024 * int(size["vocabulary"]) * 4 * 2
    update = states + reference + gathered + activations + logits
    tensor_parallel = int(((plain.get("rollout") or {}).get("engine") or {}).get("tensor_parallel_size", 1))
    engine_weights = parameters * 2 / tensor_parallel
    kv_token = 2 * layers * int(size["kv_heads"]) * int(size["head_dim"]) * 2 / tensor_parallel
    capacity = float(size.get("device_memory_gib", 0)) * GIB
    share = float(((plain.get("rollout") or {}).get("engine") or {}).get("gpu_memory_utilization", 0.6) or 0.6)
    kv_cache = max(capacity * share - engine_weights - 6 * GIB, 0.0)

    def gib(value: float) -> str:
        return f"{value / GIB:.1f}"

    lines = [
        "  memory per GPU in GiB (unvalidated until measured on the target machine):",
        f"    update phase: states {gib(states)} + "
        + (f"reference {gib(reference)} + " if reference else "")
        + f"gathered layers {gib(gathered)} + activations {gib(activations)} + log-prob chunk {gib(logits)} "
        + f"= {gib(update)} (engine asleep)",
    ]
    if capacity:
        lines.append(
            f"    rollout phase: states {gib(states)} + engine weights {gib(engine_weights)} + KV cache "
            f"{gib(kv_cache)} ({kv_cache / kv_token:,.0f} tokens) of {gib(capacity)}"
        )
        if states + capacity * share > capacity:
            lines.append("    rollout phase does not fit: lower rollout.engine.gpu_memory_utilization")
        if update > capacity:
            lines.append(
                "    update phase does not fit: lower module.micro_batch_tokens"
                + ("" if plain["module"].get("gradient_checkpointing") else ", or module.gradient_checkpointing=true")
            )
    return lines
