"""The command line as a whole: its commands, where settings come from, and how errors end."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from darknight import __version__
from darknight.cli.audit import audit
from darknight.cli.bench import bench
from darknight.cli.enclave import enclave
from darknight.cli.fleet import fleet
from darknight.cli.infer import infer
from darknight.cli.models import models
from darknight.cli.plan import plan
from darknight.cli.seal import seal
from darknight.cli.settings_file import Kind, read_settings_file
from darknight.cli.submit import submit_command
from darknight.cli.train import train
from darknight.cli.verify import verify
from darknight.cli.worker import WORKER_CONTEXT, WORKER_OPTIONS, worker
from darknight.errors import DarKnightError, SchemeError, UsageError
from darknight.runtime import keep_memory

_STEADY = {"train", "infer", "enclave", "bench"}  # whose steps are alike; others give back what they do not need

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "DARKNIGHT"},
)
app.command("train")(train)
app.command("infer")(infer)
app.command("models")(models)
app.command("plan")(plan)
app.command("audit")(audit)
app.command("seal")(seal)
app.command("enclave")(enclave)
app.command("submit")(submit_command)
app.command("verify")(verify)
app.command("bench")(bench)
app.command("worker", context_settings=WORKER_CONTEXT, add_help_option=False)(worker)
app.add_typer(fleet, name="fleet")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"darknight {__version__}")
        raise typer.Exit


@app.callback()
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
    known = {**_options_of(context.command), "worker": WORKER_OPTIONS}
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
        command, asks_for_help = typer.main.get_command(app), not {"-h", "--help"}.isdisjoint(arguments)
        code = command.main(arguments, prog_name="darknight", standalone_mode=False, obj=asks_for_help)
        return code if isinstance(code, int) else 0
    except TyperException as error:
        message = error.format_message()  # empty where the help was printed instead
        return _complain(message, error.exit_code) if message else error.exit_code
    except (UsageError, SchemeError) as error:
        return _complain(str(error), 2)
    except DarKnightError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _complain(message: str, code: int) -> int:
    print(f"darknight: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def main() -> None:
    """The entry point of the installed script."""
    if _STEADY.intersection(sys.argv[1:2]):
        keep_memory()
    sys.exit(run(sys.argv[1:]))
