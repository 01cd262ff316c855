# make install   environment (.venv, or VENV=path) with the workbench, vLLM for this machine, and the test tools
# make demo      install, run the shipped experiment, say where the report is and what the verdict
# make test      install, then the tests
# make docs      the documentation as pages, in build/site
# make lint      ruff and mypy
VENV ?= .venv
RUN = $(VENV)/bin/python -m workbench.run
ARGS ?=

.PHONY: help install demo test docs lint clean
help:
	@sed -n 's/^# make /make /p' Makefile

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml .ci/install
	bash .ci/install "$(VENV)"
	@touch $@

demo: install
	$(RUN) experiment=kimi_requant $(ARGS)

test: install
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder --durations=40 $(ARGS)

docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

lint: install
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
