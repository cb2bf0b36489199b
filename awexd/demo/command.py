"""What ``awexd demo`` does with its options: signals, the temporary directory, the run, and the exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from awexd.demo import daemon, janitor, plot, report
from awexd.demo.children import Child, Children
from awexd.demo.session import Outcome, Plan, Session
from awexd.demo.source import find_gguf
from awexd.demo.tasks import TASKS
from awexd_transports.errors import AwexdError, InvalidArgument

NEEDED = ("torch", "transformers", "safetensors", "gguf", "matplotlib")
# Flags of /proc/cpuinfo: without one of these, bf16 arithmetic is emulated and several times slower than fp32.
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


class Interrupted(BaseException):
    """SIGINT or SIGTERM: not an `Exception`, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(args: argparse.Namespace) -> int:
    """Runs the demo; the exit status is 0 only if everything worked and every check passed."""
    started = time.monotonic()
    try:
        with _interruptible(), tempfile.TemporaryDirectory(prefix="awexd-demo-") as directory:
            plan = _plan(args, Path(directory))
            outcome = _run(args, plan, Path(directory), started)
    except Interrupted as interruption:
        name = signal.Signals(interruption.number).name
        return _fail(args, f"interrupted by {name}", 128 + interruption.number)
    except (AwexdError, OSError) as error:
        return _fail(args, str(error), 1)
    if args.json:
        sys.stdout.write(report.as_json(plan, outcome, args.plot, time.monotonic() - started) + "\n")
    return 0 if outcome.bit_exact and outcome.tokens_equal else 1


def _plan(args: argparse.Namespace, directory: Path) -> Plan:
    steps = TASKS[args.model].steps if args.steps is None else args.steps
    if steps < 1:
        raise InvalidArgument(f"--steps {steps}: at least one is needed")
    if args.seed < 0:
        raise InvalidArgument(f"--seed {args.seed}: want a number >= 0")
    if not args.plot.absolute().parent.is_dir():
        raise InvalidArgument(f"--plot {args.plot}: there is no such folder")
    # What is missing is told before anything starts.
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidArgument(f"not installed: {', '.join(missing)}; pip install 'awexd[demo]'")
    if args.model == "smollm2":
        find_gguf()
    own = args.socket is None
    return Plan(
        model=args.model,
        steps=steps,
        seed=args.seed,
        dtype="bfloat16" if args.model == "tiny" or _has_bf16() else "float32",
        socket=str(daemon.socket_path(directory) if own else args.socket.absolute()),
        job="demo" if own else f"demo-{uuid.uuid4().hex[:8]}",
    )


def _run(args: argparse.Namespace, plan: Plan, directory: Path, started: float) -> Outcome:
    stream = sys.stderr if args.json else sys.stdout
    with report.Report(stream, plan) as shown, Children(directory, _environment(directory)) as children:
        session = Session(children, directory, plan, shown)  # its processes load while the daemon starts
        own = None
        if args.socket is None:
            shown.phase("starting the daemon")
            own = daemon.start(children, directory)
        guard = janitor.start(children, directory, plan.socket, plan.job, own)
        try:
            outcome = session.run()
        except BaseException:
            session.end()
            _clear(children, directory, plan, own)
            raise
        finally:
            janitor.dismiss(children, guard)
        shown.phase("drawing the plot")
        plot.draw(outcome.steps, f"{TASKS[plan.model].title} learns to {TASKS[plan.model].goal}", args.plot)
    shown.finish(outcome, args.plot, time.monotonic() - started)
    return outcome


def _clear(children: Children, directory: Path, plan: Plan, own: Child | None) -> None:
    """Ends the job that its trainers could not end, so that no shared memory is left.

    A daemon of our own that has died is started once more for it: it finds what the dead one left.
    """
    try:
        if own is not None and own.process.poll() is not None:
            children.end([own], at_once=True)
            daemon.start(children, directory)
        daemon.close_job(plan.socket, plan.job)
    except (AwexdError, OSError) as error:
        sys.stderr.write(f"awexd demo: job {plan.job} could not be closed: {error}\n")


def _environment(directory: Path) -> dict[str, str]:
    # Settings of another daemon must not reach ours.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWEXD_")}
    return {
        **inherited,
        "TMPDIR": str(directory),  # torch leaves a folder there
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",  # this host's name need not resolve
        "OMP_WAIT_POLICY": "PASSIVE",  # trainers and generator take turns on the same cores
        # Freed memory is kept: else glibc unmaps each large tensor, and page faults cost a sixth of the training time.
        "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "PYTHONUNBUFFERED": "1",
    }


def _has_bf16() -> bool:
    with contextlib.suppress(OSError):
        return not BF16_FLAGS.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    return False


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Interrupted` once; what comes while the children are being ended is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        del frame
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(args: argparse.Namespace, message: str, status: int) -> int:
    sys.stderr.write(f"awexd demo: {message}\n")
    if args.json:
        sys.stdout.write(json.dumps({"model": args.model, "error": message, "bit_exact": False, "tokens_equal": False}))
        sys.stdout.write("\n")
    return status
