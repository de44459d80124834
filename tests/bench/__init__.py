"""Tests of replay, metrics, capacity, comparison and reports."""
