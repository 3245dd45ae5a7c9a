"""All commands, and the first page of help."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

import regard
from regard.cli import audits, helps, judging, learning, looking, probing


class Front(TyperGroup):
    """Its help fits a screen: examples, then commands in the order in which they are used."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Flags that are not given are False, not None: typer would import pydantic to find that out."""
        found = super().get_params(ctx)
        for one in found:
            if isinstance(one, TyperOption) and one.is_flag and one.default is None:
                one.default = False
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Written by hand: the usual page has 40 lines."""
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"

        def strong(text: str) -> str:
            return text if plain else typer.style(text, bold=True)

        examples = [f"  {one:<42}{f'# {about}' if about else ''}".rstrip() for one, about in helps.EXAMPLES.items()]
        commands = [f"  {strong(f'{name:<9}')}{about}" for name, about in helps.COMMANDS.items()]
        formatter.write("\n".join([
            strong("Examples:"), *examples, "",
            "Read attention of any PyTorch model, explain by it, and put that on trial.", "",
            strong("Commands:"), *commands,
            f"{strong('Usage:')} regard COMMAND …; every command has --help with examples, and --json.",
            "Beside: --version, --install-completion, --show-completion.",
        ]))  # fmt: skip


class Command(TyperCommand):
    """Its help is plain: whole examples to copy, and room for words."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Paragraphs are wrapped, examples are not."""
        for paragraph in (self.help or "").strip().split("\n\n"):
            formatter.write_paragraph()
            if paragraph.startswith("* "):
                formatter.write(paragraph.replace("* `", "  ").replace("`", "") + "\n")
            else:
                formatter.write_text(paragraph.replace("`", "").replace("\n", " "))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Without environment variables and other spellings at every option."""
        for one in self.params:
            if isinstance(one, TyperOption):
                one.show_envvar, one.opts = False, one.opts[:1]
        super().format_options(ctx, formatter)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "audit": (audits.audit, helps.AUDIT_HELP), "report": (audits.report, helps.REPORT_HELP),
    "diff": (audits.diff, helps.DIFF_HELP), "doctor": (looking.doctor, helps.DOCTOR_HELP),
    "trace": (looking.trace, helps.TRACE_HELP), "explain": (looking.explain, helps.EXPLAIN_HELP),
    "compare": (judging.compare, helps.COMPARE_HELP), "trial": (judging.trial, helps.TRIAL_HELP),
    "heads": (probing.heads, helps.HEADS_HELP), "fit": (learning.fit, helps.FIT_HELP),
    "methods": (looking.methods, helps.METHODS_HELP), "trials": (judging.trials, helps.TRIALS_HELP),
    "probes": (probing.probes, helps.PROBES_HELP),
}  # fmt: skip


def made(names: Iterable[str]) -> typer.Typer:
    """The command line with some of its commands: to make all of them takes longer than an answer should."""
    app = typer.Typer(
        cls=Front, pretty_exceptions_enable=False, rich_markup_mode=None,
        context_settings={"auto_envvar_prefix": "REGARD", "max_content_width": 100},
    )  # fmt: skip
    app.callback()(_root)
    for name in names:
        function, said = COMMANDS[name]
        app.command(name, help=said, cls=Command)(function)
    return app


app = made(COMMANDS)
