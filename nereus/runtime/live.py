"""How is a run put together on this machine? Model, keys, bus, store, processes, journal, display: then the supervisor.

Owner: the supervisor process. Everything opened here is closed here, in reverse order, however the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO, cast

import msgspec
import structlog
import xxhash
from rich.console import Console

from nereus.actors.names import OPERATOR, RELAY, REWARD, SUPERVISOR, slot_worker
from nereus.actors.slot import modules_for
from nereus.algo.sampler import Cursor
from nereus.backends.manifest import MODEL_FOLDER
from nereus.backends.recipe import beginning
from nereus.bus.keys import ensure_keys
from nereus.bus.zeromq import ZmqServer
from nereus.config import JobConfig
from nereus.core.plan import POLICY_TRAINING, Plan
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError, NereusError
from nereus.runtime import journal as record
from nereus.runtime.adaptation import Adaptation
from nereus.runtime.checkpoints import MODEL_SUFFIXES, CheckpointStore
from nereus.runtime.dataset import Dataset, open_dataset
from nereus.runtime.display import Display, make_display
from nereus.runtime.folder import RunFolder
from nereus.runtime.folder import State as FolderState
from nereus.runtime.journal import Journal, read_journal, replay
from nereus.runtime.logs import configure_logs
from nereus.runtime.metrics import read_metrics
from nereus.runtime.observer import RunObserver
from nereus.runtime.outlet import Outlet
from nereus.runtime.placement import initial_plan, slots_ever
from nereus.runtime.pool import cluster_of, starting_estimate
from nereus.runtime.processes import Exited, LocalProcesses
from nereus.runtime.readopt import Takeover, estate_of, gather, send_away, take_over
from nereus.runtime.regroup import Restores, StateLost
from nereus.runtime.schedule import Planning
from nereus.runtime.searching import Answered, ProcessSearcher
from nereus.runtime.summary import Summary, summarize
from nereus.runtime.supervisor import Supervisor
from nereus.runtime.surroundings import Launcher, LeftAtOnce, Origin, Outcome, RunFailed
from nereus.runtime.wire import Wire, store_config

EXIT_LEFT_AT_ONCE = 130

GATHER_S = 15.0
"""How long live workers may take to come, after they must have noticed that their supervisor is gone."""

log = structlog.get_logger()


async def supervise(
    config: JobConfig, folder: RunFolder, *, resume: Path | None, local_workers: bool, readopt: bool = False
) -> int:
    """Run a job to its end; return the exit code. Failures are ``NereusError`` with the whole explanation.

    ``readopt``: workers that have outlived the supervisor before are taken over, if they can be.
    """
    configure_logs(
        file=folder.logs / "supervisor.log",
        log_format=config.run.log_format,
        level=config.run.log_level,
        run=folder.name,
        epoch=0,
    )
    with contextlib.ExitStack() as open_until_the_end:
        console = Console()
        if not console.is_terminal:
            outlet = open_until_the_end.enter_context(Outlet(sys.stdout.fileno()))
            console = Console(file=cast(TextIO, outlet))
        return await _shown(config, folder, console, resume, local_workers=local_workers, readopt=readopt)


async def _shown(
    config: JobConfig, folder: RunFolder, console: Console, resume: Path | None, *, local_workers: bool, readopt: bool
) -> int:
    """Run a job to its end and show how it goes on ``console``."""
    display = make_display(console, run=folder.name, steps=config.run.steps)
    folder.write_status("starting")
    display.start()
    outcome = Outcome("ended by an unexpected error", finished=False)
    failure: BaseException | None = None
    try:
        outcome = await _to_the_end(config, folder, display, resume, local_workers=local_workers, readopt=readopt)
    except NereusError as error:
        failure = error
        outcome = Outcome(str(error), finished=False)
    finally:
        if folder.owned:
            _conclude(config, folder, display, outcome, failure)
        else:
            display.close()
    if isinstance(failure, LeftAtOnce):
        return EXIT_LEFT_AT_ONCE
    if failure:
        log.error("run failed", reason=str(failure))
        raise failure
    return 0


def _conclude(
    config: JobConfig, folder: RunFolder, display: Display, outcome: Outcome, failure: BaseException | None
) -> None:
    """Say in the run folder and on the display how the run has ended."""
    progress = read_progress(folder)
    state = _state(outcome, failure)
    folder.write_status(state, step=progress.step, version=progress.version, reason=outcome.reason)
    if isinstance(failure, ConfigError):
        display.close()  # the refusal is all there is to say
    else:
        display.close(_summary(folder, progress, outcome.reason, ok=failure is None), _paths(folder, config))


async def _to_the_end(
    config: JobConfig,
    folder: RunFolder,
    display: Display,
    checkpoint: Path | None,
    *,
    local_workers: bool,
    readopt: bool,
) -> Outcome:
    """Run; when the trained state is lost with its last copy, go on from the newest checkpoint that is whole."""
    restores = Restores()
    while True:
        assembly = _Assembly(config, folder, display, local_workers=local_workers)
        try:
            return await assembly.run(checkpoint, readopt=readopt)
        except asyncio.CancelledError:
            if not assembly.interrupted:
                raise
            return Outcome(f"left before the run had begun ({assembly.interrupted})", finished=False)
        except StateLost as lost:
            step = read_progress(folder).step
            if assembly.interrupted or not restores.allowed(step):
                raise RunFailed(f"{lost}; resume with --resume") from lost
            search = CheckpointStore(folder.checkpoints, keep=config.checkpoint.keep).newest()
            for damage in search.passed_over:
                display.event(f"checkpoint passed over: {damage}", "warning")
            checkpoint = search.folder or checkpoint
            source = checkpoint.name if checkpoint else "the start: there is no checkpoint yet"
            display.event(f"{lost}; going on from {source}", "warning")
            log.warning("trained state lost", why=str(lost), checkpoint=source, step=step)
            folder.begin_attempt()
            readopt = False


def _state(outcome: Outcome, failure: BaseException | None) -> FolderState:
    """Return what STATUS says about a run that has ended so."""
    if failure and not isinstance(failure, LeftAtOnce):
        return "failed"
    return "finished" if outcome.finished else "stopped"


def read_progress(folder: RunFolder) -> record.Progress:
    """Return how far the run has come by its journal."""
    if not folder.journal.exists():
        return record.Progress()
    return replay(read_journal(folder.journal).entries)


def _summary(folder: RunFolder, progress: record.Progress, reason: str, *, ok: bool) -> Summary:
    return summarize(read_metrics(folder.metrics), progress, run=folder.name, outcome=reason, ok=ok)


def _paths(folder: RunFolder, config: JobConfig) -> list[tuple[str, str]]:
    """Write the report and say where what lies."""
    paths = [("run folder", str(folder.path))]
    if config.track.report and folder.metrics.exists() and folder.metrics.stat().st_size:
        from nereus.runtime.report import write_report

        paths.append(("report", str(write_report(folder.path))))
    return paths


class _Assembly:
    """The parts of one run."""

    def __init__(self, config: JobConfig, folder: RunFolder, display: Display, *, local_workers: bool) -> None:
        self._config = config
        self._folder = folder
        self._display = display
        self._local_workers = local_workers
        self._supervisor: Supervisor | None = None
        self.interrupted = ""
        """The signal that asked the run to end."""

    async def run(self, checkpoint: Path | None, *, readopt: bool = False) -> Outcome:
        """Prepare, run, and tear down."""
        config, folder = self._config, self._folder
        async with contextlib.AsyncExitStack() as stack:
            self._catch_signals(stack)
            # What can be refused comes before what takes long.
            plan = initial_plan(config)
            ensure_keys(folder.keys, [SUPERVISOR, OPERATOR, RELAY, REWARD, *map(slot_worker, slots_ever(config))])
            endpoint = await Wire(SUPERVISOR, folder.keys, config).serve(config.bus.port)
            stack.push_async_callback(endpoint.close)
            dataset = open_dataset(config.data)
            self._display.event(dataset.description)
            processes = LocalProcesses(
                folder.logs,
                preload=_preload(config) if self._local_workers else (),
                place=folder.forkserver,
                orphan_s=config.bus.orphan_s,
            )
            stack.push_async_callback(self._end_processes, processes)
            stack.callback(folder.withdraw)
            takeover = await self._take_over(endpoint, processes, dataset) if readopt else None
            await processes.open()  # it imports while the rest is prepared
            folder.announce(endpoint.address)
            checkpoints = CheckpointStore(folder.checkpoints, keep=config.checkpoint.keep)
            for leftover in checkpoints.clean():
                self._display.event(f"removed {leftover.name}: an earlier attempt left it half-done", "warning")
            origin: Origin | None
            if takeover is not None:
                plan = takeover.estate.plan
                model = folder.configs / "model"
                origin = Origin(checkpoint or model, model, takeover.step, takeover.version, takeover.cursor)
            else:
                origin = self._origin(checkpoint, dataset)
            if origin is None:
                made = await self._model()
                origin = Origin(made, self._keep_model_files(made))
            journal = Journal(folder.journal)
            stack.callback(journal.close)
            started = self._run_started(origin, dataset)
            journal.append(*(takeover.records(started) if takeover else [started]))
            store_config(folder, config)
            store = await self._start_store(processes, plan)
            observer = RunObserver(config, folder, self._display)
            stack.callback(observer.close)
            if takeover is not None:
                observer.taken_over(takeover.step, takeover.version)
            supervisor = Supervisor(
                config,
                plan,
                run_id=folder.name,
                attempt=folder.attempt,
                store=store,
                origin=origin,
                endpoint=endpoint,
                launcher=self._launcher(processes, endpoint.address),
                journal=journal,
                dataset=dataset,
                checkpoints=checkpoints,
                observer=observer,
                adapt=_adaptation(config, plan, origin, journal),
                takeover=takeover,
                fence=folder.require_owned,
            )
            self._supervisor = supervisor
            folder.write_status("running", step=origin.step, version=origin.version)
            self._display.status("going on with live workers" if takeover else "starting workers")
            outcome: Outcome | None = None
            try:
                outcome = await supervisor.run()
                return outcome
            finally:
                error = sys.exception()
                reason = outcome.reason if outcome else str(error)
                if folder.owned:
                    self._display.status("stopping workers")
                    await supervisor.leave(reason)
                    journal.append(record.RunEnded(reason=reason, ok=outcome is not None))

    async def _end_processes(self, processes: LocalProcesses) -> None:
        """End all processes of the run, unless they are another supervisor's by now."""
        await (processes.stop(grace_s=2.0) if self._folder.owned else processes.abandon())

    async def _take_over(self, endpoint: ZmqServer, processes: LocalProcesses, dataset: Dataset) -> Takeover | None:
        """Bring workers that have outlived the supervisor before under this one; None: there are none to go on with.

        ``StateLost`` if there were, and no trainer unit is whole.
        """
        folder, config = self._folder, self._config
        estate = estate_of(read_journal(folder.journal).entries) if folder.journal.exists() else None
        if estate is None or not await processes.adopt():
            return None
        why = ""
        if estate.started.config != _fingerprint(config):
            why = "the settings have changed"
        elif estate.started.data != dataset.fingerprint:
            why = "the data set has changed"
        if why:
            self._display.event(f"the workers that are left are not taken over: {why}", "warning")
            await processes.clear()
            return None
        self._display.status("waiting for the workers that are left")
        endpoint.advance(estate.plan.epoch)
        folder.announce(endpoint.address)
        everybody = tuple(estate.living)
        found = await gather(
            endpoint,
            estate,
            folder.name,
            lambda: processes.running if self._local_workers else everybody,
            timeout_s=config.bus.liveness_s + GATHER_S,
        )
        timeout_s = config.cluster.group_timeout_s + config.bus.liveness_s
        try:
            return await take_over(endpoint, estate, found, timeout_s=timeout_s)
        except StateLost as lost:
            await send_away(endpoint, found, str(lost))
            raise

    def _origin(self, checkpoint: Path | None, dataset: Dataset) -> Origin | None:
        """Return what a resumed run goes on from."""
        if checkpoint is None:
            return None
        extra = CheckpointStore(checkpoint.parent, keep=self._config.checkpoint.keep).read(checkpoint)
        if extra["data"] != dataset.fingerprint:
            raise ConfigError(
                "the data set is not the one that the checkpoint was trained on",
                where="data.source",
                remedy="restore the data set, or start a new run from an exported model",
            )
        self._display.event(f"going on from {checkpoint} (step {extra['step']})")
        cursor = msgspec.convert(extra["cursor"], Cursor)
        model = self._keep_model_files(checkpoint / MODEL_FOLDER)
        return Origin(checkpoint, model, extra["step"], extra["version"], cursor)

    def _keep_model_files(self, source: Path) -> Path:
        """Copy the model's configuration and tokenizer files into the run folder, where rollouts read them."""
        target = self._folder.configs / "model"
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            if path.suffix in MODEL_SUFFIXES:
                shutil.copyfile(path, target / path.name)
        return target

    async def _model(self) -> Path:
        """Return the model folder.

        What a recipe describes is made first, unless it has been: by a process of its own (this one imports no torch).
        """
        model = self._config.model
        folder = beginning(model)
        if model.path:
            return folder
        if folder.is_dir():
            self._display.event(f"warm start: {folder} is in the cache")
            return folder
        self._display.status("making the model")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "nereus.backends.torch.warmstart",
            model.recipe,
            model.cache,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        last = ""
        try:
            async for line in process.stdout:
                last = line.decode().strip()
                self._display.event(last)
            complaint = (await process.stderr.read()).decode().strip()
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if code == 2:
            raise ConfigError(complaint.splitlines()[-1], where="model.recipe", remedy="correct the recipe")
        if code:
            raise NereusError(f"the recipe {model.recipe} failed: {complaint.splitlines()[-1] if complaint else code}")
        return Path(last)

    def _run_started(self, origin: Origin, dataset: Dataset) -> record.RunStarted:
        return record.RunStarted(
            run=self._folder.name,
            attempt=self._folder.attempt,
            config=_fingerprint(self._config),
            data=dataset.fingerprint,
            seed=self._config.run.seed,
            wall=time.time(),
            step=origin.step,
            version=origin.version,
            cursor=origin.cursor.frontier,
        )

    def _launcher(self, processes: LocalProcesses, address: str) -> Launcher:
        if self._local_workers:
            return _WorkerLauncher(processes, self._folder, address)
        command = " ".join(_worker_arguments(self._folder, "NAME", address))
        self._display.event(f"waiting for workers; start each with: python -m {command}")
        return _ExternalLauncher(processes)

    async def _start_store(self, processes: LocalProcesses, plan: Plan) -> str:
        """Start the rendezvous store of the process groups; return ``host:port`` (empty: a lone trainer needs none).

        A trainer that no plan change can give company is alone for ever.
        """
        line = processes.service("store")  # an adopted one
        plans = (plan, initial_plan(self._config))  # what is taken over may have shrunk
        fixed = self._config.adapt.mode == "off" and not self._config.adapt.at
        if not line and fixed and all(sum(len(emu.slots) for emu in each.of(POLICY_TRAINING)) == 1 for each in plans):
            return ""
        arguments = ["nereus.backends.torch.store", "--host", self._config.bus.host, "--port", "0"]
        line = line or await processes.start_announced("store", arguments, timeout_s=self._config.bus.start_timeout_s)
        announced = json.loads(line)
        return f"{announced['host']}:{announced['port']}"

    def _catch_signals(self, stack: contextlib.AsyncExitStack) -> None:
        """Pass interrupts on to the supervisor; before there is one, nothing is lost by leaving at once."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt(name: str) -> None:
            self.interrupted = name
            if self._supervisor is not None:
                self._supervisor.interrupt(name)
            else:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, signal.Signals(number).name)
            stack.callback(loop.remove_signal_handler, number)


def _adaptation(
    config: JobConfig, plan: Plan, origin: Origin, journal: Journal
) -> Callable[[Callable[[Answered], None]], Planning] | None:
    """Return what makes the decider about plans; None for a job whose plans are given."""
    if config.adapt.mode == "off":
        return None
    shape = ModelShape.from_config(json.loads((origin.model / "config.json").read_bytes()))
    cluster = cluster_of(config)
    return lambda report: Adaptation(
        config,
        plan,
        step=origin.step,
        estimate=starting_estimate(config, shape, cluster),
        cluster=cluster,
        searcher=ProcessSearcher(),
        journal=journal,
        report=report,
    )


def _fingerprint(config: JobConfig) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(config, order="deterministic"))


def _preload(config: JobConfig) -> tuple[str, ...]:
    """Return the modules that the workers of this run import."""
    return ("nereus.actors.slot", "nereus.actors.weights", "nereus.actors.reward", *modules_for(config))


def _worker_arguments(folder: RunFolder, worker: str, address: str) -> list[str]:
    """Return what follows ``python -m`` to start a worker of the run."""
    place = ["--run", str(folder.path), "--attempt", str(folder.attempt)]
    return ["nereus.runtime.worker", *place, "--worker", worker, "--supervisor", address]


class _WorkerLauncher:
    """Starts workers of one run as local processes."""

    def __init__(self, processes: LocalProcesses, folder: RunFolder, address: str) -> None:
        self._processes = processes
        self._folder = folder
        self._address = address

    @property
    def exits(self) -> asyncio.Queue[Exited]:
        return self._processes.exits

    @property
    def running(self) -> Mapping[str, int]:
        return self._processes.running

    async def start(self, worker: str) -> int:
        return await self._processes.start(worker, _worker_arguments(self._folder, worker, self._address))

    def kill(self, worker: str) -> None:
        self._processes.kill(worker)

    async def wait(self, *, timeout_s: float) -> tuple[str, ...]:
        return await self._processes.wait(timeout_s=timeout_s)

    async def stop(self, *, grace_s: float) -> None:
        await self._processes.stop(grace_s=grace_s)


class _ExternalLauncher:
    """Leaves starting and ending of workers to somebody else: a batch system, or a person."""

    def __init__(self, processes: LocalProcesses) -> None:
        self._processes = processes

    @property
    def exits(self) -> asyncio.Queue[Exited]:
        return self._processes.exits

    @property
    def running(self) -> Mapping[str, int]:
        return {}

    async def start(self, worker: str) -> int:
        return 0

    def kill(self, worker: str) -> None:
        """Cannot be done from here; the worker's old incarnation is refused if it comes back."""

    async def wait(self, *, timeout_s: float) -> tuple[str, ...]:
        return ()

    async def stop(self, *, grace_s: float) -> None:
        """Workers leave on Shutdown, or when they miss the supervisor."""
