"""`python -m sarathi_pp` is `sarathi-pp`."""

from sarathi_pp.cli.main import main

if __name__ == "__main__":
    main()
