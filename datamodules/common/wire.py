"""Values as text and arrays: the one form in which they go to another process or into a file.

Dataclasses are written field by field, as `dataclasses.fields` lists them, so a new field travels by itself. Nothing is
unpickled: only dataclasses of this project (and `LIBRARY`) are rebuilt, by their constructors. Tuples stay tuples,
dictionaries keep their keys, and arrays lie behind the text, aligned, where they can be used in place.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

PACKAGES = ("datamodules", "rollout", "rewards", "eval", "lightning_modules")
"""Dataclasses of these packages may be rebuilt."""
LIBRARY = ("transformers.video_utils:VideoMetadata",)
"""And these of libraries."""
ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")


class WireError(ValueError):
    """A value that cannot be written, or content that is not a value."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A value in two parts; `arrays` lie one behind the other, each at a multiple of `ALIGNMENT` bytes."""

    text: bytes
    """JSON: the value with places instead of arrays, and the table of places."""
    arrays: tuple[Any, ...] = ()
    """Contiguous numpy arrays."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays with what is between them."""
        return sum(_aligned(array.nbytes) for array in self.arrays[:-1]) + sum(a.nbytes for a in self.arrays[-1:])

    def chunks(self) -> Iterator[Any]:
        """The bytes of the arrays with what is between them."""
        gap = 0
        for array in self.arrays:
            yield bytes(gap)
            yield array.reshape(-1).view("uint8").data
            gap = _aligned(array.nbytes) - array.nbytes


def pack(value: Any, other: Callable[[Any], Any] | None = None, by_path: bool = True) -> Packed:
    """Write a value.

    Args:
        value: numbers, text, bytes, paths, arrays, dataclasses, and lists, tuples, sets and mappings of these.
        other: called with anything else, returns what is written in its place.
        by_path: memory-mapped frames travel as the path of their file; False = their content is written.

    Raises:
        WireError: something in it can be none of these.
    """
    writer = _Writer(other, by_path)
    try:
        text = json.dumps([writer.pack(value), writer.table]).encode()
    except WireError:
        raise
    except (ValueError, RecursionError) as error:  # a circle, nesting without end, a number of 5,000 digits
        raise WireError(f"the value cannot be sent: {error}") from error
    return Packed(text, tuple(writer.arrays))


def unpack(text: bytes, memory: Any = None, only: Collection[type] | None = None) -> Any:
    """Read what `pack` wrote; arrays are views of `memory` (writable when it is).

    Args:
        text: `Packed.text`.
        memory: buffer that holds the arrays; None = there are none.
        only: the dataclasses that are expected; None = all that may be rebuilt.

    Raises:
        WireError: the content is not a value, or one of a class that may not be rebuilt.
    """
    try:
        tree, table = json.loads(text)
        return _Reader(table, memory, only).unpack(tree)
    except Exception as error:  # the content may be anything, and constructors check their arguments
        raise WireError(f"unreadable content: {type(error).__name__}: {error}"[:500]) from error


def to_bytes(value: Any, other: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    """A value as the parts of a file, memory-mapped frames included; see `pack`."""
    packed = pack(value, other, by_path=False)
    head = _LENGTH.pack(len(packed.text)) + packed.text
    yield head + bytes(_aligned(len(head)) - len(head))
    yield from packed.chunks()


def from_bytes(content: bytes | bytearray) -> Any:
    """Inverse of `to_bytes`; the arrays are writable when `content` is."""
    if len(content) < _LENGTH.size:
        raise WireError("unreadable content: it is truncated")
    end = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    return unpack(bytes(content[_LENGTH.size : end]), memoryview(content)[_aligned(end) :])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class _Writer:
    """Turns a value into JSON; whatever JSON does not have becomes a mapping with one key that says what it is."""

    def __init__(self, other: Callable[[Any], Any] | None, by_path: bool) -> None:
        self._other, self._by_path = other, by_path
        self.arrays: list[np.ndarray] = []
        self.table: list[tuple[str, tuple[int, ...], int]] = []
        """Data type, shape and offset of every array."""
        self._places: dict[int, tuple[int, Any]] = {}
        """Place of every array by its id; the array is kept because an id is unique only among living objects."""
        self._end = 0

    def pack(self, value: Any) -> Any:
        if value is None or (isinstance(value, str | int | float) and not hasattr(value, "dtype")):
            return value
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: self.pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"class": [_name(type(value)), fields]}
        if isinstance(value, tuple | set | frozenset):
            kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
            return {kind.__name__: [self.pack(item) for item in value]}
        if isinstance(value, Mapping):
            return {"dict": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        if isinstance(value, Path):
            return {"path": str(value)}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
        if hasattr(value, "dtype"):
            return self._pack_array(value)
        if self._other is None:
            raise WireError(f"a value of type {type(value).__name__} cannot be sent")
        return self.pack(self._other(value))

    def _pack_array(self, value: Any) -> Any:
        numpy = sys.modules["numpy"]
        if not isinstance(value, numpy.ndarray | numpy.generic) or value.dtype.hasobject or value.dtype.names:
            if self._other is None:
                raise WireError(f"a value of type {type(value).__name__} ({value.dtype}) cannot be sent")
            return self.pack(self._other(value))
        source = getattr(value, "source", None)
        if source is not None and self._by_path:
            return {"mapped": [*source, list(value.shape)]}
        if id(value) not in self._places:
            array = numpy.ascontiguousarray(value).view(numpy.ndarray)
            self._places[id(value)] = len(self.arrays), value
            self.arrays.append(array)
            self.table.append((array.dtype.str, value.shape, self._end))
            self._end += _aligned(array.nbytes)
        return {"scalar" if isinstance(value, numpy.generic) else "array": self._places[id(value)][0]}


class _Reader:
    """Undoes `_Writer`."""

    def __init__(self, table: list[list[Any]], memory: Any, only: Collection[type] | None) -> None:
        self._table, self._memory = table, memory
        self._only = None if only is None else {_name(kind) for kind in only}

    def unpack(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.unpack(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((tag, content),) = tree.items()
        if tag in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](self.unpack(item) for item in content)
        if tag == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in content}
        if tag == "path":
            return Path(content)
        if tag == "bytes":
            return bytes.fromhex(content)
        if tag == "class":
            return self._rebuild(*content)
        if tag == "mapped" and self._only is None:
            from datamodules.common.frames import map_file

            return map_file(*content)
        if tag in ("array", "scalar"):
            array = self._array(*self._table[content])
            return array if tag == "array" else array[()]
        raise WireError(f"unknown tag {tag!r}")

    def _array(self, dtype: str, shape: list[int], offset: int) -> np.ndarray:
        import numpy as np

        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.empty(shape, np.dtype(dtype))
        return np.frombuffer(self._memory, np.dtype(dtype), count, offset).reshape(shape)

    def _rebuild(self, name: str, fields: dict[str, Any]) -> Any:
        module, _, path = name.partition(":")
        allowed = module.split(".")[0] in PACKAGES or name in LIBRARY if self._only is None else name in self._only
        if not allowed:
            raise WireError(f"{name} may not be rebuilt here")
        kind: Any = importlib.import_module(module)
        for part in path.split("."):
            kind = getattr(kind, part)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise WireError(f"{name} is not a dataclass")
        values = {key: self.unpack(item) for key, item in fields.items()}
        late = {field.name for field in dataclasses.fields(kind) if not field.init}
        made = kind(**{key: value for key, value in values.items() if key not in late})
        for key in late & values.keys():
            object.__setattr__(made, key, values[key])
        return made
