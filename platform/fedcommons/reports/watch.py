"""Serve the report of a running sweep to a browser on this machine; the report is updated until Ctrl-C.

fedcommons watch runs/table1
fedcommons watch runs/table1 runs/tune --port 8765
"""

from collections.abc import Sequence
from typing import Annotated

from fedcommons.cli import parse
from fedcommons.errors import UserError


def arguments(argv: Sequence[str]) -> parse.Options:
    parser = parse.Parser(description=__doc__, usage="fedcommons watch RUNS [RUNS ...] [options]")
    parser.add_argument(
        "--port", type=Annotated[int, "[0, 65535]"], default=0, help="port on 127.0.0.1; 0: any free port"
    )
    parser.add_argument("--title", type=str | None, default=None, help="title of the page; default: the folders' names")
    options = parse.parse(parser, argv)
    options.folders = parse.run_folders(options, "RUNS", "fedcommons watch RUNS [RUNS ...]")
    for folder in options.folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder.")
    return options


def watch(argv: Sequence[str]) -> int:
    """Serve the report of a running sweep to a browser on this machine."""
    options = arguments(argv)
    from fedcommons.reports.live_server import Server, Watched  # pandas takes a second to import, and --help needs none

    try:
        server = Server(Watched(options.folders, options.title), options.port)
    except OSError as error:
        raise UserError(f"--port {options.port} cannot be used ({error.strerror}).") from None
    with server:
        print(
            f"{server.address}\nOpen this address on this machine. Everyone with it can see the runs. Ctrl-C ends it."
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped watching; the runs continue.")
    return 130
