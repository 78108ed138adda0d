"""Messages through a socket: any object arrives, a later message changes none, strangers and ends are noticed."""

import socket
import stat
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

from fedcommons import ClientError, UserError, flatten
from fedcommons.federation.actor_socket import Socket, accept, connect, listen, pack, serve
from fedcommons.runtime import tempdirs

Ends = tuple[Socket, Socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    first, second = (Socket(end.detach()) for end in socket.socketpair())
    yield first, second
    first.close()
    second.close()


def sent(ends: Ends, message: object) -> Any:
    thread = threading.Thread(target=ends[0].send, args=(pack(message),))
    thread.start()
    received = ends[1].receive()
    thread.join()
    return received


def test_messages_of_any_kind_and_size_arrive_and_no_later_message_changes_them(ends: Ends) -> None:
    """numpy arrays use the buffer in which they arrived; 40 MB are more than the system's buffers have."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n) for n in (0, 1, 50_000, 5_000_000, 7)]
    received = [sent(ends, {"a": x, "b": [x[:3]], "c": ("text", None)}) for x in arrays]
    for x, message in zip(arrays, received, strict=True):
        assert np.array_equal(message["a"], x)
        assert np.array_equal(message["b"][0], x[:3])
        assert message["c"] == ("text", None)
    flats = [flatten({"w": torch.full((n,), float(n))}) for n in (3, 100_000, 3)]
    for flat, message in zip(flats, [sent(ends, flat) for flat in flats], strict=True):
        assert message.layout == flat.layout
        assert torch.equal(message.buffer, flat.buffer)


def test_serve_sends_results_and_errors_and_ends_with_the_connection(ends: Ends) -> None:
    def answer(shared: Any, work: Any) -> Any:
        if isinstance(work, Exception):
            raise work
        return work(shared)

    thread = threading.Thread(target=serve, args=(ends[1], answer))
    thread.start()
    for work, expected in (
        (lambda x: x + 1, 8), (UserError("no"), UserError), (ClientError("c", 2, 3), ClientError),
        (ZeroDivisionError("of no avail"), ClientError), (lambda x: threading.Lock(), ClientError), (lambda x: x, 7),
    ):  # fmt: skip
        ends[0].send([*pack(7), *pack(work)])
        result = ends[0].receive()
        assert result == expected if isinstance(expected, int) else isinstance(result, expected), result
    ends[0].close()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("n_bytes", [0, 4, 30])
def test_an_end_in_the_middle_of_a_message_is_noticed(ends: Ends, n_bytes: int) -> None:
    ends[0].send([bytes(pack("a text that is cut off")[0])[:n_bytes]])
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()


def test_only_the_process_that_knows_the_key_is_connected() -> None:
    """Nor can other users enter the folder; a folder that is not there gives no listener."""
    accepted: list[Socket] = []
    with tempdirs.folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert listen(str(folder / "none"), b"key") is None
        listener = listen(str(folder), b"key")
        assert listener
        thread = threading.Thread(target=lambda: accepted.append(accept(listener)))
        thread.start()
        address = str(listener.address)
        with pytest.raises(AuthenticationError):
            Client(address, "AF_UNIX", authkey=b"another")
        Client(address, "AF_UNIX").close()  # a stranger that leaves at once
        friend = connect(address, b"key")
        thread.join(60)
        assert not Path(address).exists()
    friend.send(pack(["hello"]))
    assert accepted[0].receive() == ["hello"]
    for end in (friend, *accepted):
        end.close()
