"""Results: dicts of the command line's JSON whose repr is one line, and which a notebook shows as the command's page."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _types as types

if TYPE_CHECKING:
    from typing_extensions import Self


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class Profile(dict[str, Any]):
    """What :func:`calibrate` gives."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["model"]) -> types.Model: ...
        @overload
        def __getitem__(self, key: Literal["tail"]) -> types.CalibrationTail: ...
        @overload
        def __getitem__(self, key: Literal["c_star"]) -> types.CStar: ...
        @overload
        def __getitem__(self, key: Literal["chosen_c"]) -> types.ChosenC: ...
        @overload
        def __getitem__(self, key: Literal["method"]) -> types.Method: ...
        @overload
        def __getitem__(self, key: Literal["layers"]) -> list[types.LayerProfile]: ...
        def __getitem__(self, key: str) -> Any: ...

    def __repr__(self) -> str:
        model, layers = self["model"], self.get("layers")
        what = f"c_star {self['c_star']['c_star']:.4g}" if self.get("c_star") else "no c_star"
        bound = f", logit bound at most {max(layer['logit_bound'] for layer in layers):.4g}" if layers else ""
        return f"<sigmascale calibration of {model['name']}: {_count(model['layers'], 'layer')}, {what}{bound}>"


class _Paged(dict[str, Any]):
    """A result with a page."""

    _page: str | None = None

    @classmethod
    def _of(cls, result: tuple[str, str]) -> Self:
        """Of the JSON and the page that the native half gives."""
        text, page = result
        made = cls(json.loads(text))
        made._page = page
        return made

    def to_html(self) -> str:
        """The page that the command writes with ``--html``: one document, no scripts, nothing loaded from elsewhere."""
        if self._page is None:
            raise ValueError(f"{self!r} has no page: it is a copy, call to_html() of the result itself")
        return self._page

    def _repr_html_(self) -> str | None:
        if self._page is None:
            return None
        # A frame of its own keeps the page's style out of the notebook.
        return f'<iframe srcdoc="{html.escape(self._page)}" style="width:100%;height:640px;border:0"></iframe>'


class Inspection(_Paged):
    """What :func:`inspect` gives."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["model"]) -> types.Model: ...
        @overload
        def __getitem__(self, key: Literal["layers"]) -> list[types.LayerInspection]: ...
        def __getitem__(self, key: str) -> Any: ...

    def __repr__(self) -> str:
        return f"<sigmascale inspection of {self['model']['name']}: {_count(len(self['layers']), 'layer')}>"


class StressRun(_Paged):
    """What :func:`stress` gives."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(
            self, key: Literal["scenario"]
        ) -> Literal["checkpoint-load", "weight-spike", "refit", "replay", "resume", "lr-spike"]: ...
        @overload
        def __getitem__(self, key: Literal["estimator"]) -> Literal["gram", "power", "power-summed"]: ...
        @overload
        def __getitem__(self, key: Literal["training"]) -> dict[str, Any]: ...
        @overload
        def __getitem__(self, key: Literal["mode"]) -> Literal["logit", "operands"]: ...
        @overload
        def __getitem__(self, key: Literal["model"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["model_layers"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["model_layers_total"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["seed"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["steps"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["seq_len"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["tokens"]) -> types.Tokens | None: ...
        @overload
        def __getitem__(self, key: Literal["tail"]) -> types.UnionBound | None: ...
        @overload
        def __getitem__(self, key: Literal["auto_c_burn_in"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["parameters"]) -> list[types.Parameters]: ...
        @overload
        def __getitem__(self, key: Literal["notes"]) -> list[str]: ...
        @overload
        def __getitem__(self, key: Literal["policies"]) -> list[types.PolicySummary]: ...
        @overload
        def __getitem__(self, key: Literal["unavailable"]) -> list[types.Unavailable]: ...
        @overload
        def __getitem__(self, key: Literal["trace"]) -> list[types.TraceRow]: ...
        def __getitem__(self, key: str) -> Any: ...

    def __repr__(self) -> str:
        over = [f"{row['policy']} in {row['overflow_layers']}" for row in self["policies"] if row["overflow_layers"]]
        size = f"{_count(self['model_layers'], 'layer')}, {_count(self['steps'], 'step')}"
        found = f"layers overflowed: {', '.join(over)}" if over else "no overflow"
        return f"<sigmascale stress {self['scenario']} of {self['model']}: {size}; {found}>"


class Diagnosis(_Paged):
    """What :func:`diagnose` gives."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["name"]) -> str | None: ...
        @overload
        def __getitem__(self, key: Literal["source"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["verdict"]) -> Literal["calm", "alarm"]: ...
        @overload
        def __getitem__(self, key: Literal["first_step"]) -> int | None: ...
        @overload
        def __getitem__(self, key: Literal["last_step"]) -> int | None: ...
        @overload
        def __getitem__(self, key: Literal["first"]) -> types.Alarm | None: ...
        @overload
        def __getitem__(self, key: Literal["advice"]) -> list[types.Advice]: ...
        @overload
        def __getitem__(self, key: Literal["alarms"]) -> list[types.Alarm]: ...
        @overload
        def __getitem__(self, key: Literal["loss_shows"]) -> int | None: ...
        @overload
        def __getitem__(self, key: Literal["lead"]) -> int | None: ...
        @overload
        def __getitem__(self, key: Literal["options"]) -> types.Thresholds: ...
        @overload
        def __getitem__(self, key: Literal["heads"]) -> list[types.HeadReport]: ...
        def __getitem__(self, key: str) -> Any: ...

    def __repr__(self) -> str:
        first = self["first"]
        found = "calm"
        if first is not None:
            place = "the run" if first["head"] is None else f"layer {first['layer']}, head {first['head']}"
            found = f"{first['kind']} of {place} at step {first['raised']}"
        return f"<sigmascale diagnosis of {self['name'] or 'a run'}: {_count(len(self['heads']), 'head')}, {found}>"


class Export(dict[str, Any]):
    """What :func:`export` gives."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["folder"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["command"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["linked"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["copied"]) -> int: ...
        @overload
        def __getitem__(self, key: Literal["left_out"]) -> list[str]: ...
        @overload
        def __getitem__(self, key: Literal["sigmascale"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["engine"]) -> types.EngineName: ...
        @overload
        def __getitem__(self, key: Literal["model"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["family"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["granularity"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["scales_file"]) -> str | None: ...
        @overload
        def __getitem__(self, key: Literal["safe"]) -> bool: ...
        @overload
        def __getitem__(self, key: Literal["notes"]) -> list[str]: ...
        @overload
        def __getitem__(self, key: Literal["serving"]) -> types.Serving: ...
        @overload
        def __getitem__(self, key: Literal["unjudged"]) -> list[types.Unjudged]: ...
        @overload
        def __getitem__(self, key: Literal["layers"]) -> list[types.LayerCertificate]: ...
        def __getitem__(self, key: str) -> Any: ...

    def __repr__(self) -> str:
        safe = "safe" if self["safe"] else "NOT certified"
        return f"<sigmascale export of {self['model']} for {self['engine']}: {_count(len(self['layers']), 'layer')}, {safe}>"


class Audit(_Paged):
    """What :func:`verify` gives."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(self, key: Literal["engine"]) -> types.EngineName: ...
        @overload
        def __getitem__(self, key: Literal["version"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["outcome"]) -> types.Outcome: ...
        @overload
        def __getitem__(self, key: Literal["serving"]) -> types.Serving: ...
        @overload
        def __getitem__(self, key: Literal["unjudged"]) -> list[types.Unjudged]: ...
        @overload
        def __getitem__(self, key: Literal["model"]) -> str: ...
        @overload
        def __getitem__(self, key: Literal["safe"]) -> bool: ...
        @overload
        def __getitem__(self, key: Literal["notes"]) -> list[str]: ...
        @overload
        def __getitem__(self, key: Literal["layers"]) -> list[types.LayerAudit]: ...
        @overload
        def __getitem__(self, key: Literal["observed"]) -> types.Observed: ...
        @overload
        def __getitem__(self, key: Literal["others"]) -> list[Audit]: ...
        def __getitem__(self, key: str) -> Any: ...

    def __repr__(self) -> str:
        rows = [row for layer in self["layers"] for row in (layer["q"], layer["k"], layer["v"])]
        entries = [entry for row in rows for entry in row]
        bad = sum(entry["verdict"] != "safe" for entry in entries)
        found = f"{bad} of {len(entries)} scales not safe" if bad else "safe" if self["safe"] else "unknown"
        return f"<sigmascale audit of {self['model']} for {self['engine']}: {found}>"
