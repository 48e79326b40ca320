"""`python -m bench`, and its commands `bridge`, `alone` and `tables`."""

import sys

from bench import alone, bridge, report, run

COMMANDS = {"bridge": bridge.main, "alone": alone.main, "tables": report.main}


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    return run.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
