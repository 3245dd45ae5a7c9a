"""An audit across two hosts with a network between them, which is cut twice while it runs: for a moment, and for long.

The hosts are network namespaces of this machine: each has addresses, ports and a loopback of its own, and they reach each
other through one cable. That takes root and iproute2; without them the test is skipped, and says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ray_faults import HASTY, QUIET, SOURCES, WITH_TOKEN, alive

import regard
from regard.models import toys

pytest.importorskip("ray", reason="Ray is not installed: pip install 'regard[ray]'")

HEAD, WORKER, PORT = "10.77.0.1", "10.77.0.2", 6400
TEXTS = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad", "good and bad so so"] * 5
ASKED = {"methods": ["raw", "random"], "trials": ["comprehensiveness", ("permutation", {"n": 5})], "shown": 2,
         "batch_size": 4, "threads": 1, "probes": ()}  # fmt: skip
SCRIPT = f"""
import regard
from ray_faults import Slow
from regard.models import toys

subject = regard.pooled(toys.decisive(), tokenize=Slow(0.3))
regard.audit(subject, {TEXTS!r}, out="run", runner="ray", address="{HEAD}:{PORT}", workers=2, **{ASKED!r})
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces, "a" and "b", a cable between them, and what was started in each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.mark, self.stack = folder, f"REGARD_MARK={folder.name}", stack
        self.names = {host: f"regard-{os.getpid()}-{host}" for host in "ab"}
        self.started: list[subprocess.Popen] = []
        for name in self.names.values():
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        one, other = self.names.values()
        ip("-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other)
        for host, address in zip("ab", (HEAD, WORKER), strict=True):
            ip("-n", self.names[host], "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", self.names[host], "link", "set", "cable", "up")
        stack.callback(self.end)

    def start(self, host: str, *words: str) -> subprocess.Popen:
        home = self.folder / host
        home.mkdir(exist_ok=True)
        path = os.pathsep.join(map(str, SOURCES))
        given = {**os.environ, **QUIET, **WITH_TOKEN, **HASTY, "HOME": str(home), "PYTHONPATH": path}
        given |= dict([self.mark.split("=")])
        command = ["ip", "netns", "exec", self.names[host], *words]
        with (home / f"{Path(words[0]).name}.log").open("ab") as log:
            self.started.append(subprocess.Popen(command, cwd=home, env=given, stdout=log, stderr=log))
        return self.started[-1]

    def node(self, host: str) -> subprocess.Popen:
        """A node of Ray; that of "a" is the head, and has no CPUs."""
        ray = str(Path(sys.executable).with_name("ray"))
        where = (
            ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
            if host == "a"
            else [f"--address={HEAD}:{PORT}", "--num-cpus=2"]
        )
        own = f"--node-ip-address={HEAD if host == 'a' else WORKER}"
        spot = ["--temp-dir", str(self.folder / f"{host}-ray")] if host == "a" else []
        return self.start(host, ray, "start", *where, own, *spot, "--object-store-memory=100000000", "--block")

    def cable(self, state: str) -> None:
        ip("-n", self.names["a"], "link", "set", "cable", state)

    def end(self) -> None:
        """End all that was started here, and no other."""
        while left := alive(self.mark):
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        for one in self.started:
            one.wait(10)

    def said(self) -> str:
        logs = [log for host in "ab" for log in (self.folder / host).glob("*.log")]
        return "\n".join(f"{log}: {log.read_text()[-1500:]}" for log in logs)


@pytest.fixture
def hosts():
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rg-", ignore_cleanup_errors=True)))
        try:
            made = Hosts(folder, stack)
        except subprocess.CalledProcessError as problem:
            pytest.skip(f"network namespaces cannot be made here: {problem.stderr.strip()}")
        yield made


def wait(until, hosts, driver=None, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, hosts.said()
        assert driver is None or driver.poll() is None, hosts.said()
        time.sleep(0.05)


def listens(hosts) -> bool:
    code = f"import socket; socket.create_connection(({HEAD!r}, {PORT}), 1)"
    return hosts.start("b", sys.executable, "-c", code).wait(60) == 0


def test_an_audit_across_two_hosts_outlives_its_network(hosts, tmp_path):
    regard.audit(regard.pooled(toys.decisive()), TEXTS, out=tmp_path / "undisturbed", **ASKED)
    hosts.node("a")
    wait(lambda: listens(hosts), hosts)
    worker = hosts.node("b")
    (hosts.folder / "a" / "script.py").write_text(SCRIPT)
    driver = hosts.start("a", sys.executable, "script.py")
    records = hosts.folder / "a" / "run" / "records.jsonl"

    def count() -> int:
        return len(records.read_bytes().splitlines()) if records.exists() else 0

    wait(lambda: count() >= 2, hosts, driver)
    hosts.cable("down")
    time.sleep(0.5)
    hosts.cable("up")
    before = count()
    wait(lambda: count() >= before + 2, hosts, driver)
    hosts.cable("down")  # for so long that the other side is given up
    told = hosts.folder / "a" / f"{Path(sys.executable).name}.log"
    wait(lambda: "a worker is gone" in told.read_text(), hosts, driver)
    kept = count()
    hosts.cable("up")
    wait(lambda: worker.poll() is not None, hosts, driver)  # it is told that it counts as dead
    hosts.node("b")
    wait(lambda: driver.poll() is not None, hosts, None, 120)
    assert driver.returncode == 0, hosts.said()
    assert 4 <= kept < count()
    found = (hosts.folder / "a" / "run" / "findings.json").read_bytes()
    assert found == (tmp_path / "undisturbed" / "findings.json").read_bytes()
