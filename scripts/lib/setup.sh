# Shared by scripts/test and scripts/demo: virtual environments, and the settings for running MPI jobs on one host.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"

# Another MPI, another hvlike or a surrounding launcher named in the caller's environment must not leak in.
unset MPI4PY_LIBMPI MPI4PY_MPIABI OPAL_PREFIX PYTHONPATH PYTHONHOME
# Some images forbid compiled files: each of the many processes would compile hvlike and the tests anew.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 MPLBACKEND=Agg
# Open MPI gives rank 0 a terminal of its own, so programs cannot see that the output goes to a file.
[ -t 1 ] || export NO_COLOR=1

# Open MPI refuses root, and more ranks than cores, unless told otherwise; shared memory alone starts fastest on one host.
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm

say() {
    printf '\n== %s\n' "$*"
}

# fingerprint VENV: changes whenever an installation into VENV would give something else.
fingerprint() {
    { "$1/bin/python" --version && echo "$root" && cat setup.cfg pyproject.toml scripts/constraints.txt; } | sha256sum
}

# installed VENV EXTRA...: true when VENV holds hvlike from this checkout with all these extras.
installed() {
    local venv=$1 extra
    shift
    [ -x "$venv/bin/python" ] || return 1
    for extra; do
        [ "$(cat "$venv/hvlike-$extra" 2>/dev/null)" = "$(fingerprint "$venv")" ] || return 1
    done
}

# install_into VENV THING EXTRA...: make VENV and install a distribution with these extras, unless that was done. What is
# imported of it is compiled then: to compile all takes as long as all else.
install_into() {
    local venv=$1 thing=$2 extra extras
    shift 2
    if installed "$venv" "$@"; then
        say "Using $venv"
        return
    fi
    extras=$(IFS=, && echo "$*")
    say "Installing hvlike[$extras] into $venv (once; PyTorch is a large download)"
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hvlike needs Python 3.10 or newer")' &&
        "${PYTHON:-python3}" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --no-compile --constraint scripts/constraints.txt $editable \
            "$thing[$extras]" || return 1
    for extra; do
        fingerprint "$venv" >"$venv/hvlike-$extra"
    done
}

# environment VENV EXTRA...: a VENV in which hvlike is this checkout, with these extras.
environment() {
    editable=--editable install_into "$1" . "${@:2}"
}

# from_wheel VENV EXTRA...: a VENV in which hvlike is the wheel of this checkout, as a user installs it. It is built from
# the source distribution, with the tools of .venv, every time.
from_wheel() {
    local venv=$1 wheel
    rm -rf out/dist && .venv/bin/python -m build --quiet --no-isolation --outdir out/dist . || return 1
    wheel=$(echo out/dist/*.whl)
    editable="" install_into "$venv" "$wheel" "${@:2}" &&
        "$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
}

# mpi VENV RANKS COMMAND...: run a command of VENV on RANKS ranks of this host, with the MPI that VENV holds.
mpi() {
    local venv=$1 ranks=$2 flags=()
    shift 2
    [ -x "$venv/bin/ompi_info" ] && flags=(--oversubscribe --bind-to none)
    "$venv/bin/mpirun" ${flags[@]+"${flags[@]}"} -n "$ranks" "$venv/bin/$1" "${@:2}"
}
