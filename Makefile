# Everything runs in .venv. Each target installs the extra of pyproject.toml that it needs there, and installs it again
# when pyproject.toml changes. Flags for a command go in ARGS: make replay ARGS="--users 3 --json out.json"

# Another mlx-lm, in an environment of its own: a version, or `pre` for the newest pre-release.
MLX_LM ?=
VENV := .venv$(MLX_LM:%=-%)
BIN := $(VENV)/bin
HAS := $(VENV)/.has
ARGS ?=
# A process per core, and in each one thread for linear algebra: the models of the tests are tiny. What one has compiled
# the others need not, also where whoever calls make has switched that off.
PYTEST := OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist worksteal
# The interpreter for .venv; empty: the first one found that is new enough.
PYTHON ?=

# Each schema comes with the package; nothing is fetched.
SCHEMA := $(BIN)/check-jsonschema --builtin-schema
# uv makes an environment without ensurepip.
NEW_ENOUGH := import sys, venv; $(if $(shell command -v uv 2>/dev/null),,import ensurepip;) sys.exit(sys.version_info < (3, 11))
NEEDS_OPENBLAS := import sys; from runner.blas import load_openblas; sys.exit(load_openblas() is None)

.PHONY: help replay serve test test-slow test-nightly docs docs-pictures package-test mutants lint bench bench-policies architectures clean openblas browser redis
.DEFAULT_GOAL := help
# openblas, browser and redis ask programs of .venv what is missing: first comes the extra, then they.
.NOTPARALLEL:

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -e 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r target text; do \
		printf '  make %-14s %s\n' "$$target" "$$text"; done

replay: $(HAS)-runtime openblas ## serve the built-in conversations through four caches and compare them
	@echo "Serving conversations through four caches; the demo model (93 MB) is downloaded once." >&2
	@$(BIN)/radixcache replay $(ARGS)

serve: $(HAS)-runtime openblas ## serve the demo model to clients of OpenAI's and Anthropic's APIs
	@$(BIN)/radixcache serve --model demo $(ARGS)

test: $(HAS)-test openblas redis ## run the tests, without the slow ones (MLX_LM=0.31.3: with that mlx-lm)
	@$(PYTEST) $(ARGS)

test-slow: $(HAS)-test openblas browser redis ## run the slow tests, without the nightly ones
	@$(PYTEST) -m "slow and not nightly" $(ARGS)

test-nightly: $(HAS)-test openblas ## run the nightly tests, some of which install real clients with npm and pip
	@$(PYTEST) -m nightly $(ARGS)

mutants: $(HAS)-test openblas redis ## break the code in one place after the other, and see which test finds out
	@$(BIN)/python -m tests.mutants $(ARGS)

lint: $(HAS)-lint ## check style, formatting, types, import rules, workflows and the Dockerfile
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	@$(SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	@$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(SCHEMA) vendor.dependabot .github/dependabot.yml
	@$(SCHEMA) vendor.citation-file-format --force-filetype yaml CITATION.cff
	@$(BIN)/zizmor --offline --quiet .
	@$(BIN)/hadolint Dockerfile

docs: $(HAS)-docs ## build the site into build/site, and check its links and generated pages
	@$(BIN)/python docs/generate.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs-pictures: $(HAS)-docs openblas browser ## make the screenshots of the docs from real runs
	@$(BIN)/python docs/pictures.py

package-test: $(HAS)-package openblas ## build wheel and sdist, install each into a fresh environment, and try it there
	@$(BIN)/python -m tests.package $(ARGS)

bench: $(HAS)-bench openblas ## run every benchmark in turn (ARGS=--publish replaces the figures in benchmarks/results)
	@set -e; for file in benchmarks/bench_*.py; do \
		name=$$(basename "$$file" .py); \
		echo "== $$name"; \
		$(BIN)/python -m "benchmarks.$$name" $(ARGS); \
	done

bench-policies: $(HAS)-bench openblas ## simulate every eviction policy at six capacities
	@$(BIN)/python -m benchmarks.bench_policies $(ARGS)

architectures: $(HAS)-bench openblas ## measure every architecture of mlx-lm and write docs/architectures.md
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m benchmarks.architectures $(ARGS)

clean: ## remove .venv, builds and caches; a fetched demo model stays where it is
	rm -rf .venv .venv-* build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(HAS)-%: pyproject.toml
	@rm -f $@
	@for python in $(PYTHON) $(if $(PYTHON),,python3 python3.14 python3.13 python3.12 python3.11 \
			"$$(uv python find '>=3.11' 2>/dev/null)"); do \
		if "$$python" -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "No usable Python found: wanted 3.11 or newer with its venv module" \
			"(Debian and Ubuntu: apt-get install python3-venv), or name one with PYTHON=/path/to/python." >&2; \
		exit 1; \
	fi; \
	"$$found" .ci/install.py $* $(MLX_LM)
	@touch $@

# $(call install,PACKAGES,WHY,WITHOUT): with apt-get, where there is one and it may be run.
define install
	if [ "$$(id -u)" = 0 ]; then run=""; elif sudo -n true >/dev/null 2>&1; then run="sudo -n"; else run="no"; fi; \
	if [ "$$run" != no ] && command -v apt-get >/dev/null 2>&1; then \
		echo "Installing the system package $(1) with apt-get, $(2)."; \
		install="$$run env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends"; \
		$$install $(1) >/dev/null 2>&1 \
			|| { $$run apt-get update -qq >/dev/null 2>&1; $$install $(1) >/dev/null; } \
			|| echo "That did not work: $(3)." >&2; \
	else \
		echo "There is no $(1), and no apt-get to install it with: $(3)." >&2; \
	fi
endef

# On Linux, MLX's CPU build is some 70 times slower in float32 without OpenBLAS. Nothing to do on macOS.
openblas:
	@if ! $(BIN)/python -c '$(NEEDS_OPENBLAS)'; then exit 0; fi; \
	$(call install,libopenblas0-pthread,without which MLX is slow on this CPU,it goes on slowly)

# The page of a tree is tested in a browser. Chrome, Chromium or Edge will do; without any that test is skipped, and says so.
browser:
	@if $(BIN)/python -m tests.observe.browser >/dev/null; then exit 0; fi; \
	$(call install,chromium,to test the page of a tree in it,its test will be skipped)

# What is shared through Redis is tested with a real server; and with Valkey, where the system has it.
redis:
	@if $(BIN)/python -m tests.stores.redis_server >/dev/null; then exit 0; fi; \
	$(call install,redis-server,to test what is shared through it,its tests will be skipped)
	@if command -v valkey-server >/dev/null || ! apt-cache show valkey-server >/dev/null 2>&1; then exit 0; fi; \
	$(call install,valkey-server,to test what is shared through it,its tests will be skipped)
