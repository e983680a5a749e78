#!/bin/sh
# The build stage's work, for both images: `install.sh REQUIREMENTS`, then `install.sh thawline`.
#
# The first fills /opt/thawline with exactly what REQUIREMENTS names, by hash; the second adds
# Thawline's wheel, takes out what no run reads and compiles the rest, since a user who may not
# write there would otherwise compile every module at every start.
set -eu
venv=/opt/thawline
uv=/opt/uv/bin/uv
export UV_NO_CACHE=1 UV_PYTHON="$venv/bin/python3" UV_PYTHON_DOWNLOADS=never

# A proxy that signs for the index: `--secret id=certificates,src=FILE`.
if [ -s /run/secrets/certificates ]; then
    export SSL_CERT_FILE=/run/secrets/certificates PIP_CERT=/run/secrets/certificates
fi

if [ "$1" != thawline ]; then
    python3 -m venv /opt/uv
    /opt/uv/bin/python3 -m pip install --quiet --no-cache-dir --no-deps --require-hashes \
        --requirement requirements-build.txt
    python3 -m venv --without-pip "$venv"
    # kfp comes as source: it is built by the setuptools that the build requirements pin by hash.
    $uv pip sync --quiet --require-hashes --build-constraints requirements-build.txt \
        --find-links /wheels ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} "$1"
    exit
fi

$uv build --quiet --wheel --require-hashes --build-constraints requirements-build.txt --out-dir /wheel .
$uv pip install --quiet --no-deps --no-index /wheel/*.whl

packages=$(echo "$venv"/lib/python3*/site-packages)
cd "$packages"
# Headers, CMake files and static libraries serve who compiles against a package. Of torch's
# programs only the manager of shared memory is run.
rm -rf torch/include torch/share torch/test pyarrow/include pyarrow/src
find torch/bin -type f ! -name torch_shm_manager -delete
find . -name '*.a' -delete
# Named, since some packages (pyre_extensions) import their tests.
for package in ibis matplotlib numpy pandas pyarrow scipy sklearn sympy; do
    find "$package" -type d -name tests -prune -exec rm -rf {} +
done
# The image's files never change, so that no import need compare a source with its bytecode.
"$venv/bin/python3" -m compileall -q -j 0 --invalidation-mode unchecked-hash -x py312_ .
