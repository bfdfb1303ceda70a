"""``eplb-runtime completion``: what a shell needs to complete commands, options and files."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import add_command
from .inputs import require_extra

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "completion",
        _run,
        "print what a shell needs to complete this command",
        """
  eplb-runtime completion bash > ~/.local/share/bash-completion/completions/eplb-runtime
  eplb-runtime completion zsh > ~/.zfunc/_eplb-runtime          # a folder of $fpath
""",
    )
    command.add_argument("shell", choices=SHELLS)


def _run(arguments: argparse.Namespace) -> None:
    require_extra("shtab", "completion")
    import shtab

    print(shtab.complete(arguments.whole, arguments.shell))
