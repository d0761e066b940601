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

from nereus.errors import ConfigError
from nereus.runtime.exits import EXIT_FAILURE, EXIT_OK, guarded

Overrides = list[tuple[str, str]]
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
    from nereus.runtime.daemon import launch

    return launch(files, settings, resume=resume, run_dir=run_dir, dry_run=dry_run, local_workers=workers == "local")


@app.command
def plan(
    *,
    model: str | None = None,
    cluster: str | None = None,
    slots: int | None = None,
    algorithm: str = "grpo",
    asynchronous: Annotated[bool, Parameter(name="--async", negative=())] = False,
    lengths: str = "2048",
    response_mean: float | None = None,
    response_p95: float | None = None,
    batch: int = 128,
    group_size: int | None = None,
    minibatches: int = 1,
    epochs: int = 1,
    max_staleness: int = 1,
    reference: bool = True,
    reward_model: bool | None = None,
    critic: bool | None = None,
    tp: int | None = None,
    pp: int | None = None,
    fix: tuple[str, ...] = (),
    json: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
    emit: str | None = None,
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    target: Annotated[Path | None, Parameter(name="--to")] = None,
    diagram: str = "table",
) -> int:
    """Choose a plan for a job on a cluster and say why; or show how one plan becomes another.

    nereus plan --model llama-3.1-8b --cluster a100-64g --slots 32 --algorithm ppo --lengths 2048

    Parameters
    ----------
    model
        A model profile, a Hugging Face model folder, or its config.json.
    cluster
        A cluster profile, or a TOML file like it.
    slots
        How many slots (default: all of the cluster's).
    algorithm
        ppo, grpo or remax.
    asynchronous
        Generate beside training, on slots of its own.
    lengths
        Longest sequence in tokens (a quarter is prompt), or PROMPT+RESPONSE.
    response_mean
        Mean response where not all are longest; the tail is log-normal.
    response_p95
        95th percentile of responses (default: 2.2 times the mean).
    batch
        Prompts a step.
    group_size
        Responses a prompt (default: 8 for grpo, else 1).
    minibatches
        Optimizer updates over one batch.
    epochs
        How often training goes over a batch.
    max_staleness
        Versions a sample may be old when it is trained on; for --emit of asynchronous plans.
    reference
        Has the job a reference model?
    reward_model
        Is the reward a model on slots (default: not for grpo)?
    critic
        Has the job a critic (default: ppo has)?
    tp
        Tensor degree of all model-stages (default: chosen).
    pp
        Pipeline degree of all model-stages (default: chosen).
    fix
        Layout of one model-stage, such as policy.training=d4t2p1; may be repeated.
    json
        Print one JSON object.
    out
        Write the plan (a PLAN file) here too.
    emit
        Write the flags of another framework for the plan: verl, openrlhf or trl.
    source
        The PLAN file to start from.
    target
        The PLAN file to arrive at.
    diagram
        How to show the way from plan to plan: table, mermaid or dot.
    """
    from nereus.commands import plan as command
    from nereus.commands.question import Options

    if source is not None or target is not None:
        sys.stdout.write(command.show_transition(source, target, form=diagram, as_json=json))
        return EXIT_OK
    options = Options(
        model=model or "",
        cluster=cluster or "",
        slots=slots,
        algorithm=algorithm,
        asynchronous=asynchronous,
        reference=reference,
        reward_model=reward_model,
        critic=critic,
        lengths=lengths,
        response_mean=response_mean,
        response_p95=response_p95,
        batch=batch,
        group_size=group_size,
        minibatches=minibatches,
        epochs=epochs,
        max_staleness=max_staleness,
        tp=tp,
        pp=pp,
        fix=fix,
    )
    sys.stdout.write(command.show_plan(options, as_json=json, out=out, framework=emit))
    return EXIT_OK


@app.command
def simulate(
    *files: Path,
    trace: str | None = None,
    policy: str = "nereus",
    seed: int | None = None,
    mtbf: float = 0.0,
    run_dir: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    settings: Settings,
) -> int:
    """Run a job on simulated slots, on virtual time: the same decisions, at any size.

    nereus simulate launchers/simulated/grpo_8b.toml --trace h20-grpo

    Parameters
    ----------
    files
        Job files (TOML); later ones win. Dotted overrides may follow.
    trace
        What changes while it runs: the name of a trace that comes with Nereus, or a file.
    policy
        Who decides about plans: nereus, or a baseline.
    seed
        Of everything random in the simulated world (default: run.seed).
    mtbf
        Mean hours between failures of slots, at random; 0: only those of the trace.
    run_dir
        The run folder itself; by default a new one is made below run.dir.
    json
        Print one JSON object at the end.
    """
    _need_files(files)
    from nereus.commands import simulate as command

    return command.simulate(
        files, settings, trace=trace, policy=policy, seed=seed, mtbf_h=mtbf, run_dir=run_dir, as_json=json
    )


@app.command
def compare(
    *files: Path,
    trace: str | None = None,
    policies: str = "nereus,given",
    seeds: int = 1,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    paper: Annotated[bool, Parameter(negative=())] = False,
    quick: Annotated[bool, Parameter(negative=())] = False,
    only: str = "",
    settings: Settings,
) -> int:
    """Run a job on simulated slots under several policies, and put them side by side.

    nereus compare launchers/simulated/grpo_8b.toml --trace h20-grpo --policies nereus,given --seeds 3

    Leaves a page (comparison.html), its picture (PNG, SVG), the figures (JSON) and one run folder for each run.

    nereus compare --paper writes docs/evaluation.md: our figures beside those of the paper.

    Parameters
    ----------
    files
        Job files (TOML); later ones win. Dotted overrides may follow.
    trace
        What changes while it runs: the name of a trace that comes with Nereus, or a file.
    policies
        Who decides about plans: names with commas between; the first is what others are measured against.
    seeds
        So many runs of each, from run.seed on.
    out
        The folder to make (by default a new one below run.dir); with --paper, the document.
    json
        Print one JSON object.
    paper
        Measure what the paper measures, with fixed seeds; takes no job.
    quick
        With --paper: smaller and shorter, as the document then says.
    only
        With --paper: these sections (names with commas between), printed instead of written.
    """
    if paper:
        from nereus.commands.evaluate import evaluate

        if files:
            raise ConfigError("--paper takes no job", where="command line", remedy="leave the job files out")
        return evaluate(only=only, quick=quick, out=out)
    if quick or only:
        raise ConfigError("--quick and --only belong to --paper", where="command line", remedy="add --paper")
    _need_files(files)
    from nereus.commands import compare as command

    return command.compare(files, settings, trace=trace, policies=policies, seeds=seeds, out=out, as_json=json)


@app.command
def explain(folder: Path, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Tell what was decided in a run, and why.

    Parameters
    ----------
    folder
        The run folder, or its journal.
    json
        Print one JSON array.
    """
    from nereus.commands import explain as command

    sys.stdout.write(command.show(folder, as_json=json))
    return EXIT_OK


@app.command
def replay(folder: Path, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Tell a fresh controller what a run's own was told, and compare what it decides.

    Parameters
    ----------
    folder
        The run folder, of a live or a simulated run.
    json
        Print one JSON object.
    """
    from nereus.commands import replay as command

    return command.replay(folder, as_json=json)


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
def drain(folder: Path, slot: int) -> int:
    """Take a slot out of a running job: the next plan does without it, then its process leaves.

    Parameters
    ----------
    folder
        The run folder.
    slot
        The slot's number (see "nereus status").
    """
    from nereus.bus.loop import run as run_loop
    from nereus.runtime import operator

    print(run_loop(operator.drain(folder, slot)))
    return EXIT_OK


@app.command
def worker(*, join: Path) -> int:
    """Join a running job as one more slot, until the job ends or drains it.

    Parameters
    ----------
    join
        The run folder.
    """
    from nereus.bus.loop import run as run_loop
    from nereus.runtime import operator
    from nereus.runtime.worker import serve

    words = run_loop(operator.join(join))
    print(f"joining as {words[words.index('--worker') + 1]}", flush=True)
    return serve(words)


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
    rest, overrides = _split(words)
    try:
        command, bound, unparsed = app.parse_args(rest, exit_on_error=False, print_error=False)
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
            remedy="settings belong to nereus run, simulate, compare and config show",
        )
    result = command(*bound.args, **bound.kwargs, **extra)
    return result if isinstance(result, int) else EXIT_OK


def _split(words: Sequence[str]) -> tuple[list[str], Overrides]:
    """Take the settings off the command line, and complete ``--resume``; most commands have neither."""
    if not any(word == "--resume" or (word.startswith("--") and "." in word) for word in words):
        return list(words), []
    from nereus.configuration.arguments import complete_option, split_overrides

    rest, overrides = split_overrides(words)
    return complete_option(rest, "--resume", "auto"), overrides


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
