"""What crosses a process or goes into a file arrives as it was: every dataclass of the project, every field of it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from datamodules.common.frames import SharedFrames, map_file
from datamodules.common.wire import PACKAGES, WireError, from_bytes, pack, to_bytes, unpack
from datamodules.types import MediaRef, Sample


def over_the_wire(value: Any) -> Any:
    packed = pack(value)
    return unpack(packed.text, b"".join(map(bytes, packed.chunks())))


def through_a_file(value: Any) -> Any:
    return from_bytes(bytearray(b"".join(map(bytes, to_bytes(value)))))


def dataclass_names() -> list[str]:
    """Every public dataclass in the five packages, as module:name."""
    names = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            names += [
                f"{module}:{node.name}"
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.ClassDef) and "dataclass" in " ".join(map(ast.unparse, node.decorator_list))
            ]
    return names


class CannotTravel(Exception):
    """A field holds a function, a lock, a process, ...: the class stays in its process."""


def load(name: str) -> type:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)


KNOWN = {name.split(":")[1]: name for name in dataclass_names()}
OBJECTS = {
    "Any": {"a": [1, (2.5, None)], 7: b"\0x", "path": Path("x/y")},
    "object": ("any", 1),
    "str": "a \ud800 text",
    "int": 7,
    "float": 0.25,
    "bool": True,
    "bytes": b"\xff\0",
    "Path": Path("some/where"),
    "None": None,
    "np.ndarray": np.arange(6, dtype=np.int16).reshape(2, 3),
    "DataType": "video",
    "State": "failed",
    "Status": "timeout",
    "FinishReason": "length",
    "SourceMode": "decode",
}
VALID = {
    "banned_ids": (3, 4), "stop_ids": (5,), "min_frames": 3, "max_frames": 9, "max_pixels": 5_000_000,
    "worker_start_method": "spawn", "decoder": "decord", "cache_codec": "jpeg", "top_p": 0.25, "start_method": "spawn",
}  # fmt: skip
"""Values of fields that are checked by their class; the field is set, so it is no default."""


def made(annotation: str, field: str = "") -> Any:
    """A value of an annotated field that is not its default."""
    if field in VALID:
        return VALID[field]
    text = annotation.replace("'", "").replace('"', "").strip()
    if " | " in text:
        return made(next(part for part in text.split(" | ") if part != "None"))
    if text in KNOWN:
        return filled(load(KNOWN[text]))
    if text in OBJECTS:
        return OBJECTS[text]
    if text == "VideoMetadata":
        from transformers.video_utils import VideoMetadata

        return VideoMetadata(
            **{f.name: [1, 2] if f.name == "frames_indices" else 3.0 for f in dataclasses.fields(VideoMetadata)}
        )
    outer, _, inner = text.partition("[")
    parts = [p.strip() for p in re.split(r",(?![^\[]*\])", inner[:-1])]
    match outer:
        case "list":
            return [made(parts[0])]
        case "tuple" | "Sequence" if parts[-1] in ("...", parts[0]) and len(parts) <= 2:
            return (made(parts[0]), made(parts[0]))
        case "tuple":
            return tuple(map(made, parts))
        case "Mapping" | "dict":
            return {made(parts[0]): made(parts[1])}
        case "Literal":
            return ast.literal_eval(parts[-1])
    raise CannotTravel(annotation)


def filled(kind: type) -> Any:
    """An instance without a default in any field that `__init__` takes."""
    return kind(**{f.name: made(str(f.type), f.name) for f in dataclasses.fields(kind) if f.init})


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


def travellers() -> dict[str, Any]:
    found = {}
    for name in dataclass_names():
        try:
            found[name] = filled(load(name))
        except (CannotTravel, TypeError, ValueError):
            continue
    return found


def test_every_field_of_every_dataclass_arrives():
    """Of all dataclasses that hold nothing but values; those named below are known to cross a process or a file."""
    found = travellers()
    lost = [name for name, value in found.items() if not same(over_the_wire(value), value)]
    lost += [name for name, value in found.items() if not same(through_a_file(value), value)]
    assert lost == []
    crossing = crossing_types()
    assert crossing <= found.keys(), crossing - found.keys()
    assert len(crossing) >= 15


def crossing_types() -> set[str]:
    """Dataclasses in the signatures of what workers do, of the dump and of the plan, and all that their fields hold."""
    from datamodules.preprocess import Storing
    from datamodules.video.service import build_decoder
    from eval.run.prepare import ItemPreparer
    from lightning_modules.launch.ranks import plan_to_json
    from lightning_modules.state.batch_dump import dump_batch
    from rewards.callback import RewardCallback
    from rewards.pool import Judging

    functions = [Storing._store, build_decoder, ItemPreparer.__call__, plan_to_json, dump_batch, Judging.judge]
    # A batch says `Any` where types of later stages lie: whoever fills it names them.
    functions += [value for value in vars(RewardCallback).values() if isinstance(value, types.FunctionType)]
    words = {word for f in functions for text in f.__annotations__.values() for word in re.findall(r"\w+", str(text))}
    names, open_names = set(), {KNOWN[word] for word in words if word in KNOWN}
    while open_names:
        name = open_names.pop()
        names.add(name)
        texts = [str(field.type) for field in dataclasses.fields(load(name))]
        open_names |= {KNOWN[w] for text in texts for w in re.findall(r"\w+", text) if w in KNOWN} - names
    return {name for name in names if ":_" not in name}


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((0, 3), np.float32),
        np.array(2.5),
        np.float32(0.1),
        np.int64(3),
        np.array([True, False]),
        np.arange(24).reshape(4, 6)[::2, ::3],
        np.array(["2024-01-02"], dtype="datetime64[ns]"),
        float("inf"),
        2**200,
        (1, [2.0, (3,)], {4, 5}, frozenset("a")),
        {(1, 2): {None: "x"}, True: 1.0},
        {"class": ["os:system", {}], "array": 0},
        "\ud800 lone, \0 and \u2028",
        [np.arange(3)] * 2,
        b"",
    ],
    ids=str,
)
def test_values_arrive_with_their_types(value):
    assert same(over_the_wire(value), value)
    assert same(through_a_file(value), value)


def test_an_array_that_occurs_twice_is_written_once():
    frames = np.zeros((4, 3, 64, 64), np.uint8)
    assert pack([frames, {"again": frames}]).num_bytes == frames.nbytes


def test_mapped_frames_travel_as_their_path_and_are_part_of_a_file(tmp_path):
    (tmp_path / "frames").write_bytes(bytes(range(12)) * 4)
    frames = map_file(tmp_path / "frames", 12, (1, 3, 2, 2))
    assert pack(frames).num_bytes == 0
    arrived = over_the_wire(frames)
    assert isinstance(arrived, SharedFrames)
    assert arrived.source == frames.source
    content = bytearray(b"".join(map(bytes, to_bytes(frames))))
    (tmp_path / "frames").unlink()
    np.testing.assert_array_equal(from_bytes(content), frames)


class Odd:
    """No value."""

    def __str__(self) -> str:
        return "odd"


deep: list[Any] = []
for _ in range(100_000):
    deep = [deep]
circle: list[Any] = []
circle.append(circle)


@pytest.mark.parametrize(
    "value", [Odd(), [{"x": Odd()}], np.array([Odd()]), deep, circle, 10**5000, print], ids=range(7)
)
def test_what_is_no_value_is_refused_in_words(value):
    with pytest.raises(WireError, match="cannot be sent"):
        pack(value)


def test_other_things_become_what_the_caller_says():
    assert over_the_wire_as_text({"a": Odd(), "b": np.array([Odd()])}) == {"a": "odd", "b": "[odd]"}


def over_the_wire_as_text(value: Any) -> Any:
    return unpack(pack(value, other=lambda item: "[odd]" if isinstance(item, np.ndarray) else str(item)).text)


@pytest.mark.parametrize(
    "tree",
    [
        {"class": ["os:system", {}]},
        {"class": ["subprocess:Popen", {"args": ["true"]}]},
        {"class": ["datamodules.common.workers:WorkerPool", {}]},
        {"class": ["datamodules.common.workers:pickle.loads", {}]},
        {"class": ["datamodules.nowhere:Sample", {}]},
        {"class": ["datamodules.types:Sample", {"uid": "x"}]},
        {"class": ["rollout.types:SamplingSpec", {"n": 0}]},
        {"array": 3},
        {"array": 0},
        {"unknown": 1},
        {"a": 1, "b": 2},
        {"dict": [[[], 1]]},
    ],
    ids=str,
)
def test_nothing_but_values_is_rebuilt(tree):
    text = json.dumps([tree, [["|O", [2], 0]]]).encode()
    with pytest.raises(WireError, match="unreadable content"):
        unpack(text, bytes(64))
    for damaged in (b"", b"[1]", text[:-3], b"\xff"):
        with pytest.raises(WireError):
            unpack(damaged)


def test_a_reader_may_expect_certain_classes_only():
    text = pack(Sample("u", "?", "", "math", "text")).text
    assert unpack(text).uid == "u"
    with pytest.raises(WireError, match="may not be rebuilt"):
        unpack(text, only=(MediaRef,))
