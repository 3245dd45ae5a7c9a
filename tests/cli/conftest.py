"""A run that is done, for commands that read one; and the command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import regard
from regard import cli

TEXTS = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad"] * 8


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "decisive"
    subject = regard.pooled(regard.models.toys.decisive())
    tried = ["comprehensiveness", ("permutation", {"n": 5})]
    regard.audit(subject, TEXTS, methods=["raw", "uniform"], trials=tried, shown=1, out=folder, command="regard audit")
    return folder


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The exit code, stdout and stderr of a command."""

    def run(*given: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["regard", *map(str, given)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    return run
