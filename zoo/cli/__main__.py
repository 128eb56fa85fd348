"""Run `python -m zoo.cli` if `zoo` is not on the path."""

from . import main

if __name__ == "__main__":
    main()
