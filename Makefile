# make demo: five acts on one loop, in some 40 seconds once it is installed, in an environment of its own that takes the
#     torch of PYTHON, where that has one.
# make test: tests of everything, in at most three minutes on two cores; costs more than setup.cfg allows are an error.
# make test-all: make test, and then make test-slow: together tests of all that distwrap does, as CI runs them.
# make nightly: rows of tests that take long, each a table row in tests/nightly.py: engines in environments of their own,
#     clusters, the pretended accelerator, products, versions, benchmarks, faults. Takes hours; notes in tests/nightly.log
#     what has passed. ROWS=slurm,mpi is two of them; WORDS=--due is those that a change makes due.
# make gpu-report: what there is to show on a GPU, with the torch that is installed where PYTHON is: tests marked gpu,
#     README's program, an example. Without a GPU it is dry: pretended devices, and the CPU. See docs/guides/accelerators.md.
# make prove: every loop of the tests is proven, right ones and planted mistakes, and the programs of pages and examples; minutes
# make corpus: programs as users wrote them at one commit, on two ranks: what gives something else now? ONLY=docs/howto
#     runs some. Not part of CI.
# make test-versions: tests with each torch and Python of noxfile.py, in environments that are removed afterwards; takes
#     hours and gigabytes. SESSIONS='quick(torch 2.6.0, Python 3.10)' is one of them; `nox -l` lists all.
# make check: ruff, mypy, pyright, that the documentation agrees with the code, and that what would be released can be built.
# make dist: the source distribution and the wheel, checked, in dist/; part of make check.
# make docs: the documentation, in build/docs; a warning is an error. make docs-serve shows it on this machine.
# make faults: each launcher and fault 100 times with busy cores, where make test-all runs each once, by turns under each launcher;
#     takes hours, and goes on from the runs in benchmarks/faults-matrix.jsonl: remove them to begin anew. TIMES=10 is less.
# make faults-divided: each fault in a divided model 100 times with busy cores, under all strategies in turns; takes an
#     hour, and goes on where it was stopped. TIMES=14 is each fault once under each strategy and on each of two ranks.
# make kills: 300 kills of a process that saves, and of ranks that save a divided model: does the newest complete
#     checkpoint load? TIMES=30 is less. And 10,000 files changed at random: is each loaded, or refused?
# make soak: ten minutes of training with all that runs beside a loop: does what it takes grow?
# make bench: the benchmarks.  make clean: remove what was built.
# Each of them builds the virtual environment that it needs first, but for make gpu-report, which takes PYTHON as it is.

PYTHON ?= python3
VENV ?= .venv
# How many tests run at a time: each starts processes of its own, and waits for them, so one more than there are cores.
# `pytest -n 0` is one after the other.
JOBS ?= -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 5
# Threads of a tensor's operation that wait for each other leave the core to the other tests.
test test-slow nightly: export OMP_WAIT_POLICY ?= PASSIVE
engine-%: export OMP_WAIT_POLICY ?= PASSIVE
# Each process would compile the tests anew.
test test-slow nightly: export PYTHONDONTWRITEBYTECODE =
engine-%: export PYTHONDONTWRITEBYTECODE =
# More words for pip, for example where a CPU build of torch is to be found.
PIP_FLAGS ?=

bin := $(VENV)/bin
pip_words := --quiet --disable-pip-version-check $(PIP_FLAGS)
install := $(bin)/python -m pip install $(pip_words) -c constraints.txt

.PHONY: demo test test-slow test-all nightly prove gpu-report corpus test-versions check dist docs docs-serve faults faults-divided kills soak bench clean

# This distwrap, also where the caller's environment has another.
demo: $(VENV)-demo/.installed
	@PYTHONPATH="$(CURDIR)" $(VENV)-demo/bin/python examples/demo.py $(WORDS)

test: $(VENV)/.installed-test
	$(bin)/python -m pytest $(JOBS) --tier test

test-slow: $(VENV)/.installed-test
	$(bin)/python -m pytest $(JOBS) --tier slow

# Both, also where the first one fails.
test-all:
	$(MAKE) test; code=$$?; $(MAKE) test-slow && exit $$code

ROWS ?=
WORDS ?=
nightly: $(VENV)/.installed-test
	JOBS="$(JOBS)" $(bin)/python -m tests.nightly $(if $(ROWS),--rows '$(ROWS)') $(WORDS)

gpu-report:
	$(PYTHON) -m tests.gpu_report --out build/gpu-report

prove: $(VENV)/.installed-test
	JOBS="$(JOBS)" $(bin)/python -m tests.nightly --rows prove

ONLY ?= .
corpus: $(VENV)/.installed-test
	$(bin)/python -m tests.corpus --only '$(ONLY)'

.PRECIOUS: $(VENV)-%/.installed
# The tests of an engine, where it is installed; a row of `make nightly`.
engine-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pytest --tier nightly -m "slow or not slow" tests/engines/test_untouched.py tests/engines/$*

SESSIONS ?=
test-versions: $(VENV)/.installed-versions
	PIP_FLAGS='$(PIP_FLAGS)' $(bin)/python -m nox $(if $(SESSIONS),-s '$(SESSIONS)')

TIMES ?= 100
faults: $(VENV)/.installed-test
	FAULTS_LAUNCHES=1000 $(bin)/python -m pytest tests/faults/test_scale.py
	$(bin)/python -m tests.faults.run --times $(TIMES) --busy --jobs 6 --resume benchmarks/faults-matrix.jsonl \
		--write benchmarks/faults-matrix.md

faults-divided: $(VENV)/.installed-test
	$(bin)/python -m tests.faults.divided --times $(TIMES) --busy --jobs 6 --resume $(VENV)/faults-divided.jsonl \
		--write benchmarks/faults-divided.md

kills: TIMES = 300
kills: $(VENV)/.installed-test
	KILLS=$(TIMES) MUTATIONS=10000 $(bin)/python -m pytest tests/checkpoint/test_crashes.py tests/checkpoint/test_malice.py
	$(bin)/python -m tests.checkpoint.kills --times $(TIMES)

soak: $(VENV)/.installed-test
	$(bin)/python -m tests.guarded.soak --seconds 600

check: $(VENV)/.installed-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/basedpyright --pythonpath $(bin)/python
	$(bin)/python docs/check.py
	$(bin)/python docs/list_names.py --check
	$(bin)/python -m tests.house.check
	$(bin)/python .ci/release.py

dist: $(VENV)/.installed-dev
	$(bin)/python .ci/release.py

docs: $(VENV)/.installed-docs
	$(bin)/sphinx-build -q -W --keep-going -E -b html docs build/docs

docs-serve: docs
	$(bin)/python -m http.server --bind 127.0.0.1 --directory build/docs 8000

bench: $(VENV)/.installed-test
	$(bin)/python benchmarks/launch.py
	$(bin)/python benchmarks/step.py
	$(bin)/python benchmarks/checkpoint.py
	$(bin)/python benchmarks/faults.py
	$(bin)/python benchmarks/mistakes.py
	$(bin)/python benchmarks/clusters.py
	$(bin)/python benchmarks/data.py
	$(bin)/python benchmarks/sharded.py
	$(bin)/python benchmarks/engines.py
	$(bin)/python benchmarks/codecs.py
	$(bin)/python benchmarks/imports.py
	$(bin)/python benchmarks/simulate.py
	$(bin)/python benchmarks/control_plane.py
	$(bin)/python benchmarks/report.py
	$(bin)/python benchmarks/slow_loops.py
	$(bin)/python benchmarks/slow_link.py

# Horovod is built here, which takes minutes: its own files ask for C++14, and torch for C++17.
$(VENV)-horovod/.installed: setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)-horovod
	$(VENV)-horovod/bin/python -m pip install $(pip_words) -c constraints.txt torch numpy setuptools wheel cffi \
		cloudpickle psutil pyyaml packaging 'cmake<4'
	printf '#!/bin/sh\nexec g++ "$$@" -std=c++17\n' > $(VENV)-horovod/c++
	chmod +x $(VENV)-horovod/c++
	CXX=$(abspath $(VENV)-horovod/c++) HOROVOD_CMAKE=$(abspath $(VENV)-horovod/bin/cmake) MAKEFLAGS=-j2 \
		HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
		HOROVOD_WITHOUT_MXNET=1 $(VENV)-horovod/bin/python -m pip install $(pip_words) -c constraints.txt \
		--no-build-isolation -e '.[test-horovod]'
	touch $@

# torch_xla works with the torch of its own version alone, which brings CUDA: gigabytes.
$(VENV)-xla/.installed: setup.cfg setup.py
	$(PYTHON) -m venv $(VENV)-xla
	$(VENV)-xla/bin/python -m pip install $(pip_words) torch==2.9.0 torch_xla==2.9.0
	$(VENV)-xla/bin/python -m pip install $(pip_words) -e '.[test-xla]'
	touch $@

# Each finds distwrap, torch and all else that tests need where they are installed already, after its own packages.
# DeepSpeed's setup wants torch at hand, and would build operators.
site_packages = $$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$(VENV)-%/.installed: setup.cfg setup.py constraints.txt $(VENV)/.installed-test
	$(bin)/python -m venv $(VENV)-$*
	echo "import site; site.addsitedir('$(call site_packages,$(bin))')" > "$(call site_packages,$(VENV)-$*/bin)/tests.pth"
	$(VENV)-$*/bin/python -m pip install $(pip_words) -c constraints.txt setuptools wheel
	DS_BUILD_OPS=0 $(VENV)-$*/bin/python -m pip install $(pip_words) -c constraints.txt --no-build-isolation \
		'distwrap[test-$*]'
	touch $@

clean:
	rm -rf build dist *.egg-info .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis digits.pt digits_retrofit.pt
	rm -f $(VENV)/.installed-*
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

# Without NVIDIA's driver, with the CPU build of torch. The stamp is there once all of it has ended well.
$(VENV)/.environment:
	$(PYTHON) .ci/environment.py --own-torch $(VENV) -c constraints.txt $(PIP_FLAGS)
	touch $@

$(VENV)-demo/.installed: setup.cfg setup.py .ci/environment.py
	@$(PYTHON) .ci/environment.py --editable . $(VENV)-demo $(PIP_FLAGS)
	@touch $@

$(VENV)/.installed-test: extras := test
$(VENV)/.installed-dev: extras := dev
$(VENV)/.installed-docs: extras := docs
$(VENV)/.installed-versions: extras := versions
$(VENV)/.installed-ci: extras := dev,docs

# A stamp a set of extras: installing again waits until what is asked for has changed.
$(VENV)/.installed-%: setup.cfg setup.py constraints.txt | $(VENV)/.environment
	$(install) -e '.[$(extras)]'
	touch $@
