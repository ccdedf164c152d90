"""Events of one kind, stored in one array per field. A long run has hundreds of thousands of them.

The arrays take a fraction of the memory of one object per event.
"""

from __future__ import annotations

import json
import lzma
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar, overload

from sarathi_pp.errors import InputError

E = TypeVar("E")

# Type codes of `array` for the types of fields.
_CODES = {"int": "q", "float": "d"}
# Number of texts that are compressed together. The printed microbatches of a run are nearly the same, so a block takes
# little memory.
_TEXTS = 512


class _Column(Protocol):
    """One field of all events of a Log."""

    def append(self, value: Any) -> None: ...
    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...


class Log(Sequence[E]):
    """A sequence of events that grows at its end. Each access makes a new event object, and a slice is a view.

    Args:
        kind: class of the events: a dataclass whose fields are integers, floats and texts.
        events: the first events.
    """

    def __init__(self, kind: type[E], events: Iterable[E] = ()) -> None:
        self._kind = kind
        self._names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        self._columns = [_column(str(field.type)) for field in fields(kind)]  # type: ignore[arg-type]
        self._length = 0
        for event in events:
            self.append(event)

    def append(self, event: E) -> None:
        """Append an event. Raises InputError for an integer of more than 64 bits."""
        for name, column in zip(self._names, self._columns, strict=True):
            try:
                column.append(getattr(event, name))
            except OverflowError:
                raise InputError(
                    f"the traces are damaged: {name} of an event {self._kind.__name__} does not fit into 64 bits"
                ) from None
        self._length += 1

    def column(self, name: str) -> _Column:
        """Return the values of one field of all events, without making the event objects."""
        return self._columns[self._names.index(name)]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[E]: ...
    def __getitem__(self, index: int | slice) -> E | Sequence[E]:
        if isinstance(index, slice):
            return _Part(self, range(self._length)[index])
        at = range(self._length)[index]
        return self._kind(*(column[at] for column in self._columns))

    def __iter__(self) -> Iterator[E]:
        return map(self._kind, *self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class _Part(Sequence[E]):
    """A slice of a Log. It is a view: the events stay in the Log."""

    def __init__(self, log: Log[E], indices: range) -> None:
        self._log = log
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> E: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[E]: ...
    def __getitem__(self, index: int | slice) -> E | Sequence[E]:
        if isinstance(index, slice):
            return _Part(self._log, self._indices[index])
        return self._log[self._indices[index]]


class _Texts(Sequence[str]):
    """A column of texts in compressed blocks. The block that was read last stays in memory."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._last: list[str] = []
        self._read: tuple[int, list[str]] = (-1, [])

    def append(self, text: str) -> None:
        self._last.append(text)
        if len(self._last) == _TEXTS:
            self._blocks.append(lzma.compress(json.dumps(self._last).encode(), preset=0))
            self._last = []

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        block, place = divmod(range(len(self))[index], _TEXTS)
        if block == len(self._blocks):
            return self._last[place]
        if self._read[0] != block:
            self._read = block, json.loads(lzma.decompress(self._blocks[block]))
        return self._read[1][place]

    def __len__(self) -> int:
        return len(self._blocks) * _TEXTS + len(self._last)


def _column(kind: str) -> _Column:
    return array(_CODES[kind]) if kind in _CODES else _Texts()
