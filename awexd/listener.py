"""The listening socket: ours alone, made with its permissions, or inherited from systemd."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

from awexd.config import check_socket_path
from awexd_transports.errors import InvalidArgument

BACKLOG = 512
PROBE_SECONDS = 2.0


@contextlib.contextmanager
def listening(path: str, mode: int) -> Iterator[socket.socket]:
    """Listens at ``path``; on leaving, the path is gone. A stale socket file is taken over, a live one is not.

    Its folder is made if only that is missing (``/run/awexd`` is, after a boot without the service).

    Raises:
        InvalidArgument: another daemon answers there or is starting, the path is too long or is no socket.
    """
    check_socket_path(path)
    with contextlib.suppress(OSError):  # what is wrong with it, opening the lock says
        os.mkdir(os.path.dirname(path), 0o755)
    with _lock(f"{path}.lock", path):
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mask = os.umask(0o777 & ~mode)
            try:
                sock.bind(path)
            except OSError as error:
                raise InvalidArgument(f"socket {path}: {error.strerror}") from error
            finally:
                os.umask(mask)
            sock.listen(BACKLOG)
            sock.setblocking(False)
            yield sock
        finally:
            with contextlib.suppress(OSError):
                if sock.getsockname() == path:
                    os.unlink(path)
            sock.close()


@contextlib.contextmanager
def _lock(lock_path: str, path: str) -> Iterator[None]:
    while True:
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            folder = os.path.dirname(path)
            raise InvalidArgument(
                f"socket {path}: there is no folder {folder} (No such file or directory); make it, or name another "
                "place with --socket or AWEXD_SOCKET"
            ) from error
        except OSError as error:
            raise InvalidArgument(f"socket {path}: {lock_path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise InvalidArgument(f"another daemon serves {path}") from error
        # The daemon before us may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock_path).st_ino == os.fstat(fd).st_ino:
                break
        os.close(fd)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(lock_path)
        os.close(fd)


def _remove_stale(path: str) -> None:
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise InvalidArgument(f"{path} is there and is no socket; it is left as it is")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            pass
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be probed: {error}") from error
        else:
            raise InvalidArgument(f"another daemon serves {path}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
