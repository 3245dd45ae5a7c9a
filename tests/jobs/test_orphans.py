"""Workers end with the process they work for, also when that one is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORK = """
import os, time
from regard.jobs.plan import Unit
from regard.jobs.running import Runner, run

class Work:
    def __call__(self, unit):
        time.sleep(0.01)
        return {"process": os.getpid()}, {}

if __name__ == "__main__":
    units = [[Unit("a", None, (place,), {})] for place in range(100_000)]
    for unit, (record, arrays) in run(Work(), units, runner=Runner(workers=2)):
        print(record["process"], flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_of_a_killed_process_end(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "work.py"], cwd=tmp_path, **quiet) as parent:
        workers = set()
        while len(workers) < 2:
            workers.add(int(parent.stdout.readline()))
        assert all(map(alive, workers))
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while any(map(alive, workers)):
        assert time.monotonic() < until, "they wait for work that will never come"
        time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
