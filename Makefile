# `make demo` and `make test` work from a clean clone: they set up .venv by themselves.
#
# On a machine without a GPU, install PyTorch's CPU build into .venv before the first `make` to save
# the download of the CUDA build: python3 -m venv .venv && .venv/bin/pip install <your CPU build of torch>.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
CHAOS_ARGS ?=
RESULTS ?= benchmarks/results
DEEPSPEED_PEER := deepspeed==0.19.8 transformers==4.57.6 numpy==2.4.6
LOWEST := transformers==5.17.0 ray==2.50.0 pydantic==2.10.0 pandas==2.3.3

BIN := $(VENV)/bin
INPUTS := pyproject.toml setup.cfg constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
CODE := rollout_pool actors kernels benchmarks examples tests docs/hooks

# The repository root must not be on sys.path: `kernels` is also the name of another package.
export PYTHONSAFEPATH = 1
# Threads that wait by spinning for long take the cores from each other as soon as anything else runs.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 1000
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1

.PHONY: help demo docs report-pictures test test-fast test-lowest check format bench bench-quick bench-full bench-bf16 bench-tables breakdown bench-layouts gpu-check chaos endurance venv clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         roll out real tasks on a small model: 2 CPU actors, rewards, log-probability check"
	@echo "make report-pictures  the pictures of its report in docs/images, after make demo (needs Chromium)"
	@echo "make test         all tests (fetches the demo model first)"
	@echo "make test-fast    the tests that take seconds"
	@echo "make test-lowest  the fast tests with the lowest supported transformers, ray and pydantic"
	@echo "make check        ruff, ruff format, mypy --strict"
	@echo "make format       let ruff fix and format the code"
	@echo "make docs         the documentation site, into site/"
	@echo "make bench        speed side by side with other ways to roll out (most of an hour)"
	@echo "make bench-quick  the same in minutes, beside generate alone (docs/performance.md)"
	@echo "make bench-full   the same with every peer, DeepSpeed's in .venv-deepspeed (hours)"
	@echo "make bench-bf16   the main comparison in bfloat16"
	@echo "make breakdown    where the time of a decode step goes, with a trace for Perfetto (minutes)"
	@echo "make bench-layouts  both layouts of the KV cache on the same work (minutes)"
	@echo "make gpu-check    what only a GPU can show: exactness and speed, under 8 minutes (docs/gpu.md)"
	@echo "make chaos        hundreds of simulated failures, then tens of real ones on each of 20 seeds (half an hour)"
	@echo "make endurance    a thousand calls in a row: memory, files and threads stay as they are (minutes)"
	@echo "make venv         only set up $(VENV)"
	@echo "make clean        remove $(VENV), caches and build outputs (not the demo model)"

demo: $(VENV)/.demo
	@$(BIN)/rollout-pool fetch-demo-model
	@$(BIN)/python examples/demo.py

report-pictures: $(VENV)/.dev
	@$(BIN)/python benchmarks/report_pictures.py

test: $(VENV)/.dev
	@$(BIN)/rollout-pool fetch-demo-model
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not slow and not demo_model" $(PYTEST_ARGS)

test-lowest: $(VENV)-lowest/.dev
	@$(VENV)-lowest/bin/python -m pytest -m "not slow and not demo_model" $(PYTEST_ARGS)

check: $(VENV)/.dev
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy

docs: $(VENV)/.dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "the site is in site/index.html; with its search: $(BIN)/python -m http.server --directory site"

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

bench: $(VENV)/.dev
	@$(BIN)/rollout-pool fetch-demo-model
	@mkdir -p $(RESULTS)
	@$(BIN)/python benchmarks/bench.py main --json $(RESULTS)/main.json $(BENCH_ARGS)

bench-quick: $(VENV)/.dev
	@$(BIN)/rollout-pool fetch-demo-model
	@mkdir -p $(RESULTS)
	@$(BIN)/python benchmarks/bench.py quick --json $(RESULTS)/quick.json $(BENCH_ARGS)

bench-bf16: $(VENV)/.dev
	@$(BIN)/rollout-pool fetch-demo-model
	@mkdir -p $(RESULTS)
	@$(BIN)/python benchmarks/bench.py main --dtype bfloat16 --json $(RESULTS)/bf16.json $(BENCH_ARGS)

bench-full: $(VENV)/.dev .venv-deepspeed/.ready
	@$(BIN)/rollout-pool fetch-demo-model
	@mkdir -p $(RESULTS)
	@$(BIN)/python benchmarks/bench.py full --json $(RESULTS)/full.json $(BENCH_ARGS)

breakdown: $(VENV)/.dev
	@$(BIN)/rollout-pool fetch-demo-model
	@mkdir -p $(RESULTS)
	@$(BIN)/python benchmarks/breakdown.py --json $(RESULTS)/breakdown.json --trace $(RESULTS)/steps.json $(BENCH_ARGS)

# What was measured, into the tables of docs/performance.md.
bench-tables: $(VENV)/.dev
	@$(BIN)/python benchmarks/render.py docs/performance.md $(foreach name,main full bf16 quick breakdown breakdown-bf16,\
	  $(addprefix $(name)=,$(wildcard $(RESULTS)/$(name).json)))

bench-layouts: $(VENV)/.dev
	@$(BIN)/rollout-pool fetch-demo-model
	@$(BIN)/python benchmarks/layouts.py $(BENCH_ARGS)

chaos: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/rollout_pool/test_simulated_chaos.py $(PYTEST_ARGS)
	@$(BIN)/python tests/chaos/storm.py $(CHAOS_ARGS)

endurance: $(VENV)/.dev
	@$(BIN)/python benchmarks/endurance.py $(BENCH_ARGS)

gpu-check: $(VENV)/.dev
	@$(BIN)/python benchmarks/gpu_check.py $(GPU_ARGS)

venv: $(VENV)/.dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "rollout-pool needs Python 3.11 or newer; try: make PYTHON=python3.11" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(INPUTS) | $(BIN)/python
	@echo "installing rollout-pool and what the demo needs into $(VENV) (a few minutes the first time)"
	@$(PIP) install -qq -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(BIN)/python
	@echo "installing rollout-pool, tests and linters into $(VENV) (a few minutes the first time)"
	@$(PIP) install -qq -c constraints.txt -e '.[test,dev,docs]'
	@touch $(VENV)/.demo $@

# torch stays the one of constraints.txt: its lower end is several GB of CUDA packages away.
$(VENV)-lowest/.dev: $(INPUTS) Makefile
	@echo "installing the lowest supported versions into $(VENV)-lowest: $(LOWEST)"
	@$(PYTHON) -m venv $(VENV)-lowest
	@$(VENV)-lowest/bin/python -m pip --disable-pip-version-check install -qq \
	  -e '.[test]' $(LOWEST) $$(grep '^torch==' constraints.txt)
	@touch $@

# DeepSpeed's rollouts need an older transformers than rollout-pool.
.venv-deepspeed/.ready: Makefile
	@echo "installing DeepSpeed's peers into .venv-deepspeed: $(DEEPSPEED_PEER)"
	@$(PYTHON) -m venv .venv-deepspeed
	@.venv-deepspeed/bin/python -m pip --disable-pip-version-check install -qq \
	  $(DEEPSPEED_PEER) $$(grep '^torch==' constraints.txt)
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest .venv-deepspeed build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
