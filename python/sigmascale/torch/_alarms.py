"""Alarms of a run while it goes on: the native half's, fed with the lines of the record."""

import json

from .. import _native
from .._diagnose import thresholds
from ._record import finite


class Alarms:
    """What ``sigmascale diagnose`` would say of the lines so far. ``run`` is the first line, ``options`` a dict of thresholds, or None."""

    def __init__(self, run, options):
        self._native, self._up = _native.Alarms(json.dumps(finite(run)), thresholds(options or {})), {}

    def add(self, rows):
        """Takes in lines; returns the event lines of what they raise or clear."""
        found = self._native.observe("\n".join(json.dumps(finite(row)) for row in rows))
        events = [json.loads(event) for event in found]
        for event in events:
            place = event.get("alarm"), event.get("layer"), event.get("head")
            if event["name"] == "clear":
                self._up.pop(place, None)
            else:
                self._up[place] = event
        return events

    def state(self):
        """Alarms that are up, the first one, and what to do."""
        return json.loads(self._native.state())

    def up(self):
        """Events of alarms that were raised and not cleared."""
        return list(self._up.values())
