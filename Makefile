# New users need only `make demo` and `make test`. The first target that needs the environment creates it.
PYTHON ?= python3
VENV ?= .venv
# Additional pip options for installing torch, such as an index with CPU builds.
TORCH_INDEX ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test check style format integration integration-clients integration-backends \
	integration-scale integration-rest integration-rewards bench bench-gateway bench-fidelity bench-text families docs clean

help:
	@echo "make demo         train a small model on this machine and watch it learn"
	@echo "make test         run the tests"
	@echo "make check        lint, types, import contracts, dead code, style limits, generated docs,"
	@echo "                  licences and known vulnerabilities of the installed packages"
	@echo "make integration  run slower tests with real servers and crashes; parts: integration-clients,"
	@echo "                  integration-backends, integration-scale (vLLM, Ray), integration-rest, integration-rewards"
	@echo "make bench        measure the engine"
	@echo "make bench-gateway   compare the gateway with similar servers"
	@echo "make bench-fidelity  measure the share of agent traffic that becomes exact training data"
	@echo "make bench-text   compare streamed with decoded text, and forge turns, with published tokenizers"
	@echo "make style        measure file sizes, docstrings, names and other style limits"
	@echo "make docs         write docs/configuration.md, docs/openapi.json and docs/models.md"
	@echo "make format       format the code"
	@echo "make clean        remove the environment"

install: $(STAMP)

# Install torch first and pinned, so that no other requirement selects its build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Instar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV): a few minutes the first time"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_INDEX) torch
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,dev]'
	@# bfcl-eval pins an older numpy than ours; we use only its data and its checker, which work without it.
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23
	@touch $@

demo: install
	$(BIN)/instar demo

# Tests mostly wait, so several run at once. More torch threads would only compete for the cores.
WORKERS ?= 3

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit -n $(WORKERS) --dist loadfile

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/dead_code.py
	$(BIN)/python tools/style.py
	$(BIN)/python -m instar.cli.reference --check docs/configuration.md docs/openapi.json
	$(BIN)/python tools/models_page.py --check
	$(BIN)/python tools/licences.py
	$(BIN)/python tools/audit.py

# `make style ARGS=--json` prints only the figures, `ARGS=--list` every finding.
style: install
	$(BIN)/python tools/style.py $(ARGS)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The slower tests. `make integration` runs all of them; `make integration-backends`, for example, a part.
CLIENTS := tests/integration/agents tests/integration/clients tests/integration/test_bench_gateway.py
BACKENDS := tests/integration/backends tests/torture/test_services.py
SCALE := $(wildcard tests/integration/vllm tests/integration/sync tests/integration/ray)
REWARDS := $(wildcard $(addprefix tests/integration/,rewards rewards_sandbox datasets tasks))
REST := $(filter-out $(CLIENTS),$(wildcard tests/integration/test_*.py)) $(wildcard tests/torture/test_*crash.py) $(REWARDS)
# Two files at a time, because tests often wait for a process to start; then the tests marked `alone`.
define slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not alone" -n 2 --dist loadfile --timeout=300 $(DURATIONS) $(1)
	$(BIN)/python -m pytest -m alone $(DURATIONS) $(1) || [ $$? -eq 5 ]  # pytest exits with 5 if there are none
endef
DURATIONS := --durations=20 --durations-min=5

integration: install
	$(call slow,$(SCALE) $(BACKENDS) $(CLIENTS) $(REST))

integration-clients: install
	$(call slow,$(CLIENTS))

integration-backends: install
	$(call slow,$(BACKENDS))

integration-scale: install
	$(call slow,$(SCALE))

integration-rest: install
	$(call slow,$(REST))

# A subset of integration-rest.
integration-rewards: install
	$(call slow,$(REWARDS))

bench: install
	$(BIN)/python bench/engine.py

bench-gateway: install
	$(BIN)/python bench/gateway.py

bench-fidelity: install
	$(BIN)/python bench/fidelity.py

# Resumable: an interrupted measurement continues where it stopped.
bench-text: install
	$(BIN)/python bench/text_exactness.py --json

families: install
	$(BIN)/python bench/families.py --json

docs: install
	$(BIN)/python -m instar.cli.reference docs/configuration.md docs/openapi.json
	$(BIN)/python tools/models_page.py

clean:
	rm -rf $(VENV)
