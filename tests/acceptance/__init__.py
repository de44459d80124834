"""Long checks against real weights, each a command: `python -m tests.acceptance.NAME`. `make` has a target for each."""
