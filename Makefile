# make demo: the embedded model, plain beside accelerated.   make test: the suite, on the installed wheel.
# Another index for torch (CPU-only builds, a mirror): make test PIP_FLAGS="--extra-index-url URL"
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_FLAGS)
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-all dev check wheel clean

demo: .venv/core
	$(BIN)/fewstep demo --out demo

test: .venv/tests
	$(BIN)/python -m pytest -q -m "not slow" --durations 10

test-all: .venv/tests
	$(BIN)/python -m pytest -q --durations 20

dev: .venv/made
	$(PIP) -e ".[test]"
	rm -f .venv/core .venv/tests

check: .venv/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

.venv/made:
	$(PYTHON) -m venv .venv
	touch $@

# Built from a clean copy of the sources: a stale build/ would put modules into the wheel that are gone.
SOURCES := $(shell git ls-files -co --exclude-standard accel schedulers distill serving benchmarks pyproject.toml 2>/dev/null)

dist/wheel: $(SOURCES) | .venv/made
	rm -rf dist && mkdir -p dist/source
	git ls-files -co --exclude-standard -z | xargs -0 ls -d 2>/dev/null | tar -cf - -T - | tar -xf - -C dist/source
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist dist/source
	rm -rf dist/source && touch $@

wheel: dist/wheel

.venv/core: dist/wheel constraints.txt
	$(PIP) dist/*.whl
	$(PIP) --force-reinstall --no-deps dist/*.whl
	touch $@

.venv/tests: dist/wheel constraints.txt
	$(PIP) "$$(ls dist/*.whl)[test]"
	$(PIP) --force-reinstall --no-deps dist/*.whl
	touch $@

clean:
	rm -rf .venv dist build demo
