#!/usr/bin/env bash
# Downloads the four files of MNIST or Fashion-MNIST and verifies them. Keeps existing valid files.
#
#   scripts/setup/fetch_mnist.sh [--fashion] DIR
#   ./fdsl-bench --workload train --variant all --data DIR      trains on the files
#
# MIRROR=URL: download from this server instead. Exit status: 0 done, 1 a download failed or a file is invalid, 2 usage.
set -u
[[ ${1:-} != -h && ${1:-} != --help ]] || { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0; }

names=(train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz)
# SHA-256 of the MNIST files. The authors of Fashion-MNIST publish MD5 sums instead.
sums=(440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
    3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
    8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
    f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6)
tool=sha256sum
mirror=https://ossci-datasets.s3.amazonaws.com/mnist
if [[ ${1-} == --fashion ]]; then
    shift
    tool=md5sum
    sums=(8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310)
    mirror=http://fashion-mnist.s3-website.eu-central-1.amazonaws.com
fi
mirror=${MIRROR:-$mirror}
[[ $# == 1 && $1 != -* ]] || { echo "usage: scripts/setup/fetch_mnist.sh [--fashion] DIR" >&2 && exit 2; }

fail()
{
    echo "fetch_mnist.sh: $1" >&2
    exit 1
}

is_right() # FILE SUM
{
    [[ -f $1 && $($tool <"$1") == "$2 "* ]]
}

mkdir -p "$1" || exit 1
for i in "${!names[@]}"; do
    file=$1/${names[i]}
    is_right "$file" "${sums[i]}" && continue
    echo "fetching ${names[i]}"
    curl -fL --retry 3 -o "$file.part" "$mirror/${names[i]}" || fail "$mirror/${names[i]} cannot be fetched; set MIRROR to the URL of another server"
    is_right "$file.part" "${sums[i]}" || fail "$file.part is not ${names[i]}: its $tool is not ${sums[i]}; run this script again, or set MIRROR to the URL of another server"
    mv "$file.part" "$file" || exit 1
done
echo "$1 is complete"
