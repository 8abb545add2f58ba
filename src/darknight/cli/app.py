"""The command line as a whole: its commands, where settings come from, and how errors end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from darknight import __version__
from darknight.cli.settings_file import Kind, read_settings_file
from darknight.errors import DarKnightError, SchemeError, UsageError

# Each is loaded when it is asked for: what the others need takes seconds and tens of megabytes.
COMMANDS: Mapping[str, Callable[[], Any]] = {
    "train": lambda: import_module("darknight.cli.train").train,
    "infer": lambda: import_module("darknight.cli.infer").infer,
    "models": lambda: import_module("darknight.cli.models").models,
    "plan": lambda: import_module("darknight.cli.plan").plan,
    "audit": lambda: import_module("darknight.cli.audit").audit,
    "seal": lambda: import_module("darknight.cli.seal").seal,
    "enclave": lambda: import_module("darknight.cli.enclave").enclave,
    "submit": lambda: import_module("darknight.cli.submit").submit_command,
    "verify": lambda: import_module("darknight.cli.verify").verify,
    "bench": lambda: import_module("darknight.cli.bench").bench,
    "report": lambda: import_module("darknight.cli.report").report,
    "worker": lambda: import_module("darknight.cli.worker").worker,
    "fleet": lambda: import_module("darknight.cli.fleet").fleet,
}
_STEADY = {"train", "infer", "enclave", "bench"}  # whose steps are alike; others give back what they do not need
_HELP = ["-h", "--help"]
# Everything after the command belongs to the worker's own reader of flags, its --help included.
_WORKER_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _app(arguments: list[str]) -> typer.Typer:
    """With the command that is asked for; with all of them if it is none, for the help and for what was meant."""
    wanted = next((each for each in arguments if not each.startswith("-")), "")
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": _HELP, "auto_envvar_prefix": "DARKNIGHT"},
    )
    app.callback()(darknight)
    if not wanted and "--version" in arguments:
        wanted = "verify"  # one that needs little
    for name in (wanted,) if wanted in COMMANDS else COMMANDS:
        command = COMMANDS[name]()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        elif name == "worker":
            app.command(name, context_settings=_WORKER_CONTEXT, add_help_option=False)(command)
        else:
            app.command(name)(command)
    return app


def whole_command() -> Any:
    """All of it as a tree of commands and their options, for whoever describes it."""
    return _command([])


def _command(arguments: list[str]) -> Any:
    command = typer.main.get_command(_app(arguments))
    _say_of_flags_that_they_take_no_value(command)
    return command


def _say_of_flags_that_they_take_no_value(command: Any) -> None:
    """The help would have <bool> behind each, as if `--resume true` could be written."""
    for parameter in command.get_params(typer.Context(command, help_option_names=_HELP)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _say_of_flags_that_they_take_no_value(each)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"darknight {__version__}")
        raise typer.Exit


def darknight(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, show_envvar=False, help="Show the version."),
    ] = False,
) -> None:
    """Train PyTorch models on accelerators that nobody has to trust.

    Settings come from flags, then from variables such as DARKNIGHT_TRAIN_EPOCHS, then from darknight.toml in the
    current directory: a table for each command, such as [train], [worker] or [fleet.check].
    """
    known: dict[str, Any] = {**{name: {} for name in COMMANDS}, **_options_of(context.command)}
    if context.invoked_subcommand == "worker":
        known["worker"] = import_module("darknight.cli.worker").WORKER_OPTIONS
    try:
        context.default_map = read_settings_file("darknight.toml", known, context.invoked_subcommand)
    except UsageError:
        if not context.obj:  # somebody who asks for help gets it
            raise


def _options_of(command: Any) -> dict[str, Any]:
    """What can be set: options of a command, or tables of options for the commands of a group."""
    if isinstance(commands := getattr(command, "commands", None), dict):
        return {name: _options_of(each) for name, each in commands.items()}
    options = [option for option in command.params if option.param_type_name == "option"]
    return {max(option.opts, key=len).removeprefix("--"): _kind_of(option) for option in options}


def _kind_of(option: Any) -> Kind:
    if option.multiple:
        return Kind.TEXTS
    return Kind.FLAG if option.is_flag else Kind.VALUE


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code. Errors become one line; only a bug still shows a traceback."""
    try:
        command, asks_for_help = _command(arguments), not set(_HELP).isdisjoint(arguments)
        code = command.main(arguments, prog_name="darknight", standalone_mode=False, obj=asks_for_help)
        return code if isinstance(code, int) else 0
    except TyperException as error:
        message = error.format_message()  # empty where the help was printed instead
        return _complain(_with_where_to_look(message, error), error.exit_code) if message else error.exit_code
    except (UsageError, SchemeError) as error:
        return _complain(str(error), 2)
    except DarKnightError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _with_where_to_look(message: str, error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    end = "" if message.endswith((".", "?")) else "."
    return f"{message}{end} {context.command_path} --help says how it is written."


def _complain(message: str, code: int) -> int:
    print(f"darknight: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def main() -> None:
    """The entry point of the installed script."""
    try:
        if _STEADY.intersection(sys.argv[1:2]):
            import_module("darknight.runtime").keep_memory()
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:  # loading torch takes seconds
        sys.exit(130)
