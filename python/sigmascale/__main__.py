"""The command ``sigmascale``: the same one that ``cargo install`` builds."""

import os
import signal
import sys

from . import _native, _plugins


def main():
    """Runs the command with this process's arguments; returns its exit code."""
    # Native code runs without a look at Python's handlers: Ctrl-C ends the process, as it ends the command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.prefix != sys.base_prefix:
        # Libraries of CUDA are looked for in the environment of this command, also where another or none is active.
        os.environ["VIRTUAL_ENV"] = sys.prefix
    arguments = sys.argv[1:]
    return _native.command(arguments, _plugins.found() if arguments[:1] == ["doctor"] else [])


if __name__ == "__main__":
    sys.exit(main())
