"""`python -m tokenmill` is the command line."""

from tokenmill.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
