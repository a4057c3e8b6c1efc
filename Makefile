# fdsl-bench
#
#   make            builds ./fdsl-bench with what this machine has; says what it found
#   make bench      installs what is missing, builds, runs every variant that runs here, writes results/*.csv
#   make check      installs what is missing, builds, passes the tests and the linters (SAN=1: under ASan, UBSan)
#   make check-gpu  verifies every variant over a grid of sizes, on a machine with a GPU
#   make check-slurm  builds, then runs a sweep as a job array under a Slurm of its own; as root
#   make plots      draws the figures of results/*.csv and results/reference/ into results/plots/
#   make report     writes results/report.html: figures, rows, the commands that repeat them
#   make fuzz       feeds the parsers of files to libFuzzer, a minute each (FUZZ_TIME=60); needs clang
#   make install    PREFIX=/usr/local: the program, its man page and shell completion
#   make clean
#   V=1             shows the commands
#
# A part is used when it is found. Leave one out with NAME=0, e.g. make CUDA=0 OMP=0.
# CUDA_ARCHS="90 100" sets the GPU architectures; by default this machine's GPU, or all that nvcc knows of ours.

VERSION  := 0.1.0
PREFIX   ?= /usr/local
CC       ?= cc
CFLAGS   ?= -O3 -g
SAN      ?= 0
BUILD    := build$(if $(filter 1,$(SAN)),/san)
PROGRAM  := $(if $(filter 1,$(SAN)),$(BUILD)/)fdsl-bench
V        ?= 0
say      := $(if $(filter 1,$(V)),@:,@printf '  %-4s %s\n')
Q        := $(if $(filter 1,$(V)),,@)
.DEFAULT_GOAL := all

# --- What this machine has ---------------------------------------------------------------------------------

CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda /usr/lib/cuda /opt/cuda))
NVCC      ?= $(firstword $(shell command -v nvcc) $(wildcard $(CUDA_HOME)/bin/nvcc))

comma := ,
# $(call found,header,link flags,compiler flags): 1 where a program with that header compiles and links
found = $(shell printf '\043include <stddef.h>\n\043include <stdio.h>\n\043include <$(1)>\nint main(void){return 0;}\n' | \
          $(CC) -x c - -o /dev/null $(3) $(2) 2>/dev/null && echo 1)

ifneq ($(filter clean format plots report,$(MAKECMDGOALS)),$(or $(MAKECMDGOALS),all))
# $(call part,NAME,value): the value unless NAME= was given; expanded once, as every use would probe again
part = $(if $(filter undefined,$(origin $(1))),$(eval $(1) := $(2)))

$(call part,CUDA,$(if $(NVCC),1))
$(call part,OMP,$(call found,omp.h,,-fopenmp))
$(call part,PNG,$(call found,png.h,-lpng))
$(call part,JANSSON,$(call found,jansson.h,-ljansson))
$(call part,XXHASH,$(call found,xxhash.h,-lxxhash))
$(call part,ZLIB,$(call found,zlib.h,-lz))
$(call part,CRYPTO,$(call found,openssl/evp.h,-lcrypto))
$(call part,URING,$(call found,liburing.h,-luring))
$(call part,INIH,$(call found,ini.h,-linih))
$(call part,HWLOC,$(call found,hwloc.h,-lhwloc))
# "gcc -I... -L... -lmpi" of Open MPI and of MPICH alike
MPICC   ?= mpicc
MPI_FLAGS := $(shell $(MPICC) -show 2>/dev/null)
MPI_CFLAGS := $(filter -I% -D%,$(MPI_FLAGS))
MPI_LIBS   := $(filter -L% -l% -Wl$(comma)%,$(MPI_FLAGS))
$(call part,MPI,$(call found,mpi.h,$(MPI_LIBS),$(MPI_CFLAGS)))
$(call part,CRITERION,$(call found,criterion/criterion.h,-lcriterion))
NVTX_INCLUDE := $(firstword $(wildcard $(addsuffix /nvtx3/nvToolsExt.h,$(CUDA_HOME)/include /usr/include)))
$(call part,NVTX,$(if $(NVTX_INCLUDE),1))
$(call part,ARCHIVE,$(call found,archive.h,-larchive))
# Its header alone: the library is opened at run time.
$(call part,CUDNN,$(if $(and $(filter 1,$(CUDA)),$(wildcard $(addsuffix /cudnn.h,$(CUDA_HOME)/include /usr/include /usr/include/*-linux-gnu))),1))
endif
on = $(filter 1,$($(1)))

CPPFLAGS += -Isrc -Icuda -Impi -D_GNU_SOURCE -DFDSL_VERSION='"$(VERSION)"' \
            $(foreach part,CUDA MPI PNG JANSSON XXHASH ZLIB CRYPTO URING INIH HWLOC NVTX CUDNN,$(if $(call on,$(part)),-DHAVE_$(part)=1))
LDLIBS   += $(if $(call on,PNG),-lpng) $(if $(call on,JANSSON),-ljansson) $(if $(call on,XXHASH),-lxxhash) \
            $(if $(call on,ZLIB),-lz) $(if $(call on,CRYPTO),-lcrypto) $(if $(call on,URING),-luring) $(if $(call on,INIH),-linih) \
            $(if $(call on,HWLOC),-lhwloc) $(if $(call on,MPI),$(MPI_LIBS)) -lpthread -ldl -lm

# No -ffast-math, and no contraction left to the compiler: the same bits everywhere.
EXACT    := -ffp-contract=off
WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla
ALL_CFLAGS = -std=gnu11 $(CFLAGS) $(EXACT) $(WARNINGS) $(if $(call on,OMP),-fopenmp,-Wno-unknown-pragmas) $(SAN_FLAGS)
ifeq ($(SAN),1)
SAN_FLAGS := -O2 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif

# --- CUDA ----------------------------------------------------------------------------------------------------

ifneq ($(call on,CUDA),)
OUR_ARCHS  := 80 86 89 90 100 120
NVCC_ARCHS := $(shell $(NVCC) --list-gpu-code 2>/dev/null | sed -n 's/^sm_//p')
GPU_ARCHS  := $(sort $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9.]+$$')))
$(call part,CUDA_ARCHS,$(or $(filter $(NVCC_ARCHS),$(GPU_ARCHS)),$(filter $(NVCC_ARCHS),$(OUR_ARCHS))))
GENCODE    := $(foreach arch,$(CUDA_ARCHS),-gencode arch=compute_$(arch),code=sm_$(arch))
# --fmad=false: where the images want a fused multiply-add they say fmaf.
NVCCFLAGS  ?= -O3 -lineinfo
ALL_NVCCFLAGS = -std=c++20 $(NVCCFLAGS) --fmad=false $(GENCODE) $(CPPFLAGS) -Xcompiler -Wall,-Wextra,-Wno-pedantic,-Wno-missing-field-initializers
CUDA_LIBRARY := $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/targets/x86_64-linux/lib))
LDLIBS += $(if $(CUDA_LIBRARY),-L$(CUDA_LIBRARY)) -lcudadevrt -lcudart_static -lpthread -ldl -lrt -lstdc++
endif

# --- Sources -------------------------------------------------------------------------------------------------

C_SOURCES := $(wildcard src/*.c src/*/*.c) $(filter-out $(if $(call on,OMP),,cpu/synth/omp% cpu/train/omp%),$(wildcard cpu/*/*.c)) \
             mpi/launcher.c mpi/launcher_watch.c mpi/$(if $(call on,MPI),comm_mpi.c,comm_serial.c)
S_SOURCES := $(wildcard src/*/*.S)
CU_SOURCES := $(filter-out $(if $(call on,XXHASH),,cuda/load/%),$(if $(call on,CUDA),$(wildcard cuda/*/*.cu)))
CU_SOURCES := $(filter-out $(if $(call on,CUDNN),,cuda/train/cudnn.cu),$(CU_SOURCES))
C_SOURCES += $(if $(call on,CUDA),,cuda/common/device_none.c cuda/common/consumer_none.c)
C_SOURCES := $(filter-out $(if $(call on,XXHASH),,cpu/load/%) $(if $(call on,URING),,cpu/load/%uring.c),$(C_SOURCES))

# Kernels that launch kernels: relocatable device code, linked once more by nvcc.
RDC_SOURCES := $(filter cuda/synth/bat.cu cuda/synth/bat_reuse.cu cuda/synth/gbase_device.cu,$(CU_SOURCES))
RDC_OBJECTS := $(RDC_SOURCES:%=$(BUILD)/%.o)

OBJECTS := $(C_SOURCES:%=$(BUILD)/%.o) $(S_SOURCES:%=$(BUILD)/%.o) $(CU_SOURCES:%=$(BUILD)/%.o) \
           $(if $(RDC_OBJECTS),$(BUILD)/device_link.o)
TESTS   := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
# Need a GPU: built wherever nvcc is, run by check-gpu.
GPU_TESTS := $(if $(call on,CUDA),$(patsubst tests/%.cu,$(BUILD)/tests/%,$(wildcard tests/gpu_*.cu)))

# --- Rules ---------------------------------------------------------------------------------------------------

.PHONY: all bench check check-gpu check-slurm fuzz plots report report-parts install clean format lint tests FORCE

all: report-parts $(PROGRAM)

mark = $(if $(call on,$(1)),✓,✗)
report-parts:
	@printf '%s\n' \
	  '$(call mark,CUDA) CUDA      $(if $(call on,CUDA),$(NVCC) for sm_$(subst $(eval) ,$(eval) sm_,$(strip $(CUDA_ARCHS))),GPU variants are left out: no nvcc, or CUDA=0)' \
	  '$(call mark,OMP) OpenMP    $(if $(call on,OMP),,omp is left out)' \
	  '$(call mark,MPI) MPI       $(if $(call on,MPI),,one rank only: not under mpirun)' \
	  '$(call mark,PNG) libpng    $(if $(call on,PNG),,no PNG files)' \
	  '$(call mark,JANSSON) jansson   $(if $(call on,JANSSON),,no --format json, no wids index)' \
	  '$(call mark,INIH) inih      $(if $(call on,INIH),,no presets: --classes is left out)' \
	  '$(call mark,XXHASH) xxHash    $(if $(call on,XXHASH),,no digests of images, no --prepare, no loading)' \
	  '$(call mark,ZLIB) zlib      $(if $(call on,ZLIB),,--prepare reads no .gz)' \
	  '$(call mark,CRYPTO) libcrypto $(if $(call on,CRYPTO),,no md5 in the wids index)' \
	  '$(call mark,URING) liburing  $(if $(call on,URING),,files-uring and shards-uring are left out)' \
	  '$(call mark,HWLOC) hwloc     $(if $(call on,HWLOC),,cores are read from /proc)' \
	  '$(call mark,CUDNN) cuDNN     $(if $(call on,CUDNN),,train-cudnn is left out)' \
	  '$(call mark,NVTX) NVTX      $(if $(call on,NVTX),,no ranges for profilers)'

# Objects depend on the flags that made them: this file changes only when they do.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(CC) $(ALL_CFLAGS) $(subst ','\'',$(CPPFLAGS)) $(NVCC) $(subst ','\'',$(ALL_NVCCFLAGS)) $(LDLIBS)' | \
	  cmp -s - $@ || printf '%s\n' '$(CC) $(ALL_CFLAGS) $(subst ','\'',$(CPPFLAGS)) $(NVCC) $(subst ','\'',$(ALL_NVCCFLAGS)) $(LDLIBS)' > $@

# The revision that rows carry, as a header that changes only when it does.
# An exported tree inside another repository has none.
REVISION := $(or $(strip $(if $(filter $(CURDIR),$(shell git rev-parse --show-toplevel 2>/dev/null)),\
              $(shell git describe --always --dirty --abbrev=12 2>/dev/null))),unknown)
$(BUILD)/revision: FORCE
	@mkdir -p $(@D)
	@echo '$(REVISION)' | cmp -s - $@ || echo '$(REVISION)' > $@
$(BUILD)/mpi/comm_mpi.c.o: CPPFLAGS += $(MPI_CFLAGS)
$(BUILD)/src/core/range.c.o: CPPFLAGS += $(if $(call on,NVTX),-idirafter $(NVTX_INCLUDE:/nvtx3/nvToolsExt.h=))
$(BUILD)/src/core/env.c.o: CPPFLAGS += -DFDSL_REVISION='"$(REVISION)"'
$(BUILD)/src/core/env.c.o: $(BUILD)/revision

$(PROGRAM): $(OBJECTS)
	$(say) LD $@
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $^ $(LDLIBS)

# sqrtf in vectors: the value is the same, errno is not looked at.
$(BUILD)/cpu/train/omp%.c.o: ALL_CFLAGS += -fno-math-errno
$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) CC $@
	$(Q)$(CC) $(ALL_CFLAGS) $(CPPFLAGS) -MMD -MP -c -o $@ $<

$(BUILD)/%.S.o: %.S configs/classes.cfg $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) AS $@
	$(Q)$(CC) -c -o $@ $<

$(RDC_OBJECTS): ALL_NVCCFLAGS += -rdc=true
$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) NVCC $@
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

$(BUILD)/device_link.o: $(RDC_OBJECTS)
	$(say) NVCC $@
	$(Q)$(NVCC) $(GENCODE) -dlink -o $@ $^ -lcudadevrt

$(BUILD)/tests/%: tests/%.c $(filter-out $(BUILD)/src/main.c.o,$(OBJECTS)) $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(ALL_CFLAGS) $(CPPFLAGS) -Itests -MMD -MP -MF $@.d -o $@ $< $(filter %.o,$^) -lcriterion $(LDLIBS)

# Only tests know libarchive: it reads our shards.
$(BUILD)/tests/test_tar $(BUILD)/tests/test_prepare: CPPFLAGS += $(if $(call on,ARCHIVE),-DHAVE_ARCHIVE=1)
$(BUILD)/tests/test_tar $(BUILD)/tests/test_prepare: LDLIBS += $(if $(call on,ARCHIVE),-larchive)

$(GPU_TESTS): $(BUILD)/tests/%: tests/%.cu $(filter-out $(BUILD)/src/main.c.o,$(OBJECTS)) $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) NVCC $@
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -MMD -MP -MF $@.d -c -o $@.o $<
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $@.o $(filter-out $(BUILD)/flags tests/%,$^) $(LDLIBS)

-include $(OBJECTS:.o=.d) $(TESTS:=.d) $(GPU_TESTS:=.d)

# --- The two commands ------------------------------------------------------------------------------------------

# Set-up runs first, in a make of its own, so that what it installs is found by the probes above.
bench:
	@scripts/setup.sh build
	@$(MAKE) --no-print-directory all
	@scripts/bench.sh

check:
	@scripts/setup.sh check
	@$(MAKE) --no-print-directory all tests
	@FDSL_BENCH=$(abspath $(PROGRAM)) scripts/check.sh $(BUILD) $(SAN)

check-gpu: all $(GPU_TESTS)
	@scripts/check_gpu.sh
	@for engine in cuda tf32 bf16 amp; do scripts/check_train_gpu.sh --engine $$engine || exit; done

check-slurm:
	@scripts/setup.sh check-slurm
	@$(MAKE) --no-print-directory all
	@FDSL_BENCH=$(abspath $(PROGRAM)) tests/slurm_local.sh

tests: $(TESTS) $(GPU_TESTS)

# The parsers alone, with clang's coverage and sanitizers, in one program.
FUZZ_CC      ?= $(firstword $(shell command -v clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14))
FUZZ_SOURCES := tests/fuzz/fuzz.c src/load/tar.c src/load/key.c src/core/npy_header.c src/load/idx.c src/load/cifar.c \
                src/load/index.c src/load/dali.c src/load/wids.c src/core/bytes.c src/core/png_image.c src/core/file.c \
                src/core/record.c src/core/status.c src/core/text.c src/core/env.c src/core/options.c src/synth/class.c \
                src/synth/classes_cfg.S src/train/checkpoint.c src/train/model.c
fuzz:
	$(if $(FUZZ_CC),,$(error make fuzz needs clang and its libFuzzer: apt install clang libclang-rt-dev))
	@mkdir -p $(BUILD)
	$(say) LD $(BUILD)/fuzz-targets
	$(Q)$(FUZZ_CC) -std=gnu11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(CPPFLAGS) -Itests/fuzz \
	  -o $(BUILD)/fuzz-targets $(FUZZ_SOURCES) $(LDLIBS)
	@scripts/fuzz.sh $(BUILD)/fuzz-targets $(FUZZ_TARGETS)

lint:
	@scripts/lint.sh

format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

plots:
	@scripts/setup.sh plots
	@scripts/figures.py

report:
	@scripts/setup.sh plots
	@scripts/report.py

install: all
	install -D -m 755 fdsl-bench "$(DESTDIR)$(PREFIX)/bin/fdsl-bench"
	scripts/man.sh ./fdsl-bench $(VERSION) > $(BUILD)/fdsl-bench.1
	install -D -m 644 $(BUILD)/fdsl-bench.1 "$(DESTDIR)$(PREFIX)/share/man/man1/fdsl-bench.1"
	install -D -m 644 scripts/completion.bash "$(DESTDIR)$(PREFIX)/share/bash-completion/completions/fdsl-bench"

clean:
	rm -rf build fdsl-bench
