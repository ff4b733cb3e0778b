"""The weights of a saved Hugging Face model: which entry lies in which file."""

from __future__ import annotations

import json
from pathlib import Path


def checkpoint_entries(model_path: str | Path) -> dict[str, Path]:
    """Checkpoint name -> safetensors file of the model saved at `model_path`.

    Raises:
        FileNotFoundError: the folder holds no safetensors weights.
    """
    from safetensors import safe_open

    folder = Path(model_path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    entries = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            entries.update(dict.fromkeys(file.keys(), path))
    if not entries:
        raise FileNotFoundError(f"{folder} holds no *.safetensors; save the model with save_pretrained")
    return entries
