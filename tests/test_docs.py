"""Documentation that cannot rot: code blocks run, names and commands are checked against each other."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import typer

import regard
from regard import errors

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted(module.name for module in pkgutil.walk_packages(regard.__path__, "regard."))


def blocks(page: Path) -> str:
    """All Python blocks of a page, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_blocks_run(page, tmp_path, monkeypatch, smollm_path):
    monkeypatch.chdir(tmp_path)
    program = blocks(page).replace("path/to/SmolLM2.gguf", str(smollm_path))
    exec(compile(program, page.name, "exec"), {"__name__": "__docs__"})


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_public_names_are_sorted_and_shadow_no_module():
    assert regard.__all__ == sorted(regard.__all__)
    for name in MODULES:
        importlib.import_module(name)
    for name in regard.__all__:
        value = getattr(regard, name)
        assert inspect.ismodule(value) or callable(value), f"regard.{name} is shadowed by a module of that name"
        if callable(value) and not inspect.isclass(value):
            assert not inspect.ismodule(value)


def test_the_tree_of_exceptions_is_complete():
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__))
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.RegardError)
    }
    assert drawn == defined - {"RegardError"}


def test_every_command_is_in_the_readme():
    from regard.cli import app

    readme = (ROOT / "README.md").read_text()
    for command in typer.main.get_command(app).commands:
        assert f"regard {command}" in readme


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}, link


def test_citations_are_in_the_bibliography():
    keys = set(re.findall(r"@\w+\{(\w+),", (ROOT / "src/regard/references.bib").read_text()))
    assert "jain2019attention" in keys
    cited = set()
    for file in (ROOT / "src").rglob("*.py"):
        cited |= set(re.findall(r"`([a-z]+\d{4}[a-z]+)`", file.read_text()))
    assert cited
    assert cited <= keys


def test_rtdl_takes_at_most_15_lines():
    page = (ROOT / "docs" / "any-module.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*FTTransformer[^`]*)```", page)
    lines = [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 15


def test_size_promises():
    files = {file: file.read_text().splitlines() for file in (ROOT / "src").rglob("*.py")}
    assert {file.name: len(lines) for file, lines in files.items() if len(lines) > 400} == {}
