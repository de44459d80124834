"""Everything that can be proven of the CUDA kernels without a GPU: `python -m tests.emulator.check` (make cuda-check).

Compile gate (NVRTC, registers, spills, instructions), all emulator cases with their errors against float64, the faults
of others, one address- and one race-sanitizer case per kernel, and every planted bug. Parts whose tools are missing
are skipped with the reason; what fails is named and the exit status is 1. `--quick` leaves the planted bugs out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from tests.emulator import faults, mutants, nvrtc
from tests.emulator.cases import Case, Kernels, all_cases, copies, decode_case, prefill_case, write_case
from tests.emulator.emulator import EmulatorError, compiler

SANITIZED: tuple[Case, ...] = (
    decode_case("v1", contexts=(8, 24), block_size=8, sinks=True),
    decode_case("split", 2, contexts=(8, 150), block_size=8, group=3, window=100),
    decode_case("mma", 2, contexts=(8, 150), block_size=8, group=5, head_dim=120),
    decode_case("mma", 1, contexts=(24,), block_size=8, group=5, cache="fp8_e4m3", scales=True),
    prefill_case(((24, 24), (40, 9)), block_size=8, group=2),
    prefill_case(((40, 9),), block_size=8, group=2, cache="fp8_e5m2", scales=True),
    prefill_case(((24, 24),), dtype="fp32", block_size=8),
    write_case(separate=True), write_case(True, separate=True, cache="fp8_e4m3"),
    copies()[2],
)
"""Tables are exact and contexts end with their block, so one read too far leaves the array."""


def run_cases(title: str, cases: Sequence[Case], kernels: Kernels, jobs: int = 2) -> int:
    """Runs cases and prints the worst error per type; returns how many failed."""
    started = time.time()
    kernels.build([kernel for case in cases for kernel in case.kernels()], jobs)
    worst: dict[str, float] = {}
    failed = 0
    for case in cases:
        try:
            error, said = case.run(kernels.launch), ""
        except EmulatorError as fault:
            error, said = float("inf"), str(fault)[:300]
        worst[case.dtype] = max(worst.get(case.dtype, 0.0), error)
        if not error <= case.limit:
            failed += 1
            print(f"  FAILED {case.name}: error {error:.2e}, at most {case.limit:.0e} {said}")
    errors = ", ".join(f"{dtype} {error:.1e}" for dtype, error in sorted(worst.items()))
    print(f"{title}: {len(cases) - failed} of {len(cases)} passed in {time.time() - started:.0f} s; "
          f"worst error against float64: {errors}", flush=True)
    return failed


def check_refusals() -> int:
    """Faults that must be refused before a launch."""
    said = faults.refusals()
    silent = [name for name, message in said.items() if not message]
    for name, message in said.items():
        print(f"  {name}: {message or 'ACCEPTED'}")
    print(f"refusals: {len(said) - len(silent)} of {len(said)}")
    return len(silent)


def emulate(plant: bool) -> int:
    """All emulator parts; returns how many things failed."""
    if compiler() is None:
        print("emulator skipped: g++ is not installed")
        return 0
    fast = Kernels()
    failed = run_cases("cases", all_cases(), fast)
    for schedule, name in ((1, "reverse"), (7, "random")):
        fast.schedule = schedule
        failed += run_cases(f"cases, threads in {name} order", all_cases()[::9], fast)
    fast.schedule = 0
    failed += run_cases("faults of others", faults.cases(), fast)
    failed += check_refusals()
    for mode in ("asan", "tsan"):
        failed += run_cases(f"{mode} cases", SANITIZED, Kernels(mode, per_module=2))
    return failed + (mutants.main() if plant else 0)


def gate() -> int:
    """The compile gate; returns how many kernels fall short."""
    reason = nvrtc.missing()
    if reason:
        print(f"compile gate skipped: {reason}")
        return 0
    return nvrtc.print_gate(nvrtc.run_gate())


def main() -> int:
    started, failed = time.time(), 0
    parts: list[Callable[[], int]] = [gate, lambda: emulate("--quick" not in sys.argv)]
    for part in parts:
        failed += part()
    print(f"cuda-check: {'passed' if not failed else f'{failed} FAILED'} in {time.time() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
