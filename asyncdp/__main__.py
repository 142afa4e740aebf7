"""The command line: ``python -m asyncdp``."""

from asyncdp.cli.main import main

if __name__ == "__main__":
    main()
