# fdsl-bench
#
#   make              builds ./fdsl-bench with the libraries of this machine, and lists them
#   make lib          builds build/lib/libfdsl.so and libfdsl.a, for C and C++ (src/lib/fdsl.h)
#   make wheel        writes dist/fdsl-VERSION-*.whl, the Python package with libfdsl.so
#   make bench        installs missing packages, builds, runs the variants of synth, load, train and infer, writes results/*.csv
#   make check        installs missing packages, builds, runs tests and linters (SAN=1: with ASan and UBSan).
#                     ONLY=REGEX: only suites with matching names; JOBS=N: suites at a time; LIMIT=N: seconds per suite
#   make plots        installs missing packages, draws results/plots/ from results/*.csv and results/reference/
#   make report       installs missing packages, writes results/report.html: figures, rows and the commands that measured them
#   make install      copies program, library, header, man pages and completion to PREFIX=/usr/local (LIBDIR, DESTDIR)
#   make dist         writes dist/fdsl-bench-VERSION-MACHINE.tar.gz, with code for all supported GPU architectures
#   make check-python runs the tests of the Python package; installs PyTorch in build/python (3 GB to download) if it is missing
#   make check-gpu    verifies the GPU variants of synth and train, and the Python package, on a machine with a GPU
#   make check-slurm  installs Slurm, builds, runs a sweep as a job array under a temporary Slurm; needs root
#   make fuzz         fuzzes the file parsers with libFuzzer, one minute each (FUZZ_TIME=60); needs clang
#   make lint         runs the linters; make format formats the C and CUDA files
#   make clean        removes build/, dist/ and the program
#
#   CUDA=0            builds without CUDA; the same works for MPI, OMP, PNG, JPEG, WEBP, CURL, EXPAT, JANSSON, INIH, XXHASH, ZLIB, ZSTD, CRYPTO, URING, HWLOC, CUBLAS, CUDNN, NCCL, NVJPEG, CUFILE, NVTX
#   CUDA_ARCHS="90"   GPU architectures, or all. Default: those of this machine's GPUs; without a GPU, sm_80
#                     and PTX, which the driver of a newer GPU compiles when it loads kernels
#   -j4               number of jobs; default: one per core
#   REVISION=NAME     the revision that rows contain; default: the revision of git
#   SETUP=0           bench, check, check-slurm, plots and report list missing packages instead of installing them
#   V=1               shows the commands

VERSION  := 0.2.0
PREFIX   ?= /usr/local
LIBDIR   ?= $(PREFIX)/lib
CC       ?= cc
SAN      ?= 0
CFLAGS   ?= $(if $(filter 1,$(SAN)),-O2,-O3) -g
BUILD    := build$(if $(filter 1,$(SAN)),/san)
PROGRAM  := $(if $(filter 1,$(SAN)),$(BUILD)/)fdsl-bench
V        ?= 0
OBJCOPY  ?= objcopy
# Disable built-in rules: they are not used here, and searching them takes time.
MAKEFLAGS += -r
say      := $(if $(filter 1,$(V)),@:,@printf '  %-4s %s\n')
Q        := $(if $(filter 1,$(V)),,@)
.DEFAULT_GOAL := all

# Goals that build nothing, or that call make again for the build
APART := bench check check-slurm dist clean format lint plots report help

# One job per core unless -j is given. nproc would obey OMP_NUM_THREADS, which is not meant for make.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(or $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null),1)
endif
# Print each target's output in one piece, except for long runs.
ifeq ($(filter $(APART) check-gpu fuzz,$(MAKECMDGOALS)),)
MAKEFLAGS += --output-sync=target
endif

# --- Available compilers and libraries ---------------------------------------------------------------------

comma := ,
empty :=
space := $(empty) $(empty)
folders = $(subst :, ,$(1))
# $(call program,NAME ARGUMENT...): the path of the program NAME, from PATH or NAME itself; empty if there is none
program = $(firstword $(wildcard $(addsuffix /$(firstword $(1)),$(call folders,$(PATH)))) $(wildcard $(firstword $(1))))

CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda /usr/lib/cuda /opt/cuda))
NVCC      ?= $(firstword $(call program,nvcc) $(wildcard $(CUDA_HOME)/bin/nvcc))
MPICC     ?= $(if $(MPI_HOME),$(MPI_HOME)/bin/)mpicc

ifneq ($(filter-out $(APART),$(or $(MAKECMDGOALS),all)),)
# scripts/setup/probe.sh writes found.mk. This file is valid while FOUND_FOR is unchanged and no file or folder in
# FOUND_IN is newer than it. Installing a package changes at least one file or folder in FOUND_IN.
FOUND     := $(BUILD)/found.mk
FOUND_FOR := $(strip $(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $(foreach tool,$(CC) $(MPICC) $(NVCC),$(call program,$(tool))) \
               $(CPATH) $(C_INCLUDE_PATH) $(LIBRARY_PATH) $(file </proc/sys/kernel/hostname) $(wildcard /proc/driver/nvidia/gpus/*))
FOUND_IN  := scripts/setup/probe.sh $(foreach tool,$(CC) $(MPICC) $(NVCC),$(call program,$(tool))) \
             $(wildcard /usr/include /usr/include/*-linux-gnu /usr/local/include /usr/local/lib \
               $(call folders,$(CPATH) $(C_INCLUDE_PATH) $(LIBRARY_PATH)) \
               /var/lib/dpkg/status /var/lib/rpm/rpmdb.sqlite /usr/lib/sysimage/rpm/rpmdb.sqlite)
ifneq ($(FOUND_FOR),$(strip $(file <$(FOUND).for)))
FOUND_IN  += FORCE
endif
# Probe only once per call. Otherwise make would probe endlessly if files have timestamps in the future.
$(FOUND): $(if $(MAKE_RESTARTS),,$(FOUND_IN))
	@mkdir -p $(@D)
	@scripts/setup/probe.sh > $@.new
	@mv $@.new $@
	@printf '%s\n' "$$FOUND_FOR" > $@.for
$(FOUND): export CC := $(CC)
$(FOUND): export FLAGS := $(CPPFLAGS) $(CFLAGS) $(LDFLAGS)
$(FOUND): export MPICC := $(MPICC)
$(FOUND): export NVCC := $(NVCC)
$(FOUND): export FOUND_FOR := $(FOUND_FOR)
include $(FOUND)
endif

# NAME=0 on the command line or in the environment overrides these defaults.
CUDA    ?= $(if $(NVCC),1)
OMP     ?= $(found_OMP)
PNG     ?= $(found_PNG)
JPEG    ?= $(found_JPEG)
WEBP    ?= $(found_WEBP)
CURL    ?= $(found_CURL)
EXPAT   ?= $(found_EXPAT)
JANSSON ?= $(found_JANSSON)
XXHASH  ?= $(found_XXHASH)
ZLIB    ?= $(found_ZLIB)
ZSTD    ?= $(found_ZSTD)
CRYPTO  ?= $(found_CRYPTO)
URING   ?= $(found_URING)
INIH    ?= $(found_INIH)
HWLOC   ?= $(found_HWLOC)
MPI     ?= $(found_MPI)
ARCHIVE ?= $(found_ARCHIVE)
# NVTX, cuBLAS, cuDNN, NCCL, nvJPEG and cuFile need only their headers to build. The program finds these libraries at run time, if they are installed.
NVTX_INCLUDE := $(firstword $(wildcard $(addsuffix /nvtx3/nvToolsExt.h,$(CUDA_HOME)/include /usr/include)))
NVTX    ?= $(if $(NVTX_INCLUDE),1)
header = $(if $(and $(filter 1,$(CUDA)),$(wildcard $(addsuffix /$(1),$(CUDA_HOME)/include /usr/include /usr/include/*-linux-gnu /usr/local/include))),1)
CUBLAS  ?= $(call header,cublasLt.h)
CUDNN   ?= $(call header,cudnn.h)
NCCL    ?= $(call header,nccl.h)
NVJPEG  ?= $(call header,nvjpeg.h)
CUFILE  ?= $(call header,cufile.h)
on = $(filter 1,$($(1)))

have = $(foreach part,$(1),$(if $(call on,$(part)),-DHAVE_$(part)=1))
ALL_CPPFLAGS = -Isrc -Icuda -Impi -D_GNU_SOURCE -DFDSL_VERSION='"$(VERSION)"' \
            $(call have,MPI PNG JPEG WEBP CURL EXPAT JANSSON XXHASH ZLIB ZSTD CRYPTO URING INIH HWLOC NVTX) $(CPPFLAGS)
# Builds with and without CUDA share the objects of all C files but these, which ask for HAVE_CUDA, HAVE_CUBLAS, HAVE_CUDNN or HAVE_CUFILE.
CUDA_CPPFLAGS = $(call have,CUDA CUBLAS CUDNN NCCL NVJPEG CUFILE)
ASK_CUDA := src/core/variant src/lib/fdsl src/train/exchange tests/test_cli tests/test_mpi_shares tests/test_train_cli tests/test_train_scripts tests/test_variant
ALL_LDLIBS = $(LDLIBS) $(if $(call on,PNG),-lpng) $(if $(call on,JPEG),-ljpeg) $(if $(call on,WEBP),-lwebp) $(if $(call on,CURL),-lcurl) $(if $(call on,EXPAT),-lexpat) $(if $(call on,JANSSON),-ljansson) $(if $(call on,XXHASH),-lxxhash) \
            $(if $(call on,ZLIB),-lz) $(if $(call on,ZSTD),-lzstd) $(if $(call on,CRYPTO),-lcrypto) $(if $(call on,URING),-luring) $(if $(call on,INIH),-linih) \
            $(if $(call on,HWLOC),-lhwloc) $(if $(call on,MPI),$(MPI_LIBS)) -lpthread -ldl -lm $(CUDA_LIBS)

# No -ffast-math, and no fusing of multiply and add by the compiler, so that results are bit-identical everywhere.
EXACT    := -ffp-contract=off
WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla
# The program and the library use the same object files. Hidden symbols avoid the indirect accesses of -fPIC.
SHARED   := -fPIC -fvisibility=hidden
ALL_CFLAGS = -std=gnu11 $(CFLAGS) $(EXACT) $(WARNINGS) $(if $(call on,OMP),-fopenmp,-Wno-unknown-pragmas) $(SAN_FLAGS)
ifeq ($(SAN),1)
SAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif

# --- CUDA ----------------------------------------------------------------------------------------------------

ifneq ($(call on,CUDA),)
OUR_ARCHS   := 80 86 89 90 100 120
KNOWN_ARCHS := $(filter $(nvcc_archs),$(OUR_ARCHS))
# compute_N is PTX, which the driver compiles for GPUs of architecture N or newer.
CUDA_ARCHS  ?= $(or $(filter $(nvcc_archs),$(gpu_archs)),$(firstword $(KNOWN_ARCHS)) $(addprefix compute_,$(firstword $(KNOWN_ARCHS))))
ARCHS       := $(if $(filter all,$(CUDA_ARCHS)),$(KNOWN_ARCHS) $(addprefix compute_,$(lastword $(KNOWN_ARCHS))),$(CUDA_ARCHS))
codes       := $(foreach arch,$(ARCHS),$(if $(filter compute_%,$(arch)),$(arch),sm_$(arch)))
GENCODE     := $(or $(NVCC_GENCODE),$(foreach code,$(codes),-gencode arch=compute_$(patsubst sm_%,%,$(code:compute_%=%)),code=$(code)))
# Kernels for GPUs of compute capability 9.0 (*_hopper.cu) use instructions that only these GPUs have.
HOPPER     ?= $(if $(findstring _90,$(GENCODE)),1)
# The compiler does not list the headers in system folders as dependencies. make would check 20,000 times whether a header
# of the toolkit has changed.
CUDA_SYSTEM := $(addprefix -isystem ,$(filter-out /usr/include,$(realpath $(CUDA_HOME)/include)))
# --fmad=false: code that needs a fused multiply-add calls fmaf explicitly.
NVCCFLAGS  ?= -O3 -lineinfo
# C++17 takes less time, because the standard library's headers are shorter. cuda/ops has lambdas with template parameters.
CXX_STANDARD := c++17
ALL_NVCCFLAGS = -std=$(CXX_STANDARD) $(NVCCFLAGS) --fmad=false $(GENCODE) $(ALL_CPPFLAGS) $(CUDA_CPPFLAGS) $(CUDA_SYSTEM) $(if $(call on,HOPPER),-DHAVE_HOPPER=1) -Xcompiler $(subst $(space),$(comma),$(SHARED)),-fno-gnu-unique,-Wall,-Wextra,-Wno-pedantic,-Wno-missing-field-initializers
CUDA_LIBRARY := $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/targets/x86_64-linux/lib))
CUDA_LIBS := $(if $(CUDA_LIBRARY),-L$(CUDA_LIBRARY)) -lcudadevrt -lcudart_static -lpthread -ldl -lrt -lstdc++
endif

# --- Sources -------------------------------------------------------------------------------------------------

LIB_SOURCES := $(wildcard src/lib/*.c)
C_SOURCES := $(filter-out $(LIB_SOURCES),$(wildcard src/*.c src/*/*.c)) $(filter-out $(if $(call on,OMP),,cpu/synth/omp% cpu/ops/omp% cpu/train/omp%),$(wildcard cpu/*/*.c)) \
             mpi/launcher.c $(if $(call on,MPI),mpi/comm_mpi.c,mpi/comm_serial.c)
S_SOURCES := $(wildcard src/*/*.S)
CU_SOURCES := $(filter-out $(if $(call on,XXHASH),,cuda/load/% cuda/ops/%),$(if $(call on,CUDA),$(wildcard cuda/*/*.cu cuda/*/*/*.cu)))
CU_SOURCES := $(filter-out $(if $(call on,CUFILE),,cuda/load/gds.cu) $(if $(call on,CUDNN),,cuda/train/cudnn.cu) $(if $(call on,CUBLAS),,cuda/train/vit/% cuda/train/resnet/%) $(if $(call on,HOPPER),,cuda/train/graph/%_hopper.cu cuda/train/vit/%_hopper.cu cuda/train/resnet/%_hopper.cu),$(CU_SOURCES))
# Files that take longest to compile come first, which shortens parallel builds.
LONG_SOURCES := $(addprefix cuda/,ops/fused.cu train/allreduce_peer.cu train/allreduce_peer_one_shot.cu train/conv_backward.cu train/conv.cu train/conv_weights.cu load/unpack.cu \
                  train/linear.cu common/cub.cu ops/write.cu synth/fused_formula.cu \
                  synth/ladder.cu train/augment.cu train/allreduce_peer_update.cu train/packed_conv.cu train/graph/forward.cu train/graph/conv_back.cu load/ring.cu load/delivery.cu)
CU_SOURCES := $(foreach source,$(LONG_SOURCES),$(filter $(source),$(CU_SOURCES))) $(filter-out $(LONG_SOURCES),$(CU_SOURCES))
# fused_formula.cu is compiled once per formula that draws lines. Its objects are fused_formula.uji.cu.o and so on.
FORMULAS   := $(shell sed -n 's/^FORMULA.[A-Z0-9_]*, *\([a-z0-9_]*\), *LINES,.*/\1/p' src/synth/formulas.def)
CU_SOURCES := $(foreach source,$(CU_SOURCES),$(if $(filter %/fused_formula.cu,$(source)),$(FORMULAS:%=$(source:.cu=).%.cu),$(source)))
C_SOURCES += $(if $(call on,CUDA),,cuda/common/device_none.c) $(if $(and $(call on,CUDA),$(call on,XXHASH)),,cuda/ops/rows_device_none.c)
C_SOURCES := $(filter-out $(if $(call on,XXHASH),,cpu/load/% cpu/ops/%) $(if $(call on,URING),,cpu/load/uring.c),$(C_SOURCES))
# omp_simd.c is compiled once per instruction set: for vectors of 8 floats (AVX2), of 16 (AVX-512) and, in cpu/train, of 4
# (any machine). Its objects are omp_simd.8.c.o, omp_simd.16.c.o and omp_simd.4.c.o.
simd = $(foreach source,$(1),$(if $(filter %/omp_simd.c,$(source)),$(foreach lanes,8 16 $(if $(filter cpu/train/%,$(source)),4),$(source:.c=.$(lanes).c)),$(source)))
C_SOURCES := $(call simd,$(C_SOURCES))
# The oracle is naive.c in double, for --verify and for tests that compare gradients with finite differences.
C_SOURCES += src/train/naive.double.c

# CUDA kernels that launch kernels need relocatable device code and an additional link step by nvcc.
RDC_SOURCES := $(filter cuda/synth/bat.cu,$(CU_SOURCES))
RDC_OBJECTS := $(RDC_SOURCES:%=$(BUILD)/%.o)

$(BUILD)/cuda/ops/%.cu.o: private CXX_STANDARD := c++20
$(BUILD)/cuda/train/graph/%_hopper.cu.o $(BUILD)/cuda/train/vit/%_hopper.cu.o $(BUILD)/cuda/train/resnet/%_hopper.cu.o: private GENCODE := -gencode arch=compute_90a,code=sm_90a

OBJECTS := $(CU_SOURCES:%=$(BUILD)/%.o) $(C_SOURCES:%=$(BUILD)/%.o) $(S_SOURCES:%=$(BUILD)/%.o) \
           $(if $(RDC_OBJECTS),$(BUILD)/device_link.o)
TESTS   := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
# Tests that need a GPU: built if nvcc is available, run by check-gpu.
GPU_TESTS := $(if $(call on,CUDA),$(patsubst tests/%.cu,$(BUILD)/tests/%,$(wildcard tests/gpu_*.cu)))

# --- Rules ---------------------------------------------------------------------------------------------------

.PHONY: all lib wheel check-python bench check check-gpu check-slurm dist fuzz plots report report-parts help install install-files clean format lint tests FORCE

all: report-parts $(PROGRAM)

mark = $(if $(call on,$(1)),✓,✗)
report-parts:
	@printf '%s\n' \
	  '$(call mark,CUDA) CUDA      $(if $(call on,CUDA),$(NVCC) for $(codes),GPU variants are left out: no nvcc, or CUDA=0)' \
	  '$(call mark,OMP) OpenMP    $(if $(call on,OMP),,variants named *omp* are left out)' \
	  '$(call mark,MPI) MPI       $(if $(call on,MPI),,one rank only; mpirun with more ranks is refused)' \
	  '$(call mark,PNG) libpng    $(if $(call on,PNG),,no PNG files)' \
	  '$(call mark,JPEG) libjpeg   $(if $(call on,JPEG),,no JPEG files)' \
	  '$(call mark,WEBP) libwebp   $(if $(call on,WEBP),,no WebP files)' \
	  '$(call mark,CURL) libcurl   $(if $(call on,CURL),,no data sets at URLs)' \
	  '$(call mark,EXPAT) expat     $(if $(call on,EXPAT),,no lists of S3 and Azure: their shards must be named)' \
	  '$(call mark,JANSSON) jansson   $(if $(call on,JANSSON),,no --format json, no wids index, no .safetensors files, no labels in JSON)' \
	  '$(call mark,INIH) inih      $(if $(call on,INIH),,no --config, no presets except paper-1000 and lowercompute-1000)' \
	  '$(call mark,XXHASH) xxHash    $(if $(call on,XXHASH),,no digests of images, no --prepare, no loading, no ops)' \
	  '$(call mark,ZLIB) zlib      $(if $(call on,ZLIB),,no gzipped IDX files and shards, and no .npz)' \
	  '$(call mark,ZSTD) zstd      $(if $(call on,ZSTD),,no shards that are compressed by zstd)' \
	  '$(call mark,CRYPTO) libcrypto $(if $(call on,CRYPTO),,no md5 in the wids index, no signed requests to S3)' \
	  '$(call mark,URING) liburing  $(if $(call on,URING),,files-uring and shards-uring are left out)' \
	  '$(call mark,HWLOC) hwloc     $(if $(call on,HWLOC),,cores are read from /proc)' \
	  '$(call mark,CUBLAS) cuBLAS    $(if $(call on,CUBLAS),,train-vit*, train-resnet* and their infer-* are left out)' \
	  '$(call mark,CUDNN) cuDNN     $(if $(call on,CUDNN),,train-cudnn and train-cudnn-tf32 are left out)' \
	  '$(call mark,NCCL) NCCL      $(if $(call on,NCCL),,methods and variants named nccl are left out)' \
	  '$(call mark,NVJPEG) nvJPEG    $(if $(call on,NVJPEG),,shards-gpu decodes JPEG files on the CPU)' \
	  '$(call mark,CUFILE) cuFile    $(if $(call on,CUFILE),,gds is left out)' \
	  '$(call mark,NVTX) NVTX      $(if $(call on,NVTX),,no ranges for profilers)'

# Each file changes only when its flags change. Compiling depends on `flags` (C), `flags-parts` (C files in ASK_CUDA) and
# `flags-nvcc`, linking on `flags-link`, which also lists the objects. The `-` keeps a text from being empty, which would
# never compare as unchanged. A build without CUDA leaves `flags-nvcc` as it is, so
# that a later build with CUDA compiles no kernel again.
text_flags       = $(CC) $(ALL_CFLAGS) $(SHARED) $(ALL_CPPFLAGS)
text_flags-parts = $(CUDA_CPPFLAGS) -
text_flags-nvcc  = $(realpath $(NVCC)) $(ALL_NVCCFLAGS)
text_flags-link  = $(LDFLAGS) $(ALL_LDLIBS) $(OBJECTS)
FLAGS := $(addprefix $(BUILD)/,flags flags-parts flags-nvcc flags-link)
$(foreach file,$(FLAGS),$(if $(filter-out $(subst $(space),_,_$(strip $(text_$(notdir $(file))))),$(subst $(space),_,_$(file <$(file)))),$(eval $(file): FORCE)))
$(FLAGS):
	@mkdir -p $(@D)
	@printf '%s\n' '$(subst ','\'',$(strip $(text_$(@F))))' > $@

# The file `revision` has the revision for rows (REVISION, or git's) and changes only when the revision changes.
# If the tree is inside another repository, the revision is `unknown`.
$(BUILD)/revision: FORCE
	@mkdir -p $(@D)
	@revision='$(REVISION)'; [ "$$revision" ] || [ "$$(git rev-parse --show-toplevel 2>/dev/null)" != '$(CURDIR)' ] || \
	  revision=$$(git describe --always --dirty --abbrev=12 2>/dev/null); \
	  echo "$${revision:-unknown}" | cmp -s - $@ || echo "$${revision:-unknown}" > $@
$(BUILD)/mpi/comm_mpi.c.o: private ALL_CPPFLAGS += $(MPI_CFLAGS)
$(BUILD)/src/core/phase.c.o: private ALL_CPPFLAGS += $(if $(call on,NVTX),-idirafter $(NVTX_INCLUDE:/nvtx3/nvToolsExt.h=))
$(BUILD)/src/machine/host.c.o: private ALL_CPPFLAGS += -DFDSL_REVISION='"$(file <$(BUILD)/revision)"'
$(BUILD)/src/machine/host.c.o: $(BUILD)/revision

$(PROGRAM): $(OBJECTS) $(BUILD)/flags-link
	$(say) LD $@
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $(OBJECTS) $(ALL_LDLIBS)

# Allows the compiler to vectorise sqrtf: same values, but errno is not set.
$(BUILD)/cpu/train/omp%.c.o: private ALL_CFLAGS += -fno-math-errno
$(ASK_CUDA:src/%=$(BUILD)/src/%.c.o) $(ASK_CUDA:tests/%=$(BUILD)/tests/%.o): $(BUILD)/flags-parts
$(ASK_CUDA:src/%=$(BUILD)/src/%.c.o) $(ASK_CUDA:tests/%=$(BUILD)/tests/%.o): private ALL_CPPFLAGS += $(CUDA_CPPFLAGS)
$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) CC $@
	$(Q)$(CC) $(ALL_CFLAGS) $(SHARED) $(ALL_CPPFLAGS) -MMD -MP -c -o $@ $<

# Compiles the files $(1).c once more, as $(1).$(2).c.o, with the flag $(3).
define again_rule
$(BUILD)/%/$(1).$(2).c.o: %/$(1).c $(BUILD)/flags
	@mkdir -p $$(@D)
	$$(say) CC $$@
	$$(Q)$$(CC) $$(ALL_CFLAGS) $$(SHARED) $$(ALL_CPPFLAGS) $(3) -MMD -MP -c -o $$@ $$<
endef
$(foreach lanes,4 8 16,$(eval $(call again_rule,omp_simd,$(lanes),-DLANES=$(lanes))))
$(eval $(call again_rule,naive,double,-DFDSL_DOUBLE))

$(BUILD)/%.S.o: %.S $(wildcard configs/*.cfg configs/*.csv configs/*.bin) $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) AS $@
	$(Q)$(CC) -c -o $@ $<

# Files and GPU tests without kernels. As C++, they compile in less than half the time: nvcc would compile the headers of CUDA
# for the GPU, too. A file that gets a kernel leaves this list.
HOST_CU := $(addprefix cuda/,$(addprefix ops/,stage input row_batches) $(addprefix load/,ring ring_decode shards_gpu files_gpu stream_gpu delivery) \
             common/device_stream common/consumer train/network train/exchange train/allreduce_nccl train/vit/multiply)
HOST_TESTS := augment augment_times formulas graph lib_rows product timed train
$(HOST_CU:%=$(BUILD)/%.cu.o) $(HOST_TESTS:%=$(BUILD)/tests/gpu_%.o): private cuda_language := -x c++ -Xcompiler -Wno-unknown-pragmas
$(RDC_OBJECTS): private ALL_NVCCFLAGS += -rdc=true
$(BUILD)/%.cu.o: %.cu $(BUILD)/flags-nvcc
	@mkdir -p $(@D)
	$(say) NVCC $@
	$(Q)$(NVCC) $(cuda_language) $(ALL_NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

# Compiles fused_formula.cu for the formula $(1).
define formula_rule
$(BUILD)/%/fused_formula.$(1).cu.o: %/fused_formula.cu $(BUILD)/flags-nvcc
	@mkdir -p $$(@D)
	$$(say) NVCC $$@
	$$(Q)$$(NVCC) $$(ALL_NVCCFLAGS) -DFUSED_NAME=$(1) -MMD -MP -MF $$(@:.o=.d) -c -o $$@ $$<
endef
$(foreach formula,$(FORMULAS),$(eval $(call formula_rule,$(formula))))

$(BUILD)/device_link.o: $(RDC_OBJECTS)
	$(say) NVCC $@
	$(Q)$(NVCC) $(GENCODE) -dlink -o $@ $^ -lcudadevrt

# --- The library ---------------------------------------------------------------------------------------------

# libfdsl.a has one object: the library's files, linked with the objects that they use. Only the symbols fdsl_* and
# DW.ref.* (for C++ exceptions) stay global. libfdsl.so is linked from the same object. The object contains inih, so that
# users of the library need not install it.
SONAME      := libfdsl.so.$(firstword $(subst ., ,$(VERSION)))
LIB_OBJECTS := $(LIB_SOURCES:%=$(BUILD)/%.o) $(if $(call on,OMP),,$(patsubst %,$(BUILD)/%.o,$(call simd,$(wildcard cpu/synth/omp*.c))))
LIB_INIH     = $(if $(call on,INIH),$(or $(filter /%,$(shell $(CC) -print-file-name=libinih.a)),-linih))
# The libraries that the shared library needs beside glibc. The wheel brings copies of them, next to libfdsl.so:
# DT_RPATH (not DT_RUNPATH) is also searched for what these libraries need. src/lib/late.c opens others at run time.
LIB_LIBS     = $(if $(call on,OMP),-lgomp) $(if $(call on,XXHASH),-lxxhash) $(if $(call on,PNG),-lpng) $(if $(call on,JPEG),-ljpeg) $(if $(call on,WEBP),-lwebp) $(if $(call on,JANSSON),-ljansson) $(if $(call on,ZLIB),-lz) $(if $(call on,ZSTD),-lzstd)
lib: $(BUILD)/lib/libfdsl.so $(BUILD)/lib/libfdsl.a

$(BUILD)/lib/fdsl.o: $(LIB_OBJECTS) $(BUILD)/objects.a
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(LD) -r -o $@.all $(LIB_OBJECTS) $(BUILD)/objects.a $(filter %.a,$(LIB_INIH)) $(addsuffix /libcudadevrt.a,$(CUDA_LIBRARY))
	$(Q)$(OBJCOPY) --wildcard --keep-global-symbol='fdsl_*' --keep-global-symbol='DW.ref.*' $@.all $@
	@rm -f $@.all

$(BUILD)/lib/libfdsl.a: $(BUILD)/lib/fdsl.o
	$(say) AR $@
	$(Q)rm -f $@ && $(AR) rcs $@ $<

$(BUILD)/lib/$(SONAME): $(BUILD)/lib/fdsl.o src/lib/fdsl.map
	$(say) LD $@
	$(Q)$(CC) $(filter-out -fopenmp,$(ALL_CFLAGS)) -shared $(LDFLAGS) -Wl,-soname,$(SONAME),--version-script=src/lib/fdsl.map,-z,defs,--as-needed,--disable-new-dtags,-rpath,'$$ORIGIN' \
	  -o $@ $< $(filter -l%,$(LIB_INIH)) $(LIB_LIBS) -lpthread -ldl -lm \
	  $(if $(call on,CUDA),$(filter-out -lcudadevrt -lstdc++,$(CUDA_LIBS)) -Wl$(comma)-Bstatic -lstdc++ -Wl$(comma)-Bdynamic) -static-libgcc

$(BUILD)/lib/libfdsl.so: $(BUILD)/lib/$(SONAME)
	$(Q)ln -sf $(SONAME) $@

wheel: lib
	@scripts/packaging/wheel.py $(BUILD)/lib/libfdsl.so $(VERSION)

# Tests link only the objects that they use from this archive. That is faster than linking all objects.
$(BUILD)/objects.a: $(filter-out $(BUILD)/src/main.c.o,$(OBJECTS)) $(BUILD)/flags-link
	$(say) AR $@
	$(Q)rm -f $@ && $(AR) rcsT $@ $(filter %.o,$^)

# gold links a suite in a third of the time that ld takes. Criterion starts the suite once per test, which takes less time
# without the libraries that the suite does not use.
TEST_LDFLAGS ?= $(if $(call program,ld.gold),-fuse-ld=gold) -Wl,--as-needed
# -O0 compiles fastest. Two suites compute millions of permutations and orders themselves.
$(BUILD)/tests/test_permutation.o: private test_level := -O2
$(BUILD)/tests/test_stream.o: private test_level := -O1
ifeq ($(SAN),1)
# UBSan checks the program and the library. ASan also checks what the suites read and write. As calls instead of inline code,
# these checks compile in half the time.
$(TESTS:=.o): private SAN_FLAGS := -fsanitize=address --param asan-instrumentation-with-call-threshold=0 -fno-omit-frame-pointer
endif
$(TESTS:=.o): $(BUILD)/tests/%.o: tests/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(say) CC $@
	$(Q)$(CC) $(ALL_CFLAGS) $(or $(test_level),-O0) $(ALL_CPPFLAGS) -Itests -MMD -MP -c -o $@ $<
$(TESTS): %: %.o $(BUILD)/objects.a $(BUILD)/flags-link
	$(say) LD $@
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) $(TEST_LDFLAGS) -o $@ $@.o $(BUILD)/objects.a -lcriterion $(ALL_LDLIBS)

LIB_TESTS := $(filter $(BUILD)/tests/test_lib%,$(TESTS))
# The suites of the library are linked with libfdsl.so, like a user's program.
$(LIB_TESTS): $(BUILD)/lib/libfdsl.so $(BUILD)/lib/libfdsl.a
$(LIB_TESTS): private ALL_LDLIBS := -L$(abspath $(BUILD)/lib) -lfdsl -Wl,-rpath,$(abspath $(BUILD)/lib) $(ALL_LDLIBS)

$(BUILD)/tests/gpu_lib: $(BUILD)/lib/libfdsl.so
$(BUILD)/tests/gpu_lib: private ALL_LDLIBS := -L$(abspath $(BUILD)/lib) -lfdsl -Wl,-rpath,$(abspath $(BUILD)/lib) $(ALL_LDLIBS)

$(BUILD)/tests/gpu_lib_rows: $(BUILD)/lib/libfdsl.so
$(BUILD)/tests/gpu_lib_rows: private ALL_LDLIBS := -L$(abspath $(BUILD)/lib) -lfdsl -Wl,-rpath,$(abspath $(BUILD)/lib) $(ALL_LDLIBS)

# The examples of docs/library.md
EXAMPLES := $(BUILD)/examples/generate $(BUILD)/examples/stream $(if $(call on,CUDA),$(BUILD)/examples/replay)
$(BUILD)/examples/%: docs/examples/%.c $(BUILD)/lib/libfdsl.so
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(ALL_CFLAGS) -Isrc/lib -o $@ $< -L$(BUILD)/lib -lfdsl -Wl,-rpath,$(abspath $(BUILD)/lib)
$(BUILD)/examples/%: docs/examples/%.cu $(BUILD)/lib/libfdsl.so
	@mkdir -p $(@D)
	$(say) NVCC $@
	$(Q)$(NVCC) $(GENCODE) -Isrc/lib -o $@ $< -L$(BUILD)/lib -lfdsl -Xlinker -rpath=$(abspath $(BUILD)/lib)

# Only tests use libarchive, to read shards written by fdsl-bench.
$(BUILD)/tests/test_tar.o $(BUILD)/tests/test_prepare.o: private ALL_CPPFLAGS += $(if $(call on,ARCHIVE),-DHAVE_ARCHIVE=1)
$(BUILD)/tests/test_tar $(BUILD)/tests/test_prepare: private ALL_LDLIBS += $(if $(call on,ARCHIVE),-larchive)

$(GPU_TESTS:=.o): $(BUILD)/tests/%.o: tests/%.cu $(BUILD)/flags-nvcc
	@mkdir -p $(@D)
	$(say) NVCC $@
	$(Q)$(NVCC) $(cuda_language) $(ALL_NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<
$(GPU_TESTS): %: %.o $(BUILD)/objects.a
	$(say) LD $@
	$(Q)$(CC) $(ALL_CFLAGS) $(LDFLAGS) -o $@ $@.o $(BUILD)/objects.a $(ALL_LDLIBS)

-include $(OBJECTS:.o=.d) $(LIB_OBJECTS:.o=.d) $(TESTS:=.d) $(GPU_TESTS:=.d)

# --- bench and check -------------------------------------------------------------------------------------------

# packages.sh installs packages first. A separate make then builds, so that it finds newly installed packages.
inner = --no-print-directory --output-sync=target

# Not empty if this machine has an NVIDIA GPU: files of the driver (WSL has /dev/dxg, Jetson nvhost-gpu), or the answer of
# nvidia-smi if a container hides these files.
GPUS = $(or $(wildcard /dev/nvidia[0-9]* /proc/driver/nvidia/gpus/* /dev/dxg /dev/nvhost-gpu),$(shell nvidia-smi -L 2>/dev/null))
# Without a GPU, bench builds no kernels, which could not run here, unless CUDA=1 is given.
bench_parts = $(if $(filter file,$(origin CUDA)),$(if $(and $(NVCC),$(if $(GPUS),,none)),CUDA=0))
bench:
	@MAKE_GOAL=bench scripts/setup/packages.sh build
	@parts='$(bench_parts)'; [ -z "$$parts" ] || \
	  echo 'no NVIDIA GPU here: building without CUDA; to build the GPU variants too, run: make bench CUDA=1'; \
	  $(MAKE) $(inner) all $$parts
	@scripts/sweep/bench.sh

check:
	@scripts/setup/packages.sh check
	@$(MAKE) $(inner) all $(if $(filter 1,$(SAN)),$$(scripts/check/run.sh --list $(BUILD) 1),tests)
	@FDSL_BENCH=$(abspath $(PROGRAM)) scripts/check/run.sh $(BUILD) $(SAN)

check-gpu: all lib $(GPU_TESTS)
	@scripts/check/gpu.sh
	@scripts/check/profile_gpu.sh
	@PYTHONPATH=python FDSL_LIBRARY=$(abspath $(BUILD)/lib/libfdsl.so) python3 -m pytest -s python/tests/test_gpu.py python/tests/test_gpu_full.py python/tests/test_gpu_loader.py python/tests/test_trainer_gpu.py
	@for engine in cuda tf32 bf16 amp vit vit-amp resnet resnet-amp; do scripts/check/train_gpu.sh --engine $$engine || exit; done

# Runs only the tests of the Python package, with the interpreter PYTHON. If it has no PyTorch 2.1 or newer, installs one in
# build/python.
check-python: all lib
	@scripts/check/python.sh --torch $(BUILD)/lib/libfdsl.so

check-slurm:
	@scripts/setup/packages.sh check-slurm
	@$(MAKE) $(inner) all
	@FDSL_BENCH=$(abspath $(PROGRAM)) tests/slurm_local.sh

# SKIP=REGEX leaves out suites (scripts/check/run.sh).
CHOSEN_TESTS = $(if $(value SKIP),$(shell SKIP='$(value SKIP)' scripts/check/run.sh --list $(BUILD) $(SAN))$(if $(filter-out 0,$(.SHELLSTATUS)),$(error scripts/check/run.sh --list failed)),$(TESTS))
tests: $(CHOSEN_TESTS) $(GPU_TESTS) $(EXAMPLES)

# Builds one program from the parsers and the files that they use. clang compiles it with coverage and sanitizers.
FUZZ_CC      ?= $(firstword $(shell command -v clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14))
FUZZ_SOURCES  = tests/fuzz/fuzz.c src/data/s3.c src/data/checksum.c src/data/checksum_avx2.c src/data/remote_cache.c src/data/jpeg_image.c src/data/resample.c src/data/image.c src/data/tar.c src/data/members.c src/data/npy.c src/data/labelled_files.c \
                src/data/index.c src/data/png_image.c src/data/webp_image.c src/data/tensor_file.c \
                src/data/torch_file.c src/core/file.c \
                src/core/record.c src/core/status.c src/core/text.c src/machine/env.c src/machine/host.c src/core/axes.c src/core/options.c \
                src/synth/class.c src/synth/classes_cfg.S src/synth/lines.c $(wildcard src/synth/published*.c src/synth/ifs*.c) src/core/parallel.c \
                $(shell grep -l '^const struct formula formula_' src/synth/*.c) src/train/checkpoint.c src/train/model.c \
                src/data/set_stream.c src/data/set_stream_load.c src/data/set_files.c src/data/dataset.c src/data/dataset_files.c src/data/dataset_list.c \
                src/data/remote.c src/data/http.c src/data/plain_reader.c src/data/label_names.c src/machine/guard.c \
                src/data/jitter.c src/data/mixing.c src/data/rand_augment.c src/data/mds.c src/data/embeddings.c
fuzz: $(PROGRAM)
	$(if $(FUZZ_CC),,$(error make fuzz needs clang and its libFuzzer: apt install clang libclang-rt-dev))
	@mkdir -p $(BUILD)
	$(say) LD $(BUILD)/fuzz-targets
	$(Q)$(FUZZ_CC) -std=gnu11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(ALL_CPPFLAGS) -Itests/fuzz \
	  -o $(BUILD)/fuzz-targets $(sort $(FUZZ_SOURCES)) $(ALL_LDLIBS)
	@FDSL_BENCH=$(abspath $(PROGRAM)) scripts/check/fuzz.sh $(BUILD)/fuzz-targets $(FUZZ_TARGETS)

# For scripts/check/threads.sh
$(BUILD)/fuzz-files: tests/fuzz/fuzz.c tests/fuzz/stream.h tests/fuzz/targets.h $(BUILD)/objects.a $(BUILD)/flags-link
	$(say) LD $@
	$(Q)$(CC) $(ALL_CFLAGS) $(ALL_CPPFLAGS) -DFUZZ_FILES -Itests/fuzz $(LDFLAGS) -o $@ $< $(BUILD)/objects.a $(ALL_LDLIBS)

lint:
	@scripts/check/lint.sh

format:
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cu' '*.cuh')

plots:
	@scripts/setup/packages.sh plots
	@scripts/figures/draw.py

report:
	@scripts/setup/packages.sh plots
	@scripts/figures/report.py

# $(call fill,FILE,TARGET) replaces @NAME@ in scripts/packaging/FILE.in and installs the result as TARGET.
LIBS_PRIVATE = $(filter -l%,$(LIB_INIH)) $(LIB_LIBS) -lpthread -ldl -lm $(CUDA_LIBS)
fill = sed 's|@PREFIX@|$(PREFIX)|g; s|@LIBDIR@|$(LIBDIR)|g; s|@VERSION@|$(VERSION)|g; s|@PREFIX_FROM_PC@|$(shell realpath -m --relative-to=$(LIBDIR)/pkgconfig $(PREFIX))|g; \
         s|@LIBS_PRIVATE@|$(strip $(LIBS_PRIVATE))|g; s|@LIBS_LIST@|$(subst $(space),;,$(strip $(LIBS_PRIVATE)))|g' \
         scripts/packaging/$(1).in > $(BUILD)/$(1) && install -D -m 644 $(BUILD)/$(1) "$(DESTDIR)$(2)"
install: all lib
	@$(MAKE) $(inner) install-files

# Copies the files of `make install` without building them.
install-files:
	$(if $(filter-out /%,$(PREFIX) $(LIBDIR)),$(error PREFIX=$(PREFIX) LIBDIR=$(LIBDIR): give absolute paths))
	install -D -m 755 $(PROGRAM) "$(DESTDIR)$(PREFIX)/bin/fdsl-bench"
	install -D -m 755 $(BUILD)/lib/$(SONAME) "$(DESTDIR)$(LIBDIR)/libfdsl.so.$(VERSION)"
	ln -sf libfdsl.so.$(VERSION) "$(DESTDIR)$(LIBDIR)/$(SONAME)"
	ln -sf $(SONAME) "$(DESTDIR)$(LIBDIR)/libfdsl.so"
	install -D -m 644 $(BUILD)/lib/libfdsl.a "$(DESTDIR)$(LIBDIR)/libfdsl.a"
	install -D -m 644 src/lib/fdsl.h "$(DESTDIR)$(PREFIX)/include/fdsl.h"
	$(call fill,fdsl.pc,$(LIBDIR)/pkgconfig/fdsl.pc)
	$(call fill,fdslConfig.cmake,$(LIBDIR)/cmake/fdsl/fdslConfig.cmake)
	$(call fill,fdslConfigVersion.cmake,$(LIBDIR)/cmake/fdsl/fdslConfigVersion.cmake)
	$(call fill,module.lua,$(PREFIX)/share/modulefiles/fdsl-bench/$(VERSION).lua)
	scripts/packaging/man.sh ./$(PROGRAM) $(VERSION) > $(BUILD)/fdsl-bench.1
	scripts/packaging/man_library.py $(VERSION) > $(BUILD)/fdsl.3
	install -D -m 644 $(BUILD)/fdsl-bench.1 "$(DESTDIR)$(PREFIX)/share/man/man1/fdsl-bench.1"
	install -D -m 644 $(BUILD)/fdsl.3 "$(DESTDIR)$(PREFIX)/share/man/man3/fdsl.3"
	install -D -m 644 scripts/packaging/completion.bash "$(DESTDIR)$(PREFIX)/share/bash-completion/completions/fdsl-bench"
	bash scripts/packaging/completion.bash zsh > $(BUILD)/_fdsl-bench
	bash scripts/packaging/completion.bash fish > $(BUILD)/fdsl-bench.fish
	install -D -m 644 $(BUILD)/_fdsl-bench "$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_fdsl-bench"
	install -D -m 644 $(BUILD)/fdsl-bench.fish "$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/fdsl-bench.fish"
	install -D -m 644 LICENSE "$(DESTDIR)$(PREFIX)/share/doc/fdsl-bench/LICENSE"
	scripts/packaging/notice.py $(BUILD)/lib/libfdsl.so > $(BUILD)/NOTICE
	install -D -m 644 $(BUILD)/NOTICE "$(DESTDIR)$(PREFIX)/share/doc/fdsl-bench/NOTICE"

# Builds for all supported GPU architectures in build/dist, and archives the files of make install as one folder.
DIST = fdsl-bench-$(VERSION)-$(shell uname -m)
dist:
	@rm -rf build/dist/root
	@$(MAKE) $(inner) install BUILD=build/dist PROGRAM=build/dist/fdsl-bench CUDA_ARCHS=all DESTDIR=build/dist/root PREFIX=/$(DIST)
	@install -m 644 LICENSE README.md build/dist/root/$(DIST)
	@mkdir -p dist
	@tar -czf dist/$(DIST).tar.gz -C build/dist/root $(DIST)
	@ls -l dist/$(DIST).tar.gz

help:
	@sed -n '/^#/!q; s/^#$$//p; s/^# //p' Makefile

clean:
	rm -rf build dist fdsl-bench
