"""Requests, sequences, step plans, configs, clocks and errors. Pure Python: no tensor, no input or output."""
