"""`python -m rotquant`: the command, where its script is not on the path."""

from rotquant.cli import app

if __name__ == "__main__":
    app()
