"""From a sample to the user's message: one Jinja template per problem type, media at their places.

A template sees `problem`, `options`, `problem_type`, `data_type`, `data_source` and `extra`. It is chosen by the
problem type; `default.jinja` serves all types that have none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

if TYPE_CHECKING:
    from jinja2 import Template

    from datamodules.types import Sample

BUILT_IN = Path(__file__).parent / "templates"
MEDIA_TAG = re.compile(r"<(image|video)>")


class PromptTemplates:
    """Renders the text of a prompt.

    Args:
        source: name of a built-in set (`default`, `tiny`), a folder of `<problem type>.jinja` files, or one file
            that serves every type.
        overrides: problem type -> file, on top of `source`.
        system: system message, or None for the chat template's own default.
        type_name: the one name of a problem type, as samples carry it (see `load_samples`): a template of an alias
            serves its type.

    Raises:
        ValueError: the source does not exist or holds no template, or two different templates serve one type.
    """

    def __init__(
        self,
        source: str | Path = "default",
        overrides: Mapping[str, str] | None = None,
        system: str | None = None,
        type_name: Callable[[str], str] | None = None,
    ) -> None:
        self.system = system
        own = {slug(name): Path(path) for name, path in (overrides or {}).items()}
        self._texts = _texts(_files(source), type_name) | _texts(own, type_name)
        self._compiled: dict[str, Template] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": {}}

    def names(self) -> tuple[str, ...]:
        """Problem types (as file names) that have their own template."""
        return tuple(sorted(self._texts))

    def sources(self) -> dict[str, str | None]:
        """All texts that decide what is rendered; for keys of remembered results."""
        return {**self._texts, "system": self.system}

    def render(self, sample: Sample) -> str:
        """The user's text with `<image>` and `<video>` tags where the record has them.

        Raises:
            ValueError: no template fits, or the template uses an unknown variable.
        """
        name = slug(sample.problem_type)
        name = name if name in self._texts else "default"
        if name not in self._texts:
            raise ValueError(f"no prompt template for problem type {sample.problem_type!r} and no default.jinja")
        try:
            if name not in self._compiled:
                environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
                self._compiled[name] = environment.from_string(self._texts[name])
            return (
                self._compiled[name]
                .render(
                    problem=sample.problem,
                    options=list(sample.options),
                    problem_type=sample.problem_type,
                    data_type=sample.data_type,
                    data_source=sample.data_source,
                    extra=dict(sample.extra),
                )
                .strip()
            )
        except TemplateError as error:
            raise ValueError(f"prompt template {name}.jinja on sample {sample.uid}: {error}") from error

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """Chat messages with media parts; media without a tag come first, images before videos."""
        content = place_media(self.render(sample), len(sample.images), len(sample.videos))
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": content}]


def slug(problem_type: str) -> str:
    """File name of a problem type: "temporal grounding" -> "temporal_grounding"."""
    return re.sub(r"[^a-z0-9]+", "_", problem_type.strip().lower()).strip("_")


def place_media(text: str, num_images: int, num_videos: int) -> list[dict[str, str]]:
    """Split a text at its `<image>`/`<video>` tags into content parts.

    Raises:
        ValueError: there are tags of a kind, but not as many as media of that kind.
    """
    wanted = {"image": num_images, "video": num_videos}
    found = {kind: len(re.findall(f"<{kind}>", text)) for kind in wanted}
    for kind, count in wanted.items():
        if found[kind] and found[kind] != count:
            raise ValueError(f"the text holds {found[kind]} <{kind}> tags, the sample {count} {kind}s")
    parts = [{"type": kind} for kind, count in wanted.items() if not found[kind] for _ in range(count)]
    position = 0
    for match in MEDIA_TAG.finditer(text):
        _add_text(parts, text[position : match.start()])
        parts.append({"type": match.group(1)})
        position = match.end()
    _add_text(parts, text[position:])
    return parts


def _add_text(parts: list[dict[str, str]], text: str) -> None:
    if text.strip():
        parts.append({"type": "text", "text": text.strip()})


def _files(source: str | Path) -> dict[str, Path]:
    path = BUILT_IN / source if (BUILT_IN / source).is_dir() else Path(source)
    if path.is_file():
        return {"default": path}
    if not path.is_dir():
        sets = ", ".join(sorted(p.name for p in BUILT_IN.iterdir() if p.is_dir()))
        raise ValueError(f"prompt templates {source!r}: neither a built-in set ({sets}) nor a file or folder")
    files = {p.stem: p for p in sorted(path.glob("*.jinja"))}
    if not files:
        raise ValueError(f"prompt templates: no .jinja file in {path}")
    return files


def _texts(files: Mapping[str, Path], type_name: Callable[[str], str] | None) -> dict[str, str]:
    """Templates by the file names of the problem types that they serve."""
    texts: dict[str, str] = {}
    for name, path in files.items():
        if not path.is_file():
            raise ValueError(f"prompt template {path} does not exist")
        text, served = path.read_text(encoding="utf-8"), name
        if type_name is not None:
            with contextlib.suppress(ValueError):  # default.jinja is not named after a problem type
                served = slug(type_name(name))
        if texts.setdefault(served, text) != text:
            raise ValueError(f"prompt template {path}: another template serves {served!r} too, and differs; keep one")
    return texts
