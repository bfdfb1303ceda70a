"""Jobs in children of one process that has imported everything: a job of the table then takes seconds, not its imports.

A client (``python served.py SOCKET SCRIPT ARGUMENTS``) hands its environment, its output and its working folder over,
waits, and ends as the job did.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping


def serve(listener: socket.socket, scripts: Mapping[str, Callable[[], object]]) -> None:
    """Run one job after another, in children of this process; never returns."""
    while True:
        client, _ = listener.accept()
        with client, client.makefile("rb") as lines:
            _, outputs, _, _ = socket.recv_fds(client, 1, 2)
            asked = json.loads(lines.readline())
            if not (child := os.fork()):
                listener.close()
                os.chdir(asked["folder"])
                os.environ.clear()
                os.environ.update(asked["environment"])
                for own, given in zip((1, 2), outputs, strict=True):
                    os.dup2(given, own)
                sys.argv = asked["arguments"]
                os._exit(status_of(scripts[sys.argv[0]]))
            for output in outputs:
                os.close(output)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            client.sendall(f"{status}\n".encode())


def status_of(script: Callable[[], object]) -> int:
    """Run a script; the exit status that an interpreter would have."""
    try:
        script()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def ask(path: str, arguments: list[str]) -> int:
    """Have a job run with this process's environment and output; return its exit status."""
    with socket.socket(socket.AF_UNIX) as server, server.makefile("rb") as lines:
        server.connect(path)
        socket.send_fds(server, [b"."], [1, 2])
        asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        server.sendall(json.dumps(asked).encode() + b"\n")
        return int(lines.readline() or 1)


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
