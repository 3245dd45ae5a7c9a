"""Where units run on Ray: actors that each hold the work once. Only this process keeps what comes of it.

Ray may run a chunk twice, or lose an actor with what it was doing: here each unit is handed over once, or is given up
after so many attempts. Everything is sent as bytes of our own making, so that arrays arrive as they do between local
processes, and so that a machine with other versions can say so before it reads anything.
"""

from __future__ import annotations

import logging
import pickle
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from regard.errors import InputError, OptionError, RegardError, WorkerDied, WorkerDiffers
from regard.jobs.joining import connected, must_be_installed
from regard.jobs.running import Afar, Failed, Result, Runner, packing
from regard.jobs.store import differences

AHEAD = 2  # chunks that an actor has: one at work, one at hand
ATTEMPTS = 3  # of a chunk
PATIENCE = 60.0  # seconds without any actor, after which none will come
SHARE = 0.95  # of a CPU that a thread takes: what is left keeps Ray's own tasks from waiting for ever
PACKAGES = ("regard", "torch", "transformers", "numpy", "scipy")
KEPT = "What was finished is kept: go on with --resume, there or elsewhere."
log = logging.getLogger("regard")


def versions() -> dict[str, str]:
    """What numbers may depend on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class Hand:
    """What an actor is: it takes the work once, and then does chunks of it, one after the other."""

    def here(self) -> str:
        """The machine that it is on."""
        return socket.gethostname()

    def begin(self, expected: dict[str, str], sent: bytes) -> bytes:
        """Take the work; b"" if all is well, or else why not."""
        try:
            if changes := differences(expected, versions()):
                raise WorkerDiffers(f"it has other versions ({'; '.join(changes)}). Install the same.")
            self.work = pickle.loads(sent)  # from the process that asks
        except Exception as problem:
            return _told(problem)
        return b""

    def do(self, sent: bytes) -> bytes:
        """What comes of each unit of a chunk, or why nothing does."""
        results: list[Result | Failed] = []
        for unit in pickle.loads(sent):
            try:
                results.append(self.work(unit))
            except Exception as problem:
                log.warning("a unit failed", exc_info=True)
                results.append(Failed(f"{type(problem).__name__}: {problem}"))
        return pickle.dumps(results)


def _told(problem: Exception) -> bytes:
    """An exception of ours as it is, others in words: who asks may not know them."""
    ours = problem if isinstance(problem, RegardError) else InputError(f"{type(problem).__name__}: {problem}")
    return pickle.dumps((type(ours), str(ours)))


@dataclass(eq=False)
class Chunk:
    """Units that go together, and how often that was tried."""

    units: Sequence[Any]
    attempts: int = 0


@dataclass(eq=False)
class Actor:
    """One of the pool: what it was asked, in order, each with its chunk (None: to begin); since when it is at it."""

    handle: Any
    asked: deque[tuple[Any, Chunk | None]]
    where: str = ""  # "": it has no place yet
    begun: bool = False
    since: float = field(default_factory=time.monotonic)


def run_there(
    work: Any, chunks: Sequence[Sequence[Any]], runner: Runner, afar: Afar
) -> Iterator[tuple[Any, Result | Failed]]:
    """`run`, on Ray."""
    if not chunks:
        return
    ray = must_be_installed()
    try:
        sent = ray.cloudpickle.dumps(afar.work)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise OptionError(f"runner='ray': this model cannot be sent to other processes ({problem}).") from None
    with connected(runner, threads=afar.threads, size=len(sent)):
        kept = ray.put(sent)
        del sent
        pool = Pool(ray, runner, afar, kept, packing(work), deque(map(Chunk, chunks)))
        try:
            yield from pool.results()
        finally:
            pool.close()


class Pool:
    """Actors, chunks that wait for them, and who has which."""

    def __init__(
        self, ray: Any, runner: Runner, afar: Afar, sent: Any, pack: Callable[[Any], Any], waiting: deque[Chunk]
    ) -> None:
        self.ray, self.sent, self.pack, self.waiting = ray, sent, pack, waiting
        self.timeout = runner.timeout or afar.patience
        takes = {"num_cpus": SHARE * afar.threads, "num_gpus": runner.gpus_per_worker, "memory": afar.memory}
        self.size = runner.workers or max(1, sum(count for _, count in _room(ray, takes)))
        self.takes = takes
        self.spare = ATTEMPTS * self.size  # actors that may die before they have begun
        self.actors: list[Actor] = []
        self.seen = time.monotonic()  # when there was an actor last
        self.why = ""
        # Threads are told twice, as libraries read the variable when they are imported. Nothing else is shipped.
        variables = {"OMP_NUM_THREADS": str(afar.threads), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        self.make = ray.remote(Hand).options(
            **takes, max_restarts=0, max_task_retries=0, max_concurrency=1, scheduling_strategy="SPREAD",
            runtime_env={"env_vars": variables},
        )  # fmt: skip

    def results(self) -> Iterator[tuple[Any, Result | Failed]]:
        """Hand over what is done until all is."""
        while self.waiting or any(chunk for one in self.actors for _, chunk in one.asked):
            self._employ()
            heads = {one.asked[0][0]: one for one in self.actors if one.asked}
            self.ray.wait([*heads], timeout=0.5) if heads else time.sleep(0.5)  # until there is one, or a while
            late = [one for one in heads.values() if one.where and time.monotonic() - one.since > self.timeout]
            done = self.ray.wait([*heads], num_returns=len(heads), timeout=0)[0] if heads else []
            for ref in done:
                yield from self._answered(heads[ref])
            for one in late:
                if one.asked and one.asked[0][0] in heads and one.asked[0][0] not in done:
                    yield from self._lost(one, f"it took longer than {self.timeout:g} seconds")
            self._must_go_on()

    def _employ(self) -> None:
        """An actor for each place that is free, and chunks for those that have begun."""
        left = len(self.waiting) + sum(bool(chunk) for one in self.actors for _, chunk in one.asked)
        while len(self.actors) < min(self.size, left) and self.spare > 0:
            handle = self.make.remote()
            first: deque[Any] = deque(
                [(handle.here.remote(), None), (handle.begin.remote(versions(), self.sent), None)]
            )
            self.actors.append(Actor(handle, first))
        for one in sorted(self.actors, key=lambda one: len(one.asked)):
            while one.begun and self.waiting and len(one.asked) < AHEAD:
                chunk = self.waiting.popleft()
                if not one.asked:
                    one.since = time.monotonic()
                packed = self.ray.cloudpickle.dumps(self.pack(chunk.units))
                one.asked.append((one.handle.do.remote(packed), chunk))

    def _answered(self, one: Actor) -> Iterator[tuple[Any, Result | Failed]]:
        """What the first thing that an actor was asked came to."""
        ref, chunk = one.asked[0]
        try:
            said = self.ray.get(ref)
        except self.ray.exceptions.RayError as problem:
            yield from self._lost(one, _plain(problem))
            return
        one.asked.popleft()
        one.since = self.seen = time.monotonic()
        if chunk is not None:
            for unit, result in zip(chunk.units, pickle.loads(said), strict=True):
                if isinstance(result, Failed):
                    yield from self._again([unit], chunk.attempts, result.why)
                else:
                    yield unit, result
        elif not one.where:
            one.where = said
        elif said:
            kind, why = pickle.loads(said)
            raise kind(f"{one.where} cannot work for this machine: {why}")
        else:
            one.begun = True

    def _lost(self, one: Actor, why: str) -> Iterator[tuple[Any, Result | Failed]]:
        """An actor is gone, or hangs. What it was doing is tried again; what it had not begun is not to blame."""
        self.actors.remove(one)
        self.ray.kill(one.handle)
        self.why = f"{one.where or 'a worker'}: {why}"
        log.warning("a worker is gone. %s", self.why)
        self.spare -= bool(one.where) and not one.begun
        chunks = [chunk for _, chunk in one.asked if chunk]
        self.waiting.extendleft(reversed(chunks[1:]))
        for chunk in chunks[:1]:
            yield from self._again(chunk.units, chunk.attempts, why)

    def _again(self, units: Sequence[Any], attempts: int, why: str) -> Iterator[tuple[Any, Failed]]:
        """Each unit of its own, so that one does not fail with another; given up after so many attempts."""
        for unit in units:
            if attempts + 1 < ATTEMPTS:
                self.waiting.append(Chunk([unit], attempts + 1))
            else:
                yield unit, Failed(f"failed {ATTEMPTS} times, and goes on with --resume. The last time: {why}")

    def _must_go_on(self) -> None:
        """Refuse to wait for ever for actors that do not come."""
        if any(one.where for one in self.actors):
            self.seen = time.monotonic()
        elif not self.actors and self.spare <= 0:
            raise WorkerDied(f"workers={self.size!r}: {ATTEMPTS * self.size} died as they began. {self.why}. {KEPT}")
        elif time.monotonic() - self.seen > PATIENCE:
            takes = ", ".join(f"{name}={amount:g}" for name, amount in self.takes.items() if amount)
            nodes = "; ".join(f"{node}: {count}" for node, count in _room(self.ray, self.takes)) or "none"
            raise WorkerDied(
                f"workers={self.size!r}: no machine has had room for one in {PATIENCE:g} seconds (it takes {takes}; "
                f"machines, and for how many they are large enough: {nodes}). {self.why} {KEPT}".replace("  ", " ")
            )

    def close(self) -> None:
        """Let go of all actors."""
        for one in self.actors:
            with suppress(Exception):
                self.ray.kill(one.handle)


def _room(ray: Any, takes: dict[str, Any]) -> list[tuple[str, int]]:
    """Of each machine, how many actors it is large enough for."""
    named = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    wanted = {named[name]: amount for name, amount in takes.items() if amount}
    return [
        (
            node["NodeManagerAddress"],
            int(min(node["Resources"].get(name, 0) / amount for name, amount in wanted.items())),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _plain(problem: Exception) -> str:
    """What Ray says of an actor that died: its first lines have the reason."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines)[:400]
