"""`python -m tests.zoo [TEXT]...`: prove the cases whose name holds any TEXT; a line each.

`--write` proves all of them, plans the published weights, and writes docs/models.md.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

from tests.zoo.case import cases
from tests.zoo.proof import Proof, prove
from tests.zoo.sizes import measure
from tests.zoo.table import DOCUMENT, entries, render


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    texts = [text for text in arguments if text != "--write"]
    proofs: list[Proof] = []
    failed = 0
    for case in cases():
        if texts and not any(text in case.name for text in texts):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                proof = prove(case, Path(folder))
                told = "  ".join(f"{n} {p} {e:.1e}" for (n, p), e in proof.errors.items())
                half = "  ".join(f"{n} {e:.1e}" for n, e in proof.bf16.items())
                line = f"{told} | bf16 {proof.bf16_whole:.1e}: {half}"
                proof.check()
                proofs.append(proof)
            except Exception as error:
                failed += 1
                line = f"FAILED {type(error).__name__}: {error}"
        sys.stdout.write(f"{case.name}: {line}\n")
        sys.stdout.flush()
    if "--write" in arguments and not texts and not failed:
        DOCUMENT.write_text(render(proofs, map(measure, entries())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
