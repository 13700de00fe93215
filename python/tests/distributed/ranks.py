"""Processes that run the bodies of tests, connected by gloo on the CPU.

They are started once, since an import of PyTorch takes seconds, and each test makes a process group of its own.
"""

import atexit
import functools
import importlib
import os
import pathlib
import sys
import tempfile
import traceback
from multiprocessing import get_context
from multiprocessing.connection import wait

import pytest

torch = pytest.importorskip("torch")

# Seconds, on a machine that is busy with other work.
LIMIT = 600
_running = []


def distributed(ranks):
    """The test's body runs in this many processes at once, and fails if it does in any."""

    def wrap(body):
        @functools.wraps(body)
        def test(**arguments):
            _run(ranks, body.__module__, body.__name__, arguments)

        test.body = body
        return test

    return wrap


def _run(ranks, module, name, arguments):
    while len(_running) < ranks:
        _running.append(_start())
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = _running[:ranks]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((module, name, arguments, store, rank, ranks))
        failed, awaited = [], {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        while awaited:
            # Whichever comes first: the others may wait for one that has failed.
            ready = wait(awaited, 5 if failed else LIMIT)
            if not ready:
                failed += [f"rank {rank} does not answer" for rank in awaited.values()]
                break
            for pipe in ready:
                rank = awaited.pop(pipe)
                try:
                    error = pipe.recv()
                except EOFError:
                    error = f"the process ended with {workers[rank][0].exitcode}"
                if error:
                    failed.append(f"rank {rank}: {error}")
    if failed:
        stop()
        pytest.fail("\n".join(failed), pytrace=False)


def _start():
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(pathlib.Path(__file__).parent)), daemon=True)
    process.start()
    theirs.close()
    return process, ours


@atexit.register
def stop():
    """Ends the processes; the next test starts others."""
    while _running:
        process, pipe = _running.pop()
        pipe.close()
        process.kill()
        process.join()


@pytest.fixture
def processes_of_their_own():
    """For what remembers process groups longer than they are there, as DeepSpeed and the caches of DTensor do."""
    stop()
    yield
    stop()


def _serve(pipe, folder):
    import datetime

    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    while True:
        try:
            module, name, arguments, store, rank, ranks = pipe.recv()
        except EOFError:
            return
        error = None
        try:
            limit = datetime.timedelta(seconds=LIMIT)
            shared = torch.distributed.FileStore(store, ranks)
            torch.distributed.init_process_group("gloo", store=shared, rank=rank, world_size=ranks, timeout=limit)
            getattr(importlib.import_module(module), name).body(**arguments)
            torch.distributed.barrier()
        except BaseException:
            error = traceback.format_exc(limit=-4)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        pipe.send(error)
