"""What the command line owes to whoever types: quick answers, help that fits, names to complete."""

from __future__ import annotations

import ast
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import regard
from regard.cli import helps, shared
from regard.cli.commands import COMMANDS, app
from regard.data.planted import TASKS
from regard.recipes import READY

REGARD = str(Path(sys.executable).with_name("regard"))
QUICK = [["--help"], ["--version"], ["audit", "--help"], ["audit", "--nope"], ["audit", "--limit", "x"], ["nope"], [],
         ["audit", "--model", "/nowhere", "--data", "nowhere.csv"], ["trial", "permutaton", "--planted", "keyword"]]  # fmt: skip


def in_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def imported_by(*commands: list[str]) -> set[str]:
    """Which of the large packages these commands import, run one after the other."""
    return set(json.loads(in_python(f"""
import json, sys
from regard.cli import main
for given in {commands!r}:
    sys.argv = ["regard", *given]
    try:
        main()
    except SystemExit:
        pass
print()
print(json.dumps([name for name in ("torch", "transformers", "pandas", "numpy", "altair", "scipy", "rich") if name in sys.modules]))
""")))  # fmt: skip


def test_help_version_and_usage_errors_import_nothing_large():
    assert imported_by(*QUICK) == set()


def test_report_and_diff_do_without_torch(run_folder):
    read = imported_by(["report", str(run_folder)], ["diff", str(run_folder), str(run_folder)])
    assert "pandas" in read
    assert not {"torch", "transformers"} & read


def test_help_costs_little_more_than_typer():
    def cpu(*command: str) -> float:
        spent = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, capture_output=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(spent)

    typer_alone = cpu(sys.executable, "-c", "import typer")
    assert cpu(REGARD, "--help") < 3 * typer_alone
    assert cpu(REGARD, "audit", "--nope") < 3 * typer_alone


def test_the_first_page_fits_a_screen_and_starts_with_examples(call):
    code, page, _ = call("--help")
    lines = page.splitlines()
    assert code == 0
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert [line.split("#")[0].strip() for line in lines[1:4]] == [*helps.EXAMPLES]
    assert [line.split()[0] for line in lines if line[:9].strip() in COMMANDS and line.startswith("  ")] == [*COMMANDS]
    assert [*helps.COMMANDS] == [*COMMANDS]
    assert call() == (0, page, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_and_json(call, name):
    code, page, _ = call(name, "--help")
    assert code == 0
    assert f"\n  regard {name}" in page
    assert "\n  --json" in page
    assert "REGARD_" not in page or name == "audit"


def test_one_set_of_names():
    made = typer.main.get_command(app)
    for name in ("audit", "compare", "trial"):
        spelled = [one.opts for one in made.commands[name].params]
        for pair in (
            ["--text-column", "--text"],
            ["--label-column", "--target-column", "--label"],
            ["--limit", "--examples"],
        ):
            assert pair in spelled
    assert shared.TASKS == TASKS
    assert tuple(READY) == shared.RECIPES


def test_completion():
    def completed(*words: str) -> list[str]:
        given = {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return subprocess.run([REGARD], env=os.environ | given, capture_output=True, text=True).stdout.split()

    assert completed("regard", "au") == ["audit"]
    assert completed("regard", "trial", "agr") == ["agreement"]
    assert completed("regard", "audit", "--planted", "copi") == ["copies", "copied_columns"]
    shown = subprocess.run(["bash", "-c", f"{REGARD} --show-completion; true"], capture_output=True, text=True)
    assert "_REGARD_COMPLETE=complete_bash" in shown.stdout


def test_import_is_lazy_and_complete():
    said = in_python(
        "import sys, regard; before = {'torch', 'numpy', 'pandas', 'rich'} & {*sys.modules}; "
        "print(before, {'audit', 'trace', 'data', '__version__'} <= {*dir(regard)}, regard.errors.__name__, "
        "hasattr(regard, 'nothing'), hasattr(regard, '__wrapped__'), regard.locating.__name__)"
    )
    assert said == "set() True regard.errors False False regard.locating"
    (block,) = [one for one in ast.parse(Path(regard.__file__).read_text()).body if isinstance(one, ast.If)]
    told = {name.asname: one.module for one in block.body if isinstance(one, ast.ImportFrom) for name in one.names}
    homes = {name: "regard" if home == name else f"regard.{home}" for name, home in regard.HOMES.items()}
    assert told == homes
    assert [*regard.HOMES] == sorted(regard.HOMES)


def test_colours_are_for_terminals_that_want_them(monkeypatch, capsys):
    from regard.cli import _complain

    for given, red in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with monkeypatch.context() as patched:
            patched.setattr("sys.stderr.isatty", lambda: True)
            patched.delenv("NO_COLOR", raising=False)
            patched.setenv("TERM", "xterm")
            for name, value in given.items():
                patched.setenv(name, value)
            _complain("no")
        assert ("\x1b[31m" in capsys.readouterr().err) is red
