"""What can an operator do with Nereus from a shell?

Parses words and calls the code that does the work; nothing heavy is imported before a command needs it, so that help
and dry runs answer at once. Exit codes: 0 success, 1 failure, 2 wrong input, 130 interrupted twice.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from nereus.configuration.arguments import Overrides, complete_option, split_overrides
from nereus.errors import ConfigError
from nereus.runtime.daemon import EXIT_FAILURE, EXIT_OK, guarded, launch

Settings = Annotated[Overrides, Parameter(parse=False)]
"""The dotted overrides; ``execute`` takes them off the command line before it is parsed."""


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("nereus")
    except metadata.PackageNotFoundError:
        return "unknown (run from source, not installed)"


app = App(
    name="nereus",
    help="Reinforcement-learning post-training of language models that changes its own parallelism while it runs.",
    version=_version,
    help_format="plaintext",
    end_of_options_delimiter="--",
)
config_app = App(name="config", help="Look at settings and where they come from.")
app.command(config_app)


@app.command
def run(
    *files: Path,
    resume: str | None = None,
    run_dir: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    workers: Literal["local", "external"] = "local",
    settings: Settings,
) -> int:
    """Run a job to its end.

    Any setting can be overridden with its dotted name: --train.learning-rate 3e-4, --no-track.tensorboard (see "nereus
    config reference"). SIGINT or SIGTERM finishes the step, saves and leaves; a second one leaves at once.

    Parameters
    ----------
    files
        Job files (TOML); later ones win.
    resume
        Go on from a checkpoint: auto (the value if none is given), latest, a step, a run folder or a checkpoint folder.
    run_dir
        The run folder itself; by default a new one is made below run.dir.
    dry_run
        Print the resolved configuration, the plan, its memory and processes, and stop.
    workers
        Who starts the worker processes: this command, or something else.
    """
    _need_files(files)
    return launch(files, settings, resume=resume, run_dir=run_dir, dry_run=dry_run, local_workers=workers == "local")


@app.command
def status(folder: Path, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Show how a run is doing.

    Parameters
    ----------
    folder
        The run folder.
    json
        Print one JSON object.
    """
    from nereus.runtime.glance import glance, render

    seen = glance(folder)
    sys.stdout.write(render(seen, as_json=json))
    return EXIT_OK


@app.command
def report(folder: Path) -> int:
    """Write report.html for a run, and print where it is.

    Parameters
    ----------
    folder
        The run folder.
    """
    from nereus.runtime.folder import read_status

    read_status(folder)
    with _extras():
        print(importlib.import_module("nereus.runtime.report").write_report(folder))
    return EXIT_OK


@app.command
def export(
    folder: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None,
) -> int:
    """Write a checkpoint as a Hugging Face model folder.

    Parameters
    ----------
    folder
        The run folder, or one checkpoint.
    out
        The model folder to make.
    step
        Which checkpoint of the run (default: the newest).
    dtype
        Number format of the weights (default: that of the checkpoint).
    """
    words = [str(folder), str(out)]
    words += ["--step", str(step)] if step is not None else []
    words += ["--dtype", dtype] if dtype is not None else []
    return _tool("nereus.backends.torch.export", words)


@app.command(name="import")
def import_(source: Path, out: Path) -> int:
    """Turn a GGUF file into a Hugging Face model folder.

    Parameters
    ----------
    source
        The GGUF file.
    out
        The model folder to make.
    """
    if not source.is_file():
        raise ConfigError("no such file", where=str(source), remedy="name a GGUF file")
    return _tool("nereus.backends.torch.gguf", [str(source), str(out)])


@config_app.command
def show(*files: Path, why: str | None = None, settings: Settings) -> int:
    """Print the resolved configuration and where each value comes from.

    Parameters
    ----------
    files
        Job files (TOML); later ones win. Dotted overrides may follow.
    why
        Explain only this key, such as train.learning_rate.
    """
    from nereus.configuration import schema
    from nereus.configuration.load import load_job
    from nereus.configuration.render import to_toml
    from nereus.configuration.render import why as explain

    _need_files(files)
    job = load_job(files, settings)
    if why is None:
        sys.stdout.write(to_toml(job, provenance=True))
        return EXIT_OK
    name = schema.normalize(why)
    if name not in schema.settings():
        raise ConfigError(f"unknown key {name}", where="--why", remedy=schema.nearest(name))
    sys.stdout.write(explain(job, name))
    return EXIT_OK


@config_app.command
def reference() -> int:
    """Print the reference of all settings as Markdown."""
    from nereus.configuration import reference as module

    sys.stdout.write(module.reference())
    return EXIT_OK


@app.command
def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print the completion script of a shell; evaluate it in the shell's start file.

    Parameters
    ----------
    shell
        The shell.
    """
    sys.stdout.write(app.generate_completion(shell=shell))
    return EXIT_OK


def execute(words: Sequence[str]) -> int:
    """Run one command line and return its exit code; expected failures are one line on stderr."""
    return guarded(lambda: _execute(words))


def main() -> None:
    """Run the command line of this process."""
    sys.exit(execute(sys.argv[1:]))


def _execute(words: Sequence[str]) -> int:
    rest, overrides = split_overrides(words)
    try:
        command, bound, unparsed = app.parse_args(
            complete_option(rest, "--resume", "auto"), exit_on_error=False, print_error=False
        )
    except CycloptsError as error:
        raise ConfigError(
            _one_line(error), where="command line", remedy="see nereus --help, or nereus COMMAND --help"
        ) from None
    extra: dict[str, Any] = {}
    if "settings" in unparsed:
        extra["settings"] = overrides
    elif overrides:
        raise ConfigError(
            f"--{overrides[0][0]} is a setting, and this command takes none",
            where="command line",
            remedy="settings belong to nereus run and nereus config show",
        )
    result = command(*bound.args, **bound.kwargs, **extra)
    return result if isinstance(result, int) else EXIT_OK


def _one_line(error: CycloptsError) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _need_files(files: Sequence[Path]) -> None:
    if not files:
        raise ConfigError("no job file is named", where="command line", remedy="write nereus run JOB.toml")


@contextmanager
def _extras() -> Iterator[None]:
    """Say which package is missing when what is done here needs one that only an extra brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("nereus"):
            raise
        raise ConfigError(
            f"this command needs the Python package {error.name}",
            where="installation",
            remedy="pip install 'nereus[train]'",
        ) from None


def _tool(module: str, words: Sequence[str]) -> int:
    """Run the command-line entry ``main(words) -> int`` of a backend's tool in this process."""
    with _extras():
        code = importlib.import_module(module).main(words)
    return code if isinstance(code, int) else EXIT_FAILURE
