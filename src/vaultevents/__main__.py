"""`python -m vaultevents`."""

from vaultevents.cli import main

if __name__ == "__main__":
    main()
