"""A Dask cluster in place of the processes of ``jobs``: each rank is a task with retries.

    with jobs_on("local", 4) as run:
        for number, outcome in run(convert_rank, jobs, 4): ...

Workers must see the traces and the output under the same paths. What is written doesn't depend on who wrote
it, and a task whose worker dies starts again on another.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from chakra_et import jobs
from chakra_et.errors import TraceError
from chakra_et.jobs import Jobs
from chakra_et.text import progress_bar

QUEUES = "slurm", "pbs", "lsf", "sge"
"""Slurm is tested; the others take the same way, untested."""
_servers: dict[int, Any] = {}


@contextlib.contextmanager
def jobs_on(cluster: str, workers: int) -> Iterator[Jobs]:
    """What runs jobs as ``jobs.run`` does on ``cluster``: ``local``, a queue of ``QUEUES`` as
    dask-jobqueue's configuration describes it, or a scheduler's address. Raises ``TraceError`` if it isn't
    there."""
    with contextlib.ExitStack() as stack:
        try:
            run = functools.partial(_run, _connected(stack, cluster, workers)) if cluster else jobs.run
        except ImportError as error:
            raise TraceError(f"--cluster needs {error.name}: pip install distributed dask-jobqueue") from None
        except (OSError, ValueError) as error:
            raise TraceError(f"--cluster {cluster}: {error}: give local, slurm, or tcp://HOST:PORT") from None
        try:
            yield run
        finally:  # of workers in this process
            for server in _servers.values():
                server.terminate()
                server.wait()


def each_rank(
    function: Callable[[Any], Any], arguments: Sequence[Any], doing: str, cluster: str
) -> list[Any]:
    """What ``function`` returns for each of ``arguments``, in order: on ``cluster``, or without one in this
    process. ``doing``: what the progress bar says. Raises the ``TraceError`` of a rank that fails."""
    found, count = [None] * len(arguments), jobs.default_workers() if cluster else 0
    with jobs_on(cluster, count) as run, progress_bar(len(arguments), doing) as progress:
        for number, outcome in run(function, arguments, count):
            if isinstance(outcome, TraceError):
                raise outcome
            found[number] = outcome
            progress()
    return found


def _connected(stack: contextlib.ExitStack, cluster: str, workers: int) -> Any:
    import dask
    from distributed import Client, LocalCluster

    if cluster == "local":  # threads do, as each job has a process of its own; sampled, they would only wait
        stack.enter_context(dask.config.set({"distributed.worker.profile.enabled": False}))
        place = LocalCluster(n_workers=1, threads_per_worker=workers, processes=False, dashboard_address=None)
    elif cluster in QUEUES:
        import dask_jobqueue

        place = getattr(dask_jobqueue, f"{cluster.upper()}Cluster")()
        place.scale(jobs=workers)
    else:
        return stack.enter_context(Client(cluster))
    return stack.enter_context(Client(stack.enter_context(place)))


def _run(
    client: Any, function: Callable[[Any], Any], arguments: Sequence[Any], workers: int
) -> Generator[tuple[int, Any], None, None]:
    """``jobs.run`` on the workers of a cluster, however many there are."""
    from distributed import as_completed

    task = functools.partial(_in_process, os.getcwd(), function)
    futures = client.map(task, arguments, pure=False, batch_size=1000)
    number = {future.key: at for at, future in enumerate(futures)}
    for future in as_completed(futures):
        try:
            outcome = future.result()
        except Exception as error:  # by Dask: our own are outcomes
            outcome = TraceError(f"the cluster lost it: {type(error).__name__}: {error}.")
        future.release()
        yield number[future.key], outcome


def _in_process(folder: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """The outcome of a job in a process of its own: one that dies doesn't take Dask's worker along, for whose
    death Dask would blame all its tasks. A server of this thread forks it, which has loaded what jobs need
    and ends with the worker."""
    server = _servers.get(threading.get_ident())
    if server is None or server.poll() is not None:
        command = [sys.executable, "-c", "from chakra_et.ranks.cluster import _serve; _serve()"]
        server = _servers[threading.get_ident()] = subprocess.Popen(command, stdin=-1, stdout=-1, cwd=folder)
    given, answer = server.stdin, server.stdout
    assert given is not None and answer is not None
    try:
        given.write(pickle.dumps((folder, function, argument)))
        given.flush()
        return pickle.load(answer)
    except (OSError, EOFError):
        return TraceError("the server of its process ended, perhaps for lack of memory.")


def _serve() -> None:
    stdout, sys.stdout = sys.stdout.buffer, sys.stderr
    with contextlib.suppress(EOFError, BrokenPipeError):  # the worker has ended
        while True:
            folder, function, argument = pickle.load(sys.stdin.buffer)
            os.chdir(folder)
            ((_, outcome),) = jobs.run(function, [argument], 1)
            pickle.dump(outcome, stdout, protocol=5)
            stdout.flush()
