"""`python -m shardc`."""

from __future__ import annotations

from shardc.cli import main

if __name__ == "__main__":
    main(prog_name="shardc")
