"""This tool's own engine in this process, with the settings that `pagedcli generate` has when none are given.

`--lean`: with `--max-num-seqs 16 --max-num-batched-tokens 512 --idle-kv-share 0.25`.
"""

from __future__ import annotations

from driver_kit import now, options, read_rows, report


def main() -> None:
    given = options(__doc__ or "", lambda parser: parser.add_argument("--lean", action="store_true"))
    from importlib.metadata import version

    from pagedcli.core.config import CacheConfig, ModelConfig, RunConfig, SchedulerConfig
    from pagedcli.core.request import Request, SamplingParams
    from pagedcli.engine.build import build_engine

    model = ModelConfig(dtype=given.dtype, device="cpu", threads=given.threads, **({"model": given.model} if given.model
                                                                                   else {}))
    config = RunConfig(model=model)
    if given.lean:
        config = RunConfig(model=model, cache=CacheConfig(idle_share=0.25),
                           scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512))
    engine = build_engine(config)
    rows = read_rows(given.rows)
    engine.add(Request(-2, "warm", (1, 9690, 198), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    loaded = now()
    groups = {}
    for number, row in enumerate(rows):
        params = SamplingParams(n=row["n"], temperature=row["temperature"], max_tokens=row["max_tokens"],
                                ignore_eos=True)
        groups[row["id"]] = engine.add(Request(number, row["id"], tuple(row["prompt_token_ids"]), params))
    while engine.has_work():
        engine.step()
    done = now()
    outputs = {key: [seq.output_ids for seq in group.done] for key, group in groups.items()}
    report(given, version=f"pagedcli {version('pagedcli')}", loaded=loaded, done=done,
           outputs=outputs, settings={"seconds": engine.counters.seconds, "steps": engine.counters.steps})
    engine.close()


if __name__ == "__main__":
    main()
