#!/bin/sh
# Build Horovod for the torch and TensorFlow of a virtual environment, and install it there.
# Usage: tools/build_horovod.sh VENV [--if-possible | --if-kept]
#
# Takes two to four minutes on two cores, once: the wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/raysgd/horovod, under a key
# of all that it was built for. Needs a C++17 compiler. With --if-possible, a machine that has none prints so and nothing else.
# With --if-kept nothing is built: a wheel that was built for this torch is installed, also in an environment without the
# TensorFlow that it was built for.
#
# Horovod 0.28.1 is the last release. Its sources build as they are, with current tools, given three things:
# - C++17 where it asks for C++11 or 14: torch's headers refuse less. Hence a compiler that is a script.
# - CMAKE_POLICY_VERSION_MINIMUM: CMake 4 refuses the policies of 2016 that its copy of gloo asks for.
# - its XLA operations left out: they include headers that TensorFlow does not ship any more. They are for old versions.
set -eu
venv=$(cd "$1" && pwd)
option=${2:-}
version=0.28.1
python=$venv/bin/python
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}

give_up() {
    echo "Horovod: $1" >&2
    [ "$option" = --if-possible ] && exit 0
    exit 1
}

made_for=$("$python" - <<'EOF'
import importlib.metadata, platform, sys
names = [sys.implementation.cache_tag, platform.machine()]
for package in ("torch", "tensorflow"):
    try:
        names.append(package + importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        names.append("no-" + package)
print("-".join(names).replace("+", "_"))
EOF
)
case $made_for in *no-torch*) give_up "there is no torch in $venv to build it for" ;; esac
folder=${XDG_CACHE_HOME:-$HOME/.cache}/raysgd/horovod
script=$(cksum <"$0" | cut -d ' ' -f 1)
kept=$folder/$version-$made_for-$script

if [ "$option" = --if-kept ] && ! ls "$kept"/horovod-*.whl >/dev/null 2>&1; then
    kept=$(ls -d "$folder/$version-${made_for%-no-tensorflow}"-*"-$script" 2>/dev/null | tail -n 1)
    ls "${kept:-$folder/none}"/horovod-*.whl >/dev/null 2>&1 || exit 0
fi

if ! ls "$kept"/horovod-*.whl >/dev/null 2>&1; then
    command -v c++ >/dev/null || give_up "not built, since there is no C++ compiler (c++) on the PATH"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/bin"

    cat >"$work/bin/c++17" <<'EOF'
#!/bin/bash
given=()
for one in "$@"; do
    case $one in
        -std=c++11 | -std=c++14 | -std=gnu++11 | -std=gnu++14) given+=(-std=c++17) ;;
        -g) ;; # nobody debugs it here, and it takes half the time
        */xla_mpi_ops.cc) given+=(-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000 "$one") ;;
        *) given+=("$one") ;;
    esac
done
exec c++ "${given[@]}"
EOF
    chmod +x "$work/bin/c++17"

    echo "Horovod $version: building it for $made_for (a few minutes, once)"
    if ! command -v cmake >/dev/null; then
        "$python" -m pip install -qq --disable-pip-version-check --target "$work/cmake" cmake
        PATH=$work/cmake/bin:$PATH
        export PYTHONPATH="$work/cmake"
    fi
    case $made_for in
        *no-tensorflow*) export HOROVOD_WITHOUT_TENSORFLOW=1 ;;
        *) export HOROVOD_WITH_TENSORFLOW=1 ;;
    esac
    # No cache of pip's: it would take a wheel that was built for another torch.
    if ! PATH=$venv/bin:$PATH CXX=$work/bin/c++17 MAKEFLAGS=-j$jobs CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 \
        HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO \
        "$python" -m pip wheel --disable-pip-version-check --no-cache-dir --no-deps --no-build-isolation \
        --no-binary horovod --wheel-dir "$work" "horovod==$version" >"$work/log" 2>&1; then
        tail -n 30 "$work/log" >&2
        give_up "it could not be built; the end of the log is above"
    fi
    mkdir -p "$kept"
    mv "$work"/horovod-*.whl "$kept/"
fi

"$python" -m pip install -qq --disable-pip-version-check cffi psutil pyyaml packaging cloudpickle
"$python" -m pip install -qq --disable-pip-version-check --no-index --no-deps --force-reinstall "$kept"/horovod-*.whl
echo "Horovod $version: installed, for $made_for"
