#!/usr/bin/env bash
# Builds the image `cpu` without Docker and without an image registry, and runs a prompt in it as the image's user:
#
#   tests/deploy/build_image.sh DIR [options of buildah bud]
#
# The base image is made of Debian's packages. Needs buildah and debootstrap (`apt-get install buildah debootstrap`), root
# or a user namespace with several ids, and 8 GB in DIR. Options such as --volume reach the build, for example a folder of
# wheels and a pip.conf.
set -euo pipefail
directory=$(realpath -m "$1")
shift
cd "$(dirname "$0")/../.."
mkdir -p "$directory"
export STORAGE_DRIVER=vfs
builder=(buildah --root "$directory/store" --runroot "$directory/run")

if ! "${builder[@]}" inspect --type image localhost/base >/dev/null 2>&1; then
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$directory/base"
    tar -C "$directory/base" -cf "$directory/base.tar" .
    container=$("${builder[@]}" from scratch)
    "${builder[@]}" add "$container" "$directory/base.tar" /
    "${builder[@]}" commit --rm "$container" localhost/base
    rm -rf "$directory/base" "$directory/base.tar"
fi

"${builder[@]}" bud --pull-never --isolation chroot --network host --layers=false \
    --file cluster/cli/provision/container/Dockerfile \
    --ignorefile cluster/cli/provision/container/Dockerfile.dockerignore \
    --target cpu --build-arg BASE=localhost/base --tag quire:cpu "$@" .

container=$("${builder[@]}" from --pull-never localhost/quire:cpu)
trap '"${builder[@]}" rm "$container" >/dev/null' EXIT
"${builder[@]}" run --isolation chroot "$container" -- quire --version
"${builder[@]}" run --isolation chroot "$container" -- id -u | grep -x 10001
"${builder[@]}" run --isolation chroot "$container" -- test -s /usr/share/sbom/quire.cdx.json
"${builder[@]}" run --isolation chroot "$container" -- python3 -c '
from quire import LLM, SamplingParams
from quire.kernels.native.library import is_available
assert is_available(), "the wheel has no C++ ops"
with LLM(model="demo", num_kv_blocks=64) as llm:
    print(llm.generate(["It was"], SamplingParams(max_tokens=8, seed=1))[0].outputs[0].text)
'
echo "the image was built and runs"
