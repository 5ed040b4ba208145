PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torchrec's metadata asks for the CUDA build of fbgemm; see docs/adr/0003
TORCHREC := torchrec==1.8.0

.DEFAULT_GOAL := help

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-8s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## Make .venv with everything that the demo and the tests need

$(VENV)/.ready: pyproject.toml
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[cpu,dev,bench]'
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps $(TORCHREC)
	@touch $@

demo: setup ## Train, serve and replay the real log; report in runs/demo
	$(BIN)/specrank demo $(ARGS)

test: setup ## Run all tests
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## Run the benchmarks, quickly
	@for name in $$(cd benchmarks && ls -d */ *.py 2>/dev/null | grep -v __ | grep -v results | sed 's#[/.].*##' | sort -u); do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name --quick || exit 1; done

up: ## Start the docker compose stack
	docker compose up --build --detach

clean: ## Remove what setup and runs made
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test lint bench up clean
