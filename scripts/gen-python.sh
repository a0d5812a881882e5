#!/bin/sh
# Writes python-client/src/boxwood/_proto from proto/ with pinned tools. The same
# input gives the same bytes; `make verify-generated` depends on it. The tools live
# in an environment of their own below .cache/, made at the first run.
#
# The oldest tools are used whose output all supported runtimes read: gencode of
# protobuf 5.27, grpc 1.66. protobuf runtimes refuse gencode two major versions
# older than themselves by a check in the generated file, although its format has
# not changed since 4.21; the check is taken out below. The tests run with the
# runtime that scripts/requirements.txt pins; `make test-python-matrix` runs them with
# the oldest that are declared.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
# Where it stays, also for a copy of the checkout whose .cache is a link: an environment holds absolute paths.
env=$(realpath -m "$here/.cache/gen-python")
out="$here/python-client/src/boxwood/_proto"
pins="grpcio-tools==1.66.2 grpcio==1.66.2 protobuf==5.27.2 mypy-protobuf==3.6.0 types-protobuf==5.27.0.20240626 setuptools==75.1.0"

stamp="$pins in $env"
if [ "$(cat "$env/pins" 2>/dev/null || true)" != "$stamp" ]; then
    rm -rf "$env"
    python3 -m venv "$env"
    # shellcheck disable=SC2086 # one word a pin
    "$env/bin/pip" --quiet --disable-pip-version-check install $pins
    printf '%s' "$stamp" >"$env/pins"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/out"
PATH="$env/bin:$PATH" "$env/bin/python" -m grpc_tools.protoc \
    -I "$here/proto" -I "$here/python-client/proto" \
    --python_out="$work/out" --grpc_python_out="$work/out" \
    --mypy_out=quiet:"$work/out" --mypy_grpc_out=quiet:"$work/out" \
    boxwood/v1/boxwood.proto boxwood/client/v1/status.proto
find "$work/out" -name 'status_pb2_grpc.*' -delete

# One flat private package, whatever folders the .proto files lie in. Their names in
# protobuf's registry stay as they are, so that someone's own stubs of the same
# file can live in the same process.
"$env/bin/python" - "$work/out" <<'PY'
import pathlib, re, sys

for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.py*")):
    text = path.read_text()
    text = re.sub(r"^from boxwood(?:\.\w+)+ import (\w+_pb2)", r"from . import \1", text, flags=re.M)
    text = re.sub(r"^import boxwood(?:\.\w+)*\.(\w+_pb2)$", r"from . import \1", text, flags=re.M)
    text = re.sub(r"\bboxwood(?:\.client)?\.v1\.(\w+_pb2)\b(?!')", r"\1", text)
    text = re.sub(r"'boxwood(?:\.client)?\.v1\.(\w+_pb2)'", r"'boxwood._proto.\1'", text)
    text = re.sub(r"^from google\.protobuf import runtime_version .*\n", "", text, flags=re.M)
    text = re.sub(
        r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?:.*\n)*?\)\n", "", text, flags=re.M
    )
    path.write_text(text)
PY

mkdir -p "$out"
rm -f "$out"/*_pb2*
find "$work/out" -type f -exec cp {} "$out/" \;
