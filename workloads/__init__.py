"""Workloads: what arrives, when, and how long it is. Seeded, with separate streams for data, arrivals and sampling."""

from pagedcli.workloads.arrivals import (
    AllAtOnce,
    Arrivals,
    Constant,
    Gamma,
    Poisson,
    TraceTimes,
    make_arrivals,
)
from pagedcli.workloads.load import load_workload
from pagedcli.workloads.spec import TraceRequest, Workload, WorkloadOptions, WorkloadSpec, find_spec, specs
from pagedcli.workloads.streams import Purpose, generator
from pagedcli.workloads.tokens import estimate_tokens, token_ids

__all__ = [
    "AllAtOnce",
    "Arrivals",
    "Constant",
    "Gamma",
    "Poisson",
    "Purpose",
    "TraceRequest",
    "TraceTimes",
    "Workload",
    "WorkloadOptions",
    "WorkloadSpec",
    "estimate_tokens",
    "find_spec",
    "generator",
    "load_workload",
    "make_arrivals",
    "specs",
    "token_ids",
]
