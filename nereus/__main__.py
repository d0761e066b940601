"""What does ``python -m nereus`` do? The same as the ``nereus`` command."""

from __future__ import annotations

from nereus.cli import main

main()
