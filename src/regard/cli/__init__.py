"""The command line: arguments in, tables or JSON out. No logic."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

BAD_INPUT, STOPPED = 2, 130


def main() -> None:
    """Run the command line; what is refused is one line on stderr and exit code 2."""
    stopped: list[int] = []
    before = _listen(stopped)
    try:
        code = _run(sys.argv[1:] or ["--help"])
    except KeyboardInterrupt:
        code = STOPPED
    finally:
        signal.signal(signal.SIGINT, before)
    if stopped:
        code = STOPPED
        sys.stderr.write("\n" * sys.stderr.isatty() + _parting_words() + "\n")  # after the ^C of the terminal
    sys.exit(code)


def _run(given: list[str]) -> int:
    """The exit code."""
    import typer

    from regard.cli.commands import COMMANDS, made
    from regard.errors import RegardError
    from regard.progress import STAGE

    # ClickException, which is not where it was in every version of typer
    wrong_usage: type[Exception] = typer.BadParameter.__mro__[2]
    STAGE.logged = True
    try:
        app = made(given[:1] if given[0] in COMMANDS else COMMANDS)
        # Not typer's own way out: it would import a lot to draw a frame around a sentence.
        return app(given, prog_name="regard", standalone_mode=False) or 0
    except (RegardError, OSError) as problem:
        _complain(str(problem))
    except wrong_usage as problem:
        said: Any = problem
        where = getattr(said.ctx, "command_path", "regard") if hasattr(said, "ctx") else "regard"
        text = said.format_message()
        _complain(f"{text}{'' if text.endswith(('.', '?')) else '.'} See: {where} --help")
    return BAD_INPUT


def _complain(said: str) -> None:
    plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    sys.stderr.write(f"error: {said}\n" if plain else f"\x1b[31merror: {said}\x1b[0m\n")


def _listen(stopped: list[int]) -> Any:
    """Note when somebody presses Ctrl-C; who does it twice does not want to wait. What was done about it before."""

    def stop(number: int, frame: Any) -> None:
        if stopped:
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\n")  # a bar may have hidden the cursor
                sys.stderr.flush()
            os._exit(STOPPED)
        stopped.append(number)
        raise KeyboardInterrupt

    return signal.signal(signal.SIGINT, stop)


def _parting_words() -> str:
    given = sys.argv[1:]
    if given[:1] != ["audit"] or "--dry-run" in given:
        return "stopped."
    import shlex

    again = shlex.join(["regard", *given, *([] if "--resume" in given else ["--resume"])])
    return f"stopped; what was finished is kept. Go on with: {again}"


def __getattr__(name: str) -> Any:
    """`app`, when it is first asked for: a Ctrl-C while it is imported is heard by then."""
    if name != "app":
        raise AttributeError(f"module 'regard.cli' has no attribute {name!r}")
    from regard.cli.commands import app

    return app
