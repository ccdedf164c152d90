"""Ids of input lines: any JSON value, each represented by a key of 8 bytes.

A run keeps the ids of all lines to find duplicates. A line takes about 13 bytes of memory, and none if its id is its
line number. So input files of any length fit.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from hashlib import blake2b

# The error code of an input line whose id an earlier input line has already.
DUPLICATE_ID = "duplicate_id"

_KEY_BITS = 64
# Mean number of keys per bucket at which all buckets are split in two. Small buckets make insertions cheap: one moves
# at most a few KiB.
_BUCKET_KEYS = 256
_LARGEST_NUMBER = 2**32 - 1


def id_key(id: object) -> int:
    """Return a 64-bit key for an id: a hash, so that the memory for an id does not depend on its length.

    Ids are equal by type and value: 1, 1.0, "1" and true are four different ids.
    """
    text = json.dumps(id, sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class KeyMap:
    """A map from 64-bit keys to positive 32-bit numbers, in a ninth of the memory of a dict.

    The keys must be hashes, so that they are spread evenly. Keys with the same leading bits form a bucket, which is a
    sorted array. A number above the 32-bit limit is stored as the limit.
    """

    def __init__(self) -> None:
        self._bits = 0
        self._keys = [array("Q")]
        self._numbers = [array("I")]
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def get(self, key: int) -> int:
        """Return the number of a key, or 0 if it has none."""
        bucket = key >> (_KEY_BITS - self._bits)
        keys = self._keys[bucket]
        place = bisect_left(keys, key)
        return self._numbers[bucket][place] if place < len(keys) and keys[place] == key else 0

    def put(self, key: int, number: int) -> None:
        """Set the number of a key. 0 removes the key."""
        bucket = key >> (_KEY_BITS - self._bits)
        keys, numbers = self._keys[bucket], self._numbers[bucket]
        place = bisect_left(keys, key)
        known = place < len(keys) and keys[place] == key
        if not number:
            if known:
                del keys[place], numbers[place]
                self._length -= 1
        elif known:
            numbers[place] = min(number, _LARGEST_NUMBER)
        else:
            keys.insert(place, key)
            numbers.insert(place, min(number, _LARGEST_NUMBER))
            self._length += 1
            if self._length > _BUCKET_KEYS << self._bits:
                self._split()

    def _split(self) -> None:
        """Split each bucket into two, by the next bit of its keys."""
        keys: list[array[int]] = []
        numbers: list[array[int]] = []
        upper_half = 1 << (_KEY_BITS - self._bits - 1)
        for bucket, (its_keys, its_numbers) in enumerate(zip(self._keys, self._numbers, strict=True)):
            middle = bisect_left(its_keys, (bucket << (_KEY_BITS - self._bits)) + upper_half)
            keys += (its_keys[:middle], its_keys[middle:])
            numbers += (its_numbers[:middle], its_numbers[middle:])
        self._bits += 1
        self._keys, self._numbers = keys, numbers


class SeenIds:
    """The ids of the input lines so far. An input line without an id has its line number as its id, as a string."""

    def __init__(self) -> None:
        self._lines = KeyMap()  # from the key of an id that is not its line's number to that number
        self._numbered = _LineSet()  # lines whose id is their number

    def first_line(self, id: object, line: int) -> int | None:
        """Return the number of the earlier line with this id. If no line had it, store it and return None.

        Args:
            id: id of the current line.
            line: number of the current line, from 1. Numbers must ascend from call to call.
        """
        own = str(line)
        if id == own and not len(self._lines):
            self._numbered.add(line)
            return None
        if isinstance(id, str) and len(id) <= len(own) and id.isdecimal() and id == str(int(id)):
            if int(id) in self._numbered:
                return int(id)
        key = id_key(id)
        if earlier := self._lines.get(key):
            return earlier
        if id == own:
            self._numbered.add(line)
        else:
            self._lines.put(key, line)
        return None


class _LineSet:
    """A set of line numbers, which must be added in ascending order.

    Consecutive numbers form a range. A range takes 16 bytes of memory.
    """

    def __init__(self) -> None:
        self._first = array("Q")
        self._last = array("Q")

    def add(self, line: int) -> None:
        if self._last and self._last[-1] == line - 1:
            self._last[-1] = line
        else:
            self._first.append(line)
            self._last.append(line)

    def __contains__(self, line: int) -> bool:
        place = bisect_left(self._last, line)
        return place < len(self._last) and self._first[place] <= line
