"""What is used after its memory went is refused; it neither crashes the process nor touches another version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.e2e.workers.processes import Process, RemoteError

OPEN = """
a, b = torch.arange(100_000.), torch.arange(5.)
writer = WeightWriter("grpo", 0, 1, {socket!r})
writer.register({{"a": a, "b": b}})
into = {{"a": torch.zeros(100_000), "b": torch.zeros(5)}}
reader = WorkerWeightsReader("grpo", "e", 0, 1, {socket!r})
reader.register(into)
writer.publish(1)
"""


@pytest.fixture
def pair(daemon: Daemon, fork: Callable[[], Process]) -> Process:
    """One process with a writer and a reader of its version 1."""
    process = fork()
    process.do(OPEN.format(socket=daemon.socket))
    return process


def refused(process: Process, source: str) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        process.do(source)
    return caught.value


def test_write_after_close_of_the_writer(pair: Process) -> None:
    pair.do("update = writer.begin(2); update.write({'b': b}); writer.close()")
    assert refused(pair, "update.write({'a': a})").kind in ("InvalidArgument", "VersionConflict")


def test_write_after_the_job_was_closed(pair: Process) -> None:
    pair.do("update = writer.begin(2); update.write({'b': b}); writer.close_job()")
    assert refused(pair, "update.write({'a': a})").kind in ("InvalidArgument", "VersionConflict")


def test_write_after_other_tensors_were_registered(pair: Process) -> None:
    pair.do("update = writer.begin(2); reader.close(); c = torch.ones(7); writer.register({'c': c})")
    assert refused(pair, "update.write({'c': c})").kind == "VersionConflict"
    pair.do("writer.publish(2).committed()")


def test_write_of_an_update_that_a_later_begin_replaced(pair: Process) -> None:
    pair.do(
        "old = writer.begin(2)\n"
        "with writer.begin(3) as update: update.write({'a': a + 1, 'b': b + 1})\n"
        "update.publication.committed()"
    )
    assert refused(pair, "old.write({'a': a - 7})").kind == "VersionConflict"
    assert pair.do("reader.update(3); result = torch.equal(into['a'], a + 1)")


def test_seal_of_a_replaced_update_leaves_the_slot_of_the_one_that_is_written(pair: Process) -> None:
    pair.do("old = writer.begin(2); old.write({'a': a, 'b': b})")
    pair.do("update = writer.begin(3); update.write({'a': a + 1})")
    assert refused(pair, "old.__exit__(None, None, None)").kind == "VersionConflict"
    pair.do("update.write({'b': b + 1}); update.__exit__(None, None, None); update.publication.committed()")
    assert pair.do("reader.update(3); result = torch.equal(into['a'], a + 1) and torch.equal(into['b'], b + 1)")


def test_apply_after_close_of_the_reader(pair: Process) -> None:
    pair.do("staged = reader.stage(); reader.close()")
    assert refused(pair, "reader.apply(staged)").kind == "InvalidArgument"


def test_apply_after_the_daemon_restarted_under_what_was_staged(pair: Process, daemon: Daemon) -> None:
    pair.do("staged = reader.stage()")
    daemon.kill()
    daemon.start()
    pair.do("reader.wait(1)")
    assert refused(pair, "reader.apply(staged)").kind in ("VersionUnavailable", "DaemonUnavailable")
    assert pair.do("done = reader.update(); result = [done.step, reader.state, torch.equal(into['a'], a)]") == [
        1,
        "ready",
        True,
    ]


def test_close_while_another_thread_updates(daemon: Daemon, fork: Callable[[], Process]) -> None:
    process = fork()
    process.do(
        f"import threading\nfrom pathlib import Path\n"
        f"source, into = torch.ones(1 << 25), torch.zeros(1 << 25)\n"
        f"writer = WeightWriter('grpo', 0, 1, {daemon.socket!r}); writer.register({{'a': source}}); writer.publish(1)\n"
        f"reader = WorkerWeightsReader('grpo', 'e', 0, 1, {daemon.socket!r}); reader.register({{'a': into}})\n"
        "failed = []\n"
        "def update():\n"
        "    try: reader.update()\n"
        "    except AwexdError as error: failed.append(type(error).__name__)\n"
        "thread = threading.Thread(target=update); thread.start()\n"
        "while not into[0]: pass\n"
        "reader.close(); thread.join()\n"
        "result = failed"
    )
    process.do("writer.close_job()")


def test_close_in_a_forked_child_leaves_the_childs_own_memory(pair: Process) -> None:
    """The parent's mappings are not in the child: unmapping their addresses there would take what lies there now."""
    code = """
import mmap
child = os.fork()
if child == 0:
    own = [mmap.mmap(-1, 1 << 16) for _ in range(200)]
    for place in own: place[:] = b"x" * len(place)
    reader.close(); writer.close()
    os._exit(0 if all(place[-1] == 120 for place in own) else 3)
result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    assert pair.do(code) == 0
    assert pair.do("result = reader.update().step") == 1


def test_case_67_use_after_fork_is_refused_and_the_parent_goes_on(pair: Process) -> None:
    code = """
child = os.fork()
if child == 0:
    kinds = []
    for call in (lambda: writer.publish(5), reader.update, lambda: reader.wait(1)):
        try: call()
        except AwexdError as error: kinds.append(type(error).__name__)
    os._exit(0 if kinds == ["DaemonUnavailable"] * 3 else 1)
result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
    assert pair.do(code) == 0
    assert pair.do("writer.publish(2); result = reader.update().step") == 2


CLOSED = """
import gc, weakref
gc.disable()  # what only the garbage collector finds is kept, for as long as it does not look
watched = [weakref.ref(tensor) for tensor in (a, b, *into.values())]
reader.update()
{how}
for client in (writer, reader):
    client.close()
del a, b, into
result = [ref() is None for ref in watched]
"""


@pytest.mark.parametrize("how", ["", "writer.park('p', {'c': torch.ones(9)})", "update = writer.begin(2)"])
def test_closed_clients_keep_no_tensor(pair: Process, how: str) -> None:
    assert pair.do(CLOSED.format(how=how)) == [True] * 4


LENT = """
from tests.devices import SharedMemoryDriver
gpu = SharedMemoryDriver({folder!r}).install()
held = gpu.tensors({{"a": torch.ones(9)}})
into = gpu.tensors({{"a": torch.zeros(9)}})
writer = WeightWriter("lent", 0, 1, {socket!r}, mode="direct")
writer.register(held)
reader = WorkerWeightsReader("lent", "e", 0, 1, {socket!r})
reader.register(into)
publication = writer.publish(1)
a, b = held["a"], into["a"]
"""


def test_closed_clients_keep_no_tensor_that_was_lent(
    daemon: Daemon, fork: Callable[[], Process], tmp_path: Path
) -> None:
    process = fork()
    process.do(LENT.format(folder=str(tmp_path), socket=daemon.socket))
    assert process.do(CLOSED.format(how="publication.captured(); del held")) == [True] * 3
