"""`python -m sarathi_pp` runs the command `sarathi-pp`."""

from sarathi_pp.cli.main import main

if __name__ == "__main__":
    main()
