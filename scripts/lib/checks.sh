# The checks that are no tests, in one place: scripts/test, scripts/check, scripts/docs and .pre-commit-config.yaml use them.

checks=("ruff check" "ruff format" "shellcheck" "mypy" "documentation")

# perform CHECK: run one of them with what .venv holds; its status is whether all is well.
perform() {
    case $1 in
    "ruff check") .venv/bin/ruff check ;;
    "ruff format") .venv/bin/ruff format --check ;;
    "shellcheck") .venv/bin/shellcheck examples/launch/*.{lsf,pbs,sbatch,sh} ;;
    "mypy") .venv/bin/mypy ;;
    "documentation") .venv/bin/python -m sphinx -W --keep-going -q -E -d out/docs/.trees docs out/docs ;;
    *) echo "no check $1; there are: ${checks[*]}" >&2 && return 2 ;;
    esac
}
