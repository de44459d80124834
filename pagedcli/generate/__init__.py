"""Offline batch jobs: rows in, rows out, a journal between."""
