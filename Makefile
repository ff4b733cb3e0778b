# Two commands: `make demo` trains, evaluates and reports on this machine; `make test` runs the test suite.
# Both build .venv from requirements/cpu.lock first, and rebuild it only when the lock changes.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.lock.sha256
MARK := $(VENV)/.built_by_make
LOCK := requirements/cpu.lock

.PHONY: demo eval-demo test test-all lint env clean

env: $(STAMP)

$(STAMP): $(LOCK)
	@if [ -f $@ ] && [ "$$(sha256sum < $(LOCK))" = "$$(cat $@)" ]; then touch $@; \
	elif [ -e $(VENV) ] && [ ! -f $@ ] && [ ! -f $(MARK) ]; then \
	  echo "$(VENV) is not an environment that make built, so it stays as it is; move it away, or use make VENV=another"; exit 1; \
	else \
	  command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) is not installed"; exit 1; }; \
	  echo "Installing the pinned environment into $(VENV) (about 3 minutes and 7 GB, once)"; \
	  rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && touch $(MARK) && \
	  $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(LOCK) && \
	  sha256sum < $(LOCK) > $@; \
	fi

demo: env
	$(VENV)/bin/python train.py experiment=tiny_cpu

eval-demo: env
	$(VENV)/bin/python scripts/eval_demo.py

test: env
	$(VENV)/bin/python -m pytest -m "not slow"

test-all: env
	$(VENV)/bin/python -m pytest

lint: env
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy

clean:
	rm -rf outputs .cache
