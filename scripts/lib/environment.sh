# Sourced by the scripts: finds a Python of 3.11 or later, makes the environment, sets PYTHON to its interpreter.
# STALLOC_PYTHON names the Python to use in place of the first one found.

stalloc_find_python() {
    local candidate
    for candidate in ${STALLOC_PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        # a version manager's stand-in may exist and still fail, so each is tried
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${STALLOC_PYTHON:-}" ]; then
        echo "STALLOC_PYTHON is $STALLOC_PYTHON, which is no Python of 3.11 or later that runs." >&2
    else
        echo "No Python of 3.11 or later runs here: install one, or name one in STALLOC_PYTHON." >&2
    fi
    return 2
}

stalloc_base=$(stalloc_find_python)
stalloc_variables=$("$stalloc_base" "$(dirname "${BASH_SOURCE[0]}")/environment.py")
eval "$stalloc_variables"
