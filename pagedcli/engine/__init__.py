"""The loop that serves requests: scheduling, preemption, sampling, beams. `build.py` alone wires the parts."""
