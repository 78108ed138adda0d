"""Messages between the process that runs the rounds and a Ray actor on the same machine, through a Unix socket.

A call of Ray costs both processes some milliseconds of work, and a message through a socket less than one millisecond.
The socket is in a folder that only this user can enter. By HMAC, both ends prove that they know a random key, which the
actor gets by a call of Ray. So both ends may unpickle the messages.
"""

import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import accumulate
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pickle import PickleBuffer
from typing import Any

from ray import cloudpickle

from fedcommons.errors import ClientError, UserError

ALIGNED = 64
"""Bytes to whose multiples arrays are aligned on arrival, because numpy is slower on arrays at odd addresses."""


def pack(message: object) -> list[bytes | memoryview]:
    """Return an object as bytes to send; functions and classes that other processes cannot import are packed by value.

    The first part has the number of the other parts' sizes, the sizes and the pickled object; arrays are parts of their
    own, which are not copied.
    """
    arrays: list[PickleBuffer] = []
    pickled = cloudpickle.dumps(  # pyright: ignore[reportPrivateImportUsage]
        message, protocol=5, buffer_callback=arrays.append
    )
    parts = [array.raw() for array in arrays]
    sizes = [len(pickled), *(part.nbytes for part in parts)]
    return [struct.pack(f"={1 + len(sizes)}Q", len(sizes), *sizes) + pickled, *parts]


class Socket:
    """An open connection to a process that the key has authenticated; see ``pack`` for what it sends.

    Messages arrive in a buffer that is used again, because the first use of a page of memory is slow. If arrays of the
    message use the buffer, the next message gets a new one.
    """

    def __init__(self, handle: int) -> None:
        self.socket = socket.socket(fileno=handle)
        self.buffer = bytearray()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send an object as ``pack`` returned it.

        Raises:
            OSError: the other process has ended.
        """
        for part in parts:
            self.socket.sendall(part)

    def receive(self) -> Any:
        """Wait for the next object and return it; later messages do not change it.

        Raises:
            EOFError: the other process has ended or closed the connection.
        """
        (count,) = struct.unpack("=Q", self._read(bytearray(8)))
        sizes = struct.unpack(f"={count}Q", self._read(bytearray(8 * count)))
        starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        if starts[-1] > len(self.buffer):
            self.buffer = bytearray(starts[-1])
        places = zip(starts, sizes, strict=False)
        views = [self._read(memoryview(self.buffer)[start : start + size]) for start, size in places]
        message = cloudpickle.loads(views[0], buffers=views[1:])
        views.clear()
        try:
            self.buffer.append(0)  # fails if an array of the message uses the buffer
            self.buffer.pop()
        except BufferError:
            self.buffer = bytearray()
        return message

    def _read(self, room: Any) -> Any:
        """Fill ``room`` with the next bytes of the connection, and return it."""
        done, view = 0, memoryview(room)
        while done < len(view):
            if not (n := self.socket.recv_into(view[done:], flags=socket.MSG_WAITALL)):
                raise EOFError("the other process has ended")
            done += n
        return room

    def close(self) -> None:
        """Close the connection, so that the other end gets an ``EOFError``."""
        self.socket.close()


def listen(folder: str, key: bytes) -> Listener | None:
    """Return a listener at a new socket in ``folder``; None if this process cannot write to the folder."""
    with suppress(OSError):
        return Listener(os.path.join(folder, str(os.getpid())), "AF_UNIX", authkey=key)
    return None


def accept(listener: Listener) -> Socket:
    """Wait for the process that knows the key, and return the connection; close the listener in any case."""
    try:
        while True:
            strangers = suppress(AuthenticationError, EOFError, ConnectionError)  # processes without the key
            with strangers, listener.accept() as connection:
                return Socket(os.dup(connection.fileno()))
    finally:
        with suppress(FileNotFoundError):  # the driver may have removed the folder already
            listener.close()


def connect(address: str, key: bytes) -> Socket:
    """Return a connection to the process that listens at ``address``.

    Raises:
        OSError, EOFError: that process has ended.
    """
    with Client(address, "AF_UNIX", authkey=key) as connection:
        return Socket(os.dup(connection.fileno()))


def serve(connection: Socket, answer: Callable[[Any, Any], object]) -> None:
    """Receive two messages at a time, and send back ``answer(first, second)``, or the error that ``answer`` raises.

    The error is a ``UserError`` or ``ClientError``; other exceptions close the connection. The function returns when
    the other process has ended or has closed the connection.
    """
    with suppress(EOFError, ConnectionError), closing(connection):
        while True:
            connection.send(_answer(connection, answer))


def _answer(connection: Socket, answer: Callable[[Any, Any], object]) -> list[bytes | memoryview]:
    try:
        return pack(answer(connection.receive(), connection.receive()))
    except (UserError, ClientError) as error:
        return pack(error)
    except (EOFError, ConnectionError):
        raise
    except Exception as error:  # for example, this process cannot import a class of the message
        return pack(ClientError.from_exception(error, "an actor"))
