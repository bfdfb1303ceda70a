"""Scripts of two ranks (`forked`) in children of one process that has imported everything once:
``python served.py SOCKET`` serves them, and ``python -S served.py SOCKET SCRIPT ARGUMENTS`` has one run with its own
environment and output, waits, and ends as it did."""

import json
import os
import socket
import sys


def serve(path: str) -> None:
    import forked

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listens", flush=True)
        while True:
            client, _ = listener.accept()
            with client, client.makefile("rb") as lines:
                _, outputs, _, _ = socket.recv_fds(client, 1, 2)
                asked = json.loads(lines.readline())
                if not (child := os.fork()):
                    os.chdir(asked["folder"])
                    os.environ.clear()
                    os.environ.update(asked["environment"])
                    for own, given in zip((1, 2), outputs, strict=True):
                        os.dup2(given, own)
                    sys.exit(forked.main(*asked["arguments"]))
                for output in outputs:
                    os.close(output)
                client.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


def ask(path: str, arguments: list[str]) -> int:
    """Have a script run; its exit status."""
    with socket.socket(socket.AF_UNIX) as server, server.makefile("rb") as lines:
        server.connect(path)
        socket.send_fds(server, [b"."], [1, 2])
        asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        server.sendall(json.dumps(asked).encode() + b"\n")
        return int(lines.readline() or 1)


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]) if sys.argv[2:] else serve(sys.argv[1]))
