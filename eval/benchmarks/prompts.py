"""Prompt styles: `official` (the benchmark's own words), `cot` and `qwen3vl`; letters come from the actual options.

A template is Jinja and sees the names that `variables` lists. `cot` and `qwen3vl` are files in `templates`,
shared by all benchmarks; official ones stand in the benchmarks' YAML.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from eval.benchmarks.drafts import Draft, letter_list

STYLES = ("official", "cot", "qwen3vl")
_FOLDER = Path(__file__).parent / "templates"
_KINDS = {
    "regression": "number",
    "numerical": "number",
    "rec": "number",
    "ssr": "boolean",
    "crr": "boolean",
    "yes_no": "boolean",
    "temporal grounding": "time",
    "spatial-temporal grounding": "tube",
    "captioning": "caption",
}


def variables(draft: Draft, media: str | None = None, subtitles: str = "") -> dict[str, Any]:
    """Names that templates may use.

    `media` (tags of all media, one per line), `question`, `kind` (choice, number, boolean, time, tube, caption or open:
    what is asked for), `letters`, `texts`, `options` ("A. text" each), `choices` (pairs of letter and text),
    `letter_list` ("A, B, C, or D"), `subtitles`, `problem_type`, `meta`, `extra`.
    """
    tags = ["<video>"] * len(draft.videos) + ["<image>"] * len(draft.images)
    texts = [_plain(text) for text in draft.texts]
    return {
        "media": "\n".join(tags) if media is None else media,
        "question": _plain(draft.question),
        "kind": "choice" if draft.options else _KINDS.get(draft.problem_type.lower(), "open"),
        "letters": list(draft.letters),
        "texts": texts,
        "options": [_plain(option) for option in draft.options],
        "choices": list(zip(draft.letters, texts, strict=True)),
        "letter_list": letter_list(draft.letters),
        "subtitles": subtitles,
        "problem_type": draft.problem_type,
        "meta": dict(draft.meta),
        "extra": dict(draft.extra),
    }


def render(template: str, draft: Draft, media: str | None = None, subtitles: str = "") -> str:
    """The complete user text.

    Raises:
        ValueError: the template uses an unknown name or is broken; the message names the item.
    """
    try:
        return _compiled(template).render(**variables(draft, media, subtitles)).strip()
    except TemplateError as error:
        raise ValueError(f"prompt of {draft.uid}: {error}") from error


def shared_template(style: str) -> str:
    """Text of a style that all benchmarks share. Raises ValueError when there is none of that name."""
    path = _FOLDER / f"{style}.jinja"
    if not path.is_file():
        known = sorted({"official", *(p.stem for p in _FOLDER.glob("*.jinja"))})
        raise ValueError(f"prompt style {style!r}: use one of {', '.join(known)}")
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def _compiled(text: str) -> Template:
    return SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _plain(text: str) -> str:
    """Text of the data set with its own `<video>` and `<image>` made harmless: they would ask for media."""
    return re.sub(r"<(image|video)>", r"[\1]", text)
