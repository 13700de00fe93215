"""The file of a run: JSON Lines, as the crate's ``history`` reads them."""

import json
import math
import os

from .._errors import ArgumentError

FORMAT = 1


class Record:
    """Appends lines to a file. ``path`` None: to none. ``first`` is the first line; a file that goes on (``resume``)
    must have one of the same layers, and a last line that was cut short is taken off."""

    def __init__(self, path, first, resume):
        self.path, self._file = path, None
        if path is None:
            return
        if not resume:
            try:
                self._file = open(path, "x", encoding="utf-8")
            except FileExistsError:
                raise ArgumentError(f"{path} exists: pass resume=True to append to it, or another path") from None
            self.write(first)
            return
        if not os.path.exists(path) or os.path.getsize(path) == 0:
            self._file = open(path, "a", encoding="utf-8")
            self.write(first)
            return
        self._file = _opened(path, first)

    def write(self, row):
        """Appends one object. Numbers that JSON cannot hold become null."""
        if self._file is not None:
            self._file.write(json.dumps(finite(row), separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()

    def close(self):
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _opened(path, first):
    """A file of the same layers, after its last whole line."""
    file = open(path, "r+b")
    try:
        try:
            before = json.loads(file.readline())
        except ValueError:
            before = {}
        if not isinstance(before, dict) or before.get("kind") != "run":
            raise ArgumentError(f"{path} does not begin with the first line of a run's record: pass another path")
        for key in ("format", "layers"):
            if before.get(key) != first[key]:
                raise ArgumentError(f"{path} is the record of a run with other {key}: pass another path")
        end = file.seek(0, os.SEEK_END)
        # From the end, in blocks: the file may be long.
        place, cut = end, None
        while cut is None and place > 0:
            start = max(0, place - 65536)
            file.seek(start)
            found = file.read(place - start).rfind(b"\n")
            cut, place = (start + found + 1 if found >= 0 else None), start
        file.truncate(cut)
    finally:
        file.close()
    return open(path, "a", encoding="utf-8")


def finite(value):
    """The same with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
