"""`python -m attnlm` is `attnlm`."""

from attnlm.cli import main

main()
