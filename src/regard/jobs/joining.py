"""From an address to a Ray cluster, or to a clear refusal; without an address to one that is started here."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from regard.errors import OptionError
from regard.jobs.running import Runner

ANSWER = 3.0  # seconds in which an address answers
ROOM = 200 << 20  # bytes of a local cluster's object store, besides the model
# Nothing is told to anybody; who may run code on a cluster that is started here has its token; no GPU is hidden.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
log = logging.getLogger("regard")


def must_be_installed() -> Any:
    """Ray itself, or how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError:
        raise OptionError("runner='ray': Ray is not installed. pip install 'regard[ray]'") from None
    return ray


@contextmanager
def connected(runner: Runner, *, threads: int = 1, size: int = 0) -> Iterator[Any]:
    """Ray, for the length of a block: a cluster that is there, or one that is started here and stopped again."""
    ray = must_be_installed()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    with _unprinted():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what Ray says of its own future
                if runner.address is None:
                    _start(ray, runner, threads, size, quiet)
                else:
                    _join(ray, runner.address, quiet)
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _unprinted() -> Iterator[None]:
    """Ray prints to stdout, where results belong, what happens to nodes, with pages of logs; we say it ourselves."""
    from ray._private import worker

    plain = getattr(worker, "print_to_stdstream", None)
    worker.print_to_stdstream = lambda data, ignore_prefix: log.debug("%s", data["lines"])
    try:
        yield
    finally:
        worker.print_to_stdstream = plain


def _start(ray: Any, runner: Runner, threads: int, size: int, quiet: dict[str, Any]) -> None:
    """A cluster of this machine alone, which takes work from nobody who does not have its token."""
    room = ROOM + 2 * size
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else room
    if free < room:
        log.warning("/dev/shm has %d MB left and Ray wants %d: it will use /tmp, and be slow.", free >> 20, room >> 20)
    cores = max(os.cpu_count() or 1, (runner.workers or 1) * threads)
    with _environment(SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        ray.init("local", num_cpus=cores, include_dashboard=False, object_store_memory=room, **quiet)


def _join(ray: Any, address: str, quiet: dict[str, Any]) -> None:
    """A cluster that is there."""
    found = reachable(address)
    try:
        ray.init(found, **quiet)
    except (ConnectionError, ValueError, RuntimeError, ImportError, ray.exceptions.RayError) as problem:
        raise OptionError(
            f"address={address!r} answers, but cannot be joined: {' '.join(str(problem).split())[:300]} Has it the "
            "same version of Ray and of Python, and do you have its token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, "
            "or RAY_AUTH_TOKEN_PATH)?"
        ) from None


def reachable(address: str) -> str:
    """An address as Ray takes it; refused where nothing answers, as Ray itself would wait there for minutes.

    What answers must speak as Ray does: HTTP/2, which begins with settings.
    """
    from ray._private.services import canonicalize_bootstrap_address

    said, problem = f"address={address!r}", "something else is there"
    try:
        found = address if address.startswith("ray://") else canonicalize_bootstrap_address(address)
        host, _, port = str(found).removeprefix("ray://").rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER) as line:
            line.settimeout(ANSWER)
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            if os.environ.get("RAY_USE_TLS", "0") != "0" or line.recv(9)[3:4] == b"\4":
                return str(found)
    except ConnectionError as why:  # also: nothing was found
        problem = str(why).splitlines()[0]
    except ValueError:
        raise OptionError(f"{said} must be 'auto', 'host:port' or 'ray://host:port'.") from None
    except (OSError, OverflowError) as why:
        problem = str(why)
    raise OptionError(f"{said} does not answer ({problem}). Is the cluster up, and can it be reached from here?")


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """For processes that are started in a block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _look_again()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _look_again() -> None:
    """Ray remembers the mode and token that it has found first."""
    with suppress(ImportError, AttributeError):
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
