"""Which settings make a run what it is: the folder of a run is named after them, and nothing else starts a new one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datamodules.common.files import write_json

if TYPE_CHECKING:
    from omegaconf import DictConfig

IDENTITY_FILE = "identity.json"
_MOST_DIFFERENCES = 4
"""A run that differs in more settings is another run and not worth a word."""


def _below(parent: str, keys: str) -> tuple[str, ...]:
    return tuple(f"{parent}.{key}" for key in keys.split())


COMPUTED = (
    *("seed", "algorithm", "offline", "model.path", "model.family", "data.family", "rollout.sampling"),
    *("reward", "callbacks.engine", "callbacks.reward", "callbacks.offline", "callbacks.permuted_rewards"),
    *_below("data", "_target_ model_path train_files val_files media_root artifact_dir mixture_weights order shuffle"),
    *_below("data", "seed max_train_samples max_val_samples rollout_batch_size max_prompt_tokens filter_overlong"),
    *_below("data", "fps max_frames min_frames video_max_pixels video_min_pixels video_total_pixels image_max_pixels"),
    *_below("data", "image_min_pixels decoder conceal_damage cache_codec prompt_templates prompt_overrides"),
    *_below("data", "system_prompt"),
    *_below("module", "_target_ model_path family algorithm optimizer temperature update_batch_size epochs dtype"),
    *_below("module", "frozen_parts entropy_bonus importance target_format label_noise seed"),
)
"""Keys, with everything below them, that decide which numbers a run computes."""

OPERATIONAL = (
    *("name", "output_dir", "run_name", "run_dir", "config_dir", "assets_dir", "assets", "stages"),
    *("max_steps", "resume", "preflight", "trainer", "strategy", "logger", "model.size", "rollout.engine"),
    *("callbacks.stop", "callbacks.metrics", "callbacks.checkpoint", "callbacks.rollout_table", "callbacks.evaluation"),
    *("callbacks.engine.engine", "callbacks.engine.check_weights", "callbacks.reward.timeout"),
    *_below("reward", "workers threads memory_mb"),
    *_below("reward.judge", "attempts cache_dir backend.api_key_env backend.base_url backend.timeout_s"),
    *_below("data", "cache_dir source_mode cache_max_gb stage_dir decode_timeout_s val_batch_size num_workers"),
    *_below("data", "prefetch worker_start_method strict"),
    *_below("module", "layout micro_batch_tokens mismatch_gate reference_offload gradient_checkpointing"),
    *_below("module", "logprob_chunk dump_dir export_to entropy skip_zero_advantage patch_cache_mb max_bad_updates"),
)
"""Keys, with everything below them, that decide how, where and how long it is computed."""


def is_computed(key: str) -> bool | None:
    """Whether a key is part of the identity; the longest rule that fits decides. None = no rule names it."""
    while key:
        if key in COMPUTED or key in OPERATIONAL:
            return key in COMPUTED
        key = key.rpartition(".")[0]
    return None


def run_identity(config: DictConfig) -> dict[str, Any]:
    """Dotted key -> value of everything computed.

    A reference stays a reference: `${max_steps}` in a schedule does not make a longer run another one. A key that no
    rule names, for example of a user's own callback, counts as computed: two different runs must not share a folder.
    """
    return {key: value for key, value in _leaves(config, "") if is_computed(key) is not False}


def _leaves(config: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    from omegaconf import OmegaConf

    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    for name, value in raw.items():
        key = f"{prefix}{name!s}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(config[name], f"{key}.")
        elif isinstance(value, str) and value.startswith("${") and value.find("}") == len(value) - 1:
            yield key, value
        elif OmegaConf.is_missing(config, name):
            yield key, "???"
        elif value is not None or prefix != "callbacks.":  # a null callback is none
            found = config[name]
            yield key, OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def identity_hash(identity: Mapping[str, Any]) -> str:
    """Eight hex digits, equal for equal identities."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]


def default_run_dir(config: DictConfig) -> Path:
    """`<output_dir>/<name>/<run_name>`; without a run name, the seed and a hash of the identity."""
    name = config.run_name or f"seed{config.seed}-{identity_hash(run_identity(config))}"
    return Path(config.output_dir) / config.name / name


def write_identity(config: DictConfig, run_dir: Path) -> None:
    """Leave the identity in the run folder, for `similar_run`."""
    write_json(run_dir / IDENTITY_FILE, run_identity(config), sort_keys=True, default=str)


def similar_run(config: DictConfig, run_dir: Path) -> str:
    """The run beside `run_dir` whose identity differs least, with the keys and both values; "" when none is close."""
    mine = json.loads(json.dumps(run_identity(config), default=str))
    found = []
    for path in sorted(run_dir.parent.glob(f"*/{IDENTITY_FILE}")):
        if path.parent.is_symlink() or path.parent == run_dir:
            continue
        other = json.loads(path.read_text())
        keys = sorted(key for key in mine | other if mine.get(key) != other.get(key))
        if 0 < len(keys) <= _MOST_DIFFERENCES:
            listed = ", ".join(f"{key}={mine.get(key)} (there {other.get(key)})" for key in keys)
            found.append((len(keys), f"{path.parent} differs only in {listed}"))
    return min(found)[1] if found else ""
