"""Parse the command line of ``trak``, and call the function of the subcommand."""

import signal
import sys
from collections.abc import Sequence

from trak_core import __version__
from trak_core.errors import InputError

_USAGE = """\
usage: trak run CONFIG [TARGET ...] [OPTION ...]
       trak init [FOLDER] [--config trak.yaml]
       trak ask CONFIG [--target ID] [--file LINES] [--csv TABLE] [--html PAGE]
       trak --version

`trak init` writes a config for a folder of weights and data.
`trak ask` scores new samples with a finished run; see `trak ask --help`.
`trak run` runs a config with Snakemake in this folder. Targets and options are Snakemake's:

  trak run study.yaml                  everything
  trak run study.yaml -n               print what would run
  trak run study.yaml scores           scores only
  trak run study.yaml --cores 4        on four cores (the default is all cores)
  trak run study.yaml --profile slurm  on a SLURM cluster
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand of ``trak``. For an ``InputError``, print only its message, and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"trak-core {__version__}")
        return
    command, is_help = words[:1], bool({"-h", "--help"} & set(words[:2]))
    if command not in (["init"], ["ask"]) and (command != ["run"] or len(words) < 2 or is_help):
        is_help = not words or bool({"-h", "--help"} & set(words))
        print(_USAGE, end="", file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    try:
        # Each subcommand imports only its own modules, so that `run` does not wait for pandas.
        if command == ["init"]:
            from trak_core.command.init import init

            if arguments is None:  # End without a traceback if the reader closes the pipe.
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            init(words[1:])
        elif command == ["ask"]:
            from trak_core.command.ask import ask

            ask(words[1:])
        else:
            from trak_core.command.run import run

            run(words[1], words[2:])
    except InputError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
