# Two commands do everything: `make demo` and `make test`. Each sets up .venv by itself: setup_env.py
# chooses the torch and the vLLM that fit this machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One stamp a set; the file holds what was left out of the set, and why.
DEMO_SET := $(VENV)/.demo-set
APP_SET := $(VENV)/.app-set
TEST_SET := $(VENV)/.test-set
# vLLM is tested for real: on machines without an NVIDIA driver by its CPU build.
export VLLM_ENABLE_V1_MULTIPROCESSING = 0
export VLLM_CPU_KVCACHE_SPACE = 1
export VLLM_CPU_CI_ENV = 1
export TOKENIZERS_PARALLELISM = false
PYTEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-ranks app test slow lint format bench mutants coverage docs screenshots gpu-check gpu-check-vllm calibrate clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(VENV)/.%-set: setup_env.py pyproject.toml constraints.txt constraints-cuda.txt
	$(PYTHON) setup_env.py $* $(VENV)

venv: $(TEST_SET) ## everything that tests need
	@cat $(TEST_SET)

demo: $(DEMO_SET) ## plan, trace and train a real small model, and compare the three
	$(BIN)/vramwise published unsloth-grpo
	$(BIN)/vramwise plan llama-3.1-8b --task grpo --method qlora --context 4096 --generations 8 --gpu rtx-3090
	$(BIN)/vramwise demo

demo-ranks: $(DEMO_SET) ## the demo on two ranks with FSDP2, its curve beside one rank's (MODEL=smollm2: a real one)
	$(BIN)/vramwise demo --nproc 2 --model $(or $(MODEL),small) --steps $(or $(STEPS),60) --output runs/demo-ranks

app: $(APP_SET) ## the "will it fit?" app on http://127.0.0.1:8501
	$(BIN)/vramwise app

test: $(TEST_SET) ## all tests
	@cat $(TEST_SET)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup -m "not slow" tests

slow: $(TEST_SET) ## the long tests that `make test` leaves out
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup -m slow tests

lint: $(TEST_SET) ## ruff, format check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy planner profiler trainer app

format: $(TEST_SET) ## rewrite in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TEST_SET) ## rewrite the generated pages (docs/accuracy.md, docs/cli.md)
	$(BIN)/python -m benchmarks.write_docs

bench: $(TEST_SET) ## the benchmarks that back the README's claims
	@for script in plan_speed trace_speed logprob_head generation kv_tokens doctor profile_overhead ranks_overhead push_overhead app_load trainer_vs_trl sft_vs_hf grpo_table; do \
	  echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$script.py; done

mutants: $(TEST_SET) ## plant 300 small errors in the memory model; lists those that no fast test notices
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutants

coverage: $(TEST_SET) ## lines of planner/ that the fast set and all planner tests run
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.coverage

calibrate: $(TEST_SET) ## rewrite data/calibration/ratios.csv after a change of formulas
	$(BIN)/python -m planner.accuracy.calibrate

screenshots: $(TEST_SET) ## pictures of every page of the app
	$(BIN)/python tests/browser/screenshots.py docs/screenshots

# WHEELS=DIR: no network, but a $(PYTHON) with torch and transformers; the rest comes from that folder
gpu-check: $(if $(WHEELS),,$(DEMO_SET)) ## what this machine's GPU does beside what is planned (8 minutes)
	$(if $(WHEELS),$(PYTHON),$(BIN)/python) benchmarks/gpu_check.py $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

gpu-check-vllm: $(TEST_SET) ## the same with vLLM inside the trainer
	$(BIN)/python benchmarks/gpu_check_vllm.py $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build
