"""From what the user wrote as the model to a folder on this disk."""

from __future__ import annotations

from pathlib import Path

_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
"""Weights, configuration, tokenizer, chat template; no pickled weights, no code."""


def model_folder(model_path: str | Path) -> Path:
    """The folder of `model_path`: itself, or the local copy of a hub name such as `Qwen/Qwen3-VL-8B-Instruct`.

    A hub model that is not in the Hugging Face cache yet is downloaded, unless HF_HUB_OFFLINE is set.

    Raises:
        ValueError: no such folder, or the hub name cannot be had.
    """
    folder = Path(model_path)
    if (folder / "config.json").is_file():
        return folder
    name = str(model_path)
    if folder.exists() or folder.is_absolute() or name.count("/") != 1:
        raise ValueError(
            f"model_path={name} holds no config.json; give the folder of a Hugging Face model, or a hub name"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (OSError, ValueError) as error:  # not found, no network, offline: the hub's errors are OSErrors
        raise ValueError(
            f"model_path={name} is no folder here and the hub does not give it ({error}); download it first, or give "
            "the path of its folder"
        ) from error
