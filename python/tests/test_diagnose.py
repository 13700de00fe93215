"""The diagnosis of runs, and the alarms that the monitor feeds."""

import json

import pytest

import sigmascale
from sigmascale import _native

FIRST = {"kind": "run", "format": 1, "source": "lab", "name": "a test"}
FIRST |= {"layers": [{"layer": 4, "heads": 2, "kv_heads": 2, "head_dim": 8, "width": 32}]}


def rows(fails, steps=600):
    """A run of which head 1 of layer 4 has growing logits from step 300 on."""
    for step in range(steps):
        yield {"kind": "step", "step": step, "loss": 2.0, "lr": 1e-3}
        if step % 10 == 0:
            logit = 2000.0 if fails and step >= 300 else 20.0
            yield {"kind": "layer", "step": step, "layer": 4, "logit_max": [20.0, logit], "w_q": [1.0, 1.0]}


def written(path, fails):
    path.write_text("".join(json.dumps(row) + "\n" for row in [FIRST, *rows(fails)]))
    return path


def test_a_record_is_diagnosed(tmp_path):
    found = sigmascale.diagnose(written(tmp_path / "run.jsonl", True))
    first = found["first"]
    assert found["verdict"] == "alarm" and (first["kind"], first["layer"], first["head"]) == ("logit-limit", 4, 1)
    assert (first["since"], first["raised"], first["cleared"]) == (300, 320, None)
    assert repr(found) == "<sigmascale diagnosis of a test: 2 heads, logit-limit of layer 4, head 1 at step 320>"
    assert "layer 4, head 1 goes wrong first" in found.to_html() and "arXiv" in found["advice"][0]["source"]
    calm = sigmascale.diagnose(written(tmp_path / "calm.jsonl", False))
    assert calm["verdict"] == "calm" and calm["first"] is None and repr(calm).endswith("2 heads, calm>")
    assert sigmascale.diagnose(tmp_path / "calm.jsonl", logit_limit=10)["verdict"] == "alarm"


def test_wrong_calls_say_what_is_wrong(tmp_path):
    run = written(tmp_path / "run.jsonl", False)
    with pytest.raises(TypeError, match="no threshold 'tau': window"):
        sigmascale.diagnose(run, tau=3)
    with pytest.raises(sigmascale.ArgumentError, match="growth 0 "):
        sigmascale.diagnose(run, growth=0)
    with pytest.raises(sigmascale.ArgumentError, match="lr is for checkpoints"):
        sigmascale.diagnose(run, lr=1e-3)
    with pytest.raises(sigmascale.ArgumentError, match="pass two or more checkpoints"):
        sigmascale.diagnose([run])
    with pytest.raises(FileNotFoundError):
        sigmascale.diagnose(tmp_path / "absent.jsonl")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(sigmascale.FormatError, match="line 1 is not a record of a run"):
        sigmascale.diagnose(tmp_path / "text")


def test_alarms_take_lines_at_once_or_one_by_one():
    lines = [json.dumps(row) for row in rows(True)]
    whole = _native.Alarms(json.dumps(FIRST), "{}")
    events = whole.observe("\n".join(lines))
    single = _native.Alarms(json.dumps(FIRST), "{}")
    assert [event for line in lines for event in single.observe(line)] == events
    (event,) = map(json.loads, events)
    assert (event["kind"], event["name"], event["alarm"], event["step"]) == ("event", "alarm", "logit-limit", 320)
    state = json.loads(whole.state())
    assert state["up"] == [state["first"]] and state["advice"][0]["layers"] == [4]


def test_alarms_refuse_what_does_not_fit_the_first_line():
    alarms = _native.Alarms(json.dumps(FIRST), "{}")
    with pytest.raises(sigmascale.MismatchError, match="layer 5 "):
        alarms.observe('{"kind": "layer", "step": 1, "layer": 5}')
    with pytest.raises(sigmascale.FormatError, match="no record"):
        alarms.observe("hello")
    with pytest.raises(sigmascale.MismatchError, match="first line of kind"):
        _native.Alarms('{"kind": "step", "step": 1}', "{}")
    with pytest.raises(sigmascale.ArgumentError, match="options of diagnose"):
        _native.Alarms(json.dumps(FIRST), '{"tau": 1}')
