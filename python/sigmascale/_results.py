"""Results: dicts of the command line's JSON whose repr is one line, and which a notebook shows as the command's page."""

import html
import json


def _count(number, what):
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class Profile(dict):
    """What :func:`calibrate` gives."""

    def __repr__(self):
        model, layers = self["model"], self.get("layers")
        what = f"c_star {self['c_star']['c_star']:.4g}" if self.get("c_star") else "no c_star"
        bound = f", logit bound at most {max(layer['logit_bound'] for layer in layers):.4g}" if layers else ""
        return f"<sigmascale calibration of {model['name']}: {_count(model['layers'], 'layer')}, {what}{bound}>"


class _Paged(dict):
    """A result with a page."""

    _page = None

    @classmethod
    def _of(cls, result):
        """Of the JSON and the page that the native half gives."""
        text, page = result
        made = cls(json.loads(text))
        made._page = page
        return made

    def to_html(self):
        """The page that the command writes with ``--html``: one document, no scripts, nothing loaded from elsewhere."""
        if self._page is None:
            raise ValueError(f"{self!r} has no page: it is a copy, call to_html() of the result itself")
        return self._page

    def _repr_html_(self):
        if self._page is None:
            return None
        # A frame of its own keeps the page's style out of the notebook.
        return f'<iframe srcdoc="{html.escape(self._page)}" style="width:100%;height:640px;border:0"></iframe>'


class Inspection(_Paged):
    """What :func:`inspect` gives."""

    def __repr__(self):
        return f"<sigmascale inspection of {self['model']['name']}: {_count(len(self['layers']), 'layer')}>"


class StressRun(_Paged):
    """What :func:`stress` gives."""

    def __repr__(self):
        over = [f"{row['policy']} in {row['overflow_layers']}" for row in self["policies"] if row["overflow_layers"]]
        size = f"{_count(self['model_layers'], 'layer')}, {_count(self['steps'], 'step')}"
        found = f"layers overflowed: {', '.join(over)}" if over else "no overflow"
        return f"<sigmascale stress {self['scenario']} of {self['model']}: {size}; {found}>"


class Export(dict):
    """What :func:`export` gives."""

    def __repr__(self):
        safe = "safe" if self["safe"] else "NOT certified"
        return f"<sigmascale export of {self['model']} for {self['engine']}: {_count(len(self['layers']), 'layer')}, {safe}>"


class Audit(_Paged):
    """What :func:`verify` gives."""

    def __repr__(self):
        entries = [entry for layer in self["layers"] for operand in "qkv" for entry in layer[operand]]
        bad = sum(entry["verdict"] != "safe" for entry in entries)
        found = f"{bad} of {len(entries)} scales not safe" if bad else "safe"
        return f"<sigmascale audit of {self['model']} for {self['engine']}: {found}>"
