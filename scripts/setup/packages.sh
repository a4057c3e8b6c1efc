#!/usr/bin/env bash
# Installs the packages that are missing to build or check fdsl-bench, or to draw its figures. Silent and fast if
# nothing is missing.
#
#   scripts/setup/packages.sh build         a C compiler, make, git and the libraries of the optional features
#   scripts/setup/packages.sh check         packages of build, and those for the tests
#   scripts/setup/packages.sh check-slurm   packages of build, and Slurm
#   scripts/setup/packages.sh plots         the packages for the figures
#   --quiet      no notes about optional packages
#   SETUP=0      installs nothing: reports what is missing and continues if possible (make bench SETUP=0)
#
# Does not install tools that only scripts in scripts/compare or scripts/packaging need. These scripts report a missing
# tool, such as fio (fio.sh), nginx (remote.sh), PyTorch (loading.py, pytorch.py and others) and pyarrow
# (metadata_parquet.py; Debian has no package: pip install pyarrow).
#
# Installs packages with apt-get or dnf, as root or through passwordless sudo. If these rights are missing, prints
# the command to run. Tools found through CC, CPATH or PATH count as installed. CUDA and cuDNN are never installed.
#
# Only train-cudnn and train-cudnn-tf32 need cuDNN. To build them, the header of cuDNN must be in CUDA's include folder or in
# /usr/include (NVIDIA's package libcudnn9-dev-cuda-13). To run them, libcudnn.so.9 must be found. PyTorch's copy works
# too: LD_LIBRARY_PATH=.../site-packages/nvidia/cudnn/lib.
#
# Exit status: 0 if the build (check, plots) can continue, 2 usage, 4 if a required package is missing.
set -u

# purpose, need, probe (a command, a path, a header *.h, a font *.ttf, or python3/MODULE), Debian package, Fedora package, description
requirements='
build must cc                    gcc             gcc               compiler
build must stdio.h               libc6-dev       glibc-devel       C library
build must make                  make            make              build
build may  git                   git             git               revision in results
build may  hwloc.h               libhwloc-dev    hwloc-devel       cores and placement
build may  png.h                 libpng-dev      libpng-devel      PNG files
build may  jpeglib.h             libjpeg-dev     libjpeg-turbo-devel JPEG files
build may  webp/decode.h         libwebp-dev     libwebp-devel     WebP files
build may  curl/curl.h           libcurl4-openssl-dev libcurl-devel data sets at URLs
build may  expat.h               libexpat1-dev   expat-devel       lists of objects on S3 and Azure
build may  jansson.h             libjansson-dev  jansson-devel     JSON and .safetensors files
build may  xxhash.h              libxxhash-dev   xxhash-devel      hashes
build may  zlib.h                zlib1g-dev      zlib-devel        gzipped data sets
build may  zstd.h                libzstd-dev     libzstd-devel     shards that zstd compressed
build may  openssl/evp.h         libssl-dev      openssl-devel     md5 of shards, signatures for S3
build may  liburing.h            liburing-dev    liburing-devel    reading with io_uring
build may  ini.h                 libinih-dev     inih-devel        configuration files
build may  mpicc                 libopenmpi-dev  openmpi-devel     several ranks
build may  mpirun                openmpi-bin     openmpi           several ranks
cuda  may  g++                   g++             gcc-c++           host side of CUDA files
check must criterion/criterion.h libcriterion-dev criterion-devel  unit tests
check may  clang-format          clang-format    clang-tools-extra format check
check may  cppcheck              cppcheck        cppcheck          static analysis
check may  archive.h             libarchive-dev  libarchive-devel  tests of tar files
check may  python3               python3         python3           command-line tests
check may  python3/numpy         python3-numpy   python3-numpy     tests of the Python package
check may  python3/pytest        python3-pytest  python3-pytest    tests of the Python package
check may  python3/ensurepip     python3-venv    python3-libs      tests of the Python package
check may  aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu gcc-aarch64-linux-gnu build for aarch64
check may  /usr/aarch64-linux-gnu/lib/libc.so libc6-dev-arm64-cross glibc-arm-linux-gnu build for aarch64
check-slurm must sbatch    slurm-client    slurm             commands of Slurm
check-slurm must slurmctld slurmctld       slurm-slurmctld   Slurm controller
check-slurm must slurmd    slurmd          slurm-slurmd      Slurm nodes
check-slurm must munged    munge           munge             Slurm authentication
check may  gnuplot               gnuplot-nox     gnuplot           figures
check may  DejaVuSans.ttf        fonts-dejavu-core dejavu-sans-fonts font of the figures
plots must python3               python3         python3           reading rows
plots must gnuplot               gnuplot-nox     gnuplot           figures
plots may  DejaVuSans.ttf        fonts-dejavu-core dejavu-sans-fonts font of the figures
'

notes="${BASH_SOURCE[0]%/*}/../../build/setup-notes" # printed notes and unavailable packages, one per line
quiet=
PATH=$PATH:/usr/sbin # for daemons

say()
{
    printf 'setup: %s\n' "$*" >&2
}

noted()
{
    [[ -f $notes ]] && grep -qxF -- "$1" "$notes"
}

remember()
{
    # If the tree is read-only, the note is printed again next time.
    { mkdir -p "${notes%/*}" && printf '%s\n' "$1" >>"$notes"; } 2>/dev/null
}

say_once()
{
    [[ $quiet ]] || noted "$1" || { say "$1" && remember "$1"; }
}

find_nvcc()
{
    command -v nvcc >/dev/null || [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]] || [[ -x /usr/local/cuda/bin/nvcc ]]
}

find_font()
{
    [[ $(find /usr/share/fonts /usr/local/share/fonts ~/.fonts ~/.local/share/fonts -name "$1" -print -quit 2>/dev/null) ]]
}

find_module() # succeeds if the python3 in PATH or /usr/bin/python3 has this module
{
    local python
    for python in python3 /usr/bin/python3; do
        "$python" -c "import $1" 2>/dev/null && return
    done
}

find_compiler()
{
    local candidate
    compiler=
    for candidate in "${CC:-}" cc gcc clang; do
        command -v "${candidate%% *}" >/dev/null && compiler=$candidate && return
    done
}

# Runs the preprocessor once for all headers; prints those that exist, one per line.
find_headers()
{
    local purpose need probe rest
    while read -r purpose need probe rest; do
        [[ $probe == *.h ]] && printf '#if __has_include(<%s>)\n%s\n#endif\n' "$probe" "$probe"
    done <<<"$requirements" | eval "$compiler -E -P -" 2>/dev/null
}

# Fills must[] and may[] (missing packages), and reasons[] ("package (purpose)").
find_missing()
{
    local headers='' purpose need probe debian fedora what package
    must=() may=() reasons=()
    find_compiler
    [[ $compiler ]] && headers=$(find_headers)
    while read -r purpose need probe debian fedora what; do
        case $purpose in
        build) [[ $goal != plots ]] || continue ;;
        check | check-slurm | plots) [[ $goal == "$purpose" ]] || continue ;;
        cuda) [[ $goal != plots ]] || continue
            find_nvcc || continue ;;
        *) continue ;;
        esac
        case $probe in
        cc) [[ $compiler ]] && continue ;;
        /*) [[ -e $probe ]] && continue ;;
        python3/*) find_module "${probe#*/}" && continue ;;
        *.ttf) find_font "$probe" && continue ;;
        *.h) [[ $'\n'$headers$'\n' == *$'\n'$probe$'\n'* ]] && continue ;;
        *) command -v "$probe" >/dev/null && continue ;;
        esac
        package=$debian
        [[ $manager == dnf ]] && package=$fedora
        if [[ $need == must ]]; then
            must+=("$package")
        else
            noted "unavailable: $package" && continue
            may+=("$package")
        fi
        reasons+=("$package ($what)")
    done <<<"$requirements"
}

find_manager()
{
    manager='' update=''
    if command -v apt-get >/dev/null; then
        manager=apt
        update='apt-get update && '
        install=(apt-get install -y --no-install-recommends)
    elif command -v dnf >/dev/null; then
        manager=dnf
        install=(dnf install -y --setopt=install_weak_deps=False)
    fi
}

# Sets as_root, the prefix of commands that need root; fails if root is not available.
find_root()
{
    as_root=(env DEBIAN_FRONTEND=noninteractive)
    ((EUID == 0)) && return
    as_root=(sudo -n "${as_root[@]}")
    command -v sudo >/dev/null && sudo -n true 2>/dev/null
}

join()
{
    local text
    printf -v text '%s, ' "$@"
    printf '%s' "${text%, }"
}

# Runs a command as root with its output in $log.
run()
{
    local options=()
    # Wait for other apt processes, and treat lists that cannot be fetched as failures.
    [[ $1 == apt-get ]] && options=(-o DPkg::Lock::Timeout=120 -o APT::Update::Error-Mode=any)
    "${as_root[@]}" "$@" "${options[@]}" >"$log" 2>&1 </dev/null
}

# say_why status remedy command...: reports why a command failed
say_why()
{
    local status=$1 remedy=$2 why
    shift 2
    why=$(grep -E '^(E|W|Error|error):? ' "$log" | head -n 1)
    say "'$*' failed with status $status: ${why:-$(tail -n 1 "$log")}; $remedy"
}

# Installs all packages at once. If that fails, updates the lists of apt-get and tries again. If that fails too, installs
# them one by one, so that a package that this distribution lacks does not block the others.
install_packages()
{
    local package
    run "${install[@]}" "$@" && return
    if [[ $manager == apt ]]; then
        run apt-get update || say_why $? 'check the network, its proxy and /etc/apt/sources.list*' apt-get update
        run "${install[@]}" "$@" && return
    fi
    for package in "$@"; do
        run "${install[@]}" "$package" || say_why $? 'run it by hand to see more' "${install[@]}" "$package"
    done
}

# Reports the packages in "$@" instead of installing them.
ask_for()
{
    local request
    request="missing: $(join "${reasons[@]}"); "
    if [[ $manager ]]; then
        request+="to install them, run as root: $update${install[*]} $*"
    else
        request+='neither apt-get nor dnf is here: install these packages; their names may differ on this system'
    fi
    if ((${#must[@]})); then
        say "$request"
    else
        say_once "$request"
    fi
}

supply()
{
    local wanted=("${must[@]}" "${may[@]}") package
    ((${#wanted[@]})) || return
    if [[ ${SETUP:-1} == 0 || ! $manager ]] || ! find_root; then
        ask_for "${wanted[@]}"
        return
    fi
    say "missing to ${goal%s}: $(join "${reasons[@]}")"
    say "installing as root, with ${install[0]}: ${as_root[*]} ${install[*]} ${wanted[*]}"
    say "to install nothing, interrupt this and run: make ${MAKE_GOAL:-$goal} SETUP=0"
    log=$(mktemp) || exit 1
    trap 'rm -f "$log"' EXIT
    install_packages "${wanted[@]}"
    find_missing
    ((${#may[@]})) || return
    say "not available here: ${may[*]}; continuing without them; 'make clean' makes the next call try again"
    for package in "${may[@]}"; do
        remember "unavailable: $package"
    done
}

usage()
{
    echo "usage: scripts/setup/packages.sh [--quiet] build|check|check-slurm|plots"
}

goal=
for argument in "$@"; do
    case $argument in
    build | check | check-slurm | plots) goal=$argument ;;
    --quiet) quiet=1 ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) usage >&2 && exit 2 ;;
    esac
done
[[ $goal ]] || { usage >&2 && exit 2; }

find_manager
find_missing
supply
[[ $goal == plots ]] || find_nvcc || say_once "no nvcc: GPU variants are not built; to build them, install the CUDA toolkit (12.1 or later, \
https://developer.nvidia.com/cuda-downloads) and put nvcc on the PATH or set CUDA_HOME"
if ((${#must[@]})); then
    say "cannot ${goal%s} without ${must[*]}"
    exit 4
fi
