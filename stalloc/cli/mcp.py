"""Answer an agent's questions about GPU memory: a server of the Model Context Protocol on standard input and output.

  stalloc mcp --allow ~/recordings
  stalloc mcp --allow ~/project --allow-run

The agent's program starts it; docs/mcp.md has the lines for its configuration. Tools: explain, stats, top, simulate and
policies read recordings; estimate is `stalloc dryrun --model`; dryrun and fit run a program of yours on the virtual
GPU. Each is the verb of that name, and answers with its JSON and one sentence.

Only files in the folders of --allow are read (default: the current folder). dryrun and fit are refused without
--allow-run, which lets the agent run any program in these folders, with any arguments and with your rights: what it
writes is discarded, but what it reads and sends is not limited. The server writes no files.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

from stalloc.errors import BadInputError, SetupError
from stalloc.printable import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="FOLDER",
        help="let the agent read files in this folder; may be repeated (default: the current folder)",
    )
    parser.add_argument("--allow-run", action="store_true", help="let it run programs in these folders, too")


def run(args: argparse.Namespace) -> int:
    folders = [Path(name) for name in args.allow or ["."]]
    for folder in folders:
        if not folder.is_dir():
            raise BadInputError(
                f"--allow is {printable(str(folder))}, which is no folder: give one that has your files."
            )
    if find_spec("mcp") is None or find_spec("mcp.server.mcpserver") is None:
        raise SetupError("`stalloc mcp` needs the mcp package, 2 or later: pip install stalloc[mcp].")
    from stalloc.cli.agent_tools import make_server

    make_server([folder.resolve() for folder in folders], may_run=args.allow_run).run("stdio")
    return 0
