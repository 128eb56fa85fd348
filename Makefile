# Needs make, and Python 3.11 or newer with pip.
# `make` alone lists the targets.

OLDEST := 11
PYTHONS := python3.11 python3.12 python3.13 python3 python
# tokamax needs a newer Python, and a newer JAX than constraints.txt has.
ifeq ($(MAKECMDGOALS),neighbors)
OLDEST := 12
PYTHONS := python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[32].*/bin/python) python3 python
VENV ?= .venv-neighbors
CONSTRAINTS ?= constraints-newest.txt
endif
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in $(PYTHONS); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, $(OLDEST)))' 2>/dev/null && echo $$p && break; done)
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test newest neighbors format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.train ## train a small Transformer on this machine; options as in `make demo ARGS="--steps 50"`
	$(call say,recipes/transformer.py $(ARGS))
	@GLIBC_TUNABLES="$${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}" $(BIN)/python recipes/transformer.py $(ARGS) # docs/performance.md says why
	@report=$$(find runs -name report.html -exec ls -t {} + 2>/dev/null | head -n 1); \
	if [ -n "$$report" ]; then echo "The report: $$report"; fi

test: $(VENV)/.dev ## style, types and tests; options of pytest as in `make test ARGS="-k import_order"`
	$(call say,style)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(call say,types)
	@$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(call say,tests)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 $(ARGS)
	$(call say,all passed)

newest: $(VENV)/.dev ## tests of numbers; `make newest VENV=.venv-newest CONSTRAINTS=constraints-newest.txt PYTHON=python3.13`
	$(call say,tests with $$($(BIN)/python -c 'import sys, jax; print("jax", jax.__version__, "on Python", sys.version.split()[0])'))
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 $(NUMBERS) $(ARGS)

# What a new JAX can break: its primitives, shard_map, the parameters of equations. Configs are read without JAX. The help
# of commands is read from docstrings, which Python 3.13 dedents.
NUMBERS := $(addprefix tests/,ops layers models parallel generate inspect tools/plan) --ignore-glob='tests/models/hf/test_*' \
	tests/cli/test_main.py::test_command_help_describes_every_option

neighbors: $(VENV)/.neighbors ## tests that compare with PyTorch, transformers, PEFT, TRL, lm_eval and tokamax; on Python 3.12
	$(call say,tests with the neighbors)
	@ZOO_NEIGHBORS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 10 -m neighbors -rs $(ARGS)

format: $(VENV)/.dev ## let ruff format and correct what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.dev ## build the documentation into site/, with the pages that follow from the code
	@$(mkdocs)
	@echo "Open site/index.html"

clean: ## remove the environment, the caches and what was built; runs/ stays
	rm -rf $(VENV) .venv-newest .venv-neighbors .jax_cache .hypothesis .pytest_cache .ruff_cache site dist
	rm -rf docs/api docs/families.md docs/names.md docs/tree.md
	find zoo recipes tests -name __pycache__ -type d -exec rm -rf {} +

# --strict does not stop at a failure under -q, so never -q.
mkdocs = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

, := ,
say = @printf '\n== %s\n' "$(1)"

# An environment with the tests' packages serves the demo too.
$(VENV)/.train: pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	@if [ $(VENV)/.dev -nt pyproject.toml ] && [ $(VENV)/.dev -nt $(CONSTRAINTS) ]; then touch $@; else $(call install,train$(,)tools); fi

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	@$(call install,dev)

$(VENV)/.neighbors: pyproject.toml $(CONSTRAINTS) $(VENV)/.created
	@$(call install,neighbors)

# The stamp is written last, so that what broke off half-way is done again. uv installs in 10 seconds what takes pip a minute.
define install
	printf '\n== installing zoo[$(1)] into $(VENV); the first time takes a minute or two\n'; \
	uv=$$(command -v uv || echo $(BIN)/uv); \
	[ -x "$$uv" ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) uv || true; \
	if [ -x "$$uv" ] && "$$uv" pip install --quiet --python $(BIN)/python -c $(CONSTRAINTS) -e '.[$(1)]'; then \
		touch $@; \
	else \
		$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(1)]' && touch $@; \
	fi
endef

$(VENV)/.created:
	@if [ -z "$(PYTHON)" ]; then echo "No Python 3.$(OLDEST) or newer was found; name one with \`make PYTHON=/path/to/python\`." >&2; exit 1; fi
	$(call say,making $(VENV) with $(PYTHON))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, $(OLDEST)))' \
	|| { echo "$(PYTHON) is not a working Python 3.$(OLDEST) or newer; name another with \`make PYTHON=/path/to/python\`." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	|| { echo "$(PYTHON) could not make $(VENV). On Debian and Ubuntu the package python3-venv is needed." >&2; exit 1; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, $(OLDEST)))' \
	|| { echo "$(VENV) was made by an older Python: \`make clean\` removes it." >&2; exit 1; }
	@touch $@
