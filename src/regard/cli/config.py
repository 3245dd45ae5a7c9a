"""Options from a TOML file: the same names as on the command line, which goes first, then the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from regard.errors import InputError, nearest


def take(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: what the file says becomes the defaults of this command."""
    if path is None or ctx.resilient_parsing:
        return path
    import tomllib

    try:
        said = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"--config {path} cannot be read: {problem}. Pass a TOML file.") from None
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"--config {path} is no TOML: {problem}. Write lines such as: limit = 200") from None
    known = {
        name.removeprefix("--").replace("-", "_"): one
        for one in ctx.command.params
        for name in one.opts
        if name.startswith("--") and one.name not in ("config", "help")
    }
    given: dict[str, Any] = {}
    for name, value in said.items():
        option = known.get(name.replace("-", "_"))
        if option is None:
            hint = nearest(name.replace("-", "_"), known)
            raise InputError(f"--config {path}: {name!r} is no option.{hint} There are {', '.join(sorted(known))}.")
        given[str(option.name)] = _checked(ctx, option, path, name, value)
    ctx.default_map = {**(ctx.default_map or {}), **given}
    return path


def _checked(ctx: typer.Context, option: Any, path: Path, name: str, value: Any) -> Any:
    """The value as the option takes it; lists may be written as lists."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = ",".join(value)
    wrong = isinstance(value, (dict, list)) or (option.is_flag is not isinstance(value, bool))
    value = [value] if option.multiple and not wrong else value
    try:
        if not wrong:
            option.process_value(ctx, value)
    except typer.BadParameter as problem:
        raise InputError(f"--config {path}: {name} = {value!r}: {problem.message}") from None
    if wrong:
        takes = "true or false" if option.is_flag else "a text, a number or a list of texts"
        raise InputError(f"--config {path}: {name} = {value!r} must be {takes}.")
    return value
