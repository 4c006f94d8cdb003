"""`python -m epmoe`: the same as the `epmoe` command."""

from epmoe.cli.main import app

if __name__ == "__main__":
    app(prog_name="epmoe")
