"""`anabranch run module:consumer`: runs your consumer, in this process or as several worker processes.

The parent forwards signals to its workers: the first stops them gracefully, the second shortens their deadline, the
third kills them. If the parent dies, its pipe to the workers closes, and they stop gracefully.

With `--health-port`, each worker serves its own health on a free port of the loopback interface, and sends the port
to the parent through a pipe. For each request the parent asks all workers (rule O2). The fleet is live if all running
workers are live, and ready if all workers are ready. Their metrics are served together, with the label `worker`.
"""

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from anabranch._cli.options import bounded_integer, positive_integer
from anabranch._cli.output import DONE, FAILED, CleanFormatter, CommandFailed, counted, one_line, say, say_traceback
from anabranch._engine.tasks import on_parent_exit
from anabranch._http.server.exchange import Request, Response
from anabranch._http.server.http_server import HttpServer
from anabranch.errors import AnabranchError, ConfigurationError, ConsumerFailedError, ShardStoppedError
from anabranch.health import HealthApp, HealthServer, json_page, metrics_page, refusal_of
from anabranch.logs import JsonFormatter
from anabranch.metrics.prometheus import text_of

if TYPE_CHECKING:
    from anabranch.consumer import Consumer
    from anabranch.reports import StopReport


def find_consumer(target: str) -> "Consumer[Any]":
    from anabranch.consumer import Consumer

    module_name, colon, path = target.partition(":")
    if not (colon and module_name and path):
        raise ConfigurationError(f"{target!r} is not MODULE:NAME; write for example app:consumer")
    if module_name.endswith(".py") or os.sep in module_name:
        name = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigurationError(f"{module_name!r} is a file: name it as a module, {name}:{path}")
    module = _import(module_name)
    found: Any = module
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ConfigurationError(f"module {module_name!r} has no {path!r}{_consumers_in(module, Consumer)}")
        found = getattr(found, attribute)
    if not isinstance(found, Consumer):
        kind = "class" if isinstance(found, type) else "function" if callable(found) else type(found).__name__
        article = "an" if kind[0] in "aeiouAEIO" else "a"
        raise ConfigurationError(f"{target} is {article} {kind}, not a Consumer{_consumers_in(module, Consumer)}")
    if not found.has_handler:
        decorators = f"@{path}.handler or @{path}.batch_handler()"
        raise ConfigurationError(f"{target} has no handler: decorate a function with {decorators}")
    return found


def _import(name: str) -> ModuleType:
    here = os.getcwd()  # noqa: PTH109 -- a path for sys.path
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            _show_traceback(error)
            raise CommandFailed(f"module {name!r} cannot be imported: {error}") from error
        raise ConfigurationError(f"there is no module {error.name!r}: looked in {here} and on Python's path") from None
    except ConfigurationError as error:
        _show_traceback(error)
        raise
    except Exception as error:
        _show_traceback(error)
        raise CommandFailed(f"module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _show_traceback(error: Exception) -> None:
    """The traceback from the user's own module on, without the import machinery."""
    trace = error.__traceback__
    while trace is not None and (
        "importlib" in trace.tb_frame.f_code.co_filename or trace.tb_frame.f_code is _import.__code__
    ):
        trace = trace.tb_next
    say_traceback(error, trace)


def _consumers_in(module: ModuleType, consumer_type: type) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, consumer_type))
    return f"; consumers there: {', '.join(names)}" if names else "; there is no consumer in that module"


_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPED_WHILE_STARTING: Final = {-signal.SIGTERM, 128 + signal.SIGINT}
_KILL_AT: Final = 3
_ASK_SECONDS: Final = 3.0
"""How long the parent waits for the health of a worker."""
_LOOPBACK: Final = "127.0.0.1"


Tell = Callable[[str, int], None]
"""Prints a line with its log level."""


def _tell_as(log_format: str) -> Tell:
    """For messages of the command itself: prints them to standard error in the format of the log."""
    if log_format == "json":
        return lambda line, level: logging.getLogger("anabranch.run").log(level, "%s", line)
    return lambda line, _: say(line)


async def run_workers(command: Sequence[str], count: int, tell: Tell, health: tuple[str, int] | None = None) -> int:
    """Returns the exit code. `health` is the host and the port on which the health of all workers is served."""
    lifeline, write_end = os.pipe()  # the workers stop when the write end closes
    workers = _Workers(lifeline, tell)
    loop = asyncio.get_running_loop()
    for number in _STOPPING:
        loop.add_signal_handler(number, workers.on_signal)
    server: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if health is not None:
        host, port = health
        server = HttpServer(partial(fleet_health, workers.health), host=host, port=port)
    try:
        async with server:
            for _ in range(count):
                await workers.start(command, serves_health=health is not None)
            process_ids = ", ".join(str(process.pid) for process in workers.processes)
            tell(f"{counted(count, 'worker')}: processes {process_ids}", logging.INFO)
            await workers.wait()
    finally:
        await workers.kill()
        os.close(lifeline)
        os.close(write_end)
    return workers.code


class _Workers:
    def __init__(self, lifeline: int, tell: Tell) -> None:
        self.code = 0
        self.processes: list[asyncio.subprocess.Process] = []
        self.health: list[WorkerHealth] = []
        """In the order of the processes; empty if no health is served."""
        self._tell = tell
        self._lifeline = lifeline
        self._signal_count = 0
        self._stopping = False

    async def start(self, command: Sequence[str], *, serves_health: bool) -> None:
        if self._stopping:
            return
        pipes = {"--lifeline": self._lifeline}
        if serves_health:
            self.health.append(WorkerHealth())
            pipes["--health-pipe"] = self.health[-1].write_end
        process = await asyncio.create_subprocess_exec(
            *command,
            *(f"{option}={pipe}" for option, pipe in pipes.items()),
            pass_fds=tuple(pipes.values()),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # only the parent gets Ctrl-C, and forwards it
        )
        self.processes.append(process)
        if serves_health:
            self.health[-1].started()
        if self._signal_count:  # a signal arrived while the process was created
            process.send_signal(signal.SIGTERM)

    async def wait(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, process in enumerate(self.processes):
                group.create_task(self._watch(process, self.health[number] if self.health else None))

    async def _watch(self, process: asyncio.subprocess.Process, worker: "WorkerHealth | None") -> None:
        code = await process.wait()
        if worker is not None:
            worker.end()
        if not code or (self._stopping and code in _STOPPED_WHILE_STARTING):
            return
        self.code = self.code or (code if code > 0 else 128 - code)  # after a signal, as shells do
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        left = sum(other.returncode is None for other in self.processes)
        rest = f": its shards go to {counted(left, 'other worker')}" if left and not self._stopping else ""
        self._tell(f"worker process {process.pid} ended with {how}{rest}", logging.ERROR)

    def on_signal(self) -> None:
        self._signal_count += 1
        self._stop(signal.SIGKILL if self._signal_count >= _KILL_AT else signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        for process in self.processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def kill(self) -> None:
        """Kills workers that still run when the command ends."""
        self._stop(signal.SIGKILL)
        for process in self.processes:
            await process.wait()


_EXAMPLES: Final = """\
examples:
  anabranch run app:consumer
  anabranch run billing.orders:consumer --workers 4
  anabranch run app:consumer --health-port 8080
  anabranch serve --create orders:4 -- anabranch run app:consumer

The consumer needs a handler: @consumer.handler or @consumer.batch_handler().
Ctrl-C and SIGTERM stop it gracefully: running calls may finish, checkpoints are
written, leases are released; a second signal does not wait for handlers. The
exit code is 1 if work was left or a shard is stopped at a failing record, else
0. A failed worker is not restarted: the others take over its shards, and its
exit code becomes that of the run. Workers also stop when their parent is gone.
"""
_FORMAT: Final = "%(asctime)s %(process)d %(levelname)s %(message)s"


def configure_logging(level: str, log_format: str = "text") -> None:
    """On standard error, unless the user's module has configured logging."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING)
        formatter = JsonFormatter() if log_format == "json" else CleanFormatter(_FORMAT)
        logging.getLogger().handlers[0].setFormatter(formatter)
        logging.getLogger("anabranch").setLevel(level.upper())


def add_log_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log", choices=("debug", "info", "warning", "error"), default="info",
        help="log level on standard error, unless your module configures logging (default: info)",
    )  # fmt: skip
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text",
        help="text, or one JSON object on each line with the fields of every event (default: text)",
    )  # fmt: skip


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run)
    target = "a Consumer in a module, relative to the current directory"
    parser.add_argument("target", metavar="MODULE:NAME", help=target)
    workers = "processes that share the work (default: 1)"
    parser.add_argument("--workers", type=positive_integer, default=1, metavar="N", help=workers)
    health = "serve /live, /ready, /metrics and /status.json there, for all workers together"
    parser.add_argument("--health-port", type=bounded_integer("port", 0, 65_535), metavar="PORT", help=health)
    # Set by the parent for its workers:
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--health-pipe", type=int, help=argparse.SUPPRESS)
    add_log_option(parser)


def _run(arguments: argparse.Namespace) -> int:
    consumer = find_consumer(arguments.target)
    if arguments.health_port is not None:
        consumer.health_port = arguments.health_port
    if arguments.workers > 1 and not consumer.shares_leases:
        raise ConfigurationError(
            f"--workers {arguments.workers}: {arguments.target} does not share leases, so each worker would handle "
            "every record; pass app='name', and not leases='memory://' or 's3://...', which are for one worker"
        )
    configure_logging(arguments.log, arguments.log_format)
    tell = _tell_as(arguments.log_format)
    if arguments.workers > 1:
        command = [sys.executable, "-m", "anabranch", "run", arguments.target, "--log", arguments.log]
        command += ["--log-format", arguments.log_format]
        port = consumer.health_port
        health = None if port is None else (consumer.health_host, port)
        return asyncio.run(run_workers(command, arguments.workers, tell, health))
    if arguments.lifeline is not None:
        on_parent_exit(arguments.lifeline, lambda: os.kill(os.getpid(), signal.SIGTERM))
        consumer.health_port = None  # the parent serves it for all
    try:
        return _outcome(asyncio.run(_run_consumer(consumer, arguments.health_pipe)), tell)
    except AnabranchError as error:
        is_text = arguments.log_format == "text"
        if is_text and isinstance(error, ConsumerFailedError) and error.__cause__ is not None:
            say_traceback(error.__cause__, error.__cause__.__traceback__)
        if is_text or isinstance(error, ConfigurationError):
            raise
        logging.getLogger("anabranch.run").log(logging.ERROR, "%s", one_line(error), exc_info=error.__cause__)
        return FAILED


async def _run_consumer(consumer: "Consumer[Any]", health_pipe: int | None) -> "StopReport":
    server = None if health_pipe is None else await serve_to_parent(HealthApp(consumer), health_pipe)
    try:
        return await consumer.run(handle_signals=True)
    except ShardStoppedError as error:
        return error.report
    finally:
        if server is not None:
            await server.stop()


def _outcome(report: "StopReport", tell: Tell) -> int:
    if report.clean:
        return DONE
    lines = [str(shard) for shard in report.stopped]
    if report.stopped:
        advice = "fix the cause and run again: a new worker retries the record"
        lines.append(f"the records after it were not handled; {advice}")
    if report.leftovers:
        running = counted(len(report.leftovers), "handler")
        lines.append(f"{running} still ran at the deadline: those records will be handled again")
    if not report.committed:
        again = "records finished since the previous one will be handled again"
        lines.append(f"the lease store did not accept the last checkpoint; {again}")
    if not report.released:
        lines.append("the lease store did not confirm the release; the leases expire by themselves")
    for line in lines:
        tell(line, logging.ERROR)
    return FAILED


class WorkerHealth:
    """The health of one worker process."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._port: int | None = None
        self._has_ended = False

    def started(self) -> None:
        """Closes the end of the pipe that the process now has, and reads the port as soon as it arrives."""
        os.close(self.write_end)
        asyncio.get_running_loop().add_reader(self._read_end, self._on_port)

    def _on_port(self) -> None:
        text = os.read(self._read_end, 100)
        self._close()
        if text:
            self._port = int(text)

    def end(self) -> None:
        self._has_ended = True
        self._close()

    def _close(self) -> None:
        if self._read_end >= 0:
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    async def ask(self, path: str) -> Response:
        """Its answer. Without one, a page of the same kind that says why: a worker that is starting or ending is live,
        because it is no reason to restart the others.
        """
        live_status = 200
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                if self._port is not None and not self._has_ended:
                    return await _get(self._port, path)
            why = "it has ended" if self._has_ended else "it is starting"
        except TimeoutError:
            why, live_status = f"its health server did not answer within {_ASK_SECONDS:g} s", 503
        except (OSError, ValueError, EOFError) as error:  # the process is ending: its server is closed
            why = f"its health server did not answer: {type(error).__name__}"
        if path == "/status.json":
            return json_page({"error": why}, 503)
        return json_page({"reasons": [why]}, live_status if path == "/live" else 503)


async def _get(port: int, path: str) -> Response:
    reader, writer = await asyncio.open_connection(_LOOPBACK, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {_LOOPBACK}\r\nconnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return Response(int(head.split(b" ", 2)[1]), await reader.read())
    finally:
        writer.close()


async def serve_to_parent(app: HealthApp, pipe: int) -> HealthServer:
    """In a worker: serves its health, and sends the port to the parent."""
    server = HealthServer(app, host=_LOOPBACK, port=0)
    url = await server.start()
    os.write(pipe, url.rpartition(":")[2].encode())
    os.close(pipe)
    return server


async def fleet_health(workers: Sequence[WorkerHealth], request: Request) -> Response:
    """In the parent: asks all workers, and makes one response of their answers."""
    path = request.path
    if (refusal := refusal_of(request.method, path)) is not None:
        return refusal
    answers = await asyncio.gather(*(worker.ask(path) for worker in workers))
    if path == "/metrics":
        return metrics_page(lambda: text_of(_labelled_families(answers)))
    if path == "/status.json":
        return json_page({"workers": {number: msgspec.Raw(answer.body) for number, answer in enumerate(answers)}})
    failing = {number: _reasons(answer) for number, answer in enumerate(answers) if answer.status != 200}
    return json_page({path[1:]: not failing, "workers": failing}, 503 if failing else 200)


def _reasons(answer: Response) -> list[str]:
    try:
        return [str(reason) for reason in msgspec.json.decode(answer.body)["reasons"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return [f"HTTP {answer.status}"]


def _labelled_families(answers: Iterable[Response]) -> Iterator[Any]:
    """The families of all workers, each sample with the number of its worker."""
    from prometheus_client.parser import text_string_to_metric_families

    for number, answer in enumerate(answers):
        if answer.status != 200:
            continue
        for family in text_string_to_metric_families(answer.body.decode()):
            family.samples = [
                sample._replace(labels={**sample.labels, "worker": str(number)}) for sample in family.samples
            ]
            yield family
