"""The command line: it only translates. What it needs of shardc is imported when a command runs."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import Any

import click

import shardc
from shardc.cli.building import build, plan
from shardc.cli.checking import inspect, verify
from shardc.cli.converting import merge, reshard
from shardc.cli.demonstrating import demo
from shardc.cli.manifests import manifest
from shardc.cli.output import INTERRUPTED, TERMINATED
from shardc.cli.pulling import pull
from shardc.cli.shipping import push

# A command makes many objects that stay to its end, and hardly a cycle: to look for cycles at
# Python's own 700 costs a tenth of a start, and a third of a plan of many tensors.
COLLECT_AT = 100_000


class _Program(click.Group):
    def main(self, args: Any = None, *more: Any, **options: Any) -> Any:
        if args is None:  # this process is the command's alone
            gc.set_threshold(COLLECT_AT)
        try:
            return super().main(args, *more, **options)
        except SystemExit as end:
            if args is None and end.code in (INTERRUPTED, TERMINATED):
                _leave(end.code)
            raise


def _leave(code: int) -> None:
    """End this process, whatever its libraries' threads still wait for: Python would join them."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@click.group(
    cls=_Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(shardc.__version__, prog_name="shardc")
def main() -> None:
    """Pre-shard diffusion checkpoints for tensor parallelism, offline and bit-exact.

    \b
    Example:
      shardc plan FLUX.2-klein-4B --tp 8
      shardc build FLUX.2-klein-4B --tp 8 -o klein-tp8
      shardc verify klein-tp8 --source FLUX.2-klein-4B

    Shell completion: eval "$(_SHARDC_COMPLETE=bash_source shardc)"
    """


for command in (build, plan, inspect, verify, merge, reshard, push, pull, manifest, demo):
    main.add_command(command)
