"""What does ``python -m nereus`` do? The same as the ``nereus`` command."""

from nereus.cli import main

main()
