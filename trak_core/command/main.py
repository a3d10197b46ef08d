"""The command ``trak``: its subcommands, and what each calls."""

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

Look at a folder of weights and data, and write a config to begin with: `trak init`.
Ask a finished run about more samples, one a line: `trak ask` (`trak ask --help` says more).
Run a study's config by Snakemake, in this folder. Targets and options are Snakemake's own:

  trak run study.yaml                  everything
  trak run study.yaml -n               what would run
  trak run study.yaml scores           scores alone
  trak run study.yaml --cores 4        on four cores; all, if nothing is said
  trak run study.yaml --profile slurm  on a SLURM cluster
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the words say; an error is a sentence on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"trak-core {__version__}")
        return
    begins, asks = (words[:1] == [word] for word in ("init", "ask"))
    if not (begins or asks) and (
        len(words) < 2 or words[0] != "run" or {"-h", "--help"} & set(words[:2])
    ):
        asked = not words or {"-h", "--help"} & set(words)
        print(_USAGE, end="", file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    try:
        if begins:
            from trak_core.command.init import init  # reads rows by pandas: `run` need not wait

            init(words[1:])
        elif asks:
            from trak_core.command.ask import ask

            ask(words[1:])
        else:
            if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of imports
            from trak_core.command.run import run
            from trak_core.system.job import stop_before_jobs

            if arguments is None:
                stop_before_jobs()
            run(words[1], words[2:])
    except InputError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
