"""Whether the plugins of serving engines are installed and would load here, for ``sigmascale doctor``."""

import importlib.metadata
import os
import subprocess
import sys

# Name, distribution, group of entry points, module of the plugin, and the variable that lists the plugins that an engine may load.
_ENGINES = [
    ("vllm", "vllm", "vllm.general_plugins", "vllm", "VLLM_PLUGINS"),
    ("sglang", "sglang", "sglang.srt.plugins", "sglang", None),
]
_SECONDS = 120


def found():
    """Name, whether the plugin would set scales, and what there is to say, of each engine."""
    return [(name, *_look(name, *engine)) for name, *engine in _ENGINES]


def _look(name, distribution, group, module, listed):
    version = next((v for v in map(_version, (distribution, f"{distribution}-cpu")) if v), None)
    if version is None:
        return False, f"the engine is not installed in the Python environment of this command, {sys.prefix}"
    if not any(point.value == f"sigmascale.{module}:register" for point in importlib.metadata.entry_points(group=group)):
        return False, f"{version}, but the plugin's entry point in {group} is not: install this package with pip"
    allowed = os.environ.get(listed) if listed else None
    if allowed is not None and "sigmascale" not in allowed.split(","):
        return False, f"{version}, but {listed} is {allowed!r}: add sigmascale to it"
    asked = os.environ.get("SIGMASCALE_PLUGIN", "")
    try:
        # Of a process of its own, since an engine takes long to import, and hooks stay.
        done = subprocess.run(
            [sys.executable, "-c", f"from sigmascale import {module} as plugin; print(plugin._loaded.mode()); plugin._hook()"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False, f"{version}, which was not imported within {_SECONDS} s"
    if done.returncode != 0:
        return False, f"{version}, but the plugin does not load: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    mode = done.stdout.split()[0]
    if mode == "off":
        return False, f"{version}, but SIGMASCALE_PLUGIN={asked} turns the plugin off"
    strict = "a model without scales stops the engine" if mode == "strict" else "a model without scales is served with 1.0"
    return True, f"{version}, the plugin loads; {strict}"


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
