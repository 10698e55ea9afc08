"""`python -m llmkernel`: the shell command."""

import sys

from llmkernel.cli import main

if __name__ == "__main__":
    sys.exit(main())
