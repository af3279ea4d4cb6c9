"""`python -m tests.fuzz.header [-max_total_time=600]`: the safetensors header under atheris."""

import sys

from tests.fuzz.run import fuzz

if __name__ == "__main__":
    fuzz("header", sys.argv[1:])
