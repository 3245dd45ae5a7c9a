"""What can happen to work on a cluster, and clusters on which it can happen. Shared by tests of the Ray runner.

Nodes are processes of this machine. Each has a home and a working directory of its own, the head has no CPU, and who
works there must have the cluster's token. What is done is written down, a line for each time that a unit is begun.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

import regard
from regard.jobs.running import Afar, Failed, Runner, run

SOURCES = [Path(regard.__file__).parents[1], Path(__file__).parent, Path(__file__).parents[1] / "trials"]
TOKEN = "0123456789abcdef" * 4
WITH_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}

# A node that does not answer is given up after seconds, rather than after half a minute.
HASTY = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "500",
         "RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3"}  # fmt: skip


class Nodes:
    """A cluster: a head without CPUs, and nodes that come and go."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder, self.count = folder, 0
        with self._at_home("head") as env:
            self.cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "env_vars": env}
            )
        self.address = self.cluster.address

    @contextmanager
    def _at_home(self, name: str):
        home, before = self.folder / name, Path.cwd()
        (home / "cwd").mkdir(parents=True)
        os.chdir(home / "cwd")
        try:
            yield {"HOME": str(home), "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
        finally:
            os.chdir(before)

    def add(self, *, env: dict[str, str] | None = None, cpus: int = 2, **more):
        self.count += 1
        with self._at_home(f"node-{self.count}") as own:
            if env and "PYTHONPATH" in env:
                env = {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], own["PYTHONPATH"]])}
            return self.cluster.add_node(num_cpus=cpus, env_vars={**own, **(env or {})}, **more)

    def kill(self, node) -> None:
        """As when the plug is pulled."""
        self.cluster.remove_node(node, allow_graceful=False)

    def exactly(self, count: int) -> list:
        """So many healthy nodes, whatever happened before."""
        nodes = [*self.cluster.worker_nodes]
        for node in nodes[count:]:
            self.kill(node)
        return [*nodes[:count], *(self.add() for _ in range(count - len(nodes)))]

    def runner(self, workers: int | None = 2, **more) -> Runner:
        return Runner("ray", workers, self.address, **more)

    def close(self) -> None:
        self.cluster.shutdown()


@contextmanager
def cluster(folder: Path):
    with mock.patch.dict(os.environ, QUIET | WITH_TOKEN | HASTY):
        from regard.jobs.joining import _look_again

        _look_again()
        nodes = Nodes(folder)
        try:
            yield nodes
        finally:
            nodes.close()


def outcomes(work, units, runner: Runner, *, chunk: int = 1, seen=lambda unit: None, **afar) -> dict:
    """By unit what came of it; each must come once."""
    found: dict = {}
    chunks = [units[at : at + chunk] for at in range(0, len(units), chunk)]
    for unit, result in run(work, chunks, runner=runner, afar=Afar(work, **afar)):
        assert unit not in found, f"{unit} came twice"
        found[unit] = result if isinstance(result, Failed) else result[0]["value"]
        seen(unit)
    return found


@dataclass
class Work:
    """Squares numbers, and writes down each time that it begins with one.

    Args:
        diary: where.
        trouble: by number what happens: "raise", "kill", "hang", or one of these with " once".
        seconds: of a unit.
    """

    diary: Path
    trouble: dict[int, str]
    seconds: float = 0.0

    def __call__(self, number: int):
        first = number not in self.begun
        with self.diary.open("a") as file:
            file.write(f"{number} {os.getpid()}\n")
        what, _, once = self.trouble.get(number, "").partition(" ")
        if what and (first or not once):
            if what == "raise":
                raise KeyError("no such thing")
            if what == "kill":
                time.sleep(0.5)  # until it is told what was done before, or that would be to blame
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        time.sleep(self.seconds)
        return {"value": number**2}, {}

    @property
    def begun(self) -> Counter[int]:
        """How often each number was begun with."""
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return Counter(int(line.split()[0]) for line in lines)


class Bomb:
    """Work that kills the process that takes it, so many times."""

    def __init__(self, diary: Path, times: int) -> None:
        self.diary, self.times = diary, times

    def __reduce__(self):
        return explode, (self.diary, self.times)

    def __call__(self, number: int):
        return {"value": number**2}, {}


def explode(diary: Path, times: int) -> Bomb:
    with diary.open("a") as file:
        file.write("x")
    if len(diary.read_text()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return Bomb(diary, times)


def surroundings(number: int):
    """What a unit sees of the process that it is in."""
    import torch

    own = {"threads": torch.get_num_threads(), "cwd": os.getcwd(), "home": os.environ["HOME"], "pid": os.getpid()}
    return {"value": own | {"omp": os.environ.get("OMP_NUM_THREADS"), "script": sys.path[0]}}, {}


class Lots:
    """Draws from every generator of a process; begun anew for each unit, or not."""

    def __init__(self, settled: bool) -> None:
        self.settled = settled

    def __call__(self, number: int):
        from contextlib import nullcontext

        import torch

        from regard.training import settled

        with settled(number) if self.settled else nullcontext():
            drawn = [torch.rand(1).item(), float(np.random.random()), random.random()]
        return {"value": drawn}, {}


def in_place(unit):
    """Changes what it was given, as a unit may."""
    _, array = unit
    array += 1
    return {"value": array.sum().item()}, {"array": array}


@dataclass
class OnlyAt:
    """Splits texts into words; elsewhere than in one process it fails at one of the words."""

    process: int
    word: str

    def __call__(self, text: str) -> list[str]:
        if self.word in text and os.getpid() != self.process:
            raise KeyError("no such thing")
        return text.split()


OTHER_VERSION = """
import importlib.metadata as known
version = known.version
known.version = lambda name: "1.0" if name == "torch" else version(name)
"""


@dataclass
class Slow:
    """Splits texts into words, and takes its time."""

    seconds: float = 0.02

    def __call__(self, text: str) -> list[str]:
        time.sleep(self.seconds)
        return text.split()


def alive(mark: str) -> dict[int, str]:
    """What runs of all that was started with a mark in its environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes() and "Z" not in (process / "stat").read_text():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:2000]
        except OSError:
            continue
    return found


@dataclass
class Telling:
    """Makes optimizers that write down each step, of which one kills the process before it is done."""

    diary: Path
    kill_at: int

    def __call__(self, model):
        import torch

        diary, kill_at = self.diary, self.kill_at

        class Adam(torch.optim.Adam):
            def step(self, closure=None):
                with diary.open("a") as file:
                    file.write("step\n")
                if len(diary.read_text().splitlines()) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().step(closure)

        return Adam(model.parameters(), lr=0.1)


@dataclass
class BreaksAt:
    """Builds models; of one seed, and elsewhere than in one process, it cannot."""

    seed: int
    process: int

    def __call__(self, train, seed):
        import gated

        if seed == self.seed and os.getpid() != self.process:
            raise KeyError("no such thing")
        return gated.Build(False)(train, seed)
