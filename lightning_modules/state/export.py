"""Write a trained policy as an ordinary Hugging Face folder that loads with `from_pretrained`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lightning_modules.families.policy import PolicyModel

SHARD_BYTES = 4 * 1024**3
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "tiny_recipe.json")


def export_policy(policy: PolicyModel, source: str | Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Stream the policy's weights into `target` beside the source model's config, tokenizer and processor.

    A collective: every rank calls it, rank 0 writes. The folder appears under its name only when complete.

    Args:
        policy: whole or sharded policy.
        source: the Hugging Face folder the policy was loaded from.
        target: replaced if it exists.
        dtype: of the written weights; None = as trained.
    """
    from safetensors.torch import save_file

    from datamodules.common.distributed import barrier, rank

    writes = rank() == 0
    temporary = target.with_name(f".{target.name}.tmp")
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(*WEIGHT_FILES))
    names: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        if shard and writes:
            file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
            save_file(shard, temporary / file, metadata={"format": "pt"})
            names.update(dict.fromkeys(shard, file))
        shard.clear()
        size = 0

    for name, tensor in policy.checkpoint_weights():
        if not writes:
            continue  # sharded tensors are gathered by every rank, kept by rank 0 only
        kept = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        # A view of a parameter would change while later tensors are gathered.
        shard[name] = kept.clone() if kept.data_ptr() == tensor.data_ptr() else kept
        size += kept.nbytes
        total += kept.nbytes
        if size >= SHARD_BYTES:
            flush()
    flush()
    if writes:
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(target)
    barrier()
    return target
