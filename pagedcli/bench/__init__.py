"""Replay of workloads, metrics, comparisons and the experiments of the paper."""
